"""The k best scores of each row, with a rule for ties.

Numeric contract: scores are compared, never summed. An entry is one 64-bit integer, the score's order above the id's:
the greatest is the lowest id of the best score, in whatever order entries are compared. Programs of fixed blocks of
columns leave k entries each, from which one program a row takes the k greatest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastea.kernels.launch import launch, on_triton
from fastea.kernels.register import register

COLUMNS = 4096  # of a program
NOTHING = tl.constexpr(-(2**63))  # below every entry


def top_children_reference(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k <= 16 largest, largest first, ties to the lowest id, NaN after all numbers. scores: fp32 [M, V >= k] ->
    values [M, k], ids [M, k] int64."""
    ids = scores.neg().sort(dim=-1, stable=True).indices[:, :k]  # ascending: descending puts NaN first
    return scores.gather(1, ids), ids


@triton.jit
def _block_kernel(scores, best, row_stride, width, blocks, K: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    score = tl.load(scores + row * row_stride + column, mask=mask, other=0.0)
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 and 0 are a tie
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(score == score, order, -0x80000000).to(tl.int64)
    entry = tl.where(mask, (order << 32) | (0x7FFFFFFF - column), NOTHING)
    best += (row * blocks + block) * K
    for i in range(K):
        greatest = tl.max(entry, axis=0)
        tl.store(best + i, greatest)
        entry = tl.where(entry == greatest, NOTHING, entry)


@triton.jit
def _merge_kernel(best, values, ids, count, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    entry = tl.load(best + row * count + at, mask=at < count, other=NOTHING)
    for i in range(K):
        greatest = tl.max(entry, axis=0)
        order = (greatest >> 32).to(tl.int32)
        bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
        tl.store(values + row * K + i, bits.to(tl.float32, bitcast=True))
        tl.store(ids + row * K + i, 0x7FFFFFFF - (greatest & 0x7FFFFFFF))
        entry = tl.where(entry == greatest, NOTHING, entry)


def _top_children(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not on_triton(scores):
        return top_children_reference(scores, k)
    rows, width = scores.shape
    blocks = triton.cdiv(width, COLUMNS)
    best = scores.new_empty(rows, blocks, k, dtype=torch.int64)
    values, ids = _outputs(scores, k)
    launch(_block_kernel, (rows, blocks), scores, best, scores.stride(0), width, blocks, warps=8, K=k, BLOCK=COLUMNS)
    launch(_merge_kernel, (rows,), best, values, ids, blocks * k, K=k, BLOCK=triton.next_power_of_2(blocks * k))
    return values, ids


def _outputs(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(scores)
    return scores.new_empty(rows, k), scores.new_empty(rows, k, dtype=torch.int64)


top_children = register("top_children(Tensor scores, int k) -> (Tensor, Tensor)", _top_children, _outputs)
