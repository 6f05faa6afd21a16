"""Attention of a few rows (a token, a chain, a draft tree, a prompt chunk) over a static cache, split along the keys.

Sums: the order of a row's sum depends on its position p alone. With the border TILE * floor(max(0, p - DEPTH) / TILE),
keys below it lie at their absolute positions: tiles of TILE keys in order, SPLIT keys a partial result, partial
results merged in order. The keys from the border to p, fewer than TAIL, are one block in path order, merged last. A
tree is at most DEPTH deep, so no border passes the committed length, and a plain step, a chain and a tree sum the
same numbers in the same order. All products, row sums of the softmax included, are tensor-core products whose order
over keys is fixed; no sum goes over threads. Code is not specialised on numbers of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastea.kernels.attention import visible_slots
from fastea.kernels.launch import launch, on_triton
from fastea.kernels.register import register

TILE = 32  # keys a step
SPLIT = 256  # keys a partial result
DEPTH = 16  # the deepest tree
TAIL = 64  # TILE - 1 + DEPTH + 1 keys at most, padded
CAUSAL, WORDS, LISTS = range(3)  # how a row's visible tree slots are given


@triton.jit
def _ones(word):
    """How many bits of a 64-bit word are set."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word = word + (word >> 8)
    word = word + (word >> 16)
    return (word + (word >> 32)) & 127


@triton.jit
def _position(start, visible, row, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """Position of tree rows `row` (a vector): the committed length, plus the ancestors of each."""
    if KIND == 0:
        return start + row
    if KIND == 1:
        return start + _ones(tl.load(visible + row)) - 1
    count = tl.zeros_like(row)
    for i in range(WIDTH):
        count += (tl.load(visible + row * WIDTH + i) >= 0).to(count.dtype)
    return start + count - 1


@triton.jit(do_not_specialize=("rows", "cache_rows", "splits"))
def _prefix_kernel(
    q, k_cache, v_cache, start, visible, sums, most, weight, rows, cache_rows, splits, scale,
    KIND: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One split of the keys below the border, for BM of the rows x query heads of one KV head."""
    kv_head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    split = tl.program_id(1) % splits
    part = tl.program_id(1) // splits
    batch = tl.program_id(2)
    at = part * BM + tl.arange(0, BM)
    row = tl.minimum(at // GROUP, rows - 1).to(tl.int64)
    length = tl.load(start + batch)
    position = _position(length, visible + batch * rows * WIDTH, row, KIND, WIDTH)
    border = tl.maximum(position - DEPTH, 0) // TILE * TILE
    first = split * SPLIT
    last = tl.minimum(first + SPLIT, tl.max(border, 0).to(tl.int32))
    if first < last:
        d = tl.arange(0, DP)
        heads = kv_heads * GROUP
        head = (batch * rows + row) * heads + kv_head * GROUP + at % GROUP  # of the rows of q
        queries = tl.load(q + head[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
        dtype: tl.constexpr = q.dtype.element_ty
        ones = tl.full((TILE, 16), 1.0, dtype)
        best = tl.full((BM,), float("-inf"), tl.float32)
        norm = tl.zeros((BM, 16), dtype=tl.float32)
        mixed = tl.zeros((BM, DP), dtype=tl.float32)
        base = (batch * kv_heads + kv_head).to(tl.int64) * cache_rows * D
        for begin in range(first, last, TILE):
            key = begin + tl.arange(0, TILE)
            keys = tl.load(k_cache + base + key[None, :] * D + d[:, None], mask=d[:, None] < D, other=0.0)
            scores = tl.dot(queries, keys) * scale
            scores = tl.where(key[None, :] < border[:, None], scores, float("-inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            shift = tl.where(better == float("-inf"), 0.0, better)
            shares = tl.exp2(scores - shift[:, None]).to(dtype)
            fade = tl.exp2(best - shift)
            best = better
            values = tl.load(v_cache + base + key[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
            norm = tl.dot(shares, ones, norm * fade[:, None])
            mixed = tl.dot(shares, values, mixed * fade[:, None])
        place = ((batch * splits + split) * rows + row) * heads + kv_head * GROUP + at % GROUP
        wanted = at < rows * GROUP
        tl.store(most + place, best, mask=wanted)
        tl.store(weight + place, tl.max(norm, 1), mask=wanted)  # 16 equal columns
        tl.store(sums + place[:, None] * D + d[None, :], mixed, mask=wanted[:, None] & (d[None, :] < D))


@triton.jit(do_not_specialize=("rows", "cache_rows", "splits"))
def _tail_kernel(
    q, k_cache, v_cache, start, visible, sums, most, weight, out, rows, cache_rows, splits, scale,
    KIND: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    GP: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """The keys from the border on in path order, merged after the splits: one row, the query heads of one KV head."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    batch = tl.program_id(2)
    length = tl.load(start + batch)
    visible += batch * rows * WIDTH
    position = tl.max(_position(length, visible, row + tl.zeros((1,), tl.int64), KIND, WIDTH), 0)
    border = tl.maximum(position - DEPTH, 0) // TILE * TILE
    key = border + tl.arange(0, TAIL)
    seen = key <= position
    above = key - length  # how deep in the tree, where it is not negative
    if KIND == 0:
        slot = above
    elif KIND == 1:  # the slot of the ancestor at this depth: the bit with as many set bits below it
        bit = tl.arange(0, 64).to(tl.int64)
        word = tl.load(visible + row)
        below = _ones(word & ((tl.full((64,), 1, tl.int64) << bit) - 1))
        hit = (below[None, :] == above[:, None]) & (((word >> bit) & 1)[None, :] == 1)
        slot = tl.sum(tl.where(hit, bit[None, :], 0), 1)
    else:
        slot = tl.load(visible + row * WIDTH + above, mask=seen & (above >= 0), other=0)
    cached = tl.where(above < 0, key, length + slot)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    heads = kv_heads * GROUP
    head = (batch * rows + row) * heads + kv_head * GROUP + g
    real = (g[:, None] < GROUP) & (d[None, :] < D)
    queries = tl.load(q + head[:, None] * D + d[None, :], mask=real, other=0.0)
    dtype: tl.constexpr = q.dtype.element_ty
    base = (batch * kv_heads + kv_head).to(tl.int64) * cache_rows * D
    keys = tl.load(k_cache + base + cached[None, :] * D + d[:, None], mask=seen[None, :] & (d[:, None] < D), other=0.0)
    scores = tl.where(seen[None, :], tl.dot(queries, keys) * scale, float("-inf"))
    tail_best = tl.max(scores, 1)
    shares = tl.exp2(scores - tail_best[:, None]).to(dtype)
    values = tl.load(
        v_cache + base + cached[:, None] * D + d[None, :], mask=seen[:, None] & (d[None, :] < D), other=0.0
    )
    tail_norm = tl.max(tl.dot(shares, tl.full((TAIL, 16), 1.0, dtype)), 1)
    tail_mixed = tl.dot(shares, values)
    best = tl.full((GP,), float("-inf"), tl.float32)
    norm = tl.zeros((GP,), dtype=tl.float32)
    mixed = tl.zeros((GP, DP), dtype=tl.float32)
    for split in range(0, tl.cdiv(border, SPLIT)):
        place = ((batch * splits + split) * rows + row) * heads + kv_head * GROUP + g
        other = tl.load(most + place, mask=g < GROUP, other=0.0)
        better = tl.maximum(best, other)
        old, new = tl.exp2(best - better), tl.exp2(other - better)
        norm = norm * old + tl.load(weight + place, mask=g < GROUP, other=0.0) * new
        more = tl.load(sums + place[:, None] * D + d[None, :], mask=real, other=0.0)
        mixed = mixed * old[:, None] + more * new[:, None]
        best = better
    better = tl.maximum(best, tail_best)
    old, new = tl.exp2(best - better), tl.exp2(tail_best - better)
    norm = norm * old + tail_norm * new
    mixed = mixed * old[:, None] + tail_mixed * new[:, None]
    tl.store(out + head[:, None] * D + d[None, :], (mixed / norm[:, None]).to(dtype), mask=real)


def tree_attention_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, start: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """The meaning of `tree_attention`, one sequence after the other."""
    out = torch.empty_like(q)
    rows = q.shape[1]
    for b, length in enumerate(start.tolist()):
        slots = k_cache.shape[2] - length
        if visible is None:
            mask = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
        else:
            mask = visible_slots(visible[b : b + 1], min(slots, 64) if visible.dim() == 2 else slots)[0]
        mask = F.pad(mask, (length, 0), value=True)
        keys, values = (cache[b, :, : mask.shape[1]] for cache in (k_cache, v_cache))
        mixed = F.scaled_dot_product_attention(q[b].transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True)
        out[b] = mixed.transpose(0, 1)
    return out


def _tree_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, start: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    if not on_triton(q):
        return tree_attention_reference(q, k_cache, v_cache, start, visible)
    batch, rows, heads, size = q.shape
    kv_heads, cache_rows = k_cache.shape[1:3]
    group, splits = heads // kv_heads, -(-cache_rows // SPLIT)
    sums = torch.empty(batch, splits, rows, heads, size, dtype=torch.float32, device=q.device)
    most, weight = torch.empty(2, batch, splits, rows, heads, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    kind, width = (CAUSAL, 1) if visible is None else (WORDS, 1) if visible.dim() == 2 else (LISTS, visible.shape[2])
    scale = size**-0.5 * 1.4426950408889634  # log2(e): the softmax is taken in powers of two
    inputs = (q, k_cache, v_cache, start, q if visible is None else visible.contiguous(), sums, most, weight)
    shape = {"KIND": kind, "WIDTH": width, "GROUP": group, "D": size, "DP": triton.next_power_of_2(size)}
    shape |= {"TILE": TILE, "SPLIT": SPLIT, "DEPTH": DEPTH}
    tile_rows = 16 if rows * group <= 16 else 32  # never 64, where Hopper would take another instruction
    parts = -(-rows * group // tile_rows)
    launch(_prefix_kernel, (kv_heads, splits * parts, batch), *inputs, rows, cache_rows, splits, scale,
           BM=tile_rows, **shape)  # fmt: skip
    launch(_tail_kernel, (rows, kv_heads, batch), *inputs, out, rows, cache_rows, splits, scale,
           GP=max(16, triton.next_power_of_2(group)), TAIL=TAIL, **shape)  # fmt: skip
    return out


_operator = register(
    "tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor start, Tensor? visible) -> Tensor",
    _tree_attention,
    lambda q, *_: torch.empty_like(q),
)


def tree_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, start: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v, [B, R, H, D]. q: [B, R, H, D] fp16 or bf16; caches: [B, KV, rows, D], which hold the
    rows of q already, from row start[b] [B] on: cache row start + j is tree slot j.

    All rows see the cache below start. Of the slots, row r sees 0 .. r where visible is None; those whose bits are set
    in visible[b, r] (ancestor words [B, R] int64, the row's own slot included; at most 64 slots); or those listed in
    visible[b, r] [B, R, W] int64, by depth, -1 behind the last. Ancestors come in order of depth, so that slots
    ascend along a path. A row lies at most DEPTH below start, rows without `visible` anywhere.
    """
    return _operator(q, k_cache, v_cache, start, visible)  # type: ignore[no-any-return]
