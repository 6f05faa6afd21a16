"""The EAGLE-1 head (arXiv 2401.15077, section 3.1; EAGLE-2 uses the same weights).

It predicts the target's next feature from [embedding of t_{i+1}, feature f_i]; the target's LM head turns that
into a draft token. Row (f_i, t_{i+1}) has position i. One LLaMA layer without input norm, no final norm.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fastea.cache import TREE_SLACK, KVCache
from fastea.config import ModelConfig, rope_table
from fastea.kernels.attention import attend, sight
from fastea.linear import Linear
from fastea.llama import DecoderLayer, Llama, RMSNorm
from fastea.quantized import Quantizer


class DraftHead(nn.Module):
    """What every head has: one decoder layer, a draft vocabulary, and the target's embedding once it is bound.

    draft_ids: ascending target ids of the draft vocabulary [Vd] int64, None = the target's whole vocabulary.
    """

    rope: torch.Tensor
    embed_weight: torch.Tensor
    fc: Linear
    layer: DecoderLayer
    lm: Linear

    def __init__(self, config: ModelConfig, draft_ids: torch.Tensor | None):
        super().__init__()
        self.config, self.draft_ids = config, draft_ids
        self.card: dict[str, Any] = {}  # training record: data, losses, acceptance
        self.quantizer: Quantizer | None = None

    def bind(self, target: Llama, max_seq_len: int) -> None:
        """Take what the target gives: its embedding, rotary tables of its context."""
        self.embed_weight = target.embed.weight.detach()  # a plain tensor: no part of this module's own state
        device = self.embed_weight.device
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(device)
        table = rope_table(self.config, max_seq_len + TREE_SLACK)
        self.register_buffer("rope", table.to(device), persistent=False)

    @property
    def ids(self) -> torch.Tensor:
        """Target ids of the draft vocabulary [Vd]."""
        if self.draft_ids is not None:
            return self.draft_ids
        return torch.arange(self.config.vocab_size, device=self.embed_weight.device)

    def new_cache(self, batch: int, max_seq_len: int, device: str | None = None, rows: int = TREE_SLACK) -> KVCache:
        """rows: that one drafted tree takes."""
        c, like = self.config, self.layer.mlp_norm.weight
        limit = max_seq_len + max(0, rows - TREE_SLACK)
        return KVCache(1, batch, c.num_kv_heads, limit, c.head_dim, like.dtype, device or like.device)

    def forward(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        start: torch.Tensor,
        words: torch.Tensor | None,
        offset: int,
        cache: KVCache,
    ) -> torch.Tensor:
        """tokens, positions: [B, R]; features: [B, R, F] the target's, or [B, R, h] what this returned before ->
        [B, R, h], for `logits` and for the rows that follow.

        Writes cache rows start + offset + r; words (or lists) as in `fastea.kernels.attention.sight`.
        """
        residual, given = self.read(tokens, features)
        return self.run(residual, given, positions, start, words, offset, cache)

    def read(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer adds to [B, R, h], and what its attention reads [B, R, ...]."""
        raise NotImplementedError  # each kind of head has its own

    def run(
        self,
        residual: torch.Tensor,
        given: torch.Tensor,
        positions: torch.Tensor,
        start: torch.Tensor,
        words: torch.Tensor | None,
        offset: int,
        cache: KVCache,
    ) -> torch.Tensor:
        """The layer: [B, R, h]."""
        q, k, v = self.layer.project(given, self.rope[positions])
        keys, values, rows = cache.keys[0], cache.values[0], q.shape[1]
        at = start[:, None] + offset + torch.arange(rows, device=start.device)
        seen = sight(words, start, offset, rows, q.shape[2] // k.shape[2], keys)
        mixed = attend(q, k, v, keys, values, at, seen)
        return self.layer.finish(residual, mixed)

    def normed(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """[..., h] -> [..., h]."""
        return cast(torch.Tensor, norm(x))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """The LM head's input [..., h] -> fp32 [..., Vd]."""
        return self.lm(x).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `forward` returned [..., h] -> fp32 logits over the draft vocabulary [..., Vd]."""
        return self.scores(self.lm_input(hidden))

    def lm_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `forward` returned [..., h] as the LM head reads it."""
        return hidden

    def top(self, scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` best of the draft vocabulary, best first. [..., Vd] -> values and indices [..., count]."""
        values, indices = scores.topk(count, dim=-1)
        return values, indices

    def target_ids(self, draft: torch.Tensor) -> torch.Tensor:
        """Draft vocabulary indices -> target token ids."""
        return draft if self.draft_ids is None else self.draft_ids[draft]


class EagleHead(DraftHead):
    """fc, one decoder layer, and the rows of the target's LM head that it may propose."""

    def __init__(self, config: ModelConfig, fc_bias: bool, qkv_bias: bool, draft_ids: torch.Tensor | None = None):
        super().__init__(config, draft_ids)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layer = DecoderLayer(config, input_norm=False, qkv_bias=qkv_bias)

    def bind(self, target: Llama, max_seq_len: int) -> None:
        """Also share the target's LM head (its draft vocabulary's rows, copied once)."""
        super().bind(target, max_seq_len)
        self.lm = target.lm_head if self.draft_ids is None else target.lm_head.subset(self.draft_ids)
        if self.quantizer and self.quantizer.packs and type(self.lm) is Linear:
            self.quantizer.place(self, "lm.weight", self.lm.weight)

    def read(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc(torch.cat((F.embedding(tokens, self.embed_weight), features), dim=-1))
        return x, x
