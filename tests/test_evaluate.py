"""`scripts/evaluate.py`, `compare.py` and `demo.py` as commands, on a tiny checkpoint."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from test_scripts import ROOT, lines, script

from fastea.evaluation import speed
from fastea.evaluation.exactness import TINY, total_variation
from fastea.evaluation.questions import read_questions
from fastea.loading import load

TURNS = [{"turns": ["one two", "more"], "category": "a"}, {"turns": ["three"], "category": "b"}]


def report(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_speed_prints_and_writes_tables_and_plots_and_goes_on(folder, tmp_path):
    out = tmp_path / "out"
    argv = ["speed", "--checkpoint", folder, "--questions", lines(tmp_path / "q.jsonl", TURNS), "--out", out]
    argv += ["--max-new-tokens", 16, "--max-seq-len", 256, "--tree", "chain:2", "--dtype", "float32"]
    done = script("evaluate.py", *argv)
    found = report(done)
    assert set(found["results"]) == {"T = 0", "T = 1"} and set(found["results"]["T = 0"]) == {"a", "b", "in all"}
    row = found["results"]["T = 0"]["in all"]
    assert row["questions"] == 2 and row["equal"] == "3 of 3" and row["speedup"] > 0 and len(row["alpha"]) == 5
    assert row["speedup"] == pytest.approx(row["tokens_per_s"] / row["plain_tokens_per_s"], rel=0.3)
    assert "n-alpha: how often" in done.stdout and "| in all | 2 |" in (out / "speed.md").read_text()
    assert json.loads((out / "speed.json").read_text()) == found
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert (out / f"speed.{kind}").read_bytes().startswith(start)
    records = [json.loads(line) for line in (out / "speed.jsonl").read_text().splitlines()]
    assert len(records) == 4
    (out / "speed.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records[:3]))  # as if interrupted
    again = report(script("evaluate.py", *argv))
    kept = [json.loads(line) for line in (out / "speed.jsonl").read_text().splitlines()]
    assert kept[:3] == records[:3] and len(kept) == 4 and again["results"]["T = 0"] == found["results"]["T = 0"]
    other = report(script("evaluate.py", *argv, "--tree", "chain:3", "--temperature", 0))  # other settings: anew
    assert set(other["results"]) == {"T = 0"} and other["tree"] == "chain:3"


def test_the_figures_of_a_speed_run_by_hand():
    """Two questions: 3 and 2 times as fast; 4 rounds with 1, 3, 0 and 2 accepted tokens."""

    def turn(plain, fast, accepted, equal=True):
        return {"context": 9, "equal": equal, "accepted": accepted, "plain": plain, "fast": fast}

    records = [
        {"temperature": 0, "task": "t", "category": "a", "question": 0, "chain": [[2, 1], [4, 2]],
         "turns": [turn([10, 1.0], [15, 0.5], [1, 3])]},
        {"temperature": 0, "task": "t", "category": "b", "question": 1, "chain": [[2, 0], [4, 0]],
         "turns": [turn([10, 2.0], [10, 1.0], [0]), turn([10, 2.0], [10, 1.0], [2], equal=False)]},
    ]  # fmt: skip
    row = speed.tables(records)["T = 0"]["in all"]
    assert row["speedup"] == 2.5 and row["tau"] == 2.5 and row["equal"] == "2 of 3" and row["alpha"] == [0.5, 0.5]
    assert row["plain_tokens_per_s"] == 7.5 and row["tokens_per_s"] == 20.0
    assert speed.histogram(records) == {1: 1, 2: 1, 3: 1, 4: 1}
    assert speed.tables(records[:1])["T = 0"]["a"]["speedup"] == 3.0
    two = speed.tables([records[0], records[1] | {"task": "u"}])["T = 0"]
    assert set(two) == {"t", "u", "in all"}


def test_a_second_turn_is_asked_after_the_models_own_answer(folder, tmp_path):
    question = read_questions([lines(tmp_path / "mt_bench.jsonl", TURNS)])[0]
    fast = load(folder, tree="chain:2", exact=True)
    options = {"max_new_tokens": 12, "temperature": 0.0, "seed": 0}
    record = speed.ask(fast.beside(None), fast, None, question, options)
    first = fast.generate("one two", **options).text
    messages = [("user", "one two"), ("assistant", first), ("user", "more")]
    second = fast.encode([{"role": role, "content": text} for role, text in messages])
    assert [turn["context"] for turn in record["turns"]] == [len(fast.encode("one two")), len(second)]
    assert record["task"] == "mt_bench" and all(turn["equal"] for turn in record["turns"])


def test_exactness_and_acceptance_over_questions(folder, tmp_path):
    common = ["--checkpoint", folder, "--questions", lines(tmp_path / "q.jsonl", TURNS), "--max-new-tokens", 16]
    common += ["--out", tmp_path / "out"]
    for more in ([], ["--temperature", 0.9, "--seed", 3]):
        found = report(script("evaluate.py", "exactness", *common, "--exact", *more))
        assert found["equal"] == found["questions"] == 2 and found["differences"] == []
        assert found["tokens_before_a_difference"] == found["tokens"]
        assert found["distribution"]["total_variation"] < found["distribution"]["bound"]
    done = script("evaluate.py", "acceptance", *common, "--tree", "chain:2")
    found = report(done)
    assert set(found["tokens_per_round"]) == {"a", "b", "in all"} and found["tree"] == "chain:2"
    assert "| in all |" in done.stdout and "| in all |" in (tmp_path / "out" / "acceptance.md").read_text()
    bad = lines(tmp_path / "x.jsonl", [{"q": 1}])
    likeliest = ["acceptance", *common[2:], "--children", "likeliest"]
    for wrong in (["acceptance", "--questions", bad], ["speed"], ["batch", *common[2:], "--batch", 3], likeliest):
        done = script("evaluate.py", *wrong, "--checkpoint", folder)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_wrong_rule_is_seen_in_the_distribution(monkeypatch):
    """A walk that accepts every first child is far outside the bound."""
    from fastea import round as rounds

    right = total_variation(400)
    assert right["total_variation"] < right["bound"] < 0.3 and TINY == 8
    honest = rounds.walk

    def greedy(tokens, logits, keys, parent, sampling):
        sure = torch.full_like(logits[:, 0], -1e9).scatter_(1, tokens[:, 1:2], 0.0)
        return honest(tokens, torch.cat((sure[:, None], logits[:, 1:]), 1), keys, parent, sampling)

    monkeypatch.setattr(rounds, "walk", greedy)
    wrong = total_variation(400)
    assert wrong["total_variation"] > wrong["bound"]


def test_throughput_of_batches(folder, tmp_path):
    rows = [{"prompt": f"say {i}"} for i in range(4)]
    argv = ["batch", "--checkpoint", folder, "--questions", lines(tmp_path / "q.jsonl", rows), "--batch", 1, 2]
    argv += ["--max-new-tokens", 12, "--max-seq-len", 128, "--tree", "chain:2", "--out", tmp_path / "out"]
    found = report(script("evaluate.py", *argv))
    assert [row["batch"] for row in found["sizes"]] == [1, 2] and all(row["speedup"] > 0 for row in found["sizes"])
    assert found["best_ratio"] == pytest.approx(found["best"]["fast"] / found["best"]["plain"], rel=0.01)
    assert "| best |" in (tmp_path / "out" / "batch.md").read_text()


def test_perplexity_by_windows(folder, tmp_path):
    """Every token but the first is scored once, after as much of the text before it as the window holds."""
    text = "the quick brown fox jumps over the lazy dog and runs away"
    (tmp_path / "t.txt").write_text(text)
    common = ["perplexity", "--checkpoint", folder, "--text", tmp_path / "t.txt", "--window", 20, "--stride", 7]
    common += ["--out", tmp_path / "out"]
    done = script("evaluate.py", *common, "--dtype", "float32")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["tokens"] == len(text) - 1 and report["kl_divergence"] == 0
    model = load(folder, head="none", dtype="float32", max_seq_len=64)
    ids, loss = model.encode(text, raw=True), 0.0
    for at in range(1, len(ids)):
        end = 20 if at < 20 else 20 + -(-(at - 19) // 7) * 7  # of the window that scores token `at`
        before = ids[max(0, min(end, len(ids)) - 20) : at]
        state = model.state(1)
        with torch.inference_mode():
            model.prefill(state, 0, before)
            logits = model.model.logits(state.features[0, 0])[: len(model.tokenizer)]
            loss -= torch.log_softmax(logits, -1)[ids[at]].item()
    assert abs(report["perplexity"] / math.exp(loss / (len(ids) - 1)) - 1) < 1e-3
    quantized = json.loads(script("evaluate.py", *common, "--quant", "int4").stdout.splitlines()[-1])
    assert quantized["kl_divergence"] > 0 and quantized["reference_perplexity"] == report["perplexity"]
    for wrong in (["--stride", 20], ["--text", tmp_path / "absent.txt"]):
        bad = script("evaluate.py", *common, *wrong)
        assert bad.returncode == 2 and len(bad.stderr.strip().splitlines()) == 1
    assert script("evaluate.py", "acceptance").returncode == 2


def test_a_table_beside_transformers(folder, tmp_path):
    """With transformers' own loader of the same folder; a peer that is absent is left out."""
    pytest.importorskip("transformers")
    prompts = lines(tmp_path / "p.jsonl", [{"prompt": "ab"}, {"prompt": "c d"}])
    argv = ["--checkpoint", folder, "--prompts", prompts, "--rounds", 1, "--max-new-tokens", 8, "--max-seq-len", 128]
    argv += ["--peers", "transformers", "llama.cpp", "--python", "llama.cpp=" + sys.executable, "--tree", "chain:2"]
    argv += ["--dtype", "bfloat16", "--out", tmp_path / "out"]
    done = script("compare.py", *argv)
    found = report(done)
    assert set(found["engines"]) == {"plain", "speculative", "transformers"} and "left out: llama.cpp" in done.stderr
    assert all(row["tokens_per_s"] > 0 for row in found["engines"].values())
    assert found["engines"]["speculative"]["ratio"] == 1 and found["engines"]["plain"]["equal"] == "2 of 2"
    assert "| transformers |" in (tmp_path / "out" / "compare.md").read_text()
    dies = tmp_path / "dies"  # a peer that starts, and ends at the first question
    dies.write_text('#!/bin/sh\necho "{\\"version\\": \\"1\\"}"\nread line\nexit 7\n')
    dies.chmod(0o755)
    done = script("compare.py", *argv[:-2], "--peers", "llama.cpp", "--python", f"llama.cpp={dies}")
    assert set(report(done)["engines"]) == {"plain", "speculative"}
    assert "left out: llama.cpp: it ended without a word, exit code 7" in done.stderr
    bad = script("compare.py", "--python", "nobody=python")
    assert bad.returncode == 2 and len(bad.stderr.strip().splitlines()) == 1


def test_the_race_is_drawn_and_recorded(folder, tmp_path):
    """At 80 columns; the plain side ends later; nothing is wider than the terminal."""
    argv = ["--checkpoint", folder, "--max-new-tokens", 20, "--tree", "chain:2", "--width", 80, "--dtype", "float32"]
    argv += ["--max-seq-len", 256, "--prompt", "say [b]hello[/c]"]  # which is no markup
    done = script("demo.py", *argv, "--record", tmp_path / "race.svg")
    assert done.returncode == 0, done.stderr
    assert "say [b]hello[/c]" in done.stdout
    assert "speculative" in done.stdout and "the same text" in done.stdout and "ended: " in done.stdout
    assert (tmp_path / "race.svg").read_text().startswith("<svg")
    done = script("demo.py", *argv, "--record", tmp_path / "race.cast")
    header, *frames = [json.loads(line) for line in (tmp_path / "race.cast").read_text().splitlines()]
    assert header["version"] == 2 and frames and all(kind == "o" for _, kind, _ in frames)
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", frames[-1][2])
    assert max(map(len, plain.split("\r\n"))) <= 80 and "times as fast" in plain
    for wrong in (["--width", 40], ["--record", "x.gif"], ["--max-new-tokens", 1], ["--head", "none"]):
        done = script("demo.py", *argv, *wrong)
        assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith("demo: "), done.stderr


@pytest.mark.parametrize("name", ["answer", "callback", "batch"])
def test_the_examples_run(name, demo_gguf):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and len(done.stdout) > 40, done.stderr


def test_auto_beside_fixed_trees(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompts = lines(tmp_path / "p.jsonl", [{"prompt": "ab"}, {"prompt": "c d"}])
    argv = ["--checkpoint", folder, "--prompts", prompts, "--runs", 1, "--max-new-tokens", 9, "--max-seq-len", 128]
    argv += ["--trees", "chain:2", "dynamic:6,3,2", "--out", tmp_path / "out"]
    done = script("tree_grid.py", *argv)
    found = report(done)
    for kind in ("greedy", "temperature 0.8"):
        trees = found[kind]["trees"]
        assert set(trees) == {"auto", "none", "chain:2", "dynamic:6,3,2"} and trees["none"]["tokens_per_round"] == 1
        assert max(row["share"] for name, row in trees.items() if name != "auto") == 1
        assert f"auto took {found[kind]['chosen']}" in next((tmp_path / "out").glob("trees-*.md")).read_text()
    bad = script("tree_grid.py", *argv, "--head", "none")
    assert bad.returncode == 2 and "there is no head" in bad.stderr
