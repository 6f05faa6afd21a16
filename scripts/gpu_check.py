"""On a card: are the Triton kernels right, do rows keep their bits, and how fast is it all?

    python scripts/gpu_check.py                              # all parts but tune; under 8 minutes
    python scripts/gpu_check.py rows gemm --out rows.json
    python scripts/gpu_check.py --dry-run                    # every path in Triton's interpreter, at toy sizes

A part runs in a process of its own and is ended at its time bound; the others go on. Tables go to stdout as they grow,
everything into one JSON file. Exit code 1: a part found something wrong, crashed or was ended; 2: there is no GPU, or
no such part. Times are of CUDA graphs of many calls over several copies of the weights or caches, so that neither the
host nor the L2 cache shows. A floor is the time to read weights and cache once, at the bandwidth measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from fastea.flags import Parser
from gpu_comparisons import CORRECT, ROWS, judge
from gpu_harness import Check, Gpu, Interpreter, bandwidths
from gpu_times import attention_times, demo_model, gemm_times, model, tune


def device(c: Check) -> None:
    row = c.table("The card", "what", "")
    copied, read = bandwidths(c)
    versions = {"torch": torch.__version__, "its CUDA": torch.version.cuda, "Triton": triton.__version__}
    measured = {"Python": platform.python_version(), "copied, GB/s": copied, "read, GB/s": read}
    for name, value in (c.gpu.facts() | versions | measured).items():
        row(name, value)


# Parts as processes


class Part(NamedTuple):
    run: Callable[[Check], None]
    bound: int  # seconds
    what: str


PARTS = {
    "device": Part(device, 25, "what the card is, how fast it copies and reads"),
    "correct": Part(functools.partial(judge, checks=CORRECT), 95, "every kernel against fp64 or its definition"),
    "rows": Part(
        functools.partial(judge, checks=ROWS), 120, "rows alone and among others bit by bit; drafted and replayed text"
    ),
    "gemm": Part(gemm_times, 70, "time of products beside the byte floor and torch's own"),
    "attention": Part(attention_times, 20, "time of attention beside the byte floor"),
    "model": Part(model, 90, "a 7B model with random weights: steps, drafts, whole rounds as graphs"),
    "demo": Part(demo_model, 50, "the demo model, if it is there: text and speed with and without drafting"),
    "tune": Part(tune, 400, "settings of products for kernels/tiles.json; by name only"),
}


def child(name: str, path: Path, dry: bool, bound: float) -> int:
    """One part, in this process."""
    torch.manual_seed(0)
    with torch.inference_mode():
        check = Check(Interpreter() if dry else Gpu(), path, bound)
        PARTS[name].run(check)
    check.found["finished"] = True
    check.say("")
    return 0


def run_part(name: str, dry: bool, patience: float) -> dict[str, Any]:
    """One part in a process of its own, ended at its bound."""
    bound = PARTS[name].bound * patience
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TEARDOWN_CUPTI": "0",
        "DISABLE_CUPTI_LAZY_REINIT": "1",
    }  # profiling graphs needs it on some drivers
    if dry:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, sys.argv[0], name, "--child", str(path), "--patience", str(patience)]
        command += ["--dry-run"] if dry else []
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = process.wait(bound)
            ended = f"crashed, exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {bound:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"finished": False, "verdicts": []}
    wrong = sum(verdict["counts"] and not verdict["good"] for verdict in found["verdicts"])
    result = ended if not found["finished"] else f"{wrong} WRONG" if wrong else "good"
    return {"good": result == "good", "result": result, **found}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all but tune, if none is named")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--list", action="store_true", help="list the parts with their time bounds")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, in Triton's interpreter, at toy sizes")
    parser.add_argument("--patience", type=float, default=1.0, metavar="FACTOR", help="for the time bounds")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in args.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; the parts are {', '.join(PARTS)}")
    if args.list:
        for name, part in PARTS.items():
            print(f"{name:10} {part.bound:4} s  {part.what}")
        return 0
    if not args.dry_run and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA device here; --dry-run tries the script on a CPU")
    if args.child:
        return child(args.parts[0], args.child, args.dry_run, PARTS[args.parts[0]].bound * args.patience)
    if args.dry_run:
        print("A dry run in Triton's interpreter: times mean nothing.")
    found: dict[str, Any] = {}
    for name in args.parts or [name for name in PARTS if name != "tune" or args.dry_run]:
        print(f"\n## {name}: {PARTS[name].what}", flush=True)
        found[name] = run_part(name, args.dry_run, args.patience)
        args.out.write_text(json.dumps({"dry_run": args.dry_run, "parts": found}, indent=1), encoding="utf-8")
    print(f"\n## Results, in {args.out}\n\n| part | seconds | result |\n| --- | --- | --- |")
    for name, part in found.items():
        print(f"| {name} | {part.get('seconds', '')} | {part['result']} |")
    return 0 if all(part["good"] for part in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
