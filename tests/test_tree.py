"""Draft trees: shapes, ancestor words, drafting order, and what is refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import random_paths
from fastea.config import FasteaError
from fastea.kernels.attention import expand_words
from fastea.tree import EAGLE1_PATHS, Tree, chain, parse_tree


def test_eagle1_tree_is_the_papers():
    tree = parse_tree("eagle1")
    assert len(tree) == 26 and tree.depth_max == 5 and not tree.is_chain
    assert torch.bincount(tree.depth).tolist() == [1, 4, 8, 8, 3, 2]
    inner = {p[:-1] for p in EAGLE1_PATHS}
    assert len(inner) - 1 == 10 and len(tree) - len(inner) == 15  # expanded drafts, leaves
    assert [level.expanded.numel() for level in tree.levels] == [4, 4, 1, 1, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_words_children_and_levels_agree_with_the_paths(seed):
    paths = random_paths(seed)
    tree = Tree(paths, "random")
    mask = expand_words(tree.words, len(tree))
    for i, path in enumerate(tree.paths):
        ancestors = {tree.paths.index(path[:n]) for n in range(len(path) + 1)}
        assert set(mask[i].nonzero().flatten().tolist()) == ancestors
        assert tree.depth[i] == len(path) and tree.paths[tree.parent[i]] == path[:-1]
        for rank, child in enumerate(tree.children[i].tolist()):
            assert (child >= 0) == ((*path, rank) in tree.paths)
            assert child < 0 or tree.paths[child] == (*path, rank)
    drafted = {}  # slot of the draft cache's tree region -> path, as the levels lay them out
    above = [()]
    for level in tree.levels:
        here = [tree.paths[i] for i in level.nodes.tolist()]
        for path, row, rank in zip(here, level.parents.tolist(), level.ranks.tolist(), strict=True):
            assert above[row] == path[:-1] and path[-1] == rank
        above = [here[i] for i in level.expanded.tolist()]
        for i, path in enumerate(above):
            drafted[level.offset + i] = path
            visible = expand_words(level.words[i], 64).nonzero().flatten().tolist()
            assert [drafted[slot] for slot in visible] == [path[: n + 1] for n in range(len(path))]


def test_sixty_four_nodes_use_the_sign_bit():
    tree = Tree([(r,) for r in range(63)], "wide")
    assert len(tree) == 64 and tree.words[63] < 0
    assert expand_words(tree.words, 64)[63].nonzero().flatten().tolist() == [0, 63]


def test_chain():
    tree = chain(5)
    assert tree.is_chain and len(tree) == 6 and tree.depth_max == 5
    assert len(chain(0)) == 1 and chain(0).levels == []


@pytest.mark.parametrize("spec", ["chain:0", "chain:17", "chain:x", "star", "chain:-1"])
def test_unknown_specs_are_refused(spec):
    with pytest.raises(FasteaError, match="--tree"):
        parse_tree(spec)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[0, 0]], "no parent"),
        ([[1]], "skips a rank"),
        ([[0], [-1]], "skips a rank"),
        ([[r] for r in range(64)], "at most 64 nodes"),
        ([[0] * n for n in range(1, 18)], "depth 16"),
        ([], "non-empty"),
        ([[]], "non-empty"),
        ([["a"]], "ranks"),
        ([[0.5]], "ranks"),
        (3, "not iterable"),
    ],
)
def test_bad_path_files_are_refused(tmp_path, value, message):
    file = tmp_path / "paths.json"
    file.write_text(json.dumps(value))
    with pytest.raises(FasteaError, match=message):
        parse_tree(str(file))


def test_path_file(tmp_path):
    file = tmp_path / "paths.json"
    file.write_text("[[1], [0], [0, 0], [0]]")
    assert parse_tree(str(file)).paths == [(), (0,), (1,), (0, 0)]
    with pytest.raises(FasteaError, match="No such file"):
        parse_tree(str(tmp_path / "absent.json"))
