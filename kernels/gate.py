"""The gated MLP between its two products: silu(gate) * up.

Numeric contract: the splits of a column are added in the order 0, 1, ... in fp32 and rounded to the output's dtype; the
rest is computed in fp32 from these rounded values and rounded once. Nothing is summed over columns or rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastea.kernels.launch import launch, on_triton
from fastea.kernels.norm import COLUMNS, sum_splits, sum_splits_reference
from fastea.kernels.register import register


def silu_mul_reference(partials: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """partials: fp32 [S, M, P], columns 0 .. width-1 are gate, width .. 2 width-1 are up -> [M, width] in dtype."""
    gate, up = sum_splits_reference(partials)[:, : 2 * width].to(dtype).float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(dtype)


@triton.jit
def _kernel(partials, out, split_stride, row_stride, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    first = partials + row * row_stride + column
    gate = sum_splits(first, mask, split_stride, SPLITS).to(out.dtype.element_ty).to(tl.float32)
    up = sum_splits(first + width, mask, split_stride, SPLITS).to(out.dtype.element_ty).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=mask)


def _silu_mul(partials: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    if not on_triton(partials):
        return silu_mul_reference(partials, width, dtype)
    splits, rows = partials.shape[:2]
    out = partials.new_empty(rows, width, dtype=dtype)
    grid = (rows, triton.cdiv(width, COLUMNS))
    launch(_kernel, grid, partials, out, *partials.stride()[:2], width, SPLITS=splits, BLOCK=COLUMNS)
    return out


silu_mul = register(
    "silu_mul(Tensor partials, int width, ScalarType dtype) -> Tensor",
    _silu_mul,
    lambda partials, width, dtype: partials.new_empty(partials.shape[1], width, dtype=dtype),
)
