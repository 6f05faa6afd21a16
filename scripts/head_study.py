"""What a head reads, and how it grows with data: many short training runs over one store of features.

    python scripts/head_study.py --data answers.jsonl --out study

ablation: figure 8 of the EAGLE paper, an EAGLE-1 head that reads features and shifted tokens, features and unshifted
tokens, tokens alone, features alone. scaling: EAGLE-1 and EAGLE-3 heads, each amount of answer tokens once. Every run
is one line of OUT/study.jsonl; runs that are there are not repeated. The table and the plot are made of these lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fastea.config import FasteaError
from fastea.demo import cache_folder, demo_model
from fastea.eagle3 import default_taps
from fastea.evaluation.report import pyplot
from fastea.flags import Parser
from fastea.generator import Generator
from fastea.runtime import exit_code
from fastea.training.data import Sample, make_samples, read_lines
from fastea.training.features import FeatureStore, load_target
from fastea.training.train import INPUTS, RECIPES, Recipe, Trainer

PARTS = ("ablation", "scaling")


def arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--checkpoint", help="target model: a folder or a .gguf file (default: the demo model)")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with prompts and answers")
    parser.add_argument("--out", type=Path, required=True, help="folder for study.jsonl, study.md and study.png")
    parser.add_argument("--work", type=Path, help="folder for features, as train_head.py's (default: in the cache)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--held-out", type=int, default=300, help="samples kept out of training (default 300)")
    parser.add_argument("--max-len", type=int, default=384, help="longest sequence in tokens (default 384)")
    parser.add_argument("--ablation-tokens", type=int, default=500_000, help="answer tokens (default 500000)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[100_000, 300_000, 1_000_000, 3_000_000], help="answer tokens"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="heads of the scaling runs"
    )
    parser.add_argument("--draft-vocab", type=int, default=8192, help="default 8192")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="default 2048")
    parser.add_argument("--steps", type=int, default=3, help="drafting steps trained, scaling runs (default 3)")
    return parser.parse_args()


def first_samples(samples: list[Sample], tokens: int) -> int:
    """How many samples from the start hold this many answer tokens."""
    total = 0
    for i, sample in enumerate(samples):
        total += len(sample.tokens) - sample.answer_start
        if total >= tokens:
            return i + 1
    raise FasteaError(f"the data holds {total} answer tokens, {tokens} are asked for")


def _stores(
    target: Generator, samples: list[Sample], args: argparse.Namespace, work: Path, kind: str, tokens: int
) -> tuple[FeatureStore, FeatureStore, int]:
    """Filled stores of training and held-out samples, and how many of the first hold `tokens` answer tokens."""
    target.model.taps = default_taps(target.model.config.num_layers) if kind == "eagle3" else ()
    train = FeatureStore(work / "train", samples[: -args.held_out], target.model)
    held = FeatureStore(work / "held", samples[-args.held_out :], target.model)
    count = first_samples(train.samples, tokens)
    train.fill(target.model, limit=count)
    held.fill(target.model)
    return train, held, count


def study(args: argparse.Namespace) -> None:
    checkpoint = Path(args.checkpoint) if args.checkpoint else demo_model()
    for name in ("held_out", "ablation_tokens", "steps"):
        if getattr(args, name) < 1:
            raise FasteaError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be at least 1")
    work = args.work or cache_folder() / "training" / checkpoint.stem
    target = load_target(checkpoint, args.max_len)
    samples = make_samples(read_lines(args.data), target.tokenizer, None, args.max_len)
    if len(samples) <= args.held_out:
        raise FasteaError(f"{args.data}: {len(samples)} usable samples; more than --held-out are needed")
    runs: list[tuple[str, int, dict[str, Any]]] = []
    shared = {"token_weight": 1.0, "draft_vocab": args.draft_vocab, "batch_tokens": args.batch_tokens, "epochs": 1.0}
    if "ablation" in args.parts:
        runs += [("ablation", args.ablation_tokens, {"inputs": inputs}) for inputs in INPUTS]
    if "scaling" in args.parts:
        for tokens in args.sizes:
            runs += [("scaling", tokens, RECIPES[kind] | {"kind": kind, "steps": args.steps}) for kind in args.kinds]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "study.jsonl"
    lines, todo = finished(path), []
    for part, tokens, changes in runs:
        recipe = Recipe(**({"feature_weight": 0.1} | changes | shared))  # EAGLE-3 has none
        name = {"part": part, "tokens": tokens, "kind": recipe.kind, "inputs": recipe.inputs, "steps": recipe.steps}
        if not any(name.items() <= line.items() for line in lines):
            todo.append((name, recipe))
    if todo:  # one pass over the target yields what all of them read
        kinds, sizes = {recipe.kind for _, recipe in todo}, [name["tokens"] for name, _ in todo]
        _stores(target, samples, args, work, "eagle3" if "eagle3" in kinds else "eagle1", max(sizes))
    for name, recipe in todo:
        train, held, count = _stores(target, samples, args, work, recipe.kind, name["tokens"])
        trainer = Trainer(target.model, train, held, recipe, work / "study" / recipe.kind, count)
        trainer.run(evaluate_every=10**9)
        line = name | {"seconds": round(trainer.seconds), "batches": trainer.step, "held": trainer.result}
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
        print(json.dumps(line))
    lines = finished(path)  # another process may train the other kind
    (args.out / "study.md").write_text(tables(lines), encoding="utf-8")
    plot([line for line in lines if line["part"] == "scaling"], args.out / "study.png")


def finished(path: Path) -> list[dict[str, Any]]:
    """The runs that a study.jsonl holds."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tables(lines: list[dict[str, Any]]) -> str:
    text = ""
    for part, title in zip(PARTS, ("What an EAGLE-1 head reads", "Data"), strict=True):
        some = [line for line in lines if line["part"] == part]
        if not some:
            continue
        text += f"## {title}\n\n| head | answer tokens | 0-alpha | 1-alpha | 2-alpha | 3-alpha | among 4 | seconds |\n"
        text += "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        for line in sorted(some, key=lambda line: (line["kind"], line["tokens"])):
            alpha, top = line["held"]["alpha"], line["held"]["top"]
            name = line["inputs"] if part == "ablation" else f"{line['kind']}, {line['steps']} steps"
            cells = [name, f"{line['tokens']:,}", *(f"{a:.3f}" for a in (*alpha[:4], top[3])), str(line["seconds"])]
            text += f"| {' | '.join(cells)} |\n"
        text += "\n"
    return text


def plot(lines: list[dict[str, Any]], out: Path) -> None:
    plt = pyplot()
    if plt is None:
        return

    figure, axes = plt.subplots(figsize=(6, 4))
    for kind in RECIPES:
        some = sorted((line["tokens"], line["held"]["alpha"]) for line in lines if line["kind"] == kind)
        for n, style in ((0, "-"), (1, "--")):
            axes.plot([t for t, _ in some], [a[n] for _, a in some], f"o{style}", label=f"{kind}, {n}-alpha")
    axes.set(xscale="log", xlabel="answer tokens, each seen once", ylabel="held-out acceptance of a chain")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> int:
    args = arguments()
    return exit_code(lambda: study(args), "head_study", "head_study: interrupted; finished runs are kept")


if __name__ == "__main__":
    sys.exit(main())
