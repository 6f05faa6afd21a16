"""The target's own answers to training prompts, decoded in batches, resumable."""

from __future__ import annotations

import json
from pathlib import Path

from tqdm import tqdm

from fastea.generator import Generator
from fastea.training.data import read_lines


def is_looping(ids: list[int], run: int = 4, times: int = 5) -> bool:
    """Whether some run of four ids comes five times or more: an answer that teaches a head nothing."""
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(ids) - run + 1):
        key = tuple(ids[i : i + run])
        seen[key] = seen.get(key, 0) + 1
        if seen[key] >= times:
            return True
    return False


def write_answers(
    generator: Generator,
    prompts: list[str],
    out: Path,
    *,
    batch: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    system: str | None = None,
) -> None:
    """Append one JSON line a prompt to `out`: prompt, answer, ids (an end mark included), finished, looping. Answers
    already there are kept and a half-written last line is dropped, so an interrupted run goes on where it stopped."""
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    out.write_text(whole, encoding="utf-8")
    answered = {row["prompt"] for row in read_lines(out)} if whole else set()
    done, prompts = len(answered), [p for p in dict.fromkeys(prompts) if p not in answered]
    bar = tqdm(total=done + len(prompts), initial=done, unit="answer", desc="answers")
    with out.open("a", encoding="utf-8") as f:
        for lo in range(0, len(prompts), batch):
            group = prompts[lo : lo + batch]
            streams = list(range(done + lo, done + lo + len(group)))
            outputs = generator.generate(
                group, system=system, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, streams=streams
            )
            assert isinstance(outputs, list)
            for prompt, output in zip(group, outputs, strict=True):
                finished = output.finish_reason == "stop"
                line = {"prompt": prompt, "answer": output.text, "ids": output.ids, "finished": finished}
                f.write(json.dumps(line | {"looping": is_looping(output.ids)}, ensure_ascii=False) + "\n")
            f.flush()
            bar.update(len(group))
    bar.close()
