"""The decoder against transformers: heads, widths, ties, rotary scaling in both spellings, chunks."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from conftest import RAW, dense, randomize, tiny_config, tiny_target, write_json
from fastea.checkpoint import Checkpoint
from fastea.config import FasteaError, RopeScaling, config_from_hf, config_to_hf, rope_frequencies, rope_table

transformers = pytest.importorskip("transformers")

SCALINGS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def spelled(kind: str, spelling: str, theta: float = 5e5) -> dict:
    """One rotary setting as old and new configurations write it."""
    if spelling == "rope_parameters":
        return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **SCALINGS[kind]}}
    return {"rope_theta": theta, "rope_scaling": {spelling: kind, **SCALINGS[kind]}}


def both_models(folder, raw: dict):
    """The same random weights in transformers and, by way of a folder with `raw` as config.json, in fastea."""
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(deepcopy(raw))).eval()
    randomize(reference, seed=1)
    reference.save_pretrained(folder)
    write_json(folder / "config.json", raw)
    return reference, Checkpoint(folder).load(dense())


FAMILIES = {
    "Mistral": {"sliding_window": 4096},
    "Qwen2": {"use_sliding_window": False, "sliding_window": 64},
    "Qwen3": {"head_dim": 20},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path, name, tied):
    """Mistral, Qwen2 (biases of q, k, v), Qwen3 (norms of q and k) and Mixtral (experts) against transformers, as their
    folders come."""
    raw = {k: v for k, v in RAW.items() if k != "architectures"} | {"tie_word_embeddings": tied, "rope_theta": 1e6}
    raw |= FAMILIES[name] | {"model_type": name.lower(), "architectures": [f"{name}ForCausalLM"]}
    config = getattr(transformers, f"{name}Config").from_dict(deepcopy(raw))
    reference = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    randomize(reference, seed=1)
    reference.save_pretrained(tmp_path)
    write_json(tmp_path / "config.json", raw)
    model = Checkpoint(tmp_path).load(dense())
    for count in (1, 7, 40):
        check_equal(reference, model, count)
    assert model.config.max_position == 512
    assert config_from_hf(config_to_hf(model.config), "here") == replace(model.config, dtype=torch.float32)


def test_a_window_limits_the_context(tmp_path):
    """Attention over a sliding window is not here: contexts end where it would begin."""
    for more, limit in (
        ({"sliding_window": 100}, 100),
        ({"sliding_window": 100, "use_sliding_window": False}, 512),
        ({"sliding_window": 9999}, 512),
        ({"sliding_window": None}, 512),
    ):
        raw = RAW | {"architectures": ["MistralForCausalLM"]} | more
        assert config_from_hf(raw, "here").max_position == limit
    with pytest.raises(FasteaError, match="Phi3ForCausalLM"):
        config_from_hf(RAW | {"architectures": ["Phi3ForCausalLM"]}, "here")


def tokens_of(count: int) -> torch.Tensor:
    return torch.randint(64, (1, count), generator=torch.Generator().manual_seed(count))


@torch.inference_mode()
def features_of(model, tokens: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
    """[1, N] -> [1, N, hidden], `chunk` rows at a time."""
    count = tokens.shape[1]
    model.set_context(count)
    cache, size = model.new_cache(1, count), chunk or count
    parts = []
    for start in range(0, count, size):
        positions = torch.arange(start, min(start + size, count))[None]
        parts.append(model(tokens[:, positions[0]], positions, torch.tensor([start]), None, cache))
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def check_equal(reference, model, count: int) -> None:
    """Features are the state after the final norm; logits agree within 1e-4."""
    tokens = tokens_of(count)
    features = features_of(model, tokens)
    wanted = reference.model(tokens).last_hidden_state
    torch.testing.assert_close(features, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(model.logits(features), reference.lm_head(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head_dim", ["absent", None, 16, 20, 100])
@pytest.mark.parametrize("kv_heads", ["absent", None, 4, 2, 1])
def test_shapes(tmp_path, kv_heads, head_dim, tied):
    """Case 16: hidden 48, 4 heads: a stated head_dim wins, else 12; without KV heads there are as many as heads."""
    raw = RAW | {"hidden_size": 48, "num_key_value_heads": kv_heads, "head_dim": head_dim, "tie_word_embeddings": tied}
    raw = {key: value for key, value in raw.items() if value != "absent"}
    reference, model = both_models(tmp_path, raw)
    assert model.config.head_dim == (head_dim if isinstance(head_dim, int) else 12)
    assert (model.lm_head.weight is model.embed.weight) == tied
    check_equal(reference, model, 24)


@pytest.mark.parametrize("rope", [{}, {"rope_theta": 5e5}, {"rope_scaling": None}, {"rope_parameters": None}])
def test_plain_rotation(tmp_path, rope):
    reference, model = both_models(tmp_path, RAW | rope)
    assert model.config.rope_theta == rope.get("rope_theta", 10000.0)
    check_equal(reference, model, 120)


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_scaled_rotation(tmp_path, kind, spelling):
    """Case 17."""
    check_equal(*both_models(tmp_path, RAW | spelled(kind, spelling)), 120)


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize("stated", [{}, {"original_max_position_embeddings": 8}])
@torch.inference_mode()
def test_dynamic_scaling_is_what_decoding_token_by_token_computes(tmp_path, spelling, stated, monkeypatch):
    """Every cached key keeps the base of the context that it ended, however many rows a pass has."""
    monkeypatch.setitem(SCALINGS, "dynamic", SCALINGS["dynamic"] | stated)
    reference, model = both_models(tmp_path, RAW | spelled("dynamic", spelling) | {"max_position_embeddings": 16})
    tokens, cache = tokens_of(120), transformers.DynamicCache()
    steps = [reference(token, None, None, cache, use_cache=True).logits for token in tokens.split(1, dim=1)]
    wanted = torch.cat(steps, dim=1)
    for chunk in (None, 1, 64):
        ours = model.logits(features_of(model, tokens, chunk))
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


def test_prefill_in_chunks_equals_one_pass():
    model, tokens = tiny_target(), tokens_of(150)
    whole = features_of(model, tokens)
    for chunk in (64, 7, 1):
        torch.testing.assert_close(features_of(model, tokens, chunk), whole, atol=1e-4, rtol=0)


# Stored values for head_dim 16 and theta 10000, computed once in plain Python with 50 digits from the published
# formulas. llama3: factor 8, original 16; linear: factor 2; dynamic: factor 2, original 16, as of position 5 and 100.
STORED = {
    "linear": [0.5, 0.15811388, 0.05, 0.015811388, 0.005, 0.0015811388, 0.0005, 0.00015811388],
    "llama3": [0.5760564, 0.039528471, 0.0125, 0.0039528471, 0.00125, 0.00039528471, 0.000125, 3.9528471e-05],
    "dynamic 5": [1, 0.31622777, 0.1, 0.031622777, 0.01, 0.0031622777, 0.001, 0.00031622777],
    "dynamic 100": [1, 0.22274143, 0.049613745, 0.011051037, 0.0024615237, 0.00054828331, 0.00012212541, 2.7202388e-05],
}


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_stored_frequencies(kind):
    config = tiny_config(rope_scaling=RopeScaling(kind, SCALINGS[kind]["factor"], 16))
    torch.testing.assert_close(rope_frequencies(config), torch.tensor(STORED[kind]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("position", [5, 100])
@pytest.mark.parametrize("kind", ["linear", "llama3", "dynamic"])
def test_stored_rotation(kind, position):
    """The table holds the cosines and sines of position times frequency."""
    config = tiny_config(rope_scaling=RopeScaling(kind, SCALINGS[kind]["factor"], 16))
    cos, sin = rope_table(config, 128)[position]
    for i, freq in enumerate(STORED.get(kind) or STORED[f"{kind} {position}"]):
        assert cos[i].item() == pytest.approx(math.cos(position * freq), abs=2e-5)
        assert sin[i].item() == pytest.approx(math.sin(position * freq), abs=2e-5)
