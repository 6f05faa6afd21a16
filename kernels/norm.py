"""The end of a product: its splits put together, the residual added, the sum normalised.

Everywhere `partials` is fp32 [S, M, P]: S split-K results of a product of M rows and N outputs; columns from N on are
padding.

Numeric contract: the splits are added in the order 0, 1, ..., then the bias, then the residual, all in fp32, and the
result is rounded once. The squares of a row are summed by one program, over the whole row padded to a power of two.
Block sizes follow from the width alone, so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastea.kernels.launch import launch, on_triton
from fastea.kernels.register import register

COLUMNS = 1024  # of a program that needs no whole row


def sum_splits_reference(partials: torch.Tensor) -> torch.Tensor:
    """[S, M, P] -> [M, P], fp32. With one split, a view of it."""
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    return total


@triton.jit
def sum_splits(first, mask, split_stride, SPLITS: tl.constexpr):
    """Sum over the splits at a block of pointers into split 0; 0 outside the mask."""
    total = tl.load(first, mask=mask, other=0.0)
    for _ in tl.static_range(1, SPLITS):
        first += split_stride
        total += tl.load(first, mask=mask, other=0.0)
    return total


def add_norm_reference(
    partials: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """r' = residual + the product; RMSNorm of r'. partials: [S, M, P >= N] or None (r' = residual); residual: [M, N];
    weight: [N] -> r', normed [M, N] in residual's dtype, each rounded once."""
    total = residual.float()
    if partials is not None:
        total = sum_splits_reference(partials)[:, : residual.shape[1]] + total
    added = total.to(residual.dtype, copy=True)
    x = added.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return added, (x * scale * weight.float()).to(residual.dtype)


@triton.jit
def _add_norm_kernel(
    partials, residual, weight, added, normed, split_stride, partial_stride, residual_stride, width, eps,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    total = tl.load(residual + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
    if partials is not None:
        total = sum_splits(partials + row * partial_stride + column, mask, split_stride, SPLITS) + total
    rounded = total.to(added.dtype.element_ty)
    tl.store(added + row * width + column, rounded, mask=mask)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    x = x * scale * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * width + column, x.to(normed.dtype.element_ty), mask=mask)


def _add_norm(
    partials: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not on_triton(residual):
        return add_norm_reference(partials, residual, weight, eps)
    rows, width = residual.shape
    added, normed = residual.new_empty(rows, width), residual.new_empty(rows, width)
    splits, split_stride, partial_stride = (0, 0, 0) if partials is None else (len(partials), *partials.stride()[:2])
    block = triton.next_power_of_2(width)
    launch(
        _add_norm_kernel, (rows,), partials, residual, weight, added, normed,
        split_stride, partial_stride, residual.stride(0), width, eps,
        warps=max(4, min(16, block // 256)), SPLITS=splits, BLOCK=block,
    )  # fmt: skip
    return added, normed


add_norm = register(
    "add_norm(Tensor? partials, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _add_norm,
    lambda partials, residual, weight, eps: (residual.new_empty(residual.shape), residual.new_empty(residual.shape)),
)


def add_reference(
    partials: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    width: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product + bias + residual. partials: [S, M, P >= width]; residual: [M, width]; bias: [width] ->
    [M, width] in dtype, rounded once."""
    total = sum_splits_reference(partials)[:, :width]
    if bias is not None:
        total = total + bias.float()
    if residual is not None:
        total = total + residual.float()
    return total.to(dtype, copy=True, memory_format=torch.contiguous_format)


@triton.jit
def _add_kernel(
    partials, residual, bias, out, split_stride, partial_stride, residual_stride, width,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = sum_splits(partials + row * partial_stride + column, mask, split_stride, SPLITS)
    if bias is not None:
        total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=mask)


def _add(
    partials: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    width: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    if not on_triton(partials):
        return add_reference(partials, residual, bias, width, dtype)
    splits, rows = partials.shape[:2]
    out = partials.new_empty(rows, width, dtype=dtype)
    launch(
        _add_kernel, (rows, triton.cdiv(width, COLUMNS)), partials, residual, bias, out,
        *partials.stride()[:2], 0 if residual is None else residual.stride(0), width,
        SPLITS=splits, BLOCK=COLUMNS,
    )  # fmt: skip
    return out


add = register(
    "add(Tensor partials, Tensor? residual, Tensor? bias, int width, ScalarType dtype) -> Tensor",
    _add,
    lambda partials, residual, bias, width, dtype: partials.new_empty(partials.shape[1], width, dtype=dtype),
)
