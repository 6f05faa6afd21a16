"""Throughput of several questions decoded together (the EAGLE paper's table 7)."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from fastea.generator import Generator


def throughput(model: Generator, prompts: list[str], size: int, options: dict[str, Any]) -> float:
    """Tokens per second of the prompts, `size` at a time, from the first round of a group to its last; what is left
    over is left out. Every answer has max_new_tokens, whatever end marks say."""
    groups = [prompts[at : at + size] for at in range(0, len(prompts) - size + 1, size)]
    model.generate(groups[0], **(options | {"max_new_tokens": 8}))
    tokens, seconds = 0, 0.0
    for group in groups:
        outputs = model.generate(group, **options)
        assert isinstance(outputs, list)
        tokens += sum(output.new_tokens - 1 for output in outputs)
        seconds += max(output.decode_s for output in outputs)
    return tokens / seconds


def by_size(
    plain: Generator, fast: Generator, prompts: list[str], sizes: list[int], options: dict[str, Any]
) -> dict[str, Any]:
    """Tokens per second of both at every batch size, their ratio, and the ratio of the best of each."""
    options = options | {"ignore_eos": True}
    rows = []
    for size in tqdm(sizes, unit="batch size"):
        pair = {name: throughput(m, prompts, size, options) for name, m in (("plain", plain), ("fast", fast))}
        rows.append(
            {
                "batch": size,
                **{n: round(v, 2) for n, v in pair.items()},
                "speedup": round(pair["fast"] / pair["plain"], 3),
            }
        )
    best = {name: max(row[name] for row in rows) for name in ("plain", "fast")}
    return {"sizes": rows, "best": best, "best_ratio": round(best["fast"] / best["plain"], 3)}


def markdown(found: dict[str, Any]) -> str:
    text = "| batch | plain, tokens/s | speculative | speedup |\n| --- | --- | --- | --- |\n"
    for row in found["sizes"]:
        text += f"| {row['batch']} | {row['plain']} | {row['fast']} | {row['speedup']} |\n"
    best = found["best"]
    return text + f"| best | {best['plain']} | {best['fast']} | {found['best_ratio']} |\n"
