"""Products, attention and the choice of tokens in Triton's interpreter, and their plain definitions: against arithmetic
in fp64, a row alone against the same row among others bit by bit, and each comparison against a fault put in."""

import functools
import inspect
import itertools
import random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from conftest import random_paths
from fastea.kernels import choose as choose_module
from fastea.kernels import gemm, pick
from fastea.kernels import tree_attention as attention_module
from fastea.kernels.choose import _gumbel, choose, choose_reference
from fastea.kernels.launch import INTERPRETED, launch
from fastea.kernels.noise import GOLDEN, MIX1, MIX2, gumbel, uniform
from fastea.kernels.tree_attention import tree_attention, tree_attention_reference
from fastea.quantize.forms import QuantizedWeight, Scheme, nearest
from fastea.tree import Tree

assert INTERPRETED, "Triton was imported before this file, so that the kernels would not be tested"

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # of numpy, in the interpreter

HALVES = (torch.float16, torch.bfloat16)
few = functools.partial(settings, deadline=None, derandomize=True)


def both(*pair):
    return pytest.mark.parametrize("run", pair, ids=("kernel", "reference"))


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def uneven(seed, *shape, dtype=torch.float16):
    """Of many magnitudes, so that sums are not exact and their order shows."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-7, 8, shape, generator=generator)).to(dtype)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# Products

FORMS = [None, Scheme(8), Scheme(8, 32), *(Scheme(4, group, low) for low in (False, True) for group in (32, 64, 128))]


def form_name(form):
    return form.name if form else "matrix"


every_form = pytest.mark.parametrize("form", FORMS, ids=form_name)
every_code = pytest.mark.parametrize("form", FORMS[1:], ids=form_name)


@functools.cache
def made(form, outputs, inputs):
    """Normal weights, in the form."""
    weight = normal(outputs + inputs, outputs, inputs) + 0.25
    return nearest(weight, form) if form else weight


class Product:
    """A weight, what its kernels read, and its values in fp64 as base + rest, the two parts that are summed apart."""

    def __init__(self, weight, dtype):
        self.tensors = gemm.layout(weight, dtype, "cpu")
        self.outputs, self.inputs = weight.shape
        if isinstance(weight, QuantizedWeight):
            self.exact, self.chain = weight.dequantized().double(), weight.scheme.group or gemm.BLOCK[8]
        else:
            self.exact, self.chain = weight.to(dtype).double(), self.inputs
        self.base = torch.zeros(())
        if "minimum" in self.tensors:
            base = 8 * weight.scale.double() + weight.minimum.double()
            self.base = base.repeat_interleave(weight.scheme.group, 1)[:, : self.inputs]

    def __call__(self, x, half_sums=False):
        return gemm.partials(x, self.tensors, half_sums)

    def reference(self, x):
        bits = {"matrix": 16, "words8": 8, "words4": 4}[next(iter(self.tensors))]
        weight = next(iter(self.tensors.values()))
        return gemm.partials_reference(x, weight, self.tensors.get("scale"), self.tensors.get("minimum"), bits)

    def total(self, partials):
        """The sum over the splits, without the padding, which must be zero."""
        assert partials.dtype == torch.float32 and partials.shape[2] == -(-self.outputs // gemm.BN) * gemm.BN
        assert partials[:, :, self.outputs :].eq(0).all()
        return partials.double().sum(0)[:, : self.outputs]

    def close(self, total, x, roundings):
        """Every term of a sum passes at most so many roundings to fp32."""
        x = x.double()
        size = x.abs() @ ((self.exact - self.base).abs() + self.base.abs().expand_as(self.exact)).t()
        return bool(((total - x @ self.exact.t()).abs() <= roundings * 2.0**-24 * size).all())


PRODUCTS = [
    (None, 100, 576, 26), (None, 130, 100, 70), (None, 100, 96, 1),
    (Scheme(8), 130, 576, 3), (Scheme(8), 100, 100, 64), (Scheme(8), 100, 96, 8),
    (Scheme(8, 32), 100, 576, 8), (Scheme(8, 32), 130, 100, 1), (Scheme(8, 32), 100, 96, 70),
    (Scheme(4, 32), 130, 100, 3), (Scheme(4, 32), 100, 96, 64),
    (Scheme(4, 64), 100, 576, 8), (Scheme(4, 128), 130, 384, 1),
    (Scheme(4, 32, True), 100, 576, 1), (Scheme(4, 32, True), 130, 100, 26), (Scheme(4, 32, True), 100, 96, 70),
    (Scheme(4, 64, True), 100, 576, 3), (Scheme(4, 128, True), 130, 384, 8),
]  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form, outputs, inputs, rows", PRODUCTS)
def test_products(form, outputs, inputs, rows, dtype):
    """A kernel's term is summed in its group, scaled, and added to the groups before it, base or no base."""
    product, x = Product(made(form, outputs, inputs), dtype), normal(1, rows, inputs, dtype=dtype)
    kernel, reference = product(x), product.reference(x)
    assert kernel.shape[0] == gemm.splits(-(-outputs // gemm.BN), -(-inputs // product_block(form)), gemm.card("cpu"))
    assert product.close(product.total(kernel), x, product.chain + 2 * inputs // product.chain + 6)
    assert reference.shape == (1, *kernel.shape[1:])
    assert product.close(product.total(reference), x, inputs + 2)
    assert same_bits(kernel, product(x, half_sums=True)) == (dtype == torch.bfloat16 or form is None)


def product_block(form):
    return gemm.BLOCK[form.bits if form else 16]


@every_code
@pytest.mark.parametrize("outputs, inputs", [(100, 576), (130, 100), (64, 384)])
def test_layouts_hold_the_canonical_values(form, outputs, inputs):
    weight = made(form, outputs, inputs)
    tensors = gemm.layout(weight, torch.float16, "cpu")
    words, bits = next(iter(tensors.values())), form.bits

    def values(t):
        return gemm.decoded(t[f"words{bits}"], t["scale"], t.get("minimum"), bits)

    assert words.dtype == torch.int32 and words.is_contiguous() and words.shape[1:] == (*words.shape[1:2], 64, 16)
    assert torch.equal(values(tensors)[:outputs, :inputs], weight.dequantized())
    assert values(tensors)[outputs:].eq(0).all()
    for count in (1, 64, 65):
        ids = torch.randperm(outputs, generator=torch.Generator().manual_seed(0))[: min(count, outputs)]
        part = gemm.rows_of(tensors, ids)
        assert torch.equal(values(part)[: len(ids), :inputs], weight.dequantized(ids))
        assert part.keys() == tensors.keys() and values(part).shape[0] % gemm.BN == 0


def test_layout_of_a_matrix_and_of_its_rows():
    weight = made(None, 100, 96)
    tensors = gemm.layout(weight, torch.bfloat16, "cpu")
    assert torch.equal(tensors["matrix"], weight.bfloat16())
    assert torch.equal(gemm.rows_of(tensors, torch.tensor([3, 99]))["matrix"], weight[[3, 99]].bfloat16())


# Sums of groups in fp16


def half_error(product, x):
    """The largest error, in units of the root of a sum's squared terms times the root of the instructions a group takes
    (fp16 rounds after each). Of rows that are not zero."""
    exact = x.double() @ product.exact.t()
    size = (x.double().square() @ (product.exact - product.base).square().t()).sqrt()
    error = (product.total(product(x, half_sums=True)) - exact).abs() / (size * (product.chain / 16) ** 0.5)
    return float(error.max())


HALF_ERROR = 1.5e-3  # twice what is measured; 2^-11 of a partial sum a rounding


@every_code
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_sums_in_half_precision(form, size):
    product = Product(made(form, 64, 384), torch.float16)
    x = (normal(2, 5, 384) * size).clamp(-65504, 65504).half()
    assert 1e-4 < half_error(product, x) < HALF_ERROR


@every_code
def test_rows_are_scaled_one_by_one(form):
    """Large, small and zero rows side by side, and one with an outlier; powers of two change nothing but the power."""
    product = Product(made(form, 64, 384), torch.float16)
    x = normal(3, 4, 384).half()
    x = torch.stack((x[0] * 2**12, x[1], x[1] * 2**6, torch.zeros_like(x[0]), x[2], x[3] / 2**12))
    x[4, 7] = 3000.0
    together = product(x, half_sums=True)
    assert together[:, 3].eq(0).all() and together.isfinite().all()
    assert torch.equal(together[:, 2], together[:, 1] * 2**6)
    assert half_error(product, x[[0, 1, 4, 5]]) < HALF_ERROR
    for row in range(6):
        assert same_bits(product(x[row : row + 1], half_sums=True)[:, 0], together[:, row])


@pytest.mark.parametrize("form", [Scheme(8), Scheme(4, 128)], ids=form_name)
@pytest.mark.parametrize("largest", [65504.0, 63.9375, 6e-8])
def test_no_sum_in_half_precision_overflows(form, largest):
    """All codes at the end of their range, all activations as large as the scaling leaves them."""
    codes = torch.full((64, 128), -128, dtype=torch.int8) if form.bits == 8 else torch.zeros(64, 64, dtype=torch.uint8)
    product = Product(QuantizedWeight(form, 128, codes, torch.full((64, 1), 0.25).half()), torch.float16)
    x = torch.tensor([largest, -largest]).half()[:, None].expand(2, 128).contiguous()
    torch.testing.assert_close(
        product.total(product(x, half_sums=True)), x.double() @ product.exact.t(), rtol=1e-3, atol=0
    )


def test_without_scaling_sums_in_half_precision_do_overflow(monkeypatch):
    product, x = Product(made(Scheme(8), 64, 384), torch.float16), (normal(2, 2, 384) * 1e4).half()
    monkeypatch.setattr(gemm, "scaled_rows", lambda x, bits: (x, torch.ones(len(x))))
    assert not half_error(product, x) < HALF_ERROR


# A row of a product alone and among others


def same_among(product, x, counts=(2, 8, 9, 26, 33, 64)):
    """Whether the first row of x keeps its bits at another place among so many rows."""
    alone = product(x[:1])[:, 0]
    for count in counts:
        at = count * 2 // 3
        among = product(torch.cat((x[1 : at + 1], x[:1], x[at + 1 : count])))
        if among.shape[1] != count or not same_bits(among[:, at], alone):
            return False
    return True


@every_form
@pytest.mark.parametrize("dtype", HALVES)
def test_a_row_of_a_product_keeps_its_bits(form, dtype):
    product = Product(made(form, 64, 256), dtype)
    assert same_among(product, uneven(4, 64, 256, dtype=dtype))
    if form and dtype == torch.float16:
        assert same_among(functools.partial(product, half_sums=True), uneven(4, 64, 256), (9, 33))


def test_a_row_of_a_product_keeps_its_bits_behind_64_rows():
    product, x = Product(made(Scheme(4, 32, True), 64, 256), torch.float16), uneven(4, 70, 256)
    together = product(x)
    assert all(same_bits(together[:, row], product(x[row : row + 1])[:, 0]) for row in (0, 63, 64, 69))


def test_splits_know_nothing_of_the_rows():
    assert list(inspect.signature(gemm.splits).parameters) == ["weight_tiles", "blocks", "settings"]
    fields = inspect.get_annotations(gemm.Card).keys()
    assert fields == {"multiprocessors", "waves", "warps", "stages", "half_sums", "least_rows"}


@few(max_examples=200)
@given(st.integers(1, 3000), st.integers(1, 1000), st.integers(1, 200), st.integers(1, 4))
def test_splits_cover_all_blocks_and_none_is_empty(tiles, blocks, multiprocessors, waves):
    count = gemm.splits(tiles, blocks, gemm.Card(multiprocessors=multiprocessors, waves=waves))
    each = -(-blocks // count)  # as _partials divides them
    assert 1 <= count <= 8 and (count - 1) * each < blocks <= count * each
    assert count == 1 or tiles * (count - 1) < multiprocessors * waves  # no more than there is use for


def reversed_dot(rows):
    """The interpreter's product, with the inputs in descending order for so many rows."""
    dot = interpreter.interpreter_builder.create_dot

    def faulty(a, b, d, *rest):
        if b.data.shape[1] == rows:
            a = interpreter.TensorHandle(a.data[:, ::-1], a.dtype.scalar)
            b = interpreter.TensorHandle(b.data[::-1], b.dtype.scalar)
        return dot(a, b, d, *rest)

    return faulty


@pytest.mark.parametrize("form", [None, Scheme(8), Scheme(4, 32, True)], ids=form_name)
def test_another_order_for_one_number_of_rows_is_noticed(form, monkeypatch):
    product, x = Product(made(form, 64, 256), torch.float16), uneven(4, 64, 256)
    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", reversed_dot(32))
    assert not same_among(product, x, (26,)) and same_among(product, x, (2, 9, 33))


def test_splits_that_depend_on_the_rows_are_noticed(monkeypatch):
    product, x = Product(made(None, 64, 256), torch.float16), uneven(4, 64, 256)

    def faulty(rows):
        monkeypatch.setattr(gemm, "card", lambda device: gemm.Card(multiprocessors=1 if len(rows) > 8 else 82, waves=1))
        return in_order(product(rows))

    assert same_among(faulty, x, (2, 8)) and not same_among(faulty, x, (9,))


def in_order(partials):
    return functools.reduce(torch.add, partials)[None]


def test_splits_added_in_another_order_are_noticed():
    product, x = Product(made(None, 64, 512), torch.float16), uneven(4, 64, 512)
    assert product(x[:1]).shape[0] == 4
    assert same_among(lambda rows: in_order(product(rows)), x, (2, 9))
    assert not same_among(lambda rows: in_order(product(rows).flip(0) if len(rows) > 8 else product(rows)), x, (9,))


@every_form
def test_a_lost_input_a_wrong_scale_and_a_short_sum_are_noticed(form):
    product, x = Product(made(form, 64, 256), torch.float16), normal(4, 3, 256).half()
    total, roundings = product.total(product(x)), product.chain + 2 * 256 // product.chain + 6
    assert product.close(total, x, roundings)
    assert not product.close(total - x[:, 200:201].double() * product.exact[:, 200], x, roundings)
    assert not product.close(total * (1 + 2.0**-11), x, roundings)
    assert not product.close(total.bfloat16().double(), x, roundings)
    for name in {"scale", "minimum"} & product.tensors.keys():
        product.tensors[name] = product.tensors[name].flip(1)
        assert not product.close(product.total(product(x)), x, roundings)


# Attention

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


# The choice of a token


@triton.jit
def _noise_kernel(keys, ids, out, GOLDEN: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, _gumbel(tl.load(keys + at), tl.load(ids + at), GOLDEN, MIX1, MIX2))


def kernel_noise(keys, ids, golden=GOLDEN):
    out = torch.empty(len(keys))
    launch(_noise_kernel, (1,), keys, ids, out, GOLDEN=golden, MIX1=MIX1, MIX2=MIX2, COUNT=len(keys))
    return out


def signed(value):
    return (value + 2**63) % 2**64 - 2**63


def key_for(bits, number):
    """The key whose noise for this id is made of these 32 bits: the mixing undone."""
    z = bits << 32
    for shift, factor in ((31, MIX2), (27, MIX1), (30, 1)):
        y = z
        for _ in range(64 // shift):
            y = z ^ y >> shift
        z = y * pow(factor, -1, 2**64) % 2**64
    return signed(z - (number + 1) * GOLDEN)


EXTREME = [0, 1, 2, 3, 255, 2**16, 2**31, 2**31 - 1, 2**32 - 1, 2**32 - 2, 2**32 - 128, 2**32 - 129, 2**32 - 4096]


def noise_close(noise, keys, ids):
    expected = torch.stack([gumbel(key, number[None])[0] for key, number in zip(keys, ids, strict=True)])
    return bool(((noise - expected).abs() <= 1e-6 * expected.abs().clamp(min=1)).all())


def test_noise():
    """Also from uniforms at both ends, and those whose noise is about 0."""
    ids, keys = torch.arange(4096) * 31, some_keys(0, 4096)
    assert noise_close(kernel_noise(keys, ids), keys, ids)
    assert not noise_close(kernel_noise(keys, ids, GOLDEN + 2), keys, ids)
    bits = EXTREME + [int(2**32 * (1 - np.exp(-1))) + i for i in (-1, 0, 1)]
    ids = torch.arange(len(bits)) * 1000
    keys = torch.tensor([key_for(b, number) for b, number in zip(bits, ids.tolist(), strict=True)])
    values = [float(uniform(key, number[None])) for key, number in zip(keys, ids, strict=True)]
    expected = [min((b + 0.5) / 2**32, 1 - 2.0**-24) for b in bits]
    assert values == pytest.approx(expected, rel=1e-7) and min(values) == 2.0**-33 and max(values) == 1 - 2.0**-24
    noise = kernel_noise(keys, ids)
    assert noise_close(noise, keys, ids) and noise.isfinite().all()
    plain = -torch.log(-torch.log(1 - torch.tensor(values)))
    assert not noise_close(plain, keys, ids)  # without log1p


def kept_by_rule(logits, temperature, top_k, top_p):
    """Temperature, top-k with ties, renormalise, top-p with ties: the probabilities that are left of one row [V], fp64,
    0 = cut; and how far from top_p the nearest sum is that decides."""
    scores = logits.double().numpy() / temperature
    mass = np.exp(scores - scores.max())
    if 0 < top_k < len(mass):
        mass[scores < np.sort(scores)[-top_k]] = 0
    mass /= mass.sum()
    margin = 1.0
    if top_p < 1:
        levels = np.unique(scores[mass > 0])[::-1]  # equal scores stay or go together
        sums = np.cumsum([mass[scores == level].sum() for level in levels])
        margin = np.abs(sums - top_p).min()
        mass[scores < levels[np.argmax(sums >= top_p)]] = 0
    return mass / mass.sum(), margin


def kept_by_kernel(logits, *filters):
    """What one row may become, read from the one place where it is written."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_module, "launch", lambda kernel, *rest, **more: (
            launch(kernel, *rest, **more), found.append(rest[2]) if kernel is choose_module._cut_kernel else None
        ))  # fmt: skip
        choose(logits, torch.zeros(1, dtype=torch.int64), *filters)
    order = int(found[0][0]) - 2**31
    least = np.array(order if order >= 0 else order ^ 0x7FFFFFFF, dtype=np.int32).view(np.float32)
    return logits[0] >= float(least)


def kept_by_reference(logits, *filters):
    return pick.log_probs(logits, *filters)[0] != -torch.inf


def some_logits(seed, vocab, steps=None):
    logits = normal(seed, 1, vocab) * 3
    return logits if steps is None else (logits * steps).round() / steps


FILTERS = [(1, 1.0), (7, 1.0), (0, 0.9), (0, 1e-9), (50, 0.8), (3, 0.999), (0, 0.99)]


@both(kept_by_kernel, kept_by_reference)
@pytest.mark.parametrize("vocab, steps", [(5, None), (300, 2), (4096, None), (4097, 1), (5000, 4)])
@pytest.mark.parametrize("top_k, top_p", FILTERS)
def test_what_filters_keep(run, vocab, steps, top_k, top_p):
    logits, filters = some_logits(vocab, vocab, steps), (0.7, top_k, top_p)
    mass, margin = kept_by_rule(logits[0], *filters)
    assert margin > 1e-6
    if 0 < top_k < vocab or top_p < 1:
        assert run(logits, *filters).tolist() == (mass > 0).tolist()


@both(kept_by_kernel, kept_by_reference)
@few(max_examples=10)
@given(st.integers(0, 2**32), st.integers(2, 300), st.sampled_from([1, 4]), st.sampled_from([0.3, 1.0, 2.5]),
       st.integers(0, 40), st.floats(0.01, 0.99))  # fmt: skip
def test_what_any_filters_keep(run, seed, vocab, steps, temperature, top_k, top_p):
    logits = some_logits(seed, vocab, steps)
    mass, margin = kept_by_rule(logits[0], temperature, top_k, top_p)
    assume(margin > 1e-5)
    assert run(logits, temperature, top_k, top_p).tolist() == (mass > 0).tolist()


def possible(run, logits, *filters):
    """The ids that can be chosen: each gets the greatest noise there is from a key of its own."""
    vocab = len(logits)
    keys = torch.tensor([key_for(0, number) for number in range(vocab)])
    chosen = run(logits.expand(vocab, -1).contiguous(), keys, *filters, vocab)[0]
    return torch.where(chosen == torch.arange(vocab))[0].tolist()


@both(choose, choose_reference)
def test_ties_are_kept_together(run):
    zeros = torch.tensor([1.0, -0.0, 0.0, -1.0, -0.0, -torch.inf])
    assert possible(run, zeros, 1.0, 2, 1.0) == [0, 1, 2, 4]  # zeros of both signs
    assert possible(run, zeros, 1.0, 5, 1.0) == [0, 1, 2, 3, 4]
    assert possible(run, torch.ones(6), 1.0, 2, 0.1) == list(range(6))
    known = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1]).log()
    assert possible(run, known, 1.0, 0, 0.5) == possible(run, known, 1.0, 0, 0.45) == [0, 1, 2]
    assert possible(run, known, 1.0, 3, 0.45) == [0]  # 0.4 of 0.8 is over 0.45


@both(choose, choose_reference)
def test_greedy_choice(run):
    logits = normal(0, 6, 9000)
    logits[0, [4095, 4096, 8192]] = 9.0
    logits[1, [8191, 8192, 8999]] = 9.0
    logits[2] = -5.0
    logits[3, 8999], logits[4, 0] = 9.0, 9.0
    logits[5, [100, 8000]] = torch.inf
    ids, broken = run(logits, None, 0.0, 0, 1.0, 9000)
    assert ids.dtype == torch.int64 and broken.dtype == torch.bool and not broken.any()
    assert ids.tolist() == [4095, 8191, 0, 8999, 0, 100]


@both(choose, choose_reference)
@pytest.mark.parametrize("sampled", [False, True])
def test_padding_is_never_chosen_and_nan_is_told(run, sampled):
    logits = normal(1, 5, 4200)
    logits[:, 4100:] = 99.0
    logits[0, 4150], logits[1, 4099], logits[2, 7], logits[3, 4098] = torch.nan, torch.nan, torch.nan, 50.0
    logits[2, :4100] = torch.nan
    ids, broken = run(logits, torch.arange(5) if sampled else None, 0.5, 0, 1.0, 4100)
    assert broken.tolist() == [False, True, True, False, False]
    assert ids.max() < 4100 and ids[3] == 4098
    if not sampled:
        assert ids.tolist() == logits[:, :4100].nan_to_num(-torch.inf).argmax(1).tolist()


def drawn(run, logits, keys, *filters):
    """How many rows were decided clearly, and whether each of them took the best of log p + noise, in fp64."""
    clear, right = 0, True
    ids = torch.arange(logits.shape[1])
    for row, chosen in enumerate(run(logits, keys, *filters, logits.shape[1])[0].tolist()):
        score = np.log(kept_by_rule(logits[row], *filters)[0]) + gumbel(keys[row], ids).double().numpy()
        second, best = np.sort(score)[-2:]
        if best - second > 1e-4:
            clear, right = clear + 1, right and chosen == score.argmax()
    return clear, right


def some_keys(seed, count):
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


@both(choose, choose_reference)
@pytest.mark.parametrize("vocab", [50, 8200])
@pytest.mark.parametrize("filters", [(0.7, 0, 1.0), (1.5, 40, 1.0), (1.0, 0, 0.9), (3.0, 300, 0.95)])
def test_sampled_choice(run, vocab, filters):
    assert drawn(run, normal(2, 6, vocab), some_keys(3, 6), *filters) == (6, True)


@both(choose, choose_reference)
@pytest.mark.parametrize("temperature", [1e-44, 1e-30, 1e-6, 1e-2, 1e4])
def test_noise_decides_among_large_equal_scores(run, temperature):
    """Scores of up to 1e45 leave neither noise nor order to fp32, if they are not taken from the largest."""
    logits = torch.full((16, 4200), 20.0)
    logits[:, ::2] = 19.0
    logits[:8] *= -1
    assert drawn(run, logits, some_keys(4, 16), temperature, 0, 1.0) == (16, True)


def test_a_row_is_chosen_alone_as_among_others():
    """Rows need not follow one another in memory."""
    logits, keys = some_logits(5, 3 * 4300).view(3, 4300)[:, :4200], some_keys(5, 3)
    for options in ((None,), (keys, 0.8), (keys, 0.8, 50), (keys, 0.8, 50, 0.9)):
        together = written(logits, *options)
        for row in range(3):
            one = slice(row, row + 1)
            alone = written(logits[one].contiguous(), *(o[one] if torch.is_tensor(o) else o for o in options))
            assert all(same_bits(a[one], b) for a, b in zip(together, alone, strict=True))


def written(*args):
    """The choice, and with noise all that the kernels leave behind, in the order of their arguments."""
    found = []
    with pytest.MonkeyPatch.context() as patch:

        def spy(kernel, grid, *args, **constants):
            found.extend(a for a in args if torch.is_tensor(a) and a is not args[0])
            launch(kernel, grid, *args, **constants)

        patch.setattr(choose_module, "launch", spy)
        chosen = choose(*args)
    return [*chosen, *found] if args[1] is not None else chosen


def test_a_wrong_key_and_a_wrong_filter_are_noticed():
    logits, keys, filters = normal(2, 48, 500), some_keys(3, 48), (1.0, 40, 0.9)

    def other_key(logits, keys, *rest):
        return choose_reference(logits, keys ^ 1 << 40, *rest)

    def no_top_p(logits, keys, temperature, top_k, top_p, vocab):
        return choose_reference(logits, keys, temperature, top_k, 1.0, vocab)

    assert drawn(choose_reference, logits, keys, *filters)[1]
    assert not drawn(other_key, logits, keys, *filters)[1]
    assert not drawn(no_top_p, logits, keys, *filters)[1]


def test_a_wrong_order_of_floats_is_noticed(monkeypatch):
    """Bits compared as they are put the negative numbers in reverse."""
    logits, filters = some_logits(300, 300, 2) - 20, (0.7, 7, 0.9)
    expected = (kept_by_rule(logits[0], *filters)[0] > 0).tolist()
    assert kept_by_kernel(logits, *filters).tolist() == expected
    monkeypatch.setattr(choose_module, "_ordered", _unordered)
    assert kept_by_kernel(logits, *filters).tolist() != expected


@triton.jit
def _unordered(logits):
    return logits.to(tl.int32, bitcast=True).to(tl.int64) + 2147483648
