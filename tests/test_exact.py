"""Speculation never changes the text: ids equal plain decoding's, whatever drafts, trees, prompts and seeds."""

import random

import pytest
import torch

from conftest import byte_tokenizer, random_paths, reference_greedy, tiny_head, tiny_target
from fastea.drafters.eagle import EagleDrafter
from fastea.drafters.ngram import NgramDrafter
from fastea.generator import Generator
from fastea.kernels.rows import find_row_sizes
from fastea.linear import probes
from fastea.tree import Tree, chain

SMALL = 7  # vocabulary of the wide fixture: 1 + 7 + 49 nodes hold every two-token continuation


def wide_tree() -> Tree:
    pairs = [(a, b) for a in range(SMALL) for b in range(SMALL)]
    return Tree([(a,) for a in range(SMALL)] + pairs, "wide")


def make(vocab=64, seed=0, context=256):
    """(target, head) with random weights that share a context."""
    target = tiny_target(seed, vocab)
    target.set_context(context)
    head = tiny_head(target, seed + 100)
    head.bind(target, context)
    return target, head


def build(target, drafter, sizes=None, context=256, **more):
    return Generator(
        target, byte_tokenizer(target.config.vocab_size), drafter, max_seq_len=context, row_sizes=sizes, **more
    )


def exact_sizes(target):
    return find_row_sizes(probes(target))


@pytest.mark.parametrize("path", ["fast", "exact", "row by row"])
def test_wide_tree_accepts_two_every_round(path):
    """Random head, every continuation in the tree: each round must accept exactly two, and say 3.0 tokens a round."""
    target, head = make(SMALL)
    sizes = {"fast": None, "exact": exact_sizes(target), "row by row": (1,)}[path]
    output = build(target, EagleDrafter(head, wide_tree()), sizes).generate([1, 2, 3], max_new_tokens=61)
    assert output.ids == reference_greedy(target, [1, 2, 3], 61)
    assert output.accepted == [2] * 20 and output.rounds == 20 and output.tokens_per_round == 3.0


def test_wide_tree_with_a_perfect_chain_of_every_depth():
    """A drafter that knows the text: a chain of K accepts K each round, for every K."""
    target, _ = make()
    text = reference_greedy(target, [5, 6], 80)

    class Oracle:
        name, module = "oracle", None

        def __init__(self, depth):
            self.tree = chain(depth)

        def new_cache(self, batch, max_seq_len, device=None):
            return None

        def prefill(self, *_):
            pass

        def propose(self, state):
            from fastea.drafters import Draft

            at = int(state.length) - 2
            return Draft(torch.tensor([text[at : at + len(self.tree)]]))

    for depth in range(1, 17):
        output = build(target, Oracle(depth)).generate([5, 6], max_new_tokens=1 + 2 * (depth + 1))
        assert output.accepted == [depth, depth] and output.ids == text[: len(output.ids)]


def test_many_prompts_trees_and_temperatures():
    """50 prompts of 1 to 40 ids, 64 new tokens, against full forwards in fp64 (greedy) or plain decoding (sampled)."""
    rng = random.Random(0)
    for trial in range(50):
        target, head = make(seed=trial % 5)
        prompt = [rng.randrange(64) for _ in range(rng.randint(1, 40))]
        tree = rng.choice([chain(rng.randint(1, 6)), Tree(random_paths(trial), "random")])
        sizes = exact_sizes(target)
        generator = build(target, EagleDrafter(head, tree), sizes)
        plain = build(target, None, sizes)
        if trial < 8:
            assert plain.generate(prompt, max_new_tokens=64).ids == reference_greedy(target, prompt, 64)
        assert generator.generate(prompt, max_new_tokens=64).ids == plain.generate(prompt, max_new_tokens=64).ids
        settings = {"temperature": rng.choice([0.5, 1.0, 1.5]), "seed": trial, "max_new_tokens": 24}
        settings["top_p"] = rng.choice([1.0, 0.8])
        settings["top_k"] = rng.choice([0, 5])
        assert generator.generate(prompt, **settings).ids == plain.generate(prompt, **settings).ids


def test_five_hundred_draws_of_tree_prompt_and_seed():
    """Short runs on the wide-open fixture, where acceptance is frequent; exact path, greedy and sampled."""
    rng = random.Random(1)
    target, head = make(SMALL)
    sizes = exact_sizes(target)
    plain, accepted = build(target, None, sizes), 0
    for trial in range(500):
        tree = Tree(random_paths(trial, nodes=12), "random")
        prompt = [rng.randrange(SMALL) for _ in range(rng.randint(1, 12))]
        settings = {"max_new_tokens": 8, "temperature": rng.choice([0.0, 0.7, 1.3]), "seed": trial}
        output = build(target, EagleDrafter(head, tree), sizes).generate(prompt, **settings)
        assert output.ids == plain.generate(prompt, **settings).ids, (trial, tree.paths, prompt, settings)
        accepted += sum(output.accepted)
    assert accepted > 500


def test_drafting_by_noise_or_by_rank_gives_one_text():
    target, head = make(SMALL)
    texts = set()
    for by_noise in (True, False):
        drafter = EagleDrafter(head, Tree([(0,), (1,), (0, 0)], "t"), by_noise=by_noise)
        output = build(target, drafter).generate([1, 2], max_new_tokens=40, temperature=1.0, seed=4)
        texts.add(tuple(output.ids))
    assert len(texts) == 1


def test_bfloat16_is_exact_on_the_exact_path():
    target, head = make(SMALL)
    target, head = target.bfloat16(), head.bfloat16()
    target.set_context(256)
    head.bind(target, 256)
    sizes = exact_sizes(target)
    speculative = build(target, EagleDrafter(head, wide_tree()), sizes)
    for settings in ({}, {"temperature": 1.0, "seed": 3}):
        plain = build(target, None, sizes).generate([1, 2, 3], max_new_tokens=64, **settings)
        assert speculative.generate([1, 2, 3], max_new_tokens=64, **settings).ids == plain.ids


def test_batch_rows_equal_their_single_runs():
    """Case 31: different lengths, different ends, each with its own count of accepted tokens."""
    target, head = make(SMALL)
    sizes = exact_sizes(target)
    generator = build(target, EagleDrafter(head, Tree([(0,), (1,), (0, 0)], "t")), sizes)
    prompts = ['"', "#$%&'", '$%#"' * 20]
    for settings in ({}, {"temperature": 1.0, "seed": 9}):
        together = generator.generate(prompts, max_new_tokens=30, **settings)
        for i, prompt in enumerate(prompts):
            assert together[i].ids == generator.generate(prompt, max_new_tokens=30, streams=[i], **settings).ids
    sampled = generator.generate([prompts[0]] * 3, max_new_tokens=30, temperature=1.0, seed=9)
    assert len({tuple(o.ids) for o in sampled}) == 3  # one prompt, three streams


def test_end_of_context():
    """The last rounds' trees reach past the limit: the text still ends exactly there, as plain decoding's."""
    for context in (40, 41, 42, 43):
        target, head = make(SMALL, context=context)
        generator = build(target, EagleDrafter(head, wide_tree()), context=context)
        output = generator.generate([1, 2, 3], max_new_tokens=1000)
        assert output.finish_reason == "length" and len(output.ids) == context - 3
        assert output.ids == reference_greedy(target, [1, 2, 3], context - 3)


@pytest.mark.parametrize("j", range(0, 21))
def test_end_id_inside_a_block(j):
    """Any generated id taken as the end mark stops the speculative text where it stops the plain one."""
    target, head = make(SMALL)
    text = reference_greedy(target, [1, 2, 3], 40)
    end = text[j]
    generator = Generator(target, byte_tokenizer(SMALL, (end,)), EagleDrafter(head, wide_tree()), max_seq_len=128)
    run = generator.stream([1, 2, 3], max_new_tokens=40)
    pieces = "".join(run)
    output = run.outputs[0]
    first = text.index(end)
    assert output.ids == text[: first + 1] and output.finish_reason == "stop" and output.new_tokens == first + 1
    assert pieces == output.text == byte_tokenizer(SMALL).decode(text[:first])
    assert generator.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True).ids == text


def test_ngram_on_a_text_that_repeats():
    """A cyclic continuation is copied whole: nearly K + 1 tokens a round, and never another text."""
    target, _ = make()
    plain = build(target, None)
    generator = build(target, NgramDrafter(chain(8)))
    rates = []
    for seed in range(6):
        prompt = random.Random(seed).choices(range(64), k=6) * 5
        output = generator.generate(prompt, max_new_tokens=100)
        assert output.ids == plain.generate(prompt, max_new_tokens=100).ids
        rates.append(output.tokens_per_round)
    looping = [6, 7, 8] * 10
    state = generator.state(1)
    state.history[0, : len(looping)] = torch.tensor(looping)
    state.length[0], state.root[0] = len(looping) - 1, looping[-1]
    assert generator.drafter.propose(state).tokens.tolist() == [[8, 6, 7, 8, 6, 7, 8, 6, 7]]
    assert min(rates) >= 1.0


def test_ngram_prefers_the_longest_then_the_latest_match():
    target, _ = make()
    generator = build(target, NgramDrafter(chain(2)))
    state = generator.state(1)

    def propose(history):
        state.history.fill_(-1)
        state.history[0, : len(history)] = torch.tensor(history)
        state.length[0], state.root[0] = len(history) - 1, history[-1]
        return generator.drafter.propose(state).tokens[0].tolist()[1:]

    assert propose([1, 2, 3, 40, 41, 9, 3, 50, 51, 2, 3]) == [40, 41]  # two tokens beat a later single one
    assert propose([3, 40, 41, 9, 3, 50, 51, 3]) == [50, 51]  # equal runs: the later one
    assert propose([1, 2, 3, 4]) == [4, 4]  # none: the root
    assert propose([5]) == [5, 5]


def test_padded_vocabulary_is_never_sampled():
    """Ids past the tokenizer's 50 pieces do not come out, plain, drafted or verified, even at T = 2."""
    target, head = make()
    for drafter in (None, EagleDrafter(head, chain(3))):
        generator = Generator(target, byte_tokenizer(50), drafter, max_seq_len=256)
        for settings in ({}, {"temperature": 2.0, "seed": 0}):
            assert max(generator.generate([1, 2], max_new_tokens=100, **settings).ids) < 50


def test_context_edges():
    """Prompts of limit - 1, limit and limit + 1 tokens; one token; none."""
    from fastea.config import FasteaError

    target, head = make(context=32)
    generator = build(target, EagleDrafter(head, chain(3)), context=32)
    one = generator.generate([1] * 31, max_new_tokens=100)
    assert len(one.ids) == 1 and one.finish_reason == "length"
    for size in (32, 33):
        with pytest.raises(FasteaError, match=f"{size} tokens, the context 32"):
            generator.generate([1] * size)
    assert len(generator.generate([1], max_new_tokens=10).ids) == 10
    with pytest.raises(FasteaError, match="empty"):
        generator.generate([])
    with pytest.raises(FasteaError, match="max_new_tokens"):
        generator.generate([1], max_new_tokens=0)
    with pytest.raises(FasteaError, match="id 64"):
        generator.generate([64])


def test_not_a_number_stops_with_advice():
    from fastea.config import FasteaError

    target, head = make()
    generator = build(target, EagleDrafter(head, chain(2)))
    target.layers[1].down.weight.data[0, 0] = float("nan")
    with pytest.raises(FasteaError, match="bfloat16 or float32"):
        generator.generate([1, 2, 3])
