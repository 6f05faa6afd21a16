"""Weights that others quantized -> canonical form, by repacking only: every value stays what it was.

GGUF blocks of 32 (Q8_0, Q4_0, Q4_1), and Hugging Face checkpoints made by AWQ ("gemm" layout) or GPTQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastea.config import FasteaError
from fastea.quantize.forms import GROUPS, QuantizedWeight, Scheme, packed

GGUF_SCHEMES = {"Q8_0": Scheme(8, 32), "Q4_0": Scheme(4, 32), "Q4_1": Scheme(4, 32, True)}


def from_gguf_blocks(data: np.ndarray, kind: str) -> QuantizedWeight:
    """Raw blocks, uint8 [N, bytes of a row], of a type in GGUF_SCHEMES.

    A block holds 32 weights: fp16 scale, for Q4_1 fp16 minimum, then 32 int8 codes or 16 bytes, byte j with the codes
    of inputs j (low nibble) and j + 16.
    """
    scheme = GGUF_SCHEMES[kind]
    head = 4 if scheme.minimum else 2
    size = head + 32 * scheme.bits // 8
    blocks = torch.from_numpy(np.array(data)).view(data.shape[0], -1, size)  # a copy: the file is read-only
    parameters = blocks[..., :head].contiguous().view(torch.float16)
    codes = blocks[..., head:].contiguous()
    inputs = blocks.shape[1] * 32
    if scheme.bits == 8:
        stored = codes.view(torch.int8).flatten(1)
    else:
        stored = packed(torch.cat((codes & 15, codes >> 4), dim=-1).flatten(1))
    minimum = parameters[..., 1].contiguous() if scheme.minimum else None
    return QuantizedWeight(scheme, inputs, stored, parameters[..., 0].contiguous(), minimum)


@dataclass(frozen=True)
class Foreign:
    """What `quantization_config` says. method: "awq" or "gptq"; offset: added to stored zero points."""

    method: str
    bits: int
    group: int
    offset: int

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Tensors of one weight, in place of `.weight`."""
        return ("qweight", "qzeros", "scales", "g_idx") if self.method == "gptq" else ("qweight", "qzeros", "scales")


def foreign(raw: Mapping[str, Any], where: str) -> Foreign:
    """Read a `quantization_config`; what cannot be repacked exactly is refused by name."""
    method, bits, group = raw.get("quant_method"), raw.get("bits"), raw.get("group_size")
    if method not in ("awq", "gptq"):
        raise FasteaError(f"{where}: quant_method {method!r} is not supported (awq and gptq are)")
    if bits != 4 or group not in GROUPS:
        raise FasteaError(
            f"{where}: {bits} bits in groups of {group} are not supported (4 bits, groups of 32, 64, 128)"
        )
    if method == "awq":
        if raw.get("version", "gemm") != "gemm":
            raise FasteaError(f"{where}: the AWQ layout {raw['version']!r} is not supported ('gemm' is)")
        return Foreign(method, bits, group, 0)
    if raw.get("desc_act"):
        raise FasteaError(f"{where}: GPTQ with desc_act (reordered inputs) is not supported; quantize it without")
    layout = raw.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise FasteaError(f"{where}: the GPTQ layout {layout!r} is not supported (gptq and gptq_v2 are)")
    return Foreign(method, bits, group, 1 if layout == "gptq" else 0)


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble that holds output i of eight


def _nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [..., n] -> codes uint8 [..., 8 n]; order: the nibble of each of a word's eight values."""
    shifts = torch.tensor(order, dtype=torch.int32) * 4
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


def from_foreign(tensors: Mapping[str, torch.Tensor], form: Foreign, name: str) -> QuantizedWeight:
    """One weight of an AWQ or GPTQ checkpoint. tensors: by suffix; name: for messages.

    Inputs come first in both ([K, N / 8] in AWQ, [K / 8, N] in GPTQ). value = (code - zero) * scale.
    """
    for suffix in form.suffixes[:3]:
        if suffix not in tensors:
            raise FasteaError(f"{name}.{suffix} is missing")
    words, zeros, scales = (tensors[s] for s in form.suffixes[:3])
    if form.method == "awq":
        codes, zero = _nibbles(words, _AWQ_ORDER), _nibbles(zeros, _AWQ_ORDER)
    else:
        codes, zero = _nibbles(words.T.contiguous()).T, _nibbles(zeros)
    inputs, outputs = codes.shape
    groups = -(-inputs // form.group)
    if tuple(scales.shape) != (groups, outputs) or tuple(zero.shape) != (groups, outputs) or inputs % form.group:
        raise FasteaError(
            f"{name}: {inputs} inputs and {outputs} outputs in groups of {form.group} ask for scales and zeros "
            f"{(groups, outputs)}; there are scales {tuple(scales.shape)} and zeros {tuple(zero.shape)}"
        )
    index = tensors.get("g_idx")
    if index is not None and not torch.equal(index.long(), torch.arange(inputs) // form.group):
        raise FasteaError(f"{name}.g_idx: reordered inputs are not supported; quantize it without desc_act")
    offset = zero.int() + form.offset
    scale = scales.T.contiguous()
    if bool((offset == 8).all()):
        return QuantizedWeight(Scheme(4, form.group), inputs, packed(codes.T), scale)
    minimum = (-offset.T * scale.float()).contiguous()  # exact in fp32: 11 bits times 5
    return QuantizedWeight(Scheme(4, form.group, True), inputs, packed(codes.T), scale, minimum)
