"""Attention over a static cache: write the new rows, attend to the prefix and to the visible new rows.

One way for prefill, plain decoding, drafting and tree verification. The committed length is a tensor, so a compiled
caller has one shape whatever the context; the work grows with the real length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastea.kernels.register import register

STRIDE = 64  # keys are read in multiples of it, the rest hidden: the order of a sum hung on what was left of 16


def expand_words(words: torch.Tensor, slots: int) -> torch.Tensor:
    """Ancestor words [..., R] (int64, bit j = tree slot j is visible) -> booleans [..., R, slots]."""
    bits = torch.arange(slots, device=words.device)
    return (words[..., None] >> bits & 1).bool()


def visible_slots(visible: torch.Tensor, slots: int) -> torch.Tensor:
    """Words [B, R] or lists [B, R, W] of slots -> booleans [B, R, slots]."""
    if visible.dim() == 2:
        return expand_words(visible, slots)
    mask = torch.zeros(*visible.shape[:2], slots + 1, dtype=torch.bool, device=visible.device)
    return mask.scatter_(2, visible.where(visible >= 0, slots), True)[..., :slots]


def sight(
    visible: torch.Tensor | None, start: torch.Tensor, offset: int, rows: int, group: int, cache: torch.Tensor
) -> torch.Tensor:
    """What new rows see of the cache, for all layers of a forward: [B, R * group, S], 0 where a row sees the cache's
    row, -inf where not. group: query heads of a KV head, which share what their row sees.

    start: [B] int64, rows before it are visible to all. visible: [B, R] int64, bit j of row r = tree slot j (cache row
    start + j) is visible; or [B, R, W] int64, the visible slots by depth, -1 behind the last, for more than 64 slots;
    None = causal, row r sees the new rows 0..r (offset 0). offset: the tree slot of the first new row.
    cache: [B, KV, S, D], one like it.
    """
    slots, device = offset + rows, start.device
    if visible is None:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=device).tril().expand(len(start), -1, -1)
    else:
        mask = visible_slots(visible, slots)
    before = torch.arange(cache.shape[2], device=device) < start[:, None]
    at = start[:, None] + torch.arange(slots, device=device)
    seen = before[:, None].repeat(1, rows, 1).scatter_(2, at[:, None].expand_as(mask), mask)
    hidden = torch.zeros(seen.shape, dtype=cache.dtype, device=device).masked_fill_(~seen, -torch.inf)
    return hidden.repeat_interleave(group, 1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    at: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    """Write k, v into the caches, then attend: softmax(q k^T / sqrt(D)) v.

    q: [B, R, H, D]; k, v: [B, R, KV, D]; caches: [B, KV, S, D]; at: [B, R] int64, the caches' rows that they take, one
    after the other; seen: see `sight`. Returns [B, R, H, D]. A row that is NaN makes NaN of the rows that it is hidden
    from too: -inf + NaN, 0 * NaN. On a CPU a row's sums have one order for every number of rows and keys, as long as
    what it sees has no gaps; a tree's rows have.
    """
    rows, kv_heads = k.shape[1:3]
    write(k, v, k_cache, v_cache, at)
    # The query heads of one KV head become rows: K and V are read once, in larger products.
    group = q.shape[2] // kv_heads
    folded = q.unflatten(2, (kv_heads, group)).transpose(2, 3).flatten(1, 2)
    mixed = _attend(folded, k_cache, v_cache, at, seen)
    return mixed.unflatten(1, (rows, group)).transpose(2, 3).flatten(2, 3)


def attend_alone(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    at: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    """The same for the exact path: every row is computed by the calls that a single row at that position makes, its
    keys in path order, so its bits depend neither on the rows beside it nor on where its ancestors lie in the tree."""
    out, group = torch.empty_like(q), q.shape[2] // k.shape[2]
    write(k, v, k_cache, v_cache, at)
    for b, slots in enumerate(at.tolist()):
        for r, slot in enumerate(slots):
            path = (seen[b, r * group, : slot + 1] == 0).nonzero()[:, 0]
            keys, values = (cache[b].index_select(1, path) for cache in (k_cache, v_cache))
            out[b, r] = _attend_one(q[b, r], keys, values)
    return out


def write(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, at: torch.Tensor) -> None:
    """k, v: [B, R, KV, D] into rows `at` [B, R] of the caches."""
    every = torch.arange(len(k), device=k.device)[:, None]
    k_cache[every, :, at] = k
    v_cache[every, :, at] = v


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v for one row. q: [H, D]; k, v: [KV, L, D] -> [H, D]. The query heads of one KV head
    are folded into the row axis: K and V are read once, not expanded."""
    folded = q.unflatten(0, (k.shape[0], -1))
    scores = torch.bmm(folded, k.transpose(1, 2)).float() * q.shape[-1] ** -0.5
    return torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v).flatten(0, 1)


def _attend_rows(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, at: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """q: [B, Q, KV, D]; seen: [B, Q, S] -> [B, Q, KV, D]."""
    parts = []
    for b, last in enumerate(at[:, -1].tolist()):
        length = (last // STRIDE + 1) * STRIDE
        keys, values = (cache[b : b + 1, :, :length] for cache in (k_cache, v_cache))
        query, mask = q[b : b + 1].transpose(1, 2), seen[b : b + 1, None, :, :length]
        parts.append(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask).transpose(1, 2))
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


_attend = register(
    "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor at, Tensor seen) -> Tensor",
    _attend_rows,
    lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
)
