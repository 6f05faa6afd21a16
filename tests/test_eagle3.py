"""EAGLE-3 heads: the forward against a reference of its own, the files as they are published, and the text."""

import pytest
import torch
from safetensors.torch import save_file
from test_exact import build, exact_sizes

from conftest import dense, reference_greedy, tiny_target, write_json
from fastea.config import FasteaError
from fastea.drafters.dynamic import DynamicEagleDrafter
from fastea.drafters.eagle import EagleDrafter
from fastea.head_files import load_head, save_head
from fastea.kernels.attention import sight
from fastea.llama import TOGETHER
from fastea.tree import DynamicTree, Tree, chain

VOCAB, WIDE = 64, 48  # of the target; of a head that is narrower than the target


def target_of(layers=6, vocab=VOCAB, **changes):
    target = tiny_target(0, vocab, num_layers=layers, **changes)
    target.set_context(256)
    return target


def tensors(target, seed=1, hidden=64, ids=None, taps=3, heads=4, kv_heads=2, head_dim=16, std=0.2):
    """A head as EAGLE's own repository saves it, random. ids: its draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, mean=0.0):
        return torch.randn(shape, generator=generator) * std + mean

    vocab = target.config.vocab_size
    ids = torch.arange(0, vocab, 2) if ids is None else ids
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    state = {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": mask,
        "fc.weight": random(hidden, taps * target.config.hidden_size),
        "lm_head.weight": random(len(ids), hidden),
        "norm.weight": random(hidden, mean=1.0),
        "midlayer.hidden_norm.weight": random(hidden, mean=1.0),
        "midlayer.input_layernorm.weight": random(hidden, mean=1.0),
        "midlayer.post_attention_layernorm.weight": random(hidden, mean=1.0),
    }
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        state[f"midlayer.self_attn.{name}_proj.weight"] = random(rows * head_dim, 2 * hidden)
    state["midlayer.self_attn.o_proj.weight"] = random(hidden, heads * head_dim)
    for name, shape in (("gate", (96, hidden)), ("up", (96, hidden)), ("down", (hidden, 96))):
        state[f"midlayer.mlp.{name}_proj.weight"] = random(*shape)
    return state


CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "draft_vocab_size": 32,
    "max_position_embeddings": 2048,
}  # fmt: skip


def publish(folder, state, **config):
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", CONFIG | config)
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    return folder


def official(state):
    return state


def speculators(state):
    """The layer as "layers.0", weights under "model."."""
    named = {n.replace("midlayer.", "layers.0."): t for n, t in state.items()}
    return {n if n in ("d2t", "t2d", "lm_head.weight") else f"model.{n}": t for n, t in named.items()}


def vllm(state):
    """vLLM's own names of the vocabulary's map, and no mask."""
    named = {n.replace("midlayer.", "model.layers.0."): t for n, t in state.items() if n != "t2d"}
    named["draft_id_to_target_id"] = named.pop("d2t")
    return named


def biased(state):
    """With biases of fc and of q, k, v."""
    rows = {n: state[f"midlayer.self_attn.{n}_proj.weight"].shape[0] for n in "qkv"}
    more = {f"midlayer.self_attn.{n}_proj.bias": torch.linspace(-1, 1, count) for n, count in rows.items()}
    return state | more | {"fc.bias": torch.linspace(-0.5, 0.5, state["fc.weight"].shape[0])}


def norm(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def reference(state, embed, tokens, states, *, feed=(), residual_normed=False, theta=1e4):
    """Rows one after the other in fp64: states [N, 3 h] of the target, then fed-back rows for the tokens in `feed`.
    Returns what is fed back and the logits of every row."""
    s = {n.removeprefix("midlayer."): t.double() for n, t in state.items()}
    keys, values, outs = [], [], []
    for i, token in enumerate([*tokens, *feed]):
        g = s["fc.weight"] @ states[i].double() + s.get("fc.bias", 0) if i < len(tokens) else outs[-1]
        normed = norm(g, s["hidden_norm.weight"])
        x = torch.cat((norm(embed[token].double(), s["input_layernorm.weight"]), normed))
        q, k, v = (s[f"self_attn.{n}_proj.weight"] @ x + s.get(f"self_attn.{n}_proj.bias", 0) for n in "qkv")
        angle = i * theta ** -(torch.arange(8).double() / 8)

        def turned(t, angle=angle):
            low, high = t.view(-1, 16).chunk(2, -1)
            return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)

        keys.append(turned(k))
        values.append(v.view(-1, 16))
        k_all, v_all = (torch.stack(t).repeat_interleave(2, 1) for t in (keys, values))  # [L, 4, 16]
        weights = torch.softmax(torch.einsum("hd,lhd->hl", turned(q), k_all) / 4, -1)
        mixed = torch.einsum("hl,lhd->hd", weights, v_all).flatten()
        y = (normed if residual_normed else g) + s["self_attn.o_proj.weight"] @ mixed
        m = norm(y, s["post_attention_layernorm.weight"])
        gate, up = s["mlp.gate_proj.weight"] @ m, s["mlp.up_proj.weight"] @ m
        outs.append(y + s["mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up))
    out = torch.stack(outs)
    return out, norm(out, s["norm.weight"]) @ s["lm_head.weight"].T


@pytest.mark.parametrize("residual_normed", [False, True])
@pytest.mark.parametrize("form", [official, speculators, vllm, biased])
def test_forward_equals_the_reference(tmp_path, form, residual_normed):
    """Rows of target states, then two steps that read the head's own last state; every published set of names."""
    target = target_of()
    state = tensors(target)
    given = biased(state) if form is biased else state
    folder = publish(tmp_path / "head", form(state), norm_before_residual=residual_normed)
    head = load_head(folder, target, dense()).double()
    head.bind(target.double(), 64)
    tokens, states = torch.randint(VOCAB, (7,)), torch.randn(7, 3 * 64).double()
    features = torch.cat((torch.randn(7, 64), states), 1)  # the state after the final norm comes first
    cache, zero = head.new_cache(1, 64), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        out = [head(tokens[None], features[None], torch.arange(7)[None], zero, None, 0, cache)]
        for i, token in enumerate((5, 9)):
            at = torch.tensor([7 + i])
            out.append(head(torch.tensor([[token]]), out[-1][:, -1:], at[None], at, None, 0, cache))
    out = torch.cat(out, 1)
    wanted, logits = reference(
        given, target.embed.weight, tokens.tolist(), states, feed=(5, 9), residual_normed=residual_normed
    )
    torch.testing.assert_close(out[0], wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.logits(out)[0].double(), logits, atol=1e-4, rtol=1e-5)
    assert head.ids.tolist() == list(range(0, VOCAB, 2))
    assert head.target_ids(torch.tensor([0, 3, 31])).tolist() == [0, 6, 62]


def test_the_target_hands_out_the_inputs_of_its_layers():
    """Against a forward that is cut before each layer: un-normed, embedding included, low to high, at the borders of
    the parts that layers run in."""
    target = target_of(layers=2 * TOGETHER + 1)
    tokens, at = torch.randint(VOCAB, (1, 6)), torch.arange(6)[None]
    zero = torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        plain = target(tokens, at, zero, None, target.new_cache(1, 16))
        target.taps = (0, 1, TOGETHER - 1, TOGETHER, TOGETHER + 1, 2 * TOGETHER, 2 * TOGETHER + 1)
        features = target(tokens, at, zero, None, target.new_cache(1, 16))
        x, expected = target.embed(tokens), []
        cache = target.new_cache(1, 16)
        seen = sight(None, zero, 0, 6, target.config.num_heads // target.config.num_kv_heads, cache.keys[0])
        for i, layer in enumerate(target.layers):
            expected.append(x)
            x = layer(x, target.rope[at], cache.keys[i], cache.values[i], at, seen, None)
        expected.append(x)
    parts = features.split(64, -1)
    assert torch.equal(parts[0], plain) and torch.equal(target.logits(features), target.logits(plain))
    for part, tap in zip(parts[1:], target.taps, strict=True):
        assert torch.equal(part, expected[tap])


@pytest.mark.parametrize(
    ("config", "layers", "taps"),
    [
        ({}, 32, (2, 16, 29)),
        ({}, 36, (2, 18, 33)),
        ({}, 4, (2, 2, 1)),  # they may coincide
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, 8, (2, 4, 6)),  # inputs
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}}, 8, (2, 5, 7)),  # outputs
        ({"eagle_aux_hidden_state_layer_ids": [3, 5, 8]}, 8, (3, 5, 8)),  # the last one's output
        ({"eagle_aux_hidden_state_layer_ids": [2, 6]}, 8, (2, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 5]}, 8, (2, 3, 4, 5)),
    ],
)
def test_which_states_a_head_reads(tmp_path, config, layers, taps):
    """Case 9."""
    target = target_of(layers)
    folder = publish(tmp_path / "head", tensors(target, taps=len(taps)), **config)
    head = load_head(folder, target, dense())
    assert head.taps == taps
    head.bind(target, 64)
    assert target.taps == taps and target.feature_size == 64 * (1 + len(taps))


def test_a_head_of_another_width_brings_its_embedding(tmp_path):
    target = target_of()
    state = tensors(target, hidden=WIDE, heads=3, kv_heads=1)
    state["embed_tokens.weight"] = torch.randn(VOCAB, WIDE)
    config = {"hidden_size": WIDE, "num_attention_heads": 3, "target_hidden_size": 64}
    head = load_head(publish(tmp_path / "head", state, **config), target, dense())
    head.bind(target, 256)
    assert torch.equal(head.embed_weight, state["embed_tokens.weight"])
    sizes = exact_sizes(target)
    output = build(target, EagleDrafter(head, chain(3)), sizes).generate([1, 2, 3], max_new_tokens=20)
    assert output.ids == reference_greedy(target, [1, 2, 3], 20)


def test_a_whole_vocabulary_needs_no_map(tmp_path):
    """A map of zeros, or none at all."""
    target = target_of()
    state = tensors(target, ids=torch.arange(VOCAB))
    assert state["d2t"].eq(0).all()
    for number, given in enumerate((state, {n: t for n, t in state.items() if n not in ("d2t", "t2d")})):
        head = load_head(publish(tmp_path / f"head{number}", given), target, dense())
        head.bind(target, 64)
        assert head.draft_ids is None and len(head.ids) == VOCAB


def changed(**changes):
    def change(state):
        for name, value in changes.items():
            name = name.replace("__", ".")
            if value is None:
                state.pop(name)
            else:
                state[name] = value
        return state

    return change


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (changed(), {"vocab_size": 60}, "60 ids, the target's 64"),
        (changed(), {"norm_output": True}, "norm_output = True"),
        (changed(), {"norm_before_fc": True}, "norm_before_fc = True"),
        (changed(), {"fc_norm": True}, "fc_norm = True"),
        (
            changed(),
            {"eagle_aux_hidden_state_layer_ids": [2, 3]},
            "fc reads 192 values, 2 states of the target are",
        ),
        (changed(), {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, "the target has 6 layers"),
        (changed(d2t=None), {}, "d2t is missing"),
        (changed(d2t=torch.arange(31)), {}, "d2t is .31,., lm_head has 32 rows"),
        (changed(d2t=torch.arange(32) * 2), {}, "must be ascending ids below 64"),  # ids where offsets belong
        (changed(lm_head__weight=None), {}, "without lm_head"),
        (changed(norm__weight=None), {}, "missing tensors for: norm.weight"),
        (changed(midlayer__extra__weight=torch.ones(2)), {}, "unexpected tensors: layer.extra.weight"),
        (changed(embed_tokens__weight=torch.ones(60, 64)), {}, r"the head's embedding is .60, 64."),
        (changed(), {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, config, message):
    target = target_of()
    folder = publish(tmp_path / "head", change(tensors(target)), **config)
    with pytest.raises(FasteaError, match=message):
        load_head(folder, target, dense())


def test_a_head_of_another_model_names_both_sizes(tmp_path):
    target = target_of()
    narrow = tensors(tiny_target(0, VOCAB, hidden_size=48))
    with pytest.raises(FasteaError, match="fc reads 144 values, 3 states of the target are 192 wide"):
        load_head(publish(tmp_path / "a", narrow), target, dense())
    without = tensors(target, hidden=WIDE, heads=3, kv_heads=1)
    with pytest.raises(FasteaError, match="48 wide, the target 64, and it has no embedding"):
        load_head(publish(tmp_path / "b", without, num_attention_heads=3), target, dense())


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_the_text_is_plain_decodings(tmp_path, tree):
    """Case 11: greedy and sampled, a draft vocabulary of half the ids; past the 40 positions that the head knows."""
    target = target_of()
    head = load_head(publish(tmp_path / "head", tensors(target), max_position_embeddings=40), target, dense())
    head.bind(target, 256)
    drafter = {
        "chain": lambda: EagleDrafter(head, chain(4)),
        "static": lambda: EagleDrafter(head, Tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)], "t")),
        "dynamic": lambda: DynamicEagleDrafter(head, DynamicTree(20, 5, 4)),
    }[tree]()
    sizes = exact_sizes(target)
    model, plain = build(target, drafter, sizes), build(target, None, sizes)
    for settings in ({}, {"temperature": 1.0, "seed": 3}):
        prompt = [i % VOCAB for i in range(20)]
        expected = plain.generate(prompt, max_new_tokens=60, **settings)
        assert model.generate(prompt, max_new_tokens=60, **settings).ids == expected.ids
    assert plain.generate([1, 2], max_new_tokens=20).ids == reference_greedy(target, [1, 2], 20)


def test_every_continuation_is_accepted(tmp_path):
    """A vocabulary of 7 and a tree of all pairs: two accepted a round, whatever the head says."""
    small = 7
    target = target_of(vocab=small)
    state = tensors(target, ids=torch.arange(small))
    head = load_head(publish(tmp_path / "head", state, vocab_size=small), target, dense())
    head.bind(target, 256)
    pairs = [(a, b) for a in range(small) for b in range(small)]
    tree = Tree([(a,) for a in range(small)] + pairs, "wide")
    output = build(target, EagleDrafter(head, tree)).generate([1, 2, 3], max_new_tokens=31)
    assert output.accepted == [2] * 10 and output.ids == reference_greedy(target, [1, 2, 3], 31)


def test_the_running_cache_is_that_of_a_fresh_prefill(tmp_path):
    """After every round the draft cache holds, below the root, what true target states give."""
    small = 7
    target = target_of(vocab=small)
    state = tensors(target, ids=torch.arange(small))
    head = load_head(publish(tmp_path / "head", state, vocab_size=small), target, dense())
    head.bind(target, 256)
    pairs = [(a, b) for a in range(small) for b in range(small)]
    model = build(target, EagleDrafter(head, Tree([(a,) for a in range(small)] + pairs, "wide")))
    from fastea.sampling import Sampling

    run = model.state(1)
    run.reset(Sampling(), [0])
    model.prefill(run, 0, [1, 2, 3, 4])
    for _ in range(6):
        model.step(run)
        stable = int(run.length - run.count)
        ids = run.history[:, : stable + 1]
        with torch.inference_mode():
            zero, at = torch.zeros(1, dtype=torch.int64), torch.arange(stable)[None]
            features = target(ids[:, :stable], at, zero, None, target.new_cache(1, 256))
            fresh = head.new_cache(1, 256)
            head(ids[:, 1:], features, at, zero, None, 0, fresh)
        for mine, his in ((run.draft_cache.keys[0], fresh.keys[0]), (run.draft_cache.values[0], fresh.values[0])):
            torch.testing.assert_close(mine[:, :, :stable], his[:, :, :stable], atol=1e-4, rtol=1e-4)


def test_the_official_key_set_is_complete():
    """The fifteen tensors of the official files, no more and no fewer."""
    assert len(tensors(target_of())) == 15


@pytest.mark.parametrize("change", ["none", "biases", "own embedding", "normed residual"])
def test_a_saved_head_is_what_was_loaded(tmp_path, change):
    """Whatever a published head has is written too: a head may be trained further."""
    target, config = target_of(), {}
    state = tensors(target)
    if change == "biases":
        state |= {
            f"midlayer.self_attn.{n}_proj.bias": torch.randn(rows) for n, rows in (("q", 64), ("k", 32), ("v", 32))
        }
    if change == "own embedding":
        state = tensors(target, hidden=WIDE, heads=3, kv_heads=1)
        state["embed_tokens.weight"] = torch.randn(VOCAB, WIDE)
        config = {"hidden_size": WIDE, "num_attention_heads": 3, "num_key_value_heads": 1}
    if change == "normed residual":
        config = {"norm_before_residual": True}
    head = load_head(publish(tmp_path / "head", state, **config), target, dense())
    save_head(head, tmp_path / "again", {"a": 1}, torch.float32)
    again = load_head(tmp_path / "again", target, dense())
    tokens, features, zero = torch.arange(9)[None], torch.randn(1, 9, 4 * 64), torch.zeros(1, dtype=torch.int64)
    outputs = []
    for some in (head, again):
        some.bind(target, 64)
        outputs.append(some(tokens, features, torch.arange(9)[None], zero, None, 0, some.new_cache(1, 16)))
    assert torch.equal(*outputs) and torch.equal(head.logits(outputs[0]), again.logits(outputs[1]))
    assert torch.equal(head.draft_ids, again.draft_ids) and again.taps == head.taps and again.card == {"a": 1}
