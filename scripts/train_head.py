"""Train an EAGLE-1 or EAGLE-3 head for a target model.

    python scripts/train_head.py --data answers.jsonl --out my-head
    python scripts/train_head.py --kind eagle3 --draft-vocab 8192 --data answers.jsonl --out my-head
    python scripts/train_head.py --checkpoint FOLDER --data prompts.jsonl --out my-head --time-budget 60

--data holds JSON lines with "prompt" and "answer" (optionally "finished", "looping"); lines without an answer are
answered by the target first. Answers, features and checkpoints are kept in the cache folder (--work); an interrupted
run goes on with --resume.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from fastea.checkpoint import fingerprint
from fastea.config import FasteaError
from fastea.demo import cache_folder, demo_model
from fastea.eagle3 import Eagle3Head, default_taps
from fastea.evaluation.report import pyplot
from fastea.flags import Parser
from fastea.head_files import load_head, save_head, write_config
from fastea.loading import load
from fastea.quantized import Quantizer
from fastea.runtime import exit_code
from fastea.training.acceptance import measure
from fastea.training.answers import write_answers
from fastea.training.data import make_samples, read_lines
from fastea.training.features import FeatureStore, load_target
from fastea.training.train import INPUTS, RECIPES, Recipe, Trainer

GROWN = ("8,4", "8,7")  # children a node and levels of the dynamic trees whose acceptance the card holds


def arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--checkpoint", help="target model: a folder or a .gguf file (default: the demo model)")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines (.jsonl or .jsonl.gz)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument(
        "--work", type=Path, help="folder for answers, features and checkpoints (default: in the cache)"
    )
    parser.add_argument("--held-out", type=int, default=300, help="samples kept out of training (default 300)")
    parser.add_argument("--limit", type=int, help="use this many training samples at most")
    parser.add_argument("--max-len", type=int, default=384, help="longest sequence in tokens (default 384)")
    parser.add_argument("--system", help="system message of the training prompts (default: the template's own)")
    parser.add_argument("--time-budget", type=float, help="minutes of training; the learning rate decays with it")
    parser.add_argument(
        "--init", type=Path, help="start from this head's weights (sizes and draft vocabulary are its own)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the work folder's checkpoint")
    parser.add_argument("--answer-tokens", type=int, default=192, help="longest answer made here (default 192)")
    parser.add_argument("--answer-batch", type=int, default=64, help="prompts answered together (default 64)")
    parser.add_argument("--answer-temperature", type=float, default=0.0, help="of answers (default 0 = greedy)")
    parser.add_argument("--acceptance-prompts", type=int, default=40, help="held-out prompts for the card (default 40)")
    parser.add_argument("--save-quant", choices=["none", "int8"], default="none", help="how weights are stored")
    for item in fields(Recipe):
        flag, words = f"--{item.name.replace('_', '-')}", f"default {item.default}"
        choices = {"kind": list(RECIPES), "inputs": INPUTS}.get(item.name)
        for kind, changes in RECIPES.items():
            if item.name in changes:
                words += f"; {changes[item.name]} for {kind}"
        if isinstance(item.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(item.default), choices=choices, help=words)
    return parser.parse_args()


def recipe_of(args: argparse.Namespace) -> Recipe:
    """What was asked for over the defaults of the kind."""
    asked = {item.name: getattr(args, item.name) for item in fields(Recipe)}
    return Recipe(**(RECIPES[args.kind or "eagle1"] | {k: v for k, v in asked.items() if v is not None}))


def main() -> int:
    args = arguments()
    return exit_code(
        lambda: train(args), "train_head", "train_head: interrupted; --resume goes on from the last checkpoint"
    )


def train(args: argparse.Namespace) -> None:
    checkpoint = Path(args.checkpoint) if args.checkpoint else demo_model()
    for name in ("held_out", "acceptance_prompts", "max_len", "answer_batch", "answer_tokens", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise FasteaError(
                f"--{name.replace('_', '-')} {getattr(args, name)} is not possible; it must be at least 1"
            )
    recipe = recipe_of(args)
    if recipe.inputs == "feature+unshifted":
        raise FasteaError("--inputs feature+unshifted: no such head can draft; scripts/head_study.py measures one")
    work = args.work or cache_folder() / "training" / checkpoint.stem
    work.mkdir(parents=True, exist_ok=True)
    rows = answered(read_lines(args.data), checkpoint, work, args)
    generator = load_target(checkpoint, args.max_len)
    model, tokenizer = generator.model, generator.tokenizer
    init = load_head(args.init, model, Quantizer(None, torch.float32, "cpu", pack=False)) if args.init else None
    if init and isinstance(init, Eagle3Head) != (recipe.kind == "eagle3"):
        raise FasteaError(f"--init {args.init}: not a head of the kind {recipe.kind}")
    if recipe.kind == "eagle3":
        model.taps = init.taps if isinstance(init, Eagle3Head) else default_taps(model.config.num_layers)
        if not init and min(model.taps) < 2:
            raise FasteaError(f"{checkpoint}: {model.config.num_layers} layers are too few for an EAGLE-3 head (5)")
    samples = make_samples(rows, tokenizer, args.system, args.max_len)
    if len(samples) < 2 * args.held_out:
        raise FasteaError(
            f"{args.data}: {len(samples)} usable samples; --held-out {args.held_out} needs at least twice as many"
        )
    held = FeatureStore(work / "held", samples[-args.held_out :], model)
    store = FeatureStore(work / "train", samples[: -args.held_out], model)
    held.fill(model)
    store.fill(model, limit=args.limit)
    trainer = Trainer(model, store, held, recipe, work / "run", args.limit, init)
    if args.resume and trainer.resume():
        print(f"resumed at step {trainer.step} of {trainer.total}", file=sys.stderr)
    trainer.run(args.time_budget * 60 if args.time_budget else None)
    used = trainer.samples
    card: dict[str, Any] = {
        "target": fingerprint(model),
        "data": {
            "samples": len(used),
            "tokens": sum(len(s.tokens) for s in used),
            "answer_tokens": sum(len(s.tokens) - s.answer_start for s in used),
        },
        "recipe": asdict(recipe),
        "started_from": {k: v for k, v in init.card.items() if k not in ("target", "acceptance")} if init else None,
        "steps": trainer.step,
        "seconds": round(trainer.seconds),
        "losses": {"feature": round(trainer.losses[0], 4), "token": round(trainer.losses[1], 4)},
        "held_out": trainer.result or trainer.evaluate(),
    }
    head = trainer.finished()
    save_head(head, args.out, card, quant=None if args.save_quant == "none" else args.save_quant)
    plot(trainer.folder / "log.jsonl", args.out / "training.png")
    prompts = [r["prompt"] for r in rows if r.get("answer") and not r.get("looping")][-args.acceptance_prompts :]
    del generator
    card["acceptance"] = accepted(checkpoint, args.out, prompts, args.system)
    write_config(head, args.out, card)
    print(json.dumps({"held_out": card["held_out"], **card["acceptance"]}))


def accepted(checkpoint: str | Path | None, head: Path, prompts: list[str], system: str | None) -> dict[str, Any]:
    """How often the head's drafts are accepted, from which `--tree auto` chooses: on the paper's tree by depth and
    rank, on dynamic ones by place in the order of their nodes' chances."""
    table: dict[str, Any] = {"greedy": {}, "temperature 0.8": {}}
    for name in ("eagle1", *(f"dynamic:64,{grown}" for grown in GROWN)):
        model = load(checkpoint, head=head, tree=name, device="cpu")
        for kind, sampling in (("greedy", {}), ("temperature 0.8", {"temperature": 0.8, "seed": 0})):
            found = measure(model, prompts, 96, system=system, **sampling)
            rates = found.pop("rates")
            if name == "eagle1":
                table[kind] = {**found, "by_depth_and_rank": rates, "dynamic": {}}
            else:
                table[kind]["dynamic"][name.removeprefix("dynamic:64,")] = rates
        model.close()
    return table


def answered(
    rows: list[dict[str, Any]], checkpoint: Path, work: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows with answers; those without are answered by the target, into the work folder."""
    open_prompts = [r["prompt"] for r in rows if not r.get("answer")]
    if not open_prompts:
        return rows
    target = load(checkpoint, head="none", drafter="none", kernels="torch", max_seq_len=args.max_len)
    out = work / "answers.jsonl"
    write_answers(
        target, open_prompts, out, batch=args.answer_batch, max_new_tokens=args.answer_tokens,
        temperature=args.answer_temperature, seed=args.seed or 0, system=args.system,
    )  # fmt: skip
    return [r for r in rows if r.get("answer")] + (read_lines(out) if out.stat().st_size else [])


def plot(log: Path, out: Path) -> None:
    """Losses and held-out acceptance over the steps; matplotlib is optional."""
    plt = pyplot()
    if plt is None:
        return

    entries = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [e for e in entries if "token" in e]
    held = [e for e in entries if "held" in e]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot([e["step"] for e in losses], [e["token"] for e in losses], label="cross-entropy")
    if any(e["feature"] for e in losses):
        left.plot([e["step"] for e in losses], [e["feature"] for e in losses], label="SmoothL1 on features")
    left.set(xlabel="step", ylabel="training loss")
    left.legend()
    for n in range(len(held[0]["held"]["alpha"])):
        right.plot([e["step"] for e in held], [e["held"]["alpha"][n] for e in held], label=f"{n}-alpha")
    right.set(xlabel="step", ylabel="held-out acceptance of a chain", ylim=(0, 1))
    right.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
