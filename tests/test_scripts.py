"""The scripts as commands, on a tiny checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

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
    assert json.loads(done.stdout.splitlines()[-1])["held_out"] == card["held_out"]
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
    used = script(
        "evaluate.py", "acceptance", "--checkpoint", folder, "--head", tmp_path / "head", "--questions", data,
        "--out", tmp_path / "used",
    )  # fmt: skip
    assert used.returncode == 0 and json.loads(used.stdout.splitlines()[-1])["tokens_per_round"]["in all"] >= 1


def test_train_an_eagle3_head(folder, deep_folder, tmp_path):
    """From prompts to a head in int8 that drafts, over the states inside the target that its file names."""
    data = lines(tmp_path / "prompts.jsonl", [{"prompt": f"say {i}"} for i in range(12)])
    argv = ["--kind", "eagle3", "--data", data, "--out", tmp_path / "head", "--work", tmp_path / "work"]
    argv += ["--held-out", 3, "--epochs", 2, "--warmup", 2, "--answer-tokens", 12, "--max-len", 64, "--steps", 2]
    argv += ["--acceptance-prompts", 2, "--draft-vocab", 40, "--save-quant", "int8"]
    done = script("train_head.py", "--checkpoint", deep_folder, *argv)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3] and config["fastea"]["recipe"]["kind"] == "eagle3"
    assert config["fastea"]["losses"]["feature"] == 0 and config["fastea"]["held_out"]["rows"] > 0
    with safe_open(tmp_path / "head" / "model.safetensors", "pt") as head:
        assert {"d2t", "t2d", "lm_head.codes", "midlayer.hidden_norm.weight", "fc.weight"} <= set(head.keys())
    used = load(deep_folder, head=tmp_path / "head", exact=True)
    plain = load(deep_folder, head="none", exact=True)
    assert used.generate("say 3", max_new_tokens=30).ids == plain.generate("say 3", max_new_tokens=30).ids
    more = script("train_head.py", "--checkpoint", deep_folder, *argv, "--init", tmp_path / "head", "--epochs", 1)
    assert more.returncode == 0, more.stderr
    for wrong, message in (
        (["--checkpoint", folder], "2 layers are too few"),
        (["--checkpoint", deep_folder, "--inputs", "token"], "always reads all its inputs"),
        (
            ["--checkpoint", deep_folder, "--kind", "eagle1", "--init", tmp_path / "head"],
            "not a head of the kind eagle1",
        ),
    ):
        done = script("train_head.py", *argv, *wrong)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_a_study_of_heads(deep_folder, tmp_path):
    """Each run once: the four inputs of the ablation, both kinds at each size."""
    rows = [{"prompt": f"say {i}", "answer": "abcdefgh"[i % 5 :] * 2, "finished": True} for i in range(40)]
    argv = ["--checkpoint", deep_folder, "--data", lines(tmp_path / "a.jsonl", rows), "--out", tmp_path / "out"]
    argv += ["--work", tmp_path / "work", "--held-out", 5, "--draft-vocab", 40, "--batch-tokens", 256]
    argv += ["--ablation-tokens", 60, "--sizes", 40, 120]
    done = script("head_study.py", *argv)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in (tmp_path / "out" / "study.jsonl").read_text().splitlines()]
    assert [r["inputs"] for r in runs[:4]] == ["feature+shifted", "feature+unshifted", "token", "feature"]
    assert [(r["kind"], r["tokens"]) for r in runs[4:]] == [(k, n) for n in (40, 120) for k in ("eagle1", "eagle3")]
    assert (tmp_path / "out" / "study.md").read_text().count("\n| ") == 2 * 2 + 8
    again = script("head_study.py", *argv)
    assert again.returncode == 0 and not again.stdout
    bad = script("head_study.py", *argv, "--sizes", 10**6)
    assert bad.returncode == 2 and len(bad.stderr.strip().splitlines()) == 1


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
