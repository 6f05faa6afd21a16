"""Attention in Triton's interpreter, and its plain definition: against arithmetic in fp64, a row alone against the same
row among others bit by bit, and each comparison against a fault put in."""

import functools
import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime import interpreter

from conftest import random_paths
from fastea.kernels import tree_attention as attention_module
from fastea.kernels.tree_attention import tree_attention, tree_attention_reference
from fastea.tree import Tree
from interpreted import HALVES, few, normal, reversed_dot, same_bits

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # of numpy, in the interpreter


GARBAGE = (torch.nan, torch.inf, -torch.inf)
DEEP = Tree([(0,) * n for n in range(1, 17)] + [(r,) for r in range(1, 48)], "64 nodes")  # its slot 63 is the deepest
SHAPES = [(64, 2, 2), (96, 3, 1), (128, 4, 1), (16, 16, 2)]  # head size, heads, KV heads


class Attention:
    """Queries and caches, and which cache rows each query sees. visible: as `tree_attention` takes it."""

    def __init__(self, seed, starts, rows, visible, shape=(16, 2, 1), dtype=torch.float16, spare=40):
        dim, heads, kv = shape
        batch, length = len(starts), max(starts) + max(rows, 64) + spare
        self.q = normal(seed, batch, rows, heads, dim, dtype=dtype)
        self.k, self.v = normal(seed + 1, 2, batch, kv, length, dim, dtype=dtype)
        self.start, self.visible = torch.tensor(starts), visible

    def seen(self, b, row):
        start = int(self.start[b])
        if self.visible is None:
            return list(range(start + row + 1))
        entry = self.visible[b, row].tolist()
        slots = [j for j in range(64) if entry >> j & 1] if isinstance(entry, int) else [j for j in entry if j >= 0]
        return list(range(start)) + [start + j for j in slots]

    def __call__(self, run=tree_attention, **other):
        return run(*(other.get(name, getattr(self, name)) for name in ("q", "k", "v", "start", "visible")))

    def filled(self, value):
        """With a value wherever no row may look."""
        k, v = self.k.clone(), self.v.clone()
        for b in range(len(self.start)):
            hidden = set(range(k.shape[2])).difference(*(self.seen(b, row) for row in range(self.q.shape[1])))
            k[b, :, sorted(hidden)], v[b, :, sorted(hidden)] = value, value
        return {"k": k, "v": v}

    def close(self, out):
        """Weights and results are rounded to the dtype, weights by 2^-25 at least where fp16 is subnormal; scores in
        fp32 by far less. An error of a weight moves the result along the distance of its value from the result."""
        unit = torch.finfo(out.dtype).eps / 2
        group, scale = self.q.shape[2] // self.k.shape[1], self.q.shape[3] ** -0.5
        for b, row in itertools.product(range(len(self.start)), range(self.q.shape[1])):
            at = self.seen(b, row)
            k, v = (t[b, :, at].double().repeat_interleave(group, 0) for t in (self.k, self.v))  # [H, L, D]
            scores = torch.einsum("hd,hld->hl", self.q[b, row].double(), k) * scale
            weight = (scores - scores.amax(1, keepdim=True)).exp()[:, :, None]
            exact = (weight * v).sum(1) / weight.sum(1)
            least = torch.tensor(2.0**-25 if out.dtype == torch.float16 else 0.0)
            moved = ((weight * (unit + 2e-5)).maximum(least) * (v - exact[:, None]).abs()).sum(1) / weight.sum(1)
            if not ((out[b, row].double() - exact).abs() <= moved + unit * exact.abs() + 1e-6).all():
                return False
        return True


def words_of(tree, batch=1):
    return tree.words.expand(batch, -1)


def lists_of(tree, batch=1, width=17):
    slots = [[j for j in range(64) if word >> j & 1] for word in tree.words.tolist()]
    return torch.tensor([row + [-1] * (width - len(row)) for row in slots]).expand(batch, -1, -1)


def random_tree(seed, nodes=12):
    return Tree(random_paths(seed, nodes), "random")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape, dtype):
    """A batch of two lengths: a tree by words and by lists, and rows that see all rows before them."""
    starts, tree = [290, 5], random_tree(shape[0], 8)
    case = Attention(0, starts, len(tree), words_of(tree, 2), shape, dtype)
    out = case()
    assert out.dtype == dtype and out.shape == case.q.shape and case.close(out)
    assert same_bits(out, case(visible=lists_of(tree, 2)))
    causal = Attention(2, starts, 3, None, shape, dtype)
    assert causal.close(causal())


def test_attention_of_more_query_heads_than_a_tile():
    case = Attention(0, [50], 2, None, (16, 20, 1))
    assert case.close(case())


@pytest.mark.parametrize("visible", [words_of, lists_of, None])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_by_its_definition(shape, visible):
    """In fp32, which sums in another order."""
    tree = random_tree(1)
    case = Attention(0, [37, 5], len(tree), visible and visible(tree, 2), shape, torch.float32)
    assert case.close(case(tree_attention_reference))


BORDERS = [0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 255, 256, 257, *range(271, 276), 287, 288, 289, 530, 610]


@pytest.mark.parametrize("start", BORDERS)
def test_attention_at_its_borders(start):
    tree, dtype = random_tree(start, 9), HALVES[start % 2]
    for rows, visible in ((1, None), (4, None), (len(tree), words_of(tree))):
        case = Attention(start, [start], rows, visible, (16, 3, 1), dtype, spare=start % 33)
        assert case.close(case())


@pytest.mark.parametrize("start", [0, 272])
def test_attention_of_64_nodes(start):
    case = Attention(1, [start], 64, words_of(DEEP), (16, 1, 1))
    assert int(case.visible[0, 63]) < 0
    out = case()
    assert case.close(out) and same_bits(out, case(visible=lists_of(DEEP)))


@pytest.mark.parametrize("start", [0, 250])
def test_attention_of_a_chunk(start):
    """Some rows have the keys of a second split below their border, others do not."""
    case = Attention(2, [start], 64, None, (16, 1, 1), HALVES[start // 250])
    assert case.close(case())


@few(max_examples=6)
@given(st.integers(0, 2**32 - 1), st.integers(0, 300))
def test_attention_to_drafts_in_any_slots(seed, start):
    """Lists of slots past 64, as a drafter's cache has them."""
    rng = random.Random(seed)
    rows = [sorted(rng.sample(range(130), rng.randint(1, 17))) for _ in range(5)]
    lists = torch.tensor([[row + [-1] * (17 - len(row)) for row in rows]])
    case = Attention(seed % 1000, [start], 5, lists, spare=70)
    assert case.close(case())
    narrow = torch.tensor([[row[:3] + [-1] * (3 - len(row)) for row in rows]])
    assert same_bits(case(visible=narrow), case(visible=torch.cat((narrow, narrow.new_full((1, 5, 14), -1)), 2)))


@pytest.mark.parametrize("start", [0, 48, 305])
@pytest.mark.parametrize("kind", ["tree", "rows", "sparse"])
def test_nothing_else_in_the_cache_is_read(start, kind):
    """Not even in the tile of keys behind the border, where what is read is multiplied by zero."""
    tree = random_tree(3)
    visible = {"tree": words_of(tree), "rows": None, "sparse": words_of(tree) << 3}[kind]
    case = Attention(3, [start], len(tree), visible)
    clean = case()
    assert case.close(clean)
    for value in GARBAGE:
        assert same_bits(case(**case.filled(value)), clean)


def test_a_broken_sequence_leaves_the_others_alone():
    case = Attention(4, [40, 300], 3, None)
    clean = case()
    case.k[1], case.v[1] = torch.nan, torch.inf
    assert same_bits(case()[0], clean[0])


# A row of attention: alone, in a chain, in a tree


class Text:
    """Queries, keys and values of one text, and what plain decoding makes of each position. In fp32 any other order of
    a sum shows; in 16 bit only what also changes the rounding of weights, most often."""

    def __init__(self, dtype, shape, length=700):
        dim, self.heads, kv = shape
        self.q = normal(5, length, self.heads, dim, dtype=dtype)
        self.k, self.v = normal(6, 2, 1, kv, length, dim, dtype=dtype)
        self.plain = functools.cache(self._plain)

    def cache(self, start, seed):
        """The text below start; other numbers from there on."""
        k, v = normal(seed, *torch.stack((self.k, self.v)).shape, dtype=self.k.dtype)
        k[:, :, :start], v[:, :, :start] = self.k[:, :, :start], self.v[:, :, :start]
        return k, v

    def _plain(self, position):
        k, v = self.cache(position + 1, seed=position)
        return tree_attention(self.q[None, position : position + 1], k, v, torch.tensor([position]), None)[0, 0]

    def chunk(self, start, rows, words=False):
        """Rows one after the other, by position."""
        k, v = self.cache(start + rows, seed=7)
        visible = torch.tensor([[(2 << row) - 1 for row in range(rows)]]) if words else None
        out = tree_attention(self.q[None, start : start + rows], k, v, torch.tensor([start]), visible)[0]
        return dict(zip(range(start, start + rows), out, strict=True))

    def tree(self, start, depth, seed, flip=0):
        """The text as a path through the 64 slots of a random tree, of which a few other rows are asked too. flip:
        bits to change in the words of the path."""
        rng = random.Random(seed)
        path = [0, *sorted(rng.sample(range(1, 64), depth))]
        words, level = [1], [0]
        for slot in range(1, 64):
            shallow = [j for j in range(slot) if level[j] < 16]
            parent = path[path.index(slot) - 1] if slot in path else rng.choice(shallow)
            words.append(words[parent] | 1 << slot)
            level.append(level[parent] + 1)
        rows = sorted({*path, *rng.sample(range(64), 4)})
        k, v = self.cache(start, seed)
        for step, slot in enumerate(path):
            k[:, :, start + slot], v[:, :, start + slot] = self.k[:, :, start + step], self.v[:, :, start + step]
        q = normal(seed + 1, 1, len(rows), *self.q.shape[1:], dtype=self.q.dtype)
        for row, slot in enumerate(rows):
            if slot in path:
                q[0, row], words[slot] = self.q[start + path.index(slot)], words[slot] ^ flip
        visible = torch.tensor([[words[slot] - (words[slot] >> 63 << 64) for slot in rows]])
        out = tree_attention(q, k, v, torch.tensor([start]), visible)[0]
        return {start + step: out[rows.index(slot)] for step, slot in enumerate(path)}

    def as_plain(self, rows):
        """Whether rows by position are those of plain decoding."""
        return all(same_bits(row, self.plain(position)) for position, row in rows.items())


@functools.cache
def text(dtype=torch.float32, shape=(16, 3, 1)):
    return Text(dtype, shape)


@pytest.mark.parametrize("start", BORDERS)
def test_a_row_keeps_its_bits_in_chains_and_trees(start):
    """Lengths around every border and with up to three splits, all depths up to 16."""
    some = text()
    assert some.as_plain(some.chunk(start, 17))
    assert some.as_plain(some.tree(start, 16, seed=start))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("start", [17, 272])
def test_a_row_keeps_its_bits_in_16_bit(start, dtype):
    some = text(dtype)
    assert some.as_plain(some.chunk(start, 4, words=True))
    assert some.as_plain(some.tree(start, 16, seed=start))


@pytest.mark.parametrize("shape", [(64, 2, 2), (96, 4, 1), (128, 8, 1)], ids=str)
def test_a_row_keeps_its_bits_in_heads_of_any_shape(shape):
    some = text(shape=shape)
    for start in (33, 275):
        assert some.as_plain(some.tree(start, 4, seed=start))
        assert some.as_plain(some.chunk(start, 2))


@pytest.mark.parametrize("rows", [1, 5, 6, 17, 64])
def test_a_row_keeps_its_bits_among_any_number_of_rows(rows):
    """15 queries are one tile of 16, 18 and more tiles of 32."""
    some, start = text(), 280 - rows // 2
    out = some.chunk(start, rows)
    assert some.as_plain({position: out[position] for position in (start, 280, start + rows - 1)})


@few(max_examples=8)
@given(st.integers(0, 290), st.integers(0, 16), st.integers(0, 2**32 - 1))
def test_a_row_keeps_its_bits_in_any_tree(start, depth, seed):
    some = text()
    assert some.as_plain(some.tree(start, depth, seed))


@pytest.mark.parametrize("bit", [0, 5, 40, 63])
def test_a_flipped_bit_of_a_word_is_noticed(bit):
    some, tree = text(), random_tree(8)
    assert some.as_plain(some.tree(100, 16, seed=1)) and not some.as_plain(some.tree(100, 16, seed=1, flip=1 << bit))
    case = Attention(8, [20], len(tree), words_of(tree))
    faulty = case.visible.clone()
    faulty[0, -1] ^= (1 << bit) - (bit == 63) * (1 << 64)
    assert case.close(case()) and not case.close(case(visible=faulty))


@pytest.mark.parametrize("name, value", [("TILE", 16), ("SPLIT", 128), ("DEPTH", 8)])
def test_another_border_for_one_of_two_calls_is_noticed(name, value, monkeypatch):
    some = text()
    assert some.as_plain(some.chunk(270, 6))
    monkeypatch.setattr(attention_module, name, value)
    case = Attention(9, [270], 6, None)
    assert case.close(case()) and not some.as_plain(some.chunk(270, 6))


def test_another_order_of_keys_is_noticed(monkeypatch):
    some = text()
    assert some.as_plain(some.chunk(100, 1))
    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", reversed_dot(16))  # the values, for 16 columns
    assert not some.as_plain(some.chunk(100, 1))
