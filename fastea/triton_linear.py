"""Linear layers over the Triton GEMM. Imported only where its kernels run."""

from __future__ import annotations

import torch
from torch import nn

from fastea.kernels import gemm
from fastea.kernels.norm import add
from fastea.linear import Linear
from fastea.quantize.forms import QuantizedWeight


class TritonLinear(Linear):
    """weight: a matrix or codes. dtype: of activations, fp16 or bf16."""

    def __init__(
        self, weight: torch.Tensor | QuantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype, device: str
    ):
        nn.Module.__init__(self)
        self.outputs, self.inputs = int(weight.shape[0]), int(weight.shape[1])
        self.dtype, self.half_sums = dtype, gemm.card(device).half_sums
        self.bias = bias
        self._keep(gemm.layout(weight, dtype, device))

    def _keep(self, tensors: gemm.Layout) -> None:
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def layout(self) -> gemm.Layout:
        return {name: self.get_buffer(name) for name in self.names}

    def partials(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., K] -> the split-K parts of the product, fp32 [S, M, P], for the kernels that go on from there."""
        return gemm.partials(x.reshape(-1, self.inputs), self.layout, self.half_sums)

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

    def share(self, weight: torch.Tensor) -> None:
        if "matrix" in self.names and torch.equal(self.get_buffer("matrix"), weight):
            self._keep({"matrix": weight.detach()})

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    def subset(self, ids: torch.Tensor) -> Linear:
        part = TritonLinear.__new__(TritonLinear)
        nn.Module.__init__(part)
        part.outputs, part.inputs, part.dtype, part.bias = len(ids), self.inputs, self.dtype, None
        part.half_sums = self.half_sums
        part._keep(gemm.rows_of(self.layout, ids))
        return part
