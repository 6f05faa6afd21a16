"""What the model takes in memory, and what there is."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fastea.config import FasteaError, ModelConfig


def check_weights_fit(config: ModelConfig, dtype: torch.dtype, quant: str | None, device: str) -> None:
    """Refuse, before anything is allocated, a model whose weights cannot fit."""
    free = available_bytes(device)
    needed = weights_estimate(config, dtype, quant)
    if free is None or needed <= free:
        return
    message = f"the weights take about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
    for smaller in ("int8", "int4"):
        if quant is None and weights_estimate(config, dtype, smaller) <= free:
            raise FasteaError(f"{message}; --quant {smaller} would fit")
    raise FasteaError(f"{message}; take a smaller model or another machine")


def weights_estimate(config: ModelConfig, dtype: torch.dtype, quant: str | None) -> float:
    """Bytes of the target's weights: layers and LM head as they will be stored, the embedding in full."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size * max(1, config.experts)
    layers = config.num_layers * (attention + mlp)
    embedding = config.vocab_size * config.hidden_size
    full = dtype.itemsize
    head = 1 if quant else 0 if config.tied else full
    each = {None: full, "int8": 1.0, "int4": 0.5}.get(quant, 0.5)  # scales come on top
    return layers * each + embedding * (full + head)


def tensor_bytes(*modules: torch.nn.Module | None) -> int:
    """Bytes of the parameters and buffers of these modules, storage that they share counted once."""
    storages = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()) if module else ():
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        for part in module.modules() if module else ():
            storages[id(part)] = getattr(part, "hidden_bytes", 0)
    return sum(storages.values())


def available_bytes(device: str) -> int | None:
    """Memory that can still be allocated there; None if the system does not say."""
    if device.startswith("cuda"):
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for later
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def peak_rss() -> int | None:
    """The most memory that this process has held, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
