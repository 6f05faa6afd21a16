"""Plain and speculative decoding of the same questions in turn: speedup, tokens per round, acceptance of a chain."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from tqdm import tqdm

from fastea.acceptance import AcceptanceTable
from fastea.answer import Output
from fastea.evaluation.questions import Question
from fastea.generator import Generator

Record = dict[str, Any]
DEFINITIONS = """\
- speedup: mean over the questions of speculative over plain decoding's tokens per second, one question at a time, both
  measured in turn; prefill and compilation are not in it.
- tau: tokens per round, accepted drafts + 1, over all rounds (a round is one forward of the target).
- n-alpha: how often a drafted token is accepted, given that it follows n accepted ones that the head drafted itself, on
  a chain of five.
"""


def ask(
    plain: Generator, fast: Generator, chain: Generator | None, question: Question, options: dict[str, Any]
) -> Record:
    """One question, all of its turns, plain and speculatively, in the same way: each goes on with its own answers.
    chain: also drafts the first turn by a chain, for n-alpha."""
    record: Record = {"task": question.task, "category": question.category, "question": question.number, "turns": []}
    histories: dict[str, list[dict[str, str]]] = {"plain": [], "fast": []}
    for turn in question.turns:
        outputs: dict[str, Output] = {}
        for name, model in (("plain", plain), ("fast", fast)):
            history = histories[name]
            history.append({"role": "user", "content": turn})
            prompt = history if model.tokenizer.template else turn
            output = model.generate(prompt, **options)
            assert isinstance(output, Output)
            history.append({"role": "assistant", "content": output.text})
            outputs[name] = output
        record["turns"].append(
            {
                "context": outputs["fast"].prompt_tokens,
                "equal": outputs["plain"].ids == outputs["fast"].ids,
                "accepted": outputs["fast"].accepted,
                **{name: [max(0, o.new_tokens - 1), round(o.decode_s, 4)] for name, o in outputs.items()},
            }
        )
    if chain:
        table = AcceptanceTable(chain.tree)
        chain.generate([question.turns[0]], observe=table.add, **options)
        record["chain"] = [table.hits[1:, 0].tolist(), table.trials[1:, 0].tolist()]
    return record


def run(
    plain: Generator,
    fast: Generator,
    chain: Generator | None,
    questions: list[Question],
    temperatures: list[float],
    options: dict[str, Any],
    known: list[Record],
    keep: Callable[[Record], None],
) -> list[Record]:
    """All questions at all temperatures that are not among `known` yet; `keep` is given every new record."""
    records = list(known)
    done = {(r["temperature"], r["task"], r["question"]) for r in known}
    jobs = [(t, q) for t in temperatures for q in questions if (t, q.task, q.number) not in done]
    warm: set[float] = set()
    for temperature, question in tqdm(jobs, unit="question"):
        settings = {**options, "temperature": temperature, "seed": options.get("seed", 0)}
        if temperature not in warm:  # compiled, and the caches touched
            warm.add(temperature)
            for model in (plain, fast, chain):
                if model:
                    model.generate(question.turns[0], **(settings | {"max_new_tokens": 8}))
        records.append({"temperature": temperature} | ask(plain, fast, chain, question, settings))
        keep(records[-1])
    return records


def summary(records: Iterable[Record]) -> Record:
    """Figures over some records."""
    rows = list(records)
    turns = [turn for record in rows for turn in record["turns"]]
    speeds = []
    for record in rows:
        pair = []
        for name in ("fast", "plain"):
            tokens, seconds = (sum(turn[name][i] for turn in record["turns"]) for i in (0, 1))
            pair.append(tokens / seconds if seconds else 0.0)
        if pair[0] and pair[1]:
            speeds.append((pair[0], pair[1]))
    rounds = sum(len(turn["accepted"]) for turn in turns)
    result: Record = {
        "questions": len(rows),
        "speedup": round(statistics.mean(a / b for a, b in speeds), 3) if speeds else None,
        "plain_tokens_per_s": round(statistics.mean(b for _, b in speeds), 2) if speeds else None,
        "tokens_per_s": round(statistics.mean(a for a, _ in speeds), 2) if speeds else None,
        "tau": round(1 + sum(sum(turn["accepted"]) for turn in turns) / rounds, 3) if rounds else None,
        "equal": f"{sum(turn['equal'] for turn in turns)} of {len(turns)}",
    }
    chains = [record["chain"] for record in rows if "chain" in record]
    if chains:
        hits, trials = ([sum(values) for values in zip(*part, strict=True)] for part in zip(*chains, strict=True))
        result["alpha"] = [round(h / t, 3) if t else None for h, t in zip(hits, trials, strict=True)]
    return result


def tables(records: list[Record]) -> dict[str, dict[str, Record]]:
    """By temperature: by task, and where there is one task by category, and in all."""
    groups: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    single = len({record["task"] for record in records}) == 1
    for record in records:
        kind = f"T = {record['temperature']:g}"
        groups[kind][record["category"] if single else record["task"]].append(record)
        groups[kind]["in all"].append(record)
    result = {}
    for kind, group in groups.items():
        result[kind] = {name: summary(rows) for name, rows in group.items() if name != "in all"}
        result[kind]["in all"] = summary(group["in all"])
    return result


def markdown(found: dict[str, dict[str, Record]]) -> str:
    text = ""
    for kind, rows in found.items():
        text += (
            f"### {kind}\n\n| | questions | speedup | tokens/s | plain | tau | n-alpha, n = 0 .. | equal answers |\n"
        )
        text += "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        for name, row in rows.items():
            alpha = " ".join("-" if a is None else f"{a:.2f}" for a in row.get("alpha", []))
            cells = [name, row["questions"], row["speedup"], row["tokens_per_s"], row["plain_tokens_per_s"], row["tau"]]
            text += f"| {' | '.join(map(str, [*cells, alpha or '-', row['equal']]))} |\n"
        text += "\n"
    return text


def histogram(records: list[Record]) -> dict[int, int]:
    """How many rounds yielded so many tokens."""
    counts = Counter(n + 1 for record in records for turn in record["turns"] for n in turn["accepted"])
    return dict(sorted(counts.items()))
