"""y = x W^T for 1 to 64 rows (more in blocks of 64), with weights in 16 bit, int8 or int4: bound by memory, so flat.

Weights are the left operand of each tensor-core product and rows lie on its N axis, in steps of 8. Codes of low-bit
weights enter as exact small integers; a group's sum is multiplied by its scale once, after the group. Storage is in
planes: plane j of a 32-bit word holds input j * W + w of its block of BK inputs (W words a block), so that a word is
loaded once and gives one product a plane. Tiles of 64 outputs by BK inputs are contiguous.

Sums: an output is accumulated over the inputs of its split in ascending blocks, within a block plane by plane; the
splits are kept apart ([S, M, P] fp32 partial results) and added in order by whatever reads them (`norm`, `rope`,
`gate`). Splits, blocks and instruction form depend on the weight alone, never on the number of rows; nor is code
specialised on it: 1 to 8 rows run the same.

With half_sums, each group is summed in fp16 (twice as fast on GeForce cards) and promoted to fp32 after it; rows are
first divided by a power of two, so that no partial sum can overflow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastea.kernels.launch import launch, on_triton
from fastea.kernels.register import register
from fastea.quantize.forms import QuantizedWeight

Layout = dict[str, torch.Tensor]
BN = 64  # outputs a program
ROWS = (8, 16, 32, 64)  # what rows are padded to
BLOCK = {16: 64, 8: 64, 4: 128}  # inputs a step, by bits


@dataclass(frozen=True)
class Card:
    """How products run on one kind of card. multiprocessors: of a card that is not there (cross-compilation).
    waves: programs a multiprocessor that splitting aims at. half_sums: see above; fp16 only. least_rows: what rows are
    padded to at least; 16 on Hopper, where Triton 3.6 takes another instruction for 8."""

    multiprocessors: int = 82
    waves: int = 2
    warps: int = 4
    stages: int = 3
    half_sums: bool = False
    least_rows: int = 8


@cache
def card(device: str) -> Card:
    """The settings of a device: the default, over it those of its capability, over both those of its name
    (tiles.json)."""
    known = json.loads((Path(__file__).parent / "tiles.json").read_text(encoding="utf-8"))
    if not device.startswith("cuda"):
        return Card(**known["default"])
    properties = torch.cuda.get_device_properties(device)
    kinds = (f"sm_{properties.major}{properties.minor}", properties.name)
    found = known["default"] | known.get(kinds[0], {}) | known.get(kinds[1], {})
    return Card(**(found | {"multiprocessors": properties.multi_processor_count}))


def layout(weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, device: str) -> Layout:
    """The tensors that `partials` reads. A matrix: {"matrix": [N, K]}. Quantized: {"words": int32 [N / 64, K / BK, 64,
    W], "scale": [K / group, N] as stored (one row where a row has one scale), "minimum": the same}, N and K padded to
    whole tiles with zero scales. int8 codes are stored with 128 added, their words are named "words8"."""
    if not isinstance(weight, QuantizedWeight):
        return {"matrix": weight.to(device=device, dtype=dtype).contiguous()}
    scheme = weight.scheme
    block, planes = BLOCK[scheme.bits], 32 // scheme.bits
    codes = weight.unpacked().int() + (128 if scheme.bits == 8 else 0)
    more_inputs, more_outputs = -codes.shape[1] % block, -codes.shape[0] % BN
    codes = F.pad(codes, (0, more_inputs, 0, more_outputs), value=128 if scheme.bits == 8 else 8)
    parts = codes.view(codes.shape[0] // BN, BN, codes.shape[1] // block, planes, block // planes)
    words = torch.zeros_like(parts[:, :, :, 0])
    for j in range(planes):
        words |= parts[:, :, :, j] << (j * scheme.bits)
    made = {f"words{scheme.bits}": words.transpose(1, 2).contiguous().to(device)}
    groups = codes.shape[1] // scheme.group if scheme.group else 1
    for name, values in (("scale", weight.scale), ("minimum", weight.minimum)):
        if values is not None:
            padded = F.pad(values, (0, groups - values.shape[1], 0, more_outputs))
            made[name] = padded.t().contiguous().to(device)
    return made


def decoded(words: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, bits: int) -> torch.Tensor:
    """The padded matrix that a layout stands for, fp32 [N, K]."""
    tiles, blocks, _, _ = words.shape
    planes = [words >> (j * bits) & (1 << bits) - 1 for j in range(32 // bits)]
    codes = torch.stack(planes, 3).permute(0, 2, 1, 3, 4).reshape(tiles * BN, blocks * BLOCK[bits])
    groups = codes.view(codes.shape[0], scale.shape[0], -1) - (128 if bits == 8 else 8)
    base = 0 if minimum is None else (8 * scale.float() + minimum.float()).t()[:, :, None]
    return (groups * scale.float().t()[:, :, None] + base).flatten(1)


def rows_of(tensors: Layout, ids: torch.Tensor) -> Layout:
    """The layout of these outputs alone."""
    if "matrix" in tensors:
        return {"matrix": tensors["matrix"][ids]}
    made = {}
    for name, tensor in tensors.items():
        if name.startswith("words"):
            rows = tensor.transpose(1, 2).flatten(0, 1)[ids]  # [N, K / BK, W]
            padded = F.pad(rows, (0, 0, 0, 0, 0, -len(ids) % BN))
            made[name] = padded.unflatten(0, (-1, BN)).transpose(1, 2).contiguous()
        else:
            made[name] = F.pad(tensor[:, ids], (0, -len(ids) % BN))
    return made


def splits(weight_tiles: int, blocks: int, settings: Card) -> int:
    """Parts of the inputs that are summed apart, so that every multiprocessor has work: a function of the weight and
    the card."""
    wanted = -(-settings.multiprocessors * settings.waves // weight_tiles)
    per_split = -(-blocks // max(1, min(wanted, blocks // 2, 8)))
    return -(-blocks // per_split)


def partials_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, minimum: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """The meaning of `partials`, as one split. fp32 [1, M, P]."""
    matrix = weight.float() if scale is None else decoded(weight, scale, minimum, bits)
    x = F.pad(x.float(), (0, matrix.shape[1] - x.shape[1]))
    return F.pad(x @ matrix.t(), (0, -matrix.shape[0] % BN))[None]


@triton.jit(do_not_specialize=("rows", "blocks", "per_split"))
def _matrix_kernel(
    x, weight, out, rows, inputs, outputs, blocks, per_split, width,
    BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """out[split, m, n] = sum of x[m, k] weight[n, k] over the split's k. Past the outputs the last one is read again
    and zero stored: their mask in the loop would be one register too many at 64 rows."""
    split = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    weight_rows = weight + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * inputs
    x_rows = x + m[None, :] * inputs
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for block in range(split * per_split, min(split * per_split + per_split, blocks)):
        k = block * BK + tl.arange(0, BK)
        w = tl.load(weight_rows + k[None, :], mask=k[None, :] < inputs, other=0.0)
        xs = tl.load(x_rows + k[:, None], mask=(m[None, :] < rows) & (k[:, None] < inputs), other=0.0)
        total = tl.dot(w, xs, total)
    where = (split * rows + m).to(tl.int64)[None, :] * width + n[:, None]
    tl.store(out + where, tl.where(n[:, None] < outputs, total, 0.0), mask=m[None, :] < rows)


@triton.jit
def _centred(words, plane: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """One plane of codes less 8 (int4) or 128 (int8), exactly, in 16 bit: the code's bits are set into the mantissa of
    a power of two, which is subtracted again; in fp32 for bf16, whose mantissa is too short."""
    CENTRE: tl.constexpr = 1 << (BITS - 1)
    bits = (words >> (BITS * plane)) & ((1 << BITS) - 1)
    if dtype == tl.float16:
        return (bits | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - (1024.0 + CENTRE)
    return ((bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + CENTRE)).to(dtype)


@triton.jit(do_not_specialize=("rows", "blocks", "per_split"))
def _words_kernel(
    x, words, scale, minimum, powers, out, rows, inputs, blocks, per_split, width,
    BITS: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, HALF: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The same for codes. GROUP: planes a group, 0 = a scale a row. HALF: sums of a group (or block) in fp16; `powers`
    holds what each row of x was divided by."""
    W: tl.constexpr = BK * BITS // 32
    PLANES: tl.constexpr = 32 // BITS
    EACH: tl.constexpr = GROUP if GROUP else PLANES  # planes summed before they are promoted
    dtype: tl.constexpr = x.dtype.element_ty
    sums: tl.constexpr = tl.float16 if HALF else tl.float32
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tl.arange(0, BN)
    w = tl.arange(0, W)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    tile_words = words + tile.to(tl.int64) * blocks * (BN * W) + n[:, None] * W + w[None, :]
    x_rows = x + m[None, :] * inputs
    ones = tl.full((16, W), 1.0, dtype)
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for block in range(split * per_split, min(split * per_split + per_split, blocks)):
        packed = tl.load(tile_words + block * (BN * W))
        for plane in tl.static_range(PLANES):
            k = block * BK + plane * W + w
            xs = tl.load(x_rows + k[:, None], mask=(m[None, :] < rows) & (k[:, None] < inputs), other=0.0)
            if plane % EACH == 0:
                part = tl.zeros((BN, BM), dtype=sums)
                if MINIMUM:
                    row_sums = tl.zeros((16, BM), dtype=tl.float32)
            part = tl.dot(_centred(packed, plane, BITS, dtype), xs, part, out_dtype=sums)
            if MINIMUM:  # by the same instruction, so that its order is the same for every number of rows
                row_sums = tl.dot(ones, xs, row_sums)
            if plane % EACH == EACH - 1:
                if GROUP:
                    group = block * (PLANES // EACH) + plane // EACH
                    place = group * width + tile * BN + n
                    step = tl.load(scale + place).to(tl.float32)
                    total += part.to(tl.float32) * step[:, None]
                    if MINIMUM:
                        base = 8 * step + tl.load(minimum + place).to(tl.float32)
                        total += base[:, None] * tl.max(row_sums, 0)[None, :]  # 16 equal rows
                else:
                    total += part.to(tl.float32)
    if GROUP == 0:
        total *= tl.load(scale + tile * BN + n).to(tl.float32)[:, None]
    if HALF:
        total *= tl.load(powers + m, mask=m < rows, other=0.0)[None, :]
    where = (split * rows + m).to(tl.int64)[None, :] * width + (tile * BN + n)[:, None]
    tl.store(out + where, total, mask=m[None, :] < rows)


@triton.jit
def _scale_kernel(x, scaled, powers, inputs, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    """Divide a row by the power of two that brings its largest value into [2^TARGET, 2^(TARGET+1))."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    values = tl.load(x + row * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)
    exponent = (tl.max(tl.abs(values), 0).to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.maximum(tl.minimum(exponent - TARGET, 100), -100)  # of what the row is divided by; 0 stays 0
    power = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(scaled + row * inputs + k, (values * inverse).to(scaled.dtype.element_ty), mask=k < inputs)
    tl.store(powers + row, power)


def scaled_rows(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x [M, K] fp16 over powers of two, and these [M] fp32. A group's partial sums of codes times them stay
    below 65504: at most 128 inputs of 8 x 63.9 (int4), 64 of 128 x 7.9 (int8)."""
    scaled, powers = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    launch(_scale_kernel, (x.shape[0],), x, scaled, powers, x.shape[1], TARGET=5 if bits == 4 else 2, BLOCK=block)
    return scaled, powers


def _partials(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    minimum: torch.Tensor | None,
    bits: int,
    half_sums: bool,
) -> torch.Tensor:
    if not on_triton(x):
        return partials_reference(x, weight, scale, minimum, bits)
    settings, x = card(str(x.device)), x.contiguous()
    rows, inputs = x.shape
    block = BLOCK[bits]
    tiles = weight.shape[0] if bits < 16 else -(-weight.shape[0] // BN)
    blocks = -(-inputs // block)
    count = splits(tiles, blocks, settings)
    padded = next((size for size in ROWS if size >= max(rows, settings.least_rows)), ROWS[-1])
    out = torch.empty(count, rows, tiles * BN, dtype=torch.float32, device=x.device)
    grid, shape = (tiles, count, -(-rows // padded)), {"BN": BN, "BK": block, "BM": padded}
    common = {"warps": settings.warps, "stages": settings.stages, **shape}
    per_split = -(-blocks // count)
    if scale is None:
        launch(_matrix_kernel, grid, x, weight, out, rows, inputs, weight.shape[0], blocks, per_split, tiles * BN,
               **common)  # fmt: skip
        return out
    powers = None
    if half_sums:
        x, powers = scaled_rows(x, bits)
    group = blocks * (32 // bits) // scale.shape[0] if bits == 4 or scale.shape[0] > 1 else 0
    launch(_words_kernel, grid, x, weight, scale, minimum, powers, out, rows, inputs, blocks, per_split, tiles * BN,
           BITS=bits, GROUP=group, MINIMUM=minimum is not None, HALF=half_sums, **common)  # fmt: skip
    return out


def _fake(x, weight, scale, minimum, bits, half_sums):  # type: ignore[no-untyped-def]
    tiles = weight.shape[0] if bits < 16 else -(-weight.shape[0] // BN)
    count = splits(tiles, -(-x.shape[1] // BLOCK[bits]), card(str(x.device)))
    return x.new_empty(count, x.shape[0], tiles * BN, dtype=torch.float32)


_operator = register(
    "partials(Tensor x, Tensor weight, Tensor? scale, Tensor? minimum, int bits, bool half_sums) -> Tensor",
    _partials,
    _fake,
)


def partials(x: torch.Tensor, tensors: Layout, half_sums: bool = False) -> torch.Tensor:
    """x: [M, K] fp16 or bf16 -> split-K partial results, fp32 [S, M, P], P >= N; columns past N are padding.
    half_sums: sum groups of low-bit weights in fp16 (x in fp16 only)."""
    if "matrix" in tensors:
        return _operator(x, tensors["matrix"], None, None, 16, False)
    bits = 8 if "words8" in tensors else 4
    half_sums = half_sums and x.dtype == torch.float16
    return _operator(x, tensors[f"words{bits}"], tensors["scale"], tensors.get("minimum"), bits, half_sums)
