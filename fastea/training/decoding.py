"""Large batches of plain decoding, for training data: all sequences take a step together, in products of many rows.

Rounds serve one text, or a few, at the least latency and each by itself; this serves throughput.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from fastea.cache import KVCache
from fastea.kernels.register import register
from fastea.llama import DecoderLayer, Llama

LIKELIEST = 50  # ids that a temperature chooses from
PREFILL = 16  # prompts together: more would leave a CPU's caches


@dataclass
class Growing:
    """An answer of at most `room` tokens on its way. finished: by an end mark. looping: some run of four ids came
    five times, which teaches a head nothing."""

    room: int
    ids: list[int] = field(default_factory=list)
    finished: bool = False
    looping: bool = False
    seen: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def push(self, token: int, stop_ids: frozenset[int]) -> None:
        self.ids.append(token)
        run = tuple(self.ids[-4:])
        self.seen[run] += 1
        self.looping = self.looping or self.seen[run] == 5
        self.finished = token in stop_ids

    @property
    def ended(self) -> bool:
        return self.finished or self.looping or len(self.ids) >= self.room


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Write k, v [B, R, KV, D] at positions [B, R] of keys and values [B, KV, L, D], then attend. q: [B, R, H, D];
    bias: [B, R, L] -> [B, R, H, D]. The query heads of one KV head are rows of one product."""
    every = torch.arange(len(q), device=q.device)[:, None]
    keys[every, :, positions] = k
    values[every, :, positions] = v
    folded = q.unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4)  # [B, KV, group, R, D]
    bias = bias[:, None, None].expand(-1, -1, folded.shape[2], -1, -1).flatten(2, 3)
    bias = bias.expand(-1, keys.shape[1], -1, -1)
    mixed = F.scaled_dot_product_attention(folded.flatten(2, 3), keys, values, attn_mask=bias)
    return mixed.unflatten(2, folded.shape[2:4]).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous()


attend_many = register(
    "attend_many(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor positions, Tensor bias) "
    "-> Tensor",
    _attend,
    lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
)


def run_layer(layer: DecoderLayer, x: torch.Tensor, rope: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
    return layer.finish(x, attend_many(*layer.project(x, rope), *cache))


@torch.inference_mode()
def decode(
    model: Llama,
    prompts: Sequence[list[int]],
    answers: list[Growing],
    stop_ids: frozenset[int],
    temperature: float,
    random: torch.Generator,
    run: Callable[..., torch.Tensor] = run_layer,
) -> None:
    """Let the answers grow, a token of each at a time, until all have ended; rows of those that did are given up now
    and then. temperature 0 is greedy. run: what calls a layer, for compiling."""
    device = model.embed.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    cache = model.new_cache(len(prompts), int(lengths.max()) + max(answer.room for answer in answers))
    parts = range(0, len(prompts), PREFILL)
    last = [_prefill(model, prompts[at : at + PREFILL], cache.part(at, at + PREFILL), run) for at in parts]
    x = torch.cat(last)
    alive = answers  # whose the rows are
    while True:
        tokens = choose(model.logits(x), temperature, random)
        for answer, token in zip(alive, tokens.tolist(), strict=True):
            if not answer.ended:
                answer.push(token, stop_ids)
        kept = [row for row, answer in enumerate(alive) if not answer.ended]
        if not kept:
            return
        if len(kept) <= 0.8 * len(alive):
            alive, index = [alive[row] for row in kept], torch.tensor(kept, device=device)
            tokens, lengths = tokens[index], lengths[index]
            cache.keys = [t.index_select(0, index) for t in cache.keys]
            cache.values = [t.index_select(0, index) for t in cache.values]
        x = _forward(model, tokens[:, None], lengths[:, None], cache, int(lengths.max()) + 1, run)[:, 0]
        # A row whose answer has ended stays at its place.
        lengths = lengths + torch.tensor([not answer.ended for answer in alive], device=device)


def _prefill(
    model: Llama, prompts: Sequence[list[int]], cache: KVCache, run: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Prompts into the first rows of the cache -> the states after their last tokens [B, h]."""
    longest, device = max(map(len, prompts)), model.embed.weight.device
    tokens = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    x = _forward(model, tokens, positions, cache, longest, run)
    return x[range(len(prompts)), [len(p) - 1 for p in prompts]]


def _forward(
    model: Llama,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cache: KVCache,
    length: int,
    run: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """tokens, positions: [B, R]; rows see the first `length` rows of the cache, up to their own -> [B, R, h]."""
    x, rope = model.embed(tokens), model.rope[positions]
    hidden = torch.arange(length, device=tokens.device) > positions[..., None]
    bias = torch.zeros_like(hidden, dtype=x.dtype).masked_fill_(hidden, float("-inf"))
    for layer, keys, values in zip(model.layers, cache.keys, cache.values, strict=True):
        x = run(layer, x, rope, keys[:, :, :length], values[:, :, :length], positions, bias)
    return model.norm(x)


def choose(logits: torch.Tensor, temperature: float, random: torch.Generator) -> torch.Tensor:
    """logits: [B, V] -> ids [B]: the likeliest, or drawn from the likeliest few."""
    if not temperature:
        return logits.argmax(-1)
    best = logits.topk(min(LIKELIEST, logits.shape[-1]))
    drawn = torch.multinomial(torch.softmax(best.values / temperature, -1), 1, generator=random)
    return best.indices.gather(1, drawn)[:, 0]
