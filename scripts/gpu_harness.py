"""What the checks on a card share: forms of products, shapes of models, trees, the card itself, and a part's report."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from fastea import generator
from fastea.config import ModelConfig
from fastea.drafters import Drafter
from fastea.drafters.dynamic import DynamicEagleDrafter
from fastea.drafters.eagle import EagleDrafter
from fastea.fused import FusedEagleHead, FusedLlama
from fastea.kernels.launch import launch
from fastea.linear import Linear
from fastea.quantize.forms import QuantizedWeight, Scheme
from fastea.quantized import Quantizer
from fastea.tree import DynamicTree, Tree

FP16, BF16 = torch.float16, torch.bfloat16


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
