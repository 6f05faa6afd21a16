"""Products whose rows do not depend on the rows beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

SIZES = (1, 2, 4, 8, 16, 32, 64)  # row counts that products are padded to

Product = Callable[[torch.Tensor], torch.Tensor]  # [M, K] -> [M, N]


def product_rows(product: Product, x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """A product whose rows keep their bits for every row count. x: [..., K] -> [..., N].

    Rows go in parts of at most sizes[-1], each padded to the next of `sizes`, among which the backend was found
    row-equal (`find_row_sizes`). (1,) is one call a row, equal by construction.
    """
    parts = []
    for part in x.reshape(-1, x.shape[-1]).split(sizes[-1]):
        count = part.shape[0]
        size = next(s for s in sizes if s >= count)
        parts.append(product(F.pad(part, (0, 0, 0, size - count)))[:count])
    return torch.cat(parts).view(*x.shape[:-1], -1)


def rows_equal(product: Product, example: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether rows keep their bits over these row counts, and over places among the rows. A kernel's order of
    summation depends on shapes, not on values, so random rows decide. example: [1, K] of the input's dtype."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes[-1], example.shape[1], generator=generator).to(example)
    whole = product(x)
    for size in sizes:
        for shift in {0, size // 2, size - 1}:
            if not torch.equal(product(x[:size].roll(shift, 0)).roll(-shift, 0), whole[:size]):
                return False
    return True


def find_row_sizes(products: list[tuple[Product, torch.Tensor]]) -> tuple[int, ...]:
    """The longest run of SIZES over which all these products, each with an example row, are row-equal here; the one
    with the smallest counts among equals."""
    best: tuple[int, ...] = (1,)
    for first in range(len(SIZES)):
        run = SIZES[first : first + len(best) + 1]
        while len(run) > len(best) and all(rows_equal(p, example, run) for p, example in products):
            best = run
            run = SIZES[first : first + len(best) + 1]
    return best
