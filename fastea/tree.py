"""Static draft trees as tensors: parents, depths, ancestor words, and the order in which they are drafted.

A tree is given by paths of child ranks: (0,) is the root's likeliest child, (0, 1) that child's second. Slot 0 is
the root (the pending token); the others follow by depth, then by path. Depth of the root is 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastea.config import FasteaError

MAX_NODES, MAX_DEPTH = 64, 16  # one 64-bit ancestor word a node; the deepest path the numeric contract allows
MAX_WIDTH = 16  # children a node of a dynamic tree

EAGLE1_PATHS: tuple[tuple[int, ...], ...] = (
    *((r,) for r in range(4)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)  # 26 nodes with the root: the tree of the EAGLE-1 paper (figure 7 and its code)


@dataclass(frozen=True)
class Level:
    """The nodes of one depth and how they are drafted from the rows of the depth above.

    nodes: their slots. parents: for each, which expanded row of the depth above it comes from. ranks: child rank.
    expanded: those of `nodes` (as indices into it) that have children and are run through the draft model.
    words: ancestor words of the expanded rows over the slots of the draft cache's tree region. offset: the first of
    those slots.
    """

    nodes: torch.Tensor
    parents: torch.Tensor
    ranks: torch.Tensor
    expanded: torch.Tensor
    words: torch.Tensor
    offset: int


class Nodes(NamedTuple):
    """The nodes of one tree for each sequence, parents before children, the root in slot 0: [B, N] int64 each.

    parent: slots, the root's is 0; depth: the root's is 0; words: bit j of word i = node j is i or an ancestor of i.
    """

    parent: torch.Tensor
    depth: torch.Tensor
    words: torch.Tensor


class Tree:
    """N nodes, the root included. name: how it was asked for, as the summary prints it.

    parent, depth, rank: [N] int64 (the root's parent is 0); words: [N] int64, bit j of word i = node j is i or an
    ancestor of i; children: [N, C] slots by rank, -1 where there is none; levels: depths 1 .. depth_max.
    """

    def __init__(self, paths: Iterable[tuple[int, ...]], name: str):
        ordered = sorted(set(paths), key=lambda p: (len(p), p))
        self.name, self.paths = name, [(), *ordered]
        slot = {path: i for i, path in enumerate(self.paths)}
        for path in ordered:
            if path[:-1] not in slot:
                raise FasteaError(f"tree {name}: node {list(path)} has no parent in the tree")
            if path[-1] < 0 or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in slot):
                raise FasteaError(
                    f"tree {name}: node {list(path)} skips a rank; children are 0, 1, 2, ... without gaps"
                )
        if len(self.paths) > MAX_NODES or max(map(len, self.paths)) > MAX_DEPTH:
            size = f"{len(self.paths)} nodes of depth {max(map(len, self.paths))}"
            raise FasteaError(f"tree {name}: {size}; at most {MAX_NODES} nodes and depth {MAX_DEPTH} are possible")
        parents = [slot[p[:-1]] if p else 0 for p in self.paths]
        words = [1]
        for i in range(1, len(self.paths)):
            words.append(words[parents[i]] | 1 << i)
        width = max((p[-1] + 1 for p in ordered), default=1)
        children = [[slot.get((*p, r), -1) for r in range(width)] for p in self.paths]
        self.parent, self.depth = torch.tensor(parents), torch.tensor([len(p) for p in self.paths])
        self.rank = torch.tensor([p[-1] if p else 0 for p in self.paths])
        self.words, self.children = torch.tensor([_signed(w) for w in words]), torch.tensor(children)
        self.depth_max = max(map(len, self.paths))
        self.is_chain = all(len(p) == i for i, p in enumerate(self.paths))
        self.levels = list(self._levels(slot))

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def width(self) -> int:
        """Most children of a node."""
        return self.children.shape[1]

    def nodes(self, batch: int) -> Nodes:
        """The same for every sequence."""
        return Nodes(*(t.expand(batch, -1) for t in (self.parent, self.depth, self.words)))

    def _levels(self, slot: dict[tuple[int, ...], int]) -> Iterable[Level]:
        inner = {p[:-1] for p in self.paths if p}
        draft_slot: dict[tuple[int, ...], int] = {}  # expanded nodes in the draft cache's tree region
        above: list[tuple[int, ...]] = [()]
        for depth in range(1, self.depth_max + 1):
            here = [p for p in self.paths if len(p) == depth]
            expanded = [p for p in here if p in inner]
            offset = len(draft_slot)
            draft_slot |= {p: offset + i for i, p in enumerate(expanded)}
            words = [sum(1 << draft_slot[p[:n]] for n in range(1, depth + 1)) for p in expanded]
            yield Level(
                nodes=torch.tensor([slot[p] for p in here]),
                parents=torch.tensor([above.index(p[:-1]) for p in here]),
                ranks=torch.tensor([p[-1] for p in here]),
                expanded=torch.tensor([here.index(p) for p in expanded], dtype=torch.int64),
                words=torch.tensor([_signed(w) for w in words], dtype=torch.int64),
                offset=offset,
            )
            above = expanded

    def to(self, device: str) -> Tree:
        """The same tree with its tensors on a device."""
        moved = object.__new__(Tree)
        moved.__dict__ |= {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(self).items()}
        moved.levels = []
        for level in self.levels:
            changed: dict[str, Any] = {k: v.to(device) for k, v in vars(level).items() if isinstance(v, torch.Tensor)}
            moved.levels.append(replace(level, **changed))
        return moved


@dataclass(frozen=True)
class DynamicTree:
    """A tree that each round grows anew (EAGLE-2, arXiv 2406.16858, section 4): `levels` times the `width` best nodes
    get their `width` likeliest children, and the `count` - 1 best of all candidates are verified with the root.

    levels: draft forwards, that on the accepted rows included, and so the depth of the deepest node.
    """

    count: int
    width: int
    levels: int

    is_chain = False

    @property
    def name(self) -> str:
        return f"dynamic:{self.count},{self.width},{self.levels}"

    @property
    def depth_max(self) -> int:
        return self.levels

    @property
    def candidates(self) -> int:
        return self.width + (self.levels - 1) * self.width**2

    @property
    def draft_rows(self) -> int:
        """Rows of the draft cache that one tree takes."""
        return self.width * (self.levels - 1)

    def __len__(self) -> int:
        return self.count

    def to(self, device: str) -> DynamicTree:
        return self

    def fitted(self, vocab: int) -> DynamicTree:
        """This tree within what a draft vocabulary allows."""
        width = min(self.width, vocab)
        levels = max(1, self.levels)
        shape = DynamicTree(2, width, levels)
        return DynamicTree(max(2, min(self.count, shape.candidates + 1)), width, levels)


@dataclass(frozen=True)
class JoinedTree:
    """A tree with a chain beside it that each round hangs somewhere below the root."""

    base: Tree | DynamicTree
    chain: int

    is_chain = False

    @property
    def name(self) -> str:
        return f"{self.base.name}+ngram:{self.chain}"

    @property
    def depth_max(self) -> int:
        return max(self.base.depth_max, self.chain)

    def __len__(self) -> int:
        return len(self.base) + self.chain

    def to(self, device: str) -> JoinedTree:
        return self


AnyTree = Tree | DynamicTree | JoinedTree


def best_nodes(scores: torch.Tensor, parents: torch.Tensor, tree: DynamicTree) -> tuple[torch.Tensor, Nodes]:
    """The best N - 1 candidates as a tree under the root.

    scores: [B, C] fp32, by level, never above the parent's; parents: [B, C] index of each candidate's parent among the
    candidates, -1 = the root. Returns the chosen candidates, best first [B, N - 1], and their nodes in this order. Ties
    go to the lower index, so that every node comes after its parent, and any first nodes are a tree.
    """
    batch, count = scores.shape[0], len(tree)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    slot = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    chosen = order[:, : count - 1]
    above = parents.gather(1, chosen)
    root = torch.zeros(batch, 1, dtype=torch.int64, device=scores.device)
    parent = torch.cat((root, torch.where(above < 0, 0, slot.gather(1, above.clamp(min=0)) + 1)), 1)
    later = torch.div(chosen - tree.width, tree.width**2, rounding_mode="floor")  # -1 on the first level
    depth = torch.cat((root, later + 2), 1)
    bits = torch.ones_like(parent) << torch.arange(parent.shape[1], device=scores.device)
    words, ancestor = bits, parent
    for _ in range(tree.levels):
        words = words | bits.gather(1, ancestor)
        ancestor = parent.gather(1, ancestor)
    return chosen, Nodes(parent, depth, words)


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


def chain(length: int) -> Tree:
    """A single path of `length` drafted tokens; 0 is plain decoding."""
    return Tree(((0,) * n for n in range(1, length + 1)), f"chain:{length}" if length else "none")


def parse_tree(spec: str) -> Tree | DynamicTree:
    """`eagle1`, `chain:K` (K drafted tokens, 1 .. 16), `dynamic:N,K,D` (see `DynamicTree`), or a JSON file with a list
    of paths of child ranks."""
    if spec == "eagle1":
        return Tree(EAGLE1_PATHS, spec)
    if spec.startswith("chain:"):
        count = spec.removeprefix("chain:")
        if not count.isdigit() or not 1 <= int(count) <= MAX_DEPTH:
            raise FasteaError(f"--tree {spec}: chain:K takes a whole number from 1 to {MAX_DEPTH}")
        return chain(int(count))
    if spec.startswith("dynamic:"):
        parts = spec.removeprefix("dynamic:").split(",")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise FasteaError(f"--tree {spec}: dynamic:N,K,D takes nodes with the root, children a node and levels")
        nodes, width, levels = map(int, parts)
        if not (nodes <= MAX_NODES and 1 <= width <= MAX_WIDTH and levels <= MAX_DEPTH):
            limits = f"at most {MAX_NODES} nodes, 1 to {MAX_WIDTH} children and {MAX_DEPTH} levels are possible"
            raise FasteaError(f"--tree {spec}: {limits}")
        return DynamicTree(nodes, width, levels)
    if not spec.endswith(".json"):
        known = "eagle1, chain:K, dynamic:N,K,D and a .json file with a list of paths"
        raise FasteaError(f"--tree {spec}: known are {known}")
    try:
        raw = json.loads(Path(spec).read_text(encoding="utf-8"))
        paths = [tuple(path) for path in raw]
        if not paths or not all(path and all(type(r) is int for r in path) for path in paths):
            raise ValueError("a list of non-empty lists of ranks is expected, such as [[0], [1], [0, 0]]")
    except (OSError, ValueError, TypeError) as error:
        raise FasteaError(f"--tree {spec}: {error}") from None
    return Tree(paths, spec)
