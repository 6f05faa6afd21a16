"""The token that the target emits, for many rows without a word from the host: argmax of logits, or of logits over the
temperature plus keyed noise among the ids that top-k and top-p keep. The meaning is `fastea.kernels.pick`.

A row's bits depend on the row alone: blocks of columns have one size, blocks are merged in order, ties go to the
lowest id. Logits are divided by the temperature as their distance from the block's or the row's greatest, so that
noise is not lost in large scores and nothing overflows. What top-k and top-p keep is found without sorting: the least
logit that stays is a float, and floats compare as their bits do, so 32 halvings over the bits find it exactly; sums go
over BLOCK columns, then over blocks in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastea.kernels import pick
from fastea.kernels.launch import launch, on_triton
from fastea.kernels.noise import GOLDEN, MIX1, MIX2
from fastea.kernels.register import register

BLOCK = 4096  # columns a step


@triton.jit
def _mix(z, MIX1: tl.constexpr, MIX2: tl.constexpr):
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * MIX1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * MIX2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@triton.jit
def _gumbel(key, ids, GOLDEN: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr):
    """The noise of `fastea.kernels.noise` for these ids, fp32."""
    bits = (_mix(key + (ids.to(tl.int64) + 1) * GOLDEN, MIX1, MIX2) >> 32) & 0xFFFFFFFF
    v = ((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(tl.float32)  # / 2^32
    v = tl.minimum(v, 1 - 5.9604644775390625e-08)
    rest = 1 - v
    exponential = tl.where(rest == 1, v, -tl.log(rest) * v / (1 - rest))  # -log1p(-v), also where v is tiny
    return -tl.log(exponential)


@triton.jit
def _ordered(logits):
    """Integers 0 .. 2^32 - 1 that are ordered as these fp32 values are."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 and 0 are a tie
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def _below(logits, most, temperature):
    """(logits - most) / temperature, 0 for the greatest even where it is infinite."""
    return tl.where(logits == most, 0.0, (logits - most) / temperature)


@triton.jit
def _mass(logits, vocab, temperature, most, least, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Over the logits that are `least` at least: how many, or the sum of exp((logit - most) / temperature)."""
    column = tl.arange(0, BLOCK)
    total = 0.0
    for first in range(0, vocab, BLOCK):
        real = first + column < vocab
        some = tl.load(logits + first + column, mask=real, other=float("-inf"))
        share = tl.full((BLOCK,), 1.0, tl.float32) if COUNT else tl.exp(_below(some, most, temperature))
        total += tl.sum(tl.where(real & (_ordered(some) >= least), share, 0.0), 0)
    return total


@triton.jit
def _cut_kernel(
    logits, cut, stride, vocab, temperature, top_k, top_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `_ordered` integer of the least logit that stays, for one row."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    most = float("-inf")
    for first in range(0, vocab, BLOCK):
        column = first + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.max(tl.load(logits + column, mask=column < vocab, other=float("-inf")), 0))
    one = tl.full((), 1, tl.int64)
    least = one - 1
    if TOP_K:
        for bit in range(0, 32):  # from the highest bit down: it stays set if at least top_k logits are as high
            higher = least | (one << (31 - bit))
            count = _mass(logits, vocab, temperature, most, higher, True, BLOCK)
            least = tl.where(count >= top_k, higher, least)
    if TOP_P:
        wanted = top_p * _mass(logits, vocab, temperature, most, least, False, BLOCK)
        among = least
        least = one - 1
        for bit in range(0, 32):
            higher = least | (one << (31 - bit))
            mass = _mass(logits, vocab, temperature, most, tl.maximum(higher, among), False, BLOCK)
            least = tl.where(mass >= wanted, higher, least)
        least = tl.maximum(least, among)
    tl.store(cut + row, least)


@triton.jit
def _best_kernel(
    logits, keys, cut, greatest, values, ids, broken, stride, vocab, temperature, blocks,
    NOISE: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
    GOLDEN: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr,
):  # fmt: skip
    """The best id among BLOCK columns of one row, the lowest of equals; their greatest logit, and with noise the best
    value below it; and whether one of them is not a number."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    real = column < vocab
    scores = tl.load(logits + row.to(tl.int64) * stride + column, mask=real, other=float("-inf"))
    wrong = tl.max((scores != scores).to(tl.int32), 0)
    scores = tl.where(scores == scores, scores, float("-inf"))
    best = tl.max(scores, 0)
    place = row * blocks + block
    tl.store(greatest + place, best)
    if NOISE:
        keep = real
        if CUT:
            keep = keep & (_ordered(scores) >= tl.load(cut + row))
        noise = _gumbel(tl.load(keys + row), column, GOLDEN, MIX1, MIX2)
        scores = tl.where(keep, _below(scores, best, temperature) + noise, float("-inf"))
        best = tl.max(scores, 0)
        tl.store(values + place, best)
    tl.store(ids + place, tl.min(tl.where((scores == best) & real, column, vocab - 1), 0))
    tl.store(broken + place, wrong)


@triton.jit
def _merge_kernel(
    greatest, values, ids, broken, chosen, wrong, temperature, blocks,
    NOISE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    real = block < blocks
    best = tl.load(greatest + row * blocks + block, mask=real, other=float("-inf"))
    if NOISE:
        value = tl.load(values + row * blocks + block, mask=real, other=float("-inf"))
        best = _below(best, tl.max(best, 0), temperature) + value
    winner = tl.min(tl.where(real & (best == tl.max(best, 0)), block, BLOCKS), 0)
    tl.store(chosen + row, tl.load(ids + row * blocks + winner).to(tl.int64))
    tl.store(wrong + row, tl.max(tl.load(broken + row * blocks + block, mask=real, other=0), 0) != 0)


def choose_reference(
    logits: torch.Tensor, keys: torch.Tensor | None, temperature: float, top_k: int, top_p: float, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning of `choose`."""
    logits = logits[:, :vocab]
    broken = logits.isnan().any(1)
    logits = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    if keys is None:
        return logits.argmax(1), broken
    return pick.noisy_argmax(pick.log_probs(logits, temperature, top_k, top_p), keys), broken


def _choose(
    logits: torch.Tensor, keys: torch.Tensor | None, temperature: float, top_k: int, top_p: float, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if not on_triton(logits):
        return choose_reference(logits, keys, temperature, top_k, top_p, vocab)
    rows, stride = logits.shape[0], logits.stride(0)
    blocks = -(-vocab // BLOCK)
    cut = None
    if keys is not None and (0 < top_k < vocab or top_p < 1):
        cut = torch.empty(rows, dtype=torch.int64, device=logits.device)
        launch(_cut_kernel, (rows,), logits, cut, stride, vocab, temperature, top_k, top_p,
               TOP_K=0 < top_k < vocab, TOP_P=top_p < 1, BLOCK=BLOCK)  # fmt: skip
    greatest, values = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    ids, broken = torch.empty(2, rows, blocks, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    wrong = torch.empty(rows, dtype=torch.bool, device=logits.device)
    launch(_best_kernel, (rows, blocks), logits, keys, cut, greatest, values, ids, broken,
           stride, vocab, temperature, blocks, NOISE=keys is not None, CUT=cut is not None, BLOCK=BLOCK,
           GOLDEN=GOLDEN, MIX1=MIX1, MIX2=MIX2)  # fmt: skip
    launch(_merge_kernel, (rows,), greatest, values, ids, broken, chosen, wrong, temperature, blocks,
           NOISE=keys is not None, BLOCKS=triton.next_power_of_2(blocks))  # fmt: skip
    return chosen, wrong


def _fake(logits, keys, *_):  # type: ignore[no-untyped-def]
    return logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits), dtype=torch.bool)


_operator = register(
    "choose(Tensor logits, Tensor? keys, float temperature, int top_k, float top_p, int vocab) -> (Tensor, Tensor)",
    _choose,
    _fake,
)


def choose(
    logits: torch.Tensor,
    keys: torch.Tensor | None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    vocab: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [M, V] fp32; keys: [M] int64 noise keys, None = greedy -> ids [M] int64 below `vocab` (None: V), and
    whether a row holds a NaN [M]. Filters as `fastea.kernels.pick.log_probs`."""
    return _operator(logits, keys, temperature, top_k, top_p, vocab or logits.shape[1])  # type: ignore[no-any-return]
