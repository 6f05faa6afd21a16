"""The tree of a head with what followed an earlier occurrence of the text's end: long copies come for the price of
their rows, and the rest is drafted as ever."""

from __future__ import annotations

import torch

from fastea.cache import KVCache
from fastea.drafters import Draft
from fastea.drafters.eagle import HeadDrafter
from fastea.drafters.ngram import continued
from fastea.state import DecodeState
from fastea.tree import JoinedTree, Nodes, Tree


class HybridDrafter:
    """A chain from prompt lookup joins the tree of `inner`. As far as the chain repeats a path of that tree its own
    nodes are never reached, and what follows hangs below the tree's."""

    name = "hybrid"

    def __init__(self, inner: HeadDrafter, length: int):
        self.inner, self.module, self.length = inner, inner.module, length
        self.tree = JoinedTree(inner.tree, length)

    def new_cache(self, batch: int, max_seq_len: int, device: str | None = None) -> KVCache | None:
        return self.inner.new_cache(batch, max_seq_len, device)

    def prefill(self, tokens: torch.Tensor, features: torch.Tensor, start: torch.Tensor, cache: KVCache | None) -> None:
        self.inner.prefill(tokens, features, start, cache)

    def propose(self, state: DecodeState) -> Draft:
        draft = self.inner.propose(state)
        nodes, count = draft.nodes, draft.tokens.shape[1]
        if nodes is None:
            assert isinstance(self.inner.tree, Tree)
            nodes = self.inner.tree.nodes(len(draft.tokens))
        copied, found = continued(state, self.length)
        copied = torch.where(found, copied, state.root[:, None])
        slots = torch.arange(count + self.length, device=copied.device)
        above, parents, words = torch.zeros_like(state.root), [], []
        word = nodes.words[:, 0]
        for i in range(self.length):
            parents.append(above)
            words.append(word | torch.ones_like(word) << (count + i))
            same = (nodes.parent == above[:, None]) & (draft.tokens == copied[:, i : i + 1]) & (slots[:count] > 0)
            known, twin = same.any(1), same.int().argmax(1)
            above = torch.where(known, twin, count + i)
            word = torch.where(known, nodes.words.gather(1, twin[:, None])[:, 0], words[-1])
        depth = torch.arange(1, self.length + 1, device=copied.device).expand_as(copied)
        joined = (torch.stack(parents, 1), depth, torch.stack(words, 1))
        both = Nodes(*(torch.cat(pair, 1) for pair in zip(nodes, joined, strict=True)))
        return Draft(torch.cat((draft.tokens, copied), 1), None, both)
