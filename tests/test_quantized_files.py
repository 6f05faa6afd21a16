"""Checkpoints with quantized weights: rounded at load, written by fastea, GGUF blocks, AWQ and GPTQ folders."""

import json
import shutil

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from test_checkpoint import llama_tensors, write_gguf
from test_quantize import CONFIGS, foreign_weight

from conftest import dense, write_json
from fastea.checkpoint import Checkpoint
from fastea.config import FasteaError
from fastea.linear import PackedLinear
from fastea.loading import load
from fastea.quantize.__main__ import main as quantize
from fastea.quantize.forms import SCHEMES, Scheme, nearest
from fastea.quantize.imports import foreign, from_foreign
from fastea.quantized import Quantizer

PROMPT = "hello there"


def ids(checkpoint, **options):
    return load(checkpoint, head="none", drafter="none", **options).generate(PROMPT, max_new_tokens=12).ids


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_written_folder_answers_as_rounding_at_load_does(folder, tmp_path, quant, capsys):
    out = tmp_path / quant
    assert quantize([str(folder), str(out), "--scheme", quant]) == 0
    assert "9 weights as " + SCHEMES[quant].name in capsys.readouterr().err
    assert ids(out) == ids(folder, quant=quant) == ids(out, quant=quant)
    model = load(out, head=folder / "eagle", max_seq_len=64)
    assert model.info["quant"] == quant and model.info["dtype"] == "bfloat16"
    assert len(model.generate(PROMPT, max_new_tokens=12).ids) == 12
    stored = load_file(out / "model.safetensors")
    raw = json.loads((out / "config.json").read_text())
    whole = Checkpoint(folder).load(dense())
    for stem, entry in raw["fastea_quantization"]["weights"].items():
        scheme = SCHEMES["int8" if stem == "lm_head" else quant]
        made = nearest(whole.get_submodule(stem).weight, scheme.fitting(entry["inputs"]))
        assert torch.equal(stored[f"{stem}.codes"], made.codes) and torch.equal(stored[f"{stem}.scale"], made.scale)


def test_the_layers_are_few_bits_and_the_embedding_is_not(folder):
    model = load(folder, head="none", quant="int4").model
    for layer in model.layers:
        for product in (layer.qkv, layer.o, layer.gate_up, layer.down):
            assert isinstance(product, PackedLinear) and "nibbles" in product.names
    assert "codes" in model.lm_head.names and model.embed.weight.dtype == torch.bfloat16


def without_lm_head(folder, tmp_path):
    tied = tmp_path / "tied"
    shutil.copytree(folder, tied)
    tensors = load_file(tied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors")
    raw = json.loads((tied / "config.json").read_text())
    write_json(tied / "config.json", raw | {"tie_word_embeddings": True})
    return tied


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_tied_head_is_quantized_from_a_copy(folder, tmp_path, quant):
    """The embedding lookup stays in full precision; with a drafting head too."""
    tied = without_lm_head(folder, tmp_path)
    model = load(tied, head=tied / "eagle", quant=quant, exact=True, max_seq_len=64)
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.model.embed.weight, embedding.bfloat16())
    assert "codes" in model.model.lm_head.names
    assert model.generate(PROMPT, max_new_tokens=12).ids == model.beside(None).generate(PROMPT, max_new_tokens=12).ids
    out = tmp_path / "out"
    assert quantize([str(tied), str(out), "--scheme", quant]) == 0
    assert ids(out) == ids(tied, quant=quant)


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_of_rows_scores_as_single_rows_do(folder, quant, dtype):
    """The same prefix token by token and as one block of 2, 8, 60: logits within 1e-4 in fp32 and the same argmax;
    with packed weights and in bf16 the products are the same bit for bit, attention alone rounds."""
    generator = load(folder, head="none", quant=quant, dtype=dtype, max_seq_len=128)
    model, text = generator.model, torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(0))

    def logits(block):
        cache, rows = model.new_cache(1, 128), []
        for at in range(0, 60, block):
            part = text[:, at : at + block]
            positions = torch.arange(at, at + part.shape[1])[None]
            rows.append(model.logits(model(part, positions, torch.tensor([at]), None, cache)))
        return torch.cat(rows, 1)[0]

    with torch.inference_mode():
        single = logits(1)
        for block in (2, 8, 60):
            many = logits(block)
            if dtype == "float32":
                assert (many - single).abs().max() < 1e-4 * single.abs().max()
                assert torch.equal(many.argmax(-1), single.argmax(-1))
            else:
                assert (many - single).norm() < 0.02 * single.norm()


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_speculation_is_exact_over_quantized_weights(folder, quant):
    """The reference is the quantized model's own plain decoding."""
    model = load(folder, head=folder / "eagle", quant=quant, head_quant="int8", exact=True, max_seq_len=128)
    plain = model.beside(None)
    for seed, prompt in enumerate(("abc", "Hello, world", "zzzz")):
        options = {"max_new_tokens": 24, "temperature": 0.0 if seed == 0 else 0.9, "seed": seed, "ignore_eos": True}
        assert model.generate(prompt, **options).ids == plain.generate(prompt, **options).ids


def foreign_folder(folder, tmp_path, method, changes=()):
    """The tiny checkpoint with AWQ or GPTQ weights in place of its own, and these weights' values."""
    out = tmp_path / method
    shutil.copytree(folder, out)
    tensors, values = load_file(out / "model.safetensors"), {}
    for i, name in enumerate(sorted(n for n in tensors if "proj" in n)):
        outputs, inputs = tensors[name].shape
        stem = name.removesuffix(".weight")
        parts, _ = foreign_weight(method, i % 2 == 0, inputs, outputs, 32, seed=i)
        values[name] = from_foreign(parts, foreign(CONFIGS[method], ""), name).dequantized()
        del tensors[name]
        tensors |= {f"{stem}.{suffix}": t for suffix, t in parts.items()}
        if method == "gptq":
            tensors[f"{stem}.bias"] = torch.zeros(outputs)
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
    raw = json.loads((out / "config.json").read_text())
    write_json(out / "config.json", raw | {"quantization_config": CONFIGS[method]})
    return out, values


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_awq_and_gptq_folders_compute_with_their_own_values(folder, tmp_path, method):
    out, values = foreign_folder(folder, tmp_path, method)
    plain = tmp_path / "decoded"
    shutil.copytree(folder, plain)
    save_file(load_file(plain / "model.safetensors") | values, plain / "model.safetensors")
    assert ids(out, dtype="float32") == ids(plain, dtype="float32")
    model = load(out, head="none")
    assert model.info["quant"] == "int4" and model.info["dtype"] == "bfloat16"
    with pytest.raises(FasteaError, match=f"--quant int8.*by {method} to int4"):
        load(out, head="none", quant="int8")
    assert quantize([str(out), str(tmp_path / "again")]) == 2


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_gguf_blocks_of_the_asked_bits_stay_as_they_are(kind, tmp_path):
    """Only where the bits are those of --quant; else they are decoded and rounded."""
    path = write_gguf(tmp_path / "tiny.gguf", llama_tensors(), kind)
    quant, other = ("int8", "int4") if kind == Kind.Q8_0 else ("int4", "int8")
    quantizer = Quantizer(quant, torch.float32, "cpu")
    model = Checkpoint(path).load(quantizer)
    assert quantizer.made[f"{Scheme(8 if quant == 'int8' else 4, 32, kind == Kind.Q4_1).name} as stored"] >= 8
    whole = Checkpoint(path).load(dense())
    for i, layer in enumerate(model.layers):
        for name in ("qkv", "o", "gate_up", "down"):
            wanted = getattr(whole.layers[i], name).weight
            assert torch.equal(getattr(layer, name).subset(torch.arange(len(wanted))).weight, wanted)
    changed = Quantizer(other, torch.float32, "cpu")
    Checkpoint(path).load(changed)
    assert all("rounded" in what for what in changed.made if Scheme(8, 32).name not in what)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t, r: t.pop("layers.0.qkv.scale"), r"layers\.0\.qkv\.scale is missing"),
        (
            lambda t, r: t.update({"layers.0.o.scale": t["layers.0.o.scale"][:, :1].clone()}),
            r"layers\.0\.o\.scale is \(64, 1\)",
        ),
        (lambda t, r: r.update(version=2), "version 2 is not known"),
        (lambda t, r: r["weights"]["layers.1.down"].update(bits=3), r"layers\.1\.down: the scheme int3"),
        (lambda t, r: r["weights"]["layers.1.down"].update(group=48), "group 48"),
        (lambda t, r: r["weights"]["layers.1.down"].pop("inputs"), "'inputs'"),
        (lambda t, r: t.pop("layers.0.qkv.codes"), r"layers\.0\.qkv\.codes is missing"),
    ],
)
def test_a_broken_quantized_folder_is_one_line(folder, tmp_path, change, named):
    out = tmp_path / "out"
    assert quantize([str(folder), str(out)]) == 0
    tensors, raw = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    change(tensors, raw["fastea_quantization"])
    save_file(tensors, out / "model.safetensors")
    write_json(out / "config.json", raw)
    with pytest.raises(FasteaError, match=named) as error:
        load(out, head="none")
    assert "\n" not in str(error.value)


def test_gptq_writes_a_folder_and_wrong_input_is_one_line(folder, tmp_path, capsys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "some words to calibrate on"}\n{"prompt": "hi", "answer": "hello"}\n{"prompt": "hm"}\n')
    out = tmp_path / "out"
    command = [str(folder), str(out), "--method", "gptq", "--group", "64", "--symmetric", "--calibration", str(texts)]
    assert quantize(command) == 0
    assert len(ids(out)) == 12
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for wrong, named in (
        (["--calibration", str(empty)], "there must be one"),
        (["--calibration", str(tmp_path / "none.jsonl")], "No such file"),
        (["--group", "48"], "group 48"),
        ([], "there is a model already"),
    ):
        target = out if not wrong else tmp_path / "other"
        capsys.readouterr()
        assert quantize([str(folder), str(target), "--method", "gptq", *wrong]) == 2
        err = capsys.readouterr().err.strip().splitlines()[-1]
        assert named in err and "Traceback" not in err
        assert not (tmp_path / "other").exists()
    for quant in ("int3", "fp8"):
        with pytest.raises(FasteaError, match=f"--quant {quant}"):
            load(folder, quant=quant)


def test_a_record_that_is_no_object_is_one_line(folder, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    write_json(out / "config.json", json.loads((out / "config.json").read_text()) | {"fastea_quantization": [1]})
    with pytest.raises(FasteaError, match="version None is not known"):
        load(out, head="none")
