"""The scripts as commands, on a tiny checkpoint."""

import json
import math
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from fastea.loading import load

ROOT = Path(__file__).parent.parent


def script(name: str, *argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_train_a_head_from_prompts_alone(folder, tmp_path):
    """Prompts -> the target's answers -> features -> a head with its card, which then drafts; resumable."""
    data = lines(tmp_path / "prompts.jsonl", [{"prompt": f"say {i}"} for i in range(14)])
    argv = ["--checkpoint", folder, "--data", data, "--out", tmp_path / "head", "--work", tmp_path / "work"]
    argv += ["--held-out", 3, "--epochs", 2, "--warmup", 2, "--answer-tokens", 12, "--answer-batch", 5, "--max-len", 64]
    argv += ["--acceptance-prompts", 2, "--draft-vocab", 40, "--system", "be brief"]
    done = script("train_head.py", *argv)
    assert done.returncode == 0, done.stderr
    card = json.loads((tmp_path / "head" / "config.json").read_text())["fastea"]
    assert card["data"]["samples"] == 11 and card["steps"] > 0 and card["losses"]["token"] > 0
    assert set(card["acceptance"]) == {"greedy", "temperature 0.8"}
    assert json.loads(done.stdout.splitlines()[-1])["held_out_top"] == card["held_out_top"]
    assert (tmp_path / "head" / "training.png").exists() or "matplotlib" in done.stderr
    with safe_open(tmp_path / "head" / "model.safetensors", "pt") as head:
        assert len(head.get_tensor("draft_ids")) <= 40
    init = ["--init", tmp_path / "head", "--work", tmp_path / "more", "--out", tmp_path / "next", "--epochs", 1]
    more = script("train_head.py", *argv, *init)
    assert more.returncode == 0, more.stderr
    later = json.loads((tmp_path / "next" / "config.json").read_text())["fastea"]
    assert later["started_from"]["steps"] == card["steps"] and later["losses"]["token"] < card["losses"]["token"]
    answers = (tmp_path / "work" / "answers.jsonl").read_text()
    again = script("train_head.py", *argv, "--resume")
    assert again.returncode == 0 and "resumed at step" in again.stderr
    assert (tmp_path / "work" / "answers.jsonl").read_text() == answers
    used = script("evaluate.py", "acceptance", "--checkpoint", folder, "--head", tmp_path / "head", "--questions", data)
    assert used.returncode == 0 and json.loads(used.stdout.splitlines()[-1])["tokens_per_round"]["in all"] >= 1


def test_bad_training_input_is_one_line(folder, tmp_path):
    data = lines(tmp_path / "prompts.jsonl", [{"prompt": "a", "answer": "b"}])
    argv = ["--checkpoint", folder, "--data", data, "--out", tmp_path / "head", "--work", tmp_path / "work"]
    for more, message in (
        ([], "usable samples"),
        (["--held-out", 0], "held-out"),
        (["--data", "/absent.jsonl"], "/absent"),
    ):
        done = script("train_head.py", *argv, *more)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_exactness_and_acceptance_over_questions(folder, tmp_path):
    turns = [{"turns": ["one two", "more"], "category": "a"}, {"turns": ["three"], "category": "b"}]
    common = ["--checkpoint", folder, "--questions", lines(tmp_path / "q.jsonl", turns), "--max-new-tokens", 16]
    for more in ([], ["--temperature", 0.9, "--seed", 3]):
        done = script("evaluate.py", "exactness", *common, "--exact", *more)
        report = json.loads(done.stdout.splitlines()[-1])
        assert done.returncode == 0 and report["equal"] == report["questions"] == 2 and report["differences"] == []
    done = script("evaluate.py", "acceptance", *common, "--tree", "chain:2")
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["tokens_per_round"]) == {"a", "b", "in all"} and report["tree"] == "chain:2"
    assert "| in all |" in done.stdout
    bad = script(
        "evaluate.py", "acceptance", "--checkpoint", folder, "--questions", lines(tmp_path / "x.jsonl", [{"q": 1}])
    )
    assert bad.returncode == 2 and len(bad.stderr.strip().splitlines()) == 1


def test_perplexity_by_windows(folder, tmp_path):
    """Every token but the first is scored once, after as much of the text before it as the window holds."""
    text = "the quick brown fox jumps over the lazy dog and runs away"
    (tmp_path / "t.txt").write_text(text)
    common = ["perplexity", "--checkpoint", folder, "--text", tmp_path / "t.txt", "--window", 20, "--stride", 7]
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


def test_bench_reports_ratios_and_forced_acceptance(folder, tmp_path):
    prompts = lines(tmp_path / "p.jsonl", [{"prompt": "ab", "category": "x"}, {"prompt": "c d", "category": "y"}])
    common = ["--checkpoint", folder, "--prompts", prompts, "--runs", 1, "--max-new-tokens", 25, "--max-seq-len", 128]
    done = script("bench.py", *common, "--exact")
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert report["plain"]["tokens_per_s"] > 0 and report["speculative"]["tokens_per_s"] > 0
    assert abs(report["ratio"] - report["speculative"]["tokens_per_s"] / report["plain"]["tokens_per_s"]) < 0.01
    assert report["equal_texts"] == "2 of 2" and set(report["ratio_by_category"]) == {"x", "y"}
    assert set(report["speculative"]["ms_per_round"]) == {"draft", "verify", "accept"}
    for shares, wanted in (("1,1", 3.0), ("0.5,1", 2.0)):
        done = script("bench.py", *common, "--tree", "chain:2", "--synthetic-acceptance", shares)
        report = json.loads(done.stdout.splitlines()[-1])
        assert report["speculative"]["tokens_per_round"] == wanted and "SYNTHETIC" in done.stdout
    bad = script("bench.py", *common, "--tree", "chain:2", "--synthetic-acceptance", "0.5,0.5,0.5")
    assert bad.returncode == 2 and len(bad.stderr.strip().splitlines()) == 1
