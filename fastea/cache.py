"""Static key/value caches: allocated once, written in place, never grown."""

from __future__ import annotations

import torch

from fastea.kernels.attention import STRIDE
from fastea.kernels.move import move_rows

TREE_SLACK = 64  # rows past the limit, so that a whole tree always fits


def cache_rows(max_seq_len: int) -> int:
    """As many as attention reads at once."""
    return -(-(max_seq_len + TREE_SLACK) // STRIDE) * STRIDE


class KVCache:
    """Keys and values of every layer.

    keys[i], values[i]: [batch, kv_heads, rows, head_dim], rows of `cache_rows`. Row p holds the
    token at position p; the caller keeps the committed length. joined: all of them are parts of one tensor `whole`
    [2, layers, ...], which one kernel can compact.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        max_seq_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        joined: bool = False,
    ):
        shape = (batch, kv_heads, cache_rows(max_seq_len), head_dim)
        self.whole: torch.Tensor | None = None
        if joined:
            self.whole = torch.zeros(2, layers, *shape, dtype=dtype, device=device)
            self.keys, self.values = (list(half) for half in self.whole)
            return
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.keys + self.values)

    def row(self, index: int) -> KVCache:
        """A view of one sequence of the batch, [1, ...] tensors that share the storage."""
        return self.part(index, index + 1)

    def part(self, first: int, end: int) -> KVCache:
        """The same of several sequences."""
        view = KVCache.__new__(KVCache)
        view.keys = [k[first:end] for k in self.keys]
        view.values = [v[first:end] for v in self.values]
        view.whole = None
        return view

    def compact(self, start: torch.Tensor, source: torch.Tensor) -> None:
        """Move accepted tree rows into place: row start + source[:, j] -> row start + j.

        start: [B] first tree row; source: [B, J] tree slots with source[:, j] >= j: moved in order, none is lost.
        """
        if self.whole is not None:
            from fastea.kernels.compact import compact

            compact(self.whole.flatten(0, 1), start, source)
            return
        move_rows([*self.keys, *self.values], start, source)
