"""Every launch of a Triton kernel that a round makes of the models people run: recorded on the meta device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastea.kernels import choose, compact, gate, gemm, launch, norm, rope, topk, tree_attention, walk
from fastea.quantize.forms import Scheme

CONTEXT, NODES, DEPTH, CHILDREN = 2048, 26, 5, 4  # tokens of the cache; the tree eagle1
ROWS = (1, 16, NODES, 64)  # a plain step, few rows, a tree, a chunk of a prompt
SCHEMES = (None, Scheme(8), Scheme(8, 32), Scheme(4, 128), Scheme(4, 32, True))  # None: 16 bit
FP16, BF16, FP32, INT32, INT64 = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64
SHORT = {FP16: "fp16", BF16: "bf16", FP32: "fp32"}
RESERVED = 1024  # bytes of shared memory that the driver keeps of every block


@dataclass(frozen=True)
class Card:
    """Limits of a compute capability. shared: KiB a multiprocessor; a block gets 1 less. threads, blocks: at once."""

    capability: int
    example: str
    shared: int
    threads: int
    blocks: int

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"

    def settings(self) -> gemm.Card:
        known = json.loads((Path(gemm.__file__).parent / "tiles.json").read_text(encoding="utf-8"))
        return gemm.Card(**(known["default"] | known.get(self.name, {})))

    def room(self, registers: int, shared: int, warps: int) -> dict[str, int]:
        """Blocks that a multiprocessor holds at once by each resource. Registers are given out to warps in units of
        256, by quarters of the multiprocessor, shared memory in units of 128 bytes."""
        warp = -(-registers * 32 // 256) * 256
        block = -(-(shared + RESERVED) // 128) * 128
        return {
            "r": 4 * (65536 // 4 // warp) // warps,
            "s": self.shared * 1024 // block,
            "t": self.threads // (32 * warps),
            "b": self.blocks,
        }


CARDS = (
    Card(86, "RTX 3090", 100, 1536, 16),
    Card(89, "RTX 4090", 100, 1536, 24),
    Card(80, "A100", 164, 2048, 32),
    Card(90, "H100", 228, 2048, 32),
)
ORDER = (gemm, tree_attention, norm, rope, gate, choose, topk, walk, compact)  # of the table


@dataclass(frozen=True)
class Model:
    """size: of a head. dtype: what it runs in on a GPU."""

    name: str
    dtype: torch.dtype
    hidden: int
    heads: int
    kv_heads: int
    size: int
    intermediate: int
    vocab: int

    def weights(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs. fc: of an EAGLE head, whose layer has the model's shapes."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.size, self.hidden),
            "o": (self.hidden, self.heads * self.size),
            "gate and up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "LM head": (self.vocab, self.hidden),
            "fc": (self.hidden, 2 * self.hidden),
        }


MODELS = (
    Model("LLaMA-2-7B", FP16, 4096, 32, 32, 128, 11008, 32000),
    Model("LLaMA-3-8B", BF16, 4096, 32, 8, 128, 14336, 128256),
    Model("demo", BF16, 576, 9, 3, 64, 1536, 49152),
)


@dataclass
class Launch:
    """What a body would start. site: which weight of which model; form, rows: how the table calls it."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int
    model: str
    site: str
    form: str
    rows: int

    @property
    def title(self) -> str:
        return f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.__name__}"

    @property
    def types(self) -> tuple[torch.dtype | None, ...]:
        return tuple(a.dtype if isinstance(a, torch.Tensor) else None for a in self.args)

    @property
    def label(self) -> str:
        """The form, if it has a name, or the type of activations and the constants."""
        if self.form:
            return self.form
        dtype = next((SHORT[t] for t in self.types if t in (FP16, BF16)), None)
        shown = [f"{k}={v}" for k, v in self.constants.items() if v is not False and abs(v) < 1 << 32]
        return ", ".join([dtype, *shown] if dtype else shown)

    @property
    def key(self) -> tuple[Any, ...]:
        """What one compilation is for, on one card."""
        return self.title, self.label, self.rows, self.types


class Recorder:
    """Calls bodies of operators and keeps what they would launch."""

    def __init__(self, model: Model):
        self.model, self.found = model, list[Launch]()

    def __call__(self, body: Callable[..., Any], *args: Any, site: str = "", form: str = "", rows: int = 0) -> Any:
        def keep(kernel: Any, given: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int) -> None:
            named = "" if kernel is gemm._scale_kernel else form
            self.found.append(
                Launch(kernel, given, constants, warps, stages, self.model.name, site, named, rows if named else 0)
            )

        launch.recorder = keep
        try:
            return body(*args)
        finally:
            launch.recorder = None


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def weight(outputs: int, inputs: int, scheme: Scheme | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """Matrix or words, scale, minimum and bits, as `gemm.layout` makes them."""
    if scheme is None:
        return meta(outputs, inputs, dtype=dtype), None, None, 16
    block = gemm.BLOCK[scheme.bits]
    tiles, blocks = -(-outputs // gemm.BN), -(-inputs // block)
    words = meta(tiles, blocks, gemm.BN, block * scheme.bits // 32, dtype=INT32)
    scale = meta(blocks * block // scheme.group if scheme.group else 1, tiles * gemm.BN, dtype=FP16)
    return words, scale, torch.empty_like(scale) if scheme.minimum else None, scheme.bits


def products(record: Recorder, scheme: Scheme | None, rows: int, half_sums: bool) -> dict[str, torch.Tensor]:
    """Every weight times `rows` rows: their partial results."""
    parts, dtype = {}, record.model.dtype
    for site, (outputs, inputs) in record.model.weights().items():
        fitting = scheme and scheme.fitting(inputs)
        form = f"{fitting.name if fitting else '16 bit'}, {SHORT[dtype]}{', fp16 sums' if half_sums else ''}"
        given = (meta(rows, inputs, dtype=dtype), *weight(outputs, inputs, fitting, dtype), half_sums)
        parts[site] = record(gemm._partials, *given, site=site, form=form, rows=rows)
    return parts


def between(record: Recorder, parts: dict[str, torch.Tensor], rows: int) -> None:
    """The kernels that go on from products: of a layer, of the LM head and of an EAGLE head."""
    m, dtype = record.model, record.model.dtype
    residual, column = meta(rows, m.hidden, dtype=dtype), meta(m.hidden, dtype=dtype)
    positions, table = meta(1, rows, dtype=INT64), meta(CONTEXT, 2, m.size // 2, dtype=FP32)
    cache, start = meta(1, m.kv_heads, CONTEXT + 64, m.size, dtype=dtype), meta(1, dtype=INT64)
    record(norm._add_norm, None, residual, column, 1e-5, site="first layer")
    record(rope._rope_write, parts["qkv"], None, table, positions, cache, cache, start, 0, m.heads, site="qkv")
    for site in ("o", "down"):
        record(norm._add_norm, parts[site], residual, column, 1e-5, site=site)
    record(gate._silu_mul, parts["gate and up"], m.intermediate, dtype, site="gate and up")
    record(norm._add, parts["LM head"], None, None, m.vocab, FP32, site="LM head")
    record(norm._add, parts["fc"], None, column, m.hidden, dtype, site="fc with bias")
    record(norm._add, parts["down"], residual, None, m.hidden, dtype, site="head's last")


def attention(record: Recorder, rows: int, kind: str) -> None:
    m, dtype = record.model, record.model.dtype
    visible = {"causal": None, "words": meta(1, rows, dtype=INT64), "lists": meta(1, rows, 17, dtype=INT64)}[kind]
    cache = meta(1, m.kv_heads, CONTEXT + 64, m.size, dtype=dtype)
    query, start = meta(1, rows, m.heads, m.size, dtype=dtype), meta(1, dtype=INT64)
    form = f"{kind}, {SHORT[dtype]}, heads of {m.size}, {m.heads // m.kv_heads} a KV head"
    record(tree_attention._tree_attention, query, cache, cache, start, visible, form=form, rows=rows)


def picking(record: Recorder) -> None:
    """The end of a round."""
    m = record.model
    logits, keys, nodes = (meta(NODES, m.vocab, dtype=FP32), meta(NODES, dtype=INT64), meta(1, NODES, dtype=INT64))
    record(choose._choose, logits, None, 0.0, 0, 1.0, m.vocab)
    for top_k, top_p in ((0, 1.0), (40, 1.0), (0, 0.9), (40, 0.9)):
        record(choose._choose, logits, keys, 0.8, top_k, top_p, m.vocab)
    record(topk._top_children, logits, CHILDREN)
    record(walk._accept_walk, nodes, nodes, keys, DEPTH)
    cache = meta(4, 1, m.kv_heads, CONTEXT + 64, m.size, dtype=m.dtype)
    record(compact._compact, cache, meta(1, dtype=INT64), meta(1, DEPTH + 1, dtype=INT64))


def launches(card: Card) -> Iterator[Launch]:
    """All of a card, model by model."""
    settings = card.settings()
    given, gemm.card = gemm.card, lambda device: settings  # type: ignore[assignment]
    try:
        for model in MODELS:
            record = Recorder(model)
            for scheme in SCHEMES:
                halves = (False, True) if settings.half_sums and scheme and model.dtype == FP16 else (False,)
                for half_sums in halves:
                    for rows in ROWS:
                        between(record, products(record, scheme, rows, half_sums), rows)
            for rows, kind in ((1, "causal"), (64, "causal"), (1, "words"), (NODES, "words"), (NODES, "lists")):
                attention(record, rows, kind)
            picking(record)
            yield from record.found
    finally:
        gemm.card = given
