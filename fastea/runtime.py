"""Where and how the model runs: device, dtype, compilation."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch

from fastea.config import FasteaError

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def note(message: str) -> None:
    """One line to the user on stderr."""
    print(f"fastea: {message}", file=sys.stderr)


def resolve_device(name: str) -> str:
    """auto -> cuda if there is one, else cpu. A device that is not there is refused."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise FasteaError(f"--device {name}: known are auto, cpu, cuda and cuda:N")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise FasteaError(
            f"--device {name}: this machine has no CUDA device that torch can use; leave --device away for the CPU"
        )
    if ":" in name and int(name.split(":")[1]) >= torch.cuda.device_count():
        raise FasteaError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices, counted from 0")
    return name


def resolve_dtype(name: str, device: str, stored: torch.dtype) -> torch.dtype:
    """auto -> on a GPU the checkpoint's own 16-bit type (else bf16); on a CPU bf16 only with instructions for it."""
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise FasteaError(f"--dtype {name}: known are auto, {', '.join(_DTYPES)}")
    if device.startswith("cuda"):
        return stored if stored != torch.float32 else torch.bfloat16
    cpu = torch.cpu
    fast16 = cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast16 else torch.float32


def can_compile(device: str) -> bool:
    """Whether torch.compile has what it needs: a C++ compiler on a CPU, Triton on a GPU."""
    if device.startswith("cuda"):
        from torch.utils._triton import has_triton

        return bool(has_triton())
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return shutil.which(get_cpp_compiler()) is not None
    except Exception:  # the search itself fails where there is none
        return False


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One graph, one shape."""
    return torch.compile(function, fullgraph=True, dynamic=False)
