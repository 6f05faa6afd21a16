"""y = x W^T + b, with rows that do not depend on the rows beside them where that is asked for."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 26, 32, 48, 64)  # what a round may ask for


def linear_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, block: int) -> torch.Tensor:
    """F.linear whose rows keep their bits for every row count. x: [..., K]; weight: [N, K].

    block = 0: one call a row, the very call that a single row makes, equal by construction.
    block > 0: row counts are padded to a multiple of block, for which the backend was found row-equal
    (`find_row_block`).
    """
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if block == 0:
        out = torch.cat([F.linear(rows[i : i + 1].clone(), weight, bias) for i in range(count)])
    else:
        out = F.linear(F.pad(rows, (0, 0, 0, -count % block)), weight, bias)[:count]
    return out.view(*x.shape[:-1], -1)


def rows_equal(weight: torch.Tensor, block: int, counts: tuple[int, ...] = ROW_COUNTS) -> bool:
    """Whether rows of F.linear keep their bits over the row counts, padded to multiples of block, and over
    places in the block. A kernel's order of summation depends on shapes, not on values, so random rows decide."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(counts), weight.shape[1], generator=generator).to(weight)
    whole = F.linear(F.pad(x, (0, 0, 0, -x.shape[0] % block)), weight)[: x.shape[0]]
    for count in sorted({-(-c // block) * block for c in counts if c <= x.shape[0]}):
        for shift in {0, count // 2, count - 1}:
            rolled = F.pad(x, (0, 0, 0, max(0, count - x.shape[0])))[:count].roll(shift, 0)
            out = F.linear(rolled.contiguous(), weight).roll(-shift, 0)
            if not torch.equal(out[: x.shape[0]], whole[:count]):
                return False
    return True


def find_row_block(weights: list[torch.Tensor]) -> int:
    """The smallest row block for which every distinct weight shape is row-equal here, else 0 (row by row)."""
    distinct = list({(w.shape, w.dtype): w for w in weights}.values())
    return next((m for m in (1, 2, 4, 8) if all(rows_equal(w, m) for w in distinct)), 0)
