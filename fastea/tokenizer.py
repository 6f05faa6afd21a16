"""Text <-> ids: sentencepiece, tokenizer.json and GGUF vocabularies behind one small class, and chat templates.

Decoding works on bytes: every id stands for some bytes (none for control ids and for ids past the vocabulary),
a text is their concatenation read as UTF-8. So text can be cut anywhere and pieces always join to the whole.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastea.config import FasteaError, ids_of

Message = dict[str, str]


class Tokenizer:
    """One vocabulary.

    encode_text: ordinary text -> ids, markers in it stay text. encode_later: the same after a control marker, where
    that differs (no space is put before it). pieces: the bytes of every id. specials: control marker -> id.
    stop_ids: ids that end an answer. template: Jinja chat template or None. bos_id: put before raw prompts, None
    where the checkpoint adds none. strip_first_space: whether a text decoded from its start drops the space that
    sentencepiece puts before it.
    """

    def __init__(
        self,
        encode_text: Callable[[str], list[int]],
        pieces: list[bytes],
        specials: dict[str, int],
        *,
        bos_id: int | None = None,
        stop_ids: Iterable[int] = (),
        template: str | None = None,
        markers: dict[str, str] | None = None,
        strip_first_space: bool = False,
        encode_later: Callable[[str], list[int]] | None = None,
    ):
        self.encode_text, self.pieces, self.specials = encode_text, pieces, specials
        self.encode_later = encode_later or encode_text
        self.bos_id, self.stop_ids, self.template = bos_id, frozenset(stop_ids), template
        self.markers = markers or {}  # bos_token and eos_token, as templates name them
        self.strip_first_space = strip_first_space
        longest_first = sorted(specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if specials else None

    @property
    def end_id(self) -> int | None:
        """The id that ends a turn: the tokenizer's own end marker if it stops, else the lowest stop id."""
        own = self.specials.get(self.markers.get("eos_token", ""))
        return own if own in self.stop_ids else min(self.stop_ids, default=None)

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, restore: Callable[[str], str] = lambda s: s) -> list[int]:
        """Ids of a text in which control markers mean themselves. restore: applied to the ordinary stretches."""
        ids: list[int] = []
        for at, part in enumerate(self._split.split(text) if self._split else [text]):
            if part in self.specials:
                ids.append(self.specials[part])
            elif part:
                ids.extend((self.encode_later if at else self.encode_text)(restore(part)))
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt: control markers are honoured, and the checkpoint's BOS stands at its start exactly once."""
        ids = self.encode(text)
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def encode_question(self, text: str, system: str | None = None) -> list[int]:
        """A prompt in text: through the chat template, as it is where the checkpoint has none."""
        if self.template is None:
            if system is not None:
                raise FasteaError("a system message needs a chat template, and this checkpoint has none")
            return self.encode_prompt(text)
        messages = [{"role": "user", "content": text}]
        return self.encode_chat(messages if system is None else [{"role": "system", "content": system}, *messages])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The checkpoint's chat template over messages, ready for the answer. Markers inside a message are text."""
        if self.template is None:
            raise FasteaError("this checkpoint has no chat template; use --raw to continue the prompt as plain text")
        # Markers in messages are written with private characters while the template is rendered and cut up.
        text = "".join(m["content"] for m in messages)
        free = (chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in text)
        left, right = next(free), next(free)
        order = list(self.specials)
        hide = {marker: f"{left}{i}{right}" for i, marker in enumerate(order)}
        hidden = [{**m, "content": self._replace_markers(m["content"], hide)} for m in messages]
        rendered = self._render(hidden)
        placeholder = re.compile(f"{left}(\\d+){right}")
        ids = self.encode(rendered, lambda part: placeholder.sub(lambda m: order[int(m[1])], part))
        doubled = self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]
        if self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids[1:] if doubled else ids

    def _replace_markers(self, text: str, by: dict[str, str]) -> str:
        return self._split.sub(lambda m: by[m[0]], text) if self._split else text

    @functools.cached_property
    def _compiled_template(self) -> Any:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = raise_exception
        return environment.from_string(self.template or "")

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return str(self._compiled_template.render(messages=messages, add_generation_prompt=True, **self.markers))
        except Exception as error:  # a template is a program: it can fail in any way
            reason = " ".join(str(error).split())
            raise FasteaError(f"the chat template refuses these messages ({reason}); --raw works without it") from None

    def token_bytes(self, ids: Iterable[int]) -> bytes:
        count = len(self.pieces)
        return b"".join(self.pieces[i] for i in ids if 0 <= i < count)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids from its start; broken UTF-8 becomes replacement marks."""
        text = self.token_bytes(ids).decode("utf-8", "replace")
        return text[1:] if self.strip_first_space and text.startswith(" ") else text


class TextStream:
    """Text of a continuation as its ids arrive. The pieces join to decode(prompt + ids) without decode(prompt),
    however they are cut; an unfinished character is held back until it is whole or `finish` is called."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # after a prompt without text (a lone BOS) the text begins here, and with it the space that is dropped
        self._at_start = tokenizer.strip_first_space and bool(prompt) and not tokenizer.token_bytes(prompt)

    def push(self, ids: Iterable[int]) -> str:
        text = self._decoder.decode(self._tokenizer.token_bytes(ids))
        if text and self._at_start:
            self._at_start, text = False, text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    if all(c in _BYTES for c in piece):
        return bytes(_BYTES[c] for c in piece)
    return piece.encode()  # an added token, written as it is


def _metaspace(piece: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


def from_sentencepiece(model: bytes, where: str, **settings: Any) -> Tokenizer:
    """model: the contents of a tokenizer.model; where: its path, for messages."""
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise FasteaError(f"{where}: not a sentencepiece model ({' '.join(str(error).split())})") from None
    size = sp.GetPieceSize()
    silent = [sp.IsControl(i) or sp.IsUnknown(i) or sp.IsUnused(i) for i in range(size)]
    pieces = [b"" if silent[i] else _metaspace(sp.IdToPiece(i)) for i in range(size)]
    specials = {sp.IdToPiece(i): i for i in range(size) if sp.IsControl(i)}
    defaults = {
        "bos_id": sp.bos_id() if sp.bos_id() >= 0 else None,
        "stop_ids": [sp.eos_id()] if sp.eos_id() >= 0 else [],
        "strip_first_space": sp.Encode("a", out_type=str)[0].startswith("\u2581"),
    }
    return Tokenizer(lambda text: sp.Encode(text), pieces, specials, **(defaults | settings))


def from_fast(backend: Any, **settings: Any) -> Tokenizer:
    """A `tokenizers.Tokenizer` object. Its decoder says how ids stand for bytes."""
    described = json.loads(backend.to_str())
    kinds = json.dumps([described.get("decoder"), described.get("pre_tokenizer")])
    later = None
    if '"prepend_scheme": "first"' in kinds:  # a space before the text's first word only, not after each marker
        plain = json.dumps(described).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        later = _encoder(type(backend).from_str(plain))
    if '"ByteLevel"' in kinds:
        to_bytes, strip = _byte_level, False
    elif '"ByteFallback"' in kinds or '"Metaspace"' in kinds:
        to_bytes, strip = _metaspace, '"Strip"' in kinds or '"Metaspace"' in kinds
    else:
        raise FasteaError(f"tokenizer.json: the decoder {described.get('decoder')!r} is not supported")
    pieces = [b""] * backend.get_vocab_size(with_added_tokens=True)
    for piece, i in backend.get_vocab(with_added_tokens=True).items():
        if i >= len(pieces):
            pieces.extend([b""] * (i + 1 - len(pieces)))
        pieces[i] = to_bytes(piece)
    specials = {}
    for added in described.get("added_tokens", []):
        pieces[added["id"]] = b"" if added["special"] else added["content"].encode()
        if added["special"]:
            specials[added["content"]] = added["id"]

    return Tokenizer(_encoder(backend), pieces, specials, strip_first_space=strip, encode_later=later, **settings)


def _encoder(backend: Any) -> Callable[[str], list[int]]:
    """Ordinary text -> all its ids: markers stay text (ours are cut out before), nothing is cut or padded."""
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


def from_folder(folder: Path, config_stops: Iterable[int]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, else tokenizer.model, with tokenizer_config.json,
    chat_template.jinja and generation_config.json where they exist."""
    from fastea.checkpoint import check_file, read_json

    def optional(name: str) -> dict[str, Any]:
        return read_json(folder / name) if (folder / name).is_file() else {}

    config, generation = optional("tokenizer_config.json"), optional("generation_config.json")

    def marker(name: str) -> str | None:
        value = config.get(name)
        return value["content"] if isinstance(value, dict) else value

    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        try:
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise FasteaError(f"{folder / 'chat_template.jinja'}: not UTF-8") from None
    stops = {*config_stops, *ids_of(generation.get("eos_token_id"))}
    markers = {name: value for name in ("bos_token", "eos_token") if (value := marker(name))}

    def is_marker(added: str) -> bool:
        """Control markers by name or by look, which some checkpoints forget to declare special."""
        return added in markers.values() or bool(re.fullmatch(r"<[|\uff5c].*[|\uff5c]>", added))

    fast, model = folder / "tokenizer.json", folder / "tokenizer.model"
    if fast.is_file():
        import tokenizers

        check_file(fast)
        try:
            backend = tokenizers.Tokenizer.from_file(str(fast))
        except Exception as error:  # the library raises a bare Exception
            raise FasteaError(f"{fast}: not a tokenizer file ({error})") from None
        added = [t.content for t in backend.get_added_tokens_decoder().values() if not t.special]
        backend.add_special_tokens([t for t in added if is_marker(t)])
        tokenizer = from_fast(backend)
        default_bos = backend.encode("", add_special_tokens=True).ids  # what its post-processor puts first
        adds_bos = config.get("add_bos_token", bool(default_bos))
        bos = tokenizer.specials.get(markers.get("bos_token", ""), default_bos[0] if default_bos else None)
    elif model.is_file():
        check_file(model)
        tokenizer = from_sentencepiece(model.read_bytes(), str(model))
        bos, adds_bos = tokenizer.bos_id, config.get("add_bos_token", True)
        markers = {"bos_token": "<s>", "eos_token": "</s>"} | markers
        for i, entry in config.get("added_tokens_decoder", {}).items():
            if entry.get("special") or is_marker(entry["content"]):
                tokenizer.specials.setdefault(entry["content"], int(i))
        beyond = max(tokenizer.specials.values(), default=-1) + 1 - len(tokenizer)
        tokenizer.pieces.extend([b""] * beyond)  # they may be generated too: ids past the pieces never are
    else:
        raise FasteaError(f"{folder}: no tokenizer found (tokenizer.json or tokenizer.model)")
    eos = tokenizer.specials.get(markers.get("eos_token", ""))
    stops |= tokenizer.stop_ids | ({eos} if eos is not None else set())
    return Tokenizer(
        tokenizer.encode_text,
        tokenizer.pieces,
        tokenizer.specials,
        bos_id=bos if adds_bos else None,
        stop_ids=stops,
        template=template,
        markers=markers,
        strip_first_space=tokenizer.strip_first_space,
        encode_later=tokenizer.encode_later,
    )
