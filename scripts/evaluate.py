"""Measure a model and its head: speed, exactness, acceptance, quality, batches.

    python scripts/evaluate.py speed --questions question.jsonl --compile
    python scripts/evaluate.py exactness --questions question.jsonl --exact
    python scripts/evaluate.py acceptance --questions question.jsonl --tree eagle1
    python scripts/evaluate.py batch --questions question.jsonl
    python scripts/evaluate.py perplexity --quant int4

Question files hold one JSON object a line: FastChat's {"turns": [...], "category": ...} or {"prompt": ...}.

speed: plain and speculative decoding in turn, all turns of every question, at each temperature; speedup, tokens per
round (tau), n-alpha of a chain; by task, or by category where there is one task. exactness: speculative ids against
plain ids over first turns (with a temperature: of the same seed), for each difference its position and the gap between
the plain run's two largest logits there; and the total variation of sampled tokens from the exact distribution of a
tiny model. acceptance: tokens per round by category, without the time of plain decoding. batch: throughput at several
batch sizes. perplexity: of a text, and the KL divergence from --reference (default: the same checkpoint, not
quantized, in float32).

Every measure writes OUT/<measure>.json and .md (speed: plots too, and it goes on where it was interrupted); the last
line printed is the JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fastea.check import head_drafter
from fastea.config import FasteaError
from fastea.drafters.eagle import EagleDrafter
from fastea.evaluation import batch, exactness, speed
from fastea.evaluation.perplexity import perplexity
from fastea.evaluation.plots import plots
from fastea.evaluation.questions import read_questions
from fastea.evaluation.report import report
from fastea.flags import Parser
from fastea.generator import Generator
from fastea.loading import load
from fastea.runtime import exit_code, use_threads
from fastea.sampling import Sampling
from fastea.tree import chain

CORPUS = Path(__file__).parent.parent / "benchmarks" / "corpus.txt"
MODEL_FLAGS = ("checkpoint", "head", "drafter", "tree", "dtype", "quant", "head_quant", "exact", "accept", "compile")


def arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("what", choices=list(MEASURES))
    add("--questions", type=Path, nargs="+", metavar="FILE", help="JSON lines with 'turns' or 'prompt'")
    add("--limit", type=int, help="only the first questions of every file")
    add("--out", type=Path, default=Path("evaluation"), help="folder of the results (default: evaluation)")
    add("--max-new-tokens", type=int, default=128, help="of every answer (default 128)")
    add("--max-seq-len", type=int, help="context in tokens (default: the model's, at most 4096)")
    add("--temperature", type=float, nargs="+", help="default 0; of speed: 0 and 1")
    add("--seed", type=int, default=0)
    add("--batch", type=int, nargs="+", help="batch: sizes (default 1 2 4 8); acceptance: questions decoded together")
    add("--text", type=Path, default=CORPUS, help="perplexity: a text file (default: benchmarks/corpus.txt)")
    add("--reference", help="perplexity: checkpoint to compare with (default: the same, not quantized)")
    add("--window", type=int, default=512, help="perplexity: tokens that a forward sees (default 512)")
    add("--stride", type=int, default=256, help="perplexity: tokens that it scores, the last ones (default 256)")
    for flag in ("--checkpoint", "--tree", "--quant"):
        add(flag)
    for flag in ("--head", "--drafter", "--dtype", "--head-quant"):
        add(flag, default="auto")
    add("--accept", choices=["match", "rejection"], default="match")
    add("--exact", action="store_true")
    add("--compile", action="store_true")
    add("--threads", type=int)
    add(
        "--children",
        choices=["noise", "likeliest"],
        default="noise",
        help="acceptance at a temperature: a head's children are the best by the noise that the target picks with "
        "(default), or the likeliest; needs a --tree",
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    return exit_code(lambda: measure(args), "evaluate", "evaluate: interrupted; speed goes on from here")


def measure(args: argparse.Namespace) -> None:
    if args.what != "perplexity" and args.questions is None:
        raise FasteaError(f"{args.what} needs --questions FILE")
    for name in ("limit", "max_new_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise FasteaError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be at least 1")
    use_threads(args.threads)
    found, text = MEASURES[args.what](args)
    report(args.out, args.what, found, text)


def build(args: argparse.Namespace, **changes: Any) -> Generator:
    return load(**({name: getattr(args, name) for name in (*MODEL_FLAGS, "max_seq_len")} | changes))


def options(args: argparse.Namespace) -> dict[str, Any]:
    temperature = args.temperature[0] if args.temperature else 0.0
    return {"max_new_tokens": args.max_new_tokens, "temperature": temperature, "seed": args.seed}


def measure_speed(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    questions, temperatures = read_questions(args.questions, args.limit), args.temperature or [0.0, 1.0]
    fast = build(args)
    plain = fast.beside(None)
    drafter = head_drafter(fast)
    chained = (
        fast.beside(EagleDrafter(drafter.head, chain(5).to(str(fast.device)), fast.rejection)) if drafter else None
    )
    settings = {name: str(getattr(args, name)) for name in (*MODEL_FLAGS, "max_seq_len", "max_new_tokens", "seed")}
    path = args.out / "speed.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = records_of(path, settings)
    wanted = {(q.task, q.number) for q in questions}
    known = [r for r in known if r["temperature"] in temperatures and (r["task"], r["question"]) in wanted]
    with path.open("a", encoding="utf-8") as kept:

        def keep(record: dict[str, Any]) -> None:
            kept.write(json.dumps({"settings": settings, "record": record}) + "\n")
            kept.flush()

        limits = {"max_new_tokens": args.max_new_tokens, "seed": args.seed}
        records = speed.run(plain, fast, chained, questions, temperatures, limits, known, keep)
    found = speed.tables(records)
    plots(records, found, args.out)
    info = {**fast.info, "threads": torch.get_num_threads()}
    return {"results": found, "tokens_per_round": speed.histogram(records), **info}, (
        f"{speed.markdown(found)}{speed.DEFINITIONS}"
    )


def records_of(path: Path, settings: dict[str, str]) -> list[dict[str, Any]]:
    """What an earlier run with these settings has finished; a line that it had no time to end is passed over."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            if (read := json.loads(line))["settings"] == settings:
                records.append(read["record"])
    return records


def measure_exactness(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    fast = build(args)
    found = exactness.compare(fast.beside(None), fast, read_questions(args.questions, args.limit), options(args))
    found |= {"distribution": exactness.total_variation(rejection=args.accept == "rejection"), **fast.info}
    return found, exactness.markdown(found)


def measure_acceptance(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if args.children == "likeliest" and args.tree in (None, "auto"):
        raise FasteaError("--children likeliest needs a tree that is the same throughout; give one with --tree")
    generator, size = build(args), (args.batch or [1])[0]
    drafter = head_drafter(generator)
    if drafter and args.children == "likeliest":
        drafter.by_noise = False
    generator.warm_up(size, Sampling(options(args)["temperature"], seed=args.seed))
    rounds: dict[str, int] = defaultdict(int)
    tokens: dict[str, int] = defaultdict(int)
    asked = read_questions(args.questions, args.limit)
    for lo in tqdm(range(0, len(asked), size), unit="batch"):
        group = asked[lo : lo + size]
        outputs = generator.generate([question.turns[0] for question in group], **options(args))
        assert isinstance(outputs, list)
        for question, output in zip(group, outputs, strict=True):
            for key in (question.category, "in all"):
                rounds[key] += output.rounds
                tokens[key] += output.round_tokens
    rates = {key: round(tokens[key] / max(1, rounds[key]), 3) for key in rounds}
    text = "| category | rounds | tokens per round |\n| --- | --- | --- |\n"
    text += "".join(f"| {key} | {rounds[key]} | {rate:.2f} |\n" for key, rate in rates.items())
    return {"tokens_per_round": rates, "rounds": dict(rounds), **generator.info}, text


def measure_batch(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    sizes, fast = args.batch or [1, 2, 4, 8], build(args)
    prompts = [question.turns[0] for question in read_questions(args.questions, args.limit)]
    if not all(1 <= size <= len(prompts) for size in sizes):
        raise FasteaError(f"--batch {' '.join(map(str, sizes))}: sizes lie between 1 and the {len(prompts)} questions")
    found = batch.by_size(fast.beside(None), fast, prompts, sizes, options(args))
    return {**found, **fast.info}, batch.markdown(found)


def measure_perplexity(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if not 0 < args.stride < args.window:
        raise FasteaError(f"--stride {args.stride}: it must be at least 1 and less than --window {args.window}")
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FasteaError(f"{args.text}: not readable as text ({error})") from None
    plain = {"head": "none", "drafter": "none", "tree": None, "max_seq_len": args.window}
    model = build(args, **plain)
    reference = build(args, **plain, checkpoint=args.reference or args.checkpoint, quant=None, dtype="float32")
    found = perplexity(model, reference, text, args.window, args.stride)
    line = (
        f"perplexity {found['perplexity']} (reference {found['reference_perplexity']}), KL {found['kl_divergence']}\n"
    )
    return {**found, **model.info}, line


MEASURES = {
    "speed": measure_speed,
    "exactness": measure_exactness,
    "acceptance": measure_acceptance,
    "batch": measure_batch,
    "perplexity": measure_perplexity,
}


if __name__ == "__main__":
    sys.exit(main())
