"""Linear layers: a plain matrix, and a weight laid out for the device. Both can keep their rows' bits for every row
count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastea.kernels import packed
from fastea.kernels.rows import Product, cancelling, product_rows
from fastea.quantize.forms import QuantizedWeight, nearest


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

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape[0], self.weight.shape[1]

    def probe(self) -> tuple[Product, torch.Tensor]:
        """A product like this one, and rows for it, of `fastea.kernels.rows.cancelling`."""
        matrix, rows = cancelling(*self.shape)
        weight, bias = matrix.to(self.weight), None if self.bias is None else torch.zeros_like(self.bias)
        return lambda x: F.linear(x, weight, bias), rows.to(self.weight)

    def subset(self, ids: torch.Tensor) -> Linear:
        """A layer of its own with these outputs only (no bias); a plain matrix where the weight is not quantized."""
        return _plain(self.weight[ids])


class LaidOutLinear(Linear):
    """A linear layer over tensors in a device's own layout, by name. dtype: the activation's."""

    def __init__(
        self, shape: tuple[int, int], bias: nn.Parameter | None, dtype: torch.dtype, tensors: dict[str, torch.Tensor]
    ):
        nn.Module.__init__(self)
        self.outputs, self.inputs = shape
        self.bias, self.dtype = bias, dtype
        self._keep(tensors)

    def _keep(self, tensors: dict[str, torch.Tensor]) -> None:
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def layout(self) -> dict[str, torch.Tensor]:
        return {name: self.get_buffer(name) for name in self.names}

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [M, K] as kernels read it: x may be a part of wider rows."""
        return x.reshape(-1, self.inputs).contiguous()

    def share(self, weight: torch.Tensor) -> None:
        if "matrix" in self.names and torch.equal(self.get_buffer("matrix"), weight):
            self._keep({"matrix": weight.detach()})


class PackedLinear(LaidOutLinear):
    """Over what a CPU reads fastest (`fastea.kernels.packed`). half: weights in fp16 under fp32 activations."""

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        device: str,
        half: bool = False,
    ):
        tensors = {name: t.to(device) for name, t in packed.layout(weight, dtype, device, half).items()}
        super().__init__((int(weight.shape[0]), int(weight.shape[1])), bias, dtype, tensors)
        self.half_weight = half
        self.scheme = weight.scheme if isinstance(weight, QuantizedWeight) else None

    @property
    def hidden_bytes(self) -> int:
        """Bytes that no tensor of this module shows."""
        return packed.hidden_bytes(self.layout, self.outputs, self.inputs)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        y = packed.product(self.rows(x), self.layout, self.outputs).reshape(*x.shape[:-1], self.outputs)
        return y if self.bias is None else y + self.bias

    def probe(self) -> tuple[Product, torch.Tensor]:
        matrix, rows = cancelling(*self.shape)
        if self.scheme is None and "fp16" not in self.names:
            matrix *= 2.0**20  # past fp16, so that this form is taken again
        weight = nearest(matrix, self.scheme) if self.scheme else matrix
        twin = PackedLinear(weight, None, self.dtype, "cpu", self.half_weight)
        assert twin.names == self.names
        return twin.product, rows.to(self.dtype)

    def subset(self, ids: torch.Tensor) -> Linear:
        rows = packed.rows_of(self.layout, ids, self.outputs, self.inputs)
        if "matrix" in rows:
            return _plain(rows["matrix"])
        part = PackedLinear.__new__(PackedLinear)
        LaidOutLinear.__init__(part, (len(ids), self.inputs), None, self.dtype, rows)
        part.half_weight, part.scheme = self.half_weight, self.scheme
        return part


class FineLinear(PackedLinear):
    """fp16 weights under fp32 activations whatever it is given: the sums are handed on as they are."""

    def __init__(self, weight: torch.Tensor | QuantizedWeight, bias: nn.Parameter | None, device: str):
        super().__init__(weight, bias, torch.float32, device, half=True)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return super().product(x.float())


def _plain(weight: torch.Tensor) -> Linear:
    layer = Linear(0, 0)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def probes(model: nn.Module) -> list[tuple[Product, torch.Tensor]]:
    """The probe of each shape and form of product in the model: what row equality depends on."""
    found: dict[tuple[object, ...], Linear] = {}
    for module in model.modules():
        if isinstance(module, Linear):
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            form = (module.shape, *((t.shape, t.dtype) for t in tensors))
            found[form] = module
    return [module.probe() for module in found.values()]
