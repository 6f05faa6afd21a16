"""The EAGLE-1 head (arXiv 2401.15077, section 3.1; EAGLE-2 uses the same weights).

It predicts the target's next feature from [embedding of t_{i+1}, feature f_i]; the target's LM head turns that
into a draft token. Row (f_i, t_{i+1}) has position i. One LLaMA layer without input norm, no final norm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastea.cache import TREE_SLACK, KVCache
from fastea.checkpoint import assign_tensors, find_weights, read_json, read_weights
from fastea.config import FasteaError, ModelConfig, rope_settings, rope_table
from fastea.linear import Linear
from fastea.llama import DecoderLayer, Llama
from fastea.quantized import Quantizer


class EagleHead(nn.Module):
    """fc, one decoder layer, and the rows of the target's LM head that it may propose.

    draft_ids: ascending target ids of the draft vocabulary [Vd] int64, None = the target's whole vocabulary.
    `bind` gives it the target's embedding and LM head before use.
    """

    rope: torch.Tensor

    def __init__(self, config: ModelConfig, fc_bias: bool, qkv_bias: bool, draft_ids: torch.Tensor | None = None):
        super().__init__()
        self.config, self.draft_ids = config, draft_ids
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layer = DecoderLayer(config, input_norm=False, qkv_bias=qkv_bias)
        self.card: dict[str, Any] = {}  # training record: data, losses, acceptance
        self.quantizer: Quantizer | None = None

    def bind(self, target: Llama, max_seq_len: int) -> None:
        """Share the target's embedding and LM head (its draft vocabulary's rows, copied once)."""
        self.embed_weight = target.embed.weight.detach()  # a plain tensor: no part of this module's own state
        device = self.embed_weight.device
        self.lm: Linear = target.lm_head
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(device)
            self.lm = target.lm_head.subset(self.draft_ids)
        if self.quantizer and self.quantizer.packs and type(self.lm) is Linear:
            self.quantizer.place(self, "lm.weight", self.lm.weight)
        table = rope_table(self.config, max_seq_len + TREE_SLACK)
        self.register_buffer("rope", table.to(device), persistent=False)

    @property
    def ids(self) -> torch.Tensor:
        """Target ids of the draft vocabulary [Vd]."""
        if self.draft_ids is not None:
            return self.draft_ids
        return torch.arange(self.config.vocab_size, device=self.embed_weight.device)

    def new_cache(self, batch: int, max_seq_len: int, device: str | None = None, rows: int = TREE_SLACK) -> KVCache:
        """rows: that one drafted tree takes."""
        c, like = self.config, self.layer.mlp_norm.weight
        limit = max_seq_len + max(0, rows - TREE_SLACK)
        return KVCache(1, batch, c.num_kv_heads, limit, c.head_dim, like.dtype, device or like.device)

    def forward(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        start: torch.Tensor,
        words: torch.Tensor | None,
        offset: int,
        cache: KVCache,
    ) -> torch.Tensor:
        """tokens, positions: [B, R]; features: [B, R, h] -> predicted features [B, R, h].

        Writes cache rows start + offset + r; words (or lists) as in `fastea.kernels.attention.attend`.
        """
        x = self.fc(torch.cat((F.embedding(tokens, self.embed_weight), features), dim=-1))
        return self.layer(x, self.rope[positions], cache.keys[0], cache.values[0], start, words, offset, None)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Predicted features [..., h] -> fp32 logits over the draft vocabulary [..., Vd]."""
        return self.lm(features).float()

    def top(self, scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` best of the draft vocabulary, best first. [..., Vd] -> values and indices [..., count]."""
        values, indices = scores.topk(count, dim=-1)
        return values, indices

    def target_ids(self, draft: torch.Tensor) -> torch.Tensor:
        """Draft vocabulary indices -> target token ids."""
        return draft if self.draft_ids is None else self.draft_ids[draft]


# Settings of a head's config.json that would change the maths, with the only value that is implemented.
_FIXED = {"hidden_act": "silu", "norm_before_residual": False, "norm_output": False}


def load_head(folder: str | Path, target: Llama, quantizer: Quantizer, kind: type[EagleHead] = EagleHead) -> EagleHead:
    """Read an EAGLE-1 head folder (config.json, safetensors or weights-only .bin) for this target.

    quantizer: how its linear weights are kept, and its copy of the draft vocabulary's LM head rows. Presence of
    biases, KV heads and widths are read off the tensors; names may carry "model." or "eagle.".
    Raises FasteaError for another architecture, a missing or unexpected tensor, or sizes that do not fit.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FasteaError(f"{folder}: no such head; give a folder with config.json and weights")
    raw = read_json(folder / "config.json")
    state = {}
    for name, tensor in read_weights(find_weights(folder)):
        name = name.removeprefix("module.").removeprefix("eagle.").removeprefix("model.")
        if not name.endswith("rotary_emb.inv_freq"):
            state[name] = tensor
    if any(n.startswith("midlayer.") for n in state) or "d2t" in state:
        raise FasteaError(f"{folder}: an EAGLE-3 head; this version runs EAGLE-1 and EAGLE-2 heads")
    fc, q, k = (
        state.get(n) for n in ("fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight")
    )
    gate = state.get("layers.0.mlp.gate_proj.weight")
    if fc is None or q is None or k is None or gate is None:
        raise FasteaError(
            f"{folder}: not an EAGLE-1 head (fc.weight and layers.0.* are needed, it has {sorted(state)[:6]})"
        )
    for key, value in _FIXED.items():
        if raw.get(key, value) != value:
            raise FasteaError(f"{folder}: {key} = {raw[key]!r} is not supported in an EAGLE-1 head")
    hidden, vocab = fc.shape[0], raw.get("vocab_size")
    wanted = target.config
    if hidden != wanted.hidden_size or fc.shape[1] != 2 * hidden:
        raise FasteaError(
            f"{folder}: the head's width is {tuple(fc.shape)}, the target needs "
            f"({wanted.hidden_size}, {2 * wanted.hidden_size}); it belongs to another model"
        )
    if vocab is not None and vocab != wanted.vocab_size:
        raise FasteaError(
            f"{folder}: the head's vocabulary has {vocab} ids, the target's {wanted.vocab_size}; "
            "it belongs to another model"
        )
    try:
        heads = int(raw.get("num_attention_heads") or wanted.num_heads)
        head_dim = int(raw.get("head_dim") or q.shape[0] // heads)
        eps, reach = float(raw.get("rms_norm_eps", 1e-6)), int(raw.get("max_position_embeddings") or 2048)
        theta, scaling = rope_settings(raw, reach, str(folder))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FasteaError(f"{folder / 'config.json'}: a value is not what it should be ({error})") from None
    if scaling is not None:
        raise FasteaError(f"{folder}: rope_scaling = {scaling.kind!r} is not supported in an EAGLE-1 head")
    if heads * head_dim != q.shape[0] or k.shape[0] % head_dim:
        raise FasteaError(f"{folder}: q_proj has {q.shape[0]} rows, not {heads} heads of {head_dim}")
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=gate.shape[0],
        num_layers=1,
        num_heads=heads,
        num_kv_heads=k.shape[0] // head_dim,
        head_dim=head_dim,
        vocab_size=wanted.vocab_size,
        norm_eps=eps,
        rope_theta=theta,
        max_position=reach,
    )
    draft_ids = state.pop("draft_ids", None)
    if draft_ids is not None and not bool(
        draft_ids.numel() and (draft_ids.diff() > 0).all() and draft_ids[0] >= 0 and draft_ids[-1] < wanted.vocab_size
    ):
        raise FasteaError(f"{folder}: draft_ids must be ascending ids below {wanted.vocab_size}")
    embedding = state.pop("embed_tokens.weight", None)  # a frozen copy of the target's
    if embedding is not None and tuple(embedding.shape) != tuple(target.embed.weight.shape):
        raise FasteaError(
            f"{folder}: the head's embedding is {tuple(embedding.shape)}, "
            f"the target's {tuple(target.embed.weight.shape)}; it belongs to another model"
        )
    with torch.device("meta"):
        head = kind(config, "fc.bias" in state, "layers.0.self_attn.q_proj.bias" in state, draft_ids)
    assign_tensors(head, ((n.replace("layers.0.", "layer."), t) for n, t in state.items()), quantizer, str(folder))
    head.quantizer = quantizer
    head.card = raw.get("fastea", {})
    return head.eval()


def save_head(head: EagleHead, folder: Path, card: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json (published keys, our card under "fastea") and model.safetensors (published names)."""
    from safetensors.torch import save_file

    c, layer = head.config, head.layer
    q, k, v = layer.qkv.weight.split([n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)])
    gate, up = layer.gate_up.weight.chunk(2)
    tensors = {
        "fc.weight": head.fc.weight,
        "layers.0.self_attn.q_proj.weight": q,
        "layers.0.self_attn.k_proj.weight": k,
        "layers.0.self_attn.v_proj.weight": v,
        "layers.0.self_attn.o_proj.weight": layer.o.weight,
        "layers.0.mlp.gate_proj.weight": gate,
        "layers.0.mlp.up_proj.weight": up,
        "layers.0.mlp.down_proj.weight": layer.down.weight,
        "layers.0.post_attention_layernorm.weight": layer.mlp_norm.weight,
    }
    if head.fc.bias is not None:
        tensors["fc.bias"] = head.fc.bias
    plain = {name: t.detach().to(dtype).contiguous() for name, t in tensors.items()}
    if head.draft_ids is not None:
        plain["draft_ids"] = head.draft_ids
    folder.mkdir(parents=True, exist_ok=True)
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(head, folder, card)


def write_config(head: EagleHead, folder: Path, card: dict[str, Any]) -> None:
    """The head's config.json with its card."""
    c = head.config
    config = {
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
        "fastea": card,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
