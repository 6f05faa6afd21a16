"""The state of decoding: everything that a round reads and writes, preallocated on the device."""

from __future__ import annotations

from collections.abc import Collection

import torch

from fastea.cache import TREE_SLACK, KVCache
from fastea.llama import Llama
from fastea.sampling import Sampling


class DecodeState:
    """B sequences decoded together. W = deepest tree + 1.

    length: [B] committed tokens (rows of the caches that count). root: [B] the pending token, at position length.
    features: [B, W, F] target features of the rows accepted last; emitted: [B, W] the token after each of them;
    count: [B] how many of these W rows are real (accepted nodes + 1). done: [B] rows that no longer advance: a token
    of stop_ids [S] (-1: none) was emitted, or the text has limit [B] tokens, prompt included.
    history: [B, max_seq_len + slack] all tokens up to the root. stream: [B] noise stream of each sequence.
    sampling: settings of the run; seed: [] its seed.
    """

    def __init__(
        self,
        model: Llama,
        cache: KVCache,
        draft_cache: KVCache | None,
        batch: int,
        width: int,
        max_seq_len: int,
        stops: int,
    ):
        like = model.embed.weight

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=like.device)

        self.cache, self.draft_cache, self.sampling = cache, draft_cache, Sampling()
        self.length, self.root = zeros(batch), zeros(batch)
        self.features = zeros(batch, width, model.feature_size, dtype=like.dtype)
        self.emitted, self.count = zeros(batch, width), zeros(batch)
        self.done = zeros(batch, dtype=torch.bool)
        self.stop_ids, self.limit = zeros(max(stops, 1)), zeros(batch)
        self.history = zeros(batch, max_seq_len + TREE_SLACK + 1)
        self.cached: list[int] = []  # tokens of the one sequence whose rows the caches hold, as far as is certain
        self.prefilled = 0  # of these rows, the first that prefills made in whole chunks
        self.stream, self.seed = zeros(batch), torch.zeros((), dtype=torch.int64, device=like.device)

    def reset(self, sampling: Sampling, streams: list[int], stop_ids: Collection[int] = (), kept: int = 0) -> None:
        """Ready for new prompts; the caches keep what they hold, since only rows below `length` count. kept: rows that
        the next prompt takes over."""
        self.cached, self.prefilled = self.cached[:kept], min(self.prefilled, kept)
        self.sampling = sampling
        self.stop_ids.fill_(-1)
        self.stop_ids[: len(stop_ids)] = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        self.seed.fill_(sampling.seed or 0)
        self.stream.copy_(torch.tensor(streams))
        for tensor in (self.length, self.root, self.count, self.done):
            tensor.zero_()

    def last_accepted(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows [B, W, h] over the tokens in `emitted`, the one of the last that is real: [B, 1, h]."""
        last = (self.count - 1).clamp(min=0)[:, None, None].expand(-1, -1, rows.shape[2])
        return rows.gather(1, last)

    def retire(self, row: int) -> None:
        """This sequence has ended: it advances no more, and what rounds still write for it goes to its first rows."""
        self.done[row], self.length[row], self.count[row] = True, 0, 0

    def begin(self, row: int, prompt: torch.Tensor, feature: torch.Tensor, first: torch.Tensor, room: int) -> None:
        """A prompt [T] is in the caches; `first` is the token picked after it, feature [h] that of its last token;
        room: tokens that the answer may have."""
        length, self.cached = prompt.shape[0], []
        self.limit[row] = length + room
        self.history[row, :length] = prompt
        self.history[row, length] = first
        self.length[row], self.root[row], self.count[row] = length, first, 1
        self.features[row, 0], self.emitted[row, 0] = feature, first
