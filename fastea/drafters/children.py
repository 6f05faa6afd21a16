"""Which tokens a drafter proposes after a row of its logits."""

from __future__ import annotations

import torch

from fastea.kernels.noise import gumbel
from fastea.sampling import CHILDREN, PICK, log_probs, noise_key
from fastea.state import DecodeState


def child_scores(
    logits: torch.Tensor, ids: torch.Tensor, state: DecodeState, depth: int, by_noise: bool = True
) -> torch.Tensor:
    """Whose best are proposed: [B, R, Vd] -> [B, R, Vd]. depth: of the children; ids: [Vd] target ids.

    At T > 0, by_noise, log q + g with the noise that the target will pick with, so that both tend to pick alike;
    otherwise log q at that temperature.
    """
    if state.sampling.greedy:
        return logits
    log_q = torch.log_softmax(logits / state.sampling.temperature, -1)
    if not by_noise:
        return log_q
    return log_q + gumbel(noise_key(state.seed, state.stream, (state.length + depth)[:, None], PICK), ids)


def drawn_scores(
    logits: torch.Tensor, ids: torch.Tensor, state: DecodeState, depth: int, rows: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """The same for the rejection rule: the best are a draw without replacement from the distribution q, which is kept
    in probs [B, N, V] at the parents' slots `rows` [R]. Its noise is its own."""
    scores = log_probs(logits, state.sampling)
    probs[:, rows[:, None], ids] = scores.exp()
    # siblings of different parents must not share their draws: the parent's slot joins the position
    places = (state.length + depth)[:, None] * 64 + rows
    return scores + gumbel(noise_key(state.seed, state.stream, places, CHILDREN), ids)
