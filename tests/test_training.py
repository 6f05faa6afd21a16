"""Training: which rows are supervised, what the losses are, and that a run learns, stops and resumes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from conftest import byte_tokenizer, dense, randomize, tiny_target
from fastea.acceptance import AcceptanceTable
from fastea.config import FasteaError
from fastea.eagle3 import Eagle3Head, default_taps
from fastea.generator import Generator
from fastea.head_files import load_head, save_head
from fastea.training.answers import write_answers
from fastea.training.data import Sample, draft_vocabulary, make_samples, read_lines, supervised_rows
from fastea.training.decoding import LIKELIEST, Growing, choose
from fastea.training.features import FeatureStore
from fastea.training.losses import cross_entropy
from fastea.training.train import RECIPES, Batches, Recipe, Trainer, new_head
from fastea.training.unroll import ScaledLinear, unroll


def test_rows_are_aligned_with_the_tokens_they_predict():
    """Prompt a b c, answer D E F: row p reads f_p and t_{p+1} and is trained iff token p + 2 is an answer token."""
    rows = supervised_rows(6, 3)
    #        row:    0 (f_a, b) -> c   1 (f_b, c) -> D   2 -> E   3 -> F   4 -> past the end   5
    assert rows.tolist() == [False, True, True, True, False, False]
    assert supervised_rows(4, 1).tolist() == [True, True, False, False]  # token 1 has no row: f_{-1} does not exist


def test_rows_and_their_room():
    """Prompt a b, answer C D E: rows 0, 1, 2 predict C, D, E; row 0 has three steps of text before it, row 2 one."""
    samples = [Sample((10, 11, 12, 13, 14), 2), Sample((1, 2, 3), 1)]
    store = SimpleNamespace(samples=samples, features=lambda i: torch.full((len(samples[i].tokens), 4), i + 1.0))
    batch = Batches(store, [0, 1], 100, 0).load([0, 1])  # type: ignore[arg-type]
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 14], [1, 2, 3, 0, 0]]
    assert batch.rows.tolist() == [[0, 1, 2], [0, 0, 0]] and batch.room.tolist() == [[3, 2, 1], [1, 0, 0]]
    assert batch.features[:, :, 0].tolist() == [[1.0] * 5, [2.0] * 3 + [0.0] * 2]


TAPS = (2, 3, 5)


def head_of(kind, target, draft_ids=None, steps=3):
    if kind == "eagle3":
        target.taps = TAPS
    return randomized(new_head(target, Recipe(**(RECIPES[kind] | {"kind": kind, "steps": steps})), draft_ids), target)


def randomized(head, target):
    randomize(head, 7, 0.2)
    if isinstance(head, Eagle3Head):
        head.taps = TAPS
    head.bind(target, 64)
    return head.requires_grad_(False)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@torch.no_grad()
def test_what_is_trained_is_what_drafts(kind):
    """Every row of every step equals the head's own forward, run as it drafts: over the true features up to the row,
    then a chain on its own states, token by token, in a cache."""
    target = tiny_target(num_layers=6)
    head = head_of(kind, target).double()  # its values reach some hundreds
    head.embed_weight = head.embed_weight.double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (2, 12), generator=generator)
    features = torch.randn(2, 12, target.feature_size, generator=generator).double()
    rows = torch.tensor([[3, 4, 5, 6], [0, 1, 2, 7]])
    outputs = list(unroll(head, tokens, features, rows, 3))
    for b in range(2):
        for a, p in enumerate(rows[b].tolist()):
            cache, start = head.new_cache(1, 64), torch.zeros(1, dtype=torch.int64)
            out = head(tokens[b : b + 1, 1 : p + 2], features[b : b + 1, : p + 1], torch.arange(p + 1)[None], start,
                       None, 0, cache)[:, -1:]  # fmt: skip
            for step in range(3):
                torch.testing.assert_close(outputs[step][b, a], out[0, 0], atol=2e-4, rtol=1e-3)
                at = torch.tensor([p + 1 + step])
                out = head(tokens[b : b + 1, p + 2 + step : p + 3 + step], out, at[None], at, None, 0, cache)


def test_each_step_learns_the_token_after_it(tmp_path):
    """Row p of step j is trained on the target's distribution after token p + 1 + j, as far as the answer goes: the
    loss, summed by hand over every row and step."""
    target = tiny_target(num_layers=6)
    target.taps = TAPS
    samples = [Sample((10, 11, 12, 13, 14, 15), 3), Sample((20, 21, 22, 23), 1)]
    store = FeatureStore(tmp_path / "s", samples, target)
    store.fill(target)
    recipe = Recipe(**(RECIPES["eagle3"] | {"kind": "eagle3", "steps": 3, "learning_rate": 0.0}))
    trainer = Trainer(target, store, store, recipe, tmp_path / "run")
    randomize(trainer.head, 3, 0.2)
    _, loss = trainer.train_step([0, 1], None)
    pairs = []  # (sample, row, step)
    for i, sample in enumerate(samples):
        for step in range(3):
            for p in range(len(sample.tokens)):
                if sample.answer_start <= p + 2 < len(sample.tokens) and p + 2 + step < len(sample.tokens):
                    pairs.append((i, p, step))
    assert [sum(step == s for *_, step in pairs) for s in range(3)] == [5, 3, 1]
    total, weights = 0.0, [1.0, 0.8, 0.64]
    for i, p, step in pairs:
        tokens, features = torch.tensor([samples[i].tokens]), store.features(i)[None].float()
        with torch.no_grad():
            out = list(unroll(trainer.head, tokens, features, torch.tensor([[p]]), step + 1))[-1][0, 0]
            wanted = torch.softmax(target.logits(features[0, p + 1 + step]), -1)
            row = -(wanted * torch.log_softmax(trainer.head.logits(out), -1)).sum()
        total += row.item() * weights[step] / sum(weights) / sum(step == s for *_, s in pairs)
    assert loss == pytest.approx(total, rel=1e-4)


def test_figure_8_inputs():
    """What a recipe leaves out has no influence; `unshifted` reads the token of the row itself."""
    target = tiny_target()
    tokens, features = torch.arange(8)[None], torch.randn(1, 8, 64)
    rows = torch.tensor([[2, 3]])
    head = head_of("eagle1", target)
    shifted, unshifted = (next(unroll(head, tokens, features, rows, 1, ahead)) for ahead in (1, 0))
    moved = next(unroll(head, F.pad(tokens, (1, 0))[:, :-1], features, rows, 1, 1))
    assert torch.equal(unshifted, moved) and not torch.equal(shifted, unshifted)
    for left_out in (slice(0, 64), slice(64, 128)):
        scale = torch.ones(128)
        scale[left_out] = 0
        scaled = head_of("eagle1", target)
        scaled.fc = ScaledLinear(scaled.fc, scale)
        one = next(unroll(scaled, tokens, features, rows, 1))
        others = (tokens.flip(1), features) if left_out.start == 0 else (tokens, torch.randn(1, 8, 64))
        assert torch.equal(next(unroll(scaled, *others, rows, 1)), one)
        plain = scaled.fc.plain()
        scaled.fc = plain
        torch.testing.assert_close(next(unroll(scaled, tokens, features, rows, 1)), one)


def test_features_are_the_targets_own_and_resume(tmp_path):
    """Shared prefix, batches and blocks change nothing: every row equals a forward over its sequence alone."""
    target = tiny_target()
    generator = torch.Generator().manual_seed(0)
    samples = [Sample((1, 2, 3, *torch.randint(64, (n,), generator=generator).tolist()), 5) for n in range(2, 24)]
    store = FeatureStore(tmp_path / "s", samples, target)
    store.fill(target, 40, limit=10)
    assert len(store) == 10
    target.taps = (1, 2)  # a head that reads more: what is there stays, the rest is added
    again = FeatureStore(tmp_path / "s", samples, target)
    assert len(again) == 0
    again.fill(target, 40)
    assert len(store) == len(again) == 22
    target.taps = (0,)
    FeatureStore(tmp_path / "s", samples, target).fill(target, 40, limit=5)  # takes nothing away from the others
    assert len(store) == len(again) == 22
    target.taps = (1, 2)
    for i, sample in enumerate(samples):
        cache = target.new_cache(1, 40)
        ids = torch.tensor([sample.tokens])
        with torch.inference_mode():
            alone = target(ids, torch.arange(ids.shape[1])[None], torch.zeros(1, dtype=torch.int64), None, cache)
        torch.testing.assert_close(again.features(i).float(), alone[0], atol=5e-3, rtol=2e-3)
        assert torch.equal(store.features(i), again.features(i)[:, :64])
    for other in ((samples[:-1], target), (samples, tiny_target(5))):  # other data, another target: nothing is reused
        assert len(FeatureStore(tmp_path / "s", *other)) == 0


def test_chunked_cross_entropy_equals_autograd():
    """With rows past a block, distributions that several rows share, and the weight trained too."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2500, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    target, index, share = torch.randn(900, 40).softmax(-1), torch.arange(2500) % 900, torch.rand(2500)
    mine = cross_entropy(hidden, weight, target, index, share)
    plain = (F.cross_entropy(hidden @ weight.T, target[index], reduction="none") * share).sum()
    torch.testing.assert_close(mine, plain)
    for ours, wanted in zip(
        torch.autograd.grad(3 * mine, (hidden, weight)), torch.autograd.grad(3 * plain, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


def conversations(count):
    """Rows whose answers follow a rule that a small head can learn."""
    return [
        {
            "prompt": chr(40 + i % 20) * 3,
            "answer": "".join(chr(40 + (i + 3 * j) % 20) for j in range(12)),
            "finished": True,
        }
        for i in range(count)
    ]


def test_samples_end_marks_and_what_is_left_out():
    tokenizer = byte_tokenizer(64, (2,))
    rows = [
        *conversations(2),
        {"prompt": "a", "answer": "b" * 5, "looping": True},
        {"prompt": "c", "answer": "d" * 500},
    ]
    samples = make_samples(rows, tokenizer, None, 64)
    assert len(samples) == 2 and samples[0].tokens[-1] == 2
    assert list(samples[0].tokens[: samples[0].answer_start]) == tokenizer.encode_prompt(rows[0]["prompt"])
    vocabulary = draft_vocabulary([Sample((9, 9, 9, 1, 5, 5, 3), 3)], 2)
    assert vocabulary.tolist() in ([1, 5], [3, 5])  # 5 twice, then one of the singles; ascending; prompt not counted


@pytest.fixture(params=["eagle1", "eagle3"])
def stores(request, tmp_path):
    """(recipe, target, train, held)."""
    target, tokenizer = tiny_target(num_layers=6), byte_tokenizer(64, (2,))
    recipe = RECIPES[request.param] | {"kind": request.param, "steps": 2} | RECIPE
    if request.param == "eagle3":
        target.taps = default_taps(6)
    samples = make_samples(conversations(60), tokenizer, None, 64)
    held, train = FeatureStore(tmp_path / "h", samples[:10], target), FeatureStore(tmp_path / "t", samples[10:], target)
    held.fill(target)
    train.fill(target)
    return recipe, target, train, held


RECIPE = {"epochs": 20, "batch_tokens": 128, "learning_rate": 3e-3, "warmup": 5, "token_weight": 1.0}


@pytest.mark.parametrize("quant", [None, "int8"])
def test_a_run_learns_and_its_head_is_used_as_trained(tmp_path, stores, quant):
    """From training through a file to the head that drafts; its card, its draft vocabulary and its kind with it."""
    recipe, target, train, held = stores
    trainer = Trainer(target, train, held, Recipe(**(recipe | {"draft_vocab": 30})), tmp_path / "run")
    before = trainer.evaluate()["top"]
    trainer.run(evaluate_every=50)
    after = trainer.evaluate()
    assert after["top"][0] > before[0] + 0.3 and after["top"] == sorted(after["top"])
    assert after["alpha"][0] == after["top"][0]
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["held"] == after and {"feature", "token"} <= set(log[0])
    batch = trainer.held_batches.load([0, 1])
    with torch.no_grad():
        trained = trainer.passes(batch, 1)[0]
        save_head(trainer.finished(), tmp_path / "head", {"steps": trainer.step}, torch.float32, quant)
        head = load_head(tmp_path / "head", target, dense())
        assert type(head) is type(trainer.head) and head.card == {"steps": trainer.step}
        assert torch.equal(head.draft_ids, trainer.head.draft_ids)
        target.set_context(64)
        head.bind(target, 64)
        assert target.feature_size == train.features(0).shape[1]
        width = batch.tokens.shape[1]
        out = head(
            F.pad(batch.tokens[:, 1:], (0, 1)), batch.features, torch.arange(width).expand(2, -1),
            torch.zeros(2, dtype=torch.int64), None, 0, head.new_cache(2, 64),
        )  # fmt: skip
    out = out.gather(1, batch.rows[..., None].expand(-1, -1, 64))[batch.room > 0]
    trained = trained[batch.room > 0]
    error = float((out - trained).norm() / trained.norm())
    assert error < 1e-4 if quant is None else 1e-4 < error < 0.03


def test_interrupted_run_resumes_to_the_same_weights(tmp_path, stores):
    recipe, target, train, held = stores
    changes, recipe = recipe, Recipe(**(recipe | {"epochs": 2}))
    whole = Trainer(target, train, held, recipe, tmp_path / "whole")
    whole.run()
    first = Trainer(target, train, held, recipe, tmp_path / "parts")
    stop = first.total // 2
    for group in first.batches.epoch(0)[:stop]:
        first.train_step(group, None)
        first.step += 1
    first.save()
    second = Trainer(target, train, held, recipe, tmp_path / "parts")
    assert second.resume() and second.step == stop
    second.run()
    for a, b in zip(whole.head.parameters(), second.head.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    other = Trainer(target, train, held, Recipe(**(changes | {"noise": 0.2})), tmp_path / "parts")
    with pytest.raises(FasteaError, match="noise"):
        other.resume()
    fewer = Trainer(target, train, held, recipe, tmp_path / "parts", limit=20)
    with pytest.raises(FasteaError, match="data"):
        fewer.resume()
    reduced = Trainer(target, train, held, recipe, tmp_path / "parts", init=halved(first.head, recipe, target))
    with pytest.raises(FasteaError, match="head that it started from"):
        reduced.resume()


def halved(head, recipe, target):
    """A fresh head over half of the vocabulary."""
    return new_head(target, recipe, torch.arange(0, 64, 2))


def test_a_recipe_says_what_cannot_be():
    for changes, message in (
        ({"kind": "eagle2"}, "known are eagle1 and eagle3"),
        ({"inputs": "features"}, "feature.shifted"),
        ({"steps": 0}, "--steps"),
        ({"kind": "eagle3", "feature_weight": 0.1}, "EAGLE-3 has no feature loss"),
        ({"kind": "eagle3", "feature_weight": 0.0, "inputs": "token"}, "reads all its inputs"),
        ({"feature_weight": 0.0, "token_weight": 0.0}, "nor both 0"),
        ({"token_weight": -1.0}, "must not be negative"),
        ({"warmup": 0}, "--warmup 0"),
    ):
        with pytest.raises(FasteaError, match=message):
            Recipe(**changes)
    with pytest.raises(FasteaError, match="--kv-heads 3"):
        new_head(tiny_target(), Recipe(kv_heads=3), None)


def test_a_start_from_a_head_without_an_input(tmp_path, stores):
    """Figure 8's inputs that are left out have no weight, and no division by it."""
    recipe, target, train, held = stores
    if recipe["kind"] == "eagle3":
        return
    init = new_head(target, Recipe(), None)
    trainer = Trainer(target, train, held, Recipe(**(recipe | {"inputs": "token"})), tmp_path / "run", init=init)
    trainer.train_step([0, 1], None)
    head = trainer.finished()
    assert head.fc.weight.isfinite().all() and (head.fc.weight[:, 64:] == 0).all() and head.fc.weight[:, :64].any()


def test_batches_go_on_over_epochs_of_different_size():
    """Every sample once an epoch, no batch lost or repeated at the seams, from whatever step a run resumes."""

    samples = [Sample(tuple(range(2 + (7 * i) % 90)), 1) for i in range(1500)]
    batches = Batches(SimpleNamespace(samples=samples), list(range(1500)), 512, 3)  # type: ignore[arg-type]
    sizes = [len(batches.epoch(n)) for n in range(8)]
    assert len(set(sizes)) > 1  # or this test shows nothing
    stream = batches.following(0)
    seen = [next(stream) for _ in range(sum(sizes))]
    for n in range(8):
        part = seen[sum(sizes[:n]) : sum(sizes[: n + 1])]
        assert sorted(i for group in part for i in group) == list(range(1500))
    for step in (1, sizes[0] - 1, sizes[0], sizes[0] + 1, sum(sizes[:5]), sum(sizes[:7])):
        assert next(batches.following(step)) == seen[step]


def test_time_budget_ends_a_run(tmp_path, stores):
    recipe, target, train, held = stores
    trainer = Trainer(target, train, held, Recipe(**(recipe | {"epochs": 10000})), tmp_path / "run")
    trainer.run(budget=1.0)
    assert 0 < trainer.step < trainer.total and (tmp_path / "run" / "checkpoint.pt").exists()
    assert trainer.rate(1.0) < 0.05 * trainer.recipe.learning_rate


def test_answers_are_the_targets_own_and_resume(tmp_path):
    """Decoded in batches whose rows end at different places, they are what the model writes alone."""
    target = tiny_target()
    target.set_context(64)
    generator = Generator(target, byte_tokenizer(64), None, max_seq_len=64)
    mark = generator.generate("abc", max_new_tokens=10).ids[4]
    target.config = replace(target.config, eos_ids=(mark,))
    prompts = ["abc", "de", "fghi", "jk", "lm", "n" * 40, "opqrst", "u"]
    out = tmp_path / "answers.jsonl"
    write_answers(generator, prompts[:2], out, batch=2, max_new_tokens=10)
    with out.open("a") as f:
        f.write('{"prompt": "half a li')  # an interruption
    write_answers(generator, prompts, out, batch=5, max_new_tokens=10)
    rows = read_lines(out)
    assert [r["prompt"] for r in rows[:2]] == prompts[1::-1]  # the shorter one first
    assert sorted(r["prompt"] for r in rows) == sorted(prompts)
    for row in rows:
        alone = generator.generate(row["prompt"], max_new_tokens=10)
        assert row["ids"] == alone.ids and row["answer"] == alone.text
        assert row["finished"] == (alone.finish_reason == "stop") and not row["looping"]
    assert len({len(r["ids"]) for r in rows}) > 1, "rows that ended early are a part of this test"


def test_prompts_without_room_for_an_answer_are_left_out(tmp_path, capsys):
    target = tiny_target()
    target.set_context(64)
    generator = Generator(target, byte_tokenizer(64), None, max_seq_len=64)
    out = tmp_path / "answers.jsonl"
    write_answers(generator, ["a" * 54, "a" * 55, "a" * 99, ""], out, batch=4, max_new_tokens=10)
    assert [len(r["prompt"]) for r in read_lines(out)] == [54]
    assert "3 of 4 prompts are left out: empty or longer than 54 tokens" in capsys.readouterr().err
    with pytest.raises(FasteaError, match="temperature -1"):
        write_answers(generator, ["a"], out, batch=4, max_new_tokens=10, temperature=-1.0)


def test_answers_that_loop_are_cut_and_marked():
    for ids, at in (([1, 2, 3, 4] * 9, 20), ([7] * 30, 8), ([9, *[1, 2, 3, 4, 5] * 9], 25)):
        answer = Growing(100)
        while not answer.ended:
            answer.push(ids[len(answer.ids)], frozenset({2000}))
        assert answer.looping and not answer.finished and len(answer.ids) == at
    calm = Growing(100)
    for token in [*range(99), 2000]:
        assert not calm.ended
        calm.push(token, frozenset({2000}))
    assert calm.ended and calm.finished and not calm.looping
    short = Growing(3)
    for token in (1, 1, 1):
        short.push(token, frozenset())
    assert short.ended and not short.finished and not short.looping


def test_sampled_answers_follow_the_likeliest_ids():
    """20,000 draws at temperature 0.5: frequencies of softmax(2 x), renormalised over the likeliest 50 of 60 ids."""
    logits = torch.linspace(-2, 2, 60)[torch.randperm(60, generator=torch.Generator().manual_seed(1))]
    random = torch.Generator().manual_seed(2)
    drawn = choose(logits.expand(20_000, -1), 0.5, random)
    wanted = torch.exp(2 * logits).where(logits >= logits.sort(descending=True).values[LIKELIEST - 1], 0)
    wanted /= wanted.sum()
    found = torch.bincount(drawn, minlength=60) / 20_000
    assert not found[wanted == 0].any() and (found - wanted).abs().sum() / 2 < 0.03
    assert choose(logits.expand(3, -1), 0.0, random).tolist() == [int(logits.argmax())] * 3


@pytest.mark.parametrize("text", ["", "not json\n", '{"answer": "x"}\n', "[1]\n"])
def test_bad_data_files_are_refused(tmp_path, text):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(FasteaError, match=r"not readable|every line"):
        read_lines(file)


def test_acceptance_table_counts_trials_and_hits():
    from fastea.round import Outcome
    from fastea.tree import Tree

    table = AcceptanceTable(Tree([(0,), (1,), (0, 0)], "t"))
    paths = torch.tensor([[0, 1, 3], [0, 2, 2], [0, 1, 2]])  # accepted: 0 then 00; 1 alone; nothing
    table.add(Outcome(paths, torch.tensor([3, 2, 1]), paths, torch.ones(3).bool()))
    assert table.trials[1:].tolist() == [[3, 3], [1, 0]] and table.hits[1:].tolist() == [[1, 1], [1, 0]]
    assert table.rates() == [[0.3333, 0.3333], [1.0, None]]
