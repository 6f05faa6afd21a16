"""How long products of few rows take on this CPU, by the form of the weight.

    python scripts/products.py > benchmarks/products.md

fp32 weights of the demo model's shapes, enough of each that they do not stay in the cache; medians of nine.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fastea.kernels.packed import blocks, product

SHAPES = {"gate and up": (3072, 576), "down": (576, 1536), "LM head": (49152, 576)}
BYTES = 60_000_000


def seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(11):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def main() -> None:
    print("# Products of few rows\n\n    python scripts/products.py\n")
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads, fp32; microseconds.\n")
    print("| weight | rows | x W^T | (W x^T)^T | blocks of 16 |\n| --- | --- | --- | --- | --- |")
    for name, (outputs, inputs) in SHAPES.items():
        weights = [torch.randn(outputs, inputs) for _ in range(max(1, BYTES // (4 * outputs * inputs)))]
        forms = [{"blocks": blocks(w)} for w in weights]
        for rows in (1, 2, 4, 8, 16, 26, 64):
            x = torch.randn(rows, inputs)

            def right(x: torch.Tensor = x, weights: list[torch.Tensor] = weights) -> None:
                for w in weights:
                    F.linear(x, w)

            def left(x: torch.Tensor = x, weights: list[torch.Tensor] = weights) -> None:
                for w in weights:
                    (w @ x.t()).t().contiguous()

            def blocked(x: torch.Tensor = x, forms: list[dict[str, torch.Tensor]] = forms, n: int = outputs) -> None:
                for form in forms:
                    product(x, form, n)

            took = [1e6 * seconds(call) / len(weights) for call in (right, left, blocked)]
            print(f"| {name}, {outputs} x {inputs} | {rows} | " + " | ".join(f"{t:.0f}" for t in took) + " |")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
