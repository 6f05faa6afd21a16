"""The token that the target emits: logits -> distribution -> sample by the Gumbel-max rule with keyed noise."""

from __future__ import annotations

import torch

from fastea.kernels.noise import gumbel
from fastea.kernels.register import register

LIKELY = 1024  # nearly always enough of the distribution's head to reach top_p


def _nucleus_cut(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Lowest log-probability that top-p keeps, without a full sort. scores: [..., V] log-probabilities, fp32 ->
    [..., 1].

    The likeliest ids are kept up to the first whose cumulative probability reaches top_p. Exact: where the LIKELY
    largest do not reach it, all are sorted; on a GPU always, since asking would stop the host.
    """
    likely = scores.topk(min(LIKELY, scores.shape[-1]), dim=-1).values
    if scores.is_cuda or bool((likely.exp().sum(-1) <= top_p).any()):
        likely = scores.sort(dim=-1, descending=True).values
    probs = likely.exp()
    before = probs.cumsum(-1) - probs
    return likely.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)


nucleus_cut = register(
    "nucleus_cut(Tensor scores, float top_p) -> Tensor",
    _nucleus_cut,
    lambda scores, top_p: scores.new_empty((*scores.shape[:-1], 1)),
)


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


def _noisy_argmax(scores: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Sample by the Gumbel-max rule: argmax over ids of scores + noise. scores: [B, V] log-probabilities, -inf = cut;
    key: [B] int64 -> ids [B]; ties go to the lowest id. On a CPU noise is made only for what was not cut; a GPU is not
    asked what that is."""
    if scores.is_cuda:
        return (scores + gumbel(key, torch.arange(scores.shape[1], device=scores.device))).argmax(1)
    out = torch.empty_like(key)
    for b in range(len(key)):
        ids = (scores[b] != -torch.inf).nonzero().squeeze(1)
        out[b] = ids[(scores[b, ids] + gumbel(key[b], ids)).argmax()]
    return out


noisy_argmax = register(
    "noisy_argmax(Tensor scores, Tensor key) -> Tensor", _noisy_argmax, lambda scores, key: torch.empty_like(key)
)


def _sample(
    logits: torch.Tensor, key: torch.Tensor, alive: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """`noisy_argmax` of `log_probs`. logits: [B, V]; key: [B] noise keys; alive: [B] bool, rows that are wanted; on a
    CPU the others get 0 and cost nothing -> ids [B]."""
    if logits.is_cuda:
        return noisy_argmax(log_probs(logits, temperature, top_k, top_p), key)
    out = torch.zeros_like(key)
    rows = alive.nonzero().squeeze(1)
    if len(rows):
        out[rows] = noisy_argmax(log_probs(logits[rows], temperature, top_k, top_p), key[rows])
    return out


sample = register(
    "sample(Tensor logits, Tensor key, Tensor alive, float temperature, int top_k, float top_p) -> Tensor",
    _sample,
    lambda logits, key, *_: torch.empty_like(key),
)
