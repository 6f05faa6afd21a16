"""Linear layers: a plain matrix, and a weight laid out for the device. Both can keep their rows' bits for every row
count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastea.kernels import packed
from fastea.kernels.rows import Product, product_rows
from fastea.quantize.forms import QuantizedWeight


class Linear(nn.Module):
    """y = x W^T (+ b). row_sizes: None for the fastest call, else see `fastea.kernels.rows`."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: torch.Tensor, row_sizes: tuple[int, ...] | None = None) -> torch.Tensor:
        if row_sizes is None:
            return self.product(x)
        return product_rows(self.product, x, row_sizes)

    def share(self, weight: torch.Tensor) -> None:
        """Let a matrix that equals this one be this one: one storage."""
        if torch.equal(self.weight, weight):
            self.weight = weight  # type: ignore[assignment]

    def example(self) -> torch.Tensor:
        """An empty row of the dtype and width that it takes [1, K]."""
        return self.weight.new_empty(1, self.weight.shape[1])

    def subset(self, ids: torch.Tensor) -> Linear:
        """A layer of its own with these outputs only (no bias); a plain matrix where the weight is not quantized."""
        return _plain(self.weight[ids])


class PackedLinear(Linear):
    """A linear layer over what its device reads fastest (`fastea.kernels.packed`). dtype: the activation's; half:
    weights in fp16 under fp32 activations."""

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        device: str,
        half: bool = False,
    ):
        nn.Module.__init__(self)
        self.outputs, self.inputs = int(weight.shape[0]), int(weight.shape[1])
        self.dtype, self.bias = dtype, bias
        self._keep({name: t.to(device) for name, t in packed.layout(weight, dtype, device, half).items()})

    def _keep(self, tensors: packed.Layout) -> None:
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def layout(self) -> packed.Layout:
        return {name: self.get_buffer(name) for name in self.names}

    @property
    def hidden_bytes(self) -> int:
        """Bytes that no tensor of this module shows."""
        return packed.hidden_bytes(self.layout, self.outputs, self.inputs)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        y = packed.product(x.reshape(-1, self.inputs), self.layout, self.outputs).reshape(*x.shape[:-1], self.outputs)
        return y if self.bias is None else y + self.bias

    def share(self, weight: torch.Tensor) -> None:
        if "matrix" in self.names and torch.equal(self.get_buffer("matrix"), weight):
            self._keep({"matrix": weight.detach()})

    def example(self) -> torch.Tensor:
        return torch.empty(1, self.inputs, dtype=self.dtype)

    def subset(self, ids: torch.Tensor) -> Linear:
        rows = packed.rows_of(self.layout, ids, self.outputs, self.inputs)
        if "matrix" in rows:
            return _plain(rows["matrix"])
        part = PackedLinear.__new__(PackedLinear)
        nn.Module.__init__(part)
        part.outputs, part.inputs, part.dtype, part.bias = len(ids), self.inputs, self.dtype, None
        part._keep(rows)
        return part


def _plain(weight: torch.Tensor) -> Linear:
    layer = Linear(0, 0)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def distinct_products(model: nn.Module) -> list[tuple[Product, torch.Tensor]]:
    """One product of each shape and kind in the model, with an example row: what row equality depends on."""
    found = {}
    for module in model.modules():
        if isinstance(module, Linear):
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            found[tuple((t.shape, t.dtype) for t in tensors)] = (module.product, module.example())
    return list(found.values())
