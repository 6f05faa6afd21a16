"""GPTQ over a whole model: layer by layer, one layer's inputs and second moments in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastea.cache import KVCache
from fastea.kernels.attention import sight
from fastea.quantize.forms import QuantizedWeight, Scheme
from fastea.quantize.gptq import gptq


def products(layer: torch.nn.Module) -> list[str]:
    """Names of a layer's quantized products, in the order of computation."""
    return [n for n, m in layer.named_modules() if hasattr(m, "product") and n != "router"]


@torch.inference_mode()
def quantize_layers(
    model: Any, texts: list[list[int]], scheme: Scheme, progress: Callable[[], None] = lambda: None
) -> dict[str, QuantizedWeight]:
    """Quantized weights of every layer of a `fastea.llama.Llama` in full precision, by name ("layers.0.qkv").

    texts: token ids of the calibration sequences. Each product is calibrated on what the products quantized before it
    hand on. The model's own weights are overwritten by the decoded ones. progress is called after every product.
    """
    longest = max(len(t) for t in texts)
    model.set_context(longest)
    config, like = model.config, model.embed.weight
    cache = KVCache(1, 1, config.num_kv_heads, longest, config.head_dim, like.dtype, like.device)
    start, group = torch.zeros(1, dtype=torch.int64), config.num_heads // config.num_kv_heads
    states = [model.embed(torch.tensor([t])) for t in texts]

    def run(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows, keys = x.shape[1], cache.keys[0]
        seen, at = sight(None, start, 0, rows, group, keys), torch.arange(rows)[None]
        out: torch.Tensor = layer(x, model.rope[None, :rows], keys, cache.values[0], at, seen, None)
        return out

    done = {}
    for number, layer in enumerate(model.layers):
        for name in products(layer):
            linear: Any = layer.get_submodule(name)
            moments = torch.zeros(linear.weight.shape[1], linear.weight.shape[1], dtype=torch.float64)

            def observe(_: Any, inputs: tuple[torch.Tensor, ...], moments: torch.Tensor = moments) -> None:
                rows = inputs[0].flatten(0, -2).float()
                moments += rows.T @ rows

            hook = linear.register_forward_pre_hook(observe)
            for x in states:
                run(layer, x)
            hook.remove()
            weight = gptq(linear.weight, moments, scheme)
            linear.weight.copy_(weight.dequantized())
            done[f"layers.{number}.{name}"] = weight
            progress()
        states = [run(layer, x) for x in states]
    return done
