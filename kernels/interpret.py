"""Triton's interpreter with the arithmetic of a tensor core: products of bf16, and a row's sum in one order whatever
the number of rows (the interpreter itself multiplies bf16 as integers and leaves the order to a BLAS library); fp32
rounded to the nearest bf16, not cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

STEP = 16  # inputs of one instruction


def _values(operand: Any) -> np.ndarray:
    if operand.dtype.scalar == tl.bfloat16:  # kept as its bits
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(operand.data, dtype=np.float32)


def _dot(a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """d + a b: ascending inputs one by one in fp32, rounded to d's dtype after every STEP of them."""
    left, right, total = _values(a), _values(b), d.data
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, left.shape[1], STEP):
            part = total.astype(np.float32)
            for k in range(start, min(start + STEP, left.shape[1])):
                part = part + left[:, k, None] * right[None, k]
            total = part.astype(d.data.dtype)
    return interpreter.TensorHandle(total, d.dtype.scalar)


_convert = interpreter._convert_float


def _nearest(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    if source == tl.float32 and target == tl.bfloat16:
        return torch.from_numpy(np.array(data)).bfloat16().view(torch.uint16).numpy()
    return np.asarray(_convert(data, source, target, mode))


_patch = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, *scope: Any) -> None:
    _patch(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())  # older versions fail on bounds of loops


def _get_bf16(builder: Any, value: float) -> Any:
    bits = torch.tensor([value], dtype=torch.bfloat16).view(torch.uint16).numpy()
    return interpreter.TensorHandle(bits, tl.bfloat16)


def use() -> None:
    interpreter.InterpreterBuilder.get_bf16 = _get_bf16  # older versions have no such constants
    interpreter.interpreter_builder.create_dot = _dot
    interpreter._convert_float = _nearest
    interpreter._patch_lang_tensor = _patch_tensor
