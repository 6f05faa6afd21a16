"""`--tree auto`: the search against all trees, the choice against known costs, the pace of dynamic trees."""

import itertools
import json
import math
import random

import pytest
import torch
from test_cli import run
from test_exact import build, make

from fastea.acceptance import AcceptanceTable, corrected, expected
from fastea.costs import Costs, machine, remember, remembered
from fastea.drafters import Draft
from fastea.drafters.dynamic import DynamicEagleDrafter
from fastea.drafters.eagle import EagleDrafter
from fastea.loading import load
from fastea.pace import Pace
from fastea.planner import Planner, drawn
from fastea.tree import DynamicTree, Nodes, Tree, chain
from fastea.tree_search import best_static, chances, rate


def costs(plain=10.0, slope=0.1, level=1.0, **changes):
    """Verifying N nodes takes plain + slope * (N - 1), a level of drafting `level`."""
    base = {"plain": plain, "verify": [(n, plain + slope * (n - 1)) for n in (4, 8, 64)], "first": level}
    base |= {"level": level, "grown_first": level, "grown_level": level}
    return Costs(**(base | changes))


def all_trees(nodes, width, depth):
    """Every tree of up to so many nodes, the root left out, without rank gaps: sets of paths."""
    found, frontier = set(), {frozenset()}
    while frontier:
        found |= frontier
        grown = set()
        for tree in frontier:
            if len(tree) + 1 >= nodes:
                continue
            for parent in [(), *tree]:
                rank = sum(1 for p in tree if p[:-1] == parent and len(p) == len(parent) + 1)
                if len(parent) < depth and rank < width:
                    grown.add(tree | {(*parent, rank)})
        frontier = grown - found
    return found - {frozenset()}


def value(tree, rates):
    return 1 + sum(math.prod(rates[d][rank] for d, rank in enumerate(path)) for path in tree)


def test_the_search_finds_the_best_of_all_small_trees():
    """Brute force over every tree of at most 8 nodes, 3 children and depth 4, for many tables and costs."""
    rng = random.Random(0)
    trees = all_trees(8, 3, 4)
    assert len(trees) > 300
    for _ in range(40):
        rates = [sorted((rng.uniform(0, 0.95 / (r + 1)) for r in range(3)), reverse=True) for _ in range(4)]
        fixed, per_node, per_level = rng.uniform(1, 10), rng.uniform(0, 3), rng.uniform(0, 5)
        known = [[*row, 0.0] for row in rates]  # no fourth child

        def seconds(nodes, depth, fixed=fixed, per_node=per_node, per_level=per_level):
            return fixed + per_node * nodes + per_level * depth

        best = max(value(t, rates) / seconds(len(t) + 1, max(map(len, t))) for t in trees)
        found = best_static(known, seconds, nodes=8, deepest=4)
        assert found.rate == pytest.approx(best, rel=1e-9)
        assert found.tokens == pytest.approx(value(found.paths, rates)) and frozenset(found.paths) in trees


def test_chances_come_best_first_and_every_node_after_its_parent():
    rates = [[0.6, 0.2, None], [0.7, 0.75, None]]  # the second child's rate is noise: never above the first's
    listed = list(itertools.islice(chances(rates, 4), 60))
    values = [chance for chance, _ in listed]
    assert values == sorted(values, reverse=True) and len({path for _, path in listed}) == 60
    assert Tree([path for _, path in listed], "t").depth_max == 4
    assert rate(rates, 2, 1) == 0.7 and rate(rates, 9, 0) == 0.7 and rate(rates, 1, 3) == pytest.approx(0.05)


def test_costs_between_and_past_what_was_measured():
    found = Costs(10.0, [(4, 11.0), (8, 15.0), (16, 31.0)], 2.0, 1.0, 3.0, 4.0)
    assert [found.verified(n) for n in (4, 6, 8, 12, 16, 20)] == [11.0, 13.0, 15.0, 23.0, 31.0, 39.0]
    assert found.verified(1) == 10.0 and found.static(8, 3) == 19.0 and found.grown(8, 3) == 26.0
    disturbed = Costs(10.0, [(4, 30.0), (8, 12.0), (16, 20.0)], 2.0, 1.0, 3.0, 4.0)
    assert [disturbed.verified(n) for n in (1, 4, 8, 16)] == [10.0, 12.0, 12.0, 20.0]


def test_timings_are_kept_and_a_broken_file_is_measured_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert remembered("a") is None
    remember("a", costs())
    remember("b", costs(plain=3.0))
    assert remembered("a") == costs() and remembered("b").plain == 3.0
    (tmp_path / "fastea" / "timings.json").write_text('{"a": {"plain": 1}}')
    assert remembered("a") is None
    remember("a", costs())
    assert remembered("a") == costs()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no")
    remember("a", costs())
    assert "timings are not kept" in capsys.readouterr().err
    assert "threads" in machine(torch.device("cpu"))


TABLE = [[0.6, 0.2, 0.1]] * 4


def planner_of(head, card=None, **changes):
    def maker(tree):
        return DynamicEagleDrafter(head, tree) if isinstance(tree, DynamicTree) else EagleDrafter(head, tree)

    planner = Planner(maker, {"acceptance": {"greedy": {"by_depth_and_rank": TABLE} | (card or {})}}, "key")
    planner.costs = lambda generator, sampling: costs(**changes)
    return planner


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"slope": 0.0, "level": 0.0}, "auto:64"),  # rows cost nothing
        ({"slope": 50.0, "level": 0.0}, "none"),  # a row costs five steps
        ({"slope": 0.0, "level": 30.0}, "none"),
        ({"slope": 5.0, "level": 0.0}, "auto:2"),
    ],
)
def test_the_choice_follows_the_costs(changes, name):
    target, head = make()
    generator = build(target, None, planner=planner_of(head, **changes))
    plain = build(target, None).generate([1, 2, 3], max_new_tokens=30).ids
    assert generator.generate([1, 2, 3], max_new_tokens=30).ids == plain
    assert generator.info["tree"] == name == generator.planner.plans[1, True].name
    text = drawn(generator.planner.plans[1, True])
    assert ("is expected to pay" in text) == (name == "none") and "plain 10000.00" in text


def test_a_dynamic_tree_is_taken_where_it_yields_more():
    """20 slots with a chance of 0.3 each are 7 tokens a round."""
    target, head = make()
    card = {"dynamic": {"4,3": [0.3] * 20}}
    generator = build(target, None, planner=planner_of(head, card))
    plain = build(target, None).generate([1, 2, 3], max_new_tokens=40).ids
    assert generator.generate([1, 2, 3], max_new_tokens=40).ids == plain
    plan = generator.planner.plans[1, True]
    assert plan.tree == DynamicTree(21, 4, 3) and plan.tokens == pytest.approx(7.0)
    assert generator.engine.pace and generator.drafter.deeper


def test_what_is_accepted_moves_the_choice():
    """A head that is never right is given up after some requests; one call alone keeps its tree to its end."""
    target, head = make()
    generator = build(target, None, planner=planner_of(head, slope=0.3))
    names = []
    for i in range(30):
        generator.generate([1, 2, 3 + i], max_new_tokens=100)
        names.append(generator.info["tree"])
    assert names[0].startswith("auto:") and names[-1] == "none"
    table = AcceptanceTable(chain(1))
    table.trials[1, 0], table.hits[1, 0] = 300, 0
    assert corrected([[0.6, 0.2], [0.5]], [table]) == [[0.3, 0.2], [0.5]]
    assert all(sum(row) < 1 for row in expected())


def test_greedy_and_sampled_have_trees_of_their_own():
    target, head = make()
    planner = planner_of(head, slope=0.0, level=0.0)
    planner.acceptance["temperature 0.8"] = {"by_depth_and_rank": [[0.0]]}
    generator = build(target, None, planner=planner)
    for _ in range(2):
        generator.generate([1, 2], max_new_tokens=4)
        assert generator.info["tree"] == "auto:64"
        generator.generate([1, 2], max_new_tokens=4, temperature=0.8, seed=1)
        assert generator.info["tree"] == "none"


def draft_of(values):
    count = len(values) + 1
    zeros = torch.zeros(1, count, dtype=torch.int64)
    return Draft(zeros, None, Nodes(zeros, zeros, zeros), torch.tensor([values]))


def test_a_round_takes_as_many_nodes_as_pay():
    """At 0.1 tokens a second and 1 second a node a node pays if its chance, times what chances are worth, is over 0.1;
    only the listed numbers are possible."""
    pace = Pace(costs(plain=10.0, slope=1.0), 24, 0.1, few=False)
    assert pace.buckets == [4, 8, 12, 16, 24]
    assert pace.cut(draft_of([0.9] * 7 + [0.01] * 16)).tokens.shape == (1, 8)
    assert pace.cut(draft_of([0.9] * 23)).tokens.shape == (1, 24)
    assert pace.cut(draft_of([0.01] * 23)).tokens.shape == (1, 4)
    assert pace.cut(draft_of([0.9] * 5)).tokens.shape == (1, 6)  # there are no more
    assert pace.deeper(0.5, 0.7) and not pace.deeper(0.2, 0.7)  # 0.5 * 5/7 > 0.1 * 1 > 0.2 * 2/7
    for _ in range(200):  # chances turn out to be worth a tenth
        pace.cut(draft_of([0.9] * 7 + [0.01] * 16))
        pace.learn(1 + 0.1 * pace.expected[pace.count - 1], (1 + 0.1 * pace.expected[pace.count - 1]) / 0.1)
    assert pace.trust == pytest.approx(0.1, rel=0.1) and pace.rate == pytest.approx(0.1, rel=0.1)
    assert pace.cut(draft_of([0.9] * 7 + [0.01] * 16)).tokens.shape == (1, 4)
    assert Pace(costs(), 64, 0.1, few=True).buckets == [8, 16, 32, 64]


def test_measuring_a_tiny_model(folder, tmp_path, monkeypatch):
    """Real timings, kept and found again; whatever they are, the text stays plain decoding's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("fastea.planner.DOUBT", math.inf)  # a machine that is quiet only now
    model = load(folder, tree="auto", dtype="float32")
    plain = load(folder, head="none", dtype="float32")
    assert model.info["tree"] == "auto"
    for settings in ({}, {"temperature": 0.8, "seed": 1}):
        assert (
            model.generate("hello", max_new_tokens=20, **settings).ids
            == plain.generate("hello", max_new_tokens=20, **settings).ids
        )
    stored = json.loads((tmp_path / "fastea" / "timings.json").read_text())
    assert len(stored) == 2
    for one in stored.values():
        assert one["plain"] > 0 and [n for n, _ in one["verify"]] == [4, 8, 16, 32, 64] and one["grown_level"] >= 0
    monkeypatch.setattr(Planner, "measure", lambda *_: pytest.fail("measured again"))
    again = load(folder, tree="auto", dtype="float32")
    again.generate("hello", max_new_tokens=4)
    assert again.planner.plans[1, True].costs == model.planner.plans[1, True].costs


@pytest.mark.parametrize(("scale", "kept"), [(1e-9, True), (1e3, False)])
def test_timings_that_a_run_proves_too_long_are_forgotten(scale, kept, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = Costs(scale, [(4, scale), (64, scale)], 0.0, 0.0, scale, scale)
    monkeypatch.setattr(Planner, "measure", lambda *_: found)
    model = load(folder, tree="auto", dtype="float32")
    model.generate("hello", max_new_tokens=4, ignore_eos=True)  # too short to say anything
    (key,) = json.loads((tmp_path / "fastea" / "timings.json").read_text())
    assert remembered(key) == found
    model.generate("hello", max_new_tokens=100, ignore_eos=True)
    assert remembered(key) == (found if kept else None)
    before = (tmp_path / "fastea" / "timings.json").stat().st_mtime_ns
    model.generate("hello", max_new_tokens=100, ignore_eos=True)  # forgotten once, the file is left alone
    assert (tmp_path / "fastea" / "timings.json").stat().st_mtime_ns == before


def test_the_flags(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Planner, "costs", lambda *_: costs(slope=0.5))
    command = ["--checkpoint", folder, "--prompt", "hi", "--max-new-tokens", 6]
    code, out, err = run(capsys, *command, "--tree", "auto")
    assert (
        code == 0 and "tree auto: auto:" in err and "speed are expected" in err and "tree auto:" in err.splitlines()[-1]
    )
    code, out, _ = run(capsys, *command, "--tree", "auto", "--explain-tree")
    assert code == 0 and "└─ 0" in out and "depth  1" in out and "ms of a round" in out
    code, _, err = run(capsys, *command, "--explain-tree")  # this head's card says nothing: a fixed tree
    assert code == 2 and "was not chosen by measurement" in err and len(err.splitlines()) == 1
    code, out, _ = run(capsys, *command, "--tree", "auto", "--drafter", "ngram", "--json")
    assert code == 0 and json.loads(out)["tree"] == "chain:8"


def test_a_card_with_acceptance_makes_auto_the_default(folder, tmp_path):
    from conftest import VOCAB, tiny_head, tiny_target
    from fastea.head_files import save_head

    save_head(
        tiny_head(tiny_target(0, VOCAB)), tmp_path / "head", {"acceptance": {"greedy": {"by_depth_and_rank": TABLE}}}
    )
    assert load(folder, head=tmp_path / "head").info["tree"] == "auto"
    assert load(folder, head=tmp_path / "head", tree="chain:2").info["tree"] == "chain:2"
    assert load(folder).info["tree"] != "auto"


@pytest.mark.parametrize("spec", [DynamicTree(4, 8, 8), DynamicTree(2, 8, 7)])
def test_a_tree_of_fewer_nodes_than_levels(spec):
    """The places of a path that no node can take name no slot of the tree."""
    target, head = make()
    model = build(target, DynamicEagleDrafter(head, spec))
    plain = build(target, None).generate([1, 2, 3], max_new_tokens=30).ids
    assert model.generate([1, 2, 3], max_new_tokens=30).ids == plain
    card = {"dynamic": {"8,7": [0.9] + [0.0] * 62}}
    auto = build(target, None, planner=planner_of(head, card, slope=0.001, level=0.0))
    assert (
        auto.generate([1, 2, 3], max_new_tokens=60).ids
        == build(target, None).generate([1, 2, 3], max_new_tokens=60).ids
    )


def test_a_head_that_was_never_right():
    """Depths that were never reached have no rates."""
    target, head = make()
    useless = {"by_depth_and_rank": [[0.0, 0.0], [None, None], []]}
    generator = build(target, None, planner=planner_of(head, useless, slope=0.0, level=0.0))
    generator.generate([1, 2, 3], max_new_tokens=5)
    assert generator.info["tree"] == "none" and rate([[None]], 1, 0) == 0.0
    assert corrected([[0.0], [0.5]], [AcceptanceTable(chain(2))]) == [[0.0], [0.0]]


def test_a_first_call_in_the_callers_inference_mode():
    target, head = make()
    generator = build(target, None, planner=planner_of(head, slope=0.0))
    with torch.inference_mode():
        first = generator.generate([1, 2], max_new_tokens=20).ids
    assert generator.generate([1, 2], max_new_tokens=20).ids == first


@pytest.mark.parametrize("context", [6, 24])
def test_measuring_in_a_small_context(folder, tmp_path, monkeypatch, context):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = load(folder, tree="auto", dtype="float32", max_seq_len=context)
    plain = load(folder, head="none", dtype="float32", max_seq_len=context)
    assert model.generate([1, 2], max_new_tokens=40).ids == plain.generate([1, 2], max_new_tokens=40).ids


def test_a_batch_has_a_tree_of_its_own():
    """Where a row costs time, eight sequences get fewer nodes each; every answer stays as alone."""
    target, head = make()
    generator = build(target, None, planner=planner_of(head, slope=0.2, level=0.0))
    texts = ["abc", "de", "f", "gh"] * 2
    alone = [build(target, None).generate(t, max_new_tokens=12).ids for t in texts]
    assert [o.ids for o in generator.generate(texts, max_new_tokens=12)] == alone
    generator.generate("abc", max_new_tokens=12)
    one, eight = generator.planner.plans[1, True], generator.planner.plans[8, True]
    assert len(one.tree) > (len(eight.tree) if eight.tree else 1)


def test_a_compiler_that_fails_is_one_line_and_eager(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from fastea import engine, loading

    def broken(function, any_shape=False):
        def call(*_, **__):
            raise RuntimeError("the compiler is out of order")

        return call

    monkeypatch.setattr(engine, "compiled", broken)
    monkeypatch.setattr(loading, "can_compile", lambda device: True)
    plain = load(folder, head="none", dtype="float32").generate("hi", max_new_tokens=8).ids
    for tree in ("auto", "chain:2"):
        model = load(folder, tree=tree, dtype="float32", compile=True)
        assert model.generate("hi", max_new_tokens=8).ids == plain and not model.compile
        assert model.generate("ho", max_new_tokens=8, temperature=1.0, seed=1).ids
        err = capsys.readouterr().err
        assert err.count("--compile is off: compiling failed (the compiler is out of order)") == 1
