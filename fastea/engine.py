"""A round with its parts, compiled or as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fastea.acceptance import AcceptanceTable
from fastea.drafters import Drafter
from fastea.drafters.draft_model import DraftModelDrafter
from fastea.llama import run_layers
from fastea.pace import Pace
from fastea.replay import Replay
from fastea.runtime import compiled
from fastea.sampling import Sampling
from fastea.tree import AnyTree, chain

if TYPE_CHECKING:
    from fastea.generator import Generator


class Engine:
    """What one tree needs. drafter None = plain decoding. pace: chooses each round's nodes, None: all of the tree's.
    table: what was accepted while it ran."""

    def __init__(self, generator: Generator, drafter: Drafter | None, pace: Pace | None = None):
        self.drafter, self.pace = drafter, pace
        tree: AnyTree = drafter.tree if drafter else chain(0).to(str(generator.device))
        self.round = generator.round_kind(
            generator.model, tree, drafter, generator.rejection, generator.row_sizes, len(generator.tokenizer)
        )
        with torch.inference_mode(False):  # it outlives a caller's inference mode
            self.table = AcceptanceTable(tree)
        self.warm: set[tuple[int, Sampling]] = set()  # batch sizes and settings whose shapes are compiled
        self.replays: dict[tuple[int, Sampling], Replay] = {}  # of the state that is held
        self.use(generator.compile)

    @property
    def layout(self) -> tuple[int, int | None]:
        """What a state is made for: the deepest node, and the rows of the drafter's cache that a tree takes."""
        return self.round.tree.depth_max, getattr(self.drafter, "draft_rows", None)

    def forget_graphs(self) -> None:
        """The state that they are of is given up."""
        self.warm -= self.replays.keys()
        self.replays.clear()

    def use(self, compile: bool) -> None:
        """A few layers of the target for all of them, which compile in seconds, drafting and accepting. Prefill stays
        eager: it is one forward of many rows."""
        compile = compile and not self.round.captures  # there the round is one graph of kernels, and nothing compiles

        def part(function: Callable[..., Any]) -> Callable[..., Any]:
            return compiled(function) if compile else function

        self.round.run_layers = part(run_layers)
        if isinstance(self.drafter, DraftModelDrafter):  # a decoder of its own: layer by layer as well
            self.drafter.run_layers, self.draft = self.round.run_layers, self.round.draft
        else:
            self.draft = part(self.round.draft)
        self.accept = part(self.round.accept)
