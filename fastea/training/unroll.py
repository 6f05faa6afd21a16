"""A head run over whole sequences as it runs when it drafts: true features first, then its own states.

This is EAGLE-3's training-time test (arXiv 2503.01840, section 3.2). Row p of step j stands for the draft of depth
j + 1 that starts at feature f_p: it reads token t_{p+1+j} (the text's, not the head's own), has position p + j, and
predicts token t_{p+2+j}. It sees the rows 0 .. p of step 0, made from true features, and of the later steps its own
row only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fastea.eagle import DraftHead
from fastea.linear import Linear


class ScaledLinear(Linear):
    """Inputs times `scale` [inputs] before the product, so that a weight is trained on inputs of like size."""

    scale: torch.Tensor

    def __init__(self, layer: Linear, scale: torch.Tensor):
        super().__init__(0, 0)
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("scale", scale)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x * self.scale, self.weight, self.bias).float()

    def plain(self) -> Linear:
        """The same layer with the scale in its weight."""
        layer = Linear(0, 0)
        layer.weight = torch.nn.Parameter(self.weight.detach() * self.scale, requires_grad=False)
        layer.bias = self.bias
        return layer


def unroll(
    head: DraftHead, tokens: torch.Tensor, features: torch.Tensor, rows: torch.Tensor, steps: int, ahead: int = 1
) -> Iterator[torch.Tensor]:
    """The head's output [B, A, h] at the rows [B, A] of every step.

    tokens: [B, T]; features: [B, T, F] the target's. ahead: row p of step 0 reads token p + ahead. What stands past the
    end is anything; rows that need it are to be left out of the loss.
    """
    last = tokens.shape[1] - 1
    every = torch.arange(last + 1, device=tokens.device)
    following = tokens[:, (every + ahead).clamp(max=last)]
    residual, given = head.read(following, features)
    q, keys, values = head.layer.project(given, head.rope[every].expand(len(tokens), -1, -1, -1))
    hidden = head.layer.finish(_at(residual, rows).float(), attention(_at(q, rows), keys, values, rows, []))
    yield hidden
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(1, steps):
        residual, given = head.read(tokens.gather(1, (rows + ahead + step).clamp(max=last)), hidden)
        q, k, v = head.layer.project(given, head.rope[rows + step])
        own.append((k, v))
        hidden = head.layer.finish(residual.float(), attention(q, keys, values, rows, own))
        yield hidden


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    own: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """q: [B, A, H, D], of the rows [B, A]; keys, values: [B, T, KV, D] of step 0; own: for each later step those of the
    rows themselves [B, A, KV, D] -> [B, A, H, D]."""
    groups = q.shape[2] // keys.shape[2]
    if groups > 1:
        keys, values = (t.repeat_interleave(groups, 2) for t in (keys, values))
        own = [(k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)) for k, v in own]
    q = q * (1 / math.sqrt(q.shape[3]))
    scores = (q.transpose(1, 2) @ keys.permute(0, 2, 3, 1)).float()  # [B, H, A, T]
    hidden = torch.arange(keys.shape[1], device=q.device) > rows[:, None, :, None]
    parts = [scores.masked_fill(hidden, -torch.inf)]
    parts += [(q * k).sum(-1).float().transpose(1, 2)[..., None] for k, _ in own]
    shares = torch.softmax(torch.cat(parts, -1), -1).to(values.dtype)
    mixed = (shares[..., : keys.shape[1]] @ values.transpose(1, 2)).transpose(1, 2)
    for i, (_, v) in enumerate(own):
        mixed = mixed + shares[..., keys.shape[1] + i].transpose(1, 2)[..., None] * v
    return mixed


def _at(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] at rows [B, A] -> [B, A, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], rows]
