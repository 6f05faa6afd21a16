"""The token that the target emits: logits -> distribution -> sample by the Gumbel-max rule with keyed noise."""

from __future__ import annotations

import torch

from fastea.kernels.noise import gumbel

LIKELY = 1024  # nearly always enough of the distribution's head to reach top_p


@torch.library.custom_op("fastea::nucleus_cut", mutates_args=())
def nucleus_cut(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Lowest log-probability that top-p keeps, without a full sort. scores: [..., V] log-probabilities, fp32 ->
    [..., 1].

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


def log_probs(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The target distribution: temperature, top-k, renormalise, top-p, renormalise. fp32 [..., V], -inf = cut.

    Top-k keeps every id at least as likely as the k-th; top-p keeps the likeliest ids up to the first whose
    cumulative probability reaches top_p, with ties of the last one.
    """
    logits = logits.float()
    scores = torch.log_softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    vocab = scores.shape[-1]
    if 0 < top_k < vocab:
        last = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = torch.log_softmax(scores.masked_fill(scores < last, -torch.inf), dim=-1)
    if top_p < 1:
        cut = nucleus_cut(scores, top_p)
        scores = torch.log_softmax(scores.masked_fill(scores < cut, -torch.inf), dim=-1)
    return scores


@torch.library.custom_op("fastea::noisy_argmax", mutates_args=())
def noisy_argmax(scores: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Sample by the Gumbel-max rule: argmax over ids of scores + noise. scores: [B, V] log-probabilities, -inf = cut;
    key: [B] int64 -> ids [B]; ties go to the lowest id. Noise is made only for what was not cut."""
    out = torch.empty_like(key)
    for b in range(len(key)):
        ids = (scores[b] != -torch.inf).nonzero().squeeze(1)
        out[b] = ids[(scores[b, ids] + gumbel(key[b], ids)).argmax()]
    return out


@noisy_argmax.register_fake
def _(scores, key):
    return torch.empty_like(key)


@torch.library.custom_op("fastea::sample", mutates_args=())
def sample(
    logits: torch.Tensor, key: torch.Tensor, alive: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """`noisy_argmax` of `log_probs`. logits: [B, V]; key: [B] noise keys; alive: [B] bool, rows that are wanted; the
    others get 0 and cost nothing -> ids [B]."""
    out = torch.zeros_like(key)
    rows = alive.nonzero().squeeze(1)
    if len(rows):
        out[rows] = noisy_argmax(log_probs(logits[rows], temperature, top_k, top_p), key[rows])
    return out


@sample.register_fake
def _(logits, key, alive, temperature, top_k, top_p):
    return torch.empty_like(key)
