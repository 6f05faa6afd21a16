"""The small Triton kernels between the products, in Triton's interpreter, and their plain definitions: both against
arithmetic in fp64. Where a rounding must be exact, sums are of multiples of 1/256, which fp32 adds without error."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import random_paths
from fastea.kernels.compact import compact, compact_reference
from fastea.kernels.gate import silu_mul, silu_mul_reference
from fastea.kernels.norm import add, add_norm, add_norm_reference, add_reference
from fastea.kernels.rope import rope_write, rope_write_reference
from fastea.kernels.topk import top_children, top_children_reference
from fastea.kernels.walk import accept_walk, accept_walk_reference
from fastea.sampling import Sampling, walk
from fastea.tree import Tree, chain
from interpreted import both, same_bits

pytestmark = pytest.mark.kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dyadic(seed, *shape):
    """Multiples of 1/256 up to 8."""
    return torch.randint(-2048, 2049, shape, generator=torch.Generator().manual_seed(seed)) / 256


def products(seed, splits, rows, width):
    """Partial results [S, M, P], with padding that must not be read."""
    return torch.cat((dyadic(seed, splits, rows, width), torch.full((splits, rows, 28), torch.nan)), dim=2)


def assert_rounded_once(actual, exact, slack=1e-7):
    """Half a unit in the last place, and what fp32 arithmetic may add. slack: more of it, where terms may cancel."""
    error = (actual.double() - exact).abs()
    bound = (torch.finfo(actual.dtype).eps / 2 + 2e-6) * exact.abs() + slack
    assert (error <= bound).all(), (error / bound).max()


SHAPES = [(1, 1, 576), (2, 5, 1536), (3, 2, 96), (5, 3, 100), (4, 4, 2500)]  # splits, rows, width


@both(add, add_reference)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits, rows, width", SHAPES)
def test_add(run, dtype, splits, rows, width):
    partials, residual, bias = products(0, splits, rows, width), dyadic(1, rows, width), dyadic(2, width)
    residual, bias = residual.to(dtype), bias.to(dtype)
    total = partials.double().sum(0)[:, :width]
    assert torch.equal(run(partials, residual, bias, width, dtype), (total + bias + residual).to(dtype))
    assert torch.equal(run(partials, None, bias, width, dtype), (total + bias).to(dtype))
    assert torch.equal(run(partials, residual, None, width, torch.float32), (total + residual).float())
    assert torch.equal(run(partials, None, None, width, dtype), total.to(dtype))


@both(add_norm, add_norm_reference)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits, rows, width", SHAPES)
def test_add_norm(run, dtype, splits, rows, width):
    partials = products(0, splits, rows, width)
    residual, weight = dyadic(1, rows, width).to(dtype), dyadic(2, width).to(dtype)
    sums = partials.double().sum(0)[:, :width] + residual
    for given_partials, exact in ((partials, sums), (None, residual.double())):
        added, normed = run(given_partials, residual, weight, 1e-2)
        assert added.dtype == normed.dtype == dtype
        assert torch.equal(added, exact.to(dtype)) and added.data_ptr() != residual.data_ptr()
        x = added.double()
        assert_rounded_once(normed, x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight.double())


@both(add_norm, add_norm_reference)
def test_eps_counts_and_is_inside_the_root(run):
    residual = torch.tensor([[3.0, 4.0]])
    assert_rounded_once(run(None, residual, torch.ones(2), 12.5)[1], residual.double() / 5)
    assert run(None, torch.zeros(1, 2), torch.ones(2), 1e-6)[1].eq(0).all()


@both(silu_mul, silu_mul_reference)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits, rows, width", SHAPES)
def test_silu_mul(run, dtype, splits, rows, width):
    partials = products(0, splits, rows, 2 * width)
    gate, up = partials.double().sum(0)[:, : 2 * width].to(dtype).double().chunk(2, dim=-1)
    assert_rounded_once(run(partials, width, dtype), gate / (1 + (-gate).exp()) * up)


@pytest.mark.filterwarnings("ignore:overflow")
@both(silu_mul, silu_mul_reference)
def test_silu_of_extremes(run):
    gate_up = torch.tensor([[[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]]])
    assert run(gate_up, 3, torch.float32).tolist() == [[0.0, 600.0, 0.0]]


@both(rope_write, rope_write_reference)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, heads, kv_heads, splits, with_bias", [
    (16, 4, 2, 3, True), (64, 3, 1, 1, False), (96, 2, 2, 2, True), (128, 4, 1, 2, False),
])  # fmt: skip
def test_rope_write(run, dtype, dim, heads, kv_heads, splits, with_bias):
    batch, rows, offset = 2, 3, 2
    all_heads = heads + 2 * kv_heads
    partials = products(0, splits, batch * rows, all_heads * dim)
    bias = dyadic(1, all_heads * dim).to(dtype) if with_bias else None
    angles = torch.rand(50, dim // 2, generator=torch.Generator().manual_seed(2)) * 7
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    start, positions = torch.tensor([5, 0]), torch.tensor([[7, 8, 8], [2, 49, 3]])
    k_cache, v_cache = dyadic(3, batch, kv_heads, 12, dim).to(dtype), dyadic(4, batch, kv_heads, 12, dim).to(dtype)
    k_before, v_before = k_cache.clone(), v_cache.clone()

    q = run(partials, bias, table, positions, k_cache, v_cache, start, offset, heads)

    total = partials.double().sum(0)[:, : all_heads * dim] + (0 if bias is None else bias.double())
    value = total.to(dtype).double().view(batch, rows, all_heads, dim)
    cos, sin = (table[positions].double()[:, :, i, None] for i in (0, 1))
    rotated = torch.empty_like(value)
    for i in range(dim // 2):
        a, b = value[..., i], value[..., i + dim // 2]
        rotated[..., i] = a * cos[..., i] - b * sin[..., i]
        rotated[..., i + dim // 2] = b * cos[..., i] + a * sin[..., i]
    assert q.dtype == dtype and q.shape == (batch, rows, heads, dim) and q.is_contiguous()
    assert_rounded_once(q, rotated[:, :, :heads], slack=1e-5)
    untouched = torch.ones(batch, 12, dtype=torch.bool)
    for b, r in itertools.product(range(batch), range(rows)):
        row = int(start[b]) + offset + r
        untouched[b, row] = False
        assert_rounded_once(k_cache[b, :, row], rotated[b, r, heads : heads + kv_heads], slack=1e-5)
        assert torch.equal(v_cache[b, :, row].double(), value[b, r, heads + kv_heads :])
    for cache, before in ((k_cache, k_before), (v_cache, v_before)):
        assert torch.equal(cache.transpose(1, 2)[untouched], before.transpose(1, 2)[untouched])


def test_rotation_is_rounded_as_the_definition_rounds():
    """Products and sums in fp32, none fused: where the definition has the same steps the bits are the same."""
    inputs = rope_inputs(torch.bfloat16)
    one, two = [[t.clone() if torch.is_tensor(t) else t for t in inputs] for _ in range(2)]
    assert same_bits(rope_write(*one), rope_write_reference(*two))
    assert all(same_bits(a, b) for a, b in zip(one[4:6], two[4:6], strict=True))


@both(rope_write, rope_write_reference)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_queries_and_keys(run, dtype):
    """Against fp64: each head over its root mean square, times the weight, before the rotation; values stay."""
    partials, bias, table, positions, k_cache, v_cache, start, offset, heads = rope_inputs(dtype)
    generator = torch.Generator().manual_seed(5)
    norms = [torch.randn(16, generator=generator).to(dtype) for _ in range(2)]
    q = run(partials, bias, table, positions, k_cache, v_cache, start, offset, heads, *norms, 1e-3)
    values = (partials.double().sum(0) + bias.double()).view(2, 2, 4, 16)
    cos, sin = table[positions].double()[:, :, :, None].unbind(2)
    for mine, his, weight in ((q, values[:, :, :2], norms[0]), (k_cache, values[:, :, 2:3], norms[1])):
        normed = his / (his.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
        low, high = normed.chunk(2, -1)
        expected = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
        if mine is k_cache:
            mine = torch.stack([mine[b, :, int(start[b]) + 1 : int(start[b]) + 3].transpose(0, 1) for b in range(2)])
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(mine.double(), expected, rtol=tolerance, atol=tolerance)


def rope_inputs(dtype, batch=2, rows=2):
    generator = torch.Generator().manual_seed(0)
    partials = torch.randn(3, batch * rows, 4 * 16, generator=generator)
    angles = torch.randn(20, 8, generator=generator)
    table, positions = torch.stack((angles.cos(), angles.sin()), 1), torch.arange(batch * rows).view(batch, rows)
    k_cache, v_cache = torch.zeros(2, batch, 1, 9, 16, dtype=dtype)
    bias = torch.randn(4 * 16, generator=generator).to(dtype)
    return [partials, bias, table, positions, k_cache, v_cache, torch.arange(batch), 1, 2]


# The order of sums


ORDERS = list(itertools.permutations((1e8, 1.0, -1e8)))


def in_order(terms):
    total = np.float32(0)
    for term in terms:
        total = total + np.float32(term)
    return float(total)


def test_the_orders_can_be_told_apart():
    assert [in_order(terms) for terms in ORDERS] == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("terms", ORDERS)
def test_splits_are_added_in_order(terms):
    partials, expected = torch.tensor(terms)[:, None, None].expand(3, 1, 32).contiguous(), in_order(terms)
    zeros, ones = torch.zeros(1, 32), torch.ones(32)
    for run in (add, add_reference):
        assert run(partials, None, None, 32, torch.float32).tolist() == [[expected] * 32]
    for run in (add_norm, add_norm_reference):
        assert run(partials, zeros, ones, 1e-5)[0].tolist() == [[expected] * 32]
    for run in (silu_mul, silu_mul_reference):
        assert run(partials, 16, torch.float32)[0, 0] == pytest.approx(expected**2 / (1 + math.exp(-expected)))
    for run in (rope_write, rope_write_reference):
        cache, table = torch.zeros(2, 1, 1, 4, 8), torch.tensor([1.0, 0.0])[:, None].expand(1, 2, 4).contiguous()
        at = torch.zeros(1, dtype=torch.int64)
        q = run(partials, None, table, at[None], *cache, at, 0, 2)
        assert q.eq(expected).all() and cache[:, :, :, 0].eq(expected).all()


def test_bias_and_residual_come_after_the_splits():
    """Each of these gives another value if anything is added earlier or later."""
    sums, row = torch.tensor([1e8, 1.0, -1e8])[:, None, None], torch.ones(1, 1)
    for run in (add_norm, add_norm_reference):
        assert run(sums, row, torch.ones(1), 1e-5)[0].item() == 1.0
    for run in (add, add_reference):
        assert run(sums, row, None, 1, torch.float32).item() == 1.0
        assert run(sums, None, row[0], 1, torch.float32).item() == 1.0
        assert run(sums[:1], row, torch.tensor([-1e8]), 1, torch.float32).item() == 1.0  # bias, then residual
        assert run(sums[:1], -1e8 * row, row[0], 1, torch.float32).item() == 0.0
    for run in (rope_write, rope_write_reference):
        cache, table = torch.zeros(2, 1, 1, 4, 2), torch.tensor([1.0, 0.0])[None, :, None]
        at = torch.zeros(1, dtype=torch.int64)
        run(sums.expand(3, 1, 6).contiguous(), torch.ones(6), table, at[None], *cache, at, 0, 1)
        assert cache[:, 0, 0, 0].eq(1).all()


@pytest.mark.parametrize("dtype, tie", [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)])
def test_ties_are_rounded_to_even(dtype, tie):
    partials = torch.tensor([[[1 + tie, 1 + 3 * tie, 1 + tie + 2.0**-20]]])
    expected = [[1.0, 1 + 4 * tie, 1 + 2 * tie]]
    for run in (add, add_reference):
        assert run(partials, None, None, 3, dtype).tolist() == expected
    for run in (add_norm, add_norm_reference):
        assert run(partials, torch.zeros(1, 3, dtype=dtype), torch.ones(3), 1e-5)[0].tolist() == expected


# A row alone and among others


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_its_bits_among_others(dtype):
    generator = torch.Generator().manual_seed(0)
    rows, width = 5, 1100
    partials = torch.randn(3, rows, 2 * width + 8, generator=generator)
    residual, weight = torch.randn(rows, width, generator=generator).to(dtype), torch.randn(width, generator=generator)
    scores = torch.randn(rows, 5000, generator=generator).mul(8).round()
    runs = (
        lambda at: add_norm(partials[:, at], residual[at], weight, 1e-5),
        lambda at: add_norm(None, residual[at], weight, 1e-5),
        lambda at: (add(partials[:, at], residual[at], weight, width, dtype),),
        lambda at: (silu_mul(partials[:, at], width, dtype),),
        lambda at: top_children(scores[at], 4),
    )
    for run in runs:
        together = run(slice(None))
        for row in range(rows):
            alone = run(slice(row, row + 1))
            assert all(same_bits(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotated_row_keeps_its_bits_among_others(dtype):
    together = rope_inputs(dtype)
    partials, bias, table, positions, k_cache, v_cache, start, offset, heads = together
    q = rope_write(*together)
    for b, r in itertools.product(range(2), range(2)):
        row, caches = 2 * b + r, torch.zeros(2, 1, 1, 9, 16, dtype=dtype)
        at, one = positions[b : b + 1, r : r + 1], slice(row, row + 1)
        alone = rope_write(partials[:, one], bias, table, at, *caches, start[b : b + 1], offset + r, heads)
        assert same_bits(alone, q[b : b + 1, r : r + 1])
        place = int(start[b]) + offset + r
        assert same_bits(caches[0, 0, :, place], k_cache[b, :, place])
        assert same_bits(caches[1, 0, :, place], v_cache[b, :, place])


# Compaction


def moved(cache, start, path):
    """Row by row from an untouched copy."""
    out = cache.clone()
    for b, slots in enumerate(path.tolist()):
        for j, slot in enumerate(slots):
            out[:, b, :, int(start[b]) + j] = cache[:, b, :, int(start[b]) + slot]
    return out


def numbered_cache(shape, dtype=torch.float32):
    """Every bit pattern may occur, NaN with payloads too."""
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(kind)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=kind).view(dtype)


@both(compact, compact_reference)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 96])
def test_compaction_copies_bits_also_where_rows_overlap(run, dtype, dim):
    cache = numbered_cache((4, 2, 2, 20, dim), dtype)
    start = torch.tensor([7, 0])
    path = torch.tensor([[0, 2, 3, 4, 7, 12], [0, 1, 5, 6, 4, 5]])  # each reads what the next step overwrites
    expected = moved(cache, start, path)
    assert run(cache, start, path) is None
    assert same_bits(cache, expected)


@both(compact, compact_reference)
def test_compaction_of_one_sequence_of_a_batch(run):
    whole = numbered_cache((2, 3, 2, 10, 16))
    before, start, path = whole.clone(), torch.tensor([3]), torch.tensor([[0, 3, 4]])
    run(whole[:, 1:2], start, path)
    assert same_bits(whole[:, 1:2], moved(before[:, 1:2], start, path))
    assert same_bits(whole[:, ::2], before[:, ::2])


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_compaction_of_any_path(data):
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    accepted = data.draw(st.integers(0, len(gaps)))
    path = [j + sum(gaps[: j + 1]) if j < accepted else j for j in range(len(gaps))]
    cache, start = numbered_cache((2, 1, 1, 40, 16), torch.float16), torch.tensor([data.draw(st.integers(0, 9))])
    expected = moved(cache, start, torch.tensor([path]))
    other = cache.clone()
    compact(cache, start, torch.tensor([path]))
    compact_reference(other, start, torch.tensor([path]))
    assert same_bits(cache, expected) and same_bits(other, expected)


# The walk


def by_hand(tokens, picks, parent, depth_max):
    """One sequence, lists -> path, count, emitted."""
    path, node = [0], 0
    while len(path) <= depth_max:
        children = [i for i in range(1, len(tokens)) if parent[i] == node and tokens[i] == picks[node]]
        if not children:
            break
        node = children[0]
        path.append(node)
    emitted = [picks[i] for i in path]
    left = depth_max + 1 - len(path)
    return path + list(range(len(path), depth_max + 1)), len(path), emitted + emitted[-1:] * left


def assert_walk(tokens, picks, parent, depth_max):
    lists = [t.tolist() for t in (tokens, picks, parent.expand_as(tokens))]
    expected = [by_hand(*row, depth_max) for row in zip(*lists, strict=True)]
    for run in (accept_walk, accept_walk_reference):
        path, count, emitted = run(tokens, picks, parent, depth_max)
        assert path.dtype == count.dtype == emitted.dtype == torch.int64
        assert list(zip(path.tolist(), count.tolist(), emitted.tolist(), strict=True)) == expected
    return expected


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_walk_of_random_trees(seed, vocab):
    tree = Tree(random_paths(seed), "random")
    generator = torch.Generator().manual_seed(seed)
    tokens, picks = torch.randint(0, vocab, (2, 3, len(tree)), generator=generator)
    expected = assert_walk(tokens, picks, tree.parent, tree.depth_max)
    logits = torch.nn.functional.one_hot(picks, vocab).float()
    keys = torch.zeros(3, tree.depth_max + 1, dtype=torch.int64)
    path, count, emitted = walk(tokens, logits, keys, tree.nodes(3).parent, Sampling())
    assert list(zip(path.tolist(), count.tolist(), emitted.tolist(), strict=True)) == expected


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 26, 63, 64]))
def test_walk_of_a_tree_for_each_sequence(seed, nodes):
    generator = torch.Generator().manual_seed(seed)
    parent = torch.zeros(2, nodes, dtype=torch.int64)
    for b, i in itertools.product(range(2), range(1, nodes)):
        parent[b, i] = int(torch.randint(max(0, i - 3), i, (), generator=generator))
    tokens, picks = torch.randint(0, 2, (2, 2, nodes), generator=generator)
    assert_walk(tokens, picks, parent, 7)  # deeper nodes are not reached


def test_walk_at_its_ends():
    tree = chain(16)
    ids = torch.arange(100, 117)[None]
    ((path, count, emitted),) = assert_walk(ids, ids + 1, tree.parent, 16)  # every drafted token is accepted
    assert path == list(range(17)) and count == 17 and emitted == list(range(101, 118))
    ((path, count, emitted),) = assert_walk(ids, ids, tree.parent, 16)  # none is
    assert path == list(range(17)) and count == 1 and emitted == [100] * 17
    assert assert_walk(ids[:, :1], ids[:, :1], torch.zeros(1, dtype=torch.int64), 0) == [([0], 1, [100])]


def test_walk_takes_the_lowest_of_equal_children_and_never_the_root():
    zeros = torch.zeros(1, 5, dtype=torch.int64)
    ((path, count, _),) = assert_walk(zeros, zeros, torch.tensor([0, 0, 0, 1, 1]), 3)
    assert path == [0, 1, 3, 3] and count == 3
    ((path, count, _),) = assert_walk(torch.tensor([[9, 1]]), torch.tensor([[9, 9]]), torch.tensor([0, 0]), 1)
    assert path == [0, 1] and count == 1  # the root carries the pick, and is listed as its own parent


# The best children


def best_by_hand(row, k):
    order = sorted(range(len(row)), key=lambda i: (math.isnan(row[i]), 0.0 if math.isnan(row[i]) else -row[i], i))
    return order[:k]


@both(top_children, top_children_reference)
@pytest.mark.parametrize("width, k", [(4, 4), (16, 16), (100, 10), (4096, 1), (4097, 4), (9000, 16)])
def test_top_children(run, width, k):
    generator = torch.Generator().manual_seed(width)
    scores = torch.randn(3, width, generator=generator) * 5
    scores[1] = scores[1].round()  # ties, and zeros of both signs
    scores[2] = torch.where(torch.rand(width, generator=generator) < 0.5, -torch.inf, scores[2])
    scores[2, ::3] = torch.nan
    values, ids = run(scores, k)
    assert values.dtype == torch.float32 and ids.dtype == torch.int64
    assert ids.tolist() == [best_by_hand(row, k) for row in scores.tolist()]
    assert torch.equal(values.nan_to_num(7.0), scores.gather(1, ids).nan_to_num(7.0))
    assert torch.equal(values.isnan(), scores.gather(1, ids).isnan())


@both(top_children, top_children_reference)
def test_top_children_at_the_ends_of_the_order(run):
    inf, nan = torch.inf, torch.nan
    scores = torch.tensor([
        [nan, -inf, -0.0, 0.0, 1e-45, -1e-45, inf, -3e38],
        [-inf, nan, -inf, -inf, nan, -inf, -inf, -inf],
        [-nan, nan, nan, nan, nan, nan, nan, -2.0],
    ])  # fmt: skip
    values, ids = run(scores, 8)
    assert ids.tolist() == [[6, 4, 2, 3, 5, 7, 1, 0], [0, 2, 3, 5, 6, 7, 1, 4], [7, 0, 1, 2, 3, 4, 5, 6]]
    assert values[0, :7].tolist() == [inf, scores[0, 4], 0.0, 0.0, scores[0, 5], scores[0, 7], -inf]
    assert values[:, 7].isnan().all() and values[2, 0] == -2


@both(top_children, top_children_reference)
def test_ties_across_blocks_go_to_the_lowest_id(run):
    scores = torch.zeros(1, 8200)
    scores[0, [8199, 4096, 4095]] = 1.0
    assert run(scores, 5)[1].tolist() == [[4095, 4096, 8199, 0, 1]]


# As operators of torch


def test_schemas_and_shapes_for_tracing():
    """What is said to be written is written, nothing else; outputs share no memory; traced shapes are the real ones."""
    partials, row = torch.randn(1, 2, 72), torch.randn(2, 32)
    cases = [
        (add_norm, (partials, row, row[0], 1e-5)),
        (add_norm, (None, row, row[0], 1e-5)),
        (add, (partials, None, None, 72, torch.float32)),
        (add, (partials, row.half(), row[0], 32, torch.float16)),
        (silu_mul, (partials, 32, torch.bfloat16)),
        (rope_write, tuple(rope_inputs(torch.float16))),
        (compact, (numbered_cache((2, 2, 1, 9, 16), torch.int16), torch.arange(2), torch.tensor([[0, 3], [0, 2]]))),
        (accept_walk, (*torch.zeros(2, 2, 4, dtype=torch.int64), torch.tensor([0, 0, 0, 1]), 2)),
        (top_children, (row, 4)),
    ]
    for operator, inputs in cases:
        torch.library.opcheck(operator, inputs, test_utils=("test_schema", "test_faketensor"))


def test_definitions_return_memory_of_their_own():
    """With one split and nothing to add, a sum is a view of what it was made from."""
    partials, row = torch.randn(1, 2, 32), torch.randn(2, 32)
    assert add_reference(partials, None, None, 32, torch.float32).data_ptr() != partials.data_ptr()
    assert add_norm_reference(None, row, row[0], 1e-5)[0].data_ptr() != row.data_ptr()
