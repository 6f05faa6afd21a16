"""The check that runs on a card, as far as it goes without one: a dry run, its messages, and that it notices faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.py"
PARTS = {"device", "correct", "rows", "gemm", "attention", "model", "demo", "tune"}

pytestmark = pytest.mark.kernels

# The same command with one fault in a kernel.
FAULTY = """
import sys, time
sys.path.insert(0, {folder!r})
import gpu_check
from fastea.kernels import gate, gemm
{fault}
sys.exit(gpu_check.main())
"""
WRONG_GATE = "right = gate.silu_mul\ngate.silu_mul = lambda *given: right(*given) * 1.01"
OTHER_ROWS = """
right = gemm.partials
gemm.partials = lambda x, *more: right(x, *more) * (1 + (len(x) > 8) * 2.0**-20)
"""
CRASH = "def gone(*given):\n    raise SystemExit(3)\ngate.silu_mul = gone"
HANG = "gate.silu_mul = lambda *given: time.sleep(1000)"


def run(*argv: object, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, argv)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def faulty(folder: Path, fault: str, *argv: object) -> tuple[int, dict]:
    script, out = folder / "faulty.py", folder / "found.json"
    script.write_text(FAULTY.format(folder=str(SCRIPT.parent), fault=fault))
    done = run(*argv, "--dry-run", "--out", out, script=script)
    return done.returncode, json.loads(out.read_text())["parts"]


def bad(part: dict) -> set[str]:
    return {verdict["what"] for verdict in part["verdicts"] if verdict["counts"] and not verdict["good"]}


def test_list_of_parts():
    done = run("--list")
    assert done.returncode == 0 and {line.split()[0] for line in done.stdout.splitlines()} == PARTS
    bounds = [int(line.split()[1]) for line in done.stdout.splitlines() if not line.startswith("tune")]
    assert sum(bounds) < 480


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_to_do():
    done = run()
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "CUDA" in done.stderr and "--dry-run" in done.stderr


@pytest.mark.parametrize("argv", [["speed"], ["rows", "speed", "--dry-run"], ["--fast"]])
def test_unknown_parts_and_flags_are_one_line(argv):
    done = run(*argv)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_dry_run(tmp_path):
    """Every part runs to its end, finds nothing wrong and keeps what it prints."""
    out = tmp_path / "found.json"
    done = run("--dry-run", "--out", out, "--patience", 3)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["dry_run"] and found["parts"].keys() == PARTS and "mean nothing" in done.stdout
    for part in found["parts"].values():
        assert part["good"] and part["finished"] and part["result"] == "good" and not bad(part)
        assert all(table["rows"] for table in part["tables"])
        assert all(table["title"] in done.stdout for table in part["tables"])
    assert all(len(found["parts"][name]["verdicts"]) > 10 for name in ("correct", "rows"))


def test_a_wrong_kernel_is_noticed(tmp_path):
    code, parts = faulty(tmp_path, WRONG_GATE, "correct")
    assert code == 1 and bad(parts["correct"]) == {"gate"} and parts["correct"]["result"] == "1 WRONG"


def test_rows_that_depend_on_their_number_are_noticed(tmp_path):
    code, parts = faulty(tmp_path, OTHER_ROWS, "rows", "attention")
    assert code == 1 and any(what.startswith("product") for what in bad(parts["rows"]))
    assert parts["attention"]["good"]


def test_a_part_that_crashes_loses_no_other(tmp_path):
    """And what it found before stays."""
    code, parts = faulty(tmp_path, CRASH, "correct", "device")
    assert code == 1 and parts["correct"]["result"] == "crashed, exit code 3" and parts["device"]["good"]
    assert not parts["correct"]["good"] and len(parts["correct"]["verdicts"]) > 5


def test_a_part_that_hangs_is_ended(tmp_path):
    code, parts = faulty(tmp_path, HANG, "correct", "--patience", 0.2)
    assert code == 1 and parts["correct"]["result"].startswith("ended after") and not parts["correct"]["good"]
