"""What the tests of kernels in Triton's interpreter share."""

import functools

import pytest
import torch
from hypothesis import settings
from triton.runtime import interpreter

from fastea.kernels.launch import INTERPRETED

assert INTERPRETED, "Triton was imported before this file, so that the kernels would not be tested"

HALVES = (torch.float16, torch.bfloat16)
few = functools.partial(settings, deadline=None, derandomize=True)


def both(*pair):
    return pytest.mark.parametrize("run", pair, ids=("kernel", "reference"))


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def uneven(seed, *shape, dtype=torch.float16):
    """Of many magnitudes, so that sums are not exact and their order shows."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-7, 8, shape, generator=generator)).to(dtype)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def reversed_dot(rows):
    """The interpreter's product, with the inputs in descending order for so many rows."""
    dot = interpreter.interpreter_builder.create_dot

    def faulty(a, b, d, *rest):
        if b.data.shape[1] == rows:
            a = interpreter.TensorHandle(a.data[:, ::-1], a.dtype.scalar)
            b = interpreter.TensorHandle(b.data[::-1], b.dtype.scalar)
        return dot(a, b, d, *rest)

    return faulty
