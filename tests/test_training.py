"""Training: which rows are supervised, what the losses are, and that a run learns, stops and resumes."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from conftest import byte_tokenizer, dense, tiny_target
from fastea.config import FasteaError
from fastea.generator import Generator
from fastea.head_files import load_head, save_head
from fastea.training.acceptance import AcceptanceTable
from fastea.training.answers import is_looping, write_answers
from fastea.training.data import Sample, draft_vocabulary, make_samples, read_lines, supervised_rows
from fastea.training.features import FeatureStore
from fastea.training.losses import cross_entropy
from fastea.training.train import Batches, Recipe, Trainer, forward_rows, head_inputs


def test_rows_are_aligned_with_the_tokens_they_predict():
    """Prompt a b c, answer D E F: row p reads f_p and t_{p+1} and is trained iff token p + 2 is an answer token."""
    rows = supervised_rows(6, 3)
    #        row:    0 (f_a, b) -> c   1 (f_b, c) -> D   2 -> E   3 -> F   4 -> past the end   5
    assert rows.tolist() == [False, True, True, True, False, False]
    assert supervised_rows(4, 1).tolist() == [True, True, False, False]  # token 1 has no row: f_{-1} does not exist


def test_inputs_and_targets_line_up(tmp_path):
    """Row p gets the embedding of t_{p+1} beside f_p, and its target is f_{p+1}."""
    target = tiny_target()
    sample = Sample((10, 11, 12, 13, 14), 3)
    store = FeatureStore(tmp_path / "s", [sample], target)
    store.fill(target)
    tokens, features, rows = Batches(store, [0], 100, 0).load([0])
    inputs = head_inputs(target, torch.ones(128), tokens, features, 0.0, 0)
    for p in range(4):
        assert torch.equal(inputs[0, p, :64], target.embed.weight[sample.tokens[p + 1]])
        assert torch.equal(inputs[0, p, 64:], store.features(0)[p].float())
    wanted = features[:, 1:][rows[:, :-1]]
    assert torch.equal(wanted, store.features(0)[[2, 3]].float())  # rows 1 and 2 predict tokens 3 and 4
    assert rows[0].tolist() == [False, True, True, False, False]
    noisy = head_inputs(target, torch.ones(128), tokens, features, 0.1, 1)
    assert torch.equal(noisy[..., :64], inputs[..., :64])
    assert 0.09 < (noisy - inputs)[..., 64:].abs().max() <= 0.1 + 1e-6


def test_features_are_the_targets_own_and_resume(tmp_path):
    """Shared prefix, batches and blocks change nothing: every row equals a forward over its sequence alone."""
    target = tiny_target()
    generator = torch.Generator().manual_seed(0)
    samples = [Sample((1, 2, 3, *torch.randint(64, (n,), generator=generator).tolist()), 5) for n in range(2, 24)]
    store = FeatureStore(tmp_path / "s", samples, target)
    store.fill(target, batch=4, limit=10)
    assert len(store) == 10
    again = FeatureStore(tmp_path / "s", samples, target)
    assert len(again) == 10
    again.fill(target, batch=4)
    for i, sample in enumerate(samples):
        cache = target.new_cache(1, 40)
        ids = torch.tensor([sample.tokens])
        with torch.inference_mode():
            alone = target(ids, torch.arange(ids.shape[1])[None], torch.zeros(1, dtype=torch.int64), None, cache)
        torch.testing.assert_close(again.features(i).float(), alone[0], atol=5e-3, rtol=2e-3)
    for other in ((samples[:-1], target), (samples, tiny_target(5))):  # other data, another target: nothing is reused
        assert len(FeatureStore(tmp_path / "s", *other)) == 0


def test_chunked_cross_entropy_equals_autograd():
    torch.manual_seed(0)
    predicted, feature = torch.randn(1100, 16, requires_grad=True), torch.randn(1100, 16)
    weight = torch.randn(40, 16)
    mine = cross_entropy(predicted, feature, weight)
    (grad,) = torch.autograd.grad(3 * mine, predicted)
    plain = F.cross_entropy(predicted @ weight.T, (feature @ weight.T).softmax(-1))
    (wanted,) = torch.autograd.grad(3 * plain, predicted)
    torch.testing.assert_close(mine, plain)
    torch.testing.assert_close(grad, wanted, atol=1e-6, rtol=1e-4)


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


@pytest.fixture
def stores(tmp_path):
    target, tokenizer = tiny_target(), byte_tokenizer(64, (2,))
    samples = make_samples(conversations(60), tokenizer, None, 64)
    held, train = FeatureStore(tmp_path / "h", samples[:10], target), FeatureStore(tmp_path / "t", samples[10:], target)
    held.fill(target)
    train.fill(target)
    return target, train, held


RECIPE = {"epochs": 40, "batch_tokens": 128, "learning_rate": 3e-3, "warmup": 5, "token_weight": 1.0}


def test_a_run_learns_and_its_head_is_used_as_trained(tmp_path, stores):
    target, train, held = stores
    trainer = Trainer(target, train, held, Recipe(**RECIPE), tmp_path / "run")
    before = trainer.evaluate()["top"]
    trainer.run(evaluate_every=50)
    after = trainer.evaluate()["top"]
    assert after[0] > before[0] + 0.3 and after == sorted(after)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["held"]["top"] == after and {"feature", "token"} <= set(log[0])
    tokens, features, rows = trainer.held_batches.load([0, 1])
    with torch.no_grad():
        trained = forward_rows(trainer.head, head_inputs(target, trainer.scale, tokens, features, 0.0, 0), rows)
        save_head(trainer.finished(), tmp_path / "head", {}, torch.float32)
        head = load_head(tmp_path / "head", target, dense())
        target.set_context(64)
        head.bind(target, 64)
        width = tokens.shape[1]
        out = head(
            F.pad(tokens[:, 1:], (0, 1)), features, torch.arange(width).expand(2, -1),
            torch.zeros(2, dtype=torch.int64), None, 0, head.new_cache(2, 64),
        )  # fmt: skip
    torch.testing.assert_close(out[rows], trained, atol=1e-3, rtol=1e-3)


def test_interrupted_run_resumes_to_the_same_weights(tmp_path, stores):
    target, train, held = stores
    recipe = Recipe(**(RECIPE | {"epochs": 2}))
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
    other = Trainer(target, train, held, Recipe(**(RECIPE | {"noise": 0.2})), tmp_path / "parts")
    with pytest.raises(FasteaError, match="noise"):
        other.resume()
    fewer = Trainer(target, train, held, recipe, tmp_path / "parts", limit=20)
    with pytest.raises(FasteaError, match="data"):
        fewer.resume()


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
    target, train, held = stores
    trainer = Trainer(target, train, held, Recipe(**(RECIPE | {"epochs": 10000})), tmp_path / "run")
    trainer.run(budget=1.0)
    assert 0 < trainer.step < trainer.total and (tmp_path / "run" / "checkpoint.pt").exists()
    assert trainer.rate(1.0) < 0.05 * trainer.recipe.learning_rate


def test_answers_are_the_targets_own_and_resume(tmp_path):
    target = tiny_target()
    target.set_context(64)
    generator = Generator(target, byte_tokenizer(64), None, max_seq_len=64)
    prompts = ["abc", "de", "fghi", "jk", "lm"]
    out = tmp_path / "answers.jsonl"
    write_answers(generator, prompts[:2], out, batch=2, max_new_tokens=10)
    with out.open("a") as f:
        f.write('{"prompt": "half a li')  # an interruption
    write_answers(generator, prompts, out, batch=2, max_new_tokens=10)
    rows = read_lines(out)
    assert [r["prompt"] for r in rows] == prompts
    for row in rows:
        assert row["ids"] == generator.generate(row["prompt"], max_new_tokens=10).ids


def test_looping():
    assert is_looping([1, 2, 3, 4] * 5) and not is_looping([1, 2, 3, 4] * 4 + [5])
    assert not is_looping(list(range(100)))


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
