"""From the product of the attention's input to queries and to new rows of the caches: bias, norm, rotation, writing.

Numeric contract: the splits of a column are added in the order 0, 1, ..., then the bias, in fp32, and rounded to the
caches' dtype. Queries and keys are normalised, where the model does that, and rotated in fp32, each time from rounded
values and rounded again. A program has one head of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastea.kernels.launch import launch, on_triton
from fastea.kernels.norm import sum_splits, sum_splits_reference
from fastea.kernels.register import register


def rope_write_reference(
    partials: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: torch.Tensor,
    offset: int,
    heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Write k and v at rows start + offset + r of the caches; return q.

    partials: fp32 [S, B*R, P], the first (H + 2 KV) * D columns are the heads of q, of k, of v; bias: one a column;
    table: fp32 [T, 2, D/2] cosines and sines by position; positions: [B, R] int64; caches: [B, KV, rows, D], laid out
    alike; start: [B] int64 -> q [B, R, H, D] in the caches' dtype. Pairs are half-split: column i goes with D/2 + i.
    q_norm, k_norm: [D] weights of an RMSNorm of each head before the rotation, with eps; None = none.
    """
    batch, rows = positions.shape
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    width = (heads + 2 * kv_heads) * dim
    total = sum_splits_reference(partials)[:, :width]
    if bias is not None:
        total = total + bias.float()
    values = total.to(k_cache.dtype).view(batch, rows, -1, dim)
    cos, sin = table[positions][:, :, :, None].unbind(2)
    turned = values[:, :, : heads + kv_heads].float()
    if q_norm is not None and k_norm is not None:
        gains = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1))).float()
        scale = torch.rsqrt(turned.square().mean(-1, keepdim=True) + eps)
        turned = (turned * scale * gains).to(k_cache.dtype).float()
    low, high = turned.chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(k_cache.dtype)
    sequence = torch.arange(batch, device=start.device)[:, None]
    place = start[:, None] + offset + torch.arange(rows, device=start.device)
    k_cache[sequence, :, place] = rotated[:, :, heads:]
    v_cache[sequence, :, place] = values[:, :, heads + kv_heads :]
    return rotated[:, :, :heads].contiguous()


@triton.jit(do_not_specialize=("rows", "offset"))
def _kernel(
    partials, bias, q_norm, k_norm, eps, table, positions, q, k_cache, v_cache, start,
    split_stride, row_stride, batch_stride, head_stride, rows, offset, heads, kv_heads,
    SPLITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    mask = pair < HALF
    column = head * (2 * HALF) + pair
    low = sum_splits(partials + row * row_stride + column, mask, split_stride, SPLITS)
    high = sum_splits(partials + row * row_stride + column + HALF, mask, split_stride, SPLITS)
    if bias is not None:
        low += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        high += tl.load(bias + column + HALF, mask=mask, other=0.0).to(tl.float32)
    low = low.to(q.dtype.element_ty).to(tl.float32)
    high = high.to(q.dtype.element_ty).to(tl.float32)
    if head < heads + kv_heads:  # a query or a key
        if q_norm is not None:
            scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / (2 * HALF) + eps)
            gain = q_norm if head < heads else k_norm
            low = low * scale * tl.load(gain + pair, mask=mask, other=0.0).to(tl.float32)
            high = high * scale * tl.load(gain + HALF + pair, mask=mask, other=0.0).to(tl.float32)
            low = low.to(q.dtype.element_ty).to(tl.float32)
            high = high.to(q.dtype.element_ty).to(tl.float32)
        angle = table + tl.load(positions + row) * (2 * HALF) + pair
        cos, sin = tl.load(angle, mask=mask, other=0.0), tl.load(angle + HALF, mask=mask, other=0.0)
        low, high = low * cos - high * sin, high * cos + low * sin
    sequence = row // rows
    place = sequence * batch_stride + (tl.load(start + sequence) + offset + row % rows) * (2 * HALF)
    if head < heads:
        target = q + (row * heads + head) * (2 * HALF)
    elif head < heads + kv_heads:
        target = k_cache + place + (head - heads) * head_stride
    else:
        target = v_cache + place + (head - heads - kv_heads) * head_stride
    tl.store(target + pair, low.to(q.dtype.element_ty), mask=mask)
    tl.store(target + pair + HALF, high.to(q.dtype.element_ty), mask=mask)


def _rope_write(
    partials: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: torch.Tensor,
    offset: int,
    heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    if not on_triton(partials):
        return rope_write_reference(
            partials, bias, table, positions, k_cache, v_cache, start, offset, heads, q_norm, k_norm, eps
        )
    positions = positions.contiguous()
    batch, rows = positions.shape
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    q = k_cache.new_empty(batch, rows, heads, dim)
    launch(
        _kernel, (batch * rows, heads + 2 * kv_heads),
        partials, bias, q_norm, k_norm, eps, table, positions, q, k_cache, v_cache, start,
        *partials.stride()[:2], *k_cache.stride()[:2], rows, offset, heads, kv_heads,
        warps=1, SPLITS=len(partials), HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2),
    )  # fmt: skip
    return q


rope_write = register(
    "rope_write(Tensor partials, Tensor? bias, Tensor table, Tensor positions, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor start, int offset, int heads, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0) -> Tensor",
    _rope_write,
    lambda partials, bias, table, positions, k_cache, v_cache, start, offset, heads, *_: k_cache.new_empty(
        *positions.shape, heads, k_cache.shape[3]
    ),
)
