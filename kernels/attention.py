"""Attention over a static cache: write the new rows, attend to the prefix and to the visible new rows.

One operator for prefill, plain decoding, drafting and tree verification. The committed length is a tensor,
so a compiled caller has one shape whatever the context; the work grows with the real length.
"""

from __future__ import annotations

import torch


def expand_words(words: torch.Tensor, slots: int) -> torch.Tensor:
    """Ancestor words [..., R] (int64, bit j = tree slot j is visible) -> booleans [..., R, slots]."""
    bits = torch.arange(slots, device=words.device)
    return (words[..., None] >> bits & 1).bool()


@torch.library.custom_op("fastea::attend", mutates_args=("k_cache", "v_cache"))
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: torch.Tensor,
    words: torch.Tensor | None,
    offset: int,
    exact: bool,
) -> torch.Tensor:
    """Write k, v at rows start + offset + r of the caches, then attend.

    q: [B, R, H, D]; k, v: [B, R, KV, D]; caches: [B, KV, S, D]; start: [B] int64, rows before it are visible to
    all. words: [B, R] int64, bit j of row r = tree slot j (cache row start + j) is visible; None = causal, row r
    sees the new rows 0..r (offset 0). offset: first tree slot written here. Returns [B, R, H, D].
    exact: every row is computed by the calls that a single row at that position makes, its keys in path order,
    so its bits depend neither on the rows beside it nor on where its ancestors lie in the tree.
    """
    out = torch.empty_like(q)
    rows = q.shape[1]
    for b, first in enumerate(start.tolist()):
        base = first + offset
        k_cache[b, :, base : base + rows] = k[b].transpose(0, 1)
        v_cache[b, :, base : base + rows] = v[b].transpose(0, 1)
        if words is None and not exact:
            mask = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
        elif words is None:
            mask = None
        else:
            mask = expand_words(words[b], offset + rows)
        keys, values = k_cache[b, :, : base + rows], v_cache[b, :, : base + rows]
        if exact:
            for r in range(rows):
                slots = torch.arange(r + 1, device=q.device) if mask is None else mask[r].nonzero().squeeze(1)
                path = torch.cat((torch.arange(first, device=q.device), first + slots))
                out[b, r] = _attend_one(
                    q[b, r : r + 1], keys.index_select(1, path), values.index_select(1, path), None
                )[0]
        else:
            out[b] = _attend_one(q[b], keys, values, mask)
    return out


@attend.register_fake
def _(q, k, v, k_cache, v_cache, start, words, offset, exact):
    return torch.empty_like(q)


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v for one sequence. q: [R, H, D]; k, v: [KV, L, D]; mask: [R, slots] over the
    last slots. The query heads of one KV head are folded into the row axis: K and V are read once, not expanded.
    """
    rows, heads, dim = q.shape
    kv_heads, length = k.shape[:2]
    group = heads // kv_heads
    folded = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)
    scores = torch.bmm(folded, k.transpose(1, 2)).float() * dim**-0.5
    if mask is not None:
        tail = scores.view(kv_heads, group, rows, length)[..., length - mask.shape[1] :]
        tail.masked_fill_(~mask, float("-inf"))
    probs = torch.softmax(scores, dim=-1).to(v.dtype)
    mixed = torch.bmm(probs, v).view(kv_heads, group, rows, dim)
    return mixed.permute(2, 0, 1, 3).reshape(rows, heads, dim)
