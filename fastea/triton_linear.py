"""Linear layers over the Triton GEMM. Imported only where its kernels run."""

from __future__ import annotations

import torch
from torch import nn

from fastea.kernels import gemm
from fastea.kernels.norm import add
from fastea.linear import LaidOutLinear, Linear
from fastea.quantize.forms import QuantizedWeight


class TritonLinear(LaidOutLinear):
    """weight: a matrix or codes. dtype: of activations, fp16 or bf16."""

    def __init__(
        self, weight: torch.Tensor | QuantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype, device: str
    ):
        shape = (int(weight.shape[0]), int(weight.shape[1]))
        super().__init__(shape, bias, dtype, gemm.layout(weight, dtype, device))
        self.half_sums = gemm.card(device).half_sums

    def partials(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., K] -> the split-K parts of the product, fp32 [S, M, P], for the kernels that go on from there."""
        return gemm.partials(self.rows(x), self.layout, self.half_sums)

    def product(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x W^T (+ b) in `dtype`, x's own if None."""
        parts = self.partials(x)
        if len(parts) == 1 and self.bias is None and dtype == torch.float32:
            y = parts[0, :, : self.outputs]  # as it is; an LM head's is large
        else:
            y = add(parts, None, self.bias, self.outputs, dtype or x.dtype)
        return y.view(*x.shape[:-1], self.outputs)

    def forward(self, x: torch.Tensor, row_sizes: tuple[int, ...] | None = None) -> torch.Tensor:
        return self.product(x)  # rows keep their bits as they are

    def subset(self, ids: torch.Tensor) -> Linear:
        part = TritonLinear.__new__(TritonLinear)
        LaidOutLinear.__init__(part, (len(ids), self.inputs), None, self.dtype, gemm.rows_of(self.layout, ids))
        part.half_sums = self.half_sums
        return part
