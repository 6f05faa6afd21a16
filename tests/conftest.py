"""Tiny models that every test can afford. Random weights have std 0.3: with 0.02 greedy text hardly varies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from fastea.config import ModelConfig
from fastea.eagle import EagleHead
from fastea.llama import Llama
from fastea.quantized import Quantizer
from fastea.tokenizer import Tokenizer

# A config.json that says what tiny_config() says.
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}


def tiny_config(vocab: int = 64, **changes) -> ModelConfig:
    base = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position": 512,
    }
    return ModelConfig(**(base | changes))


def randomize(module: torch.nn.Module, seed: int, std: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.normal_(0.0, std, generator=generator)
            if name.endswith("norm.weight"):
                p.add_(1.0)


def dense(dtype: torch.dtype = torch.float32) -> Quantizer:
    """Loads weights as they are."""
    return Quantizer(None, dtype, "cpu", pack=False)


def tiny_target(seed: int = 0, vocab: int = 64, **changes) -> Llama:
    model = Llama(tiny_config(vocab, **changes)).eval()
    randomize(model, seed)
    return model


def tiny_head(target: Llama, seed: int = 1, draft_ids: torch.Tensor | None = None) -> EagleHead:
    config = ModelConfig(**(vars(target.config) | {"num_layers": 1}))
    head = EagleHead(config, fc_bias=True, qkv_bias=False, draft_ids=draft_ids).eval()
    randomize(head, seed)
    return head


def byte_tokenizer(vocab: int, stop_ids: tuple[int, ...] = ()) -> Tokenizer:
    """Ids are bytes: 0 .. vocab-1 as the characters from "!" on."""
    pieces = [bytes([33 + i % 90]) for i in range(vocab)]
    return Tokenizer(lambda text: [(b - 33) % vocab for b in text.encode()], pieces, {}, stop_ids=stop_ids)


def reference_greedy(model: Llama, ids: list[int], count: int) -> list[int]:
    """Greedy continuation by full forwards in fp64 without any cache of ours between steps: the oracle."""
    out = list(ids)
    double = copy_double(model)
    for _ in range(count):
        cache = double.new_cache(1, len(out))
        tokens = torch.tensor([out])
        with torch.inference_mode():
            features = double(tokens, torch.arange(len(out))[None], torch.zeros(1, dtype=torch.int64), None, cache)
            out.append(int(double.logits(features[:, -1]).argmax()))
    return out[len(ids) :]


def copy_double(model: Llama) -> Llama:
    import copy

    double = copy.deepcopy(model).double()
    double.set_context(model.config.max_position)
    return double


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model, fetched once into the user's cache."""
    from fastea.demo import demo_model

    return demo_model()


def random_paths(seed: int, nodes: int = 20) -> list[tuple[int, ...]]:
    """A random tree without rank gaps: up to `nodes` drafted nodes, depth up to 7."""
    import random

    rng = random.Random(seed)
    children = {(): 0}
    for _ in range(rng.randint(1, nodes)):
        parent = rng.choice([p for p in children if len(p) < 7])
        children[(*parent, children[parent])] = 0
        children[parent] += 1
    return [p for p in children if p]


WORDS = [
    "Once upon a time, there was a cat.",
    "Be kind. hello hi there again",
    "USER: hello ASSISTANT: hi there [INST] hello [/INST]",
    "12345 12345 12345 2024 2024 2024",
] * 3


@pytest.fixture(scope="session")
def llama_model() -> bytes:
    """A sentencepiece model made as LLaMA's: BPE with byte fallback, unk 0, bos 1, eos 2, nothing normalized."""
    import io

    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(WORDS), model_writer=out, model_type="bpe", vocab_size=330, byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, split_digits=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return out.getvalue()


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 300  # bytes, three markers, padding


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A tiny chat checkpoint with a head beside it, written as published models are."""
    from fastea.head_files import save_head

    path, target = tmp_path_factory.mktemp("tiny model"), tiny_target(0, VOCAB)
    write_checkpoint(path, target)
    save_head(tiny_head(target), path / "eagle", {})
    return path


@pytest.fixture(scope="session")
def deep_folder(tmp_path_factory) -> Path:
    """The same of six layers, enough for an EAGLE-3 head; without a head."""
    path = tmp_path_factory.mktemp("deep")
    write_checkpoint(path, tiny_target(0, VOCAB, num_layers=6))
    return path


def write_checkpoint(path: Path, target: Llama) -> None:
    import tokenizers
    from safetensors.torch import save_file
    from tokenizers import decoders, models, pre_tokenizers

    c = target.config
    state = {"model.embed_tokens.weight": target.embed.weight, "model.norm.weight": target.norm.weight}
    state["lm_head.weight"] = target.lm_head.weight
    for i, layer in enumerate(target.layers):
        name = f"model.layers.{i}."
        q, k, v = layer.qkv.weight.split([c.num_heads * c.head_dim, *[c.num_kv_heads * c.head_dim] * 2])
        gate, up = layer.gate_up.weight.chunk(2)
        state |= {f"{name}self_attn.{n}_proj.weight": t for n, t in zip("qkvo", (q, k, v, layer.o.weight), strict=True)}
        state |= {f"{name}mlp.gate_proj.weight": gate, f"{name}mlp.up_proj.weight": up}
        state |= {f"{name}mlp.down_proj.weight": layer.down.weight}
        state |= {f"{name}input_layernorm.weight": layer.attn_norm.weight}
        state |= {f"{name}post_attention_layernorm.weight": layer.mlp_norm.weight}
    save_file({n: t.detach().contiguous().clone() for n, t in state.items()}, path / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_hidden_layers": c.num_layers}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB}
    write_json(
        path / "config.json", config | {"rms_norm_eps": 1e-5, "max_position_embeddings": 512, "eos_token_id": 258}
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|end|>"])
    backend.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"chat_template": CHATML, "eos_token": "<|im_end|>"})
