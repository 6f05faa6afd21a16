"""Draft heads on disk: EAGLE-1 (EAGLE-2 uses the same) and EAGLE-3, as they are published.

Kind and shapes come from the tensors; the configuration adds what tensors cannot say. Names may carry prefixes
("model.", "eagle.", "module.") and call the layer "midlayer" or "layers.0".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastea.checkpoint import assign_tensors, find_weights, read_json, read_weights
from fastea.config import FasteaError, ModelConfig, rope_settings
from fastea.eagle import DraftHead, EagleHead
from fastea.eagle3 import Eagle3Head, default_taps
from fastea.llama import Llama
from fastea.quantize.forms import SCHEMES, nearest
from fastea.quantized import KEY, VERSION, Quantizer, Weights, entry_of, read_own

State = dict[str, Any]  # by name: tensors, and weights that are stored quantized

# Settings that would change the maths, with the only value that is implemented.
_FIXED = {"hidden_act": "silu", "norm_output": False, "norm_before_fc": False, "fc_norm": False}
_OFFSETS = ("d2t", "draft_id_to_target_id")  # of each draft id to its target id
_MASKS = ("t2d", "target_id_in_draft")  # the same as a mask; not needed


def load_head(folder: str | Path, target: Llama, quantizer: Quantizer) -> DraftHead:
    """Read a head's folder (config.json, safetensors or weights-only .bin) for this target.

    quantizer: how its linear weights are kept, and EAGLE-1's copy of the target's LM head rows; for its kernels.
    Raises FasteaError for another architecture, a missing or unexpected tensor, or sizes that do not fit.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FasteaError(f"{folder}: no such head; give a folder with config.json and weights")
    raw, state = read_json(folder / "config.json"), {}
    tensors: Weights = read_weights(find_weights(folder))
    for name, tensor in read_own(tensors, raw[KEY], str(folder)) if KEY in raw else tensors:
        for prefix in ("module.", "eagle.", "model."):
            name = name.removeprefix(prefix)
        name = name.replace("midlayer.", "layer.", 1).replace("layers.0.", "layer.", 1)
        if not name.endswith("rotary_emb.inv_freq"):
            state[name] = tensor
    needed = ("fc.weight", *(f"layer.{n}.weight" for n in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")))
    if not all(name in state for name in needed):
        raise FasteaError(f"{folder}: not an EAGLE head (fc and one layer are needed, it has {sorted(state)[:6]})")
    for key, value in _FIXED.items():
        if raw.get(key, value) != value:
            raise FasteaError(f"{folder}: {key} = {raw[key]!r} is not supported")
    build = _eagle3 if "layer.hidden_norm.weight" in state else _eagle1
    with torch.device("meta"):
        head = build(raw, state, target, quantizer, str(folder))
    assign_tensors(head, iter(state.items()), quantizer, str(folder))
    head.quantizer = quantizer
    head.card = raw.get("fastea", {})
    return head.eval()


def _eagle1(raw: Mapping[str, Any], state: State, target: Llama, quantizer: Quantizer, where: str) -> EagleHead:
    """An empty EAGLE-1 head of these shapes; takes from `state` what is no weight of it."""
    wanted, fc = target.config, state["fc.weight"]
    if tuple(fc.shape) != (wanted.hidden_size, 2 * wanted.hidden_size):
        raise FasteaError(
            f"{where}: the head's width is {tuple(fc.shape)}, the target needs "
            f"({wanted.hidden_size}, {2 * wanted.hidden_size}); it belongs to another model"
        )
    if raw.get("norm_before_residual"):
        raise FasteaError(f"{where}: norm_before_residual = True is not supported in an EAGLE-1 head")
    config = _config(raw, state, target, where)
    draft_ids = _checked_ids(state.pop("draft_ids", None), wanted.vocab_size, f"{where}: draft_ids")
    embedding = state.pop("embed_tokens.weight", None)  # a frozen copy of the target's
    if embedding is not None and embedding.shape != target.embed.weight.shape:
        raise FasteaError(
            f"{where}: the head's embedding is {tuple(embedding.shape)}, "
            f"the target's {tuple(target.embed.weight.shape)}; it belongs to another model"
        )
    kind = EagleHead
    if quantizer.triton:
        from fastea.fused import FusedEagleHead

        kind = FusedEagleHead
    return kind(config, "fc.bias" in state, "layer.self_attn.q_proj.bias" in state, draft_ids)


def _eagle3(raw: Mapping[str, Any], state: State, target: Llama, quantizer: Quantizer, where: str) -> Eagle3Head:
    """The same for EAGLE-3; renames in `state`."""
    wanted, fc = target.config, state["fc.weight"]
    config = _config(raw, state, target, where)
    taps = _taps(raw, fc.shape[1], wanted, where)
    for name, ours in (
        ("layer.input_layernorm.weight", "layer.embed_norm.weight"),
        ("lm_head.weight", "lm.weight"),
        ("embed_tokens.weight", "embed.weight"),
    ):
        if name in state:
            state[ours] = state.pop(name)
    if "lm.weight" not in state:
        raise FasteaError(f"{where}: an EAGLE-3 head without lm_head.weight")
    for name in _MASKS:
        state.pop(name, None)
    offsets = next((state.pop(name) for name in _OFFSETS if name in state), None)
    rows, draft_ids = state["lm.weight"].shape[0], None
    if offsets is not None and rows < wanted.vocab_size:
        if tuple(offsets.shape) != (rows,):
            raise FasteaError(f"{where}: d2t is {tuple(offsets.shape)}, lm_head has {rows} rows")
        draft_ids = _checked_ids(torch.arange(rows, device="cpu") + offsets, wanted.vocab_size, f"{where}: d2t + index")
    elif rows != wanted.vocab_size:
        raise FasteaError(
            f"{where}: lm_head has {rows} rows, the vocabulary {wanted.vocab_size} ids, and d2t is missing"
        )
    embedding = state.get("embed.weight")
    if embedding is not None and tuple(embedding.shape) != (wanted.vocab_size, config.hidden_size):
        raise FasteaError(
            f"{where}: the head's embedding is {tuple(embedding.shape)}, "
            f"({wanted.vocab_size}, {config.hidden_size}) is needed; it belongs to another model"
        )
    if embedding is None and config.hidden_size != wanted.hidden_size:
        raise FasteaError(
            f"{where}: the head is {config.hidden_size} wide, the target {wanted.hidden_size}, and it has no embedding"
        )
    kind = Eagle3Head
    if quantizer.triton:
        from fastea.fused import FusedEagle3Head

        kind = FusedEagle3Head
    return kind(
        config,
        taps,
        wanted.hidden_size,
        draft_ids,
        fc_bias="fc.bias" in state,
        qkv_bias="layer.self_attn.q_proj.bias" in state,
        normed_residual=bool(raw.get("norm_before_residual", False)),
        own_embedding=embedding is not None,
    )


def _config(raw: Mapping[str, Any], state: State, target: Llama, where: str) -> ModelConfig:
    """The head's shapes, from its tensors, and what only its configuration says."""
    q, k = state["layer.self_attn.q_proj.weight"], state["layer.self_attn.k_proj.weight"]
    wanted, vocab = target.config, raw.get("vocab_size")
    if vocab is not None and vocab != wanted.vocab_size:
        raise FasteaError(
            f"{where}: the head's vocabulary has {vocab} ids, the target's {wanted.vocab_size}; "
            "it belongs to another model"
        )
    try:
        heads = int(raw.get("num_attention_heads") or wanted.num_heads)
        head_dim = int(raw.get("head_dim") or q.shape[0] // heads)
        eps, reach = float(raw.get("rms_norm_eps", 1e-6)), int(raw.get("max_position_embeddings") or 2048)
        theta, scaling = rope_settings(raw, reach, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FasteaError(f"{where}/config.json: a value is not what it should be ({error})") from None
    if scaling is not None:
        raise FasteaError(f"{where}: rope_scaling = {scaling.kind!r} is not supported in a head")
    if heads * head_dim != q.shape[0] or k.shape[0] % head_dim:
        raise FasteaError(f"{where}: q_proj has {q.shape[0]} rows, not {heads} heads of {head_dim}")
    return ModelConfig(
        hidden_size=state["fc.weight"].shape[0],
        intermediate_size=state["layer.mlp.gate_proj.weight"].shape[0],
        num_layers=1,
        num_heads=heads,
        num_kv_heads=k.shape[0] // head_dim,
        head_dim=head_dim,
        vocab_size=wanted.vocab_size,
        norm_eps=eps,
        rope_theta=theta,
        max_position=reach,
    )


def _taps(raw: Mapping[str, Any], width: int, target: ModelConfig, where: str) -> tuple[int, ...]:
    """Layers whose inputs the head reads. Configurations name inputs, or, where the list starts with 1, outputs."""
    layers, nested = target.num_layers, raw.get("eagle_config") or {}
    try:
        listed = raw.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
        taps = tuple(int(i) for i in listed) if listed else default_taps(layers)
    except (AttributeError, TypeError, ValueError) as error:
        raise FasteaError(f"{where}/config.json: a value is not what it should be ({error})") from None
    if listed and min(taps) == 1:
        taps = tuple(i + 1 for i in taps)
    if width != len(taps) * target.hidden_size:
        raise FasteaError(
            f"{where}: fc reads {width} values, {len(taps)} states of the target are "
            f"{len(taps) * target.hidden_size} wide; it belongs to another model"
        )
    if not all(0 <= i <= layers for i in taps):
        raise FasteaError(f"{where}: it reads the states before layers {list(taps)}, the target has {layers} layers")
    return taps


def _checked_ids(ids: torch.Tensor | None, vocab: int, what: str) -> torch.Tensor | None:
    if ids is not None and not bool(ids.numel() and (ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < vocab):
        raise FasteaError(f"{what} must be ascending ids below {vocab}")
    return ids


def save_head(
    head: DraftHead,
    folder: Path,
    card: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    quant: str | None = None,
) -> None:
    """Write config.json (published keys, our card under "fastea") and model.safetensors (published names). quant:
    "int8" rounds the layer's weights and the LM head's, one scale a row, not fc's, whose inputs differ much in
    size; such a file is fastea's own."""
    from safetensors.torch import save_file

    c, layer = head.config, head.layer
    q, k, v = layer.qkv.weight.split([n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)])
    gate, up = layer.gate_up.weight.chunk(2)
    where = "midlayer" if isinstance(head, Eagle3Head) else "layers.0"
    linear = {
        f"{where}.self_attn.q_proj": q,
        f"{where}.self_attn.k_proj": k,
        f"{where}.self_attn.v_proj": v,
        f"{where}.self_attn.o_proj": layer.o.weight,
        f"{where}.mlp.gate_proj": gate,
        f"{where}.mlp.up_proj": up,
        f"{where}.mlp.down_proj": layer.down.weight,
    }
    others: dict[str, torch.Tensor] = {
        "fc.weight": head.fc.weight,
        f"{where}.post_attention_layernorm.weight": layer.mlp_norm.weight,
    }
    if head.fc.bias is not None:
        others["fc.bias"] = head.fc.bias
    if layer.qkv.bias is not None:
        biases = layer.qkv.bias.split([len(part) for part in (q, k, v)])
        others |= {f"{where}.self_attn.{n}_proj.bias": bias for n, bias in zip("qkv", biases, strict=True)}
    if isinstance(head, Eagle3Head):
        if hasattr(head, "embed"):
            others["embed_tokens.weight"] = head.embed.weight
        linear["lm_head"] = head.lm.weight
        others |= {
            f"{where}.input_layernorm.weight": head.layer.embed_norm.weight,
            f"{where}.hidden_norm.weight": head.layer.hidden_norm.weight,
            "norm.weight": head.norm.weight,
        }
    stored: dict[str, torch.Tensor] = {}
    entries: dict[str, Any] = {}
    for name, weight in linear.items():
        if quant is None:
            others[f"{name}.weight"] = weight
            continue
        rounded = nearest(weight.detach().float(), SCHEMES[quant])
        entries[name] = entry_of(rounded)
        stored |= {f"{name}.codes": rounded.codes, f"{name}.scale": rounded.scale}
    stored |= {name: t.detach().to(dtype).contiguous() for name, t in others.items()}
    if head.draft_ids is not None and isinstance(head, Eagle3Head):
        ids = head.draft_ids.cpu()
        stored["d2t"] = ids - torch.arange(len(ids))
        stored["t2d"] = torch.isin(torch.arange(c.vocab_size), ids)
    elif head.draft_ids is not None:
        stored["draft_ids"] = head.draft_ids
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(head, folder, card, entries)


def write_config(head: DraftHead, folder: Path, card: dict[str, Any], entries: dict[str, Any] | None = None) -> None:
    """The head's config.json with its card. entries: the weights that are stored quantized; None: as they are there."""
    c, path = head.config, folder / "config.json"
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_position,
        "bias": head.fc.bias is not None,
        "hidden_act": "silu",
    }
    if isinstance(head, Eagle3Head):
        config["draft_vocab_size"] = head.lm.shape[0]
        config["eagle_aux_hidden_state_layer_ids"] = list(head.taps)
        config["norm_before_residual"] = head.layer.normed_residual
    if entries is None and path.exists():
        entries = read_json(path).get(KEY, {}).get("weights")
    if entries:
        config[KEY] = {"version": VERSION, "weights": entries}
    path.write_text(json.dumps(config | {"fastea": card}, indent=1) + "\n", encoding="utf-8")
