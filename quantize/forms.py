"""The canonical form of a quantized weight, and round to nearest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fastea.config import FasteaError

GROUPS = (128, 64, 32)  # sizes that kernels know


@dataclass(frozen=True)
class Scheme:
    """bits: 8 or 4. group: inputs that share a scale, 0 = the whole row (int8 only). minimum: codes count from a
    minimum of their own (int4 only)."""

    bits: int
    group: int = 0
    minimum: bool = False

    def __post_init__(self) -> None:
        groups = (0, 32) if self.bits == 8 else GROUPS
        if self.bits not in (4, 8) or self.group not in groups or (self.minimum and self.bits == 8):
            raise FasteaError(
                f"the scheme {self.name} is unknown; int8 (in groups of 32 or the whole row) and "
                "int4 (in groups of 32, 64 or 128, symmetric or with minimum) exist"
            )

    @property
    def name(self) -> str:
        group = f" group {self.group}" if self.group else ""
        return f"int{self.bits}{group}{' with minimum' if self.minimum else ''}"

    def fitting(self, inputs: int) -> Scheme:
        """This scheme with the largest group that divides `inputs`, its own at most; 32 (and padding) if none does."""
        if not self.group or inputs % self.group == 0:
            return self
        smaller = [g for g in GROUPS if g < self.group and inputs % g == 0]
        return replace(self, group=max(smaller, default=32))


SCHEMES = {"int8": Scheme(8), "int4": Scheme(4, 32, True)}  # what --quant makes


@dataclass
class QuantizedWeight:
    """One weight in canonical form (see the package's docstring). inputs: K before padding."""

    scheme: Scheme
    inputs: int
    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.inputs

    @property
    def padded(self) -> bool:
        """Whether the codes go on past the inputs."""
        return self.codes.shape[1] * 8 != self.inputs * self.scheme.bits

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.minimum is None else self.minimum.nbytes)

    def unpacked(self) -> torch.Tensor:
        """Codes one by one, int8 or uint8 [N, K']."""
        if self.scheme.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)

    def dequantized(self, rows: torch.Tensor | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, [N, K]; rows: only these outputs, int64. Computed in fp32, a few thousand rows at a time."""
        part = self if rows is None else self.select(rows)
        out = torch.empty(part.shape, dtype=dtype)
        for at in range(0, len(out), 4096):
            some = slice(at, at + 4096)
            out[some] = part.select(some)._values()
        return out

    def _values(self) -> torch.Tensor:
        groups = self.scale.shape[1]
        values = self.unpacked().float().view(self.codes.shape[0], groups, -1)
        if self.scheme.bits == 4 and self.minimum is None:
            values -= 8
        values *= self.scale.float()[..., None]
        if self.minimum is not None:
            values += self.minimum.float()[..., None]
        return values.flatten(1)[:, : self.inputs]

    def select(self, rows: torch.Tensor | slice) -> QuantizedWeight:
        """These outputs, in this order."""
        minimum = None if self.minimum is None else self.minimum[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], minimum=minimum)

    @staticmethod
    def fused(parts: list[QuantizedWeight]) -> QuantizedWeight | None:
        """Parts one below the other along the outputs; None if their schemes differ."""
        first = parts[0]
        if any(p.scheme != first.scheme or p.inputs != first.inputs for p in parts):
            return None
        lows = [p.minimum for p in parts if p.minimum is not None]
        return replace(
            first,
            codes=torch.cat([p.codes for p in parts]),
            scale=torch.cat([p.scale for p in parts]),
            minimum=torch.cat(lows) if lows else None,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is stored, by suffix."""
        stored = {"codes": self.codes, "scale": self.scale}
        return stored if self.minimum is None else stored | {"minimum": self.minimum}

    def check(self, where: str) -> QuantizedWeight:
        """self, if its tensors fit the scheme and each other; else FasteaError names what does not."""
        rows, bits = self.codes.shape[0], self.scheme.bits
        width = self.scheme.group or self.inputs
        groups = -(-self.inputs // width)
        expected = {"codes": (rows, groups * width * bits // 8), "scale": (rows, groups)}
        kinds = {"codes": torch.int8 if bits == 8 else torch.uint8}
        if self.scheme.minimum:
            expected["minimum"] = (rows, groups)
        stored = self.tensors()
        for name in sorted(expected.keys() | stored.keys()):
            if name not in stored or name not in expected:
                raise FasteaError(f"{where}.{name} is {'missing' if name in expected else 'not expected'}")
            if tuple(stored[name].shape) != expected[name]:
                raise FasteaError(
                    f"{where}.{name} is {tuple(stored[name].shape)}, {self.scheme.name} asks for {expected[name]}"
                )
            if name in kinds and stored[name].dtype != kinds[name]:
                raise FasteaError(f"{where}.{name} is {stored[name].dtype}, {self.scheme.name} asks for {kinds[name]}")
            if name not in kinds and not bool(stored[name].isfinite().all()):
                raise FasteaError(f"{where}.{name} holds numbers that are not finite")
        return self


def packed(codes: torch.Tensor) -> torch.Tensor:
    """int4 codes 0 .. 15 [N, K'] -> bytes [N, K' / 2]."""
    low, high = codes.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return low | high << 4


def padded(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """[N, K] -> [N, K'] with zeros on the right."""
    return F.pad(weight, (0, -weight.shape[1] % scheme.group)) if scheme.group else weight


def parameters(values: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and minimum of each group [..., group] -> fp16 [...], by its extremes."""
    if scheme.minimum:
        low, high = values.amin(-1), values.amax(-1)
        return ((high - low) / 15).half(), low.half()
    reach = values.abs().amax(-1)
    return (reach / (127 if scheme.bits == 8 else 7.5)).half(), None


def encode(
    values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """values, scale, minimum: any shapes that broadcast -> codes (float, as stored) and the values they decode to."""
    scale = scale.float()
    if scheme.bits == 8:
        low, high, offset = -128, 127, 0
    else:
        low, high, offset = 0, 15, 0 if scheme.minimum else 8
    base = 0.0 if minimum is None else minimum.float()
    steps = torch.where(scale == 0, 0.0, (values - base) / torch.where(scale == 0, 1.0, scale))
    codes = (steps + offset).round().clamp(low, high)
    return codes, (codes - offset) * scale + base


def assemble(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, scheme: Scheme, inputs: int
) -> QuantizedWeight:
    """Codes [N, K'] as `encode` gives them -> canonical form."""
    stored = codes.to(torch.int8) if scheme.bits == 8 else packed(codes)
    return QuantizedWeight(scheme, inputs, stored, scale, minimum)


def nearest(weight: torch.Tensor, scheme: Scheme) -> QuantizedWeight:
    """Round to nearest. weight: [N, K], any float dtype. The group shrinks where it does not divide K."""
    scheme = scheme.fitting(weight.shape[1])
    values = padded(weight.float(), scheme)
    groups = values.unflatten(1, (-1, scheme.group or values.shape[1]))
    scale, minimum = parameters(groups, scheme)
    low = None if minimum is None else minimum[..., None]
    codes, _ = encode(groups, scale[..., None], low, scheme)
    return assemble(codes.flatten(1), scale, minimum, scheme, weight.shape[1])
