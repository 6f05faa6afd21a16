"""Target, head and round over the Triton kernels: the same weights and the same interfaces, nine launches a layer, no
word from the host inside a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F

from fastea.cache import KVCache
from fastea.drafters import Draft
from fastea.eagle import DraftHead, EagleHead
from fastea.eagle3 import Eagle3Head
from fastea.kernels.choose import choose
from fastea.kernels.gate import silu_mul
from fastea.kernels.norm import add, add_norm
from fastea.kernels.rope import rope_write
from fastea.kernels.topk import top_children
from fastea.kernels.tree_attention import tree_attention
from fastea.kernels.walk import accept_walk
from fastea.llama import DecoderLayer, Expert, Llama, MixtureLayer, RMSNorm
from fastea.round import Outcome, Round
from fastea.sampling import PICK, noise_key
from fastea.state import DecodeState
from fastea.triton_linear import TritonLinear


def run_layer(
    layer: DecoderLayer,
    residual: torch.Tensor,
    normed: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: torch.Tensor,
    visible: torch.Tensor | None,
    offset: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer for M = B x R rows. residual: [M, h]; normed: [M, ...] what its attention reads. Returns the residual
    after attention, and the parts of what the MLP still adds to it."""
    qkv, o = cast(TritonLinear, layer.qkv), cast(TritonLinear, layer.o)
    norms = [None if norm is None else norm.weight for norm in (layer.q_norm, layer.k_norm)]
    q = rope_write(
        qkv.partials(normed), qkv.bias, rope, positions, k_cache, v_cache, start, offset, layer.heads,
        *norms, layer.mlp_norm.eps,
    )  # [B, R, H, D]  # fmt: skip
    mixed = tree_attention(q, k_cache, v_cache, start, visible).flatten(2)
    residual, normed = add_norm(o.partials(mixed), residual, layer.mlp_norm.weight, layer.mlp_norm.eps)
    if not isinstance(layer, MixtureLayer):
        return residual, mlp_partials(layer, normed)
    shares = layer.shares(cast(TritonLinear, layer.router).product(normed, torch.float32))
    total = torch.zeros_like(normed, dtype=torch.float32)
    for i, expert in enumerate(layer.experts):
        share, parts = shares[:, i : i + 1], mlp_partials(cast(Expert, expert), normed)
        total = total + torch.where(share > 0, share * add(parts, None, None, total.shape[1], total.dtype), 0)
    return residual, total[None]


def mlp_partials(part: DecoderLayer | Expert, normed: torch.Tensor) -> torch.Tensor:
    """A gated MLP for M rows, [M, h] -> the parts of its product."""
    gate_up, down = cast(TritonLinear, part.gate_up), cast(TritonLinear, part.down)
    return down.partials(silu_mul(gate_up.partials(normed), down.inputs, normed.dtype))


class FusedLlama(Llama):
    """The decoder. Rows keep their bits for every number of rows and every tree, so that it is its own exact path."""

    def new_cache(self, batch: int, max_seq_len: int, device: str | None = None) -> KVCache:
        c, like = self.config, self.embed.weight
        return KVCache(
            c.num_layers, batch, c.num_kv_heads, max_seq_len, c.head_dim, like.dtype, device or like.device, joined=True
        )

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        start: torch.Tensor,
        words: torch.Tensor | None,
        cache: KVCache,
        row_sizes: tuple[int, ...] | None = None,
        run: Callable[..., list[torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        residual, pending = F.embedding(tokens, self.embed.weight).flatten(0, 1), None
        states = {}
        for i, (module, k, v) in enumerate(zip(self.layers, cache.keys, cache.values, strict=True)):
            layer = cast(DecoderLayer, module)
            norm = cast(RMSNorm, layer.attn_norm)
            residual, normed = add_norm(pending, residual, norm.weight, norm.eps)
            if i in self.taps:
                states[i] = residual
            residual, pending = run_layer(layer, residual, normed, self.rope, positions, k, v, start, words, 0)
        residual, final = add_norm(pending, residual, self.norm.weight, self.norm.eps)
        return self.features(final, states | {len(self.layers): residual}).view(*tokens.shape, -1)

    def logits(self, features: torch.Tensor, row_sizes: tuple[int, ...] | None = None) -> torch.Tensor:
        return cast(TritonLinear, self.lm_head).product(features[..., : self.config.hidden_size], torch.float32)


class FusedHead(DraftHead):
    """A head's layer, norms and products over the kernels."""

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
        added, pending = run_layer(
            self.layer, residual.flatten(0, 1), given.flatten(0, 1), self.rope, positions,
            cache.keys[0], cache.values[0], start, words, offset,
        )  # fmt: skip
        return add(pending, added, None, added.shape[1], added.dtype).view_as(residual)

    def normed(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return cast(torch.Tensor, add_norm(None, x.flatten(0, -2), norm.weight, norm.eps)[1]).view_as(x)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return cast(TritonLinear, self.lm).product(x, torch.float32)

    def top(self, scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = top_children(scores.flatten(0, 1), count)
        return values.view(*scores.shape[:-1], count), ids.view(*scores.shape[:-1], count)


class FusedEagleHead(FusedHead, EagleHead):
    """The EAGLE-1 head."""


class FusedEagle3Head(FusedHead, Eagle3Head):
    """The EAGLE-3 head."""


class FusedRound(Round):
    """Picks at every node at once, then one walk: the same tokens as picking along the walk."""

    captures = True

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self.model.logits(features)

    def accept(self, state: DecodeState, draft: Draft, features: torch.Tensor, logits: torch.Tensor) -> Outcome:
        if self.rejection and not state.sampling.greedy:
            return super().accept(state, draft, features, logits)
        nodes, sampling = self.nodes(draft), state.sampling
        keys = None
        if not sampling.greedy:
            chosen_at = state.length[:, None] + 1 + nodes.depth
            keys = noise_key(state.seed, state.stream, chosen_at, PICK).flatten()
        picks, broken = choose(
            logits.flatten(0, 1), keys, sampling.temperature, sampling.top_k, sampling.top_p, self.valid_vocab
        )
        path, count, emitted = accept_walk(draft.tokens, picks.view_as(draft.tokens), nodes.parent, self.tree.depth_max)
        return self.commit(state, features, broken.view_as(draft.tokens), path, count, emitted)
