"""How long products of few rows take on this CPU, by the form of the weight.

    python scripts/products.py > benchmarks/products.md

Weights of the demo model's shapes, enough of each that they do not stay in the cache; medians of nine.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch

from fastea.kernels import packed
from fastea.quantize.forms import SCHEMES, nearest

SHAPES = {"gate and up": (3072, 576), "down": (576, 1536), "LM head": (49152, 576)}
BYTES = 60_000_000
FP32, BF16 = torch.float32, torch.bfloat16


def forms(weight: torch.Tensor) -> dict[str, packed.Layout]:
    """Every form that this CPU has."""
    made = {
        "fp32 matrix": {"matrix": weight},
        "fp32 blocks": packed.layout(weight, FP32, "cpu"),
        "bf16 matrix": {"matrix": weight.to(BF16)},
        "int8": packed.layout(nearest(weight, SCHEMES["int8"]), BF16, "cpu"),
        "int4": packed.layout(nearest(weight, SCHEMES["int4"]), BF16, "cpu"),
    }
    if packed.fast_bf16():
        made["bf16 oneDNN"] = packed.layout(weight, BF16, "cpu")
    if packed.fast_half():
        made["fp16"] = packed.layout(weight, FP32, "cpu", half=True)
    return made


def seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(11):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def main() -> None:
    print("# Products of few rows\n\n    python scripts/products.py\n")
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads; microseconds.\n")
    for i, (name, (outputs, inputs)) in enumerate(SHAPES.items()):
        copies = max(1, BYTES // (4 * outputs * inputs))
        weights = [forms(torch.randn(outputs, inputs)) for _ in range(copies)]
        if i == 0:
            print(f"| weight | rows | {' | '.join(weights[0])} |\n| --- | --- |{' --- |' * len(weights[0])}")
        for rows in (1, 2, 4, 8, 16, 26, 64):
            took = []
            for form in weights[0]:
                x = torch.randn(rows, inputs).to(FP32 if form.startswith("fp") else BF16)

                def run(x: torch.Tensor = x, form: str = form) -> None:
                    for weight in weights:  # noqa: B023 (called before the loop goes on)
                        packed.product(x, weight[form], outputs)  # noqa: B023

                took.append(1e6 * seconds(run) / copies)
            print(f"| {name}, {outputs} x {inputs} | {rows} | {' | '.join(f'{t:.0f}' for t in took)} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
