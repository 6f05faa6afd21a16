"""Products in Triton's interpreter, and their plain definitions: against arithmetic in fp64, a row alone against the
same row among others bit by bit, and each comparison against a fault put in."""

import functools
import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime import interpreter

from fastea.kernels import gemm
from fastea.quantize.forms import QuantizedWeight, Scheme, nearest
from interpreted import HALVES, few, normal, reversed_dot, same_bits, uneven

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # of numpy, in the interpreter


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
