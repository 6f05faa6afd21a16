"""Drafting with a small model of the same vocabulary (speculative sampling, arXiv 2211.17192 and 2302.01318)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastea.cache import KVCache
from fastea.drafters import Draft
from fastea.drafters.children import child_scores, drawn_scores
from fastea.llama import Llama, run_layers
from fastea.state import DecodeState
from fastea.tree import Tree


class DraftModelDrafter:
    """Each round: one forward over the tokens accepted last, then one a token of the chain.

    model: with rotary tables for the run's context; vocab: ids from there on are no tokens and never proposed. With the
    rejection rule the chain is drawn from the model's distribution, from noise of its own; columns: the target's
    vocabulary, padding included, over which that distribution is handed on.
    """

    name = "model"

    def __init__(self, model: Llama, tree: Tree, vocab: int, rejection: bool = False, columns: int | None = None):
        self.model, self.module, self.tree, self.rejection = model, model, tree, rejection
        self.columns = columns or vocab
        self.ids = torch.arange(vocab, device=model.embed.weight.device)
        self.run_layers: Callable[..., list[torch.Tensor]] = run_layers

    def new_cache(self, batch: int, max_seq_len: int, device: str | None = None) -> KVCache | None:
        return self.model.new_cache(batch, max_seq_len, device)

    def prefill(self, tokens: torch.Tensor, features: torch.Tensor, start: torch.Tensor, cache: KVCache | None) -> None:
        self._forward(tokens[:, :-1], start, cache)

    def _forward(self, tokens: torch.Tensor, start: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        """Tokens [B, R] from position start [B] on -> features [B, R, h]."""
        assert cache is not None
        positions = start[:, None] + torch.arange(tokens.shape[1], device=start.device)
        return self.model(tokens, positions, start, None, cache, None, self.run_layers)

    def propose(self, state: DecodeState) -> Draft:
        steps, size = len(self.tree) - 1, len(self.ids)
        probs: torch.Tensor | None = None
        if self.rejection and not state.sampling.greedy:
            probs = torch.zeros(len(state.root), steps + 1, self.columns, device=self.ids.device)
        hidden = self._forward(state.emitted, state.length - state.count + 1, state.draft_cache)
        hidden, tokens = state.last_accepted(hidden), [state.root[:, None]]
        for depth in range(1, steps + 1):
            logits = self.model.logits(hidden)[..., :size]
            if probs is not None:
                slot = torch.full((1,), depth - 1, device=self.ids.device)
                scores = drawn_scores(logits, self.ids, state, depth, slot, probs)
            else:
                scores = child_scores(logits, self.ids, state, depth)
            tokens.append(scores.argmax(-1))
            if depth < steps:
                hidden = self._forward(tokens[-1], state.length + depth, state.draft_cache)
        return Draft(torch.cat(tokens, 1), probs)
