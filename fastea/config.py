"""What a checkpoint says about itself, as one small dataclass.

The same `ModelConfig` comes from a Hugging Face config.json and from GGUF metadata. Anything that
would change the maths and is not implemented is refused by name; nothing is guessed from file names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


class FasteaError(Exception):
    """A mistake of the input, told in one line: what, where, what to do. The command exits with 2."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    kind: "linear", "dynamic" (NTK-aware) or "llama3" (LLaMA-3.1's frequency bands).
    original_max_position: trained context in tokens.
    """

    kind: str
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a LLaMA-family decoder. Raises ValueError for head counts that do not divide."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_position: int
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    eos_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: queries and keys are normalised, a head at a time, before they are rotated
    experts: int = 0  # Mixtral: MLPs of a layer, 0 = one for all rows
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            shape = f"{self.num_heads} heads, {self.num_kv_heads} KV heads, head_dim {self.head_dim}"
            raise ValueError(f"{shape}: KV heads must divide the heads, head_dim must be even")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"{self.experts_per_token} of {self.experts} experts a token")


_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Keys of a LLaMA config.json whose other values would change the maths.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
}

# What runs: LLaMA and what differs from it by a few settings.
_FAMILIES: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "MixtralForCausalLM": {},
}
_TYPES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}  # model_type, where no architecture is named
_TYPES |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM"}


def ids_of(value: Any) -> tuple[int, ...]:
    """An id, a list of ids or nothing -> a tuple."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def config_from_hf(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a Hugging Face config.json (old and new spelling of the rotary settings).

    raw: the parsed JSON; where: its path, for messages. Raises FasteaError for other architectures,
    missing keys and settings that are not implemented.
    """
    names = raw.get("architectures") or [_TYPES.get(str(raw.get("model_type")), raw.get("model_type"))]
    family = _FAMILIES.get(names[0])
    if family is None:
        known = ", ".join(_FAMILIES)
        raise FasteaError(f"{where}: architecture {names[0]!r} is not supported; this version runs {known}")
    for key, allowed in _FIXED.items():
        if key in raw and raw[key] not in allowed:
            raise FasteaError(f"{where}: {key} = {raw[key]!r} is not supported (only {allowed[0]!r})")
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        trained = int(raw.get("max_position_embeddings") or 2048)
        theta, scaling = rope_settings(raw, trained, where)
        return ModelConfig(
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or (128 if family.get("qk_norm") else hidden // heads)),
            vocab_size=int(raw["vocab_size"]),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position=int(min(_reach(trained, scaling), _window(raw))),
            tied=bool(raw.get("tie_word_embeddings", False)),
            eos_ids=ids_of(raw.get("eos_token_id")),
            dtype=_DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype")), torch.float32),
            experts=int(raw["num_local_experts"]) if names[0] == _TYPES["mixtral"] else 0,
            experts_per_token=int(raw.get("num_experts_per_tok") or 2),
            **family,
        )
    except KeyError as missing:
        raise FasteaError(f"{where}: the key {missing} is missing") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise FasteaError(f"{where}: a value is not what it should be ({error})") from None


def _window(raw: Mapping[str, Any]) -> float:
    """Tokens that every layer sees. Longer contexts would need attention over a sliding window, which is not here."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    return math.inf if window is None else int(window)


def _reach(trained: int, scaling: RopeScaling | None) -> int:
    """Context limit: linear and dynamic scaling stretch the stated one, llama3's configurations state the result."""
    return trained if scaling is None or scaling.kind == "llama3" else int(trained * scaling.factor)


def rope_settings(raw: Mapping[str, Any], trained: int, where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_parameters` (new spelling) or `rope_theta` + `rope_scaling` (old)."""
    scaling = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if scaling.get("partial_rotary_factor") not in (1, None):
        raise FasteaError(f"{where}: rotation of a part of the head (partial_rotary_factor) is not supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "dynamic", "llama3"):
        raise FasteaError(f"{where}: rope scaling {kind!r} is not supported (default, linear, dynamic, llama3 are)")
    stated = scaling.get("original_max_position_embeddings") if kind == "llama3" else None  # else not read, as in HF
    return theta, RopeScaling(
        kind=kind,
        factor=float(scaling["factor"]),
        original_max_position=int(stated or trained),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
    )


def _own(config: ModelConfig) -> dict[str, bool]:
    """What differs from LLaMA."""
    return {name: True for name in ("qkv_bias", "qk_norm") if getattr(config, name)}


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json that `config_from_hf` reads as this configuration."""
    kind = "mixtral" if config.experts else next(t for t, n in _TYPES.items() if _FAMILIES[n] == _own(config))
    raw: dict[str, Any] = {
        "architectures": [_TYPES[kind]],
        "model_type": kind,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tied,
        "eos_token_id": list(config.eos_ids),
    }
    if config.experts:
        raw |= {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
    if scaling := config.rope_scaling:
        raw["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        raw["max_position_embeddings"] = scaling.original_max_position
        if scaling.kind == "llama3":
            raw["max_position_embeddings"] = config.max_position
            raw["rope_scaling"] |= {
                "original_max_position_embeddings": scaling.original_max_position,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
            }
    return raw


def config_from_gguf(meta: Mapping[str, Any], where: str) -> ModelConfig:
    """Read GGUF metadata of LLaMA architecture. meta: key -> Python value; where: the path."""
    arch = meta.get("general.architecture")
    if arch != "llama":
        raise FasteaError(f"{where}: GGUF architecture {arch!r} is not supported; this version runs 'llama'")
    if meta.get("llama.expert_count"):
        raise FasteaError(f"{where}: a mixture of experts (llama.expert_count) is not supported")
    try:
        hidden, heads = int(meta["llama.embedding_length"]), int(meta["llama.attention.head_count"])
        context = int(meta["llama.context_length"])
        head_dim = int(meta.get("llama.attention.key_length") or hidden // heads)
        if int(meta.get("llama.rope.dimension_count", head_dim)) != head_dim:
            raise FasteaError(f"{where}: rotation of a part of the head (llama.rope.dimension_count) is not supported")
        kind = meta.get("llama.rope.scaling.type", "linear")  # llama.cpp's default, by a factor of 1
        if kind not in ("none", "linear"):
            raise FasteaError(f"{where}: rope scaling {kind!r} is not supported in a GGUF file (none and linear are)")
        factor = float(meta.get("llama.rope.scaling.factor") or meta.get("llama.rope.scale_linear") or 1.0)
        scaling = RopeScaling("linear", factor, context) if kind == "linear" and factor != 1.0 else None
        stops = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return ModelConfig(
            hidden_size=hidden,
            intermediate_size=int(meta["llama.feed_forward_length"]),
            num_layers=int(meta["llama.block_count"]),
            num_heads=heads,
            num_kv_heads=int(meta.get("llama.attention.head_count_kv") or heads),
            head_dim=head_dim,
            vocab_size=int(meta.get("llama.vocab_size") or len(meta["tokenizer.ggml.tokens"])),
            norm_eps=float(meta["llama.attention.layer_norm_rms_epsilon"]),
            rope_theta=float(meta.get("llama.rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            max_position=_reach(context, scaling),
            eos_ids=tuple(int(s) for s in stops if s is not None),
        )
    except KeyError as missing:
        raise FasteaError(f"{where}: the metadata key {missing} is missing") from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise FasteaError(f"{where}: a metadata value is not what it should be ({error})") from None


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Inverse frequencies [head_dim / 2] in fp32, after linear or llama3 scaling (dynamic acts by position)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    freq = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    wavelength = 2 * math.pi / freq
    turns = scaling.original_max_position / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((turns - low) / (high - low)).clamp(0, 1)  # 0: long waves, divided; 1: short waves, kept
    return (1 - smooth) * freq / scaling.factor + smooth * freq


def rope_table(config: ModelConfig, rows: int, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Cosines and sines [rows, 2, head_dim / 2] in fp32 for positions 0 .. rows-1.

    Dynamic (NTK-aware) scaling gives each position the base of the context that ends with it, which is
    what decoding token by token computes. factors: GGUF's per-frequency divisors (`rope_freqs`).
    """
    freq = rope_frequencies(config)
    if factors is not None:
        freq = freq / factors
    positions = torch.arange(rows, dtype=torch.float32)
    angles = positions[:, None] * freq
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        limit, factor, dim = scaling.original_max_position, scaling.factor, config.head_dim
        stretch = (factor * (positions + 1).clamp(min=limit) / limit) - (factor - 1)
        base = config.rope_theta * stretch ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        angles = positions[:, None] * base[:, None] ** -exponents
    return torch.stack((angles.cos(), angles.sin()), dim=1)
