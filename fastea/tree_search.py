"""Which tree yields most tokens a second, given how often drafts are accepted and what a round costs.

A node is accepted if every node on its path is: with a(depth, rank), the rate at which the child of that rank is
accepted under an accepted node of the depth above, its chance is the product along the path, and a round yields 1 + the
sum of all chances. What a round costs depends on its nodes and its depth alone, so that for every depth the best tree
of N nodes is the N - 1 best chances, and trying all N and depths finds the best of all trees.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fastea.tree import MAX_DEPTH, MAX_NODES

Path = tuple[int, ...]
Rates = Sequence[Sequence[float | None]]  # [depth - 1][rank]
FADING = 0.5  # of the rate before it: a rank of which nothing is known


class Static(NamedTuple):
    """A tree without its root, in the order of the nodes' chances, and what it is expected to yield and to cost."""

    paths: list[Path]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def rate(rates: Rates, depth: int, rank: int) -> float:
    """a(depth, rank), never above that of the rank before. Depths below the table's last are as that one."""
    row = [value for value in rates[min(depth, len(rates)) - 1] if value is not None]
    if not row:
        return 0.0
    known = min(row[: rank + 1])
    return known * FADING ** max(0, rank + 1 - len(row))


def chance_of(rates: Rates, path: Path) -> float:
    """That a node is accepted: the product along its path."""
    return math.prod(rate(rates, depth, rank) for depth, rank in enumerate(path, 1))


def chances(rates: Rates, depth: int) -> Iterator[tuple[float, Path]]:
    """(chance, path) of all nodes down to a depth, best first; a parent comes before its children, a sibling before the
    next."""
    heap: list[tuple[float, Path]] = [(-rate(rates, 1, 0), (0,))]
    while heap:
        negative, path = heapq.heappop(heap)
        yield -negative, path
        above = -negative / (rate(rates, len(path), path[-1]) or 1.0)
        heapq.heappush(heap, (-above * rate(rates, len(path), path[-1] + 1), (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(heap, (negative * rate(rates, len(path) + 1, 0), (*path, 0)))


def best_static(
    rates: Rates, seconds: Callable[[int, int], float], nodes: int = MAX_NODES, deepest: int = MAX_DEPTH
) -> Static:
    """The tree with the best rate of at most `nodes` nodes, the root included. seconds: of a round with a tree of N
    nodes and a depth."""
    best = Static([(0,)], 1 + rate(rates, 1, 0), seconds(2, 1))
    for depth in range(1, deepest + 1):
        paths: list[Path] = []
        tokens, reached = 1.0, 0
        for chance, path in chances(rates, depth):
            paths.append(path)
            tokens, reached = tokens + chance, max(reached, len(path))
            found = Static(paths, tokens, seconds(len(paths) + 1, reached))
            if found.rate > best.rate:
                best = found._replace(paths=list(paths))
            if len(paths) + 1 >= nodes:
                break
    return best
