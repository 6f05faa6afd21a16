"""Filters, noise, and both acceptance rules against distributions worked out by hand or exactly."""

import math

import pytest
import torch

from conftest import byte_tokenizer, tiny_head, tiny_target
from fastea.config import FasteaError
from fastea.drafters.eagle import EagleDrafter
from fastea.generator import Generator
from fastea.kernels.noise import gumbel, uniform
from fastea.kernels.pick import nucleus_cut
from fastea.sampling import (
    ACCEPT,
    CHILDREN,
    PICK,
    RESIDUAL,
    Sampling,
    log_probs,
    noise_key,
    pick,
    walk,
    walk_by_rejection,
)
from fastea.tree import Tree, chain

KNOWN = torch.tensor([0.35, 0.25, 0.20, 0.05, 0.04, 0.04, 0.03, 0.02, 0.01, 0.01])


def support(**settings):
    return log_probs(KNOWN.log()[None], Sampling(1.0, **settings)).exp()[0]


def test_top_k_comes_before_top_p_and_is_renormalised():
    # After top-k 4 the probabilities are .4118 .2941 .2353 .0588: the first three reach .82, not the first four.
    # Without the renormalisation four would be needed (.35 + .25 + .20 = .80 < .82).
    kept = support(top_k=4, top_p=0.82)
    assert (kept > 0).tolist() == [True] * 3 + [False] * 7
    torch.testing.assert_close(kept[:3], KNOWN[:3] / 0.8)
    assert (support(top_p=0.82) > 0).sum() == 4


@pytest.mark.parametrize(
    ("settings", "count"),
    [({"top_k": 0}, 10), ({"top_k": 99}, 10), ({"top_p": 1.0}, 10), ({"top_p": 1e-9}, 1), ({"top_k": 1}, 1)],
)
def test_filters_at_their_ends(settings, count):
    kept = support(**settings)
    assert (kept > 0).sum() == count and abs(kept.sum() - 1) < 1e-6


@pytest.mark.parametrize(
    "bad", [{"top_p": 0.0}, {"top_p": -0.1}, {"top_p": 1.5}, {"top_p": math.nan}, {"top_k": -1}, {"seed": -1}]
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(FasteaError, match=next(iter(bad))):
        Sampling(1.0, **bad)


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -0.5])
def test_impossible_temperatures_are_refused(temperature):
    with pytest.raises(FasteaError, match="temperature"):
        Sampling(temperature)


def test_nucleus_cut_equals_a_full_sort():
    """Flat distributions need more ids than the prefilter holds."""
    torch.manual_seed(0)
    for spread in (0.01, 1.0, 5.0):
        scores = torch.log_softmax(torch.randn(3, 5000) * spread, dim=-1)
        cut = nucleus_cut(scores, 0.9)
        ordered = scores.double().sort(dim=-1, descending=True).values
        for row in range(3):
            count = int((ordered[row].exp().cumsum(0) < 0.9).sum()) + 1
            assert abs(int((scores[row] >= cut[row]).sum()) - count) <= 1  # the last id may turn on rounding


def test_small_temperature_is_greedy_and_finite():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 30
    key = noise_key(torch.tensor(3), torch.zeros(1, dtype=torch.int64), torch.arange(4)[None], PICK)[0]
    assert torch.equal(pick(logits, key, Sampling(1e-4)), logits.argmax(-1))
    assert torch.equal(pick(logits, key, Sampling(0.0)), logits.argmax(-1))
    for temperature in (1e-30, 1e-44):
        assert log_probs(logits, Sampling(temperature)).isnan().sum() == 0
        assert torch.equal(pick(logits, key, Sampling(temperature)), logits.argmax(-1))


def test_greedy_ties_go_to_the_lowest_id():
    assert pick(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), torch.zeros(1, dtype=torch.int64), Sampling()).tolist() == [1]


def keys(seed=0, stream=0, positions=1, purpose=PICK):
    return noise_key(torch.tensor(seed), torch.tensor([stream]), torch.arange(positions)[None], purpose)[0]


def test_noise_is_uniform_also_for_rare_ids_and_never_infinite():
    ids = torch.arange(49152)
    u = uniform(keys(positions=64), ids)
    assert u.min() > 0 and u.max() < 1
    for part in (u, u[:, -16:], u[:, :16]):
        counts = torch.histc(part, 16, 0, 1)
        expected = part.numel() / 16
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert chi2 < 45  # 15 degrees of freedom: 37.7 is the 0.1 % point
    g = gumbel(keys(positions=64), ids)
    assert g.isfinite().all()
    assert abs(g.mean() - 0.5772) < 0.01 and abs(g.var() - math.pi**2 / 6) < 0.02


def test_noise_of_neighbours_is_independent():
    """Neighbouring seeds, streams, positions and purposes: correlations within 5 standard errors, no shared values."""
    ids = torch.arange(20000)
    base = uniform(keys(), ids)[0]
    others = [keys(seed=1), keys(stream=1), keys(positions=2)[1:], keys(seed=2**40)]
    others += [keys(purpose=p) for p in (CHILDREN, ACCEPT, RESIDUAL)]
    for key in others:
        other = uniform(key, ids)[0]
        for shift in (0, 1, 2):
            correlation = torch.corrcoef(torch.stack((base, other.roll(shift))))[0, 1]
            assert abs(correlation) < 5 / math.sqrt(20000)
        assert (base == other).sum() < 5


def test_pick_follows_the_distribution():
    """0.51 / 0.49: both come, as often as they should."""
    logits = torch.tensor([0.51, 0.49]).log().expand(20000, 2)
    share = pick(logits, keys(positions=20000), Sampling(1.0)).float().mean()
    assert abs(share - 0.49) < 5 * 0.5 / math.sqrt(20000)


def test_walk_never_sometimes_always():
    """Hand-made logits: the tree 0 -> (1, 2), 1 -> 3 with tokens 7 -> (4, 5), 4 -> 6."""
    tree = Tree([(0,), (1,), (0, 0)], "t")
    tokens = torch.tensor([[7, 4, 5, 6]] * 3)
    wants = [[4, 6, 9, 8], [5, 6, 9, 8], [3, 6, 9, 8]]  # what the target picks at the slots 0, 1, 2, 3
    logits = torch.zeros(3, 4, 10)
    for b, row in enumerate(wants):
        for slot, token in enumerate(row):
            logits[b, slot, token] = 1.0
    path, count, emitted = walk(tokens, logits, torch.zeros(3, 3, dtype=torch.int64), tree.nodes(3).parent, Sampling())
    assert count.tolist() == [3, 2, 1]
    assert [e[:c] for e, c in zip(emitted.tolist(), count.tolist(), strict=True)] == [[4, 6, 8], [5, 9], [3]]
    assert path.tolist() == [[0, 1, 3], [0, 2, 2], [0, 1, 2]]


V = 8


def exact_pair(target, temperature, top_k=0):
    """P(first, second) of the target after the prompt [1, 2, 3] in fp64, [V, V]."""
    double = target.double()

    def distribution(ids):
        cache = double.new_cache(1, 8)
        out = double(torch.tensor([ids]), torch.arange(len(ids))[None], torch.zeros(1, dtype=torch.int64), None, cache)
        p = torch.softmax(double.lm_head(out[0, -1]) / temperature, -1)
        if top_k:
            p = p * (p >= p.topk(top_k).values[-1])
        return p / p.sum()

    first = distribution([1, 2, 3])
    joint = torch.stack([first[a] * distribution([1, 2, 3, a]) for a in range(V)])
    target.float()
    return joint


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_both_rules_have_the_targets_distribution(temperature, rejection):
    """4000 rounds on one state: the two tokens after a root, over every path that acceptance can take (no child,
    reject then accept, leaf at and below the deepest level)."""
    torch.manual_seed(0)
    n, tree = 4000, Tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)], "t")
    target = torch.softmax(torch.randn(V) * 1.5, -1), torch.softmax(torch.randn(V, V) * 1.5, -1)
    draft = torch.softmax(torch.randn(V) * 1.5, -1), torch.softmax(torch.randn(V, V) * 1.5, -1)
    sampling = Sampling(temperature)
    p0, p1, p2 = target[0], target[1], target[1].roll(1, 0)
    seed, stream = torch.tensor(11), torch.arange(n)
    at, parent = torch.arange(3)[None].expand(n, -1), tree.nodes(n).parent

    def without_replacement(q, rows):
        noise = -torch.log(-torch.log(torch.rand(q.shape)))
        return (q.log() + noise).topk(rows, dim=-1).indices

    tokens = torch.zeros(n, len(tree), dtype=torch.int64)
    q0, q1 = draft[0].expand(n, -1), draft[1]
    tokens[:, 1:4] = without_replacement(q0, 3)
    tokens[:, 4:6] = without_replacement(q1[tokens[:, 1]], 2)
    tokens[:, 6] = without_replacement(q1[tokens[:, 2]], 1)[:, 0]
    logits = torch.zeros(n, len(tree), V)
    logits[:, 0] = p0.log()
    logits[:, 1:4] = p1[tokens[:, 1:4]].log()
    logits[:, 4:] = p2[tokens[:, 4:]].log()
    if rejection:
        q = torch.zeros(n, len(tree), V)
        q[:, 0], q[:, 1], q[:, 2] = q0, q1[tokens[:, 1]], q1[tokens[:, 2]]
        _, count, emitted = walk_by_rejection(tokens, logits, q, parent, tree.width, sampling, seed, stream, at)
    else:
        _, count, emitted = walk(tokens, logits, noise_key(seed, stream, at, PICK), parent, sampling)

    def warm(p):
        return torch.softmax(p.log() / temperature, -1)

    def variation(counts, exact):
        return float((counts / counts.sum() - exact).abs().sum() / 2)

    first = torch.bincount(emitted[:, 0], minlength=V).float()
    assert variation(first, warm(p0)) < 0.05  # sampling noise: about 0.017
    assert {1, 2, 3} == set(count.tolist())
    for a in range(V):  # the second token, wherever it was decided in this round, given the first
        chosen = (emitted[:, 0] == a) & (count >= 2)
        if chosen.sum() > 300:
            second = torch.bincount(emitted[chosen, 1], minlength=V).float()
            assert variation(second, warm(p1[a])) < 0.5 * math.sqrt(V / float(chosen.sum()))
    deep = count == 3
    third = torch.bincount(emitted[deep, 2], minlength=V).float()
    mixture = torch.stack([warm(p2[b]) for b in emitted[deep, 1].tolist()]).mean(0)
    assert variation(third, mixture) < 0.5 * math.sqrt(V / float(deep.sum()))


def test_point_mass_rejection_equals_the_targets_distribution():
    """Children chosen with certainty (no q): accept with p(x), else remove x and renormalise."""
    n, p = 8000, torch.tensor([0.51, 0.29, 0.15, 0.05])
    tree = Tree([(0,), (1,)], "t")
    tokens = torch.tensor([[0, 0, 1]]).expand(n, -1)
    logits = p.log().expand(n, 3, 4)
    at, parent = torch.arange(2)[None].expand(n, -1), tree.nodes(n).parent
    _, count, emitted = walk_by_rejection(
        tokens, logits, None, parent, 2, Sampling(1.0), torch.tensor(5), torch.arange(n), at
    )
    share = torch.bincount(emitted[:, 0], minlength=4) / n
    assert float((share - p).abs().sum() / 2) < 0.02
    assert abs(float((count == 2).float().mean()) - 0.8) < 0.03


@pytest.mark.parametrize("rejection", [False, True])
def test_generated_pairs_have_the_models_distribution(rejection):
    """End to end through head, tree and caches: 2,000 seeded runs of two tokens against the exact joint of 64 cells,
    with a filter on."""
    target = tiny_target(0, V)
    target.lm_head.weight.data *= 0.1
    target.set_context(32)
    head = tiny_head(target)
    head.bind(target, 32)
    tree = Tree([(0,), (1,), (2,), (0, 0), (1, 0)], "t")
    joint = exact_pair(target, 0.9, top_k=5)
    generator = Generator(
        target, byte_tokenizer(V), EagleDrafter(head, tree, rejection), max_seq_len=32, rejection=rejection
    )
    counts, n = torch.zeros(V, V), 2000
    for lo in range(0, n, 100):
        outputs = generator.generate(
            ['"#$'] * 100, raw=True, max_new_tokens=3, temperature=0.9, top_k=5, seed=1, streams=range(lo, lo + 100)
        )
        for output in outputs:
            counts[output.ids[0], output.ids[1]] += 1
    assert float((counts / n - joint).abs().sum() / 2) < 0.11  # sampling noise of 25 cells at 2000: about 0.045
    assert (counts[joint == 0] == 0).all()


def test_every_position_keeps_its_filter():
    """top_k 2 and top_p together: each token of a speculative run is in the support that full forwards give."""
    target = tiny_target(3, 64)
    target.set_context(128)
    head = tiny_head(target)
    head.bind(target, 128)
    generator = Generator(target, byte_tokenizer(64), EagleDrafter(head, chain(3)), max_seq_len=128)
    ids = [5, 6, 7]
    for settings in ({"temperature": 0.1, "top_p": 0.9}, {"temperature": 4.0, "top_k": 2, "top_p": 0.9}):
        output = generator.generate(ids, max_new_tokens=40, seed=2, **settings)
        whole = torch.tensor([ids + output.ids])
        cache = target.new_cache(1, 64)
        out = target(whole, torch.arange(whole.shape[1])[None], torch.zeros(1, dtype=torch.int64), None, cache)
        allowed = log_probs(target.logits(out[0]), Sampling(seed=0, **settings)).isfinite()
        assert all(allowed[len(ids) - 1 + i, token] for i, token in enumerate(output.ids))
