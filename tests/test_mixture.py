"""Mixtral's layers: fixed shapes whatever is routed where, quantized experts, and speculation over them. Logits against
transformers are in test_llama."""

import pytest
import torch
from test_exact import build, exact_sizes

from conftest import RAW, randomize, tiny_config, tiny_head, tiny_target
from fastea.config import FasteaError, ModelConfig, config_from_hf
from fastea.drafters.eagle import EagleDrafter
from fastea.llama import Llama, MixtureLayer
from fastea.quantized import Quantizer
from fastea.tree import parse_tree


def mixture(seed=0, **changes) -> Llama:
    target = tiny_target(seed, experts=4, **changes)
    target.set_context(256)
    return target


def placed(target, quant):
    """The same weights as a loaded checkpoint has them."""
    with torch.device("meta"):
        model = Llama(target.config)
    quantizer = Quantizer(quant, torch.float32, "cpu")
    for name, p in target.named_parameters():
        quantizer.place(model, name, p.detach())
    model.set_context(256)
    return model.eval(), quantizer


@torch.no_grad()
def test_two_experts_by_hand():
    """A row gets its two best experts, weighted by the softmax over these two alone."""
    layer = MixtureLayer(tiny_config(experts=4))
    randomize(layer, 1)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    ours = layer.mlp(x, None)
    for row, wanted in zip(x, ours, strict=True):
        scores = layer.router.weight @ row
        best = scores.argsort(descending=True)[:2]
        total = torch.zeros(64)
        for share, i in zip(torch.softmax(scores[best], 0), best.tolist(), strict=True):
            gate, up = (layer.experts[i].gate_up.weight @ row).chunk(2)
            total += share * (layer.experts[i].down.weight @ (gate * torch.sigmoid(gate) * up))
        torch.testing.assert_close(wanted, total, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_expert_that_was_not_chosen_cannot_harm():
    layer = MixtureLayer(tiny_config(experts=4))
    randomize(layer, 1)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    shares = layer.shares(layer.router(x))
    assert ((shares > 0).sum(-1) == 2).all()
    unused = int((shares[0] == 0).nonzero()[0])
    before = layer.mlp(x[:1], None)
    layer.experts[unused].down.weight.fill_(torch.inf)
    assert torch.equal(layer.mlp(x[:1], None), before)


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_speculation_over_quantized_experts(quant):
    """The router stays in full precision; the text is that of plain decoding with the same weights."""
    target, quantizer = placed(mixture(), quant)
    layer = target.layers[0]
    assert layer.router.probe()[1].dtype == torch.float32 and quantizer.report().count("router") == 0
    if quant:
        assert quantizer.made.total() == 2 * (2 + 2 * 4) + 1  # qkv, o, four experts' two, in two layers; the LM head
    head = tiny_head(target)
    head.bind(target, 256)
    sizes = exact_sizes(target)
    plain, drafted = build(target, None, sizes), build(target, EagleDrafter(head, parse_tree("eagle1")), sizes)
    for settings in ({}, {"temperature": 0.9, "seed": 3}):
        wanted = plain.generate([5, 6, 7], max_new_tokens=40, **settings)
        assert drafted.generate([5, 6, 7], max_new_tokens=40, **settings).ids == wanted.ids


def test_calibrated():
    """GPTQ goes over every expert; a decoded weight stands where each was."""
    from fastea.quantize.calibrate import products, quantize_layers
    from fastea.quantize.forms import SCHEMES

    target = mixture()
    names = products(target.layers[0])
    assert names == ["qkv", "o", *(f"experts.{i}.{n}" for i in range(4) for n in ("gate_up", "down"))]
    before = target.layers[0].experts[2].down.weight.clone()
    done = quantize_layers(target, [list(range(60))], SCHEMES["int4"])
    assert set(done) == {f"layers.{i}.{name}" for i in range(2) for name in names}
    after = target.layers[0].experts[2].down.weight
    assert torch.equal(after, done["layers.0.experts.2.down"].dequantized()) and not torch.equal(after, before)


def test_bad_counts_are_refused():
    raw = vars(tiny_config())
    for count, some in ((2, 3), (4, 0)):
        with pytest.raises(ValueError, match="experts a token"):
            ModelConfig(**(raw | {"experts": count, "experts_per_token": some}))
    with pytest.raises(FasteaError, match="num_local_experts"):
        config_from_hf(RAW | {"architectures": ["MixtralForCausalLM"]}, "here")
