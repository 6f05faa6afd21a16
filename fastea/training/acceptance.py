"""How often drafts are accepted, by depth and child rank, measured by decoding held-out prompts."""

from __future__ import annotations

from typing import Any

import torch
from tqdm import tqdm

from fastea.generator import Generator
from fastea.round import Outcome
from fastea.tree import AnyTree, Tree


class AcceptanceTable:
    """Counts over rounds. For every node on an accepted path that has children, each child is one trial at its
    (depth, rank), and the child that was accepted is a hit. Empty for trees that change: ranks are not recorded."""

    def __init__(self, tree: AnyTree):
        self.tree = tree.to("cpu")
        self.trials, self.hits = torch.zeros(2, tree.depth_max + 1, tree.width if isinstance(tree, Tree) else 0)

    def add(self, outcome: Outcome) -> None:
        if not isinstance(self.tree, Tree):
            return
        paths, counts = outcome.path.tolist(), outcome.count.tolist()
        for path, count in zip(paths, counts, strict=True):
            for depth in range(count):
                children = self.tree.children[path[depth]] >= 0
                if depth < self.tree.depth_max:
                    self.trials[depth + 1] += children
                if depth:
                    self.hits[depth, self.tree.rank[path[depth]]] += 1

    def rates(self) -> list[list[float | None]]:
        """[depth - 1][rank] acceptance, None where the tree has no such child."""
        table: list[list[float | None]] = []
        if not isinstance(self.tree, Tree):
            return table
        for trials, hits in zip(self.trials[1:].tolist(), self.hits[1:].tolist(), strict=True):
            table.append([round(h / t, 4) if t else None for h, t in zip(hits, trials, strict=True)])
        return table


def measure(
    generator: Generator, prompts: list[str], max_new_tokens: int, batch: int = 8, **options: Any
) -> dict[str, Any]:
    """Decode the prompts, `batch` at a time; tokens per round (accepted drafts + 1, averaged over all rounds) and the
    table."""
    table, rounds, tokens = AcceptanceTable(generator.tree), 0, 0
    bar = tqdm(total=len(prompts), unit="prompt", desc="acceptance")
    for lo in range(0, len(prompts), batch):
        outputs = generator.generate(
            prompts[lo : lo + batch], max_new_tokens=max_new_tokens, observe=table.add, **options
        )
        assert isinstance(outputs, list)
        for output in outputs:
            rounds += output.rounds
            tokens += output.round_tokens
        bar.update(len(outputs))
    bar.close()
    return {
        "tree": generator.tree.name,
        "prompts": len(prompts),
        "rounds": rounds,
        "tokens_per_round": round(tokens / max(1, rounds), 3),
        "by_depth_and_rank": table.rates(),
    }
