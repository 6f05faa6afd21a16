"""The target's states over training sequences, computed once and memory-mapped.

A store is a folder: `samples.sha256` (which sequences of which model), and for each kind of state a file of every
sequence's rows, one after the other, [tokens, hidden] in fp16, with a count of the samples that are filled:
`final.f16` after the final norm, `layer7.f16` before layer 7. It resumes where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from fastea.checkpoint import fingerprint
from fastea.generator import Generator
from fastea.kernels.packed import fast_bf16
from fastea.llama import DecoderLayer, Llama
from fastea.loading import load
from fastea.runtime import can_compile, compiled
from fastea.training.data import Sample

BLOCK = 256  # samples between two checkpoints
LARGEST = 65504  # of fp16; residual streams may pass it at a few places


def load_target(checkpoint: Path, max_len: int) -> Generator:
    """The target as training uses it, on the CPU: plain matrices, in bf16 where products of many rows are fastest."""
    kind = "bfloat16" if fast_bf16() else "float32"
    return load(checkpoint, head="none", drafter="none", max_seq_len=max_len, device="cpu", dtype=kind, pack=False)


class FeatureStore:
    """Samples and their features, as the model hands them out: the final states, then those of its taps.
    `features(i)`: [length, feature_size] fp16 of sample i; len(): the filled samples. shared: tokens that all samples
    start with."""

    def __init__(self, folder: Path, samples: list[Sample], model: Llama):
        self.folder, self.samples = folder, samples
        hidden = model.config.hidden_size
        self.offsets = np.concatenate(([0], np.cumsum([len(s.tokens) for s in samples])))
        self.names = ["final", *(f"layer{i}" for i in model.taps)]
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([hidden, fingerprint(model), [[s.answer_start, *s.tokens] for s in samples]])
        self.shared = _common_prefix(samples)
        self.identity = hashlib.sha256(text.encode()).hexdigest()
        stamp = folder / "samples.sha256"
        if not stamp.exists() or stamp.read_text() != self.identity:
            for old in (*folder.glob("*.f16"), *folder.glob("*.done")):
                old.unlink()
            stamp.write_text(self.identity)
        shape = (int(self.offsets[-1]), hidden)
        self.columns = []
        for name in self.names:
            path = folder / f"{name}.f16"
            if not path.exists():
                with path.open("wb") as f:
                    f.truncate(shape[0] * hidden * 2)
            self.columns.append(np.memmap(path, dtype=np.float16, mode="r+", shape=shape))

    def __len__(self) -> int:
        return min(map(self._done, self.names))

    def _done(self, name: str) -> int:
        path = self.folder / f"{name}.done"
        return int(path.read_text()) if path.exists() else 0

    def _mark(self, done: int) -> None:
        for name, column in zip(self.names, self.columns, strict=True):
            column.flush()
            temporary = self.folder / f"{name}.new"
            temporary.write_text(str(max(done, self._done(name))))
            os.replace(temporary, self.folder / f"{name}.done")

    def features(self, index: int) -> torch.Tensor:
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return torch.cat([torch.from_numpy(column[rows]) for column in self.columns], -1)

    def fill(self, model: Llama, batch_tokens: int = 4096, limit: int | None = None) -> None:
        """Run the target over the samples not done yet (up to `limit`), sequences of like length together."""
        total = min(limit or len(self.samples), len(self.samples))
        if len(self) >= total:
            return
        model.set_context(max(len(s.tokens) for s in self.samples))
        few = total - len(self) < BLOCK or not can_compile(str(model.embed.weight.device))
        run = _layer if few else compiled(_layer, any_shape=True)
        progress = tqdm(total=total, initial=len(self), unit="seq", desc="features")
        for first in range(len(self), total, BLOCK):
            block = range(first, min(first + BLOCK, total))
            for group in by_length(block, self.samples, batch_tokens):
                rows = [self.samples[i].tokens for i in group]
                tokens = torch.tensor([(*r, *[0] * (len(rows[-1]) - len(r))) for r in rows])
                states = whole(model, tokens.to(model.embed.weight.device), run).clamp(-LARGEST, LARGEST)
                parts = states.to("cpu", torch.float16).chunk(len(self.columns), -1)
                for column, part in zip(self.columns, parts, strict=True):
                    for i, rows_of in zip(group, part.numpy(), strict=True):
                        column[self.offsets[i] : self.offsets[i + 1]] = rows_of[: len(self.samples[i].tokens)]
                progress.update(len(group))
            self._mark(block[-1] + 1)
        progress.close()


def by_length(indices: Iterable[int], samples: list[Sample], tokens: int) -> list[list[int]]:
    """Groups of samples of like length, shortest first, of at most `tokens` padded tokens each, or one sample."""
    groups: list[list[int]] = [[]]
    for i in sorted(indices, key=lambda i: len(samples[i].tokens)):
        if groups[-1] and (len(groups[-1]) + 1) * len(samples[i].tokens) > tokens:
            groups.append([])
        groups[-1].append(i)
    return groups


def _layer(layer: DecoderLayer, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in layer.project(x, rope))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layer.finish(x, mixed.transpose(1, 2))


@torch.inference_mode()
def whole(model: Llama, tokens: torch.Tensor, run: Callable[..., torch.Tensor] = _layer) -> torch.Tensor:
    """The model over whole sequences [B, T] at once, without a cache -> features [B, T, feature_size]. run: what calls
    a layer, for compiling."""
    x, states = model.embed(tokens), {}
    rope = model.rope[: tokens.shape[1]].expand(len(tokens), -1, -1, -1)
    for i, layer in enumerate(model.layers):
        if i in model.taps:
            states[i] = x
        x = run(layer, x, rope)
    return model.features(model.norm(x), states | {len(model.layers): x})


def _common_prefix(samples: list[Sample]) -> int:
    """Tokens that every sample starts with, at least one token short of the shortest."""
    low, high = min(s.tokens for s in samples), max(s.tokens for s in samples)
    shared = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return min(shared, min(len(s.tokens) for s in samples) - 1)
