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
    generator: Generator, prompts: list[str], out: Path, batch: int, max_new_tokens: int, temperature: float, seed: int
) -> None:
    """Append one JSON line a prompt to `out`: prompt, answer, ids, finished, looping. Lines already there are kept,
    so an interrupted run goes on where it stopped."""
    done = len(read_lines(out)) if out.exists() and out.stat().st_size else 0
    bar = tqdm(total=len(prompts), initial=done, unit="answer", desc="answers")
    with out.open("a", encoding="utf-8") as f:
        for lo in range(done, len(prompts), batch):
            group = prompts[lo : lo + batch]
            streams = list(range(lo, lo + len(group)))
            outputs = generator.generate(
                group, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, streams=streams
            )
            assert isinstance(outputs, list)
            for prompt, output in zip(group, outputs, strict=True):
                finished = output.finish_reason == "stop"
                ids = output.ids[:-1] if finished else output.ids
                line = {"prompt": prompt, "answer": output.text, "ids": ids, "finished": finished}
                f.write(json.dumps(line | {"looping": is_looping(ids)}, ensure_ascii=False) + "\n")
            f.flush()
            bar.update(len(group))
    bar.close()
