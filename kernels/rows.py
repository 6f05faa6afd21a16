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


SPAN = 32  # inputs that may share a quantized weight's scale
LARGEST = 4.0  # a weight's size; every span has it in both signs, so that all scales are one


def cancelling(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [N, K] and rows [64, K] in fp32 whose products are zero but for rounding. What is left is decided by the
    order of the sum, and shows in 16 bits too, where the order of an ordinary sum is nearly always rounded away. Inputs
    come in pairs of one weight and opposite values, as far apart as they fall, and of sizes so unlike that no partial
    sum is exact; a quantized weight's pairs stay pairs."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(outputs, inputs, generator=generator).clamp(-LARGEST, LARGEST)
    rows = torch.randn(SIZES[-1], inputs, generator=generator)
    rows *= 2.0 ** torch.randint(-6, 7, rows.shape, generator=generator)
    anchors = torch.arange(inputs) % SPAN
    free = (anchors > 1).nonzero()[:, 0]
    free = free[torch.randperm(len(free), generator=generator)]
    half = len(free) // 2
    matrix[:, free[half : 2 * half]] = matrix[:, free[:half]]
    rows[:, free[half : 2 * half]] = -rows[:, free[:half]]
    rows[:, free[2 * half :]] = 0
    for place, size in ((0, LARGEST), (1, -LARGEST)):
        matrix[:, anchors == place] = size
        rows[:, anchors == place] = 0
    return matrix, rows


def rows_equal(product: Product, rows: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether rows keep their bits over these row counts, and over places among the rows. A kernel's order of
    summation depends on shapes, not on values, so that one set of rows decides. product, rows: of `cancelling`, in the
    form and dtype that are asked about."""
    x = rows[: sizes[-1]]
    whole = product(x)
    for size in sizes:
        for shift in {0, size // 2, size - 1}:
            if not torch.equal(product(x[:size].roll(shift, 0)).roll(-shift, 0), whole[:size]):
                return False
    return True


def find_row_sizes(probes: list[tuple[Product, torch.Tensor]]) -> tuple[int, ...]:
    """The longest run of SIZES over which all these products, each with its rows (see `rows_equal`), are row-equal
    here; the one with the smallest counts among equals."""
    best: tuple[int, ...] = (1,)
    for first in range(len(SIZES)):
        run = SIZES[first : first + len(best) + 1]
        while len(run) > len(best) and all(rows_equal(product, rows, run) for product, rows in probes):
            best = run
            run = SIZES[first : first + len(best) + 1]
    return best
