"""The EAGLE-3 head (arXiv 2503.01840, section 3).

It reads three states from inside the target, squeezed to one width by fc, beside the token's embedding; from the second
draft step on it reads its own last state instead. One layer whose attention takes both, twice as wide; a norm and an LM
head of its own over the draft vocabulary. Rows and positions are those of EAGLE-1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastea.config import ModelConfig
from fastea.eagle import DraftHead
from fastea.linear import Linear
from fastea.llama import DecoderLayer, Llama, RMSNorm


def default_taps(layers: int) -> tuple[int, ...]:
    """Layers whose inputs a head reads unless its configuration says otherwise: low, middle and high."""
    return 2, layers // 2, layers - 3


class PairLayer(DecoderLayer):
    """A layer whose attention reads [norm of the embedding, norm of the state] and adds to the state.

    normed_residual: it adds to the normed state instead (`norm_before_residual` of a head's config.json).
    """

    def __init__(self, config: ModelConfig, qkv_bias: bool, normed_residual: bool):
        super().__init__(config, input_norm=False, qkv_bias=qkv_bias)
        self.qkv = Linear(2 * config.hidden_size, self.qkv.weight.shape[0], bias=qkv_bias)
        self.embed_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.normed_residual = normed_residual


class Eagle3Head(DraftHead):
    """taps: the target's states that it reads (see `Llama`). target_size: their width. own_embedding: it has one."""

    layer: PairLayer

    def __init__(
        self,
        config: ModelConfig,
        taps: tuple[int, ...],
        target_size: int,
        draft_ids: torch.Tensor | None = None,
        *,
        fc_bias: bool = False,
        qkv_bias: bool = False,
        normed_residual: bool = False,
        own_embedding: bool = False,
    ):
        super().__init__(config, draft_ids)
        width, rows = config.hidden_size, config.vocab_size if draft_ids is None else len(draft_ids)
        self.taps, self.target_size = taps, target_size
        self.fc = Linear(len(taps) * target_size, width, bias=fc_bias)
        self.layer = PairLayer(config, qkv_bias, normed_residual)
        self.norm = RMSNorm(width, config.norm_eps)
        self.lm = Linear(width, rows)
        self.embed = nn.Embedding(config.vocab_size, width, _weight=torch.empty(config.vocab_size, width))
        if not own_embedding:
            del self.embed

    def bind(self, target: Llama, max_seq_len: int) -> None:
        """Also have the target hand out the states that this head reads."""
        super().bind(target, max_seq_len)
        if hasattr(self, "embed"):
            self.embed_weight = self.embed.weight.detach()
        target.taps = self.taps

    def state(self, features: torch.Tensor) -> torch.Tensor:
        """[B, R, F] of the target, or the last step's own [B, R, h] -> [B, R, h]."""
        if features.shape[-1] == self.config.hidden_size:
            return features
        return self.fc(features[..., self.target_size :])

    def read(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer, state = self.layer, self.state(features)
        normed = self.normed(state, layer.hidden_norm)
        embedded = self.normed(F.embedding(tokens, self.embed_weight), layer.embed_norm)
        return normed if layer.normed_residual else state, torch.cat((embedded, normed), -1)

    def lm_input(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.normed(hidden, self.norm)
