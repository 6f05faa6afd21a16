"""The EAGLE-1 head: its maths, its cache, and the files that it is loaded from."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import byte_tokenizer, dense, tiny_head, tiny_target, write_json
from fastea.config import FasteaError
from fastea.drafters.eagle import EagleDrafter
from fastea.generator import Generator
from fastea.head_files import load_head, save_head
from fastea.tree import Tree, chain

LAYER = "layers.0."


def reference_head(state, embedding, tokens, features, heads, theta=10000.0, eps=1e-5):
    """One causal EAGLE-1 forward straight from the tensors, in fp64: fc, attention without input norm, MLP."""
    s = {name: t.double() for name, t in state.items()}
    x = torch.cat((embedding.double()[tokens], features.double()), -1) @ s["fc.weight"].T + s.get("fc.bias", 0.0)
    rows = x.shape[0]
    q, k, v = (
        (x @ s[f"{LAYER}self_attn.{n}_proj.weight"].T + s.get(f"{LAYER}self_attn.{n}_proj.bias", 0.0)) for n in "qkv"
    )
    dim = q.shape[1] // heads
    kv = k.shape[1] // dim
    angle = torch.arange(rows).double()[:, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)

    def turn(t, n):
        t = t.view(rows, n, dim)
        a, b = t[..., : dim // 2], t[..., dim // 2 :]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    q, k, v = turn(q, heads), turn(k, kv).repeat_interleave(heads // kv, 1), v.view(rows, kv, dim)
    v = v.repeat_interleave(heads // kv, 1)
    scores = torch.einsum("rhd,lhd->hrl", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hrl,lhd->rhd", scores.softmax(-1), v).reshape(rows, -1)
    x = x + mixed @ s[f"{LAYER}self_attn.o_proj.weight"].T
    n = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * s[f"{LAYER}post_attention_layernorm.weight"]
    gate = n @ s[f"{LAYER}mlp.gate_proj.weight"].T
    gate = gate * gate.sigmoid() * (n @ s[f"{LAYER}mlp.up_proj.weight"].T)
    return x + gate @ s[f"{LAYER}mlp.down_proj.weight"].T


def published(
    folder, target, *, fc_bias=True, qkv_bias=False, kv_heads=2, heads=4, inter=80, prefix="", binary=False, **config
):
    """A head folder with published names and random values; returns its tensors without prefix."""
    h, dim = target.config.hidden_size, 16
    shapes = {
        "fc.weight": (h, 2 * h),
        f"{LAYER}self_attn.q_proj.weight": (heads * dim, h),
        f"{LAYER}self_attn.k_proj.weight": (kv_heads * dim, h),
        f"{LAYER}self_attn.v_proj.weight": (kv_heads * dim, h),
        f"{LAYER}self_attn.o_proj.weight": (h, heads * dim),
        f"{LAYER}mlp.gate_proj.weight": (inter, h),
        f"{LAYER}mlp.up_proj.weight": (inter, h),
        f"{LAYER}mlp.down_proj.weight": (h, inter),
        f"{LAYER}post_attention_layernorm.weight": (h,),
    }
    if fc_bias:
        shapes["fc.bias"] = (h,)
    if qkv_bias:
        shapes |= {f"{LAYER}self_attn.{n}_proj.bias": (shapes[f"{LAYER}self_attn.{n}_proj.weight"][0],) for n in "qkv"}
    generator = torch.Generator().manual_seed(7)
    state = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    stored = {prefix + name: t for name, t in state.items()}
    if binary:
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors")
    base = {
        "num_attention_heads": heads,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "vocab_size": 64,
        "model_type": "llama",
    }
    write_json(folder / "config.json", base | config)
    return state


VARIANTS = [
    {},
    {"fc_bias": False, "bias": False},
    {"qkv_bias": True},
    {"kv_heads": 4},  # MHA head on a GQA target
    {"kv_heads": 1, "num_key_value_heads": 4},  # the tensors decide
    {"binary": True, "prefix": "model."},
    {"rope_theta": 500000.0},
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_equals_the_reference(tmp_path, variant):
    """Case 7: no input norm, no final norm; biases of fc, q, k and v as the file has them."""
    target = tiny_target()
    state = published(tmp_path / "head", target, **variant)
    head = load_head(tmp_path / "head", target, dense())
    head.bind(target, 64)
    tokens, features = torch.randint(64, (9,)), torch.randn(9, 64)
    cache = head.new_cache(1, 64)
    with torch.inference_mode():
        out = head(
            tokens[None], features[None], torch.arange(9)[None], torch.zeros(1, dtype=torch.int64), None, 0, cache
        )
    wanted = reference_head(state, target.embed.weight, tokens, features, 4, variant.get("rope_theta", 10000.0))
    torch.testing.assert_close(out[0].double(), wanted, atol=1e-4, rtol=1e-4)
    logits = head.logits(out)[0].double()
    torch.testing.assert_close(logits, wanted @ target.lm_head.weight.double().T, atol=1e-3, rtol=1e-3)


def test_embedding_and_rotary_buffers_in_the_file_are_known(tmp_path):
    target = tiny_target()
    state = published(tmp_path / "head", target)
    extra = {"embed_tokens.weight": target.embed.weight.clone(), f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(state | extra, tmp_path / "head" / "model.safetensors")
    load_head(tmp_path / "head", target, dense())


def broken(change):
    def build(folder, target):
        state = published(folder, target)
        change(state)
        save_file(state, folder / "model.safetensors")

    return build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            broken(lambda s: s.pop(f"{LAYER}mlp.up_proj.weight")),
            r"missing tensors for: layer.gate_up.weight \(mlp.up_proj",
        ),
        (broken(lambda s: s.update({"extra.weight": torch.ones(2)})), "unexpected tensors: extra.weight"),
        (broken(lambda s: s.update({"norm.weight": torch.ones(64)})), "unexpected tensors: norm.weight"),
        (broken(lambda s: s.update({f"{LAYER}input_layernorm.weight": torch.ones(64)})), "unexpected"),
        (broken(lambda s: s.pop("fc.weight")), "not an EAGLE head"),
        (
            broken(lambda s: s.update({"embed_tokens.weight": torch.ones(60, 64)})),
            r"\(60, 64\), the target's \(64, 64\)",
        ),
        (lambda f, t: published(f, t, vocab_size=60), "60 ids, the target's 64"),
        (lambda f, t: published(f, t, rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling"),
        (lambda f, t: published(f, t, head_dim=20), "q_proj has 64 rows"),
        (lambda f, t: published(f, tiny_target(hidden_size=48, head_dim=16)), "belongs to another model"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, build, message):
    """Cases 7 and 8: missing and unexpected tensors by name, another model's sizes beside this one's."""
    target = tiny_target()
    build(tmp_path / "head", target)
    with pytest.raises(FasteaError, match=message):
        load_head(tmp_path / "head", target, dense())


def test_saved_head_loads_as_it_was(tmp_path):
    target = tiny_target()
    ids = torch.tensor([3, 5, 8, 60])
    head = tiny_head(target, draft_ids=ids)
    save_head(head, tmp_path / "head", {"note": 1}, torch.float32)
    again = load_head(tmp_path / "head", target, dense())
    assert again.card == {"note": 1} and torch.equal(again.draft_ids, ids)
    for (name, a), (_, b) in zip(head.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    state = load_file(tmp_path / "head" / "model.safetensors")
    save_file(state | {"draft_ids": torch.tensor([3, 5, 5, 60])}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(FasteaError, match="draft_ids"):
        load_head(tmp_path / "head", target, dense())


def test_reduced_vocabulary_proposes_only_its_ids():
    target = tiny_target()
    target.set_context(64)
    ids = torch.tensor([3, 5, 8, 21, 60])
    head = tiny_head(target, draft_ids=ids)
    head.bind(target, 64)
    generator = Generator(
        target, byte_tokenizer(64), EagleDrafter(head, Tree([(0,), (1,), (0, 0)], "t")), max_seq_len=64
    )
    for settings in ({}, {"temperature": 1.0, "seed": 0}):
        run = generator.stream([1, 2, 3], max_new_tokens=40, **settings)
        for _ in range(10):
            next(run)
        with torch.inference_mode():
            drafted = generator.drafter.propose(generator.state(1)).tokens[0, 1:]
        assert set(drafted.tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("tree", [chain(4), Tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)], "t")])
def test_drafted_tokens_equal_a_reference_without_cache(tree):
    """Every node's token is the ranked child that a full forward over [true rows, the node's path] gives."""
    target = tiny_target()
    target.set_context(128)
    head = tiny_head(target)
    head.bind(target, 128)
    generator = Generator(target, byte_tokenizer(64), EagleDrafter(head, tree), max_seq_len=128)
    ids = [9, 4, 7, 1]
    run = generator.stream(ids, max_new_tokens=100)
    for _ in range(6):
        next(run)
    state = generator.state(1)
    with torch.inference_mode():
        draft = generator.drafter.propose(state).tokens[0].tolist()
        length = int(state.length)
        text = (ids + run.outputs[0].ids)[: length + 1]
        cache = target.new_cache(1, 128)
        zero = torch.zeros(1, dtype=torch.int64)
        features = target(torch.tensor([text[:-1]]), torch.arange(length)[None], zero, None, cache)[0]
        for node, path in enumerate(tree.paths):
            children = [c for c in tree.children[node].tolist() if c >= 0]
            tokens, states = list(text[1:]), features
            for depth in range(len(path) + 1):
                fresh = head.new_cache(1, 128)
                positions = torch.arange(len(tokens))[None]
                out = head(torch.tensor([tokens]), states[None], positions, zero, None, 0, fresh)
                if depth < len(path):
                    slot = tree.paths.index(path[: depth + 1])
                    tokens, states = [*tokens, draft[slot]], torch.cat((states, out[0, -1:]))
            best = head.logits(out[0, -1]).topk(max(1, len(children))).indices.tolist()
            assert [draft[c] for c in children] == best[: len(children)]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}])
def test_draft_cache_is_rebuilt_from_true_features(settings):
    """After every round the head's rows equal a fresh pass over the same tokens with the target's features."""
    target = tiny_target(0, 7)
    target.set_context(128)
    head = tiny_head(target)
    head.bind(target, 128)
    tree = Tree([(a,) for a in range(7)] + [(a, b) for a in range(7) for b in range(7)], "wide")
    generator = Generator(target, byte_tokenizer(7), EagleDrafter(head, tree), max_seq_len=128)
    prompt, checked = [1, 2, 3], []

    def check(outcome):
        state = generator.state(1)
        stable = int(state.length) - int(state.count)  # rows that the last drafting extended over
        text = state.history[0, : stable + 1].tolist()
        zero = torch.zeros(1, dtype=torch.int64)
        cache, fresh = target.new_cache(1, 128), head.new_cache(1, 128)
        features = target(torch.tensor([text[:-1]]), torch.arange(stable)[None], zero, None, cache)
        head(torch.tensor([text[1:]]), features, torch.arange(stable)[None], zero, None, 0, fresh)
        for mine, wanted in (
            (state.draft_cache.keys[0], fresh.keys[0]),
            (state.draft_cache.values[0], fresh.values[0]),
        ):
            torch.testing.assert_close(mine[:, :, :stable], wanted[:, :, :stable], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            state.cache.keys[1][:, :, :stable], cache.keys[1][:, :, :stable], atol=1e-4, rtol=1e-4
        )
        checked.append(stable)

    with torch.inference_mode():
        list(generator.stream(prompt, max_new_tokens=31, observe=check, **settings))
    assert checked[0] == 3 and len(checked) >= 10
