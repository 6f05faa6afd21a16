"""How often drafts are accepted: counted while decoding, and what to expect of a head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fastea.round import Outcome
from fastea.tree import AnyTree, DynamicTree, Tree

# By depth of the children: how often the likeliest is the target's token where nothing was measured for the head
# (EAGLE-1 paper, table 2, LLaMA-2-Chat 7B), and of what the siblings before it leave, the share that the next one takes
# (as the shipped head's).
FIRST_CHILD = (0.76, 0.69, 0.67, 0.68, 0.68)
NEXT_SIBLING = (0.32, 0.17, 0.12)
PRIOR_ROUNDS = 300  # rounds that a stored table counts as, beside those counted here


class AcceptanceTable:
    """Counts over rounds. On a static tree every child of a node on an accepted path is one trial at its (depth, rank),
    and the child that was accepted a hit. On a dynamic one every round is a trial of each slot, which come best first,
    and the slots of the accepted path are hits. Nothing is counted for other trees."""

    def __init__(self, tree: AnyTree):
        self.tree = tree.to("cpu")
        size = (tree.depth_max + 1, tree.width) if isinstance(tree, Tree) else (len(tree),)
        self.trials, self.hits = torch.zeros(2, *size)

    def add(self, outcome: Outcome) -> None:
        paths, counts = outcome.path.tolist(), outcome.count.tolist()
        for path, count in zip(paths, counts, strict=True):
            if count and isinstance(self.tree, Tree):
                for depth in range(count):
                    if depth < self.tree.depth_max:
                        self.trials[depth + 1] += self.tree.children[path[depth]] >= 0
                    if depth:
                        self.hits[depth, self.tree.rank[path[depth]]] += 1
            elif count and isinstance(self.tree, DynamicTree):
                self.trials += 1
                self.hits[path[1:count]] += 1

    def rates(self) -> list[Any]:
        """Static: [depth - 1][rank], None where the tree has no such child. Dynamic: by slot, the root's left out."""
        shares = torch.where(self.trials > 0, self.hits / self.trials.clamp(min=1), torch.nan)[1:].tolist()
        if isinstance(self.tree, Tree):
            return [[None if r != r else round(r, 4) for r in row] for row in shares]
        return [round(r, 4) for r in shares] if isinstance(self.tree, DynamicTree) and self.trials[0] else []


def expected() -> list[list[float]]:
    """A table by depth and rank for a head of which nothing is known."""
    table = []
    for first in FIRST_CHILD:
        row = [first]
        for share in NEXT_SIBLING:
            row.append((1 - sum(row)) * share)
        table.append(row)
    return table


def corrected(stored: list[list[float | None]], counted: Iterable[AcceptanceTable]) -> list[list[float | None]]:
    """A stored table, moved by what was counted on static trees."""
    tables, reached = [table for table in counted if isinstance(table.tree, Tree)], 1.0
    moved: list[list[float | None]] = []
    for depth, row in enumerate(stored, 1):
        weight = PRIOR_ROUNDS * reached  # a deep node's rate rests on fewer trials
        reached *= min(1.0, sum(rate or 0.0 for rate in row))
        moved.append(list(row))
        for rank, rate in enumerate(row):
            seen = [t for t in tables if depth < t.trials.shape[0] and rank < t.trials.shape[1]]
            if rate is not None and seen:
                hits, trials = (sum(getattr(t, name)[depth, rank].item() for t in seen) for name in ("hits", "trials"))
                moved[-1][rank] = (rate * weight + hits) / (weight + trials) if weight + trials else 0.0
    return moved
