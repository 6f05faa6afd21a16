"""How an operator of ours becomes one of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# By hand: `torch.library.custom_op` takes ten times as long to call, once a layer.
_library = torch.library.Library("fastea", "FRAGMENT")


def register(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.ops.fastea.<name>` for every device. body: computes; fake: outputs of the right shape, for tracing."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastea::{name}", fake)
    operator: Callable[..., Any] = getattr(torch.ops.fastea, name).default
    return operator
