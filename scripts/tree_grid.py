"""Is `--tree auto` the best choice? It and a grid of fixed trees, interleaved in one process.

    python scripts/tree_grid.py --compile --quant int8 --out benchmarks/trees

Every prompt is answered with every tree in turn, --runs times after a warm-up; figures are medians over the runs of all
prompts' new tokens over their decoding time, and each tree's share of the best fixed one's. Both greedy and at
temperature 0.8. Answers do not end at end marks, so that all write the same number of tokens. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fastea.config import FasteaError
from fastea.costs import machine
from fastea.evaluation.report import report
from fastea.flags import Parser
from fastea.generator import Generator
from fastea.loading import load
from fastea.runtime import exit_code, use_threads
from fastea.training.data import read_lines
from fastea.tree import parse_tree

PROMPTS = Path(__file__).parent.parent / "benchmarks" / "prompts.jsonl"
TREES = (
    "chain:1", "chain:2", "chain:3", "chain:5", "eagle1", "dynamic:8,4,4", "dynamic:16,8,4", "dynamic:32,8,6",
    "dynamic:60,10,6",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "temperature 0.8": {"temperature": 0.8, "seed": 0}}


def arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    for flag in ("--checkpoint", "--quant"):
        add(flag)
    for flag in ("--head", "--head-quant", "--dtype", "--device"):
        add(flag, default="auto")
    add("--trees", nargs="+", default=list(TREES), help=f"default: {' '.join(TREES)}")
    add("--compile", action="store_true")
    add("--prompts", type=Path, default=PROMPTS, help="JSON lines with 'prompt'")
    add("--limit", type=int, help="only the first prompts")
    add("--max-new-tokens", type=int, default=64)
    add("--max-seq-len", type=int, default=1024)
    add("--runs", type=int, default=3)
    add("--threads", type=int)
    add("--out", type=Path, help="folder for trees-WEIGHTS.json and .md")
    return parser.parse_args()


def grid(args: argparse.Namespace) -> None:
    use_threads(args.threads)
    if args.runs < 1 or args.max_new_tokens < 2:
        raise FasteaError("--runs must be at least 1, --max-new-tokens at least 2")
    names = ("checkpoint", "head", "head_quant", "quant", "dtype", "device", "compile", "max_seq_len")
    settings = {name: getattr(args, name) for name in names}
    models: dict[str, Generator] = {"auto": load(tree="auto", **settings)}
    planner = models["auto"].planner
    if planner is None:
        raise FasteaError("there is no head whose trees could be compared; give one with --head")
    models["none"] = models["auto"].beside(None)
    models |= {name: models["auto"].beside(planner.make(parse_tree(name))) for name in args.trees}
    prompts = [row["prompt"] for row in read_lines(args.prompts)[: args.limit]]
    weights = args.quant or models["auto"].info["dtype"]
    found: dict[str, Any] = {"machine": machine(models["auto"].device), "quant": args.quant, "compile": args.compile}
    text = ""
    for kind, sampling in SETTINGS.items():
        rows = measured(
            models, prompts, {"max_new_tokens": args.max_new_tokens, "ignore_eos": True} | sampling, args.runs
        )
        chosen = models["auto"].info["tree"]
        found[kind] = {"chosen": chosen, "trees": rows}
        text += f"{weights}, {kind}: auto took {chosen}\n\n"
        text += "| tree | tokens/s | tokens per round | of the best fixed one |\n| --- | --- | --- | --- |\n"
        for name, row in rows.items():
            text += f"| {name} | {row['tokens_per_s']} | {row['tokens_per_round']} | {row['share']:.1%} |\n"
        text += "\n"
    report(args.out, f"trees-{weights}", found, text)


def measured(models: dict[str, Generator], prompts: list[str], options: dict[str, Any], runs: int) -> dict[str, Any]:
    """By tree: medians over the runs of tokens per second, and of the share of the best fixed tree's."""
    for model in models.values():
        model.generate(prompts[0], **(options | {"max_new_tokens": 8}))
    speeds: dict[str, list[float]] = {name: [] for name in models}
    rounds, tokens = dict.fromkeys(models, 0), dict.fromkeys(models, 0)
    for _ in tqdm(range(runs), unit="run"):
        seconds, counts = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)
        for prompt in prompts:
            for name, model in models.items():
                output = model.generate(prompt, **options)
                assert not isinstance(output, list)
                seconds[name] += output.decode_s
                counts[name] += output.new_tokens - 1
                rounds[name] += output.rounds
                tokens[name] += output.round_tokens
        for name in models:
            speeds[name].append(counts[name] / seconds[name])
    fixed = [name for name in models if name != "auto"]
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(fixed, key=middle.__getitem__)
    return {
        name: {
            "tokens_per_s": round(middle[name], 2),
            "tokens_per_round": round(tokens[name] / max(1, rounds[name]), 3),
            "share": round(statistics.median(a / b for a, b in zip(values, speeds[best], strict=True)), 4),
        }
        for name, values in speeds.items()
    }


def main() -> int:
    args = arguments()
    return exit_code(lambda: grid(args), "tree_grid", "tree_grid: interrupted")


if __name__ == "__main__":
    sys.exit(main())
