"""Prompt lookup: draft what followed the latest earlier occurrence of the last few tokens."""

from __future__ import annotations

import torch

from fastea.cache import KVCache
from fastea.drafters import Draft
from fastea.state import DecodeState
from fastea.tree import Tree

LONGEST = 3  # tokens that are matched, fewer if no such run occurred before


class NgramDrafter:
    """Needs no weights. A chain: the continuation of the longest (up to LONGEST tokens), then latest match; a match
    near the end repeats its period. Without a match the root is repeated."""

    name = "ngram"
    module = None

    def __init__(self, tree: Tree):
        self.tree = tree

    def new_cache(self, batch: int, max_seq_len: int, device: str | None = None) -> KVCache | None:
        return None

    def prefill(self, tokens: torch.Tensor, features: torch.Tensor, start: torch.Tensor, cache: KVCache | None) -> None:
        pass

    def propose(self, state: DecodeState) -> Draft:
        continuation, found = continued(state, len(self.tree) - 1)
        return Draft(torch.cat((state.root[:, None], torch.where(found, continuation, state.root[:, None])), 1))


def continued(state: DecodeState, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` tokens that followed the longest (up to LONGEST tokens), then latest match [B, count], and whether there
    was one [B, 1]."""
    history, end = state.history, state.length[:, None]  # history[end] is the root
    size = history.shape[1]
    place = torch.arange(size, device=history.device).expand_as(history)
    run = torch.zeros_like(history)  # tokens that agree, backwards from each place, with the end of the text
    agree = torch.ones_like(history, dtype=torch.bool)
    for back in range(LONGEST):
        wanted = history.gather(1, (end - back).clamp(min=0))
        agree = agree & (place >= back) & (history.roll(back, 1) == wanted) & (end >= back)
        run = run + agree
    score = torch.where(place < end, run * size + place, -1)
    best = score.argmax(1, keepdim=True)
    found = score.gather(1, best) >= size
    best = torch.where(found, best, end - 1)
    step = torch.arange(count, device=history.device)
    return history.gather(1, (best + 1 + step % (end - best).clamp(min=1)).clamp(0, size - 1)), found
