"""The target: a LLaMA decoder in plain PyTorch, over a static KV cache.

Rows in, features out: `forward` takes R new tokens of each sequence (a prefill chunk, the pending token,
or a draft tree) and returns the states after the final norm, which the LM head and an EAGLE head read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from fastea.cache import TREE_SLACK, KVCache
from fastea.config import ModelConfig, rope_table
from fastea.kernels.attention import attend, attend_alone, sight
from fastea.linear import Linear


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split pairs. x: [B, R, heads, D]; table: [B, R, 2, D/2] cosines and sines."""
    cos, sin = table.to(x.dtype)[:, :, :, None].unbind(2)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def gated(gate: torch.Tensor, up: torch.Tensor, by_row: bool) -> torch.Tensor:
    """silu(gate) * up, [..., I]. by_row: one call a row; a larger call may be cut anywhere between threads, and the
    ends of a thread's part go through another exponential than its middle."""
    if not by_row:
        return F.silu(gate) * up
    rows = zip(gate.flatten(0, -2), up.flatten(0, -2), strict=True)
    return torch.stack([F.silu(g) * u for g, u in rows]).view(gate.shape)


def gated_mlp(part: DecoderLayer | Expert, x: torch.Tensor, row_sizes: tuple[int, ...] | None) -> torch.Tensor:
    """down(silu(gate) * up), [..., h] -> [..., h]."""
    gate, up = part.gate_up(x, row_sizes).chunk(2, dim=-1)
    y: torch.Tensor = part.down(gated(gate, up, by_row=row_sizes is not None), row_sizes)
    return y


class DecoderLayer(nn.Module):
    """Attention and gated MLP with residuals. input_norm=False is EAGLE-1's layer."""

    def __init__(self, config: ModelConfig, input_norm: bool = True, qkv_bias: bool = False):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = config.hidden_size
        self.attn_norm = RMSNorm(width, config.norm_eps) if input_norm else None
        bias = qkv_bias or config.qkv_bias
        self.qkv = Linear(width, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.o = Linear(self.heads * self.head_dim, width)
        self.mlp_norm = RMSNorm(width, config.norm_eps)
        self.gate_up = Linear(width, 2 * config.intermediate_size)
        self.down = Linear(config.intermediate_size, width)

    def project(self, x: torch.Tensor, rope: torch.Tensor, row_sizes: tuple[int, ...] | None = None):
        """x: [B, R, h] -> rotated queries [B, R, H, D], rotated keys and values [B, R, KV, D]."""
        normed = x if self.attn_norm is None else self.attn_norm(x)
        split = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv(normed, row_sizes).view(*x.shape[:2], -1, self.head_dim).split(split, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rope), rotate(k, rope), v

    def finish(self, x: torch.Tensor, mixed: torch.Tensor, row_sizes: tuple[int, ...] | None = None) -> torch.Tensor:
        """x: [..., h] residual; mixed: [..., H, D] attention output -> [..., h]."""
        x = x + self.o(mixed.flatten(-2), row_sizes)
        return x + self.mlp(self.mlp_norm(x), row_sizes)

    def mlp(self, x: torch.Tensor, row_sizes: tuple[int, ...] | None) -> torch.Tensor:
        return gated_mlp(self, x, row_sizes)

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        at: torch.Tensor,
        seen: torch.Tensor,
        row_sizes: tuple[int, ...] | None,
    ) -> torch.Tensor:
        """x: [B, R, h] -> [B, R, h]. at, seen: see `fastea.kernels.attention.attend`."""
        mix = attend if row_sizes is None else attend_alone
        mixed = mix(*self.project(x, rope, row_sizes), k_cache, v_cache, at, seen)
        return self.finish(x, mixed, row_sizes)


class Expert(nn.Module):
    """One gated MLP of several."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)


class MixtureLayer(DecoderLayer):
    """Mixtral's layer: a router gives each row the MLPs of its best experts (arXiv 2401.04088, section 2.1).

    Every expert runs over every row, so that the shapes never change, and counts where it was chosen: a verified tree
    needs nearly all of them anyway; a plain step reads four times the weights that it needs.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        del self.gate_up, self.down
        self.chosen = config.experts_per_token
        self.router = Linear(config.hidden_size, config.experts)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.experts))

    def shares(self, scores: torch.Tensor) -> torch.Tensor:
        """Router scores [..., E] -> what each expert counts, 0 where it was not chosen, fp32 [..., E]."""
        best = torch.softmax(scores.float(), -1).topk(self.chosen, dim=-1)
        kept = best.values / best.values.sum(-1, keepdim=True)
        return torch.zeros_like(scores, dtype=torch.float32).scatter(-1, best.indices, kept)

    def mlp(self, x: torch.Tensor, row_sizes: tuple[int, ...] | None) -> torch.Tensor:
        shares, total = self.shares(self.router(x, row_sizes)).to(x.dtype), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            share = shares[..., i : i + 1]
            # not share * y alone: an expert may overflow on rows that are not its own
            total = total + torch.where(share > 0, share * gated_mlp(cast(Expert, expert), x, row_sizes), 0)
        return total


TOGETHER = 6  # layers of a graph: entering one costs a fifth of a step of 30, compiling each takes most of a second


def run_layers(
    layers: list[DecoderLayer],
    x: torch.Tensor,
    rope: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    at: torch.Tensor,
    seen: torch.Tensor,
    row_sizes: tuple[int, ...] | None,
) -> list[torch.Tensor]:
    """x: [B, R, h] -> the states after each of the layers, [B, R, h]. keys, values: their caches."""
    states = []
    for layer, k, v in zip(layers, keys, values, strict=True):
        x = layer(x, rope, k, v, at, seen, row_sizes)
        states.append(x)
    return states


class Llama(nn.Module):
    """The whole decoder. `rope` [max_seq_len + slack, 2, D/2] is filled by `set_context`.

    taps: layers whose inputs (before any norm; the number of layers is the last one's output) go into the features
    behind the state after the final norm, for EAGLE-3 heads.
    """

    rope: torch.Tensor
    taps: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        empty = torch.empty(config.vocab_size, config.hidden_size)  # random weights, even of no device, import much
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, _weight=empty)
        self.embed.weight.requires_grad_(False)
        layer = MixtureLayer if config.experts else DecoderLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.rope_factors: torch.Tensor | None = None  # GGUF's per-frequency divisors

    def set_context(self, max_seq_len: int) -> None:
        """Rotary tables for every row that a cache of this limit has."""
        table = rope_table(self.config, max_seq_len + TREE_SLACK, self.rope_factors)
        self.register_buffer("rope", table.to(self.embed.weight.device), persistent=False)

    def new_cache(self, batch: int, max_seq_len: int, device: str | None = None) -> KVCache:
        c, like = self.config, self.embed.weight
        return KVCache(c.num_layers, batch, c.num_kv_heads, max_seq_len, c.head_dim, like.dtype, device or like.device)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        start: torch.Tensor,
        words: torch.Tensor | None,
        cache: KVCache,
        row_sizes: tuple[int, ...] | None = None,
        run: Callable[..., list[torch.Tensor]] = run_layers,
    ) -> torch.Tensor:
        """tokens, positions: [B, R]; start: [B] committed length; words: [B, R] ancestor words, None = causal.

        Writes cache rows start .. start+R-1. Returns features [B, R, feature_size]: the states after the final norm,
        then the taps. run: what calls some layers, for compiling: all parts are one graph.
        """
        x = self.embed(tokens)
        rope, rows = self.rope[positions], tokens.shape[1]
        at = start[:, None] + torch.arange(rows, device=start.device)
        group = self.config.num_heads // self.config.num_kv_heads
        seen = sight(words, start, 0, rows, group, cache.keys[0])
        layers, states = list(self.layers), {0: x}
        for i in range(0, len(layers), TOGETHER):
            part = slice(i, i + TOGETHER)
            after = run(layers[part], x, rope, cache.keys[part], cache.values[part], at, seen, row_sizes)
            states |= {tap: after[tap - i - 1] for tap in self.taps if i < tap <= i + len(after)}
            x = after[-1]
        if row_sizes is None and bool(x.isnan().any()):  # of a row's NaN others have become NaN
            return self.forward(tokens, positions, start, words, cache, (1,))
        return self.features(self.norm(x), states)

    @property
    def feature_size(self) -> int:
        return self.config.hidden_size * (1 + len(self.taps))

    def features(self, final: torch.Tensor, states: dict[int, torch.Tensor]) -> torch.Tensor:
        """final: [..., h]; states: inputs of the tapped layers, or the last one's output -> [..., feature_size]."""
        return torch.cat((final, *(states[i] for i in self.taps)), -1) if self.taps else final

    def logits(self, features: torch.Tensor, row_sizes: tuple[int, ...] | None = None) -> torch.Tensor:
        """features: [..., feature_size] -> fp32 logits [..., vocab]."""
        return self.lm_head(features[..., : self.config.hidden_size], row_sizes).float()
