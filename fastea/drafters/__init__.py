"""What proposes draft trees. A drafter changes speed, never text."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from fastea.cache import KVCache
from fastea.state import DecodeState
from fastea.tree import AnyTree, Nodes


class Draft(NamedTuple):
    """tokens: [B, N] target ids of the tree's nodes, slot 0 the root. probs: [B, N, V] distribution from which each
    node's children were drawn without replacement, None where children are chosen with certainty. nodes: the tree of
    this round, None where it is always the same; chances: [B, N - 1] of its nodes but the root, best first, as the
    drafter estimates them."""

    tokens: torch.Tensor
    probs: torch.Tensor | None = None
    nodes: Nodes | None = None
    chances: torch.Tensor | None = None

    def first(self, count: int) -> Draft:
        """Only the best nodes of a tree that comes best first."""
        assert self.nodes is not None and self.chances is not None
        nodes = Nodes(*(part[:, :count] for part in self.nodes))
        return Draft(self.tokens[:, :count], None, nodes, self.chances[:, : count - 1])


class Drafter(Protocol):
    """One way to propose. `name` and `tree` are printed."""

    name: str

    @property
    def tree(self) -> AnyTree:
        """The shape of what it proposes."""

    @property
    def module(self) -> torch.nn.Module | None:
        """What holds its weights, None if it has none."""

    def new_cache(self, batch: int, max_seq_len: int, device: str | None = None) -> KVCache | None:
        """The drafter's own KV cache, None if it has none. device: another than its weights'."""

    def prefill(self, tokens: torch.Tensor, features: torch.Tensor, start: torch.Tensor, cache: KVCache | None) -> None:
        """A prompt chunk was run: tokens [1, C + 1], the rows' own and the one after them, features [1, C, F]; start:
        [1] position of the first row. The token after the last row may be unknown (anything): that row is drafted again
        later."""

    def propose(self, state: DecodeState) -> Draft:
        """A tree for every sequence of the batch."""
