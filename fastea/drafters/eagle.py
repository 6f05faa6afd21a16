"""Drafting with an EAGLE head; on a static tree."""

from __future__ import annotations

import torch

from fastea.cache import TREE_SLACK, KVCache
from fastea.drafters import Draft
from fastea.drafters.children import child_scores, drawn_scores
from fastea.eagle import DraftHead
from fastea.state import DecodeState
from fastea.tree import DynamicTree, Tree


class HeadDrafter:
    """What drafting with a head always needs. draft_rows: rows of the draft cache that one tree takes.

    by_noise: at T > 0 children are the top-k of log q + g with the target's own noise (the draft and the target then
    tend to pick alike); otherwise the top-k of q.
    """

    name = "eagle"
    draft_rows = TREE_SLACK
    tree: Tree | DynamicTree

    def __init__(self, head: DraftHead, rejection: bool, by_noise: bool = True):
        self.head, self.module, self.ids = head, head, head.ids
        self.rejection, self.by_noise = rejection, by_noise

    def new_cache(self, batch: int, max_seq_len: int, device: str | None = None) -> KVCache | None:
        return self.head.new_cache(batch, max_seq_len, device, self.draft_rows)

    def prefill(self, tokens: torch.Tensor, features: torch.Tensor, start: torch.Tensor, cache: KVCache | None) -> None:
        assert cache is not None
        positions = start[:, None] + torch.arange(features.shape[1], device=tokens.device)
        self.head(tokens[:, 1:], features, positions, start, None, 0, cache)

    def propose(self, state: DecodeState) -> Draft:
        """A tree for every sequence of the batch."""
        raise NotImplementedError

    def extend(self, state: DecodeState) -> torch.Tensor:
        """Run the rows that the last round accepted, with the target's true features; the head's output for the root
        [B, 1, h]."""
        assert state.draft_cache is not None
        start = state.length - state.count  # rows before it are made of true features already
        positions = start[:, None] + torch.arange(state.emitted.shape[1], device=start.device)
        out = self.head(state.emitted, state.features, positions, start, None, 0, state.draft_cache)
        return state.last_accepted(out)


class EagleDrafter(HeadDrafter):
    """Each round: one extend forward over the rows accepted last, with the target's true features, then one forward
    a level over the nodes that have children. Rows of the draft cache made from predicted features are overwritten.

    With the rejection rule children are drawn without replacement, from noise of their own.
    """

    tree: Tree

    def __init__(self, head: DraftHead, tree: Tree, rejection: bool = False, by_noise: bool = True):
        super().__init__(head, rejection, by_noise)
        self.tree = tree

    def propose(self, state: DecodeState) -> Draft:
        tree, head, cache = self.tree, self.head, state.draft_cache
        assert cache is not None
        batch, start = len(state.root), state.length
        hidden = self.extend(state)
        tokens = state.root[:, None].repeat(1, len(tree))
        probs: torch.Tensor | None = None
        if self.rejection and not state.sampling.greedy:
            probs = torch.zeros(batch, len(tree), head.config.vocab_size, device=start.device)
        rows = torch.zeros(1, dtype=torch.int64, device=start.device)  # tree slots of the expanded rows above
        for depth, level in enumerate(tree.levels, 1):
            logits = head.logits(hidden)  # [B, expanded rows above, Vd]
            chosen = self._children(logits, state, depth, rows, probs)
            tokens[:, level.nodes] = chosen[:, level.parents, level.ranks]
            if level.expanded.numel() == 0:
                break
            rows = level.nodes[level.expanded]
            hidden = head(
                tokens[:, rows],
                hidden[:, level.parents[level.expanded]],
                (state.length + depth - 1)[:, None].expand(-1, rows.numel()),
                state.length,
                level.words.expand(batch, -1),
                level.offset,
                cache,
            )
        return Draft(tokens, probs)

    def _children(
        self, logits: torch.Tensor, state: DecodeState, depth: int, rows: torch.Tensor, probs: torch.Tensor | None
    ) -> torch.Tensor:
        """Ranked children of every expanded row: [B, R, C] target ids."""
        width = min(self.tree.children.shape[1], logits.shape[-1])
        if probs is not None:
            scores = drawn_scores(logits, self.ids, state, depth, rows, probs)
        else:
            scores = child_scores(logits, self.ids, state, depth, self.by_noise)
        chosen = self.head.target_ids(self.head.top(scores, width)[1])
        short = self.tree.children.shape[1] - width
        return chosen if not short else torch.cat((chosen, chosen[..., -1:].expand(-1, -1, short)), -1)
