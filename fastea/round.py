"""The round: draft, verify, pick, accept, commit. Plain decoding is the round with a tree of one node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastea.drafters import Draft, Drafter
from fastea.llama import Llama, run_layers
from fastea.sampling import PICK, noise_key, walk, walk_by_rejection
from fastea.state import DecodeState
from fastea.tree import AnyTree, JoinedTree, Nodes, Tree


@dataclass
class Outcome:
    """emitted: [B, W] new tokens, the first count[b] of row b are real; path: [B, W] their tree slots;
    finite: [B] whether the target's logits on the accepted path were free of NaN, true where a sequence was done."""

    emitted: torch.Tensor
    count: torch.Tensor
    path: torch.Tensor
    finite: torch.Tensor


class Round:
    """One fixed-shape step for B sequences. drafter None = plain decoding.

    row_sizes: None = the fastest kernels; else the exact path (see `fastea.kernels.rows`).
    valid_vocab: ids at and past it are padding of the embedding and never picked.
    """

    captures = False  # whether a whole round can be one graph: nothing in it asks the host

    def __init__(
        self,
        model: Llama,
        tree: AnyTree,
        drafter: Drafter | None,
        rejection: bool,
        row_sizes: tuple[int, ...] | None,
        valid_vocab: int,
    ):
        self.model, self.tree, self.drafter = model, tree, drafter
        self.rejection, self.row_sizes, self.valid_vocab = rejection, row_sizes, valid_vocab
        self.run_layers: Callable[..., list[torch.Tensor]] = run_layers

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Features [..., h] -> logits [..., V] in which padding ids are impossible."""
        logits = self.model.logits(features, self.row_sizes)
        if self.valid_vocab < logits.shape[-1]:
            logits[..., self.valid_vocab :] = -torch.inf
        return logits

    def __call__(self, state: DecodeState) -> Outcome:
        draft = self.draft(state)
        return self.accept(state, draft, *self.verify(state, draft))

    def draft(self, state: DecodeState) -> Draft:
        """The tree of this round."""
        return Draft(state.root[:, None]) if self.drafter is None else self.drafter.propose(state)

    def verify(self, state: DecodeState, draft: Draft) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's features [B, N, h] and logits [B, N, V] at every node."""
        nodes = self.nodes(draft)
        positions = state.length[:, None] + nodes.depth
        words = None if self.tree.is_chain else nodes.words
        how = self.row_sizes, self.run_layers
        features = self.model(draft.tokens, positions, state.length, words, state.cache, *how)
        return features, self.logits(features)

    def nodes(self, draft: Draft) -> Nodes:
        """The tree of this round."""
        if draft.nodes is not None:
            return draft.nodes
        assert isinstance(self.tree, Tree)
        return self.tree.nodes(len(draft.tokens))

    def accept(self, state: DecodeState, draft: Draft, features: torch.Tensor, logits: torch.Tensor) -> Outcome:
        """Pick along the walk, and commit what was accepted."""
        tree, parent = self.tree, self.nodes(draft).parent
        chosen_at = state.length[:, None] + torch.arange(1, tree.depth_max + 2, device=features.device)
        if self.rejection and not state.sampling.greedy:
            assert not isinstance(tree, JoinedTree)  # its siblings may be one token twice
            path, count, emitted = walk_by_rejection(
                draft.tokens, logits, draft.probs, parent, tree.width,
                state.sampling, state.seed, state.stream, chosen_at,
            )  # fmt: skip
        else:
            keys = noise_key(state.seed, state.stream, chosen_at, PICK)
            path, count, emitted = walk(draft.tokens, logits, keys, parent, state.sampling)
        return self.commit(state, features, logits.amax(-1).isnan(), path, count, emitted)

    def commit(
        self,
        state: DecodeState,
        features: torch.Tensor,
        broken: torch.Tensor,
        path: torch.Tensor,
        count: torch.Tensor,
        emitted: torch.Tensor,
    ) -> Outcome:
        """Keep the accepted rows: their keys and values, features and tokens; advance what is not done. broken: [B, N]
        nodes with a NaN among their logits."""
        path = path.clamp(max=features.shape[1] - 1)  # unused places of it name slots that a small tree has not
        if not self.tree.is_chain:
            state.cache.compact(state.length, path)
        steps = torch.arange(path.shape[1], device=path.device)
        failed = (broken.gather(1, path) & (steps < count[:, None])).any(1)
        finite = ~failed | state.done
        count = torch.where(state.done, 0, count)
        state.features.copy_(features.gather(1, path[..., None].expand(-1, -1, features.shape[2])))
        state.emitted.copy_(emitted)
        state.count.copy_(count)
        state.history.scatter_(1, state.length[:, None] + 1 + steps, emitted)
        state.length.add_(count)
        last = emitted.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        state.root.copy_(torch.where(count > 0, last, state.root))
        stopped = (emitted[:, :, None] == state.stop_ids).any(2) & (steps < count[:, None])
        state.done.logical_or_(stopped.any(1) | (state.length + 1 >= state.limit))
        return Outcome(emitted, count, path, finite)
