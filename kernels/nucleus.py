"""The cut of top-p sampling without a full sort."""

from __future__ import annotations

import torch

LIKELY = 1024  # nearly always enough of the distribution's head to reach top_p


@torch.library.custom_op("fastea::nucleus_cut", mutates_args=())
def nucleus_cut(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Lowest log-probability that top-p keeps. scores: [..., V] log-probabilities, fp32 -> [..., 1].

    The likeliest ids are kept up to the first whose cumulative probability reaches top_p. Exact: where the LIKELY
    largest do not reach it, all are sorted.
    """
    likely = scores.topk(min(LIKELY, scores.shape[-1]), dim=-1).values
    if bool((likely.exp().sum(-1) <= top_p).any()):
        likely = scores.sort(dim=-1, descending=True).values
    probs = likely.exp()
    before = probs.cumsum(-1) - probs
    return likely.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)


@nucleus_cut.register_fake
def _(scores, top_p):
    return scores.new_empty((*scores.shape[:-1], 1))
