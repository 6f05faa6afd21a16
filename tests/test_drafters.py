"""A small model as drafter, prompt lookup in a head's tree, and drafts that are not numbers: never another text."""

import copy
import json

import pytest
import torch
from test_exact import SMALL, build, exact_sizes, make

from conftest import byte_tokenizer, dense, reference_greedy, tiny_target, write_json
from fastea.cli import main
from fastea.config import FasteaError
from fastea.drafters import Draft
from fastea.drafters.draft_model import DraftModelDrafter
from fastea.drafters.dynamic import DynamicEagleDrafter
from fastea.drafters.eagle import EagleDrafter
from fastea.drafters.hybrid import HybridDrafter
from fastea.generator import Generator
from fastea.head_files import load_head, save_head
from fastea.loading import load
from fastea.quantize.__main__ import main as quantize
from fastea.tree import DynamicTree, Tree, chain, parse_tree


def similar(target, spread=0.05):
    """A model that often says what the target says."""
    model, generator = copy.deepcopy(target), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * spread)
    return model


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 4}])
def test_a_model_that_drafts_for_itself_is_always_right(settings):
    """Greedy and sampled: with the same noise the draft picks what the target picks."""
    target, _ = make()
    sizes = exact_sizes(target)
    output = build(target, DraftModelDrafter(target, chain(4), 64), sizes).generate(
        [5, 6], max_new_tokens=41, **settings
    )
    assert output.ids == build(target, None, sizes).generate([5, 6], max_new_tokens=41, **settings).ids
    assert output.accepted == [4] * 8


def test_another_model_changes_no_text_and_its_cache_stays_true():
    """Long prompts in chunks, chains of several lengths; every proposal is the small model's own greedy continuation
    of the whole text, whatever was accepted before."""
    target, _ = make()
    small, sizes = similar(target), exact_sizes(target)
    for prompt, length in (([1, 2, 3], 1), ([i * 5 % 64 for i in range(70)], 3), ([4], 6)):
        drafter, proposals = DraftModelDrafter(small, chain(length), 64), []
        generator = build(target, drafter, sizes)
        plain = generator.round.draft

        def propose(state, plain=plain, proposals=proposals):
            draft = plain(state)
            proposals.append((state.history[0, : int(state.length) + 1].tolist(), draft.tokens[0, 1:].tolist()))
            return draft

        generator.engine.draft = propose
        output = generator.generate(prompt, max_new_tokens=40)
        assert output.ids == reference_greedy(target, prompt, 40)
        assert 0 < sum(output.accepted) < length * output.rounds
        for text, drafted in proposals[::4]:
            assert drafted == reference_greedy(small, text, length)
    for settings in ({"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "top_k": 3, "seed": 6}):
        one = build(target, DraftModelDrafter(small, chain(3), SMALL), sizes).generate(
            [1, 2], max_new_tokens=40, **settings
        )
        assert one.ids == build(target, None, sizes).generate([1, 2], max_new_tokens=40, **settings).ids


def test_a_batch_of_prompts_equals_single_runs():
    target, _ = make(SMALL)
    generator = build(target, DraftModelDrafter(similar(target), chain(3), SMALL), exact_sizes(target))
    prompts = ['!"#', "$", "%&%&%&%&"]
    together = generator.generate(prompts, raw=True, max_new_tokens=30, temperature=0.9, seed=2)
    for i, (prompt, output) in enumerate(zip(prompts, together, strict=True)):
        alone = generator.generate(prompt, raw=True, max_new_tokens=30, temperature=0.9, seed=2, streams=[i])
        assert alone.ids == output.ids


def test_rejection_with_a_model_keeps_the_distribution():
    """2,000 seeded runs: the first two tokens against the target's exact joint distribution."""
    from test_sampling import V, exact_pair

    target = tiny_target(0, V)
    target.lm_head.weight.data *= 0.1
    target.set_context(256)
    small = similar(target)
    joint, counts, n = exact_pair(target, 0.9, top_k=5), torch.zeros(V, V), 2000
    generator = build(target, DraftModelDrafter(small, chain(2), V, rejection=True), rejection=True)
    for lo in range(0, n, 100):
        for output in generator.generate(
            ['"#$'] * 100, raw=True, max_new_tokens=3, temperature=0.9, top_k=5, seed=1, streams=range(lo, lo + 100)
        ):
            counts[output.ids[0], output.ids[1]] += 1
    assert float((counts / n - joint).abs().sum() / 2) < 0.11 and (counts[joint == 0] == 0).all()


def test_padded_vocabularies_of_unlike_size():
    """A tokenizer of 50 ids, a target of 64 rows, a small model of 56: both rules, and no id past 50."""
    target, small = tiny_target(0, 64), tiny_target(1, 56)
    for model in (target, small):
        model.set_context(256)
    plain = Generator(target, byte_tokenizer(50), None, max_seq_len=256)
    for rejection in (False, True):
        drafter = DraftModelDrafter(small, chain(3), 50, rejection, columns=64)
        generator = Generator(target, byte_tokenizer(50), drafter, max_seq_len=256, rejection=rejection)
        output = generator.generate([1, 2], max_new_tokens=60, temperature=1.5, seed=1)
        assert len(output.ids) == 60 and max(output.ids) < 50
        if not rejection:
            assert output.ids == plain.generate([1, 2], max_new_tokens=60, temperature=1.5, seed=1).ids


class Fixed:
    """Proposes these tokens on this tree, whatever the text."""

    name, module = "fixed", None

    def __init__(self, tree, tokens):
        self.tree, self.tokens = tree, tokens

    def new_cache(self, batch, max_seq_len, device=None):
        return None

    def prefill(self, *_):
        pass

    def propose(self, state):
        return Draft(torch.cat((state.root[:, None], self.tokens.expand(len(state.root), -1)), 1))


def state_of(text, target):
    """A state whose text is this, the last token pending."""
    state = build(target, None).state(1)
    state.history[0, : len(text)] = torch.tensor(text)
    state.length[0], state.root[0] = len(text) - 1, text[-1]
    return state


def test_a_copied_chain_joins_the_tree_where_they_agree():
    """Tree: root - a(1) - aa(3), root - b(2). Text "1 2 3 4 5 6 7 ... 2 3": what followed is 4 5 6."""
    target, _ = make()
    tree = Tree([(0,), (1,), (0, 0)], "t")
    text = [9, 2, 3, 4, 5, 6, 7, 8, 2, 3]
    cases = (
        ([10, 11, 12], [0, 4, 5]),  # nothing agrees: a chain of its own below the root
        ([10, 4, 12], [0, 2, 5]),  # b is 4: the second copied token hangs below b
        ([4, 10, 5], [0, 1, 3]),  # a, aa are 4, 5: the third hangs below aa
        ([4, 10, 12], [0, 1, 5]),  # a is 4, aa is not 5: second below a, third below the second
    )
    for tokens, parents in cases:
        hybrid = HybridDrafter(Fixed(tree, torch.tensor([tokens])), 3)  # type: ignore[arg-type]
        assert hybrid.tree.name == "t+ngram:3" and len(hybrid.tree) == 7 and hybrid.tree.depth_max == 3
        draft = hybrid.propose(state_of(text, target))
        assert draft.tokens[0].tolist() == [3, *tokens, 4, 5, 6]
        assert draft.nodes.parent[0].tolist() == [0, 0, 0, 1, *parents]
        assert draft.nodes.depth[0].tolist() == [0, 1, 1, 2, 1, 2, 3]
        for node in range(7):
            path, at = {node}, node
            while at:
                at = int(draft.nodes.parent[0, at])
                path.add(at)
            assert int(draft.nodes.words[0, node]) == sum(1 << i for i in path)


@pytest.mark.parametrize("spec", ["eagle1", "dynamic:12,3,3", "chain:1"])
def test_copies_are_accepted_on_top_of_the_head(spec):
    """A target that repeats itself: more tokens a round than with the head alone, and the same text."""
    target, head = make(SMALL, seed=2)
    sizes, tree = exact_sizes(target), parse_tree(spec)
    inner = DynamicEagleDrafter(head, tree) if isinstance(tree, DynamicTree) else EagleDrafter(head, tree)
    alone, hybrid, plain = (
        build(target, inner, sizes),
        build(target, HybridDrafter(inner, 8), sizes),
        build(target, None, sizes),
    )
    for settings in ({}, {"temperature": 0.6, "seed": 1}):
        outputs = [g.generate([1, 2, 3, 1, 2, 3], max_new_tokens=80, **settings) for g in (plain, alone, hybrid)]
        assert outputs[0].ids == outputs[1].ids == outputs[2].ids
        if not settings:
            assert outputs[2].tokens_per_round > outputs[1].tokens_per_round + 0.3


def test_a_tree_of_64_nodes_keeps_its_last_bit():
    target, head = make(SMALL)
    sizes = exact_sizes(target)
    hybrid = HybridDrafter(DynamicEagleDrafter(head, DynamicTree(56, 6, 4)), 8)
    assert len(hybrid.tree) == 64
    plain = build(target, None, sizes).generate([1, 2, 1, 2], max_new_tokens=40).ids
    assert build(target, hybrid, sizes).generate([1, 2, 1, 2], max_new_tokens=40).ids == plain


def overflowing(target, token):
    """A target whose rows of this token are not numbers."""
    target.embed.weight.data[token] = torch.inf
    return target


@pytest.mark.parametrize("drafts", ["static", "dynamic", "model"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_branch_that_overflows_never_touches_the_text(drafts, exact):
    """Case 12: NaN in a rejected node's keys, values and logits, and in the head's scores; the rows beside it count."""
    target, head = make(SMALL, seed=2)
    wanted = reference_greedy(target, [1, 2, 3], 30)
    bad = next(i for i in range(SMALL) if i not in (1, 2, 3, *wanted))
    overflowing(target, bad)
    head.bind(target, 256)
    assert target(torch.tensor([[bad]]), torch.zeros(1, 1).long(), torch.zeros(1).long(), None,
                  target.new_cache(1, 8)).isnan().any()  # fmt: skip
    every = Tree([(a,) for a in range(SMALL)] + [(a, b) for a in range(SMALL) for b in range(SMALL)], "wide")
    drafter = {
        "static": lambda: EagleDrafter(head, every),
        "dynamic": lambda: DynamicEagleDrafter(head, DynamicTree(40, SMALL, 3)),
        "model": lambda: DraftModelDrafter(overflowing(similar(target), bad), chain(3), SMALL),
    }[drafts]()
    output = build(target, drafter, exact_sizes(target) if exact else None).generate([1, 2, 3], max_new_tokens=30)
    assert output.ids == wanted
    if drafts == "static":
        assert set(output.accepted[:-1]) == {2}  # every continuation was in the tree, the bad one in every round


@pytest.mark.parametrize("exact", [False, True])
def test_a_chain_that_overflows_never_touches_the_text(exact):
    """Case 12: rows of a chain are causal; what a later row holds must not reach the ones before it."""
    target, _ = make(SMALL, seed=2)
    wanted = reference_greedy(target, [1, 2, 3], 20)
    bad = next(i for i in range(SMALL) if i not in (1, 2, 3, *wanted))
    overflowing(target, bad)
    for drafts in ([bad, bad], [wanted[1], bad]):
        drafter = Fixed(chain(2), torch.tensor([drafts]))
        output = build(target, drafter, exact_sizes(target) if exact else None).generate([1, 2, 3], max_new_tokens=20)
        assert output.ids == wanted


def test_numbers_that_overflow_on_the_text_itself_stop_with_advice():
    target, head = make(SMALL)
    first = reference_greedy(target, [1, 2, 3], 1)[0]
    overflowing(target, first)
    head.bind(target, 256)
    with pytest.raises(FasteaError, match=r"NaN.*bfloat16 or float32"):
        build(target, EagleDrafter(head, parse_tree("eagle1"))).generate([1, 2, 3], max_new_tokens=30)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_takes_the_dtype_of_its_target(tmp_path, stored, dtype):
    """Case 12: whatever its file has."""
    target, head = make(SMALL)
    save_head(head, tmp_path / "head", {}, stored)
    target = target.to(dtype)
    target.set_context(256)
    loaded = load_head(tmp_path / "head", target, dense(dtype))
    loaded.bind(target, 256)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    sizes = exact_sizes(target)
    drafted, plain = build(target, EagleDrafter(loaded, parse_tree("eagle1")), sizes), build(target, None, sizes)
    output = drafted.generate([1, 2, 3], max_new_tokens=20)
    assert output.ids == plain.generate([1, 2, 3], max_new_tokens=20).ids and sum(output.accepted) > 0


def run(capsys, *argv):
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_line_knows_them(capsys, folder, tmp_path):
    common = ["--checkpoint", folder, "--prompt", "abc", "--max-new-tokens", "24", "--exact", "--json"]
    plain = json.loads(run(capsys, *common, "--head", "none")[1])
    for drafter, tree in ((f"model:{folder}", "chain:4"), ("hybrid", "chain:3+ngram:8"), ("hybrid", "eagle1+ngram:8")):
        more = ["--tree", tree.split("+")[0]]
        document = json.loads(run(capsys, *common, "--drafter", drafter, *more)[1])
        assert document["ids"] == plain["ids"] and document["tree"] == tree
        assert document["head"] == ("model" if drafter.startswith("model") else str(folder / "eagle"))
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (other / name).write_bytes((folder / name).read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    swapped = json.loads(json.dumps(tokenizer))
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    fewer = json.loads(json.dumps(tokenizer))
    fewer["added_tokens"] = fewer["added_tokens"][:-1]
    for wrong, message in ((swapped, "not the same ones"), (fewer, "258 ids, the target's 259")):
        write_json(other / "tokenizer.json", wrong)
        code, _, err = run(capsys, *common, "--drafter", f"model:{other}")
        assert code == 2 and message in err and len(err.strip().splitlines()) == 1
    write_json(other / "tokenizer.json", tokenizer)
    config = json.loads((folder / "config.json").read_text())
    write_json(other / "config.json", config | {"vocab_size": 258})
    code, _, err = run(capsys, *common, "--drafter", f"model:{other}")
    assert code == 2 and "embeds 258 ids, its tokenizer has 259" in err
    small = tmp_path / "small"
    assert quantize([str(folder), str(small), "--scheme", "int8"]) == 0
    capsys.readouterr()
    document = json.loads(run(capsys, *common, "--drafter", f"model:{small}")[1])
    assert document["ids"] == plain["ids"] and document["tokens_per_round"] > 3
    code, _, err = run(capsys, *common, "--drafter", f"model:{small}", "--head-quant", "int4")
    assert code == 2 and "--head-quant int4" in err and "quantized already" in err
    for argv, message in (
        (["--drafter", "model"], "model:PATH"),
        (["--drafter", "model:"], "model:PATH"),
        (["--drafter", "none:x"], "model:PATH"),
        (["--drafter", "model:/absent"], "/absent"),
        (["--drafter", f"model:{folder}", "--tree", "eagle1"], "chain:K"),
        (["--drafter", "hybrid", "--head", "none"], "needs a head"),
        (["--drafter", "hybrid", "--accept", "rejection"], "--accept match"),
        (["--drafter", "hybrid", "--tree", "dynamic:64,8,8"], "no room"),
    ):
        code, _, err = run(capsys, *common, *argv)
        assert code == 2 and message in err and len(err.strip().splitlines()) == 1, err


def test_plain_decoding_beside_rejection_is_the_models_own(folder):
    """It draws with the noise of plain decoding, not with the rule's."""
    settings = {"max_new_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    model = load(folder, head=folder / "eagle", tree="chain:2", accept="rejection", dtype="float32")
    alone = load(folder, head="none", dtype="float32")
    assert model.beside(None).generate("hello", **settings).ids == alone.generate("hello", **settings).ids
