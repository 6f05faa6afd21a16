"""Times on a card: products, attention, whole models, the demo model, and settings of products."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fastea import demo
from fastea.config import config_to_hf
from fastea.drafters import Draft
from fastea.drafters.eagle import EagleDrafter
from fastea.eagle import EagleHead
from fastea.fused import FusedRound
from fastea.head_files import save_head
from fastea.kernels import gemm
from fastea.kernels.tree_attention import tree_attention
from fastea.llama import Llama
from fastea.loading import load
from fastea.memory import tensor_bytes
from fastea.quantize.forms import Scheme
from fastea.replay import Replay
from fastea.sampling import Sampling
from fastea.state import DecodeState
from fastea.tree import EAGLE1_PATHS, DynamicTree, Tree, chain
from fastea.triton_linear import TritonLinear
from gpu_comparisons import answers, same
from gpu_harness import (
    BF16,
    FP16,
    HEADS,
    LLAMA2,
    LLAMA3,
    LOW,
    TIMED,
    TOY,
    Check,
    Form,
    bandwidths,
    bush,
    drafter_of,
    weights_of,
)

PROMPTS = Path(__file__).parent.parent / "benchmarks" / "prompts.jsonl"
TAUS = (3.0, 3.62, 4.5)  # tokens a round that speeds are given for
IDLE = 10.0  # microseconds without a kernel that a round may have
ROOM = 5e9  # bytes beside a model's layers: embedding, LM head, drafting head, what quantizing takes


# Products and attention

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


# A whole model


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


# The demo model


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


# Settings for kernels/tiles.json


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
