"""Measure exactness and acceptance over a question file.

    python scripts/evaluate.py exactness --questions question.jsonl --exact
    python scripts/evaluate.py acceptance --questions question.jsonl --tree eagle1

Question files hold one JSON object a line: FastChat's {"turns": [...], "category": ...} (first turns are used) or
{"prompt": ...}. exactness: speculative ids against plain ids; for each difference its position and the gap between
the plain run's two largest logits there (a small gap is a near-tie that rounding can turn). acceptance: tokens per
round = accepted draft tokens + 1, averaged over all rounds, in all and by category. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fastea.config import FasteaError
from fastea.generator import Generator
from fastea.loading import load
from fastea.training.data import read_json_lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=["exactness", "acceptance"])
    add("--questions", type=Path, required=True, help="JSON lines with 'turns' or 'prompt'")
    add("--limit", type=int, help="only the first questions")
    add("--max-new-tokens", type=int, default=64)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    for flag in ("--checkpoint", "--tree"):
        add(flag)
    add("--head", default="auto")
    add("--drafter", default="auto")
    add("--dtype", default="auto")
    add("--exact", action="store_true")
    args = parser.parse_args()
    try:
        print(json.dumps({"exactness": exactness, "acceptance": acceptance}[args.what](args)))
    except FasteaError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    return 0


def questions(args: argparse.Namespace) -> list[dict[str, str]]:
    """prompt and category of every question."""
    rows = read_json_lines(args.questions)[: args.limit]
    out = []
    for row in rows:
        turns = row.get("turns") or [row.get("prompt")]
        if not isinstance(turns[0], str):
            raise FasteaError(f"{args.questions}: every line must have 'turns' or a 'prompt'")
        out.append({"prompt": turns[0], "category": str(row.get("category", "all"))})
    return out


def build(args: argparse.Namespace, **changes: Any) -> Generator:
    settings = {name: getattr(args, name) for name in ("checkpoint", "head", "drafter", "tree", "dtype", "exact")}
    return load(**(settings | changes))


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}


def exactness(args: argparse.Namespace) -> dict[str, Any]:
    """How many questions get equal ids; the first difference of the others with its top-2 gap."""
    speculative = build(args)
    plain = speculative.plain()
    asked, differences, positions = questions(args), [], 0
    for i, question in enumerate(tqdm(asked, unit="question")):
        a = plain.generate(question["prompt"], **options(args)).ids
        b = speculative.generate(question["prompt"], **options(args)).ids
        positions += len(a)
        if a != b:
            at = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            gap = top_gap(plain, question["prompt"], a[:at])
            differences.append({"question": i, "position": at, "gap": round(gap, 6)})
            print(f"question {i}: first difference at token {at}, top-2 gap {gap:.2e}")
    equal = len(asked) - len(differences)
    print(f"{equal} of {len(asked)} equal, {positions} tokens compared ({speculative.info}, exact {args.exact})")
    return {
        "equal": equal,
        "questions": len(asked),
        "tokens": positions,
        "differences": differences,
        **speculative.info,
    }


@torch.inference_mode()
def top_gap(generator: Generator, prompt: str, ids: list[int]) -> float:
    """Difference of the two largest logits after prompt + ids."""
    state = generator.state(1)
    text = generator.encode(prompt) + ids
    generator.prefill(state, 0, text)
    best = generator.model.logits(state.features[0, 0]).topk(2).values
    return float(best[0] - best[1])


def acceptance(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per round, by category and in all; tokens per second of this run beside it."""
    generator = build(args)
    rounds: dict[str, int] = defaultdict(int)
    tokens: dict[str, int] = defaultdict(int)
    for question in tqdm(questions(args), unit="question"):
        output = generator.generate(question["prompt"], **options(args))
        for key in (question["category"], "in all"):
            rounds[key] += output.rounds
            tokens[key] += sum(output.accepted) + output.rounds
    rates = {key: round(tokens[key] / max(1, rounds[key]), 3) for key in rounds}
    print("| category | rounds | tokens per round |\n| --- | --- | --- |")
    for key, rate in rates.items():
        print(f"| {key} | {rounds[key]} | {rate:.2f} |")
    return {"tokens_per_round": rates, "rounds": dict(rounds), **generator.info}


if __name__ == "__main__":
    sys.exit(main())
