"""Comparisons on a card: each is a generator of (what, the worst error as a share of what is allowed)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fastea.config import ModelConfig
from fastea.drafters import Drafter
from fastea.fused import FusedRound
from fastea.generator import Generator
from fastea.kernels import choose, compact, gate, gemm, norm, pick, rope, topk, walk
from fastea.kernels.attention import expand_words
from fastea.kernels.noise import gumbel
from fastea.kernels.tree_attention import tree_attention
from fastea.quantize.forms import QuantizedWeight, Scheme
from fastea.tokenizer import Tokenizer
from fastea.tree import EAGLE1_PATHS, DynamicTree, Tree, chain
from gpu_harness import BF16, FORMS, FP16, HEADS, LOW, TOY, Check, Form, bush, drafter_of, grown, scattered, shape

Errors = Iterator[tuple[str, float]]
WRONG = math.inf


def judge(c: Check, checks: Iterable[Callable[[Check], Errors]]) -> None:
    row = c.table("Comparisons", "what", "comparisons", "worst error, share of the allowed", "verdict")
    for check in checks:
        found: dict[str, list[float]] = {}
        for what, error in check(c):
            found.setdefault(what, []).append(WRONG if math.isnan(error) else error)
        for what, errors in found.items():
            row(what, len(errors), max(errors), "ok" if max(errors) <= 1 else "WRONG")
            c.verdict(what, max(errors) <= 1)


def share(actual: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor | float) -> float:
    """The largest error in units of the allowed one."""
    return float(((actual.double() - exact).abs() / allowed).nan_to_num(WRONG).max())


def rounded(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """For values that are rounded once, from fp32 arithmetic."""
    return share(actual, exact, (torch.finfo(actual.dtype).eps / 2 + 1e-5) * exact.abs() + 1e-6)


def same(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Bit by bit."""
    a, b = (t.contiguous().view(torch.uint8) for t in (actual, expected.to(actual.device)))
    return 0.0 if actual.dtype == expected.dtype and torch.equal(a, b) else WRONG


def correct_products(c: Check) -> Errors:
    """Sums in fp32 may be off by 3e-4 of the root of the summed squares, sums in fp16 by 1e-2; an input that is left
    out moves a result by 8e-3 and more. Activations for sums in fp16 go up to the end of that type."""
    shapes = [(100, 96), (960, 576), (576, 1536), (12288, 4096), (4096, 11008), (4096, 14336)]
    cases = [*itertools.product(c.sized(FORMS, FORMS[::6]), c.sized(shapes, shapes[:1]))]
    cases += [(form, (130, 100)) for form in FORMS[::5]]
    cases += [(form, (128256, 4096)) for form in c.sized(FORMS[:3], ())]
    for form, (outputs, inputs) in cases:
        weight, what = c.weight(form.scheme, outputs, inputs), f"product, {form.name}"
        tensors = gemm.layout(weight, form.dtype, c.device)
        some = torch.randperm(outputs, device=c.device)[:1024]
        held = weight.dequantized(some) if isinstance(weight, QuantizedWeight) else weight[some].to(form.dtype)
        exact = held.to(c.device).double()
        for rows in (26, 70) if form in FORMS[:3] and not c.gpu.dry else (26,):
            x = (c.normal(rows, inputs) * (1e4 if form.half else 1)).clamp(-65504, 65504).to(form.dtype)
            parts = gemm.partials(x, tensors, form.half)
            allowed = (x.double().square() @ exact.square().t()).sqrt() * (1e-2 if form.half else 3e-4)
            yield what, share(parts.double().sum(0)[:, some], x.double() @ exact.t(), allowed)
            yield what, WRONG if bool(parts[:, :, outputs:].any()) else 0.0


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> list[torch.Tensor]:
    """In fp64, and what rounding weights and results to q's dtype may move. q: [R, H, D]; k, v: [KV, L, D]; seen:
    [R, L]."""
    unit, least = torch.finfo(q.dtype).eps / 2 + 2e-5, 2.0**-25 if q.dtype == FP16 else 0.0
    queries, k, v = q.double().unflatten(1, (len(k), -1)), k.double(), v.double()
    scores = torch.einsum("rkgd,kld->rkgl", queries, k) * q.shape[2] ** -0.5
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    weight = (scores - scores.amax(-1, keepdim=True)).exp()
    moved = (weight * unit).clamp(min=least) * seen[:, None, None]
    pairs, total = ((weight, v), (moved, v.abs())), weight.sum(-1, keepdim=True)
    exact, moved = (torch.einsum("rkgl,kld->rkgd", *pair) / total for pair in pairs)
    return [exact.flatten(1, 2), (moved + 2 * unit * exact.abs() + 1e-6).flatten(1, 2)]


def correct_attention(c: Check) -> Errors:
    """Wherever no row may look the cache is NaN."""
    starts, kinds = c.sized((0, 5, 31, 33, 272, 530, 1500), (33,)), ("causal", "eagle1", "deep", "lists")
    for (size, heads, kv), start, kind in itertools.product(c.sized(HEADS, [(16, 2, 1)]), starts, kinds):
        if kind == "lists" and size > 64:
            continue  # drafts alone use them
        dtype = BF16 if size == 96 else FP16
        tree = bush(*c.sized((64, 16), (5, 3))) if kind == "deep" else c.sized(Tree(EAGLE1_PATHS, ""), chain(2))
        rows = 5 if kind == "causal" else len(tree)
        k, v = torch.full((2, 1, kv, start + 100, size), torch.nan, dtype=dtype, device=c.device)
        for cache in (k, v):
            cache[:, :, : start + rows] = c.normal(1, kv, start + rows, size, dtype=dtype)
        q, visible = c.normal(1, rows, heads, size, dtype=dtype), None
        slots = torch.ones(rows, rows, dtype=torch.bool, device=c.device).tril()
        if kind != "causal":
            visible = tree.words[None].to(c.device)
            slots = expand_words(visible[0], rows)
        if kind == "lists":  # places of what is visible, by depth
            visible = torch.where(slots, torch.arange(rows, device=c.device), 99).sort(1).values[None, :, :17]
            visible = visible.where(visible < 99, -1)
        out = tree_attention(q, k, v, c.at(start), visible)[0]
        seen = torch.cat((slots.new_ones(rows, start), slots), 1)
        exact = exact_attention(q[0], k[0, :, : start + rows], v[0, :, : start + rows], seen)
        yield f"attention, {heads}/{kv} heads of {size}, {kind}", share(out, *exact)


def correct_choice(c: Check) -> Errors:
    """Greedy ids as on a CPU, ties, padding and NaN included; sampled ids wherever the two best are 1e-3 apart."""
    for vocab in c.sized((300, 49152, 128256), (300,)):
        logits = (c.normal(26, vocab + 50) * 12).round() / 4
        logits[:, vocab:] = 99.0
        logits[3, 7], logits[4, :vocab] = torch.nan, -torch.inf
        given = (None, 0.0, 0, 1.0, vocab)
        for pair in zip(choose.choose(logits, *given), choose.choose_reference(logits.cpu(), *given), strict=True):
            yield "choice, greedy", same(*pair)
        keys, some = c.ids(6, below=2**62), c.normal(6, vocab) * 3
        for filters in c.sized([(0.7, 0, 1.0), (1.5, 40, 1.0), (1.0, 0, 0.9), (3.0, 300, 0.95)], [(1.0, 40, 0.9)]):
            ids, _ = choose.choose(some, keys, *filters, vocab)
            scores = pick.log_probs(some.cpu(), *filters) + gumbel(keys.cpu(), torch.arange(vocab))
            best, second = scores.topk(2).values.unbind(1)
            right = (ids.cpu() == scores.argmax(1)) | (best - second < 1e-3)
            yield "choice, sampled", 0.0 if bool(right.all()) else WRONG


def correct_between(c: Check) -> Errors:
    """What lies between the products."""
    sizes = c.sized([(1, 26, 576), (3, 5, 4096), (8, 64, 11008)], [(3, 2, 96)])
    for (splits, rows, width), dtype in itertools.product(sizes, (FP16, BF16)):
        parts = F.pad(c.dyadic(splits, rows, 2 * width), (0, 28), value=torch.nan)
        residual, bias = c.dyadic(rows, width, dtype=dtype), c.dyadic(width, dtype=dtype)
        both = parts.double().sum(0)[:, : 2 * width]
        total, (left, right) = both[:, :width], both.to(dtype).double().chunk(2, -1)
        yield "add", same(norm.add(parts, residual, bias, width, dtype), (total + bias + residual).to(dtype))
        yield "add", same(norm.add(parts, None, None, width, torch.float32), total.float())
        added, normed = norm.add_norm(parts, residual, bias, 1e-5)
        scale = (added.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        yield "add and norm", same(added, (total + residual).to(dtype))
        yield "add and norm", rounded(normed, added.double() * scale * bias)
        yield "gate", rounded(gate.silu_mul(parts, width, dtype), left * torch.sigmoid(left) * right)
    for (size, heads, kv), dtype in itertools.product(c.sized(HEADS, [(16, 2, 1)]), (FP16, BF16)):
        rows, width = c.sized(26, 3), (heads + 2 * kv) * size
        angles, positions = c.normal(200, size // 2), c.ids(2, rows, below=200)
        one = c.normal(2, 2, kv, rows + 12, size, dtype=dtype)
        two = one.clone()
        given = [c.dyadic(3, 2 * rows, width), c.dyadic(width, dtype=dtype)]
        given += [torch.stack((angles.cos(), angles.sin()), 1), positions]
        q = rope.rope_write(*given, *one, c.at(5, 0), 2, heads)
        expected = rope.rope_write_reference(*given, *two, c.at(5, 0), 2, heads)
        yield "rotation", max(same(q, expected), same(one, two))
        norms = (*c.dyadic(2, size, dtype=dtype), 1e-5)
        q = rope.rope_write(*given, *one, c.at(5, 0), 2, heads, *norms)
        expected = rope.rope_write_reference(*given, *two, c.at(5, 0), 2, heads, *norms).double()
        unit = torch.finfo(dtype).eps * expected.abs().amax(-1, keepdim=True)  # rounded twice
        yield "rotation after norms", max(share(q, expected, 2 * unit), same(one[1], two[1]))


def correct_integers(c: Check) -> Errors:
    for seed in range(c.sized(8, 1)):
        tree = grown(seed, c.sized(64, 9))
        tokens, picks = c.ids(2, 3, len(tree), below=3)
        found = walk.accept_walk(tokens, picks, tree.parent.to(c.device), tree.depth_max)
        expected = walk.accept_walk_reference(tokens.cpu(), picks.cpu(), tree.parent, tree.depth_max)
        yield "walk", max(itertools.starmap(same, zip(found, expected, strict=True)))
        cache = c.normal(4, 3, 2, 100, c.sized(128, 16), dtype=FP16)
        moved = cache.clone()
        for run, which in ((compact.compact, cache), (compact.compact_reference, moved)):
            run(which, c.at(0, 7, 30), found[0])
        yield "compaction", same(cache, moved)
    for width, count in c.sized([(32000, 10), (128256, 4), (4097, 16)], [(100, 4)]):
        scores = (c.normal(26, width) * 20).round() / 4
        scores[2] = scores[2].where(c.normal(width) > 0, -torch.inf)
        scores[2, ::3] = torch.nan
        values, ids = topk.top_children(scores, count)
        expected = topk.top_children_reference(scores.cpu(), count)
        yield "best children", max(same(ids, expected[1]), same(values + 0, expected[0] + 0))  # zeros of either sign


def rows_of_products(c: Check) -> Errors:
    """Every row alone against the same row among 2 .. 64, at its place and at others."""
    counts, shapes = c.sized((range(2, 65), [(4096, 4096), (576, 1536)]), ((2, 9), [(64, 128)]))
    for form, (outputs, inputs) in itertools.product(c.sized(FORMS, FORMS[::7]), shapes):
        tensors = gemm.layout(c.weight(form.scheme, outputs, inputs), form.dtype, c.device)
        x = c.uneven(counts[-1], inputs, dtype=form.dtype)
        alone = torch.cat([gemm.partials(row[None], tensors, form.half) for row in x], 1)
        for count, last in itertools.product(counts, (False, True)):
            some = slice(len(x) - count, None) if last else slice(count)
            yield f"product, {form.name}", same(gemm.partials(x[some], tensors, form.half), alone[:, some])


def rows_between(c: Check, dtype: torch.dtype) -> Errors:
    rows, width = c.sized((64, 4096), (3, 96))
    parts, residual, weight = c.uneven(3, rows, 2 * width), c.uneven(rows, width, dtype=dtype), c.normal(width)
    scores, keys = c.normal(rows, c.sized(32000, 100)).mul(8).round(), c.ids(rows, below=2**62)
    angles, positions = c.normal(200, 8), c.ids(1, rows, below=200)
    table = torch.stack((angles.cos(), angles.sin()), 1)

    def rotated(at: slice) -> torch.Tensor:
        caches = torch.zeros(2, 1, 1, rows + 3, 16, dtype=dtype, device=c.device)
        q = rope.rope_write(parts[:, at, :64], None, table, positions[:, at], *caches, c.at(3), at.start or 0, 2)
        return torch.cat((q[0].flatten(1), *caches[:, 0, 0, 3:][:, at]), 1)

    runs: dict[str, Callable[[slice], torch.Tensor]] = {
        "norm": lambda at: norm.add_norm(parts[:, at], residual[at], weight, 1e-5)[1],
        "add": lambda at: norm.add(parts[:, at], residual[at], None, width, dtype),
        "gate": lambda at: gate.silu_mul(parts[:, at], width, dtype),
        "rotation": rotated,
        "best children": lambda at: topk.top_children(scores[at], 4)[1],
        "choice": lambda at: choose.choose(scores[at], keys[at], 0.8, 40, 0.9)[0],
    }
    for name, run in runs.items():
        alone = torch.cat([run(slice(row, row + 1)) for row in range(rows)])
        yield f"{name}, {dtype}", same(run(slice(None)), alone)


def rows_of_attention(c: Check) -> Errors:
    """Rows of a text: one by one, as a chunk, as a chain and as a path through a tree, at lengths around every border
    of tiles and splits."""
    borders = [0, 1, *range(15, 18), *range(31, 34), *range(47, 50), *range(255, 258), *range(271, 276), 288, 530]
    length, slots, depth = c.sized((600, 64, 16), (60, 9, 3))
    for size, heads, kv in c.sized(HEADS, [(16, 2, 1)]):
        dtype = BF16 if size == 96 else FP16
        q, text = c.normal(1, length, heads, size, dtype=dtype), c.normal(2, 1, kv, length, size, dtype=dtype)
        for start in c.sized(borders, (17,)):
            at, where = slice(start, start + depth + 1), f"attention, {heads}/{kv} heads of {size}"
            alone = torch.cat(
                [tree_attention(q[:, i : i + 1], *text, c.at(i), None)[0] for i in range(*at.indices(length))]
            )
            yield f"{where}: chunk", same(tree_attention(q[:, at], *text, c.at(start), None)[0], alone)
            words = c.at(*((2 << row) - 1 for row in range(depth + 1)))[None]
            yield f"{where}: chain", same(tree_attention(q[:, at], *text, c.at(start), words)[0], alone)
            tree, _, path = scattered(start, depth, slots)
            rows = c.normal(1, slots, heads, size, dtype=dtype)
            caches = c.normal(2, 1, kv, start + slots, size, dtype=dtype)
            rows[:, path], caches[..., :start, :] = q[:, at], text[..., :start, :]
            caches[..., [start + slot for slot in path], :] = text[..., at, :]
            yield f"{where}: tree", same(tree_attention(rows, *caches, c.at(start), c.at(*tree)[None])[0, path], alone)


def small(c: Check, vocab: int) -> ModelConfig:
    return c.sized(shape(512, 1024, 3, 8, 4, 64, vocab), replace(TOY, vocab_size=vocab))


def rows_of_a_model(c: Check) -> Errors:
    """Logits of a text's rows, one by one and as a path through a tree."""
    start, depth, slots = c.sized((270, 12, 64), (5, 2, 6))
    for form in c.sized([form for form in FORMS if not form.half], [Form(BF16, LOW)]):
        config = replace(small(c, 1000), qk_norm=form.dtype == BF16)
        target = c.target(config, 512, form.dtype, form.scheme)
        plain, branched = (target.new_cache(1, 512) for _ in range(2))

        def logits(tokens: torch.Tensor, positions: Any, at: int, words: Any, cache: Any, target: Any = target) -> Any:
            return target.logits(target(tokens[None], positions[None], c.at(at), words, cache))[0]

        text, steps = c.ids(start + depth + 1, below=1000), torch.arange(start + depth + 1, device=c.device)
        for cache in (plain, branched):
            logits(text[:start], steps[:start], 0, None, cache)
        alone = [logits(text[i : i + 1], steps[i : i + 1], i, None, plain) for i in range(start, len(text))]
        words, levels, path = scattered(1, depth, slots)
        tokens = c.ids(slots, below=1000)
        tokens[path] = text[start:]
        tree = logits(tokens, start + c.at(*levels), start, c.at(*words)[None], branched)
        yield f"logits of a model, {form.name}", same(tree[path], torch.cat(alone))


def texts_of_a_model(c: Check) -> Errors:
    """Greedy and for a seed; with a vocabulary so small that a tree holds every continuation by two tokens."""
    vocab, tokenizer = c.sized(4, 2), Tokenizer(lambda text: [], [b"x"] * c.sized(4, 2), {})
    pairs = itertools.product(range(vocab), repeat=2)
    wide = Tree([*((a,) for a in range(vocab)), *pairs], "wide")
    forms = [Form(FP16), Form(BF16), Form(FP16, Scheme(8)), Form(BF16, LOW), Form(FP16, Scheme(4, 128))]
    settings = {"greedy": {}, "for a seed": {"temperature": 0.9, "top_k": 3, "top_p": 0.9, "seed": 5}}
    for form in c.sized(forms, forms[3:4]):
        target = c.target(small(c, vocab), 256, form.dtype, form.scheme, 2.5)
        head = c.head(target, 256, form.dtype, form.scheme, 0.8)
        trees = c.sized((wide, chain(2), DynamicTree(12, 4, 3)), (wide, DynamicTree(3, 2, 2)))
        drafters = {tree.name: drafter_of(head, tree, c.device) for tree in trees}
        for name in settings if form.scheme is None else ("greedy",):
            options = {"max_new_tokens": c.sized(60, 4), **settings[name]}
            for what, found in answers(target, tokenizer, drafters, [[1, 0, 1] * c.sized(20, 1)], options):
                yield f"text of a model, {form.name}, {name}, {what}", 0.0 if found["equal"] else WRONG


def answers(
    target: Any, tokenizer: Tokenizer, drafters: dict[str, Drafter], prompts: list[Any], options: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plain decoding and each drafter, kernel by kernel and as one graph: whether they write the same, and how fast."""
    expected = None
    for (name, drafter), graph in itertools.product({"plain": None, **drafters}.items(), (False, True)):
        run = Generator(target, tokenizer, drafter, max_seq_len=256, compile=graph, round_kind=FusedRound)
        run.generate(prompts[0], **(options | {"max_new_tokens": 2}))  # what compiles, compiles here
        outputs: Any = [run.generate(prompt, **options) for prompt in prompts]
        written = [output.ids for output in outputs]
        expected = expected or written
        tokens, rounds = sum(o.new_tokens - 1 for o in outputs), sum(o.rounds for o in outputs)
        found: dict[str, Any] = {"equal": written == expected and run.compile == graph}  # off: it could not be captured
        found["tokens_per_s"] = tokens / sum(o.decode_s for o in outputs)
        found["tokens_per_round"] = tokens / max(1, rounds)
        yield f"{name}, {'as a graph' if graph else 'stepwise'}", found


CORRECT = (correct_products, correct_attention, correct_choice, correct_between, correct_integers)
BETWEEN = (functools.partial(rows_between, dtype=dtype) for dtype in (FP16, BF16))
ROWS = (rows_of_products, *BETWEEN, rows_of_attention, rows_of_a_model, texts_of_a_model)
