"""The token loss of draft heads: cross-entropy against the target's whole distribution (arXiv 2401.15077, section 3.2),
whose logits never exist for a whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fastea.runtime import can_compile, compiled

CHUNK, BLOCK = 256, 2048  # rows scored at a time; rows whose errors go into the weight's gradient together
WORTH = 2**20  # logits of a chunk from which compiling what is done to them pays


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits.float(), -1).to(logits.dtype)


def _errors(logits: torch.Tensor, target: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, Vd], [R, Vd], [R] -> the sum of share * cross-entropy, and its gradient to the logits."""
    log_q, p = torch.log_softmax(logits.float(), -1), target.float()
    return -((p * log_q).sum(-1) * share).sum(), ((log_q.exp() - p) * share[:, None]).to(logits.dtype)


@functools.cache
def _fast(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    return compiled(function) if can_compile(device) else function


def _chosen(function: Callable[..., Any], width: int, device: torch.device) -> Callable[..., Any]:
    return _fast(function, device.type) if CHUNK * width >= WORTH else function


def distributions(features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a target says: features [M, h], LM head rows [Vd, h] -> probabilities [M, Vd] in the weight's dtype."""
    out = torch.empty(len(features), len(weight), dtype=weight.dtype, device=weight.device)
    softmax = _chosen(_softmax, len(weight), weight.device)
    for lo in range(0, len(out), CHUNK):
        x = features[lo : lo + CHUNK].to(weight.dtype)
        out[lo : lo + CHUNK] = softmax(F.pad(x, (0, 0, 0, CHUNK - len(x))) @ weight.T)[: len(x)]
    return out


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over rows of share * cross-entropy between a target distribution and the head's.

    hidden: [R, h] and weight: [Vd, h] give the head's logits; target: [M, Vd] distributions; index: [R] which of them;
    share: [R] fp32. Products are made in the target's dtype, sums in fp32. All gradients are made in the forward pass:
    (q - p) weight and (q - p)^T hidden.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        index: torch.Tensor,
        share: torch.Tensor,
    ) -> torch.Tensor:
        low = target.dtype
        matrix, total = weight.to(low), torch.zeros((), device=hidden.device)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        score = _chosen(_errors, len(matrix), hidden.device)
        for begin in range(0, hidden.shape[0], BLOCK):
            block = hidden[begin : begin + BLOCK].to(low)
            padding = -len(block) % CHUNK  # rows that count nothing: chunks have one shape
            x = F.pad(block, (0, 0, 0, padding))
            rows = F.pad(index[begin : begin + BLOCK], (0, padding))
            shares = F.pad(share[begin : begin + BLOCK], (0, padding))
            errors = torch.empty(len(x), len(matrix), dtype=low, device=hidden.device)
            for lo in range(0, len(x), CHUNK):
                some = slice(lo, lo + CHUNK)
                loss, errors[some] = score(x[some] @ matrix.T, target[rows[some]], shares[some])
                total += loss
            to_hidden[begin : begin + BLOCK] = (errors @ matrix)[: len(block)]
            if to_weight is not None:
                to_weight += errors.T @ x
        ctx.save_for_backward(to_hidden, to_weight)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        to_hidden, to_weight = ctx.saved_tensors
        return upstream * to_hidden, None if to_weight is None else upstream * to_weight, None, None, None


def cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, index: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    return ChunkedCrossEntropy.apply(hidden, weight, target, index, share)
