"""Where an answer stops, its text and its numbers. One character is one token here, or one byte is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import byte_tokenizer, tiny_target, write_json
from fastea.answer import Answer, Output
from fastea.generator import Generator
from fastea.tokenizer import Tokenizer, from_folder

LETTERS = byte_tokenizer(90)
BYTES = Tokenizer(lambda text: list(text.encode()), [bytes([b]) for b in range(256)], {})


def answered(
    tokens: Sequence[int],
    size: int,
    *,
    end: Sequence[int] = (),
    stops: Sequence[str] = (),
    limit: int = 1000,
    tokenizer: Tokenizer = LETTERS,
) -> tuple[Output, list[str]]:
    """An answer whose tokens arrive `size` in a round, interrupted where they run out; and what was streamed."""
    answer = Answer(tokenizer, frozenset(end), stops, limit)
    pieces = [answer.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    return answer.output, [*pieces, answer.interrupt()]


# End ids


@pytest.mark.parametrize("size", [1, 3, 8, 21])
@pytest.mark.parametrize("j", range(21))
def test_end_id_anywhere_in_a_block(j: int, size: int) -> None:
    """Case 5: nothing after the end id is kept, streamed or counted, wherever in a block it comes."""
    tokens = list(range(21))
    text = "".join(chr(33 + i) for i in range(j))
    output, pieces = answered(tokens, size, end=[j, 20])
    assert output.ids == tokens[: j + 1]
    assert output.new_tokens == j + 1
    assert output.text == "".join(pieces) == text
    assert output.finish_reason == "stop"
    assert not any(pieces[j // size + 1 :])


def test_first_of_several_end_ids() -> None:
    output, pieces = answered([4, 7, 2, 5], 4, end=[2, 7])
    assert (output.ids, output.text, pieces) == ([4, 7], "%", ["%", ""])


def test_nothing_after_the_end() -> None:
    """A finished answer takes no more tokens and cannot be interrupted."""
    answer = Answer(LETTERS, frozenset([2]), [], 10)
    assert answer.push([1, 2, 3]) == '"'
    assert answer.finished
    assert answer.push([4, 5]) == answer.interrupt() == ""
    assert (answer.output.ids, answer.output.text, answer.output.finish_reason) == ([1, 2], '"', "stop")


# Stop strings


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("oneENDtwo", ["END"], "one"),
        ("oneENENDtwo", ["END"], "oneEN"),  # its beginning repeats
        ("ENDEND", ["END"], ""),
        ("ababac!", ["abac"], "ab"),  # overlaps with itself
        ("aaab!", ["aab"], "a"),
        ("xyzw", ["yzw", "xy"], ""),  # the first to match, not the first in the list
        ("abcde", ["bc", "bcd"], "a"),
        ("abcde", ["cd", "abcd"], ""),  # two end at once: the longer
        ("ENabENDc", ["END", "ab"], "EN"),
        ("oneEN", ["END"], "oneEN"),  # never completed
        ("oneENx", ["END", ""], "oneENx"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_stop_strings(text: str, stops: list[str], expected: str, size: int) -> None:
    output, pieces = answered(LETTERS.encode_text(text), size, stops=stops)
    assert output.text == "".join(pieces) == expected
    assert output.finish_reason == ("interrupted" if expected == text else "stop")


@settings(max_examples=150, deadline=None)
@given(text=st.text("ab", max_size=14), stops=st.lists(st.text("ab", min_size=1, max_size=4)), size=st.integers(1, 5))
def test_any_stop_strings(text: str, stops: list[str], size: int) -> None:
    """As plain Python has it: read letter by letter, cut where a stop string first is whole."""
    heard = next((n for n in range(len(text) + 1) if any(s in text[:n] for s in stops)), None)
    expected = text if heard is None else text[: min(text.find(s) for s in stops if s in text[:heard])]
    output, pieces = answered(LETTERS.encode_text(text), size, stops=stops)
    assert output.text == "".join(pieces) == expected
    assert output.new_tokens == (len(text) if heard is None else heard)
    assert not any(s in output.text for s in stops)


def test_held_back_and_released() -> None:
    """What could become a stop string waits, and comes out as soon as it cannot; an end id lets it out too."""
    _, pieces = answered(LETTERS.encode_text("aENxEENz"), 1, stops=["END"])
    assert pieces == ["a", "", "", "ENx", "", "E", "", "ENz", ""]
    output, pieces = answered([*LETTERS.encode_text("aEN"), 0], 1, end=[0], stops=["END"])
    assert pieces == ["a", "", "", "EN", ""]
    assert (output.text, output.finish_reason) == ("aEN", "stop")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_stop_string_of_broken_characters(size: int) -> None:
    """Byte tokens: a stop string whose characters are cut by the rounds."""
    output, pieces = answered(list("ça né\U0001f600x".encode()), size, stops=["é\U0001f600"], tokenizer=BYTES)
    assert output.text == "".join(pieces) == "ça n"
    assert output.new_tokens == len("ça né\U0001f600".encode())


# Limits


@pytest.mark.parametrize("size", [1, 2, 5])
def test_limit(size: int) -> None:
    """Cut inside a block; what was held back is let out."""
    output, pieces = answered(LETTERS.encode_text("abENDz"), size, stops=["END"], limit=4)
    assert (output.text, output.new_tokens, output.finish_reason) == ("abEN", 4, "length")
    assert "".join(pieces) == "abEN"


def test_limit_and_end_together() -> None:
    """What the last possible token completes is a stop."""
    assert answered([1, 2, 3], 3, end=[2], limit=2)[0].finish_reason == "stop"
    output, _ = answered(LETTERS.encode_text("aENDb"), 5, stops=["END"], limit=4)
    assert (output.text, output.finish_reason) == ("a", "stop")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_character_over_rounds_and_the_limit(size: int) -> None:
    """Case 21: a character comes whole, or as one replacement mark where the limit cuts it."""
    tokens = list("a\U0001f600".encode())
    for limit, text in ((1, "a"), (2, "a\ufffd"), (3, "a\ufffd"), (4, "a\ufffd"), (5, "a\U0001f600")):
        output, pieces = answered(tokens, size, limit=limit, tokenizer=BYTES)
        assert output.text == "".join(pieces) == text
        assert (output.new_tokens, output.finish_reason) == (limit, "length")
    _, pieces = answered(tokens, 1, tokenizer=BYTES)
    assert pieces == ["a", "", "", "", "\U0001f600", ""]


def test_interrupt() -> None:
    """Lets out what was held back, once; the output holds what there is."""
    answer = Answer(BYTES, frozenset(), ["END"], 100)
    assert answer.push(b"abEN\xf0\x9f") == "ab"
    assert answer.output.finish_reason == "interrupted"
    assert answer.interrupt() == "EN\ufffd"
    assert answer.interrupt() == answer.push(b"more") == ""
    assert (answer.output.text, answer.output.new_tokens) == ("abEN\ufffd", 6)
    assert answer.finished


# Numbers


def test_tokens_per_round() -> None:
    """Case 13: accepted draft tokens and the target's own. Two accepted in every round are 3.0."""
    assert Output(rounds=20, accepted=[2] * 20).tokens_per_round == 3.0
    assert Output(rounds=4, accepted=[0, 1, 0, 5]).tokens_per_round == 2.5
    assert Output(rounds=3, accepted=[0, 0, 0]).tokens_per_round == 1.0
    assert Output().tokens_per_round == 0.0


def test_tokens_per_second() -> None:
    """Case 13: tokens, not pieces; the first token belongs to the prefill."""
    assert Output(ids=[5, 6, 7], decode_s=0.5).tokens_per_s == 4.0
    assert Output(ids=[5], prefill_s=1.0).tokens_per_s == 0.0
    assert Output(decode_s=1.0).tokens_per_s == 0.0


# Stop ids


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": [2, 7]}, {2, 7, 9}),
        ({"eos_token_id": 7}, {2, 7, 9}),
        ({"eos_token_id": None}, {2, 9}),
        ({}, {2, 9}),
        (None, {2, 9}),
    ],
)
def test_stop_ids_from_every_file(
    llama_model: bytes, tmp_path: Path, generation: dict[str, object] | None, expected: set[int]
) -> None:
    """Case 23: the union of config.json's (2), generation_config.json's and the tokenizer's (9)."""
    (tmp_path / "tokenizer.model").write_bytes(llama_model)
    marker = {"content": "<|end|>", "special": True}
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": marker, "added_tokens_decoder": {"9": marker}})
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    assert from_folder(tmp_path, (2,)).stop_ids == expected


def test_ignore_eos() -> None:
    """Case 23: the config's and the tokenizer's end ids stop; ignore_eos ignores every one; the text hides them."""

    def generate(config: Sequence[int], tokenizer: Sequence[int], ignore_eos: bool) -> Output:
        model = tiny_target(eos_ids=tuple(config))
        model.set_context(64)
        generator = Generator(model, byte_tokenizer(64, tuple(tokenizer)), None, max_seq_len=64)
        return generator.generate([1, 2, 3], max_new_tokens=8, ignore_eos=ignore_eos)

    plain = generate([], [], False)
    assert (plain.new_tokens, plain.finish_reason) == (8, "length")
    early, late = plain.ids[2], plain.ids[5]
    assert plain.ids.index(early) == 2 and plain.ids.index(late) == 5
    for config, tokenizer in (([early], [late]), ([late], [early])):
        output = generate(config, tokenizer, False)
        assert (output.ids, output.finish_reason) == (plain.ids[:3], "stop")
        assert output.text == plain.text[:2]
        assert generate(config, tokenizer, True).ids == plain.ids
