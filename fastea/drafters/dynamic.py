"""Drafting with an EAGLE head on a tree that each round grows anew (EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastea.drafters import Draft
from fastea.drafters.children import child_scores
from fastea.drafters.eagle import HeadDrafter
from fastea.eagle import DraftHead
from fastea.state import DecodeState
from fastea.tree import DynamicTree, best_nodes


class DynamicEagleDrafter(HeadDrafter):
    """A level at a time: the `width` best nodes of the level above are run through the head, each gets its `width`
    likeliest children, and all these are candidates; the best of all levels are verified.

    A candidate's score is the sum of log acceptance estimates on its path: log q at T = 0. At T > 0 children are the
    best of log q + g, with the noise g that the target will use; what is left of a child's chance, once that is known,
    is estimated by the softmax of these sums over the draft vocabulary. With the rejection rule, which must not share
    that noise, children are the likeliest at every temperature.

    deeper: asked before each further level whether it pays, with the chances in sum of the nodes that it would expand
    and of those of the level before; None: every level is drafted, and nothing asks the host.
    """

    tree: DynamicTree
    deeper: Callable[[float, float], bool] | None = None

    def __init__(self, head: DraftHead, tree: DynamicTree, rejection: bool = False):
        super().__init__(head, rejection, by_noise=not rejection)
        self.tree = tree.fitted(len(self.ids))
        self.draft_rows = self.tree.draft_rows

    def propose(self, state: DecodeState) -> Draft:
        tree, head, cache = self.tree, self.head, state.draft_cache
        assert cache is not None
        batch, width, device = len(state.root), tree.width, state.root.device
        steps = torch.arange(width, device=device)
        hidden = self.extend(state)
        values, ids = self._children(hidden, state, 1)  # [B, 1, K]
        frontier, score, token = steps.expand(batch, -1), values[:, 0], ids[:, 0]  # candidates, their scores, tokens
        scores, tokens, parents = [score], [token], [torch.full_like(frontier, -1)]
        hidden = hidden.expand(-1, width, -1)
        seen = torch.full((batch, width, max(1, tree.levels - 1)), -1, device=device)  # draft slots on each path
        above = 1.0
        for level in range(2, tree.levels + 1):
            if self.deeper:
                mass = float(score.exp().sum(1).mean())
                if not self.deeper(mass, above):
                    break
                above = mass
            offset, first = (level - 2) * width, width + (level - 2) * width**2
            seen[:, :, level - 2] = offset + steps
            positions = (state.length + level - 2)[:, None].expand(-1, width)
            hidden = head(token, hidden, positions, state.length, seen, offset, cache)
            values, ids = self._children(hidden, state, level)
            sums, ids = (score[:, :, None] + values).flatten(1), ids.flatten(1)  # [B, K * K]
            scores.append(sums)
            tokens.append(ids)
            parents.append(frontier.repeat_interleave(width, 1))
            best = sums.sort(dim=1, descending=True, stable=True).indices[:, :width]
            row = torch.div(best, width, rounding_mode="floor")
            frontier, score, token = first + best, sums.gather(1, best), ids.gather(1, best)
            hidden = hidden.gather(1, row[:, :, None].expand_as(hidden))
            seen = seen.gather(1, row[:, :, None].expand_as(seen))
        candidates = torch.cat(scores, 1)
        chosen, nodes = best_nodes(candidates, torch.cat(parents, 1), tree)
        drafted = torch.cat(tokens, 1).gather(1, chosen)
        return Draft(torch.cat((state.root[:, None], drafted), 1), None, nodes, candidates.gather(1, chosen).exp())

    def _children(self, hidden: torch.Tensor, state: DecodeState, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log acceptance estimates and target ids of every row's children, best first: [B, R, K] each."""
        scores = child_scores(self.head.logits(hidden), self.ids, state, depth, by_noise=self.by_noise)
        values, places = self.head.top(torch.log_softmax(scores, -1), self.tree.width)
        # a branch that overflows has no chance: NaN would rank above its own parent
        return values.masked_fill(values.isnan(), -torch.inf), self.head.target_ids(places)
