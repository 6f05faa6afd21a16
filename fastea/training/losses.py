"""The token loss of draft heads: cross-entropy against the target's whole distribution (arXiv 2401.15077, section 3.2),
whose logits never exist for a whole batch."""

from __future__ import annotations

from typing import Any

import torch

CHUNK, BLOCK = 256, 2048  # rows scored at a time; rows whose errors go into the weight's gradient together


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
        for begin in range(0, hidden.shape[0], BLOCK):
            block = hidden[begin : begin + BLOCK].to(low)
            errors = torch.empty(len(block), len(matrix), dtype=low, device=hidden.device)
            for lo in range(0, len(block), CHUNK):
                rows = slice(begin + lo, begin + lo + len(block[lo : lo + CHUNK]))
                p = target[index[rows]].float()
                log_q = torch.log_softmax((block[lo : lo + CHUNK] @ matrix.T).float(), dim=-1)
                total -= ((p * log_q).sum(-1) * share[rows]).sum()
                errors[lo : lo + CHUNK] = log_q.exp_().sub_(p).mul_(share[rows, None])
            to_hidden[begin : begin + BLOCK] = errors @ matrix
            if to_weight is not None:
                to_weight += errors.T @ block
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
