"""The choice of tokens in Triton's interpreter, and its plain definition: against its rules worked out another way, and
each comparison against a fault put in."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given
from hypothesis import strategies as st

from fastea.kernels import choose as choose_module
from fastea.kernels import pick
from fastea.kernels.choose import _gumbel, choose, choose_reference
from fastea.kernels.launch import launch
from fastea.kernels.noise import GOLDEN, MIX1, MIX2, gumbel, uniform
from interpreted import both, few, normal, same_bits

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # of numpy, in the interpreter


@triton.jit
def _noise_kernel(keys, ids, out, GOLDEN: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, _gumbel(tl.load(keys + at), tl.load(ids + at), GOLDEN, MIX1, MIX2))


def kernel_noise(keys, ids, golden=GOLDEN):
    out = torch.empty(len(keys))
    launch(_noise_kernel, (1,), keys, ids, out, GOLDEN=golden, MIX1=MIX1, MIX2=MIX2, COUNT=len(keys))
    return out


def signed(value):
    return (value + 2**63) % 2**64 - 2**63


def key_for(bits, number):
    """The key whose noise for this id is made of these 32 bits: the mixing undone."""
    z = bits << 32
    for shift, factor in ((31, MIX2), (27, MIX1), (30, 1)):
        y = z
        for _ in range(64 // shift):
            y = z ^ y >> shift
        z = y * pow(factor, -1, 2**64) % 2**64
    return signed(z - (number + 1) * GOLDEN)


EXTREME = [0, 1, 2, 3, 255, 2**16, 2**31, 2**31 - 1, 2**32 - 1, 2**32 - 2, 2**32 - 128, 2**32 - 129, 2**32 - 4096]


def noise_close(noise, keys, ids):
    expected = torch.stack([gumbel(key, number[None])[0] for key, number in zip(keys, ids, strict=True)])
    return bool(((noise - expected).abs() <= 1e-6 * expected.abs().clamp(min=1)).all())


def test_noise():
    """Also from uniforms at both ends, and those whose noise is about 0."""
    ids, keys = torch.arange(4096) * 31, some_keys(0, 4096)
    assert noise_close(kernel_noise(keys, ids), keys, ids)
    assert not noise_close(kernel_noise(keys, ids, GOLDEN + 2), keys, ids)
    bits = EXTREME + [int(2**32 * (1 - np.exp(-1))) + i for i in (-1, 0, 1)]
    ids = torch.arange(len(bits)) * 1000
    keys = torch.tensor([key_for(b, number) for b, number in zip(bits, ids.tolist(), strict=True)])
    values = [float(uniform(key, number[None])) for key, number in zip(keys, ids, strict=True)]
    expected = [min((b + 0.5) / 2**32, 1 - 2.0**-24) for b in bits]
    assert values == pytest.approx(expected, rel=1e-7) and min(values) == 2.0**-33 and max(values) == 1 - 2.0**-24
    noise = kernel_noise(keys, ids)
    assert noise_close(noise, keys, ids) and noise.isfinite().all()
    plain = -torch.log(-torch.log(1 - torch.tensor(values)))
    assert not noise_close(plain, keys, ids)  # without log1p


def kept_by_rule(logits, temperature, top_k, top_p):
    """Temperature, top-k with ties, renormalise, top-p with ties: the probabilities that are left of one row [V], fp64,
    0 = cut; and how far from top_p the nearest sum is that decides."""
    scores = logits.double().numpy() / temperature
    mass = np.exp(scores - scores.max())
    if 0 < top_k < len(mass):
        mass[scores < np.sort(scores)[-top_k]] = 0
    mass /= mass.sum()
    margin = 1.0
    if top_p < 1:
        levels = np.unique(scores[mass > 0])[::-1]  # equal scores stay or go together
        sums = np.cumsum([mass[scores == level].sum() for level in levels])
        margin = np.abs(sums - top_p).min()
        mass[scores < levels[np.argmax(sums >= top_p)]] = 0
    return mass / mass.sum(), margin


def kept_by_kernel(logits, *filters):
    """What one row may become, read from the one place where it is written."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_module, "launch", lambda kernel, *rest, **more: (
            launch(kernel, *rest, **more), found.append(rest[2]) if kernel is choose_module._cut_kernel else None
        ))  # fmt: skip
        choose(logits, torch.zeros(1, dtype=torch.int64), *filters)
    order = int(found[0][0]) - 2**31
    least = np.array(order if order >= 0 else order ^ 0x7FFFFFFF, dtype=np.int32).view(np.float32)
    return logits[0] >= float(least)


def kept_by_reference(logits, *filters):
    return pick.log_probs(logits, *filters)[0] != -torch.inf


def some_logits(seed, vocab, steps=None):
    logits = normal(seed, 1, vocab) * 3
    return logits if steps is None else (logits * steps).round() / steps


FILTERS = [(1, 1.0), (7, 1.0), (0, 0.9), (0, 1e-9), (50, 0.8), (3, 0.999), (0, 0.99)]


@both(kept_by_kernel, kept_by_reference)
@pytest.mark.parametrize("vocab, steps", [(5, None), (300, 2), (4096, None), (4097, 1), (5000, 4)])
@pytest.mark.parametrize("top_k, top_p", FILTERS)
def test_what_filters_keep(run, vocab, steps, top_k, top_p):
    logits, filters = some_logits(vocab, vocab, steps), (0.7, top_k, top_p)
    mass, margin = kept_by_rule(logits[0], *filters)
    assert margin > 1e-6
    if 0 < top_k < vocab or top_p < 1:
        assert run(logits, *filters).tolist() == (mass > 0).tolist()


@both(kept_by_kernel, kept_by_reference)
@few(max_examples=10)
@given(st.integers(0, 2**32), st.integers(2, 300), st.sampled_from([1, 4]), st.sampled_from([0.3, 1.0, 2.5]),
       st.integers(0, 40), st.floats(0.01, 0.99))  # fmt: skip
def test_what_any_filters_keep(run, seed, vocab, steps, temperature, top_k, top_p):
    logits = some_logits(seed, vocab, steps)
    mass, margin = kept_by_rule(logits[0], temperature, top_k, top_p)
    assume(margin > 1e-5)
    assert run(logits, temperature, top_k, top_p).tolist() == (mass > 0).tolist()


def possible(run, logits, *filters):
    """The ids that can be chosen: each gets the greatest noise there is from a key of its own."""
    vocab = len(logits)
    keys = torch.tensor([key_for(0, number) for number in range(vocab)])
    chosen = run(logits.expand(vocab, -1).contiguous(), keys, *filters, vocab)[0]
    return torch.where(chosen == torch.arange(vocab))[0].tolist()


@both(choose, choose_reference)
def test_ties_are_kept_together(run):
    zeros = torch.tensor([1.0, -0.0, 0.0, -1.0, -0.0, -torch.inf])
    assert possible(run, zeros, 1.0, 2, 1.0) == [0, 1, 2, 4]  # zeros of both signs
    assert possible(run, zeros, 1.0, 5, 1.0) == [0, 1, 2, 3, 4]
    assert possible(run, torch.ones(6), 1.0, 2, 0.1) == list(range(6))
    known = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1]).log()
    assert possible(run, known, 1.0, 0, 0.5) == possible(run, known, 1.0, 0, 0.45) == [0, 1, 2]
    assert possible(run, known, 1.0, 3, 0.45) == [0]  # 0.4 of 0.8 is over 0.45


@both(choose, choose_reference)
def test_greedy_choice(run):
    logits = normal(0, 6, 9000)
    logits[0, [4095, 4096, 8192]] = 9.0
    logits[1, [8191, 8192, 8999]] = 9.0
    logits[2] = -5.0
    logits[3, 8999], logits[4, 0] = 9.0, 9.0
    logits[5, [100, 8000]] = torch.inf
    ids, broken = run(logits, None, 0.0, 0, 1.0, 9000)
    assert ids.dtype == torch.int64 and broken.dtype == torch.bool and not broken.any()
    assert ids.tolist() == [4095, 8191, 0, 8999, 0, 100]


@both(choose, choose_reference)
@pytest.mark.parametrize("sampled", [False, True])
def test_padding_is_never_chosen_and_nan_is_told(run, sampled):
    logits = normal(1, 5, 4200)
    logits[:, 4100:] = 99.0
    logits[0, 4150], logits[1, 4099], logits[2, 7], logits[3, 4098] = torch.nan, torch.nan, torch.nan, 50.0
    logits[2, :4100] = torch.nan
    ids, broken = run(logits, torch.arange(5) if sampled else None, 0.5, 0, 1.0, 4100)
    assert broken.tolist() == [False, True, True, False, False]
    assert ids.max() < 4100 and ids[3] == 4098
    if not sampled:
        assert ids.tolist() == logits[:, :4100].nan_to_num(-torch.inf).argmax(1).tolist()


def drawn(run, logits, keys, *filters):
    """How many rows were decided clearly, and whether each of them took the best of log p + noise, in fp64."""
    clear, right = 0, True
    ids = torch.arange(logits.shape[1])
    for row, chosen in enumerate(run(logits, keys, *filters, logits.shape[1])[0].tolist()):
        score = np.log(kept_by_rule(logits[row], *filters)[0]) + gumbel(keys[row], ids).double().numpy()
        second, best = np.sort(score)[-2:]
        if best - second > 1e-4:
            clear, right = clear + 1, right and chosen == score.argmax()
    return clear, right


def some_keys(seed, count):
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


@both(choose, choose_reference)
@pytest.mark.parametrize("vocab", [50, 8200])
@pytest.mark.parametrize("filters", [(0.7, 0, 1.0), (1.5, 40, 1.0), (1.0, 0, 0.9), (3.0, 300, 0.95)])
def test_sampled_choice(run, vocab, filters):
    assert drawn(run, normal(2, 6, vocab), some_keys(3, 6), *filters) == (6, True)


@both(choose, choose_reference)
@pytest.mark.parametrize("temperature", [1e-44, 1e-30, 1e-6, 1e-2, 1e4])
def test_noise_decides_among_large_equal_scores(run, temperature):
    """Scores of up to 1e45 leave neither noise nor order to fp32, if they are not taken from the largest."""
    logits = torch.full((16, 4200), 20.0)
    logits[:, ::2] = 19.0
    logits[:8] *= -1
    assert drawn(run, logits, some_keys(4, 16), temperature, 0, 1.0) == (16, True)


def test_a_row_is_chosen_alone_as_among_others():
    """Rows need not follow one another in memory."""
    logits, keys = some_logits(5, 3 * 4300).view(3, 4300)[:, :4200], some_keys(5, 3)
    for options in ((None,), (keys, 0.8), (keys, 0.8, 50), (keys, 0.8, 50, 0.9)):
        together = written(logits, *options)
        for row in range(3):
            one = slice(row, row + 1)
            alone = written(logits[one].contiguous(), *(o[one] if torch.is_tensor(o) else o for o in options))
            assert all(same_bits(a[one], b) for a, b in zip(together, alone, strict=True))


def written(*args):
    """The choice, and with noise all that the kernels leave behind, in the order of their arguments."""
    found = []
    with pytest.MonkeyPatch.context() as patch:

        def spy(kernel, grid, *args, **constants):
            found.extend(a for a in args if torch.is_tensor(a) and a is not args[0])
            launch(kernel, grid, *args, **constants)

        patch.setattr(choose_module, "launch", spy)
        chosen = choose(*args)
    return [*chosen, *found] if args[1] is not None else chosen


def test_a_wrong_key_and_a_wrong_filter_are_noticed():
    logits, keys, filters = normal(2, 48, 500), some_keys(3, 48), (1.0, 40, 0.9)

    def other_key(logits, keys, *rest):
        return choose_reference(logits, keys ^ 1 << 40, *rest)

    def no_top_p(logits, keys, temperature, top_k, top_p, vocab):
        return choose_reference(logits, keys, temperature, top_k, 1.0, vocab)

    assert drawn(choose_reference, logits, keys, *filters)[1]
    assert not drawn(other_key, logits, keys, *filters)[1]
    assert not drawn(no_top_p, logits, keys, *filters)[1]


def test_a_wrong_order_of_floats_is_noticed(monkeypatch):
    """Bits compared as they are put the negative numbers in reverse."""
    logits, filters = some_logits(300, 300, 2) - 20, (0.7, 7, 0.9)
    expected = (kept_by_rule(logits[0], *filters)[0] > 0).tolist()
    assert kept_by_kernel(logits, *filters).tolist() == expected
    monkeypatch.setattr(choose_module, "_ordered", _unordered)
    assert kept_by_kernel(logits, *filters).tolist() != expected


@triton.jit
def _unordered(logits):
    return logits.to(tl.int32, bitcast=True).to(tl.int64) + 2147483648
