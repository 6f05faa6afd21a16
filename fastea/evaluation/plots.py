"""Pictures of a speed run, as PNG and SVG. matplotlib is an optional extra."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from fastea.evaluation.report import pyplot
from fastea.evaluation.speed import Record, histogram

PLAIN, FAST = "#9aa3ad", "#1f6fb2"


def plots(records: list[Record], found: dict[str, dict[str, Any]], folder: Path) -> None:
    """speed.png and speed.svg: acceptance by depth, tokens per round, speed by task, speed against context."""
    plt = pyplot()
    if plt is None:
        return

    figure, ((alpha, rounds), (tasks, context)) = plt.subplots(2, 2, figsize=(11, 7.5))
    width = 0.8 / len(found)
    for i, (kind, rows) in enumerate(found.items()):
        shade = 1 - 0.45 * i
        rates = rows["in all"].get("alpha", [])
        alpha.plot(range(len(rates)), rates, "o-", color=FAST, alpha=shade, label=kind)
        counts = histogram([r for r in records if f"T = {r['temperature']:g}" == kind])
        total = sum(counts.values()) or 1
        shift = (i - (len(found) - 1) / 2) * width
        rounds.bar(
            [n + shift for n in counts],
            [c / total for c in counts.values()],
            width,
            color=FAST,
            alpha=shade,
            label=kind,
        )
        places = [n + shift for n in range(len(rows))]
        tasks.bar(places, [row["speedup"] or 0 for row in rows.values()], width, color=FAST, alpha=shade, label=kind)
        tasks.set_xticks(range(len(rows)), list(rows), rotation=25, ha="right")
    by_context: dict[str, dict[int, list[float]]] = {"plain": defaultdict(list), "fast": defaultdict(list)}
    for record in records:
        for turn in record["turns"]:
            for name, bins in by_context.items():
                tokens, seconds = turn[name]
                if seconds:
                    bins[turn["context"] // 128 * 128 + 64].append(tokens / seconds)
    for name, color, label in (("plain", PLAIN, "plain"), ("fast", FAST, "speculative")):
        bins = by_context[name]
        context.plot(sorted(bins), [sum(bins[n]) / len(bins[n]) for n in sorted(bins)], "o-", color=color, label=label)
    alpha.set(xlabel="n: drafted tokens before it", ylabel="n-alpha of a chain", ylim=(0, 1))
    alpha.set_xticks(range(5))
    rounds.set(xlabel="tokens of a round", ylabel="share of rounds")
    tasks.set(ylabel="speedup over plain decoding", ylim=(0, None))
    tasks.axhline(1, color=PLAIN, linewidth=1)
    context.set(xlabel="tokens of the prompt", ylabel="tokens per second", ylim=(0, None))
    for axes in (alpha, rounds, tasks, context):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    for kind in ("png", "svg"):
        figure.savefig(folder / f"speed.{kind}", dpi=110)
    plt.close(figure)
