"""Files -> tensors. Hugging Face folders (safetensors or weights-only .bin, one file or shards) and GGUF.

Every tensor of the model must come from the files and every tensor of the files must be used: what is missing
or left over is an error that names it. Tensors go one by one into a model built on the meta device.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from fastea.config import FasteaError, ModelConfig, config_from_gguf, config_from_hf
from fastea.llama import Llama
from fastea.quantize.forms import QuantizedWeight
from fastea.quantize.imports import GGUF_SCHEMES, foreign, from_gguf_blocks
from fastea.quantized import KEY, Quantizer, Weight, Weights, fused, read_foreign, read_own

Tensors = Iterator[tuple[str, torch.Tensor]]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or one clear line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FasteaError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FasteaError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise FasteaError(f"{path}: a JSON object is expected, this is a {type(value).__name__}")
    return value


def check_file(path: Path) -> None:
    """Refuse what is no data at all: absent, empty, or a git-lfs pointer."""
    if not path.is_file():
        raise FasteaError(f"{path}: no such file")
    with path.open("rb") as f:
        head = f.read(64)
    if not head:
        raise FasteaError(f"{path}: the file is empty; download it again")
    if head.startswith(b"version https://git-lfs"):
        raise FasteaError(f"{path}: a git-lfs pointer, not the data; run 'git lfs pull' in its folder")


def check_safetensors(path: Path) -> None:
    """Compare a safetensors header with the file's size before anything is mapped or allocated."""
    check_file(path)
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, 100_000_000):
            raise FasteaError(f"{path}: not a safetensors file, or cut in its header (have {size} bytes)")
        try:
            header = json.loads(f.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            raise FasteaError(f"{path}: not a safetensors file (its header is not valid)") from None
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise FasteaError(f"{path}: truncated (expected {expected} bytes, have {size}); download it again")


def read_safetensors(path: Path) -> Tensors:
    check_safetensors(path)
    try:
        with safe_open(path, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a mapping
                yield name, f.get_tensor(name)
    except SafetensorError as error:
        raise FasteaError(f"{path}: not a valid safetensors file ({error})") from None


def read_bin(path: Path) -> Tensors:
    """A torch pickle in weights-only mode: code in it is refused, never run."""
    check_file(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise FasteaError(
            f"{path}: refused: not a plain file of tensors (its pickle is broken or would run code); "
            "convert it to safetensors where you trust it"
        ) from None
    except Exception as error:  # torch raises whatever the broken bytes lead to
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise FasteaError(f"{path}: truncated or not a torch file ({why})") from None
    if not isinstance(state, dict) or not all(isinstance(n, str) and torch.is_tensor(t) for n, t in state.items()):
        raise FasteaError(f"{path}: a dictionary of tensors is expected")
    yield from state.items()


def find_weights(folder: Path) -> list[Path]:
    """The weight files of a folder: a complete indexed set, else one file; safetensors before .bin."""
    absent: FasteaError | None = None
    for index, single in (
        ("model.safetensors.index.json", "model.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    ):
        if (folder / index).is_file():
            shards = read_json(folder / index).get("weight_map")
            names = sorted({str(n) for n in shards.values()}) if isinstance(shards, dict) else []
            missing = [n for n in names if not (folder / n).is_file()]
            if names and not missing:
                return [folder / n for n in names]
            absent = absent or FasteaError(f"{folder / index}: names {missing or 'no file'}, which the folder lacks")
        if (folder / single).is_file():
            return [folder / single]
    raise absent or FasteaError(f"{folder}: no weights found (model.safetensors, shards with an index, or .bin)")


def read_weights(paths: list[Path]) -> Tensors:
    for path in paths:
        yield from read_bin(path) if path.suffix == ".bin" else read_safetensors(path)


class Gguf:
    """A GGUF file: metadata and tensors under Hugging Face names."""

    def __init__(self, path: Path):
        import gguf

        class Reader(gguf.GGUFReader):
            """The library's reader over a plain array: slices of its np.memmap take four times as long to make."""

            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, np.asarray(value) if name == "data" else value)

        check_file(path)
        try:
            self.reader = Reader(path)
            self.meta = {name: _contents(field) for name, field in self.reader.fields.items()}
        except Exception as error:  # the library raises whatever the broken bytes lead to
            raise FasteaError(f"{path}: not a GGUF file, or truncated ({error})") from None
        self.path = path

    def tensors(self, config: ModelConfig, quant: str | None = None) -> Weights:
        """By Hugging Face name; rope_freqs, if there, under its own. F32, but blocks of quant's number of bits, and the
        embedding's (a tied LM head) and the LM head's of 8, stay as they are."""
        from gguf import dequantize

        for tensor in self.reader.tensors:
            kind, name = tensor.tensor_type.name, _gguf_name(tensor.name)
            scheme = GGUF_SCHEMES.get(kind)
            bits = "int8" if name in ("lm_head.weight", "model.embed_tokens.weight") else quant
            data: Weight
            if quant and scheme and f"int{scheme.bits}" == bits and tensor.data.ndim == 2:
                data = from_gguf_blocks(tensor.data, kind)
            else:
                try:
                    values = dequantize(tensor.data, tensor.tensor_type)
                except NotImplementedError:
                    raise FasteaError(
                        f"{self.path}: {tensor.name} has the type {kind}, which is not supported"
                    ) from None
                data = torch.from_numpy(values if values.flags.writeable else values.copy())
            if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF stores rotary pairs side by side
                heads = config.num_heads if "q_proj" in name else config.num_kv_heads
                if data.shape[0] != heads * config.head_dim:
                    raise FasteaError(f"{self.path}: {tensor.name} is {tuple(data.shape)}, not {heads} heads")
                rows = torch.arange(data.shape[0]).view(heads, config.head_dim // 2, 2).transpose(1, 2).flatten()
                data = data.select(rows) if isinstance(data, QuantizedWeight) else data[rows]
            yield name, data


def _contents(field: Any) -> Any:
    """A metadata field as a Python value; the library's own way decodes big string arrays part by part."""
    import gguf

    if field.types[:2] == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]:
        return [bytes(field.parts[i]).decode("utf-8", "replace") for i in field.data]
    return field.contents()


_GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gguf_name(name: str) -> str:
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    whole["output.weight"] = "lm_head.weight"
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4:
        return f"model.layers.{parts[1]}.{_GGUF_PARTS.get(parts[2], parts[2])}.{parts[3]}"
    return whole.get(name, name)


# Hugging Face's names inside a layer -> ours, with the order of the parts that are fused along the outputs.
_LAYER_PARTS = {
    "input_layernorm": ("attn_norm", 0, 1),
    "self_attn.q_proj": ("qkv", 0, 3),
    "self_attn.k_proj": ("qkv", 1, 3),
    "self_attn.v_proj": ("qkv", 2, 3),
    "self_attn.q_norm": ("q_norm", 0, 1),
    "self_attn.k_norm": ("k_norm", 0, 1),
    "self_attn.o_proj": ("o", 0, 1),
    "post_attention_layernorm": ("mlp_norm", 0, 1),
    "mlp.gate_proj": ("gate_up", 0, 2),
    "mlp.up_proj": ("gate_up", 1, 2),
    "mlp.down_proj": ("down", 0, 1),
    "block_sparse_moe.gate": ("router", 0, 1),
}
_EXPERT_PARTS = {"w1": ("gate_up", 0, 2), "w3": ("gate_up", 1, 2), "w2": ("down", 0, 1)}  # of Mixtral
_WHOLE = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "lm_head", "fc": "fc"}


def our_name(name: str) -> tuple[str, int, int] | None:
    """(our parameter, part, number of parts) for a Hugging Face tensor name, None if there is no such thing."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}", 0, 1
    found = re.fullmatch(r"(?:model\.)?(layers\.\d+|layer)\.(.+)", stem)  # "layer" is a head's only one
    if found is None:
        return None
    expert = re.fullmatch(r"block_sparse_moe\.experts\.(\d+)\.(w[123])", found[2])
    ours, part, count = _EXPERT_PARTS[expert[2]] if expert else _LAYER_PARTS.get(found[2], ("", 0, 0))
    where = f"{found[1]}.experts.{expert[1]}" if expert else found[1]
    return (f"{where}.{ours}.{kind}", part, count) if ours else None


def _named(ours: str, got: Collection[int]) -> str:
    """One of our parameters and, in brackets, Hugging Face's names of the parts of it that have not come."""
    stem = ours.rpartition(".")[0]
    parts = [name for name, part in _WHOLE.items() if part == stem]
    known = _EXPERT_PARTS if ".experts." in stem else _LAYER_PARTS
    parts += [name for name, (part, i, _) in known.items() if stem.endswith(f".{part}") and i not in got]
    return f"{ours} ({', '.join(parts)})" if parts else ours


def _part_shape(whole: torch.Size, part: int, count: int, config: ModelConfig) -> tuple[int, ...]:
    """Shape of one of the parts that are fused along the outputs: all, half (gate, up) or heads (q, k, v)."""
    if count == 3:
        return ((config.num_kv_heads if part else config.num_heads) * config.head_dim, *whole[1:])
    return (whole[0] // count, *whole[1:])


def assign_tensors(model: torch.nn.Module, tensors: Weights, quantizer: Quantizer, where: str) -> None:
    """Fill a meta-device model in place, fusing parts as they come. Raises FasteaError on any tensor that is
    unexpected, missing or of another shape."""
    wanted = dict(model.named_parameters())
    parts: dict[str, dict[int, Weight]] = {}
    unexpected: list[str] = []
    for name, tensor in tensors:
        target = (name, 0, 1) if name in wanted else our_name(name)
        if target is None or target[0] not in wanted:
            unexpected.append(name)
            continue
        ours, part, count = target
        shape = _part_shape(wanted[ours].shape, part, count, model.config)  # type: ignore[arg-type]
        if tuple(tensor.shape) != shape:
            raise FasteaError(f"{where}: {name} is {tuple(tensor.shape)}, where the configuration asks for {shape}")
        got = parts.setdefault(ours, {})
        got[part] = tensor
        if len(got) < count:
            continue
        whole = fused([got[i] for i in range(count)])
        del parts[ours], got, tensor  # at most one fused weight is held beside the model
        quantizer.place(model, ours, whole)
    if unexpected:
        raise FasteaError(f"{where}: unexpected tensors: {_some(unexpected)}")
    missing = [_named(ours, parts.get(ours, ())) for ours, p in model.named_parameters() if p.is_meta]
    if missing:
        raise FasteaError(f"{where}: missing tensors for: {_some(missing)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


class Checkpoint:
    """A model on disk: `config`, the folder or file it came from, and its tensors."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.gguf: Gguf | None = None
        self.quant: str | None = None  # what the file itself is quantized to; a GGUF file is as --quant wants it
        if self.path.is_file() or self.path.suffix == ".gguf":
            self.gguf = Gguf(self.path)
            self.config = config_from_gguf(self.gguf.meta, str(self.path))
            self.folder = self.path.parent
        elif self.path.is_dir():
            self.folder, where = self.path, str(self.path / "config.json")
            self.raw = read_json(self.path / "config.json")
            self.config = config_from_hf(self.raw, where)
            self.files = find_weights(self.path)
            stored = self.raw.get("quantization_config")
            self.foreign = foreign(stored, str(self.path)) if stored else None
            if KEY in self.raw:
                record = self.raw[KEY]
                self.quant = str(record.get("scheme")) if isinstance(record, dict) else "unknown"
            elif self.foreign:
                self.quant = self.foreign.name
        else:
            raise FasteaError(f"{self.path}: no such checkpoint; give a Hugging Face folder or a .gguf file")

    def tensors(self, quant: str | None) -> Weights:
        """(Hugging Face name, weight), shard by shard; rotary buffers of old files are left out. What is stored in
        `quant`'s bits comes as it is; a file that was quantized to other bits is refused."""
        if self.gguf:
            return self.gguf.tensors(self.config, quant)
        source = ((n, t) for n, t in read_weights(self.files) if not n.endswith("rotary_emb.inv_freq"))
        if self.quant and quant and quant != self.quant:
            by = self.foreign.method if self.foreign else "fastea"
            raise FasteaError(f"--quant {quant}: {self.path} was quantized by {by} to {self.quant}; leave --quant away")
        if KEY in self.raw:
            return read_own(source, self.raw[KEY], str(self.path))
        return read_foreign(source, self.foreign, str(self.path)) if self.foreign else source

    def load(self, quantizer: Quantizer, kind: type[Llama] = Llama) -> Llama:
        """The model, every parameter accounted for, kept as the quantizer decides."""
        model = self.load_into(quantizer, kind)
        model.lm_head.share(model.embed.weight)
        return model.eval()

    def load_into(self, quantizer: Quantizer, kind: type[Llama] = Llama) -> Llama:
        """Hand every parameter to the quantizer, which places it into the model that is returned."""
        with torch.device("meta"):
            model = kind(self.config)

        def tied(tensors: Weights) -> Weights:
            """Without an LM head of its own, a tied (or GGUF) model scores with its embedding."""
            embedding, own = None, False
            for name, tensor in tensors:
                if name == "rope_freqs.weight":
                    assert isinstance(tensor, torch.Tensor)
                    model.rope_factors = tensor.float()
                    continue
                embedding = tensor if name == "model.embed_tokens.weight" else embedding
                own = own or name == "lm_head.weight"
                yield name, tensor
            if not own and embedding is not None and (self.config.tied or self.gguf):
                yield "lm_head.weight", embedding

        assign_tensors(model, tied(self.tensors(quantizer.quant)), quantizer, str(self.path))
        return model


def fingerprint(model: Llama) -> list[float]:
    """64 embedding values spread over the vocabulary: the identity of a target in whatever precision it is stored."""
    weight = model.embed.weight
    rows = torch.linspace(0, weight.shape[0] - 1, 64).long()
    return [round(v, 5) for v in weight[rows.to(weight.device), weight.shape[1] // 2].float().tolist()]


def same_model(model: Llama, recorded: list[float]) -> bool:
    """Whether a recorded fingerprint is this model's, up to the rounding of 8-bit storage."""
    mine, other = torch.tensor(fingerprint(model)), torch.tensor(recorded)
    return mine.shape == other.shape and bool((mine - other).norm() <= 0.05 * other.norm())
