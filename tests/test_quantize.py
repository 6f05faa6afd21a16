"""Quantized weights: the canonical form, imports without requantization, products, GPTQ, folders."""

import gc
import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from fastea.config import FasteaError
from fastea.kernels import packed as layouts
from fastea.kernels.rows import find_row_sizes, product_rows
from fastea.linear import PackedLinear
from fastea.loading import load
from fastea.memory import tensor_bytes
from fastea.quantize.forms import SCHEMES, QuantizedWeight, Scheme, nearest, packed
from fastea.quantize.gptq import gptq
from fastea.quantize.imports import foreign, from_foreign, from_gguf_blocks

ALL = [Scheme(8), Scheme(8, 32), *(Scheme(4, g, m) for g in (32, 64, 128) for m in (False, True))]


def decoded(weight: QuantizedWeight) -> np.ndarray:
    """The definition, one number at a time, in float64."""
    rows, inputs = weight.shape
    scheme, out = weight.scheme, np.empty((rows, inputs))
    group = scheme.group or inputs
    codes, scale = weight.codes.numpy(), weight.scale.double().numpy()
    for n in range(rows):
        for k in range(inputs):
            if scheme.bits == 8:
                q = int(codes[n, k])
            else:
                q = int(codes[n, k // 2]) >> 4 * (k % 2) & 15
                q -= 0 if scheme.minimum else 8
            out[n, k] = scale[n, k // group] * q
            if scheme.minimum:
                out[n, k] += float(weight.minimum[n, k // group])
    return out


@pytest.mark.parametrize("scheme", ALL, ids=lambda s: s.name)
def test_nearest_is_within_half_a_step_and_decodes_by_the_definition(scheme):
    torch.manual_seed(0)
    weight = torch.randn(5, 256)
    weight[3] = 0
    made = nearest(weight, scheme).check("w")
    values = made.dequantized()
    np.testing.assert_allclose(values.numpy(), decoded(made), rtol=1e-6, atol=1e-7)
    step = made.scale.float().repeat_interleave(256 // made.scale.shape[1], 1)
    # the largest positive value of a symmetric int4 group lies half a step past its last code
    assert ((values - weight).abs() <= step * (0.51 if scheme.bits == 8 or scheme.minimum else 1.01)).all()
    assert (values[3] == 0).all()


def test_two_groups_by_hand():
    weight = torch.zeros(1, 64)
    weight[0, :4] = torch.tensor([-1.0, 2.0, 0.2, 0.9])  # minimum -1, scale 3 / 15 = 0.2 (in fp16)
    weight[0, 32:36] = torch.tensor([1.0, 4.0, 2.0, 3.0])  # minimum 0
    made = nearest(weight, Scheme(4, 32, True))
    assert made.unpacked()[0, :5].tolist() == [0, 15, 6, 10, 5]  # (x + 1) / 0.2; 9.5 rounds up, since fp16(0.2) < 0.2
    assert made.minimum.tolist() == [[-1.0, 0.0]]
    assert made.codes[0, 0] == 0 | 15 << 4 and made.codes[0, 1] == 6 | 10 << 4
    made = nearest(torch.tensor([[1.0, -127.0, 64.4]]), Scheme(8))
    assert made.codes.tolist() == [[1, -127, 64]] and made.scale.tolist() == [[1.0]]


@pytest.mark.parametrize(("inputs", "group", "padded"), [(576, 64, 576), (96, 32, 96), (1536, 128, 1536), (40, 32, 64)])
def test_a_group_that_does_not_divide_shrinks_or_is_padded(inputs, group, padded):
    torch.manual_seed(0)
    weight = torch.randn(4, inputs)
    made = nearest(weight, Scheme(4, 128, True)).check("w")
    assert made.scheme.group == group and made.codes.shape == (4, padded // 2) and made.shape == (4, inputs)
    assert made.dequantized().shape == weight.shape
    assert (made.dequantized() - weight).abs().max() < 0.3


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_gguf_blocks_keep_their_values(kind):
    rng = np.random.default_rng(0)
    data = gguf.quantize(rng.standard_normal((6, 128)).astype(np.float32) * 3, kind)
    made = from_gguf_blocks(data, kind.name).check("w")
    assert np.array_equal(made.dequantized().numpy(), gguf.dequantize(data, kind))
    rows = torch.tensor([4, 0])
    assert np.array_equal(made.dequantized(rows).numpy(), gguf.dequantize(data, kind)[[4, 0]])


def pack_words(values: np.ndarray, axis: int, order=range(8)) -> torch.Tensor:
    """Eight 4-bit values along an axis -> one int32; order[i] is the value in nibble i."""
    moved = np.moveaxis(values, axis, -1).reshape(*np.moveaxis(values, axis, -1).shape[:-1], -1, 8).astype(np.uint32)
    words = sum(moved[..., order[i]] << np.uint32(4 * i) for i in range(8)).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)))


def foreign_weight(method: str, symmetric: bool, inputs: int, outputs: int, group: int, seed: int = 0):
    """(tensors as AWQ or GPTQ writes them, the values [outputs, inputs])."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = np.full((inputs // group, outputs), 8) if symmetric else rng.integers(1, 16, (inputs // group, outputs))
    scales = (rng.random((inputs // group, outputs)) * 0.1 + 0.01).astype(np.float16)
    values = (codes - zeros.repeat(group, 0)) * scales.astype(np.float64).repeat(group, 0)
    if method == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # AWQ's interleaving
        tensors = {"qweight": pack_words(codes, 1, order), "qzeros": pack_words(zeros, 1, order)}
    else:
        tensors = {"qweight": pack_words(codes, 0), "qzeros": pack_words(zeros - 1, 1)}
        tensors["g_idx"] = torch.arange(inputs, dtype=torch.int32) // group
    return tensors | {"scales": torch.from_numpy(scales)}, values.T


CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_awq_and_gptq_weights_keep_their_values(method, symmetric):
    tensors, values = foreign_weight(method, symmetric, 64, 24, 32)
    made = from_foreign(tensors, foreign(CONFIGS[method], "c"), "w").check("w")
    assert made.scheme == Scheme(4, 32, not symmetric)
    np.testing.assert_allclose(made.dequantized().numpy(), values, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"bits": 3}, "3 bits"),
        ({"group_size": -1}, "groups of -1"),
        ({"desc_act": True}, "desc_act"),
        ({"checkpoint_format": "marlin"}, "marlin"),
    ],
)
def test_other_quantized_checkpoints_are_refused_by_name(change, named):
    with pytest.raises(FasteaError, match=named):
        foreign(CONFIGS["gptq"] | change, "config.json")
    with pytest.raises(FasteaError, match="gemv"):
        foreign(CONFIGS["awq"] | {"version": "gemv"}, "config.json")


def test_reordered_or_ill_shaped_foreign_weights_are_refused():
    form = foreign(CONFIGS["gptq"], "c")
    tensors, _ = foreign_weight("gptq", True, 64, 24, 32)
    with pytest.raises(FasteaError, match=r"w\.g_idx: reordered"):
        from_foreign(tensors | {"g_idx": tensors["g_idx"].flip(0)}, form, "w")
    with pytest.raises(FasteaError, match=r"w\.scales is missing"):
        from_foreign({k: v for k, v in tensors.items() if k != "scales"}, form, "w")
    with pytest.raises(FasteaError, match=r"scales \(2, 8\)"):
        from_foreign(tensors | {"scales": tensors["scales"][:, :8]}, form, "w")


@pytest.mark.parametrize("shape", [(64, 64), (40, 96), (320, 576)])
@pytest.mark.parametrize("scheme", ALL, ids=lambda s: s.name)
def test_products_are_those_of_the_decoded_weight(scheme, shape):
    """Within 5e-3 in bf16 whatever the scales lose, in fp32 to rounding; rows keep their bits for every row count."""
    torch.manual_seed(1)
    made = nearest(torch.randn(shape), scheme)
    x = torch.randn(64, shape[1])
    for dtype, bound in ((torch.bfloat16, 5e-3), (torch.float32, 1e-5)):
        rows = x.to(dtype)
        layer = PackedLinear(made, None, dtype, "cpu")
        wanted = rows.double() @ made.dequantized().double().T
        got = layer(rows)
        assert got.dtype == dtype and got.shape == (64, shape[0])
        assert (got.double() - wanted).norm() / wanted.norm() < bound
        assert torch.equal(layer(rows.view(2, 32, -1)).flatten(0, 1), got)
        if {"codes", "nibbles"} & set(layer.names):
            alone = torch.cat([layer(rows[i : i + 1]) for i in range(64)])
            for count in range(1, 65):
                assert torch.equal(layer(rows[:count]), alone[:count])


@pytest.mark.parametrize(("inputs", "offset"), [(24, 0), (40, 0), (64, 8), (64, 4)])
def test_int8_rows_may_begin_anywhere(inputs, offset):
    """Views into a file, and rows that are no multiple of 16 bytes: PyTorch's operator crashes on them."""
    made = nearest(torch.randn(32, inputs), Scheme(8))
    file = torch.zeros(made.codes.numel() + 64, dtype=torch.int8)
    codes = file[-file.data_ptr() % 64 + offset :][: made.codes.numel()].view_as(made.codes).copy_(made.codes)
    layer = PackedLinear(QuantizedWeight(made.scheme, inputs, codes, made.scale), None, torch.bfloat16, "cpu")
    for count in (1, 2, 4, 9):
        x = torch.randn(count, inputs).bfloat16()
        wanted = x.double() @ made.dequantized().double().T
        assert (layer(x).double() - wanted).norm() / wanted.norm() < 5e-3


def test_what_bf16_scales_lose():
    """A packed operator reads scales in the activation's dtype: fp16 scales are off by 2^-9 of themselves at most."""
    made = nearest(torch.randn(64, 256), Scheme(4, 32, False))
    both = layouts.layout(made, torch.bfloat16, "cpu")["scale_base"]
    loss = (both[..., 0].T[:64].float() / made.scale.float() - 1).abs()
    assert 0 < loss.max() <= 2**-8 and loss.mean() < 2**-9


def test_a_bias_is_added():
    made = nearest(torch.randn(64, 64), Scheme(8))
    bias = torch.nn.Parameter(torch.randn(64).bfloat16(), requires_grad=False)
    x = torch.randn(3, 64).bfloat16()
    with_bias, without = (PackedLinear(made, b, torch.bfloat16, "cpu")(x) for b in (bias, None))
    assert torch.equal(with_bias, without + bias)


def moments(rows: torch.Tensor) -> torch.Tensor:
    return rows.double().T @ rows.double()


@pytest.mark.parametrize("scheme", [Scheme(4, 128), Scheme(4, 32, True), Scheme(8)], ids=lambda s: s.name)
def test_gptq_beats_rounding_where_inputs_are_correlated(scheme):
    torch.manual_seed(2)
    weight, mix = torch.randn(48, 192), torch.randn(40, 192)
    rows, fresh = (torch.randn(n, 40) @ mix + 0.3 * torch.randn(n, 192) for n in (2000, 500))
    better, plain = gptq(weight, moments(rows), scheme).check("w"), nearest(weight, scheme)
    assert better.scheme == plain.scheme and better.codes.shape == plain.codes.shape
    errors = [
        ((fresh @ (w.dequantized() - weight).T).norm() / (fresh @ weight.T).norm()).item() for w in (better, plain)
    ]
    assert errors[0] < 0.6 * errors[1]


def test_gptq_with_uncorrelated_inputs_is_rounding():
    """Nothing can be made up for: the very codes of round to nearest; inputs never seen are rounded too."""
    torch.manual_seed(3)
    weight, diagonal = torch.randn(8, 160), torch.rand(160).double() + 0.1
    diagonal[7] = 0
    a, b = gptq(weight, diagonal.diag(), Scheme(4, 32, True), damping=0.0), nearest(weight, Scheme(4, 32, True))
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale) and torch.equal(a.minimum, b.minimum)


def test_a_broken_weight_is_named():
    made = nearest(torch.randn(4, 64), Scheme(4, 32, True))
    for change, named in (
        ({"scale": made.scale[:, :1]}, r"w\.scale is \(4, 1\), int4 group 32 with minimum asks for \(4, 2\)"),
        ({"codes": made.codes.int()}, r"w\.codes is torch\.int32"),
        ({"minimum": None}, r"w\.minimum is missing"),
        ({"scale": made.scale * torch.nan}, r"w\.scale holds numbers that are not finite"),
    ):
        with pytest.raises(FasteaError, match=named):
            QuantizedWeight(**(vars(made) | change)).check("w")
    for wrong in ((4, 48, False), (4, 0, False), (8, 64, False), (8, 0, True), (2, 32, False)):
        with pytest.raises(FasteaError, match="unknown"):
            Scheme(*wrong)


def test_nibbles_are_packed_low_first():
    assert packed(torch.tensor([[1, 2, 15, 0]])).tolist() == [[0x21, 0x0F]]
    assert json.dumps(Scheme(8, 32).name) == '"int8 group 32"'


def rows_keep_their_bits(layer, x):
    """Each row of x alone, and with those before it."""
    sizes = find_row_sizes([layer.probe()])
    alone = torch.cat([product_rows(layer.product, row[None], sizes) for row in x])
    for count in range(1, len(x) + 1):
        assert torch.equal(product_rows(layer.product, x[:count], sizes), alone[:count])


@pytest.mark.skipif(not layouts.fast_half(), reason="this CPU multiplies bf16, or has no packed fp16 weights")
@pytest.mark.parametrize("shape", [(64, 64), (50, 36), (320, 576)])
def test_fp16_weights_under_fp32_activations(shape):
    """The product of the weight rounded to fp16, in fp32; the exact path's rows; its bytes; freed with the layer."""
    torch.manual_seed(4)
    weight, x = torch.randn(shape), torch.randn(2, 32, shape[1])
    weight[0, 0] = 3.0e-6  # a subnormal of fp16
    layer = PackedLinear(weight, None, torch.float32, "cpu", half=True)
    rounded = weight.half().double()
    torch.testing.assert_close(layer(x).double(), x.double() @ rounded.T, atol=1e-4, rtol=1e-4)
    assert layer(x).dtype == torch.float32 and layer(x.bfloat16()).dtype == torch.bfloat16
    ids = torch.tensor([3, shape[0] - 1, 0])
    assert torch.equal(layer.subset(ids).weight, rounded[ids].float())
    rows_keep_their_bits(layer, x[0])
    assert tensor_bytes(layer) >= 2 * weight.numel()
    key = int(layer.fp16)
    assert key in layouts._held_weights
    del layer
    gc.collect()
    assert key not in layouts._held_weights


@pytest.mark.skipif(not layouts.fast_bf16(), reason="this CPU converts bf16 before it multiplies")
@pytest.mark.parametrize("shape", [(96, 64), (5, 7), (200, 48)])
def test_bf16_weights_in_onednns_order(shape):
    """Products are the matrix's, rows keep their bits, the weight comes back bit for bit and goes with its layer."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).bfloat16()
    x = torch.randn(1, 40, shape[1], generator=generator).bfloat16()
    layer = PackedLinear(weight, None, torch.bfloat16, "cpu")
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-2, rtol=2**-8)
    ids = torch.tensor([3, shape[0] - 1, 0])
    assert torch.equal(layer.subset(ids).weight, weight[ids])
    rows_keep_their_bits(layer, x[0])
    assert tensor_bytes(layer) >= 2 * weight.numel()
    key = int(layer.onednn)
    assert key in layouts._held_weights
    del layer
    gc.collect()
    assert key not in layouts._held_weights


@pytest.mark.skipif(not layouts.packs_half() or layouts.has_amx(), reason="the LM head runs in bf16 here")
def test_logits_of_a_16_bit_model_keep_their_digits(folder):
    """bf16 would round a logit of 16 to 0.125, so that many would tie."""
    exact, model = (load(folder, head="none", dtype=dtype).model for dtype in ("float32", "bfloat16"))
    x = torch.randn(1, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = model.logits(x)
    assert (logits != logits.bfloat16()).any()
    torch.testing.assert_close(logits, exact.logits(x.float()), atol=2e-2, rtol=2**-9)


@pytest.mark.skipif(not layouts.fast_half(), reason="this CPU multiplies bf16, or has no packed fp16 weights")
def test_a_weight_beyond_fp16_keeps_its_range():
    """bf16 reaches 3e38, fp16 65504: such a weight stays a matrix of its own type, or fp32."""
    weight = torch.ones(16, 16)
    weight[2, 3] = 1e5
    for dtype, half, name in ((torch.float32, True, "blocks"), (torch.bfloat16, False, "matrix")):
        layer = PackedLinear(weight, None, dtype, "cpu", half)
        assert layer.names == [name]
        assert float(layer(torch.ones(1, 16, dtype=dtype))[0, 2]) == pytest.approx(1e5 + 15, rel=5e-3)


@pytest.mark.parametrize("shape", [(64, 64), (50, 36), (320, 576)])
def test_blocks_of_a_float_weight(shape):
    """The same product, with and without bias; rows keep their bits for every count from four on."""
    torch.manual_seed(4)
    weight, bias, x = torch.randn(shape), torch.nn.Parameter(torch.randn(shape[0])), torch.randn(2, 32, shape[1])
    layer = PackedLinear(weight, bias, torch.float32, "cpu")
    assert layer.names == ["blocks"]
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.double().T + bias, atol=1e-4, rtol=1e-4)
    for count in range(1, 6):
        few = x[0, :count]
        torch.testing.assert_close(layer(few).double(), few.double() @ weight.double().T + bias, atol=1e-4, rtol=1e-4)
    ids = torch.tensor([3, shape[0] - 1, 17])
    assert torch.equal(layer.subset(ids).weight, weight[ids])
    rows_keep_their_bits(layer, x[0])


@pytest.mark.parametrize(
    ("scheme", "dtype"), [(Scheme(8), torch.bfloat16), (SCHEMES["int4"], torch.bfloat16), (None, torch.float32)]
)
def test_rows_may_be_parts_of_wider_rows(scheme, dtype):
    """An EAGLE-3 head and the LM head read parts of the target's features."""
    torch.manual_seed(5)
    weight = torch.randn(80, 64)
    layer = PackedLinear(nearest(weight, scheme) if scheme else weight, None, dtype, "cpu")
    wide = torch.randn(2, 5, 200).to(dtype)
    for part in (wide[..., :64], wide[..., 100:164]):
        assert torch.equal(layer(part), layer(part.contiguous()))
