"""Tokens per second that a cost model projects for GPUs, beside published figures. Nothing here is measured.

    python scripts/project_3090.py [--card 3090 4090] [--model llama-3-8b] [--context 4096]

A product takes max(bytes / (bandwidth x share), FLOPs / (tensor peak x share)), rows padded to 8; a kernel costs a
fixed time besides. A round is a draft step for each depth of the tree and one forward of the target over its nodes;
plain decoding is a tree of one node. Shares and times are the same for every card, model and dtype.

Units: GB are powers of ten; bandwidth in GB/s and dense peaks in TFLOPS are NVIDIA's data sheets' and whitepapers'
(GeForce cards sum in fp32 at half the speed of fp16 sums). Bandwidth share 0.85: gpt-fast calls 1,700 of an A100-80's
2,039 GB/s the most that it can. Tensor share 0.65: assumed for few rows. 1.3 us a kernel inside a CUDA graph: Hazy
Research, on an H100. Tokens per round: EAGLE, arXiv 2401.15077, table 5 (LLaMA-2-Chat 7B, MT-bench, greedy).
Writes DIR/projection.md and DIR/projection.png; the last line is one JSON document.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastea.evaluation.report import pyplot
from fastea.flags import Parser


@dataclass(frozen=True)
class Card:
    """bandwidth: GB/s. peaks: TFLOPS with fp32 sums, and with fp16 sums where those are faster."""

    name: str
    bandwidth: float
    peaks: dict[str, float]


@dataclass(frozen=True)
class Weights:
    """Bytes of a weight, with its share of its group's fp16 scale and minimum, and of an output's own scale."""

    name: str
    each: float
    output: float = 0.0


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    kv: int
    intermediate: int
    layers: int
    vocab: int


@dataclass(frozen=True)
class Tree:
    """nodes: root included. rows: most rows of a draft step. tau: tokens per round; mark: * if assumed."""

    name: str
    nodes: int
    depth: int
    rows: int
    tau: float
    mark: str = ""


@dataclass(frozen=True)
class Setup:
    card: Card
    model: Model
    weights: Weights
    tree: Tree
    draft: str = "fp16"
    sums: str = "fp32"
    context: int = 1024


@dataclass(frozen=True)
class Costs:
    """A layer's kernels: 2 norms, 4 products, rotation with cache write, attention in 2, activation. Others of a step:
    embedding, norm, LM head, the pick in 2, bookkeeping."""

    bandwidth_share: float = 0.85
    tensor_share: float = 0.65
    kernel_us: float = 1.3
    layer_kernels: int = 10
    other_kernels: int = 6


class Part(NamedTuple):
    """Bytes read once, FLOPs of every row."""

    bytes: float
    flops: float


Speeds = list[dict[str, Any]]  # card, weights, sums; tokens/s by tree for each draft
RTX_3090 = Card("RTX 3090", 936, {"fp32": 71, "fp16": 142})
RTX_4090 = Card("RTX 4090", 1008, {"fp32": 165.2, "fp16": 330.3})
RTX_3090_TI = Card("RTX 3090 Ti", 1008, {"fp32": 80, "fp16": 160})  # for a published figure only
A100, H200 = Card("A100-80", 2039, {"fp32": 312}), Card("H200", 4800, {"fp32": 989})
LLAMA2 = Model("LLaMA-2-7B", 4096, 4096, 11008, 32, 32000)
LLAMA3 = Model("LLaMA-3-8B", 4096, 1024, 14336, 32, 128256)
FP16, INT8, INT4 = Weights("fp16", 2.0), Weights("int8", 1.0, 2.0), Weights("int4 g128", 0.5 + 2 / 128)
INT4_MIN = Weights("int4 g32 min", 0.5 + 4 / 32)
PLAIN, CHAIN = Tree("plain", 1, 0, 0, 1.0), Tree("chain:5 (6 nodes)", 6, 5, 6, 3.0)
EAGLE1 = Tree("eagle1 (26 nodes)", 26, 5, 6, 3.62)
TREES = (PLAIN, CHAIN, Tree("16 nodes", 16, 5, 6, 3.4, "*"), EAGLE1, Tree("60 nodes", 60, 6, 10, 4.4, "*"))
CARDS = {"3090": RTX_3090, "4090": RTX_4090, "a100-80": A100, "h200": H200}
MODELS = {"llama-2-7b": LLAMA2, "llama-3-8b": LLAMA3}
WEIGHTS = (FP16, INT8, INT4, INT4_MIN)
DRAFTS = {"fp16": (FP16, FP16), "int4": (INT4, INT8)}  # the head's layer, its LM head

# Tokens per second and where the stack loses time, as far as known. gpt-fast and torchao write 200 tokens after 5 and
# read their whole cache; the others do not state their context.
PUBLISHED = (
    ("gpt-fast", Setup(RTX_3090, LLAMA2, FP16, PLAIN), 55.1, "attention over the whole static cache"),
    ("gpt-fast", Setup(RTX_3090, LLAMA2, INT4_MIN, PLAIN), 106.9, "tinygemm: 2.9 x fp16 at one row, bytes allow 3.8"),
    ("EAGLE + gpt-fast", Setup(RTX_3090, LLAMA2, FP16, CHAIN), 100.2, "dense masks, acceptance and glue on the host"),
    ("EAGLE + gpt-fast", Setup(RTX_3090, LLAMA2, FP16, EAGLE1), 100.2, "the same; its tree is not stated"),
    ("EAGLE + gpt-fast", Setup(RTX_3090, LLAMA2, INT4_MIN, CHAIN), 160.4, "the same; fp16 head; tinygemm"),
    ("EAGLE + gpt-fast", Setup(RTX_3090, LLAMA2, INT4_MIN, EAGLE1), 160.4, "the same; tinygemm: 32 rows cost 4 x one"),
    ("ExLlamaV2", Setup(RTX_3090_TI, LLAMA2, INT4, PLAIN), 185.0, "launches by the CPU (it has 4.0 bits, not 4.125)"),
    ("ExLlamaV2", Setup(RTX_4090, LLAMA2, INT4, PLAIN), 211.0, "the same; a short context projects 12 % more"),
    ("gpt-fast", Setup(A100, LLAMA2, FP16, PLAIN, context=205), 104.9, "prefill counted; card limited to 330 W"),
    ("gpt-fast", Setup(A100, LLAMA2, INT8, PLAIN, context=205), 155.6, "the same; short products, never at full speed"),
    ("gpt-fast", Setup(A100, LLAMA2, INT4_MIN, PLAIN, context=205), 196.8, "the same; unpacking in tinygemm shows"),
    ("torchao", Setup(A100, LLAMA3, FP16, PLAIN, context=205), 95.6, "as gpt-fast, whose model it runs"),
    ("torchao", Setup(A100, LLAMA3, INT8, PLAIN, context=205), 153.0, "as gpt-fast"),
)


def product(weights: Weights, outputs: int, inputs: int) -> Part:
    return Part(outputs * (inputs * weights.each + weights.output), 2 * outputs * inputs)


def layer(m: Model, weights: Weights, context: int) -> list[Part]:
    """qkv, o, gate and up, down; attention over an fp16 cache; weights of two norms."""
    h, wide = m.hidden, m.intermediate
    products = [product(weights, *shape) for shape in ((h + 2 * m.kv, h), (h, h), (2 * wide, h), (h, wide))]
    return [*products, Part(2 * 2 * m.kv * context, 4 * h * context), Part(2 * 2 * h, 0)]


def target_step(m: Model, weights: Weights, context: int) -> list[Part]:
    """The layers and the LM head, which is int8 where they are quantized."""
    return [*layer(m, weights, context) * m.layers, product(FP16 if weights is FP16 else INT8, m.vocab, m.hidden)]


def draft_step(m: Model, draft: str, context: int) -> list[Part]:
    """The EAGLE-1 head: fc from embedding and feature, one layer, the LM head."""
    weights, head = DRAFTS[draft]
    fc = product(weights, m.hidden, 2 * m.hidden)
    return [fc, *layer(m, weights, context), product(head, m.vocab, m.hidden)]


def read(parts: Iterable[Part]) -> float:
    return sum(part.bytes for part in parts)


def floor_ms(card: Card, m: Model, weights: Weights, context: int) -> float:
    """Reading weights and cache once at full bandwidth."""
    return read(target_step(m, weights, context)) / card.bandwidth / 1e6


def break_even(card: Card, m: Model, weights: Weights, sums: str) -> float:
    """Rows for which the products, at full peaks, take as long as reading their weights."""
    a_row = sum(part.flops for part in target_step(m, weights, 0)) / (1e12 * card.peaks[sums])
    return 1e-3 * floor_ms(card, m, weights, 0) / a_row


def seconds(parts: Iterable[Part], rows: int, layers: int, s: Setup, costs: Costs) -> float:
    rate, peak = 1e9 * s.card.bandwidth * costs.bandwidth_share, 1e12 * s.card.peaks[s.sums] * costs.tensor_share
    padded = 8 * math.ceil(rows / 8)
    kernels = layers * costs.layer_kernels + costs.other_kernels
    return sum(max(p.bytes / rate, padded * p.flops / peak) for p in parts) + 1e-6 * kernels * costs.kernel_us


def tokens_per_s(s: Setup, costs: Costs) -> float:
    verify = seconds(target_step(s.model, s.weights, s.context), s.tree.nodes, s.model.layers, s, costs)
    draft = seconds(draft_step(s.model, s.draft, s.context), s.tree.rows, 1, s, costs)
    return s.tree.tau / (verify + s.tree.depth * draft)


def speeds(cards: list[Card], m: Model, context: int, costs: Costs) -> Speeds:
    found = []
    for card, weights, sums in ((c, w, sums) for c in cards for w in WEIGHTS for sums in c.peaks):
        setups = {draft: [Setup(card, m, weights, t, draft, sums, context) for t in TREES] for draft in DRAFTS}
        by_draft = {f"{draft} draft": [round(tokens_per_s(s, costs), 1) for s in row] for draft, row in setups.items()}
        found.append({"card": card.name, "weights": weights.name, "sums": sums, **by_draft})
    return found


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(map(str, line)) for line in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def check_rows(costs: Costs) -> list[tuple[str | float, ...]]:
    rows: list[tuple[str | float, ...]] = []
    for stack, s, figure, loss in PUBLISHED:
        what, speed = (s.card.name, s.model.name, s.weights.name, s.tree.name, s.context), tokens_per_s(s, costs)
        rows.append((stack, *what, round(speed, 1), figure, f"{speed / figure:.2f}", loss))
    return rows


def floor_table(cards: list[Card], m: Model, context: int) -> str:
    rows = []
    for w in WEIGHTS:
        sizes = (read(layer(m, w, 0)) * m.layers, read(target_step(m, w, 0)), read(target_step(m, w, context)))
        floors = (f"{(ms := floor_ms(c, m, w, context)):.2f}, {1e3 / ms:.0f}" for c in cards)
        even = ("/".join(f"{break_even(c, m, w, sums):.0f}" for sums in c.peaks) for c in cards)
        rows.append((w.name, *(f"{size / 1e9:.3f}" for size in sizes), *floors, *even))
    names = [card.name for card in cards]
    return table(("weights", "layers, GB", "+ LM head", "+ cache", *names, *(f"{n}, rows" for n in names)), rows)


def speed_table(found: Speeds) -> str:
    rows = []
    for *key, fp16, int4 in (line.values() for line in found):
        rows.append((*key, f"{fp16[0]:.0f}", *(f"{a:.0f} / {b:.0f}" for a, b in zip(fp16[1:], int4[1:], strict=True))))
    return table(("card", "weights", "sums", "plain", *(f"{t.name}, {t.tau:.2f}{t.mark}" for t in TREES[1:])), rows)


def plot(found: dict[str, Speeds], cards: list[Card], title: str, out: Path) -> bool:
    """A row of panels a model, a panel a card, a line a kind of weights; matplotlib is optional."""
    plt = pyplot()
    if plt is None:
        return False

    size = (3.4 * len(cards) + 0.6, 3.1 * len(found) + 1.2)
    figure, panels = plt.subplots(len(found), len(cards), figsize=size, squeeze=False, layout="constrained")
    nodes, lines = [t.nodes for t in TREES], {}
    colors = {w.name: f"C{i}" for i, w in enumerate(WEIGHTS)}
    for row, (model, speed) in zip(panels, found.items(), strict=True):
        for axis, card in zip(row, cards, strict=True):
            for line in (line for line in speed if line["card"] == card.name):
                look = {"color": colors[line["weights"]], "linestyle": "-" if line["sums"] == "fp32" else "--"}
                drawn = axis.plot(nodes, line["int4 draft"], marker=".", **look)
                lines[f"{line['weights']}, {line['sums']} sums"] = drawn[0]
            axis.set(title=f"{card.name}, {model}", xlabel="nodes of the tree", xticks=nodes, ylim=(0, None))
            axis.set_xticklabels([f"{t.nodes}{t.mark}" for t in TREES])
            axis.grid(alpha=0.25)
        row[0].set_ylabel("projected tokens/s")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(WEIGHTS), frameon=False)
    figure.suptitle(title)
    figure.savefig(out, dpi=100)
    plt.close(figure)
    return True


CHECKS = ("stack", "card", "model", "weights", "tree", "context", "projected", "published", "ratio", "time lost by")
TEXT = """# Projected speed on GPUs

    {command}

**Every speed here is projected by a cost model; no card has run this code.** Only the column "published" was measured,
by others on their own stacks. The model and its sources are in the script's docstring. Here: bandwidth share
{c.bandwidth_share}, tensor share {c.tensor_share}, {c.kernel_us} us a kernel, {c.layer_kernels} kernels a layer and {c.other_kernels} besides.

## Beside published figures, tokens/s

{checks}

The same shares serve every line: a ratio above 1 is time that the stack loses (last column: known or likely) or that
the model does not see. It does not see the arithmetic of unpacking weights, products too short to fill the memory's
pipeline, activations, logits, the host, clocks and power limits. On an A100 the published int8 and int4 stacks stay
far below it: read the figures for A100 and H200 as bounds. Contexts of 1024 are assumed. EAGLE's paper does not state
the tree of its gpt-fast figures; the default of that port is chain:5.
"""  # noqa: E501 (a line of fields)
SECTION = """
## {m.name}: floors and projected speed, {context} tokens of context

Under a card's name: milliseconds to read weights and cache once at full bandwidth, projected tokens/s of plain decoding
at that floor; then the rows from which products take longer than reading the weights, at full peaks, fp32/fp16 sums.

{floors}

Projected tokens/s, left of the slash with an fp16 draft head, right with an int4 one and an int8 LM head; int4 g32 min
is what `--quant int4` makes. After a tree its tokens per round; * assumed: between the paper's for 6 and 26 nodes, and
between 26 and 4.70, EAGLE-2's with its dynamic tree of 60.{note}

{speeds}
"""
NOTE = " All are LLaMA-2-Chat 7B's: assumptions for this model."


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(__doc__, prog="project_3090.py")
    add = parser.add_argument
    add("--card", nargs="+", choices=CARDS, default=list(CARDS))
    add("--model", nargs="+", choices=MODELS, default=list(MODELS))
    add("--context", type=int, default=1024, help="tokens in the cache")
    for name, value in vars(Costs()).items():
        add(f"--{name.replace('_', '-')}", type=type(value), default=value)
    add("--out", type=Path, default=Path("benchmarks"), metavar="DIR")
    args = parser.parse_args(argv)
    costs = Costs(**{name: getattr(args, name) for name in vars(Costs())})
    for name, value in {"context": args.context, **vars(costs)}.items():
        share = name.endswith("share")
        if not (0 < value <= 1 if share else 0 <= value < 1e9):
            words = "a share lies in (0, 1]" if share else "a number from 0 on is expected"
            parser.error(f"--{name.replace('_', '-')} {value}: {words}")
    cards, models = [CARDS[name] for name in args.card], [MODELS[name] for name in args.model]
    found = {m.name: speeds(cards, m, args.context, costs) for m in models}
    command = shlex.join(["python", "scripts/project_3090.py", *argv])
    checks = check_rows(costs)
    text = TEXT.format(command=command, c=costs, checks=table(CHECKS, checks))
    for m in models:
        tables = {"floors": floor_table(cards, m, args.context), "speeds": speed_table(found[m.name])}
        text += SECTION.format(m=m, context=args.context, note=NOTE * (m is LLAMA3), **tables)
    title = f"Projected, not measured: {args.context} tokens of context, int4 draft head\n"
    title += "tokens per round of LLaMA-2-Chat 7B throughout; * assumed"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if plot(found, cards, title, args.out / "projection.png"):
            text += "\n![projected tokens/s against the tree's nodes](projection.png)\n"
        (args.out / "projection.md").write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"{error.filename or args.out}: {error.strerror}")
    figures = {"context": args.context, **vars(costs), "trees": [t.name for t in TREES], "tokens_per_s": found}
    print(text)
    print(json.dumps({"projected": True, **figures, "checks": [dict(zip(CHECKS, row, strict=True)) for row in checks]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
