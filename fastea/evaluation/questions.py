"""Question files: one JSON object a line, FastChat's {"turns": [...], "category": ...} or {"prompt": ...}."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastea.config import FasteaError
from fastea.training.data import read_json_lines


@dataclass(frozen=True)
class Question:
    """task: which file it is from; number: its place there; turns: what the user says, one after the other."""

    task: str
    number: int
    category: str
    turns: tuple[str, ...]


def read_questions(paths: list[Path], limit: int | None = None) -> list[Question]:
    """The first `limit` questions of every file. A file named question.jsonl is known by its folder."""
    found = []
    for path in paths:
        task = path.parent.name if path.stem == "question" and path.parent.name else path.stem
        for number, row in enumerate(read_json_lines(path)[:limit]):
            turns = row.get("turns") or [row.get("prompt")]
            if not (
                isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)
            ):
                raise FasteaError(f"{path}: every line must have 'turns' or a 'prompt', texts that are not empty")
            found.append(Question(task, number, str(row.get("category", task)), tuple(turns)))
    return found
