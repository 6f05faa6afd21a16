"""Where and how the model runs: device, dtype, compilation."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch

from fastea.config import FasteaError, ModelConfig
from fastea.kernels.packed import fast_bf16, fast_half

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def note(message: str) -> None:
    """One line to the user on stderr."""
    print(f"fastea: {message}", file=sys.stderr)


def exit_code(run: Callable[[], object], failed: str, interrupted: str) -> int:
    """Run a command: 0, or one line on stderr and 2 for bad input, 130 for an interruption."""
    try:
        run()
    except FasteaError as error:
        print(f"{failed}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    except OSError as error:
        print(f"{failed}: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


def use_threads(count: int | None) -> None:
    """As many threads of the CPU; None: torch's choice."""
    if count is not None:
        if count < 1:
            raise FasteaError(f"--threads {count} is not possible; it must be at least 1")
        torch.set_num_threads(count)


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


def resolve_dtype(name: str, device: str, stored: torch.dtype, quantized: bool = False) -> torch.dtype:
    """auto -> on a GPU the checkpoint's own 16-bit type (else bf16); on a CPU the 16-bit type that it multiplies
    fastest, float32 if none, and bf16 for the packed operators that read quantized weights."""
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise FasteaError(f"--dtype {name}: known are auto, {', '.join(_DTYPES)}")
    if device.startswith("cuda"):
        return stored if stored != torch.float32 else torch.bfloat16
    if fast_bf16() or quantized:
        return torch.bfloat16
    return torch.float16 if fast_half() else torch.float32


def resolve_head_quant(name: str, dtype: torch.dtype, triton: bool) -> str | None:
    """What a head's weights are rounded to. auto: int8 where its product of a few rows takes about half as long as one
    in 16 bit, in the Triton kernels and, in bf16, on a CPU with AVX-512; else nothing, since rounding costs some
    acceptance."""
    if name == "auto":
        wide = dtype == torch.bfloat16 and "AVX512" in torch.backends.cpu.get_cpu_capability()
        return "int8" if triton or wide else None
    return None if name == "none" else name


KERNEL_HEADS = (16, 32, 64, 96, 128)  # head sizes that the attention kernel takes


def use_triton(kernels: str, device: str, dtype: torch.dtype, config: ModelConfig) -> bool:
    """Whether the Triton kernels run this model. auto: on a GPU, unless something is in the way, which is said in one
    line; torch's operators then write the same text, slower. triton: where something is in the way, refused."""
    if kernels not in ("auto", "triton", "torch"):
        raise FasteaError(f"--kernels {kernels}: known are auto, triton and torch")
    if kernels == "torch" or (kernels == "auto" and not device.startswith("cuda")):
        return False
    problem = _in_the_way(device, dtype, config)
    if problem and kernels == "triton":
        raise FasteaError(f"--kernels triton: {problem}; use --kernels torch")
    if problem:
        note(f"the Triton kernels are off: {problem}; running torch's operators, slower")
    return problem is None


def _in_the_way(device: str, dtype: torch.dtype, config: ModelConfig) -> str | None:
    """What keeps the Triton kernels from running, None if nothing does."""
    try:
        from fastea.kernels.launch import INTERPRETED
    except Exception as error:  # not installed, or broken
        return f"Triton cannot be loaded ({(str(error).splitlines() or [type(error).__name__])[0]})"
    if device.startswith("cuda"):
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"the card has compute capability {capability[0]}.{capability[1]}, they need 8.0"
    elif not INTERPRETED:
        return "they need a GPU (or, for tests, TRITON_INTERPRET=1)"
    if dtype == torch.float32:
        return "they compute in 16 bit, not in float32"
    if config.head_dim not in KERNEL_HEADS:
        return f"heads of {config.head_dim} are not among {', '.join(map(str, KERNEL_HEADS))}"
    if config.num_heads // config.num_kv_heads > 16:
        return f"{config.num_heads // config.num_kv_heads} query heads a KV head are more than 16"
    return None


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


def compiled(function: Callable[..., Any], any_shape: bool = False) -> Callable[..., Any]:
    """One graph for each shape that it is called with; any_shape: one for all. Between fused operations values are
    rounded as between single ones: what is fused hangs on the shape, and rows would hang on how many they are."""
    return torch.compile(function, fullgraph=True, dynamic=any_shape, options={"emulate_precision_casts": True})


def compiling() -> contextlib.AbstractContextManager[None]:
    """While compiling: every model and every tree of a process may have shapes of its own; torch stops at 8."""
    return torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096)
