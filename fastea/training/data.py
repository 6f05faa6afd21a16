"""Prompts and answers -> token sequences with the rows that an EAGLE head is trained on."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastea.config import FasteaError
from fastea.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """One conversation: prompt and answer ids; tokens[answer_start:] are the answer, its end mark included."""

    tokens: tuple[int, ...]
    answer_start: int


def supervised_rows(length: int, answer_start: int) -> torch.Tensor:
    """Which rows p of a sequence are trained on, booleans [length].

    Row p reads feature f_p and token t_{p+1} and predicts token t_{p+2} (EAGLE paper, section 3.1), so it
    is supervised exactly if p + 2 is inside the sequence and belongs to the answer.
    """
    target = torch.arange(length) + 2
    return (target >= answer_start) & (target < length)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """JSON objects, one a line; .gz is unpacked on the way."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as f:
            rows = [json.loads(line) for line in f if line.strip()]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FasteaError(f"{path}: not readable as JSON lines ({error})") from None
    if not rows or not all(isinstance(r, dict) for r in rows):
        raise FasteaError(f"{path}: every line must be a JSON object, and there must be one")
    return rows


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Training data: JSON lines with a "prompt" each, and answers where there are some."""
    rows = read_json_lines(path)
    if not all(isinstance(r.get("prompt"), str) for r in rows):
        raise FasteaError(f"{path}: every line must be an object with a 'prompt' (and an 'answer')")
    return rows


def make_samples(rows: list[dict[str, Any]], tokenizer: Tokenizer, system: str | None, max_len: int) -> list[Sample]:
    """Answered prompts as the target saw them: its chat template, the answer, its end mark where it finished.

    Answers marked as looping and sequences longer than max_len tokens are left out.
    """
    samples = []
    for row in rows:
        if row.get("looping") or not row.get("answer"):
            continue
        prompt = tokenizer.encode_question(row["prompt"], system)
        answer = row.get("ids") or tokenizer.encode_text(row["answer"])
        if row.get("finished") and "ids" not in row and tokenizer.end_id is not None:
            answer = [*answer, tokenizer.end_id]
        if len(prompt) + len(answer) <= max_len:
            samples.append(Sample((*prompt, *answer), len(prompt)))
    return samples


def draft_vocabulary(samples: list[Sample], size: int) -> torch.Tensor:
    """The ids most frequent in the answers, ascending, int64 [min(size, distinct)]: what the head may propose."""
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(sample.tokens[sample.answer_start :])
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)), dtype=torch.int64)
