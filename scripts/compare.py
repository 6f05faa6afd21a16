"""fastea beside its peers: the same weights, prompts, lengths and threads, in turn, each in a process of its own.

    python scripts/compare.py --compile
    python scripts/compare.py --compile --quant int4 --python llama.cpp=../llama/bin/python

transformers: generate() in bfloat16 with a dynamic cache, plain; lookup: the same with prompt_lookup_num_tokens.
llama.cpp: llama-cpp-python over the same GGUF file. flashspec: its n-gram engine over the transformers model. A peer
that is not installed, or cannot run here, is left out and said so; --python NAME=PYTHON names another environment that
has it. llama.cpp is built for the processor with

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python

(where its AMX part ends with an illegal instruction, with -DGGML_NATIVE=OFF and the -DGGML_AVX512 options instead).

The engines take turns, prompt by prompt; a figure is the median over the rounds of all prompts' new tokens over their
time without prefill (of transformers and flashspec: the time of a call for all tokens less that of one for a single
token). Greedy, without stopping at end marks. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fastea.config import FasteaError
from fastea.costs import machine
from fastea.demo import demo_model
from fastea.evaluation.report import report
from fastea.flags import Parser
from fastea.runtime import exit_code, note, use_threads
from fastea.training.data import read_lines

PROMPTS = Path(__file__).parent.parent / "benchmarks" / "prompts.jsonl"

ELSEWHERE = """
import sys
sys.path[:] = filter(None, sys.path)  # not the working folder: transformers imports a package called kernels
"""

ANSWERS = """
for line in sys.stdin:
    job = json.loads(line)
    ids, seconds = answer(job["ids"], job["count"])
    print(json.dumps({"ids": ids, "seconds": seconds}), flush=True)
"""

FASTEA = """
import json, sys
import torch
import fastea
options, prompts = json.loads(sys.argv[1]), json.loads(sys.argv[2])
torch.set_num_threads(options.pop("threads"))
model = fastea.load(**options)
about = {"version": fastea.__version__, "torch": torch.__version__}
print(json.dumps(about | {"encoded": [model.encode(p) for p in prompts]}), flush=True)
def answer(ids, count):
    out = model.generate(ids, max_new_tokens=count, ignore_eos=True)
    return out.ids, out.decode_s
"""

TRANSFORMERS = """
import json, sys, time, warnings
import torch, transformers
from pathlib import Path
from fastea.checkpoint import Checkpoint
transformers.logging.set_verbosity_error()
options = json.loads(sys.argv[1])
torch.set_num_threads(options["threads"])
path = Path(options["checkpoint"])
if path.is_dir():
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
else:
    files = Checkpoint(path)
    c = files.config
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, vocab_size=c.vocab_size,
        rms_norm_eps=c.norm_eps, max_position_embeddings=c.max_position, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}))
    model.load_state_dict(dict(files.tensors(None)), strict=False)
    model.tie_weights()
    model.to(torch.bfloat16)
model.eval()
"""

GENERATE = """
lookup = {"prompt_lookup_num_tokens": 5} if options["lookup"] else {}
print(json.dumps({"version": transformers.__version__, "torch": torch.__version__}), flush=True)
def call(ids, count):
    begin = time.perf_counter()
    tokens = torch.tensor([ids])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, min_new_tokens=count,
                         do_sample=False, pad_token_id=0, **lookup)
    return out[0, len(ids):].tolist(), time.perf_counter() - begin
def answer(ids, count):
    _, first = call(ids, 1)
    out, whole = call(ids, count)
    return out, whole - first
"""

FLASHSPEC = """
import flashspec
from flashspec.engine.arms import ArmSpec
from flashspec.engine.ngram import NgramDrafter
from flashspec.engine.verifier import TargetModel
config = flashspec.FlashSpecConfig(
    drafter_name="ngram", target_name="target", device="cpu", dtype="bfloat16",
    sampling=flashspec.SamplingConfig(gamma=4, temperature=0.0))
target = TargetModel("target", torch.device("cpu"), torch.bfloat16, model=model)
engine = flashspec.SpeculativeEngine(config, [NgramDrafter()], target, arms=[ArmSpec(0, 4)])
print(json.dumps({"version": flashspec.__version__, "torch": torch.__version__}), flush=True)
def call(ids, count):
    begin = time.perf_counter()
    out = engine.generate(torch.tensor([ids]), max_new_tokens=count, eos_token_ids=[])
    return out.output_ids[0].tolist(), time.perf_counter() - begin
def answer(ids, count):
    _, first = call(ids, 1)
    out, whole = call(ids, count)
    return out, whole - first
"""

LLAMA = """
import json, sys, time
import llama_cpp
options = json.loads(sys.argv[1])
model = llama_cpp.Llama(options["checkpoint"], n_ctx=options["max_seq_len"], n_threads=options["threads"],
                        n_threads_batch=options["threads"], verbose=False)
print(json.dumps({"version": llama_cpp.__version__}), flush=True)
def answer(ids, count):
    model.reset()
    begin, out = None, []
    for token in model.generate(ids, temp=0.0):
        out.append(token)
        begin = begin or time.perf_counter()
        if len(out) == count:
            break
    return out, time.perf_counter() - begin
"""


class Engine:
    """A process that answers one job a line. Raises FasteaError where it cannot start."""

    def __init__(self, name: str, python: str, program: str, *argv: str):
        command = [python, "-c", ELSEWHERE + program + ANSWERS, *argv]
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            silent = f"it ended without a word, exit code {self.process.returncode}"
            reason = (self.errors.read().strip().splitlines() or [silent])[-1]
            raise FasteaError(f"{self.name}: {reason}")
        return json.loads(line)

    def ask(self, ids: list[int], count: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"ids": ids, "count": count}) + "\n")
        self.process.stdin.flush()
        return self._read()


def arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--checkpoint", help="a GGUF file or a folder; the demo model if left out")
    add("--head", default="auto")
    add("--quant")
    add("--dtype", default="auto")
    add("--tree")
    add("--compile", action="store_true")
    add("--threads", type=int, default=2)
    add("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="default: all")
    add("--python", action="append", default=[], metavar="NAME=PYTHON", help="an environment that has this peer")
    add("--prompts", type=Path, default=PROMPTS, help="JSON lines with 'prompt'")
    add("--max-new-tokens", type=int, default=96)
    add("--max-seq-len", type=int, default=1024)
    add("--rounds", type=int, default=3)
    add("--out", type=Path, help="folder for compare.json and compare.md")
    return parser.parse_args()


PEERS = {
    "transformers": (TRANSFORMERS + GENERATE, {"lookup": False}),
    "lookup": (TRANSFORMERS + GENERATE, {"lookup": True}),
    "llama.cpp": (LLAMA, {}),
    "flashspec": (TRANSFORMERS + FLASHSPEC, {}),
}


def compare(args: argparse.Namespace) -> None:
    use_threads(args.threads)
    pythons = dict(pair.partition("=")[::2] for pair in args.python)
    unknown = set(pythons) - set(PEERS)
    if unknown or args.max_new_tokens < 2 or args.rounds < 1:
        raise FasteaError(
            f"--python {', '.join(sorted(unknown))}: known are {', '.join(PEERS)}"
            if unknown
            else "--max-new-tokens must be at least 2, --rounds at least 1"
        )
    checkpoint = args.checkpoint or str(demo_model())
    prompts = [row["prompt"] for row in read_lines(args.prompts)]
    shared = {"checkpoint": checkpoint, "threads": args.threads, "max_seq_len": args.max_seq_len}
    ours = shared | {"compile": args.compile, "quant": args.quant, "dtype": args.dtype, "tree": args.tree}
    engines: dict[str, Engine] = {}
    for name, head in (("plain", "none"), ("speculative", args.head)):
        tree = {"tree": None} if head == "none" else {}
        options = json.dumps(ours | {"head": head} | tree)
        engines[name] = Engine(name, sys.executable, FASTEA, options, json.dumps(prompts))
    encoded = engines["plain"].about.pop("encoded")
    engines["speculative"].about.pop("encoded")
    for name in args.peers:
        program, more = PEERS[name]
        try:
            peer = Engine(name, pythons.get(name, sys.executable), program, json.dumps(shared | more))
            peer.ask(encoded[0], 8)
            engines[name] = peer
        except FasteaError as error:
            note(f"left out: {error}")
    for name in ("plain", "speculative"):
        engines[name].ask(encoded[0], 8)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    same = dict.fromkeys(engines, 0)
    for _ in tqdm(range(args.rounds), unit="round"):
        seconds = dict.fromkeys(engines, 0.0)
        for ids in encoded:
            answers = {name: engine.ask(ids, args.max_new_tokens) for name, engine in engines.items()}
            for name, answer in answers.items():
                seconds[name] += answer["seconds"]
                same[name] += answer["ids"] == answers["plain"]["ids"]
        for name in engines:
            speeds[name].append((args.max_new_tokens - 1) * len(encoded) / seconds[name])
    summed_up(args, engines, speeds, {name: f"{n} of {args.rounds * len(encoded)}" for name, n in same.items()})


def summed_up(
    args: argparse.Namespace, engines: dict[str, Engine], speeds: dict[str, list[float]], same: dict[str, str]
) -> None:
    """Tokens per second, fastea's ratios to each, and versions."""
    rows: dict[str, dict[str, Any]] = {}
    text = (
        "| | version | tokens/s | fastea speculative is | texts as fastea's plain |\n| --- | --- | --- | --- | --- |\n"
    )
    for name, values in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(speeds["speculative"], values, strict=True))
        about = engines[name].about
        rows[name] = {"tokens_per_s": round(statistics.median(values), 2), "ratio": round(ratio, 3), **about}
        rows[name]["equal"] = same[name]
        ours = "fastea " if name in ("plain", "speculative") else ""
        cells = (ours + name, about["version"], f"{rows[name]['tokens_per_s']:.1f}", f"{ratio:.2f} x", same[name])
        text += f"| {' | '.join(cells)} |\n"
    report(args.out, "compare", {"machine": machine(torch.device("cpu")), "engines": rows}, text)


def main() -> int:
    args = arguments()
    return exit_code(lambda: compare(args), "compare", "compare: interrupted")


if __name__ == "__main__":
    sys.exit(main())
