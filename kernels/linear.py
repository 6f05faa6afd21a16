"""y = x W^T + b, with rows that do not depend on the rows beside them where that is asked for."""

from __future__ import annotations

import torch
import torch.nn.functional as F

SIZES = (1, 2, 4, 8, 16, 32, 64)  # row counts that products are padded to


def linear_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, block: int) -> torch.Tensor:
    """F.linear whose rows keep their bits for every row count. x: [..., K]; weight: [N, K].

    block = 0: one call a row, the very call that a single row makes, equal by construction.
    block > 0: rows go in parts of at most 64, each padded to the next of SIZES from block on, for which the backend
    was found row-equal (`find_row_block`).
    """
    parts = []
    for part in x.reshape(-1, x.shape[-1]).split(64 if block else 1):
        count = part.shape[0]
        size = next(s for s in SIZES if s >= max(count, block))
        parts.append(F.linear(F.pad(part, (0, 0, 0, size - count)), weight, bias)[:count])
    return torch.cat(parts).view(*x.shape[:-1], -1)


def rows_equal(weight: torch.Tensor, block: int) -> bool:
    """Whether rows of F.linear keep their bits over SIZES from block on, and over places among the rows. A kernel's
    order of summation depends on shapes, not on values, so random rows decide."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, weight.shape[1], generator=generator).to(weight)
    whole = F.linear(x, weight)
    for size in (s for s in SIZES if s >= block):
        for shift in {0, size // 2, size - 1}:
            if not torch.equal(F.linear(x[:size].roll(shift, 0), weight).roll(-shift, 0), whole[:size]):
                return False
    return True


def find_row_block(weights: list[torch.Tensor]) -> int:
    """The smallest of 1, 2, 4, 8 for which every distinct weight shape is row-equal here, else 0 (row by row)."""
    distinct = list({(w.shape, w.dtype): w for w in weights}.values())
    return next((m for m in (1, 2, 4, 8) if all(rows_equal(w, m) for w in distinct)), 0)
