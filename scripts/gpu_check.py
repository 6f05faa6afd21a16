"""On a card: are the Triton kernels right, do rows keep their bits, and how fast is it all?

    python scripts/gpu_check.py                              # all parts but tune; under 8 minutes
    python scripts/gpu_check.py rows gemm --out rows.json
    python scripts/gpu_check.py --dry-run                    # every path in Triton's interpreter, at toy sizes

A part runs in a process of its own and is ended at its time bound; the others go on. Tables go to stdout as they grow,
everything into one JSON file. Exit code 1: a part found something wrong, crashed or was ended; 2: there is no GPU, or
no such part. Times are of CUDA graphs of many calls over several copies of the weights or caches, so that neither the
host nor the L2 cache shows. A floor is the time to read weights and cache once, at the bandwidth measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from fastea import demo, generator
from fastea.config import ModelConfig, config_to_hf
from fastea.drafters import Draft, Drafter
from fastea.drafters.dynamic import DynamicEagleDrafter
from fastea.drafters.eagle import EagleDrafter
from fastea.eagle import EagleHead
from fastea.flags import Parser
from fastea.fused import FusedEagleHead, FusedLlama, FusedRound
from fastea.generator import Generator
from fastea.head_files import save_head
from fastea.kernels import choose, compact, gate, gemm, norm, pick, rope, topk, walk
from fastea.kernels.attention import expand_words
from fastea.kernels.launch import launch
from fastea.kernels.noise import gumbel
from fastea.kernels.tree_attention import tree_attention
from fastea.linear import Linear
from fastea.llama import Llama
from fastea.loading import load
from fastea.memory import tensor_bytes
from fastea.quantize.forms import QuantizedWeight, Scheme
from fastea.quantized import Quantizer
from fastea.replay import Replay
from fastea.sampling import Sampling
from fastea.state import DecodeState
from fastea.tokenizer import Tokenizer
from fastea.tree import EAGLE1_PATHS, DynamicTree, Tree, chain
from fastea.triton_linear import TritonLinear

FP16, BF16 = torch.float16, torch.bfloat16
PROMPTS = Path(__file__).parent.parent / "benchmarks" / "prompts.jsonl"
TAUS = (3.0, 3.62, 4.5)  # tokens a round that speeds are given for
IDLE = 10.0  # microseconds without a kernel that a round may have
ROOM = 5e9  # bytes beside a model's layers: embedding, LM head, drafting head, what quantizing takes


# What is checked


def shape(hidden: int, wide: int, layers: int, heads: int, kv_heads: int, size: int, vocab: int) -> ModelConfig:
    return ModelConfig(hidden, wide, layers, heads, kv_heads, size, vocab, 1e-5, 1e4, 8192)


LLAMA2, LLAMA3 = shape(4096, 11008, 32, 32, 32, 128, 32000), shape(4096, 14336, 32, 32, 8, 128, 128256)
TOY = shape(32, 64, 1, 2, 1, 16, 64)
HEADS = ((64, 9, 3), (96, 4, 1), (128, 32, 32), (128, 32, 8))  # their size, query heads, KV heads
LOW = Scheme(4, 32, True)
SCHEMES = (Scheme(8), Scheme(8, 32), *(Scheme(4, group, low) for low in (False, True) for group in (32, 64, 128)))


class Form(NamedTuple):
    """Of activations, weights and sums. scheme None: weights in the activations' dtype."""

    dtype: torch.dtype
    scheme: Scheme | None = None
    half: bool = False

    @property
    def name(self) -> str:
        dtype = {FP16: "fp16", BF16: "bf16"}[self.dtype]
        return f"{self.scheme.name + ', ' if self.scheme else ''}{dtype}{', fp16 sums' if self.half else ''}"


FORMS = (
    *(Form(dtype) for dtype in (FP16, BF16)),
    *(Form(FP16, scheme) for scheme in SCHEMES),
    *(Form(BF16, scheme) for scheme in (Scheme(8), Scheme(4, 128), LOW)),
    *(Form(FP16, scheme, half=True) for scheme in SCHEMES),
)
TIMED = (Form(FP16), Form(BF16), *(Form(FP16, s, h) for s in (Scheme(8), Scheme(4, 128), LOW) for h in (False, True)))


def weights_of(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each product."""
    heads, hidden = c.num_heads * c.head_dim, c.hidden_size
    layer = {"qkv": (heads + 2 * c.num_kv_heads * c.head_dim, hidden), "o": (hidden, heads)}
    layer |= {"gate_up": (2 * c.intermediate_size, hidden), "down": (hidden, c.intermediate_size)}
    return {**layer, "LM head": (c.vocab_size, hidden)}


def grown(seed: int, nodes: int) -> Tree:
    """A random tree of so many nodes."""
    rng, children = random.Random(seed), {(): 0}
    while len(children) < nodes:
        parent = rng.choice([path for path in children if len(path) < 7])
        children[(*parent, children[parent])] = 0
        children[parent] += 1
    return Tree([path for path in children if path], f"{nodes} nodes")


def bush(nodes: int, depth: int = 5) -> Tree:
    """One path, and more children of the root."""
    path = [(0,) * n for n in range(1, min(depth + 1, nodes))]
    return Tree([*path, *((r,) for r in range(1, nodes - len(path)))], f"{nodes} nodes")


def scattered(seed: int, depth: int, slots: int) -> tuple[list[int], list[int], list[int]]:
    """A random tree of so many slots through which a path of this depth goes: ancestor words, depths, the path."""
    rng = random.Random(seed)
    path = [0, *sorted(rng.sample(range(1, slots), depth))]
    words, levels = [1], [0]
    for slot in range(1, slots):
        shallow = [j for j in range(slot) if levels[j] < 16]
        parent = path[path.index(slot) - 1] if slot in path else rng.choice(shallow)
        words.append(words[parent] | 1 << slot)
        levels.append(levels[parent] + 1)
    return [word - (word >> 63 << 64) for word in words], levels, path


def drafter_of(head: Any, tree: Tree | DynamicTree, device: str) -> Drafter:
    """On the device."""
    if isinstance(tree, DynamicTree):
        return DynamicEagleDrafter(head, tree)
    return EagleDrafter(head, tree.to(device))


# Where, and what becomes of it


class Gpu:
    """The card: its clock, its memory, its profiler."""

    device, dry, repeats = "cuda", False, 7
    activities, kind = (ProfilerActivity.CPU, ProfilerActivity.CUDA), DeviceType.CUDA

    def __init__(self) -> None:
        self.l2 = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
        self.side = torch.cuda.Stream()

    def facts(self) -> dict[str, Any]:
        p = torch.cuda.get_device_properties(0)
        ask = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader", "-i", "0"]
        try:
            more = subprocess.run(ask, capture_output=True, text=True, timeout=10).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            more = ""
        facts = {"card": p.name, "capability": f"{p.major}.{p.minor}", "multiprocessors": p.multi_processor_count}
        facts |= {"memory, GB": p.total_memory / 1e9, "free, GB": self.free_bytes() / 1e9, "L2, MB": self.l2 / 1e6}
        return facts | {"driver, power limit, clock": more or "nvidia-smi does not say"}

    def copies(self, nbytes: int) -> int:
        """Of something that is read in turn, so that each read finds nothing of it in the L2 cache."""
        return max(2, -(-3 * self.l2 // nbytes))

    def ms(self, *calls: Callable[[], object]) -> float:
        """Milliseconds of one of these calls. Each is made once before, since kernels compile and libraries take their
        workspaces then, which a graph cannot hold."""
        self.sync()
        with torch.cuda.stream(self.side):
            for call in calls:
                call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.side):
            for call in calls:
                call()
        return self.between(graph.replay) / len(calls)

    def between(self, play: Callable[[], object]) -> float:
        """Milliseconds that an action takes on the card, the median. One before it hides the time of starting it."""
        times = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            play()
            begin.record()
            play()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def sync(self) -> None:
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def peak_bytes(self) -> int:
        """The most memory taken since this was last asked."""
        peak = int(torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        return peak


class Interpreter(Gpu):
    """What stands for the card on a CPU. Its times mean nothing."""

    device, dry, repeats = "cpu", True, 1
    activities, kind = (ProfilerActivity.CPU,), DeviceType.CPU

    def __init__(self) -> None:
        self.l2 = 0
        generator.CHUNK = 8  # interpreted rows are slow

    def facts(self) -> dict[str, Any]:
        return {"card": "none: Triton's interpreter on a CPU"}

    def ms(self, *calls: Callable[[], object]) -> float:
        return self.between(calls[0])

    def between(self, play: Callable[[], object]) -> float:
        begin = time.perf_counter()
        play()
        return 1e3 * (time.perf_counter() - begin)

    def sync(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 24 << 30

    def peak_bytes(self) -> int:
        return 0


class Check:
    """One part: what it finds, and what it draws at random. Every line is printed and, with all before it, written to
    its file: nothing is lost if the part is ended."""

    def __init__(self, gpu: Gpu, path: Path, bound: float):
        self.gpu, self.device, self.path, self.bound, self.began = gpu, gpu.device, path, bound, time.monotonic()
        self.found: dict[str, Any] = {"finished": False, "verdicts": [], "notes": [], "tables": []}

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.found["seconds"] = round(time.monotonic() - self.began, 1)
        self.path.write_text(json.dumps(self.found), encoding="utf-8")

    def note(self, text: str) -> None:
        self.found["notes"].append(text)
        self.say(f"\n{text}")

    def verdict(self, what: str, good: bool, counts: bool = True) -> None:
        """Printed where it is bad. counts: whether that is a fault, and not a figure only."""
        self.found["verdicts"].append({"what": what, "good": good, "counts": counts})
        if not good:
            self.say(f"{'WRONG, not so' if counts else 'not so'}: {what}")

    def table(self, title: str, *columns: str) -> Callable[..., None]:
        """Returns what adds a row."""
        rows: list[list[Any]] = []
        self.found["tables"].append({"title": title, "columns": columns, "rows": rows})
        self.say(f"\n{title}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")

        def row(*cells: Any) -> None:
            rows.append([float(f"{x:.4g}") if isinstance(x, float) and math.isfinite(x) else str(x) for x in cells])
            self.say(f"| {' | '.join(f'{x:g}' if isinstance(x, float) else x for x in rows[-1])} |")

        return row

    @property
    def late(self) -> bool:
        """Whether what only measures should leave the rest out; said where it is so."""
        late = time.monotonic() - self.began > 0.8 * self.bound
        if late:
            self.note("what is missing is left out for lack of time")
        return late

    def sized(self, full: Any, toy: Any) -> Any:
        return toy if self.gpu.dry else full

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(size, device=self.device).to(dtype)

    def uneven(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Of many magnitudes, so that the order of a sum shows."""
        return (self.normal(*size) * 2.0 ** (self.ids(*size, below=15) - 7)).to(dtype)

    def dyadic(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Multiples of 1/256, which fp32 adds without error."""
        return ((self.ids(*size, below=4097) - 2048) / 256).to(dtype)

    def ids(self, *size: int, below: int) -> torch.Tensor:
        return torch.randint(0, below, size, device=self.device)

    def at(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    def weight(self, scheme: Scheme | None, outputs: int, inputs: int, size: float = 1.0) -> Any:
        """Of about this size; every group has a scale of its own."""
        if scheme is None:
            return self.normal(outputs, inputs, dtype=FP16).mul_(size)
        scheme = scheme.fitting(inputs)
        groups = -(-inputs // scheme.group) if scheme.group else 1
        scale = torch.rand(outputs, groups, device=self.device).add_(0.5).mul_(size / (74 if scheme.bits == 8 else 4.6))
        low, dtype = (-128, torch.int8) if scheme.bits == 8 else (0, torch.uint8)
        width = groups * (scheme.group or inputs) * scheme.bits // 8
        codes = torch.randint(low, low + 256, (outputs, width), dtype=dtype, device=self.device)
        return QuantizedWeight(scheme, inputs, codes, scale.half(), (-7.5 * scale).half() if scheme.minimum else None)

    def filled(self, module: Any, dtype: torch.dtype, scheme: Scheme | None, gain: float = 1.0) -> Any:
        """Random weights for a module of the meta device, one after the other, in the kernels' form."""
        quantizer = Quantizer(None, dtype, self.device, triton=True)
        for name, parameter in list(module.named_parameters()):
            owner, size = module.get_submodule(name.rpartition(".")[0]), parameter.shape
            if len(size) == 1:
                weight = torch.rand(size, device=self.device) * 0.2 + (0.9 if "norm" in name else -0.1)
            elif isinstance(owner, Linear):
                kind = Scheme(8) if scheme and name == "lm_head.weight" else scheme
                weight = self.weight(kind, *size, gain / size[1] ** 0.5)
            else:
                weight = self.weight(None, *size)
            quantizer.place(module, name, weight)
        return module.eval()

    def target(self, config: ModelConfig, context: int, *form: Any) -> Any:
        with torch.device("meta"):
            target = FusedLlama(config)
        self.filled(target, *form).set_context(context)
        return target

    def head(self, target: Any, context: int, *form: Any) -> Any:
        with torch.device("meta"):
            head = FusedEagleHead(replace(target.config, num_layers=1), fc_bias=True, qkv_bias=False)
        self.filled(head, *form).bind(target, context)
        return head


# Part 1: the card


@triton.jit
def _read_kernel(x, out, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    tl.store(out + block, tl.sum(tl.load(x + block * BLOCK + tl.arange(0, BLOCK)), 0))


def bandwidths(c: Check) -> tuple[float, float]:
    """GB a second, copied (read and written) and read."""
    blocks, block = c.sized((1 << 15, 8192), (2, 1024))
    source = torch.ones(blocks * block, dtype=torch.int32, device=c.device)
    copy, out = torch.empty_like(source), source.new_empty(blocks)
    copied = c.gpu.ms(lambda: copy.copy_(source))
    read = c.gpu.ms(lambda: launch(_read_kernel, (blocks,), source, out, warps=8, BLOCK=block))
    return 2 * source.nbytes / copied / 1e6, source.nbytes / read / 1e6


def device(c: Check) -> None:
    row = c.table("The card", "what", "")
    copied, read = bandwidths(c)
    versions = {"torch": torch.__version__, "its CUDA": torch.version.cuda, "Triton": triton.__version__}
    measured = {"Python": platform.python_version(), "copied, GB/s": copied, "read, GB/s": read}
    for name, value in (c.gpu.facts() | versions | measured).items():
        row(name, value)


# Parts 2 and 3: comparisons. Each is a generator of (what, the worst error as a share of what is allowed).

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


# Parts 4 and 5: times of products and of attention

Made = tuple[list[torch.Tensor], Callable[..., object]]  # what is read; what is called with x and it


def ours(c: Check, form: Form, outputs: int, inputs: int) -> Made:
    layout = gemm.layout(c.weight(form.scheme, outputs, inputs), form.dtype, c.device)
    return [*layout.values()], lambda x, *read: gemm.partials(x, dict(zip(layout, read, strict=True)), form.half)


def torch_16(c: Check, form: Form, outputs: int, inputs: int) -> Made:
    return [c.normal(outputs, inputs, dtype=form.dtype)], F.linear


def torch_int8(c: Check, form: Form, outputs: int, inputs: int) -> Made:
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=c.device)
    return [codes, c.normal(outputs, dtype=form.dtype)], torch.ops.aten._weight_int8pack_mm


def torch_int4(c: Check, form: Form, outputs: int, inputs: int) -> Made:
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=c.device)
    packed, scales = torch.ops.aten._convert_weight_to_int4pack(codes, 8), c.normal(inputs // 128, outputs, 2)
    return [packed, scales.to(form.dtype)], lambda x, w, s: torch.ops.aten._weight_int4pack_mm(x, w, 128, s)


RIVALS = (
    (torch_16, Form(FP16)),
    (torch_16, Form(BF16)),
    (torch_int8, Form(BF16, Scheme(8))),
    (torch_int4, Form(BF16, Scheme(4, 128))),
)


def times(c: Check, made: Made, dtype: torch.dtype, inputs: int, counts: tuple[int, ...]) -> tuple[list[float], int]:
    """Milliseconds for each number of rows, and the bytes that are read."""
    tensors, call = made
    nbytes = sum(t.nbytes for t in tensors)
    copies = [tensors, *([t.clone() for t in tensors] for _ in range(c.gpu.copies(nbytes) - 1))]
    found = []
    for count in counts:
        x = c.normal(count, inputs, dtype=dtype)
        calls = [functools.partial(call, x, *copy) for copy in copies]
        found.append(c.gpu.ms(*calls * -(-16 // len(calls))))
    return found, nbytes


def gemm_times(c: Check) -> None:
    """Partial results are summed by the next kernel, which is not counted; the scaling of rows for fp16 sums is."""
    read, counts = bandwidths(c)[1], c.sized((1, 8, 16, 26, 32, 48, 64), (1, 16))
    kinds = [*((ours, form) for form in c.sized(TIMED, TIMED[::3])), *RIVALS]
    for model, config in c.sized({"LLaMA-2-7B": LLAMA2, "LLaMA-3-8B": LLAMA3}, {"toy": TOY}).items():
        ratios = [i for i, count in enumerate(counts) if count in (16, 26)]
        columns = (*(f"us, M = {m}" for m in counts), "share of the floor", *(f"M = {counts[i]} / 1" for i in ratios))
        row = c.table(f"{model}: products", "weight", "form", *columns)
        sites = itertools.islice(weights_of(config).items(), 0, None, c.sized(1, 3))
        for (site, size), (make, form) in itertools.product(sites, kinds):
            if site == "LM head" and form.scheme and form.scheme.bits == 4:
                continue  # it never is
            if c.late:
                return
            name = form.name if make is ours else f"torch, {form.name}"
            try:
                found, nbytes = times(c, make(c, form, *size), form.dtype, size[1], counts)
            except Exception as error:
                row(f"{site}, {size}", name, f"no: {(str(error).splitlines() or [type(error).__name__])[0][:99]}")
                fault = make is ours and not isinstance(error, torch.OutOfMemoryError)
                c.verdict(f"{model}, {site}, {name} runs", False, counts=fault)
                continue
            rest = (nbytes / read / 1e6 / found[0], *(found[i] / found[0] for i in ratios))
            row(f"{site}, {size}", name, *(1e3 * t for t in found), *rest)


def attention_times(c: Check) -> None:
    """A cache of 16k rows is read as far as it is filled; its empty splits are started all the same."""
    read = bandwidths(c)[1]
    row = c.table("Attention, fp16", "heads", "context", "cache", "rows", "us", "share of the floor")
    lengths = c.sized([(1024, 1024), (1024, 16384), (4096, 4096), (16384, 16384)], [(20, 40)])
    heads, counts = c.sized((HEADS[2:], (1, 16, 26, 60)), (((16, 2, 1),), (1, 3)))
    for (size, many, kv), (context, length), count in itertools.product(heads, lengths, counts):
        if c.late:
            return
        words, nbytes = bush(count).words[None].to(c.device), 4 * kv * context * size
        caches = [c.normal(2, 1, kv, length + 64, size, dtype=FP16) for _ in range(c.gpu.copies(nbytes))]
        q, visible = c.normal(1, count, many, size, dtype=FP16), words if count > 1 else None
        calls = [functools.partial(tree_attention, q, *cache, c.at(context), visible) for cache in caches]
        took = c.gpu.ms(*calls * -(-16 // len(calls)))
        row(f"{many}/{kv} of {size}", context, length, count, 1e3 * took, nbytes / read / 1e6 / took)


# Part 6: a whole model


class Rounds:
    """Rounds of a model over caches that are filled with noise up to `context`."""

    def __init__(self, c: Check, target: Any, context: int):
        self.c, self.target, self.context, self.size = c, target, context, 2 * context
        self.vocab, self.cache = target.config.vocab_size, target.new_cache(1, self.size)
        self.cache.whole.normal_()

    def make(self, tree: Any, head: Any) -> tuple[FusedRound, DecodeState]:
        c, drafter = self.c, drafter_of(head, tree, self.c.device) if head else None
        tree = drafter.tree if drafter else tree.to(c.device)
        draft = drafter.new_cache(1, self.size) if drafter else None
        for cache in (*draft.keys, *draft.values) if draft else ():
            cache.normal_()
        state = DecodeState(self.target, self.cache, draft, 1, tree.depth_max + 1, self.size, 0)
        state.reset(Sampling(), [0])
        prompt, feature = c.ids(self.context, below=self.vocab), c.normal(state.features.shape[2]).to(state.features)
        state.begin(0, prompt, feature, prompt[0], self.size - self.context)
        return FusedRound(self.target, tree, drafter, False, None, self.vocab), state

    def replay(self, tree: Any, head: Any) -> tuple[Replay, float, float]:
        """A whole round as one graph; milliseconds of it on the card, and of the host's loop around it."""
        made, state = self.make(tree, head)
        replay, count = Replay(made, state), self.c.sized(20, 2)
        state.length.fill_(self.context)
        took = self.c.gpu.between(replay.play)
        state.length.fill_(self.context)
        replay.begin()
        replay.step()
        begin = time.perf_counter()
        for _ in range(count):
            replay.step()
        return replay, took, 1e3 * (time.perf_counter() - begin) / count


def model(c: Check) -> None:
    """A round's time hardly depends on what is accepted: speeds are so many tokens a round over that time."""
    read, context, config = bandwidths(c)[1], *c.sized((1024, LLAMA2), (24, TOY))
    paper = Tree(EAGLE1_PATHS, "eagle1")
    trees = c.sized((chain(0), chain(5), DynamicTree(60, 10, 6), paper), (chain(0), DynamicTree(3, 2, 2), bush(5, 2)))
    for scheme in c.sized((None, Scheme(8), Scheme(4, 128)), (Scheme(4, 128),)):
        form = Form(FP16, scheme)
        if c.late:
            return
        c.gpu.peak_bytes()
        products = sum(n * k for site, (n, k) in weights_of(config).items() if site != "LM head")
        layer = products * (form.scheme.bits / 7.6 if form.scheme else 2)
        layer += 4 * config.num_kv_heads * config.head_dim * (2 * context + 64)
        layers = max(1, min(config.num_layers, int((c.gpu.free_bytes() - ROOM) / layer)))
        more = config.num_layers / layers - 1
        part = f" (times of {layers} layers, scaled to {config.num_layers})" if more else ""
        target = c.target(replace(config, num_layers=layers), 2 * context, form.dtype, form.scheme)
        rounds, verify = Rounds(c, target, context), {}
        nbytes = tensor_bytes(target.layers, target.lm_head) + rounds.cache.nbytes * context / (2 * context + 64)
        title = f"LLaMA-2-7B, random weights, {form.name}, {context} tokens of context{part}"
        row = c.table(title, "step", "rows", "ms", "share of the floor")
        for nodes in sorted({*c.sized((1, 16, 26, 32, 60), (1, 3)), *map(len, trees)}):
            step, state = rounds.make(bush(nodes), None)
            draft = Draft(c.ids(1, nodes, below=config.vocab_size))
            verify[nodes] = c.gpu.ms(functools.partial(step.verify, state, draft))
            what = "plain" if nodes == 1 else "verify"
            row(what, nodes, verify[nodes] * (1 + more), nbytes / read / 1e6 / verify[nodes])
        heads = {"none": None, "as the target": c.head(target, 2 * context, form.dtype, form.scheme, 0.7)}
        if form.scheme != Scheme(4, 128) or c.gpu.dry:
            heads["int4"] = c.head(target, 2 * context, form.dtype, Scheme(4, 128), 0.7)
            lm = c.weight(Scheme(8), config.vocab_size, config.hidden_size, config.hidden_size**-0.5)
            heads["int4"].lm = TritonLinear(lm, None, form.dtype, c.device)
        pairs = itertools.product(heads.items(), trees)
        drafting = [(name, head, tree) for (name, head), tree in pairs if (head is None) == (len(tree) == 1)]
        for name, head, tree in drafting:
            if head:
                step, state = rounds.make(tree, head)
                took = c.gpu.ms(functools.partial(step.draft, state))
                row(f"drafting {tree.name}, head {name}", f"{tree.depth_max} steps", took, "")
        row = c.table(f"Rounds as one graph, {form.name}{part}", "head", "tree", "ms", "host gap, us", *(
            f"tokens/s at {tau} a round, SYNTHETIC" for tau in TAUS
        ))  # fmt: skip
        for name, head, tree in drafting:
            replay, took, wall = rounds.replay(tree, head)
            whole = took + more * verify[len(tree)]
            row(name, tree.name, whole, 1e3 * (wall - took), *(1e3 * (tau if head else 1) / whole for tau in TAUS))
        c.note(f"{form.name}: most memory held {c.gpu.peak_bytes() / 1e9:.1f} GB")
        if form.scheme == Scheme(4, 128):  # the last; at the end, since a profiler may fail
            profiled(c, f"{tree.name}, {form.name}", replay.play)
        del target, rounds, heads, drafting, head, replay


def profiled(c: Check, what: str, play: Callable[[], object]) -> None:
    """Of one round: what it starts on the card, copies from the host among it, and the longest time in which nothing
    runs; the profiler itself makes these longer."""
    for _ in range(2):  # the first one pays for the profiler's start
        c.gpu.sync()
        with torch.profiler.profile(activities=c.gpu.activities) as profile:
            play()
            c.gpu.sync()
    events = (e for e in profile.events() if e.device_type == c.gpu.kind)
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    ends = itertools.accumulate((end for _, end, _ in spans), max)
    idle = max((span[0] - end for span, end in zip(spans[1:], ends, strict=False)), default=0.0)
    copied = sum("HtoD" in name for _, _, name in spans)
    row = c.table(f"Inside a round: {what}", "launches", "copies from the host", "longest idle time, us")
    row(len(spans) or "the profiler sees none", copied, idle)
    c.verdict("no copy from the host in a round", not copied)
    c.verdict(f"never idle for more than {IDLE:g} us", idle <= IDLE or c.gpu.dry, counts=False)


# Part 7: the demo model


def demo_model(c: Check) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = toy_checkpoint(Path(folder)) if c.gpu.dry else demo.cache_folder() / Path(demo.MEMBER).name
        try:
            if path.exists():
                demo_texts(c, path)
            else:
                c.note(f"left out: there is no {path}; fastea fetches it on its first run")
        except ImportError as error:
            c.note(f"left out: {error}")


def demo_texts(c: Check, path: Path) -> None:
    prompts, options = [[1, 2, 3]], {"max_new_tokens": c.sized(64, 3), "ignore_eos": True}
    if not c.gpu.dry:
        prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:4]]
    row = c.table("The demo model, greedy", "weights", "decoding", "tokens/s", "tokens a round", "text")
    for quant in c.sized((None, "int8", "int4"), ("int4",)):
        run = load(path, tree="eagle1", quant=quant, dtype="float16", device=c.device, kernels="triton")
        assert isinstance(run.drafter, EagleDrafter)
        short = EagleDrafter(run.drafter.head, chain(c.sized(5, 2)).to(c.device))
        drafters = c.sized({"eagle1": run.drafter, "chain:5": short}, {"chain:2": short})
        for what, found in answers(run.model, run.tokenizer, drafters, prompts, options):
            text, name = "equal" if found["equal"] else "ANOTHER, or no graph", quant or "fp16"
            row(name, what, found["tokens_per_s"], found["tokens_per_round"], text)
            c.verdict(f"demo model, {name}, {what}: the text is plain decoding's", found["equal"])


def toy_checkpoint(folder: Path) -> Path:
    """Of toy size, with a head beside it and a vocabulary of single characters."""
    target, head = Llama(TOY), EagleHead(TOY, True, False)
    for parameter in (*target.parameters(), *head.parameters()):
        parameter.normal_().div_(parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1)
    torch.save({name: p.detach().clone() for name, p in target.named_parameters()}, folder / "pytorch_model.bin")
    save_head(head, folder / "eagle", {})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {chr(33 + i): i for i in range(TOY.vocab_size)}
    text = {"version": "1.0", "pre_tokenizer": level, "decoder": level, "added_tokens": []}
    text["model"] = {"type": "BPE", "vocab": vocabulary, "merges": []}
    for name, value in (("config", config_to_hf(TOY)), ("tokenizer", text)):
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


# Part 8, by name only: settings for kernels/tiles.json


def tune(c: Check) -> None:
    """Every setting's time beside the present one's, over weights and numbers of rows; those under which a row's bits
    depend on the number of rows are refused."""
    sizes = c.sized([size for site, size in weights_of(LLAMA2).items() if site != "LM head"], [(64, 128)])
    forms = [Form(FP16, scheme) for scheme in c.sized((None, Scheme(8), Scheme(4, 128), LOW), (LOW,))]
    present, counts = gemm.card(c.device), c.sized((1, 26), (1, 9))

    def measured(setting: gemm.Card, forms: list[Form]) -> tuple[list[float], bool]:
        """Times, and whether rows keep their bits. The setting stays: this process does nothing else."""
        gemm.card = lambda device: setting
        took, kept = list[float](), True
        for form, size in itertools.product(forms, sizes):
            tensors, call = made = ours(c, form, *size)
            x: Any = c.uneven(counts[1], size[1], dtype=form.dtype)
            several: Any = call(x, *tensors)
            kept = kept and same(several[:, :1], call(x[:1], *tensors)) == 0
            took += times(c, made, form.dtype, size[1], counts)[0]
        return took, kept

    row = c.table("Settings of products", "waves", "warps", "stages", "time, the present one's 1", "bits of rows")
    base, best, taken = measured(present, forms)[0], 1.0, present
    for warps, stages, waves in itertools.product(*c.sized(((4, 8), (2, 3, 4), (1, 2, 4)), ((4,), (2,), (1,)))):
        if c.late:
            break
        setting = replace(present, waves=waves, warps=warps, stages=stages)
        took, kept = measured(setting, forms)
        ratio = statistics.geometric_mean(t / b for t, b in zip(took, base, strict=True))
        row(waves, warps, stages, ratio, "equal" if kept else "DIFFER: refused")
        best, taken = (ratio, setting) if kept and ratio < best else (best, taken)
    sums = [measured(taken, [form._replace(half=half) for form in forms if form.scheme])[0] for half in (False, True)]
    ratio = statistics.geometric_mean(half / full for full, half in zip(*sums, strict=True))
    entry = {name: getattr(taken, name) for name in ("waves", "warps", "stages")} | {"half_sums": ratio < 0.97}
    text = json.dumps({c.gpu.facts()["card"]: entry})
    c.note(f"sums in fp16 take {ratio:.3f} of the time of sums in fp32; for kernels/tiles.json: {text}")


# Parts as processes


class Part(NamedTuple):
    run: Callable[[Check], None]
    bound: int  # seconds
    what: str


PARTS = {
    "device": Part(device, 25, "what the card is, how fast it copies and reads"),
    "correct": Part(functools.partial(judge, checks=CORRECT), 95, "every kernel against fp64 or its definition"),
    "rows": Part(
        functools.partial(judge, checks=ROWS), 120, "rows alone and among others bit by bit; drafted and replayed text"
    ),
    "gemm": Part(gemm_times, 70, "time of products beside the byte floor and torch's own"),
    "attention": Part(attention_times, 20, "time of attention beside the byte floor"),
    "model": Part(model, 90, "a 7B model with random weights: steps, drafts, whole rounds as graphs"),
    "demo": Part(demo_model, 50, "the demo model, if it is there: text and speed with and without drafting"),
    "tune": Part(tune, 400, "settings of products for kernels/tiles.json; by name only"),
}


def child(name: str, path: Path, dry: bool, bound: float) -> int:
    """One part, in this process."""
    torch.manual_seed(0)
    with torch.inference_mode():
        check = Check(Interpreter() if dry else Gpu(), path, bound)
        PARTS[name].run(check)
    check.found["finished"] = True
    check.say("")
    return 0


def run_part(name: str, dry: bool, patience: float) -> dict[str, Any]:
    """One part in a process of its own, ended at its bound."""
    bound = PARTS[name].bound * patience
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TEARDOWN_CUPTI": "0",
        "DISABLE_CUPTI_LAZY_REINIT": "1",
    }  # profiling graphs needs it on some drivers
    if dry:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, sys.argv[0], name, "--child", str(path), "--patience", str(patience)]
        command += ["--dry-run"] if dry else []
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = process.wait(bound)
            ended = f"crashed, exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {bound:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"finished": False, "verdicts": []}
    wrong = sum(verdict["counts"] and not verdict["good"] for verdict in found["verdicts"])
    result = ended if not found["finished"] else f"{wrong} WRONG" if wrong else "good"
    return {"good": result == "good", "result": result, **found}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all but tune, if none is named")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--list", action="store_true", help="list the parts with their time bounds")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, in Triton's interpreter, at toy sizes")
    parser.add_argument("--patience", type=float, default=1.0, metavar="FACTOR", help="for the time bounds")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in args.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; the parts are {', '.join(PARTS)}")
    if args.list:
        for name, part in PARTS.items():
            print(f"{name:10} {part.bound:4} s  {part.what}")
        return 0
    if not args.dry_run and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA device here; --dry-run tries the script on a CPU")
    if args.child:
        return child(args.parts[0], args.child, args.dry_run, PARTS[args.parts[0]].bound * args.patience)
    if args.dry_run:
        print("A dry run in Triton's interpreter: times mean nothing.")
    found: dict[str, Any] = {}
    for name in args.parts or [name for name in PARTS if name != "tune" or args.dry_run]:
        print(f"\n## {name}: {PARTS[name].what}", flush=True)
        found[name] = run_part(name, args.dry_run, args.patience)
        args.out.write_text(json.dumps({"dry_run": args.dry_run, "parts": found}, indent=1), encoding="utf-8")
    print(f"\n## Results, in {args.out}\n\n| part | seconds | result |\n| --- | --- | --- |")
    for name, part in found.items():
        print(f"| {name} | {part.get('seconds', '')} | {part['result']} |")
    return 0 if all(part["good"] for part in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
