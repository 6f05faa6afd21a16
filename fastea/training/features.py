"""The target's features over training sequences, computed once and memory-mapped.

A store is a folder: `samples.json` (token ids, answer starts), `features.f16` (every sequence's rows, one after the
other, [tokens, hidden] in fp16) and `done` (how many samples are filled). It resumes where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from fastea.checkpoint import fingerprint
from fastea.llama import Llama
from fastea.training.data import Sample

BLOCK = 256  # samples between two checkpoints


class FeatureStore:
    """Samples and their features. `features(i)`: [length, hidden] fp16 of sample i; len(): the filled samples.
    shared: tokens that all samples start with."""

    def __init__(self, folder: Path, samples: list[Sample], model: Llama):
        self.folder, self.samples = folder, samples
        hidden = model.config.hidden_size
        self.offsets = np.concatenate(([0], np.cumsum([len(s.tokens) for s in samples])))
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([hidden, fingerprint(model), [[s.answer_start, *s.tokens] for s in samples]])
        self.shared = _common_prefix(samples)
        self.identity = hashlib.sha256(text.encode()).hexdigest()
        stamp, data = folder / "samples.sha256", folder / "features.f16"
        if not stamp.exists() or stamp.read_text() != self.identity or not data.exists():
            self._mark(0)
            stamp.write_text(self.identity)
            with data.open("wb") as f:
                f.truncate(int(self.offsets[-1]) * hidden * 2)
        self.data = np.memmap(data, dtype=np.float16, mode="r+", shape=(int(self.offsets[-1]), hidden))

    def __len__(self) -> int:
        return int((self.folder / "done").read_text())

    def _mark(self, done: int) -> None:
        temporary = self.folder / "done.new"
        temporary.write_text(str(done))
        os.replace(temporary, self.folder / "done")

    def features(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.data[self.offsets[index] : self.offsets[index + 1]])

    @torch.inference_mode()
    def fill(self, model: Llama, batch: int = 16, limit: int | None = None) -> None:
        """Run the target over the samples not done yet (up to `limit`), batch sequences of like length at a time.

        The prefix that all sequences share (a system message) is computed once.
        """
        total = min(limit or len(self.samples), len(self.samples))
        if len(self) >= total:
            return
        longest = max(len(s.tokens) for s in self.samples)
        model.set_context(longest)
        shared = self.shared
        one = model.new_cache(1, longest)
        head = torch.tensor([self.samples[0].tokens[:shared]])
        zero = torch.zeros(1, dtype=torch.int64)
        prefix = model(head, torch.arange(shared)[None], zero, None, one) if shared else None
        cache = model.new_cache(batch, longest)
        for whole, part in zip(cache.keys + cache.values, one.keys + one.values, strict=True):
            whole.copy_(part.expand_as(whole))
        progress = tqdm(total=total, initial=len(self), unit="seq", desc="features")
        for first in range(len(self), total, BLOCK):
            block = sorted(range(first, min(first + BLOCK, total)), key=lambda i: len(self.samples[i].tokens))
            for lo in range(0, len(block), batch):
                group = block[lo : lo + batch]
                width = len(self.samples[group[-1]].tokens) - shared
                rows = [list(self.samples[i].tokens[shared:]) for i in group]
                tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows])
                positions = torch.arange(shared, shared + width).expand(len(group), -1)
                start = torch.full((len(group),), shared)
                out = model(tokens, positions, start, None, cache).to(torch.float16).numpy()
                for i, states, row in zip(group, out, rows, strict=True):
                    at = self.offsets[i]
                    if prefix is not None:
                        self.data[at : at + shared] = prefix[0].numpy()
                    self.data[at + shared : self.offsets[i + 1]] = states[: len(row)]
                progress.update(len(group))
            self.data.flush()
            self._mark(min(first + BLOCK, total))
        progress.close()


def _common_prefix(samples: list[Sample]) -> int:
    """Tokens that every sample starts with, at least one token short of the shortest."""
    low, high = min(s.tokens for s in samples), max(s.tokens for s in samples)
    shared = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return min(shared, min(len(s.tokens) for s in samples) - 1)
