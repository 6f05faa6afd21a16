"""Accepted tree rows moved into place, cache by cache: compaction without Triton, one operator to compile around."""

from __future__ import annotations

import torch

from fastea.kernels.register import register


def _move_rows(caches: list[torch.Tensor], start: torch.Tensor, path: torch.Tensor) -> None:
    """Row start + path[:, j] -> row start + j of every cache, every read before any write; rows that stay are not
    touched.

    caches: [B, KV, rows, D] each; start: [B] int64, first tree row; path: [B, J] int64 tree slots, path[:, j] >= j.
    """
    for b, (first, slots) in enumerate(zip(start.tolist(), path.tolist(), strict=True)):
        steps = [j for j, slot in enumerate(slots) if slot != j]
        if steps:
            source = torch.tensor([first + slots[j] for j in steps], device=start.device)
            target = torch.tensor([first + j for j in steps], device=start.device)
            for cache in caches:  # not scatter_, which copies the whole cache in 16 bits on a CPU
                cache[b].index_copy_(1, target, cache[b].index_select(1, source))


move_rows = register(
    "move_rows(Tensor(a!)[] caches, Tensor start, Tensor path) -> ()", _move_rows, lambda caches, start, path: None
)
