"""The target's own answers to training prompts, resumable."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tqdm import tqdm

from fastea.config import FasteaError
from fastea.generator import Generator
from fastea.runtime import can_compile, compiled, note
from fastea.sampling import Sampling
from fastea.training.data import read_lines
from fastea.training.decoding import Growing, decode, run_layer

SORTED = 8  # batches in which prompts of like length come together


def write_answers(
    target: Generator,
    prompts: list[str],
    out: Path,
    *,
    batch: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    system: str | None = None,
) -> None:
    """Append one JSON line a prompt to `out`: prompt, answer, ids (an end mark included), finished, looping (it is cut
    there). Answers already there are kept and a half-written last line is dropped, so an interrupted run goes on where
    it stopped. Prompts that leave no room for an answer within target.max_seq_len are left out. temperature 0 is
    greedy; above it, the likeliest 50 ids are drawn from."""
    Sampling(temperature)  # refuses what is not possible
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    out.write_text(whole, encoding="utf-8")
    answered = {row["prompt"] for row in read_lines(out)} if whole else set()
    encoded = {p: target.tokenizer.encode_question(p, system) for p in prompts if p not in answered}
    longest = target.max_seq_len - max_new_tokens
    if longest < 1:
        raise FasteaError(f"answers of {max_new_tokens} tokens leave no room for prompts within {target.max_seq_len}")
    todo = [(p, ids) for p, ids in encoded.items() if 0 < len(ids) <= longest]
    if missing := len(encoded) - len(todo):
        note(f"{missing} of {len(encoded)} prompts are left out: empty or longer than {longest} tokens")
    target.check_memory(min(batch, len(todo)), "fewer prompts at a time (--answer-batch)")
    run = compiled(run_layer, any_shape=True) if len(todo) > batch and can_compile(str(target.device)) else run_layer
    random = torch.Generator(target.device).manual_seed(seed + len(answered))
    bar = tqdm(total=len(answered) + len(todo), initial=len(answered), unit="answer", desc="answers")
    with out.open("a", encoding="utf-8") as f:
        for first in range(0, len(todo), SORTED * batch):
            some = sorted(todo[first : first + SORTED * batch], key=lambda pair: len(pair[1]))
            for lo in range(0, len(some), batch):
                group = some[lo : lo + batch]
                answers = [Growing(max_new_tokens) for _ in group]
                decode(target.model, [ids for _, ids in group], answers, target.stop_ids, temperature, random, run)
                for (prompt, _), answer in zip(group, answers, strict=True):
                    text = target.tokenizer.decode(answer.ids[: len(answer.ids) - answer.finished])
                    line = {"prompt": prompt, "answer": text, "ids": answer.ids, "finished": answer.finished}
                    f.write(json.dumps(line | {"looping": answer.looping}, ensure_ascii=False) + "\n")
                f.flush()
                bar.update(len(group))
    bar.close()
