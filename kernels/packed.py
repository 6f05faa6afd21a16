"""y = x W^T with W laid out for the device: what a product reads, made once from a matrix or from the canonical form of
a quantized weight, and the product.

On a CPU:

- fp32 in blocks of 16 outputs, [N / 16, K, 16], multiplied as a batch of narrow matrices. As one matrix, few rows take
  twice to four times as long, since MKL copies the weight into another order first (benchmarks/products.md); and from
  4 rows on, rows in blocks keep their bits for every row count.
- 16-bit weights, and int8 in groups, as fp16 in FBGEMM's order where the CPU has no bf16 instructions, multiplied with
  fp32 activations: half of the bytes of fp32, and 4 rows cost what one does. bf16 weights are exact in fp16 down to
  2^-17 or so, below it their error is at most 2^-25; a product of int8 and its scale is rounded to 11 bits.
- bf16 weights, and int8 in groups, in oneDNN's order where the CPU has bf16 instructions: 1.3 to 3 times faster than
  the plain matrix for 1 to 26 rows; rows keep their bits for every row count.
- int8 with one scale a row, and int4, in PyTorch's packed operators, with 16-bit activations; their rows keep their
  bits for every row count. Scales have the activation's dtype: fp16 scales lose up to 3 bits in bf16, a relative error
  of 2^-9 a group at most.
- Everything else as a matrix in the activation's dtype: nothing is approximated, nothing saved.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.nn.functional as F

from fastea.kernels.register import register
from fastea.quantize.forms import QuantizedWeight

Layout = dict[str, torch.Tensor]
BLOCK = 16  # outputs beside each other in fp32
FEWEST = 4  # two and three rows take longer than four
ROWS = 8  # that oneDNN lays bf16 weights out for; other counts take the same layout
ALIGNED = 16  # bytes: where a row of codes begins for the packed int8 operator, which crashes on others
OUTPUTS = 64  # the packed int4 operator takes multiples of this many outputs on every CPU


def has_amx() -> bool:
    """Whether this CPU has tiles: bf16 products of some rows cost what one row does."""
    return bool(torch.cpu._is_amx_tile_supported())


def fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 without converting it."""
    return bool(torch.cpu._is_avx512_bf16_supported()) or has_amx()


def packs_half() -> bool:
    """Whether there are products of fp16 weights in FBGEMM's order."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def fast_half() -> bool:
    """Whether these are what this CPU multiplies fastest."""
    return packs_half() and not fast_bf16()


def activation_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """What runs between weights of this dtype: itself, except that fp16 weights on a CPU without fp16 arithmetic are
    multiplied with fp32 activations."""
    half = dtype == torch.float16 and not device.startswith("cuda") and fast_half()
    return torch.float32 if half else dtype


def layout(weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, device: str, half: bool = False) -> Layout:
    """The tensors that `product` reads, for activations of this dtype. half: fp32 activations, weights in fp16."""
    scheme = weight.scheme if isinstance(weight, QuantizedWeight) else None
    on_cpu = not device.startswith("cuda")
    if scheme is None or not on_cpu or dtype == torch.float32 or (scheme.bits == 8 and scheme.group):
        matrix = weight.dequantized() if isinstance(weight, QuantizedWeight) else weight
        if on_cpu and packs_half() and (half or (dtype != torch.float32 and fast_half())):
            low, high = (float(t) for t in matrix.aminmax())
            if max(-low, high) <= torch.finfo(torch.float16).max:
                return {"fp16": _held(torch.ops.quantized.linear_prepack_fp16(matrix.float().contiguous(), None))}
        matrix = matrix.to(device=device, dtype=dtype)
        if on_cpu and dtype == torch.bfloat16 and fast_bf16():
            return {"onednn": _held(torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS))}
        return {"blocks": blocks(matrix)} if on_cpu and dtype == torch.float32 else {"matrix": matrix}
    assert isinstance(weight, QuantizedWeight)
    if scheme.bits == 8:
        codes = weight.codes
        if codes.data_ptr() % ALIGNED or codes.shape[1] % ALIGNED:  # a view into a file, or an odd width
            codes = F.pad(codes, (0, -codes.shape[1] % ALIGNED))  # always a copy
        return {"codes": codes, "scale": weight.scale[:, 0].to(dtype)}
    short = -weight.codes.shape[0] % OUTPUTS
    codes = F.pad(weight.unpacked().int(), (0, 0, 0, short))
    scale = weight.scale.float()
    base = 8 * scale + weight.minimum.float() if weight.minimum is not None else torch.zeros_like(scale)
    both = F.pad(torch.stack((scale, base), dim=-1), (0, 0, 0, 0, 0, short))
    return {
        "nibbles": torch._convert_weight_to_int4pack_for_cpu(codes, 1),
        "scale_base": both.transpose(0, 1).to(dtype).contiguous(),
    }


def blocks(matrix: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [ceil(N / 16), K, 16], zeros after the last output."""
    whole = F.pad(matrix, (0, 0, 0, -matrix.shape[0] % BLOCK))
    return whole.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()


# Packed weights are objects that no graph can hold: graphs hold their keys.
_held_weights: dict[int, Any] = {}
_keys = itertools.count()


def _held(weight: Any) -> torch.Tensor:
    """The key [] of a packed weight, which lives as long as this tensor."""
    key = torch.tensor(next(_keys))
    _held_weights[int(key)] = weight
    weakref.finalize(key, _held_weights.pop, int(key))
    return key


def _half_product(x: torch.Tensor, key: torch.Tensor, outputs: int) -> torch.Tensor:
    return torch.ops.quantized.linear_dynamic_fp16.default(x, _held_weights[int(key)])


def _onednn_product(x: torch.Tensor, key: torch.Tensor, outputs: int) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, _held_weights[int(key)], None, "none", [], "")


def _empty(x: torch.Tensor, key: torch.Tensor, outputs: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], outputs)


half_product = register("half_product(Tensor x, Tensor key, int outputs) -> Tensor", _half_product, _empty)
onednn_product = register("onednn_product(Tensor x, Tensor key, int outputs) -> Tensor", _onednn_product, _empty)


def hidden_bytes(tensors: Layout, outputs: int, inputs: int) -> int:
    """Bytes that a layout holds besides its tensors: FBGEMM packs blocks of 512 inputs and 16 outputs."""
    if "onednn" in tensors:
        return int(torch.ops.mkldnn._nbytes(_held_weights[int(tensors["onednn"])]))
    if "fp16" not in tensors:
        return 0
    return 2 * (-(-inputs // 512) * 512) * (-(-outputs // 16) * 16)


def rows_of(tensors: Layout, ids: torch.Tensor, outputs: int, inputs: int) -> Layout:
    """The layout of these outputs alone, as a matrix if it is one of floats."""
    if "onednn" in tensors:
        return {"matrix": _held_weights[int(tensors["onednn"])].to_dense()[ids]}
    if "fp16" in tensors:  # unpacked by products with the identity, a few columns at a time
        columns = torch.eye(inputs).split(64)
        return {"matrix": torch.cat([product(part, tensors, outputs)[:, ids] for part in columns]).t().contiguous()}
    if "blocks" in tensors:
        return {"matrix": tensors["blocks"][ids // BLOCK, :, ids % BLOCK]}
    assert "nibbles" not in tensors, "an LM head is never int4"
    return {name: tensor[ids] for name, tensor in tensors.items()}


def product(x: torch.Tensor, tensors: Layout, outputs: int) -> torch.Tensor:
    """x: [M, K] of the layout's dtype -> [M, outputs]."""
    rows = x.shape[0]
    if "blocks" in tensors:
        parts = tensors["blocks"]
        if 1 < rows < FEWEST:
            x = F.pad(x, (0, 0, 0, FEWEST - rows))
        y = torch.bmm(x.expand(parts.shape[0], -1, -1), parts)
        return y.transpose(0, 1).flatten(1)[:rows, :outputs]
    if "onednn" in tensors:
        return onednn_product(x, tensors["onednn"], outputs)
    if "matrix" in tensors:
        return F.linear(x, tensors["matrix"])
    if "fp16" in tensors:
        return half_product(x.float(), tensors["fp16"], outputs).to(x.dtype)
    inputs = tensors["codes"].shape[1] if "codes" in tensors else 2 * tensors["nibbles"].shape[1]
    if x.shape[1] != inputs:
        x = F.pad(x, (0, inputs - x.shape[1]))
    if "codes" in tensors:
        return torch.ops.aten._weight_int8pack_mm(x, tensors["codes"], tensors["scale"])
    nibbles, both = tensors["nibbles"], tensors["scale_base"]
    group = inputs // both.shape[0]
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, nibbles, group, both)[:, :outputs]
