"""Accepted tree rows moved into place, in the caches of all layers at once.

Numeric contract: nothing is computed; bits are copied. One program moves the rows of one head of one sequence in order.
No row is read after it was overwritten: step j reads row path[j] >= j, and the steps before it wrote rows below j.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastea.kernels.launch import launch, on_triton
from fastea.kernels.register import register


def compact_reference(cache: torch.Tensor, start: torch.Tensor, path: torch.Tensor) -> None:
    """Row start + path[:, j] -> row start + j, every read before any write.

    cache: [A, B, KV, rows, D], A = keys and values of all layers; start: [B] int64, first tree row; path: [B, J] int64
    tree slots, path[:, j] >= j.
    """
    sequence = torch.arange(path.shape[0], device=path.device)[:, None]
    steps = torch.arange(path.shape[1], device=path.device)
    cache[:, sequence, :, start[:, None] + steps] = cache[:, sequence, :, start[:, None] + path]


@triton.jit
def _kernel(
    cache, start, path, path_stride, layer_stride, batch_stride, head_stride,
    STEPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    tree = cache + layer * layer_stride + sequence * batch_stride + head * head_stride
    tree += tl.load(start + sequence) * WIDTH
    for step in range(STEPS):
        source = tl.load(path + sequence * path_stride + step)
        if source != step:
            row = tl.load(tree + source * WIDTH + column, mask=mask)
            tl.store(tree + step * WIDTH + column, row, mask=mask)


def _compact(cache: torch.Tensor, start: torch.Tensor, path: torch.Tensor) -> None:
    if not on_triton(cache):
        return compact_reference(cache, start, path)
    width = cache.shape[4]
    launch(
        _kernel, tuple(cache.shape[:3]), cache, start, path, path.stride(0), *cache.stride()[:3],
        warps=1, STEPS=path.shape[1], WIDTH=width, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip


compact = register(
    "compact(Tensor(a!) cache, Tensor start, Tensor path) -> ()", _compact, lambda cache, start, path: None
)
