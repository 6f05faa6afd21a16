"""Logits -> distribution -> token; the noise that makes sampling a function of the seed; the acceptance rules.

`pick` samples by the Gumbel-max rule with noise keyed by (seed, stream, position, token id). A token then depends
on the target's logits and the key alone, so the text for a seed is the same with and without speculation.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import torch

from fastea.config import FasteaError
from fastea.kernels import pick as kernel
from fastea.kernels.noise import GOLDEN, mix, uniform

# Separate noise for the pick, and for the three draws of rejection sampling, which must not share it.
PICK, CHILDREN, ACCEPT, RESIDUAL = range(4)


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k 0 = off; top_p in (0, 1], 1 = off. seed None = drawn from the system."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise FasteaError(
                f"temperature {self.temperature} is not possible; it must be 0 (greedy) or a positive number"
            )
        if not 0 < self.top_p <= 1:
            raise FasteaError(f"top_p {self.top_p} is not possible; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise FasteaError(f"top_k {self.top_k} is not possible; it must be 0 (off) or a positive number")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise FasteaError(f"seed {self.seed} is not possible; it must be from 0 to 2^63 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def shape(self) -> Sampling:
        """What a compiled round is specialised on: everything but the seed."""
        return Sampling(self.temperature, self.top_k, self.top_p, 0)

    def with_seed(self) -> Sampling:
        """The same with a seed, drawn from the operating system if there is none."""
        if self.seed is not None:
            return self
        return Sampling(self.temperature, self.top_k, self.top_p, secrets.randbits(32))


def noise_key(seed: torch.Tensor, stream: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    """One 64-bit key for each [B, P] position. seed: []; stream: [B] index of the sample; positions: [B, P] int64."""
    key = mix(seed + GOLDEN)
    key = mix(key ^ (stream * 4 + purpose))[:, None]
    return mix(key ^ positions * GOLDEN)


def log_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The target distribution after temperature, top-k and top-p: fp32 [..., V], -inf = cut."""
    return kernel.log_probs(logits, sampling.temperature, sampling.top_k, sampling.top_p)


def pick(
    logits: torch.Tensor, key: torch.Tensor, sampling: Sampling, alive: torch.Tensor | None = None
) -> torch.Tensor:
    """The token that the target emits. logits: [B, V]; key: [B] noise keys of its position; alive: [B] bool, rows
    whose token matters (None: all). Returns ids [B]; ties go to the lowest id."""
    if sampling.greedy:
        return logits.argmax(-1)
    alive = torch.ones_like(key, dtype=torch.bool) if alive is None else alive
    return kernel.sample(logits, key, alive, sampling.temperature, sampling.top_k, sampling.top_p)


def walk(
    tokens: torch.Tensor, logits: torch.Tensor, keys: torch.Tensor, parent: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pick at the root; while the pick is a child of the node, step into it and pick there.

    tokens: [B, N]; logits: [B, N, V]; keys: [B, D+1] noise keys of the tokens chosen at each depth; parent: [B, N]
    slots, siblings by rank, the root's (slot 0) is 0. Of children with one token the first counts. Returns path
    [B, D+1] (slots of root and accepted nodes; j where nothing was accepted at depth j), count [B] = accepted nodes
    + 1, emitted [B, D+1] (the accepted tokens, then the target's own; the first count[b] of row b are real).
    """
    batch, slots = (torch.arange(size, device=tokens.device) for size in tokens.shape)
    node = torch.zeros_like(tokens[:, 0])
    alive = torch.ones_like(node, dtype=torch.bool)
    path, count, emitted = [node], torch.ones_like(node), []
    deepest = keys.shape[1] - 1
    for depth in range(deepest + 1):
        emitted.append(pick(logits[batch, node], keys[:, depth], sampling, alive))
        if depth == deepest:
            break
        match = (parent == node[:, None]) & (tokens == emitted[-1][:, None]) & (slots > 0)
        alive = alive & match.any(1)
        child = match.int().argmax(1)
        node = torch.where(alive, child, node)
        path.append(torch.where(alive, child, depth + 1))
        count = count + alive
    return torch.stack(path, 1), count, torch.stack(emitted, 1)


def walk_by_rejection(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    draft_probs: torch.Tensor | None,
    parent: torch.Tensor,
    width: int,
    sampling: Sampling,
    seed: torch.Tensor,
    stream: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multi-round speculative sampling (EAGLE paper, appendix A.2): exact in distribution, not coupled to the seed.

    tokens: [B, N]; logits: [B, N, V]; draft_probs: [B, N, V] distribution from which a node's children were drawn
    without replacement, in rank order (None = each child was chosen with certainty). parent: [B, N] as in `walk`;
    width: most children of a node; positions: [B, D+1] of the tokens chosen at each depth. Children are tried in rank
    order: x is accepted with min(1, p(x) / q'(x)), q' = q without the earlier siblings; on rejection
    p <- norm(max(p - q', 0)). Returns as `walk`.
    """
    ids = torch.arange(logits.shape[-1], device=logits.device)
    node = torch.zeros_like(tokens[:, 0])
    alive = torch.ones_like(node, dtype=torch.bool)
    path, count, emitted = [node], torch.ones_like(node), []
    batch, slots = (torch.arange(size, device=tokens.device) for size in tokens.shape)
    p = log_probs(logits[batch, node], sampling).exp()
    for depth in range(1, positions.shape[1]):
        is_child = (parent == node[:, None]) & (slots > 0)
        ranks = is_child.cumsum(1)  # 1 for the first child
        q = None if draft_probs is None else draft_probs[batch, node]
        coins = uniform(noise_key(seed, stream, positions[:, depth - 1 : depth], ACCEPT)[:, 0], ids[:width])
        moved = torch.zeros_like(alive)
        for rank in range(width):
            here = is_child & (ranks == rank + 1)
            child = torch.where(here.any(1), here.int().argmax(1), -1)
            token = tokens[batch, child.clamp(min=0)]
            point = torch.zeros_like(p).scatter_(1, token[:, None], 1.0)
            given = point if q is None else q / q.sum(-1, keepdim=True).clamp(min=1e-30)
            possible = given.gather(1, token[:, None])[:, 0]
            trying = alive & ~moved & (child >= 0) & (possible > 0)
            accept = trying & (coins[:, rank] * possible < p.gather(1, token[:, None])[:, 0])
            left = (p - given).clamp(min=0)
            mass = left.sum(-1, keepdim=True)
            rejected = (trying & ~accept)[:, None] & (mass > 0)
            p = torch.where(rejected, left / mass.clamp(min=1e-30), p)
            if q is not None:
                q = torch.where(trying[:, None], q * (1 - point), q)
            node, moved = torch.where(accept, child, node), moved | accept
        p = torch.where(moved[:, None], log_probs(logits[batch, node], sampling).exp(), p)
        alive = alive & moved
        emitted.append(tokens[batch, node])  # counts only where alive
        path.append(torch.where(alive, node, depth))
        count = count + alive
    # The last token: drawn from what is left of p at the last accepted node.
    at = positions.gather(1, count[:, None] - 1)
    last = kernel.noisy_argmax(p.log(), noise_key(seed, stream, at, RESIDUAL)[:, 0])
    emitted.append(last)
    return torch.stack(path, 1), count, torch.stack(emitted, 1).scatter(1, count[:, None] - 1, last[:, None])
