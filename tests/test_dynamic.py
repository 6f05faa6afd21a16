"""Dynamic trees (EAGLE-2): which nodes are kept, and that the text stays plain decoding's."""

import pytest
import torch
from test_exact import SMALL, build, exact_sizes, make

from conftest import randomize, reference_greedy, tiny_head
from fastea.config import FasteaError
from fastea.drafters.dynamic import DynamicEagleDrafter
from fastea.kernels.attention import expand_words, sight, visible_slots
from fastea.loading import load
from fastea.tree import DynamicTree, best_nodes, parse_tree


def grown(tree, batch, generator, dtype, spread=1.0):
    """Scores and parents of every candidate, as drafting makes them, from random 16-bit log-probabilities."""
    width, scores, parents = tree.width, [], []

    def increments(rows):
        logits = torch.randn(batch, rows, 4 * width, generator=generator) * spread
        return torch.log_softmax(logits.to(dtype), -1).topk(width).values.float()

    score = increments(1)[:, 0]
    frontier = torch.arange(width).expand(batch, -1)
    scores.append(score)
    parents.append(torch.full_like(frontier, -1))
    for level in range(2, tree.levels + 1):
        first = width + (level - 2) * width**2
        sums = (score[:, :, None] + increments(width)).to(dtype).float().flatten(1)  # rounded: many ties
        scores.append(sums)
        parents.append(frontier.repeat_interleave(width, 1))
        best = sums.sort(dim=1, descending=True, stable=True).indices[:, :width]
        frontier, score = first + best, sums.gather(1, best)
    return torch.cat(scores, 1), torch.cat(parents, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_node_comes_without_its_parent(dtype):
    """100,000 score sets in 16 bit, sharp and flat; an order of ties like torch.topk's would leave orphans."""
    generator = torch.Generator().manual_seed(0)
    tree, orphans = DynamicTree(30, 5, 5), 0
    for spread in (1.0, 4.0, 0.05, 8.0):
        for _ in range(5):
            scores, parents = grown(tree, 2500, generator, dtype, spread)
            chosen, nodes = best_nodes(scores, parents, tree)
            above = parents.gather(1, chosen)
            found = (above[:, :, None] == chosen[:, None]).any(2) | (above < 0)
            assert bool(found.all())
            assert bool((nodes.parent < torch.arange(30)).sum() == nodes.parent.numel() - len(scores))
            picked = scores.topk(29).indices  # ties in any order
            above = parents.gather(1, picked)
            orphans += int((~((above[:, :, None] == picked[:, None]).any(2) | (above < 0)).all(1)).sum())
    assert orphans > 0  # the property is not a gift of these scores


def test_the_best_nodes_by_hand():
    """Two children a node, three levels: candidates 0-1, 2-5 (of 0 and 1), 6-9 (of 2 and 4)."""
    scores = torch.tensor([[-0.1, -2.0, -0.3, -3.0, -2.5, -4.0, -0.4, -0.9, -2.6, -2.7]])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]])
    chosen, nodes = best_nodes(scores, parents, DynamicTree(6, 2, 3))
    assert chosen.tolist() == [[0, 2, 6, 7, 1]]  # best first
    assert nodes.parent.tolist() == [[0, 0, 1, 2, 2, 0]] and nodes.depth.tolist() == [[0, 1, 2, 3, 3, 1]]
    assert nodes.words.tolist() == [[0b1, 0b11, 0b111, 0b1111, 0b10111, 0b100001]]


def test_words_are_the_ancestors():
    tree = DynamicTree(64, 10, 7)
    scores, parents = grown(tree, 50, torch.Generator().manual_seed(1), torch.float32)
    _, nodes = best_nodes(scores, parents, tree)
    for b in range(50):
        mask = expand_words(nodes.words[b], 64)
        for i in range(64):
            path, at = {i}, i
            while at:
                at = int(nodes.parent[b, at])
                path.add(at)
            assert set(mask[i].nonzero().flatten().tolist()) == path and int(nodes.depth[b, i]) == len(path) - 1


@pytest.mark.parametrize("spec", [(20, 5, 4), (60, 10, 6), (64, 16, 7), (2, 1, 1), (9, 3, 2)])
def test_the_text_is_plain_decodings(spec):
    """Greedy and sampled; 16 x 6 draft rows are more than a word has bits, and than a static tree may take."""
    target, head = make(64)
    sizes = exact_sizes(target)
    model = build(target, DynamicEagleDrafter(head, DynamicTree(*spec)), sizes)
    for settings in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 4}):
        plain = build(target, None, sizes).generate([1, 2, 3], max_new_tokens=30, **settings)
        assert model.generate([1, 2, 3], max_new_tokens=30, **settings).ids == plain.ids
    assert build(target, None).generate([1, 2, 3], max_new_tokens=30).ids == reference_greedy(target, [1, 2, 3], 30)


def test_every_continuation_of_two_tokens_is_accepted():
    target, head = make(SMALL)
    output = build(target, DynamicEagleDrafter(head, DynamicTree(57, 7, 2))).generate([1, 2, 3], max_new_tokens=31)
    assert output.accepted == [2] * 10 and output.ids == reference_greedy(target, [1, 2, 3], 31)


def test_rejection_with_chosen_children_keeps_the_distribution():
    """The first two tokens of many seeds against the target's own distribution: children are point masses."""
    target, head = make(SMALL)
    model = build(target, DynamicEagleDrafter(head, DynamicTree(8, 3, 2), rejection=True), rejection=True)
    plain = build(target, None)
    counts = torch.zeros(2, SMALL, SMALL)
    for seed in range(700):
        for which, generator in enumerate((model, plain)):
            ids = generator.generate([1, 2], max_new_tokens=3, temperature=1.0, seed=seed).ids
            counts[which, ids[1], ids[2]] += 1
    shares = counts / counts.sum((1, 2), keepdim=True)
    assert float((shares[0] - shares[1]).abs().sum() / 2) < 0.16  # about 0.10 is expected of two samples of 700


def test_batch_rows_equal_their_single_runs():
    target, head = make(SMALL)
    sizes = exact_sizes(target)
    model = build(target, DynamicEagleDrafter(head, DynamicTree(12, 4, 3)), sizes)
    texts = ["".join(chr(33 + i) for i in ids) for ids in ([1, 2, 3], [4, 5, 0, 1, 2])]
    together = model.generate(texts, max_new_tokens=20, temperature=1.0, seed=2, raw=True)
    for row, text in enumerate(texts):
        alone = model.generate(text, max_new_tokens=20, temperature=1.0, seed=2, streams=[row], raw=True)
        assert together[row].ids == alone.ids and together[row].accepted == alone.accepted


def test_drafting_expands_the_best_nodes():
    """The drafted tokens against a plain search: the head run on whole paths, one at a time."""
    target, head = make(32)
    randomize(head, 9, 0.1)
    tree = DynamicTree(9, 2, 3)
    model = build(target, DynamicEagleDrafter(head, tree))
    state = model.state(1)
    from fastea.sampling import Sampling

    state.reset(Sampling(), [0])
    prompt = [1, 2, 3, 4]
    model.prefill(state, 0, prompt)
    with torch.inference_mode():
        draft = model.round.draft(state)
        target_cache = target.new_cache(1, 64)
        features = target(torch.tensor([prompt]), torch.arange(4)[None], torch.tensor([0]), None, target_cache)

        def continuation(path):
            """log q of the next token and the predicted feature after root and path."""
            cache = head.new_cache(1, 64)
            tokens = torch.tensor([[*prompt[1:], int(state.root)]])
            out = head(tokens, features, torch.arange(4)[None], torch.tensor([0]), None, 0, cache)[:, -1:]
            for i, token in enumerate(path):
                at = torch.tensor([4 + i])
                out = head(torch.tensor([[token]]), out, at[None], at, None, 0, cache)
            return torch.log_softmax(head.logits(out)[0, 0], -1)

        frontier, candidates = [((), 0.0)], []
        for _ in range(tree.levels):
            level = []
            for path, score in frontier:
                values, ids = continuation(path).topk(tree.width)
                level += [((*path, int(i)), score + float(v)) for v, i in zip(values, ids, strict=True)]
            candidates += level
            frontier = sorted(level, key=lambda c: -c[1])[: tree.width]
    best = {path for path, _ in sorted(candidates, key=lambda c: -c[1])[: len(tree) - 1]}
    paths = []
    for i in range(1, len(tree)):
        path, at = [], i
        while at:
            path.append(int(draft.tokens[0, at]))
            at = int(draft.nodes.parent[0, at])
        paths.append(tuple(reversed(path)))
    assert set(paths) == best


def test_lists_of_slots_are_words_without_their_limit():
    torch.manual_seed(0)
    words = torch.tensor([[0b00001, 0b00011, 0b01001]])
    lists = torch.tensor([[[0, -1, -1], [0, 1, -1], [0, 3, -1]]])
    assert torch.equal(visible_slots(lists, 5), visible_slots(words, 5))
    cache = torch.zeros(1, 2, 40, 8)
    wanted = torch.zeros(1, 6, 40)  # two query heads a KV head
    wanted[0, :, 9:] = -torch.inf
    for row, slots in enumerate(([0], [0, 1], [0, 3])):
        for slot in slots:
            wanted[0, 2 * row : 2 * row + 2, 9 + slot] = 0
    for given in (words, lists):
        assert torch.equal(sight(given, torch.tensor([9]), 2, 3, 2, cache), wanted)


def test_what_a_tree_may_be(capsys, folder):
    """Case 10: what cannot be is refused, what is more than there is is fitted, with a note."""
    assert parse_tree("dynamic:32,8,6") == DynamicTree(32, 8, 6) and DynamicTree(32, 8, 6).name == "dynamic:32,8,6"
    for spec in (
        "dynamic:65,8,6",
        "dynamic:32,0,6",
        "dynamic:32,17,6",
        "dynamic:32,8,17",
        "dynamic:32,8",
        "dynamic:a,8,6",
    ):
        with pytest.raises(FasteaError, match=spec):
            parse_tree(spec)
    fitted = {
        DynamicTree(60, 10, 6): DynamicTree(60, 8, 6),  # a vocabulary of 8
        DynamicTree(60, 2, 2): DynamicTree(7, 2, 2),  # there are 2 + 4 candidates
        DynamicTree(1, 4, 0): DynamicTree(2, 4, 1),
    }
    for asked, given in fitted.items():
        assert asked.fitted(8) == given
    load(folder, tree="dynamic:60,2,2")
    assert "dynamic:7,2,2" in capsys.readouterr().err
    load(folder, tree="dynamic:7,2,2")
    assert capsys.readouterr().err == ""


def test_the_draft_cache_has_room_for_its_rows():
    target, _ = make(64)
    head = tiny_head(target)
    head.bind(target, 256)
    drafter = DynamicEagleDrafter(head, DynamicTree(64, 16, 8))
    rows = drafter.new_cache(1, 256).keys[0].shape[2]
    assert rows >= 256 + 16 * 7
    long = build(target, drafter, exact_sizes(target), context=256)
    prompt = [i % 64 for i in range(200)]
    plain = build(target, None, exact_sizes(target), context=256)
    assert long.generate(prompt, max_new_tokens=80).ids == plain.generate(prompt, max_new_tokens=80).ids
