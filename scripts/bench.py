"""Plain and speculative decoding in turn, in one process: tokens per second of each and what a round is made of.

    python scripts/bench.py --compile --quant int8
    python scripts/bench.py --tree chain:3 --synthetic-acceptance 0.8,0.6,0.5

Every prompt is answered plain, then speculatively, --runs times after a warm-up; figures are medians over the runs.
The text does not end at end marks, so that both write the same number of tokens. --synthetic-acceptance forces the
number of accepted drafts (R1: share of rounds that accept one at least, R2: of these, two at least, ...): for the
loop's speed with any model, without a trained head; the text is then nonsense. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fastea.acceptance import AcceptanceTable
from fastea.answer import Output
from fastea.config import FasteaError
from fastea.flags import Parser
from fastea.generator import Generator
from fastea.loading import load
from fastea.memory import peak_rss
from fastea.round import Outcome
from fastea.training.data import read_lines
from fastea.tree import Tree

PROMPTS = Path(__file__).parent.parent / "benchmarks" / "prompts.jsonl"
SETTINGS = {"greedy": {}, "temperature 0.8, top-p 0.9": {"temperature": 0.8, "top_p": 0.9, "seed": 0}}


def arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    for flag in ("--checkpoint", "--tree", "--quant"):
        add(flag)
    for flag in ("--head", "--head-quant", "--drafter", "--dtype", "--device"):
        add(flag, default="auto")
    add("--compile", action="store_true")
    add("--exact", action="store_true")
    add("--prompts", type=Path, default=PROMPTS, help="JSON lines with 'prompt' and 'category'")
    add("--limit", type=int, help="only the first prompts")
    add("--max-new-tokens", type=int, default=96)
    add("--max-seq-len", type=int, default=1024)
    add("--runs", type=int, default=3)
    add("--threads", type=int)
    add("--synthetic-acceptance", metavar="R1,R2,...", type=rates, help="force acceptance; benchmarking only")
    return parser.parse_args()


def rates(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= v <= 1 for v in values):
        raise argparse.ArgumentTypeError("rates lie between 0 and 1")
    return values


def main() -> int:
    args = arguments()
    try:
        if args.threads:
            torch.set_num_threads(args.threads)
        print(json.dumps(bench(args)))
    except FasteaError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def bench(args: argparse.Namespace) -> dict[str, Any]:
    names = ("checkpoint", "head", "drafter", "tree", "quant", "head_quant", "dtype", "device", "compile", "exact")
    names = (*names, "max_seq_len")
    speculative = load(**{name: getattr(args, name) for name in names})
    plain = speculative.beside(None)
    if args.synthetic_acceptance:
        speculative.planner = None
        if speculative.drafter is None:
            raise FasteaError("--synthetic-acceptance needs a drafter")
        force_acceptance(speculative, args.synthetic_acceptance)
    prompts = read_lines(args.prompts)[: args.limit]
    report: dict[str, Any] = {**speculative.info, "threads": torch.get_num_threads(), "compile": speculative.compile}
    if args.synthetic_acceptance:
        report["synthetic_acceptance"] = args.synthetic_acceptance
    for name, sampling in SETTINGS.items():
        report[name] = measure(plain, speculative, prompts, args, sampling)
        describe(name, report[name], synthetic=bool(args.synthetic_acceptance))
    report |= report["greedy"]
    report["compile_s"] = round(plain.compile_s + speculative.compile_s, 1)
    report["peak_rss_bytes"] = peak_rss()
    report |= bandwidth(plain, report["plain"]["tokens_per_s"])
    print(f"reads {report['read_gb_per_s']} GB/s; plain decoding reaches {report['bandwidth_share']:.0%} of that floor")
    return report


def measure(
    plain: Generator, speculative: Generator, prompts: list[dict[str, Any]], args: argparse.Namespace, sampling: Any
) -> dict[str, Any]:
    """Medians over the runs of all prompts' tokens per second, tokens per round, acceptance and parts of a round."""
    options = {"max_new_tokens": args.max_new_tokens, "ignore_eos": True, **sampling}
    for generator in (plain, speculative):
        generator.generate(prompts[0]["prompt"], **(options | {"max_new_tokens": 8}))
        generator.seconds = dict.fromkeys(generator.seconds, 0.0)
    planner, speculative.planner = speculative.planner, None  # one tree throughout
    speeds: dict[str, list[float]] = {"plain": [], "speculative": []}
    ratios, table = [], AcceptanceTable(speculative.tree)
    rounds = tokens = equal = 0
    kinds: dict[str, list[float]] = {}
    for _ in tqdm(range(args.runs), unit="run"):
        seconds, counts = dict.fromkeys(speeds, 0.0), dict.fromkeys(speeds, 0)
        for row in prompts:
            outputs = {}
            for name, generator in (("plain", plain), ("speculative", speculative)):
                run = generator.stream(row["prompt"], **options, observe=table.add if name == "speculative" else None)
                for _ in run:
                    pass
                outputs[name] = output = run.outputs[0]
                seconds[name] += output.decode_s
                counts[name] += output.new_tokens - 1  # the first one comes with the prompt
            a, b = outputs["plain"], outputs["speculative"]
            equal += a.ids == b.ids
            rounds, tokens = rounds + b.rounds, tokens + b.round_tokens
            kinds.setdefault(str(row.get("category", "all")), []).append(speed(b) / speed(a))
        for name in speeds:
            speeds[name].append(counts[name] / seconds[name])
        ratios.append(speeds["speculative"][-1] / speeds["plain"][-1])
    total, speculative.planner = sum(speculative.seconds.values()), planner
    return {
        "tree": speculative.tree.name,
        "plain": {"tokens_per_s": round(statistics.median(speeds["plain"]), 2)},
        "speculative": {
            "tokens_per_s": round(statistics.median(speeds["speculative"]), 2),
            "tokens_per_round": round(tokens / max(1, rounds), 3),
            "by_depth_and_rank": table.rates(),
            "ms_per_round": {n: round(1e3 * s / max(1, rounds), 2) for n, s in speculative.seconds.items()},
        },
        "ratio": round(statistics.median(ratios), 3),
        "ratio_by_category": {kind: round(statistics.median(values), 3) for kind, values in kinds.items()},
        "equal_texts": f"{equal} of {args.runs * len(prompts)}",
        "seconds": round(total, 1),
    }


def speed(output: Output) -> float:
    return (output.new_tokens - 1) / output.decode_s


def describe(name: str, part: dict[str, Any], synthetic: bool) -> None:
    mark = " (SYNTHETIC acceptance: not a real result)" if synthetic else ""
    fast = part["speculative"]
    print(
        f"{name}{mark}: plain {part['plain']['tokens_per_s']} tokens/s, speculative {fast['tokens_per_s']}, "
        f"ratio {part['ratio']}, {fast['tokens_per_round']} tokens per round, {part['equal_texts']} texts equal"
    )
    print(f"  ms a round: {fast['ms_per_round']}; by kind: {part['ratio_by_category']}")


def force_acceptance(generator: Generator, shares: list[float]) -> None:
    """Make rounds accept as many drafts as `shares` says, spread evenly over the rounds, on the way to one of the
    tree's deepest nodes. The real acceptance is computed too, since its time belongs to a round, and undone."""
    if generator.round.captures and generator.compile:
        raise FasteaError("--synthetic-acceptance cannot reach into a captured round; use scripts/gpu_check.py model")
    tree, accept = generator.round.tree, generator.engine.accept
    if not isinstance(tree, Tree):
        raise FasteaError(f"--synthetic-acceptance needs a static tree, not {tree.name}; give one with --tree")
    if len(shares) > tree.depth_max:
        raise FasteaError(
            f"--synthetic-acceptance has {len(shares)} rates, the tree {tree.name} {tree.depth_max} levels"
        )
    deepest = tree.paths[-1]
    slots = torch.tensor([tree.paths.index(deepest[:i]) for i in range(len(deepest) + 1)], device=generator.device)
    wanted = lengths(shares)

    def forced(state: Any, draft: Any, features: torch.Tensor, logits: torch.Tensor) -> Outcome:
        done = state.done.clone()
        accept(state, draft, features, logits)
        state.length.sub_(state.count)
        state.done.copy_(done)
        path = slots.expand(len(draft.tokens), -1)
        emitted = torch.cat((draft.tokens[:, slots[1:]], draft.tokens[:, :1]), 1)
        count = torch.full_like(state.count, next(wanted) + 1)
        broken = torch.zeros_like(draft.tokens, dtype=torch.bool)
        return generator.round.commit(state, features, broken, path, count, emitted)

    generator.engine.accept = forced


def lengths(shares: list[float]) -> Iterator[int]:
    """Accepted drafts of each round: the shares' distribution, each round taking what is furthest behind."""
    reached = [1.0]
    for share in shares:
        reached.append(reached[-1] * share)
    wanted = [a - b for a, b in zip(reached, [*reached[1:], 0.0], strict=True)]
    owed = [0.0] * len(wanted)
    while True:
        owed = [o + w for o, w in zip(owed, wanted, strict=True)]
        best = max(range(len(owed)), key=owed.__getitem__)
        owed[best] -= 1
        yield best


def bandwidth(plain: Generator, tokens_per_s: float) -> dict[str, float]:
    """What this machine reads a second (a sum over 256 MB, the best of 5), and plain decoding's share of it: weight
    bytes of a step, the embedding's lookup aside, over the time of a step."""
    if plain.device.type != "cpu":
        return {"read_gb_per_s": 0.0, "bandwidth_share": 0.0}
    block = torch.ones(64 << 20)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - begin)
    rate = block.nbytes / min(times)
    model = plain.model
    padding = sum(m.hidden_bytes - 2 * m.inputs * m.outputs for m in model.modules() if getattr(m, "hidden_bytes", 0))
    read = plain.weight_bytes - model.rope.nbytes - padding
    if not shares_embedding(model):
        read -= model.embed.weight.nbytes
    return {"read_gb_per_s": round(rate / 1e9, 1), "bandwidth_share": round(read * tokens_per_s / rate, 3)}


def shares_embedding(model: Any) -> bool:
    tensors = [*model.lm_head.parameters(), *model.lm_head.buffers()]
    return any(t.data_ptr() == model.embed.weight.data_ptr() for t in tensors)


if __name__ == "__main__":
    sys.exit(main())
