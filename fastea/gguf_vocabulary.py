"""The vocabulary inside a GGUF file: byte-level BPE or sentencepiece."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastea.config import FasteaError
from fastea.tokenizer import Tokenizer, from_fast, from_sentencepiece

# GGUF names the splitting rule of byte-level vocabularies by one word.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_GGUF_SPLITS: dict[str, list[Any]] = {
    "smollm": ["digits"],
    "gpt-2": [],
    "llama-bpe": [_LLAMA3],
    "llama3": [_LLAMA3],
}


def from_gguf(meta: dict[str, Any], where: str, config_stops: Iterable[int]) -> Tokenizer:
    """The vocabulary inside a GGUF file: byte-level BPE ("gpt2") or sentencepiece ("llama")."""
    tokens, types = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type")
    kind = meta.get("tokenizer.ggml.model")
    if not tokens or not types or len(tokens) != len(types) or kind not in ("gpt2", "llama"):
        raise FasteaError(f"{where}: the tokenizer {kind!r} is not supported (gpt2 and llama are)")
    rule = meta.get("tokenizer.ggml.pre", "gpt-2")

    def text_of(name: str) -> str:
        i = meta.get(f"tokenizer.ggml.{name}_token_id")
        if i is not None and not 0 <= i < len(tokens):
            raise FasteaError(f"{where}: {name}_token_id is {i}, the vocabulary has {len(tokens)} ids")
        return tokens[i] if i is not None else ""

    adds_bos = meta.get("tokenizer.ggml.add_bos_token", kind == "llama" or rule.startswith("llama"))
    settings: dict[str, Any] = {
        "bos_id": meta.get("tokenizer.ggml.bos_token_id") if adds_bos else None,
        "stop_ids": set(config_stops),
        "template": meta.get("tokenizer.chat_template"),
        "markers": {"bos_token": text_of("bos"), "eos_token": text_of("eos")},
    }
    if kind == "llama":
        return from_sentencepiece(_sentencepiece_proto(meta), where, **settings)
    if rule not in _GGUF_SPLITS:
        raise FasteaError(f"{where}: the pre-tokenizer {rule!r} is not supported ({', '.join(_GGUF_SPLITS)} are)")
    tokenizer = from_fast(_byte_level_bpe(meta), **settings)
    for i in range(len(tokens)):
        if types[i] == 5:  # unused: the vocabulary's padding
            tokenizer.pieces[i] = b""
    return tokenizer


def save_gguf_vocabulary(meta: dict[str, Any], where: str, folder: Path) -> None:
    """Write the vocabulary inside a GGUF file as a Hugging Face folder's files, which `from_folder` reads."""
    tokenizer = from_gguf(meta, where, ())
    config: dict[str, Any] = {name: text for name, text in tokenizer.markers.items() if text}
    config["add_bos_token"] = tokenizer.bos_id is not None
    if tokenizer.template:
        config["chat_template"] = tokenizer.template
    if meta["tokenizer.ggml.model"] == "llama":
        (folder / "tokenizer.model").write_bytes(_sentencepiece_proto(meta))
    else:
        _byte_level_bpe(meta).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")


def _byte_level_bpe(meta: dict[str, Any]) -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    rule = meta.get("tokenizer.ggml.pre", "gpt-2")
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges", [])]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=rule.startswith("llama"))
    )
    splits: list[Any] = []
    for step in _GGUF_SPLITS[rule]:
        if step == "digits":
            splits.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            splits.append(pre_tokenizers.Split(tokenizers.Regex(step), "isolated"))
    by_regex = not any(s != "digits" for s in _GGUF_SPLITS[rule])
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_regex))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    added = [(t, kind == 3) for t, kind in zip(tokens, types, strict=True) if kind in (3, 4)]  # control, user-defined
    backend.add_tokens([tokenizers.AddedToken(t, special=control, normalized=False) for t, control in added])
    return backend


def _sentencepiece_proto(meta: dict[str, Any]) -> bytes:
    """A sentencepiece ModelProto (BPE with byte fallback), written by hand: the wire format is a few lines."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    scores = meta.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    add_space = bool(meta.get("tokenizer.ggml.add_space_prefix", True))

    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    def field(number: int, payload: bytes | int) -> bytes:
        if isinstance(payload, int):
            return varint(number << 3) + varint(payload)
        return varint(number << 3 | 2) + varint(len(payload)) + payload

    proto = b""
    for token, score, kind in zip(tokens, scores, types, strict=True):
        body = field(1, token.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + field(3, int(kind))
        proto += field(1, body)
    trainer = field(3, 2) + field(4, len(tokens)) + field(35, 1)  # model_type BPE, vocab_size, byte_fallback
    normalizer = field(1, b"identity") + field(3, int(add_space)) + field(4, 0) + field(5, 1)
    return proto + field(2, trainer) + field(3, normalizer)
