"""Which drafted nodes the target's picks accept.

Numeric contract: integers only. One program walks the tree of one sequence, all of whose nodes it holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastea.kernels.launch import launch, on_triton
from fastea.kernels.register import register

NODES = 64  # at most, as in `fastea.tree`


def accept_walk_reference(
    tokens: torch.Tensor, picks: torch.Tensor, parent: torch.Tensor, depth_max: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the root, slot 0, step into the lowest child that carries the node's pick, for as long as there is one.

    tokens, picks: [B, N] int64, of each node and the target's after it; parent: [N] or [B, N] slots, the root's is 0.
    Returns, in int64, path [B, D+1] (slots of root and accepted nodes; j where nothing was accepted at depth j),
    count [B] = accepted nodes + 1, emitted [B, D+1] (the accepted tokens, then the target's own, repeated), with
    D = depth_max.
    """
    node = torch.zeros_like(tokens[:, 0])
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    path, count, emitted = [node], torch.ones_like(node), []
    for depth in range(depth_max + 1):
        emitted.append(picks.gather(1, node[:, None])[:, 0])
        if depth == depth_max:
            break
        match = (parent == node[:, None]) & (tokens == emitted[-1][:, None]) & (slots > 0)
        found = match.any(1)
        node = torch.where(found, match.int().argmax(1), node)
        path.append(torch.where(found, node, depth + 1))
        count = count + found
    return torch.stack(path, 1), count, torch.stack(emitted, 1)


@triton.jit
def _kernel(
    tokens, picks, parent, path, count, emitted, token_stride, pick_stride, parent_stride, nodes,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.arange(0, BLOCK)
    inside = slot < nodes
    token = tl.load(tokens + row * token_stride + slot, mask=inside, other=0)
    pick = tl.load(picks + row * pick_stride + slot, mask=inside, other=0)
    above = tl.load(parent + row * parent_stride + slot, mask=inside, other=0)
    is_child = inside & (slot > 0)  # the root's parent is itself
    path += row * (DEPTH + 1)
    emitted += row * (DEPTH + 1)
    node, accepted = 0, 0
    tl.store(path, 0)
    for depth in range(DEPTH):
        wanted = tl.sum(tl.where(slot == node, pick, 0), axis=0)
        tl.store(emitted + depth, wanted)
        child = tl.min(tl.where(is_child & (above == node) & (token == wanted), slot, BLOCK), axis=0)
        found = child < BLOCK
        node = tl.where(found, child, node)
        accepted += found.to(tl.int32)
        tl.store(path + depth + 1, tl.where(found, child, depth + 1))
    tl.store(emitted + DEPTH, tl.sum(tl.where(slot == node, pick, 0), axis=0))
    tl.store(count + row, accepted + 1)


def _accept_walk(
    tokens: torch.Tensor, picks: torch.Tensor, parent: torch.Tensor, depth_max: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not on_triton(tokens):
        return accept_walk_reference(tokens, picks, parent, depth_max)
    path, count, emitted = _outputs(tokens, picks, parent, depth_max)
    parent = parent.expand_as(tokens)
    launch(
        _kernel, (len(tokens),), tokens, picks, parent, path, count, emitted,
        tokens.stride(0), picks.stride(0), parent.stride(0), tokens.shape[1],
        warps=1, DEPTH=depth_max, BLOCK=NODES,
    )  # fmt: skip
    return path, count, emitted


def _outputs(
    tokens: torch.Tensor, picks: torch.Tensor, parent: torch.Tensor, depth_max: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = len(tokens)
    return tokens.new_empty(batch, depth_max + 1), tokens.new_empty(batch), tokens.new_empty(batch, depth_max + 1)


accept_walk = register(
    "accept_walk(Tensor tokens, Tensor picks, Tensor parent, int depth_max) -> (Tensor, Tensor, Tensor)",
    _accept_walk,
    _outputs,
)
