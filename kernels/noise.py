"""The noise that makes sampling a function of the seed."""

from __future__ import annotations

import torch


def _signed64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


GOLDEN = _signed64(0x9E3779B97F4A7C15)
MIX1, MIX2 = _signed64(0xBF58476D1CE4E5B9), _signed64(0x94D049BB133111EB)


def mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64 (wrapping; shifts made logical by masks): a bijection of 64 bits."""
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * MIX1
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * MIX2
    return z ^ (z >> 31 & (1 << 33) - 1)


def uniform(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """key: [...] int64; ids: [V] -> uniforms (r + 0.5) / 2^32 in (0, 1), fp32 [..., V]."""
    bits = mix(key[..., None] + (ids + 1) * GOLDEN) >> 32 & 0xFFFFFFFF
    return ((bits.double() + 0.5) * 2.0**-32).float().clamp_(max=1 - 2.0**-24)


def gumbel(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for token ids [V], fp32 [..., V]: -log E with E = -log1p(-v); never +infinity."""
    return -torch.log(-torch.log1p(-uniform(key, ids)))
