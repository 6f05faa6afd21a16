"""What all Triton kernels share: where they can run, and how they are launched. Imported only where they are used, so
that a CPU run never loads Triton."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run in Python, on CPU tensors
if INTERPRETED:
    from fastea.kernels import interpret

    interpret.use()

# In place of launching: called with the kernel, its arguments, its constants, warps and stages. What would run at any
# shape can so be compiled for any card, from tensors on the meta device.
recorder: Callable[[Any, tuple[Any, ...], dict[str, Any], int, int], None] | None = None


def on_triton(x: torch.Tensor) -> bool:
    """Whether a kernel, not its plain definition, computes on this tensor."""
    return x.is_cuda or INTERPRETED or recorder is not None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 2, **constants: Any) -> None:
    """Start a kernel. Products and sums are never contracted to fused ones: every rounding is the source's, and does
    not change with the version of Triton, whose default does."""
    if recorder is not None:
        recorder(kernel, args, constants, warps, stages)
        return
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with here:  # Triton asks for the current device
        kernel[grid](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)
