"""Quantized weights on their way into a model: what becomes quantized, from which files, and the report of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from fastea.config import FasteaError
from fastea.kernels.packed import activation_dtype, has_amx, packs_half
from fastea.linear import FineLinear, Linear, PackedLinear
from fastea.quantize.forms import SCHEMES, QuantizedWeight, Scheme, nearest
from fastea.quantize.imports import Foreign, from_foreign

Weight: TypeAlias = torch.Tensor | QuantizedWeight
Weights = Iterator[tuple[str, Weight]]
KEY, VERSION = "fastea_quantization", 1  # in config.json
_LM = ("lm_head", "lm")  # the target's, a drafting head's copy


class Quantizer:
    """Places weights into a model. quant: "int8" or "int4" rounds linear weights that come in more bits; None leaves
    every weight as it comes. dtype: of weights that are not quantized, and of activations with the exception that
    `fastea.kernels.packed.activation_dtype` makes. pack=False: weights become plain matrices, those that are stored
    quantized too, for training and quantizing. triton: for the Triton kernels.

    The LM head is int8 whatever the scheme, or in full precision; the embedding always is in full precision.
    """

    def __init__(self, quant: str | None, dtype: torch.dtype, device: str, pack: bool = True, triton: bool = False):
        if quant is not None and quant not in SCHEMES:
            raise FasteaError(f"--quant {quant}: known are none, {' and '.join(SCHEMES)}")
        self.quant, self.device, self.triton = quant, device, triton
        self.dtype = dtype if triton else activation_dtype(dtype, device)
        self.pack = pack
        self.half = self.dtype != dtype  # fp16 weights, fp32 activations
        on_cpu = not device.startswith("cuda")
        self.dense = pack and (triton or on_cpu)  # whether unquantized weights change their form
        # Logits of 16 bits tie often: the LM head hands on fp32 sums where products of fp16 weights do and are as fast.
        self.fine_logits = on_cpu and self.dtype == torch.bfloat16 and packs_half() and not has_amx()
        self.scheme: Scheme | None = SCHEMES[quant] if quant else None  # of a layer's weights
        self.lm_scheme: Scheme | None = SCHEMES["int8"] if quant else None
        self.made: Counter[str] = Counter()  # weights by what they became
        self.full: list[str] = []  # linear weights in full precision
        self.bits = self.weights = 0  # of the quantized ones

    def decided(self, model: torch.nn.Module, name: str, weight: Weight) -> Weight:
        """A whole (fused) parameter in the form that it is to have."""
        stem, _, kind = name.rpartition(".")
        linear = kind == "weight" and isinstance(model.get_submodule(stem), Linear)
        linear = linear and not stem.endswith(".router")  # tiny, and decides which experts a row meets
        scheme = self.lm_scheme if stem in _LM else self.scheme
        imported = isinstance(weight, QuantizedWeight)
        if isinstance(weight, QuantizedWeight):
            if not self.pack or not linear or (stem in _LM and weight.scheme.bits == 4):
                weight = weight.dequantized(dtype=torch.float32 if linear else self.dtype)
        elif linear and scheme:
            weight = nearest(weight, scheme)
        if isinstance(weight, QuantizedWeight):
            padded = " (inputs padded)" if weight.padded else ""
            self.made[f"{weight.scheme.name} {'as stored' if imported else 'rounded'}{padded}"] += 1
            self.bits += 8 * weight.nbytes
            self.weights += weight.shape[0] * weight.shape[1]
        elif linear:
            self.full.append(stem)
        return weight

    def place(self, model: torch.nn.Module, name: str, weight: Weight) -> None:
        """Put a whole parameter into the model."""
        weight = self.decided(model, name, weight)
        stem, _, kind = name.rpartition(".")
        module = model.get_submodule(stem)
        if isinstance(weight, QuantizedWeight) or (self.dense and kind == "weight" and isinstance(module, Linear)):
            parent, _, child = stem.rpartition(".")
            setattr(model.get_submodule(parent), child, self._linear(stem, weight, module.bias))  # type: ignore[arg-type]
        else:
            model.load_state_dict({name: weight.to(device=self.device, dtype=self.dtype)}, strict=False, assign=True)

    def _linear(self, stem: str, weight: Weight, bias: torch.nn.Parameter | None) -> Linear:
        if not self.triton:
            packed = isinstance(weight, QuantizedWeight) and not weight.scheme.group
            if stem == "lm_head" and self.fine_logits and not packed:
                return FineLinear(weight, bias, self.device)
            return PackedLinear(weight, bias, self.dtype, self.device, self.half)
        from fastea.triton_linear import TritonLinear

        return TritonLinear(weight, bias, self.dtype, self.device)

    @property
    def packs(self) -> bool:
        """Whether linear weights change their form here."""
        return self.dense or self.quant is not None

    @property
    def bits_per_weight(self) -> float | None:
        """Bits that a quantized weight takes with its scales; None where nothing is quantized."""
        return self.bits / self.weights if self.weights else None

    def report(self) -> str:
        """One line: how many linear weights became what."""
        made = ", ".join(f"{count} x {what}" for what, count in sorted(self.made.items()))
        full = f"; in full precision: {', '.join(self.full)}" if self.full else ""
        return f"{made}; {self.bits_per_weight or 0:.2f} bits per weight{full}"


def fused(parts: list[Weight]) -> Weight:
    """Parts of a fused weight, one below the other; those of different schemes are decoded."""
    if len(parts) == 1:
        return parts[0]
    quantized = [p for p in parts if isinstance(p, QuantizedWeight)]
    whole = QuantizedWeight.fused(quantized) if len(quantized) == len(parts) else None
    return whole or torch.cat([p.dequantized() if isinstance(p, QuantizedWeight) else p for p in parts])


def read_foreign(tensors: Iterator[tuple[str, torch.Tensor]], form: Foreign, where: str) -> Weights:
    """The tensors of an AWQ or GPTQ checkpoint: `qweight`, `qzeros`, `scales` (`g_idx`) -> one quantized `weight`."""
    open_sets: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        stem, _, suffix = name.rpartition(".")
        if suffix not in form.suffixes:
            if not (suffix == "bias" and form.method == "gptq" and not tensor.any()):  # it writes zeros where none is
                yield name, tensor
            continue
        parts = open_sets.setdefault(stem, {})
        parts[suffix] = tensor
        if len(parts) == len(form.suffixes):
            yield f"{stem}.weight", from_foreign(open_sets.pop(stem), form, f"{where}: {stem}")
    for stem, parts in open_sets.items():
        yield f"{stem}.weight", from_foreign(parts, form, f"{where}: {stem}")


def read_own(tensors: Iterator[tuple[str, torch.Tensor]], record: Any, where: str) -> Weights:
    """The tensors of a folder that `fastea.quantize` wrote, by our own names."""
    if not isinstance(record, dict) or record.get("version") != VERSION or not isinstance(record.get("weights"), dict):
        version = record.get("version") if isinstance(record, dict) else None
        raise FasteaError(f"{where}: {KEY} version {version!r} is not known (this fastea reads {VERSION})")
    open_sets: dict[str, dict[str, torch.Tensor]] = {}
    schemes = {stem: _scheme(entry, f"{where}: {stem}") for stem, entry in record["weights"].items()}
    for name, tensor in tensors:
        stem, _, suffix = name.rpartition(".")
        if stem not in schemes or suffix not in ("codes", "scale", "minimum"):
            yield name, tensor
            continue
        parts, (scheme, inputs) = open_sets.setdefault(stem, {}), schemes[stem]
        parts[suffix] = tensor
        if len(parts) == (3 if scheme.minimum else 2):
            yield f"{stem}.weight", _assembled(open_sets.pop(stem), scheme, inputs, f"{where}: {stem}")
    for stem, parts in open_sets.items():
        yield f"{stem}.weight", _assembled(parts, *schemes[stem], f"{where}: {stem}")


def _scheme(entry: Any, where: str) -> tuple[Scheme, int]:
    try:
        return Scheme(entry["bits"], entry["group"], entry["minimum"]), int(entry["inputs"])
    except (KeyError, TypeError, ValueError) as error:
        raise FasteaError(f"{where}: its entry in {KEY} is not what it should be ({error})") from None
    except FasteaError as error:
        raise FasteaError(f"{where}: {error}") from None


def _assembled(parts: dict[str, torch.Tensor], scheme: Scheme, inputs: int, where: str) -> QuantizedWeight:
    for suffix in ("codes", "scale"):
        if suffix not in parts:
            raise FasteaError(f"{where}.{suffix} is missing")
    return QuantizedWeight(scheme, inputs, parts["codes"], parts["scale"], parts.get("minimum")).check(where)


def entry_of(weight: QuantizedWeight) -> dict[str, Any]:
    """What config.json keeps of a stored weight."""
    scheme = weight.scheme
    return {"bits": scheme.bits, "group": scheme.group, "minimum": scheme.minimum, "inputs": weight.inputs}
