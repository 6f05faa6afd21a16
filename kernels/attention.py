"""Attention over a static cache: write the new rows, attend to the prefix and to the visible new rows.

One operator for prefill, plain decoding, drafting and tree verification. The committed length is a tensor,
so a compiled caller has one shape whatever the context; the work grows with the real length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastea.kernels.register import register


def expand_words(words: torch.Tensor, slots: int) -> torch.Tensor:
    """Ancestor words [..., R] (int64, bit j = tree slot j is visible) -> booleans [..., R, slots]."""
    bits = torch.arange(slots, device=words.device)
    return (words[..., None] >> bits & 1).bool()


def visible_slots(visible: torch.Tensor, slots: int) -> torch.Tensor:
    """Words [R] or lists [R, W] of slots -> booleans [R, slots]."""
    if visible.dim() == 1:
        return expand_words(visible, slots)
    mask = torch.zeros(visible.shape[0], slots + 1, dtype=torch.bool, device=visible.device)
    return mask.scatter_(1, visible.where(visible >= 0, slots), True)[:, :slots]


def _attend(
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
    all. words: [B, R] int64, bit j of row r = tree slot j (cache row start + j) is visible; or [B, R, W] int64, the
    visible slots by depth, -1 behind the last, for more than 64 slots; None = causal, row r sees the new rows 0..r
    (offset 0). offset: first tree slot written here. Returns [B, R, H, D].
    exact: every row is computed by the calls that a single row at that position makes, its keys in path order,
    so its bits depend neither on the rows beside it nor on where its ancestors lie in the tree.
    """
    out = torch.empty_like(q)
    rows = q.shape[1]
    for b, first in enumerate(start.tolist()):
        base = first + offset
        k_cache[b, :, base : base + rows] = k[b].transpose(0, 1)
        v_cache[b, :, base : base + rows] = v[b].transpose(0, 1)
        keys, values = k_cache[b, :, : base + rows], v_cache[b, :, : base + rows]
        if exact:
            mask = None if words is None else visible_slots(words[b], offset + rows)
            for r in range(rows):
                slots = torch.arange(r + 1, device=q.device) if mask is None else mask[r].nonzero().squeeze(1)
                path = torch.cat((torch.arange(first, device=q.device), first + slots))
                out[b, r] = _attend_one(q[b, r], keys.index_select(1, path), values.index_select(1, path))
        elif rows == 1 and words is None:
            out[b] = attend_folded(q[b], keys, values, None)
        else:
            if words is None:
                mask = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
            else:
                mask = visible_slots(words[b], offset + rows)
            out[b] = attend_folded(q[b], keys, values, mask)
            if bool(out[b].isnan().any()):  # 0 * NaN: rows that are hidden from this one count too
                one = slice(b, b + 1)
                seen = None if words is None else words[one]
                parts = (t[one] for t in (q, k, v, k_cache, v_cache, start))
                out[b] = _attend(*parts, seen, offset, True)[0]
    return out


attend = register(
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor start, Tensor? words, "
    "int offset, bool exact) -> Tensor",
    _attend,
    lambda q, *_: torch.empty_like(q),
)


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v for one row. q: [H, D]; k, v: [KV, L, D] -> [H, D]. The query heads of one KV head
    are folded into the row axis: K and V are read once, not expanded."""
    folded = q.unflatten(0, (k.shape[0], -1))
    scores = torch.bmm(folded, k.transpose(1, 2)).float() * q.shape[-1] ** -0.5
    return torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v).flatten(0, 1)


def attend_folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The same for rows together. q: [R, H, D]; k, v: [KV, L, D]; mask: [R, slots] over the last slots, None = all
    visible -> [R, H, D]."""
    rows, kv_heads, length = q.shape[0], *k.shape[:2]
    folded = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [KV, group, R, D]
    group = folded.shape[1]
    bias = None
    if mask is not None:
        bias = q.new_zeros(group, rows, length)
        bias[..., length - mask.shape[1] :].masked_fill_(~mask, float("-inf"))
        bias = bias.flatten(0, 1)
    mixed = F.scaled_dot_product_attention(folded.flatten(1, 2)[None], k[None], v[None], attn_mask=bias)[0]
    return mixed.unflatten(1, (group, rows)).permute(2, 0, 1, 3).flatten(1, 2)
