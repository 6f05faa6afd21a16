"""Beside llama.cpp: the same GGUF file, prompts, lengths and threads, in turn, each in a process of its own.

    python -m venv ../llama && CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON" \\
        ../llama/bin/pip install llama-cpp-python
    python benchmarks/llama_cpp.py --python ../llama/bin/python [--quant int4] [--compile]

llama.cpp's Python stays out of fastea's environment: --python names the one that has it. The engines take turns,
prompt by prompt; a figure is the median over the rounds of all prompts' new tokens over decoding time, prefill and
start-up aside. Greedy, without stopping at end marks. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from fastea.demo import demo_model
from fastea.training.data import read_lines

PROMPTS = Path(__file__).parent / "prompts.jsonl"

LLAMA = """
import json, sys, time
import llama_cpp
path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = llama_cpp.Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
print(json.dumps({"version": llama_cpp.__version__}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    model.reset()
    begin, ids = None, []
    for token in model.generate(job["ids"], temp=0.0):
        ids.append(token)
        begin = begin or time.perf_counter()
        if len(ids) == job["count"]:
            break
    print(json.dumps({"ids": ids, "seconds": time.perf_counter() - begin}), flush=True)
"""

FASTEA = """
import json, sys
import torch
import fastea
options = json.loads(sys.argv[1])
torch.set_num_threads(options.pop("threads"))
model = fastea.load(**options)
about = {"version": torch.__version__, **model.info}
print(json.dumps(about | {"encoded": [model.encode(p) for p in json.loads(sys.argv[2])]}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    out = model.generate(job["ids"], max_new_tokens=job["count"], ignore_eos=True)
    print(json.dumps({"ids": out.ids, "seconds": out.decode_s, "tokens_per_round": out.tokens_per_round}), flush=True)
"""


class Engine:
    """A process that answers one job a line."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"llama_cpp: {self.process.args!r} ended without an answer")
        return json.loads(line)

    def ask(self, ids: list[int], count: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"ids": ids, "count": count}) + "\n")
        self.process.stdin.flush()
        return self._read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--python", required=True, help="a Python that has llama-cpp-python")
    add("--checkpoint", help="a GGUF file; the demo model if left out")
    add("--quant")
    add("--compile", action="store_true")
    add("--threads", type=int, default=2)
    add("--max-new-tokens", type=int, default=96)
    add("--rounds", type=int, default=3)
    args = parser.parse_args()

    path = args.checkpoint or str(demo_model())
    prompts = [row["prompt"] for row in read_lines(PROMPTS)]
    options = {"checkpoint": path, "quant": args.quant, "compile": args.compile, "threads": args.threads}
    options |= {"max_seq_len": 1024}
    engines = {
        "llama.cpp": Engine([args.python, "-c", LLAMA, path, str(args.threads), "1024"]),
        "plain": Engine([sys.executable, "-c", FASTEA, json.dumps(options | {"head": "none"}), json.dumps(prompts)]),
        "speculative": Engine([sys.executable, "-c", FASTEA, json.dumps(options), json.dumps(prompts)]),
    }
    encoded = engines["plain"].about.pop("encoded")
    engines["speculative"].about.pop("encoded")
    for engine in engines.values():
        engine.ask(encoded[0], 8)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        seconds = dict.fromkeys(engines, 0.0)
        for ids in encoded:
            for name, engine in engines.items():
                seconds[name] += engine.ask(ids, args.max_new_tokens)["seconds"]
        for name in engines:
            speeds[name].append((args.max_new_tokens - 1) * len(encoded) / seconds[name])
    report: dict[str, Any] = {name: round(statistics.median(values), 2) for name, values in speeds.items()}
    for name in ("plain", "speculative"):
        ratios = [a / b for a, b in zip(speeds[name], speeds["llama.cpp"], strict=True)]
        report[f"{name}_ratio"] = round(statistics.median(ratios), 3)
        print(f"{name}: {report[name]} tokens/s, {report[f'{name}_ratio']} x llama.cpp ({report['llama.cpp']})")
    report["versions"] = {"llama-cpp-python": engines["llama.cpp"].about["version"]} | engines["speculative"].about
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
