"""Measure exactness and acceptance over a question file, and quality over a text.

    python scripts/evaluate.py exactness --questions question.jsonl --exact
    python scripts/evaluate.py acceptance --questions question.jsonl --tree eagle1
    python scripts/evaluate.py perplexity --quant int4

Question files hold one JSON object a line: FastChat's {"turns": [...], "category": ...} (first turns are used) or
{"prompt": ...}. exactness: speculative ids against plain ids; for each difference its position and the gap between
the plain run's two largest logits there (a small gap is a near-tie that rounding can turn). acceptance: tokens per
round = accepted draft tokens + 1, averaged over all rounds, in all and by category. perplexity: exp of the mean
negative log-likelihood of a text's tokens in overlapping windows, and the mean KL divergence of the model's
distributions from those of --reference (default: the same checkpoint, not quantized, in float32). The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from fastea.check import head_drafter
from fastea.config import FasteaError
from fastea.generator import Generator
from fastea.loading import load
from fastea.sampling import Sampling
from fastea.training.data import read_json_lines

CORPUS = Path(__file__).parent.parent / "benchmarks" / "corpus.txt"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=["exactness", "acceptance", "perplexity"])
    add("--questions", type=Path, help="JSON lines with 'turns' or 'prompt'")
    add("--text", type=Path, default=CORPUS, help="perplexity: a text file (default: benchmarks/corpus.txt)")
    add("--reference", help="perplexity: checkpoint to compare with (default: the same, not quantized)")
    add("--window", type=int, default=512, help="perplexity: tokens that a forward sees (default 512)")
    add("--stride", type=int, default=256, help="perplexity: tokens that it scores, the last ones (default 256)")
    add("--limit", type=int, help="only the first questions")
    add("--max-new-tokens", type=int, default=64)
    add("--batch", type=int, default=1, help="acceptance: questions decoded together (default 1)")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    for flag in ("--checkpoint", "--tree"):
        add(flag)
    add("--head", default="auto")
    add("--drafter", default="auto")
    add("--dtype", default="auto")
    add("--quant")
    add("--head-quant", default="auto")
    add("--exact", action="store_true")
    add("--compile", action="store_true")
    add("--accept", choices=["match", "rejection"], default="match")
    add(
        "--children",
        choices=["noise", "likeliest"],
        default="noise",
        help="acceptance at a temperature: a head's children are the best by the noise that the target picks with "
        "(default), or the likeliest",
    )
    args = parser.parse_args()
    measures = {"exactness": exactness, "acceptance": acceptance, "perplexity": perplexity}
    try:
        if args.what != "perplexity" and args.questions is None:
            raise FasteaError(f"{args.what} needs --questions FILE")
        print(json.dumps(measures[args.what](args)))
    except FasteaError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    return 0


def questions(args: argparse.Namespace) -> list[dict[str, str]]:
    """prompt and category of every question."""
    rows = read_json_lines(args.questions)[: args.limit]
    out = []
    for row in rows:
        turns = row.get("turns") or [row.get("prompt")]
        if not isinstance(turns[0], str):
            raise FasteaError(f"{args.questions}: every line must have 'turns' or a 'prompt'")
        out.append({"prompt": turns[0], "category": str(row.get("category", "all"))})
    return out


def build(args: argparse.Namespace, **changes: Any) -> Generator:
    names = ("checkpoint", "head", "drafter", "tree", "dtype", "quant", "head_quant", "exact", "accept", "compile")
    settings = {name: getattr(args, name) for name in names}
    return load(**(settings | changes))


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}


def exactness(args: argparse.Namespace) -> dict[str, Any]:
    """How many questions get equal ids; the first difference of the others with its top-2 gap."""
    speculative = build(args)
    plain = speculative.plain()
    asked, differences, positions = questions(args), [], 0
    for i, question in enumerate(tqdm(asked, unit="question")):
        a = plain.generate(question["prompt"], **options(args)).ids
        b = speculative.generate(question["prompt"], **options(args)).ids
        positions += len(a)
        if a != b:
            at = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            gap = top_gap(plain, question["prompt"], a[:at])
            differences.append({"question": i, "position": at, "gap": round(gap, 6)})
            print(f"question {i}: first difference at token {at}, top-2 gap {gap:.2e}")
    equal = len(asked) - len(differences)
    print(f"{equal} of {len(asked)} equal, {positions} tokens compared ({speculative.info}, exact {args.exact})")
    return {
        "equal": equal,
        "questions": len(asked),
        "tokens": positions,
        "differences": differences,
        **speculative.info,
    }


@torch.inference_mode()
def top_gap(generator: Generator, prompt: str, ids: list[int]) -> float:
    """Difference of the two largest logits after prompt + ids."""
    state = generator.state(1)
    text = generator.encode(prompt) + ids
    generator.prefill(state, 0, text)
    best = generator.model.logits(state.features[0, 0]).topk(2).values
    return float(best[0] - best[1])


def acceptance(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per round, by category and in all."""
    generator = build(args)
    drafter = head_drafter(generator)
    if drafter and args.children == "likeliest":
        drafter.by_noise = False
    generator.warm_up(args.batch, Sampling(args.temperature, seed=args.seed))
    rounds: dict[str, int] = defaultdict(int)
    tokens: dict[str, int] = defaultdict(int)
    asked = questions(args)
    for lo in tqdm(range(0, len(asked), args.batch), unit="batch"):
        group = asked[lo : lo + args.batch]
        outputs = generator.generate([question["prompt"] for question in group], **options(args))
        for question, output in zip(group, outputs, strict=True):
            for key in (question["category"], "in all"):
                rounds[key] += output.rounds
                tokens[key] += output.round_tokens
    rates = {key: round(tokens[key] / max(1, rounds[key]), 3) for key in rounds}
    print("| category | rounds | tokens per round |\n| --- | --- | --- |")
    for key, rate in rates.items():
        print(f"| {key} | {rounds[key]} | {rate:.2f} |")
    return {"tokens_per_round": rates, "rounds": dict(rounds), **generator.info}


def perplexity(args: argparse.Namespace) -> dict[str, Any]:
    """Perplexity of the text and mean KL divergence from the reference, in nats a token."""
    if not 0 < args.stride < args.window:
        raise FasteaError(f"--stride {args.stride}: it must be at least 1 and less than --window {args.window}")
    plain = {"head": "none", "drafter": "none", "max_seq_len": args.window}
    model = build(args, **plain)
    other = build(args, **plain, checkpoint=args.reference or args.checkpoint, quant=None, dtype="float32")
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FasteaError(f"{args.text}: not readable as text ({error})") from None
    ids = torch.tensor(model.tokenizer.encode_prompt(text))
    if len(ids) < 2:
        raise FasteaError(f"{args.text}: there must be at least two tokens to score")
    loss = other_loss = divergence = 0.0
    scored = 1  # the first token has nothing before it
    bar = tqdm(total=len(ids) - 1, unit="token")
    while scored < len(ids):
        end = min(len(ids), max(scored + args.stride, args.window) if scored == 1 else scored + args.stride)
        window = ids[max(0, end - args.window) : end]
        count = end - scored
        mine, theirs = (log_likelihoods(g, window, count) for g in (model, other))
        wanted = window[-count:, None]
        loss -= mine.gather(1, wanted).sum().item()
        other_loss -= theirs.gather(1, wanted).sum().item()
        divergence += F.kl_div(mine, theirs, log_target=True, reduction="sum").item()
        scored = end
        bar.update(count)
    bar.close()
    count = len(ids) - 1
    result = {
        "tokens": count,
        "perplexity": round(math.exp(loss / count), 4),
        "reference_perplexity": round(math.exp(other_loss / count), 4),
        "kl_divergence": round(divergence / count, 6),
    }
    print(
        f"perplexity {result['perplexity']} (reference {result['reference_perplexity']}), KL {result['kl_divergence']}"
    )
    return {**result, **model.info}


@torch.inference_mode()
def log_likelihoods(generator: Generator, window: torch.Tensor, count: int) -> torch.Tensor:
    """Log-probabilities of the last `count` tokens' places [count, V] after the tokens before them."""
    cache = generator.state(1).cache
    start = torch.zeros(1, dtype=torch.int64)
    features = generator.model(window[None], torch.arange(len(window))[None], start, None, cache)
    logits = generator.model.logits(features[0, -count - 1 : -1])
    return torch.log_softmax(logits[:, : generator.round.valid_vocab], -1)


if __name__ == "__main__":
    sys.exit(main())
