"""The losses of EAGLE-1 (arXiv 2401.15077, section 3.2): SmoothL1 on features, soft cross-entropy on tokens."""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 512  # rows scored at a time, so that logits never exist for a whole batch


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean over rows of the cross-entropy between the target's and the head's token distributions.

    predicted, feature: [R, h]; lm_weight: [V, h], frozen; target distribution softmax(feature lm_weight^T).
    The gradient to `predicted` is made in the forward pass, chunk by chunk: (q - p) lm_weight / R.
    """

    @staticmethod
    def forward(ctx: Any, predicted: torch.Tensor, feature: torch.Tensor, lm_weight: torch.Tensor) -> torch.Tensor:
        rows = predicted.shape[0]
        grad = torch.empty_like(predicted)
        total = predicted.new_zeros(())
        for lo in range(0, rows, CHUNK):
            p = torch.softmax(feature[lo : lo + CHUNK] @ lm_weight.T, dim=-1)
            log_q = torch.log_softmax(predicted[lo : lo + CHUNK] @ lm_weight.T, dim=-1)
            total -= torch.dot(p.flatten(), log_q.flatten())
            grad[lo : lo + CHUNK] = (log_q.exp_().sub_(p) @ lm_weight).div_(rows)
        ctx.save_for_backward(grad)
        return total / rows

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (grad,) = ctx.saved_tensors
        return upstream * grad, None, None


def cross_entropy(predicted: torch.Tensor, feature: torch.Tensor, lm_weight: torch.Tensor) -> torch.Tensor:
    return ChunkedCrossEntropy.apply(predicted, feature, lm_weight)
