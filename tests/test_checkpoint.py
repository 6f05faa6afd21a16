"""Files -> weights: folders and shards, .bin, GGUF, tied heads, and one clear line for everything that is broken."""

import math
import pickle
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from conftest import RAW, dense, randomize, tiny_config, tiny_head, tiny_target, write_json
from fastea.checkpoint import Checkpoint
from fastea.config import FasteaError, config_from_gguf, config_from_hf, rope_table
from fastea.head_files import load_head, save_head
from fastea.loading import load

LAYER_SHAPES = {
    "input_layernorm": (64,),
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "post_attention_layernorm": (64,),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 134106624\n"
)


def llama_tensors() -> dict[str, torch.Tensor]:
    """Random weights of RAW under Hugging Face names."""
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (64, 64), "model.norm": (64,), "lm_head": (64, 64)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def write_folder(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config) -> Path:
    """config.json and, if tensors are given, model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", RAW | config)
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], kind: str = "safetensors") -> list[Path]:
    """Three shards and their index."""
    names, stem = list(tensors), "model" if kind == "safetensors" else "pytorch_model"
    files = [folder / f"{stem}-0000{i + 1}-of-00003.{kind}" for i in range(3)]
    for i, file in enumerate(files):
        part = {name: tensors[name] for name in names[i::3]}
        if kind == "bin":
            torch.save(part, file)
        else:
            save_file(part, file)
    write_json(
        folder / f"{stem}.{kind}.index.json",
        {"metadata": {}, "weight_map": {name: files[i % 3].name for i, name in enumerate(names)}},
    )
    return files


def read(path, dtype=torch.float32):
    return Checkpoint(path).load(dense(dtype))


def check_weights(model, tensors: dict[str, torch.Tensor]) -> None:
    """Every tensor sits, bit for bit, where it belongs."""
    assert torch.equal(model.embed.weight, tensors["model.embed_tokens.weight"])
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])
    assert torch.equal(model.lm_head.weight, tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]))
    for i, layer in enumerate(model.layers):
        q, k, v = layer.qkv.weight.split((64, 32, 32))
        gate, up = layer.gate_up.weight.chunk(2)
        parts = (layer.attn_norm.weight, q, k, v, layer.o.weight, layer.mlp_norm.weight, gate, up, layer.down.weight)
        for name, ours in zip(LAYER_SHAPES, parts, strict=True):
            assert torch.equal(ours, tensors[f"model.layers.{i}.{name}.weight"]), name


def refusal(run, *args, **settings) -> str:
    """The message of the FasteaError that a call raises: one line."""
    with pytest.raises(FasteaError) as caught:
        run(*args, **settings)
    message = str(caught.value)
    assert message and len(message.splitlines()) == 1, message
    return message


# Folders


def test_single_file_and_shards_load(tmp_path):
    tensors = llama_tensors()
    check_weights(read(write_folder(tmp_path / "one", tensors)), tensors)
    write_shards(write_folder(tmp_path / "three"), tensors)
    check_weights(read(tmp_path / "three"), tensors)


def test_index_without_its_shard(tmp_path):
    tensors = llama_tensors()
    absent = write_shards(write_folder(tmp_path), tensors)[1]
    absent.unlink()
    message = refusal(read, tmp_path)
    assert absent.name in message and "index.json" in message and "00001" not in message
    torch.save(tensors, tmp_path / "pytorch_model.bin")  # a complete set of the other kind
    check_weights(read(tmp_path), tensors)
    other = {name: t + 1 for name, t in tensors.items()}
    save_file(other, tmp_path / "model.safetensors")
    check_weights(read(tmp_path), other)


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 5}}, []])
def test_useless_index(tmp_path, content):
    write_json(write_folder(tmp_path) / "model.safetensors.index.json", content)
    assert "index.json" in refusal(read, tmp_path)


def test_bin_only(tmp_path):
    tensors = llama_tensors()
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}  # as old files have
    torch.save(tensors | buffers, write_folder(tmp_path / "new") / "pytorch_model.bin")
    check_weights(read(tmp_path / "new"), tensors)
    old = write_folder(tmp_path / "old") / "pytorch_model.bin"
    torch.save(tensors, old, _use_new_zipfile_serialization=False)
    check_weights(read(tmp_path / "old"), tensors)
    write_shards(write_folder(tmp_path / "shards"), tensors, "bin")
    check_weights(read(tmp_path / "shards"), tensors)


def test_safetensors_before_bin(tmp_path):
    tensors = llama_tensors()
    folder = write_folder(tmp_path, tensors)
    torch.save({name: t + 1 for name, t in tensors.items()}, folder / "pytorch_model.bin")
    check_weights(read(folder), tensors)


def test_tokenizer_is_looked_for_before_the_weights_are_read(tmp_path):
    (write_folder(tmp_path) / "model.safetensors").write_bytes(POINTER)
    assert "no tokenizer" in refusal(load, tmp_path)


def test_odd_paths_and_the_folder_name_means_nothing(tmp_path):
    tensors = llama_tensors()
    folder = write_folder(tmp_path / "Llama-2-70B-chat int4, größer 模型", tensors)
    check_weights(read(f"{folder}/"), tensors)
    assert Checkpoint(folder).config == config_from_hf(RAW, "")


def test_nothing_to_read(tmp_path):
    assert str(tmp_path / "none") in refusal(read, tmp_path / "none")
    assert "config.json: no such file" in refusal(read, tmp_path)
    write_folder(tmp_path)
    assert "no weights found" in refusal(read, tmp_path)
    for content in ("", "{", "[]", POINTER.decode()):
        (tmp_path / "config.json").write_text(content)
        assert str(tmp_path / "config.json") in refusal(read, tmp_path)


def test_folder_saved_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**RAW))
    randomize(model, seed=3)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check_weights(read(tmp_path), model.state_dict())


# Every tensor accounted for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_model_without_lm_head_has_one_storage(tmp_path, dtype):
    tensors = llama_tensors()
    del tensors["lm_head.weight"]
    model = read(write_folder(tmp_path, tensors, tie_word_embeddings=True), dtype)
    assert model.lm_head.weight.data_ptr() == model.embed.weight.data_ptr()
    check_weights(model, {name: t.to(dtype) for name, t in tensors.items()})


def test_untied_model_keeps_two_storages(tmp_path):
    model = read(write_folder(tmp_path, llama_tensors()))
    assert model.lm_head.weight.data_ptr() != model.embed.weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
        (lambda t: t.pop("model.embed_tokens.weight"), "model.embed_tokens"),
        (lambda t: t.pop(K), "layers.1.qkv.weight (self_attn.k_proj)"),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight"), "(mlp.up_proj)"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}), "model.layers.2.mlp.up_proj"),
        (lambda t: t.update({Q.replace("weight", "bias"): torch.ones(64)}), "q_proj.bias"),
        (lambda t: t.update({"transformer.wte.weight": torch.ones(2)}), "transformer.wte.weight"),
        (lambda t: t.update({Q: torch.ones(64, 48)}), f"{Q} is (64, 48)"),
        (lambda t: t.update({K: torch.ones(64, 64)}), f"{K} is (64, 64), where the configuration asks for (32, 64)"),
        (lambda t: t.update({"model.norm.weight": torch.ones(48)}), "model.norm.weight is (48,)"),
        (lambda t: t.update({"lm_head.weight": torch.ones(65, 64)}), "lm_head.weight is (65, 64)"),
        (  # the fused whole would have the right shape
            lambda t: t.update(
                {
                    f"model.layers.0.mlp.{n}_proj.weight": torch.ones(r, 64)
                    for n, r in zip(("gate", "up"), (64, 128), strict=True)
                }
            ),
            "gate_proj.weight is (64, 64)",
        ),
    ],
)
def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path, change, named):
    tensors = llama_tensors()
    change(tensors)
    message = refusal(read, write_folder(tmp_path, tensors))
    assert named in message and str(tmp_path) in message


# Broken files

BROKEN = {
    "pointer": (lambda data: POINTER, "git lfs pull"),
    "cut": (lambda data: data[: len(data) * 6 // 10], "truncated"),
    "empty": (lambda data: b"", "is empty"),
    "random": (lambda data: np.random.default_rng(0).bytes(4096), "not a"),
    "2^63": (lambda data: (2**63).to_bytes(8, "little") + data[8:], "not a"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_safetensors(tmp_path, how):
    breaks, expected = BROKEN[how]
    file = write_folder(tmp_path, llama_tensors()) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(breaks(whole))
    checkpoint = Checkpoint(tmp_path)
    tracemalloc.start()
    message = refusal(checkpoint.load, dense())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(file) in message and expected in message
    assert peak < 5_000_000
    if how == "cut":
        assert f"expected {len(whole)} bytes, have {file.stat().st_size}" in message


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[]",
        b"{" * 50,
        b"[" * 5000,
        b'{"a":5}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,"x"]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e400]}}',
        b'{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}}',
    ],
)
def test_nonsense_in_a_safetensors_header(tmp_path, header):
    file = write_folder(tmp_path) / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert str(tmp_path) in refusal(read, tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_broken_bin(tmp_path, zipped):
    file = write_folder(tmp_path) / "pytorch_model.bin"
    torch.save(llama_tensors(), file, _use_new_zipfile_serialization=zipped)
    whole = file.read_bytes()
    cuts = [whole[:n] for n in (1, 2, 3, 20, 200, 2000, len(whole) - 1)]
    for data in [breaks(whole) for breaks, _ in BROKEN.values()] + cuts:
        file.write_bytes(data)
        assert str(file) in refusal(read, tmp_path)


@pytest.mark.parametrize("state", [[torch.ones(2)], {"a": 1}, {5: torch.ones(2)}])
def test_bin_that_holds_no_named_tensors(tmp_path, state):
    torch.save(state, write_folder(tmp_path) / "pytorch_model.bin")
    assert "a dictionary of tensors is expected" in refusal(read, tmp_path)


@pytest.mark.parametrize("how", ["pointer", "empty", "random"])
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_broken_tokenizer(tmp_path, name, how):
    file = write_folder(tmp_path, llama_tensors()) / name
    file.write_bytes(BROKEN[how][0](b""))
    message = refusal(load, tmp_path)
    assert str(file) in message and (how != "pointer" or "git lfs pull" in message)


@pytest.mark.parametrize("how", BROKEN)
def test_broken_head(tmp_path, how):
    breaks, expected = BROKEN[how]
    target = tiny_target()
    save_head(tiny_head(target), tmp_path, {})
    file = tmp_path / "model.safetensors"
    file.write_bytes(breaks(file.read_bytes()))
    message = refusal(load_head, tmp_path, target, dense())
    assert str(file) in message and expected in message


# Pickles


class Opens:
    """Unpickled, it creates a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_bin_is_never_run(tmp_path, zipped):
    """Case 19: neither a model's nor a head's."""
    marker = tmp_path / "marker"
    file = write_folder(tmp_path) / "pytorch_model.bin"
    evil = llama_tensors() | {"x": Opens(marker)}
    torch.save(evil, file, _use_new_zipfile_serialization=zipped)
    torch.load(file, weights_only=False)["x"].close()
    assert marker.exists()  # the file does what it is made for
    marker.unlink()
    target = tiny_target()
    for message in (refusal(read, tmp_path), refusal(load_head, tmp_path, target, dense())):
        assert str(file) in message and "refused" in message
    file.write_bytes(pickle.dumps(evil, protocol=2))  # no torch file at all
    assert str(file) in refusal(read, tmp_path)
    assert not marker.exists()


# GGUF

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
META = {
    "context_length": 512,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "vocab_size": 64,
}


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return GGUF_NAMES[name.removesuffix(".weight")] + ".weight"
    _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"


def write_gguf(path: Path, tensors: dict[str, torch.Tensor], kind: Kind = Kind.F32, blocks=None, **meta) -> Path:
    """A GGUF file as llama.cpp's converter makes it: q and k with rotary pairs side by side, norms in F32.

    blocks: ready quantized rows by Hugging Face name, (kind, bytes). meta: integers under "llama.".
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (META | meta).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, tensor in tensors.items():
        if blocks and name in blocks:
            writer.add_tensor(gguf_name(name), blocks[name][1], raw_dtype=blocks[name][0])
            continue
        data = tensor.numpy()
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                rows, width = data.shape
                data = data.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)
        stored = Kind.F32 if data.ndim == 1 else kind
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_weights(tmp_path, kind):
    """Quantization works row by row, so the rows of q and k may be put in order before or after it."""
    tensors, stored = llama_tensors(), Kind[kind]
    expected = {
        name: torch.from_numpy(gguf.dequantize(gguf.quants.quantize(t.numpy(), stored), stored).copy()).view(t.shape)
        if t.ndim == 2
        else t
        for name, t in tensors.items()
    }
    check_weights(read(write_gguf(tmp_path / "größe 1.gguf", tensors, stored)), expected)


@pytest.mark.parametrize(
    ("kind", "scales"),
    [("Q4_K", slice(0, 4)), ("Q5_K", slice(0, 4)), ("Q6_K", slice(208, 210)), ("Q2_K", slice(80, 84))],
)
def test_gguf_k_quants(tmp_path, kind, scales):
    """The library cannot quantize these: random blocks with finite 16-bit scales."""
    size = gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (64, size), dtype=np.uint8)  # 64 rows of one block of 256 weights
    data[:, scales] = rng.uniform(0.01, 0.1, (64, (scales.stop - scales.start) // 2)).astype(np.float16).view(np.uint8)
    tensors, down = llama_tensors(), "model.layers.1.mlp.down_proj.weight"
    for i in range(2):
        for name, shape in (("gate", (256, 64)), ("up", (256, 64)), ("down", (64, 256))):
            tensors[f"model.layers.{i}.mlp.{name}_proj.weight"] = torch.randn(shape)
    path = write_gguf(tmp_path / "k.gguf", tensors, blocks={down: (Kind[kind], data)}, feed_forward_length=256)
    tensors[down] = torch.from_numpy(gguf.dequantize(data, Kind[kind]))
    assert tensors[down].isfinite().all() and tensors[down].std() > 0
    check_weights(read(path), tensors)


def test_gguf_without_output_is_tied(tmp_path):
    tensors = llama_tensors()
    del tensors["lm_head.weight"]
    model = read(write_gguf(tmp_path / "tied.gguf", tensors))
    assert model.lm_head.weight.data_ptr() == model.embed.weight.data_ptr()
    check_weights(model, tensors)


def test_gguf_frequency_factors_are_llama3_scaling(tmp_path, monkeypatch):
    """llama.cpp's converter writes LLaMA-3.1's scaling as one divisor per frequency."""
    turns = [64 / (2 * math.pi) * 10000 ** (-i / 8) for i in range(8)]
    smooth = [min(max((t - 1) / 3, 0), 1) for t in turns]
    factors = torch.tensor([1 / ((1 - s) / 8 + s) for s in smooth])
    monkeypatch.setitem(GGUF_NAMES, "rope_freqs", "rope_freqs")
    model = read(write_gguf(tmp_path / "l3.gguf", llama_tensors() | {"rope_freqs.weight": factors}))
    model.set_context(64)
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = config_from_hf(RAW | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **scaling}}, "")
    torch.testing.assert_close(model.rope, rope_table(config, len(model.rope)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("how", BROKEN)
def test_broken_gguf(tmp_path, how):
    path = write_gguf(tmp_path / "b.gguf", llama_tensors())
    whole = path.read_bytes()
    path.write_bytes(BROKEN[how][0](whole))
    assert str(path) in refusal(read, path)


def test_gguf_cut_anywhere(tmp_path):
    path = write_gguf(tmp_path / "c.gguf", llama_tensors())
    whole = path.read_bytes()
    for size in (*range(1, 4000, 97), len(whole) - 1):
        path.write_bytes(whole[:size])
        assert str(path) in refusal(Checkpoint, path)


def test_gguf_tensors_are_accounted_for(tmp_path):
    tensors = llama_tensors()
    del tensors[K]
    assert "self_attn.k_proj" in refusal(read, write_gguf(tmp_path / "1.gguf", tensors))
    wide = llama_tensors() | {Q: torch.randn(48, 64)}
    assert "blk.0.attn_q.weight is (48, 64)" in refusal(read, write_gguf(tmp_path / "2.gguf", wide))
    path = write_gguf(
        tmp_path / "3.gguf", llama_tensors(), blocks={"lm_head.weight": (Kind.I8, np.ones((64, 64), np.int8))}
    )
    assert "output.weight has the type I8" in refusal(read, path)


# What configurations may say


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": "linear"}, "not what it should be"),
        ({"num_hidden_layers": "two"}, "not what it should be"),
        ({"hidden_size": None}, "not what it should be"),
        ({"num_attention_heads": 0}, "not what it should be"),
    ],
)
def test_refused_by_name(tmp_path, change, named):
    message = refusal(Checkpoint, write_folder(tmp_path, **change))
    assert named in message and str(tmp_path / "config.json") in message


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_missing_key_is_named(key):
    assert f"x: the key '{key}' is missing" in refusal(config_from_hf, {k: v for k, v in RAW.items() if k != key}, "x")


def test_config_values():
    assert config_from_hf(RAW, "") == tiny_config()
    more = {
        "eos_token_id": [3, 4],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "mlp_bias": None,
    }
    read_config = config_from_hf(RAW | more, "")
    assert (read_config.eos_ids, read_config.dtype) == ((3, 4), torch.bfloat16)
    both = {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2}}
    config = config_from_hf(RAW | both, "")
    assert config.rope_theta == 5e5 and config.rope_scaling.kind == "linear"


@pytest.mark.parametrize(("kind", "limit"), [("default", 512), ("llama3", 512), ("linear", 2048), ("dynamic", 2048)])
def test_context_limit(kind, limit):
    """Linear and dynamic scaling start from the trained context that the file states and stretch it."""
    assert config_from_hf(RAW | {"rope_scaling": {"type": kind, "factor": 4.0}}, "").max_position == limit


def test_gguf_metadata():
    meta = {f"llama.{key}": value for key, value in META.items()}
    meta |= {"general.architecture": "llama", "llama.attention.layer_norm_rms_epsilon": 1e-5}
    assert config_from_gguf(meta, "") == tiny_config()
    for factor in ("scaling.factor", "scale_linear"):  # llama.cpp's new and old key; the type may be left out
        config = config_from_gguf(meta | {f"llama.rope.{factor}": 2.0}, "")
        assert (config.rope_scaling.kind, config.rope_scaling.factor, config.max_position) == ("linear", 2.0, 1024)
    none = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}
    assert config_from_gguf(meta | none, "").rope_scaling is None
    for change, named in [
        ({"general.architecture": "qwen2"}, "qwen2"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.attention.head_count_kv": [2, 1]}, "not what it should be"),
    ]:
        assert named in refusal(config_from_gguf, meta | change, "x")
    for key in ("embedding_length", "block_count", "context_length"):
        assert key in refusal(config_from_gguf, {k: v for k, v in meta.items() if not k.endswith(key)}, "x")
