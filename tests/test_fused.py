"""Target, head and round over the Triton kernels, in Triton's interpreter: the same text as plain decoding, in fewer
rounds, and no word from the host inside a round."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_eagle3 import publish, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import byte_tokenizer, random_paths, randomize, reference_greedy, tiny_head, tiny_target
from fastea import generator as generator_module
from fastea.config import FasteaError
from fastea.drafters.dynamic import DynamicEagleDrafter
from fastea.drafters.eagle import EagleDrafter
from fastea.drafters.ngram import NgramDrafter
from fastea.fused import FusedEagleHead, FusedLlama, FusedRound
from fastea.generator import Generator
from fastea.head_files import load_head
from fastea.quantized import Quantizer
from fastea.replay import RING, Replay
from fastea.runtime import use_triton
from fastea.sampling import Sampling
from fastea.tree import DynamicTree, Tree, chain

pytestmark = pytest.mark.kernels

SMALL = 4  # vocabulary of the wide fixture: 1 + 4 + 16 nodes hold every two-token continuation
CONTEXT = 128
FORMS = {
    "float16": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float16, "int8"),
    "int4": (torch.bfloat16, "int4"),
}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Interpreted rows are slow: prompts go in chunks of 4."""
    monkeypatch.setattr(generator_module, "CHUNK", 4)


def wide_tree() -> Tree:
    pairs = [(a, b) for a in range(SMALL) for b in range(SMALL)]
    return Tree([(a,) for a in range(SMALL)] + pairs, "wide")


def fuse(module, empty, quantizer):
    """The same weights in the kernels' form."""
    for name, value in module.named_parameters():
        quantizer.place(empty, name, value.detach())
    return empty.eval()


def make(form="float16", vocab=64, draft_ids=None, heads=(4, 2), **changes):
    """(target, head) over kernels, and the plain target in fp32 that they come from."""
    dtype, quant = FORMS[form]
    plain = tiny_target(3, vocab, num_heads=heads[0], num_kv_heads=heads[1], **changes)
    plain_head = tiny_head(plain, 4, draft_ids)
    randomize(plain_head, 4, 0.1)  # larger ones overflow fp16 in a few steps of a head that was never trained
    with torch.device("meta"):
        target = FusedLlama(plain.config)
        head = FusedEagleHead(plain.config, fc_bias=True, qkv_bias=False, draft_ids=draft_ids)
    fuse(plain, target, Quantizer(quant, dtype, "cpu", triton=True))
    target.set_context(CONTEXT)
    head.draft_ids = draft_ids
    fuse(plain_head, head, Quantizer(quant, dtype, "cpu", triton=True)).bind(target, CONTEXT)
    plain.set_context(CONTEXT)
    return target, head, plain


def build(target, drafter, **more):
    tokenizer = byte_tokenizer(target.config.vocab_size, more.pop("stop_ids", ()))
    return Generator(target, tokenizer, drafter, max_seq_len=CONTEXT, round_kind=FusedRound, **more)


@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_the_plain_model(form):
    """Against forwards in fp64 of the weights that the layouts hold; a prompt in two chunks, then a tree. The measure
    is the error of torch's operators in the same dtype."""
    target, _, plain = make(form, heads=(6, 2))
    double = plain.double()
    dtype, quant = FORMS[form]
    for module in double.modules():
        if hasattr(module, "weight") and module.weight.dim() == 2 and module is not double.embed:
            with torch.no_grad():
                scheme = "int8" if quant and module is double.lm_head else quant
                module.weight.copy_(_stored(module.weight, scheme, dtype))
    with torch.no_grad():
        double.embed.weight.copy_(double.embed.weight.to(dtype))
    tree, ids = Tree(random_paths(5, 9), "random"), torch.arange(13) * 7 % 64
    tokens = torch.arange(len(tree))[None] % 64
    results = []
    with torch.inference_mode():
        for model in (target, copy.deepcopy(double).to(dtype), double):
            model.set_context(CONTEXT)
            cache = model.new_cache(1, CONTEXT)
            for at, part in ((0, ids[:8]), (8, ids[8:])):
                start = torch.tensor([at])
                features = model(part[None], (at + torch.arange(len(part)))[None], start, None, cache)
            start = torch.tensor([13])
            features = model(tokens, 13 + tree.depth[None], start, tree.words[None], cache)
            results.append(model.logits(features)[0].double())
    errors = [float((result - results[2]).norm() / results[2].norm()) for result in results]
    assert 0 < errors[0] < 1.5 * errors[1]


def _stored(weight, quant, dtype):
    """A weight as its form holds it."""
    from fastea.quantize.forms import SCHEMES, nearest

    return nearest(weight.float(), SCHEMES[quant]).dequantized() if quant else weight.to(dtype)


@pytest.mark.parametrize("more", [{"qkv_bias": True}, {"qk_norm": True}, {"experts": 4}])
def test_families(more):
    """Biases of q, k, v (Qwen2) and norms of q and k (Qwen3)."""
    target, _, plain = make("float16", 32, **more)
    expected = reference_greedy(plain, [1, 2, 3], 6)
    assert build(target, None).generate([1, 2, 3], max_new_tokens=6).ids == expected


@pytest.mark.parametrize("form", FORMS)
def test_wide_tree_accepts_two_every_round(form):
    """Every continuation is in the tree: each round accepts exactly two, and the text is plain decoding's."""
    target, head, _ = make(form, SMALL)
    plain = build(target, None).generate([1, 2, 3], max_new_tokens=7)
    output = build(target, EagleDrafter(head, wide_tree())).generate([1, 2, 3], max_new_tokens=7)
    assert output.ids == plain.ids and output.accepted == [2, 2]


def test_float16_writes_what_fp64_writes():
    target, head, plain = make("float16", SMALL)
    expected = reference_greedy(plain, [1, 2, 3], 12)
    assert build(target, EagleDrafter(head, chain(2))).generate([1, 2, 3], max_new_tokens=12).ids == expected


@pytest.mark.parametrize("drafter", ["chain", "random tree", "dynamic tree", "draft vocabulary", "ngram"])
def test_the_same_text_for_a_seed(drafter):
    draft_ids = torch.tensor([0, 2, 3]) if drafter == "draft vocabulary" else None
    target, head, _ = make("bfloat16", SMALL, draft_ids)
    tree = Tree(random_paths(2, 6), "random") if drafter == "random tree" else chain(2)
    proposer = NgramDrafter(tree) if drafter == "ngram" else EagleDrafter(head, tree)
    if drafter == "dynamic tree":
        proposer = DynamicEagleDrafter(head, DynamicTree(6, 3, 3))
    for settings in ({}, {"temperature": 0.8, "top_k": 3, "top_p": 0.9, "seed": 6}):
        plain = build(target, None).generate([1, 2, 1, 2], max_new_tokens=7, **settings)
        output = build(target, proposer).generate([1, 2, 1, 2], max_new_tokens=7, **settings)
        assert output.ids == plain.ids
        assert plain.rounds == 6


def test_batch_rows_equal_their_single_runs():
    target, head, _ = make("float16", SMALL)
    model = build(target, EagleDrafter(head, Tree([(0,), (1,), (2,), (0, 0), (1, 0)], "small")))
    prompts = [[1, 2, 3], [0, 1, 0, 1, 2, 3, 0, 2, 0]]
    texts = ["".join(chr(33 + i) for i in ids) for ids in prompts]
    together = model.generate(texts, max_new_tokens=6, temperature=1.0, seed=2, raw=True)
    for row, text in enumerate(texts):
        alone = model.generate(text, max_new_tokens=6, temperature=1.0, seed=2, streams=[row], raw=True)
        assert together[row].ids == alone.ids


def test_replayed_rounds_write_the_same():
    """One round ahead of what is read: the same tokens, accepted counts and ends, prompt after prompt."""
    target, head, _ = make("float16", SMALL)
    tree = Tree([(0,), (1,), (0, 0)], "small")
    stepped = build(target, EagleDrafter(head, tree))
    replayed = build(target, EagleDrafter(head, tree), compile=True)
    for settings in (
        {"max_new_tokens": 8},
        {"max_new_tokens": 5, "temperature": 1.0, "seed": 3},
        {"max_new_tokens": 8},
    ):
        expected = stepped.generate([1, 2, 3, 0], **settings)
        output = replayed.generate([1, 2, 3, 0], **settings)
        assert (output.ids, output.accepted) == (expected.ids, expected.accepted)
    assert len(replayed.engine.replays) == 2 and set(replayed.seconds) >= {"round"}
    half = replayed.stream([1, 2, 3, 0], max_new_tokens=8)
    next(half)
    half.interrupt()  # in the middle, with a round under way
    assert replayed.generate([0, 3], max_new_tokens=4).ids == stepped.generate([0, 3], max_new_tokens=4).ids


def eagle3(owner, plain, folder, triton):
    """A random EAGLE-3 head of the plain target for `owner`, over the kernels or not."""
    folder = publish(folder / "head", tensors(plain, std=0.1), vocab_size=plain.config.vocab_size)
    dtype = torch.float16 if triton else torch.float32
    head = load_head(folder, owner, Quantizer(None, dtype, "cpu", pack=triton, triton=triton))
    head.bind(owner, CONTEXT)
    return head


def test_an_eagle3_head_drafts_as_its_plain_form(tmp_path):
    """The forward in 16 bit against the same head in torch's operators; and the text."""
    target, _, plain = make("float16", 64, num_layers=4)
    heads = [eagle3(owner, plain, tmp_path, triton) for owner, triton in ((target, True), (plain, False))]
    tokens, features = torch.arange(5)[None], torch.randn(1, 5, 256, generator=torch.Generator().manual_seed(0)) / 2
    zero, words, results = torch.zeros(1, dtype=torch.int64), torch.tensor([[1, 2]]), []
    with torch.inference_mode():
        for head in heads:
            given, cache = features.to(head.norm.weight.dtype), head.new_cache(1, CONTEXT)
            out = head(tokens, given, torch.arange(5)[None], zero, None, 0, cache)
            last = out[:, -1:].expand(-1, 2, -1)
            more = head(torch.tensor([[7, 8]]), last, torch.tensor([[5, 5]]), zero + 5, words, 0, cache)
            results.append(head.logits(torch.cat((out, more), 1)))
    torch.testing.assert_close(*results, atol=0.05, rtol=0.02)
    expected = build(target, None).generate([1, 2, 3], max_new_tokens=6)
    assert build(target, EagleDrafter(heads[0], chain(2))).generate([1, 2, 3], max_new_tokens=6).ids == expected.ids


def test_few_graphs_are_kept(monkeypatch):
    """A graph has memory of its own, and every temperature a graph: the oldest go."""
    target, _, _ = make("float16", SMALL)
    model = build(target, None, compile=True)
    monkeypatch.setattr(model, "_run_twice", lambda batch, sampling: model.state(batch))
    monkeypatch.setattr(generator_module, "Replay", lambda round, state: object())
    for step in range(9):
        model.warm_up(1, Sampling(0.1 * step))
    kept = [(1, Sampling(0.1 * step).shape()) for step in range(5, 9)]
    assert list(model.engine.replays) == kept and model.engine.warm == set(kept)


class Counted(TorchDispatchMode):
    """Counts what would stop the host or move data between host and device; nothing below our operators."""

    STOPS = ("_local_scalar_dense", "nonzero", "is_nonzero", "lift_fresh", "_to_copy", "item", "equal", "unique")

    def __init__(self):
        super().__init__()
        self.calls, self.stops = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        name = func.overloadpacket.__name__
        moved = name == "_to_copy" and "device" not in (kwargs or {})  # a change of dtype stays where it is
        if name in self.STOPS and not moved:
            self.stops.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [Sampling(), Sampling(0.8, 3, 0.9, 1)])
@pytest.mark.parametrize("drafter", ["tree", "dynamic", "eagle3", "ngram", "none"])
def test_nothing_in_a_round_asks_the_host(settings, drafter, tmp_path):
    target, head, plain = make("float16", SMALL, num_layers=4)
    if drafter == "eagle3":
        head = eagle3(target, plain, tmp_path, True)
    tree = Tree([(0,), (1,), (0, 0)], "small")
    dynamic = DynamicEagleDrafter(head, DynamicTree(6, 3, 3))
    proposers = {"tree": EagleDrafter(head, tree), "ngram": NgramDrafter(chain(2)), "none": None}
    proposer = proposers.get(drafter, dynamic)
    model = build(target, proposer)
    state = model.state(1)
    state.reset(settings, [0], {3})
    model.prefill(state, 0, [1, 2, 3])
    replay = Replay(model.round, state)
    with torch.inference_mode(), Counted() as counted:
        replay._round()
        assert counted.calls > 10 and not counted.stops
        int(state.length)  # the count itself works
    assert counted.stops


def test_a_sequence_ends_on_the_device():
    """At an end mark or at its limit a sequence stops advancing by itself: rounds started in vain change nothing."""
    target, head, _ = make("float16", SMALL)
    text = build(target, None).generate([1, 2, 3], max_new_tokens=14).ids
    stop = next(t for i, t in enumerate(text) if i >= 3 and t not in text[:i])
    for limit, stop_ids in ((50, {stop}), (5, set())):
        model = build(target, EagleDrafter(head, wide_tree()), stop_ids=tuple(stop_ids))
        state = model.state(1)
        state.reset(Sampling(), [0], stop_ids)
        model.prefill(state, 0, [1, 2, 3], limit)
        replay = Replay(model.round, state)
        replay.begin()
        counts = [int(replay.step().count) for _ in range(5)]
        end = text.index(stop) if stop_ids else limit - 1  # index of the last token that is wanted
        rounds = -(-end // 3)
        assert counts == [3] * rounds + [0] * (len(counts) - rounds)
        assert bool(state.done) and int(state.length) == 3 + 3 * rounds
        written = state.history[0, 3 : 3 + end + 1].tolist()
        assert written == text[: end + 1]


def test_rounds_are_read_in_order_whatever_the_ring_holds():
    """The record of a round is read once, after the next was started, also where turns pass the ring's end."""
    target, _, _ = make("float16", SMALL)
    model = build(target, None)
    state = model.state(1)
    state.reset(Sampling(), [0])
    model.prefill(state, 0, [1, 2, 3])
    started = []

    def watched(action):
        def play():
            action()
            started.append(int(state.length))

        return play

    replay = Replay(model.round, state, watched)
    replay.begin()
    text = build(target, None).generate([1, 2, 3], max_new_tokens=2 * RING + 2).ids
    for i in range(2 * RING):
        outcome = replay.step()
        assert outcome.emitted.tolist() == [[text[i + 1]]] and outcome.count.tolist() == [1]
        assert len(started) == i + 2  # the next one is under way


def test_what_keeps_the_kernels_away(capsys):
    config = tiny_target().config
    half = torch.float16
    assert use_triton("triton", "cpu", half, config) and not use_triton("torch", "cpu", half, config)
    assert not use_triton("auto", "cpu", half, config)  # a CPU has something faster than the interpreter
    for changed, dtype, word in (
        ({}, torch.float32, "float32"),
        ({"head_dim": 80}, half, "80"),
        ({"num_heads": 64}, half, "32"),
    ):
        other = type(config)(**(vars(config) | changed))
        with pytest.raises(FasteaError, match=word):
            use_triton("triton", "cpu", dtype, other)
    with pytest.raises(FasteaError, match="--kernels fast"):
        use_triton("fast", "cpu", half, config)


def test_kernels_need_a_gpu_or_the_interpreter(folder):
    """One line and exit code 2, no traceback."""
    script = Path(__file__).parent.parent / "generate.py"
    command = [sys.executable, script, "--checkpoint", folder, "--kernels", "triton"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "GPU" in done.stderr


def test_an_old_card_and_a_broken_triton_fall_back(monkeypatch, capsys):
    """The slower path writes the same text, so that one line is enough; asked for by name it is refused."""
    config = tiny_target().config
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not use_triton("auto", "cuda", torch.float16, config)
    assert "7.5" in capsys.readouterr().err
    with pytest.raises(FasteaError, match="compute capability 7"):
        use_triton("triton", "cuda", torch.float16, config)
    monkeypatch.setitem(sys.modules, "fastea.kernels.launch", None)
    assert not use_triton("auto", "cuda", torch.float16, config)
    assert "Triton cannot be loaded" in capsys.readouterr().err
