"""The command line: `python generate.py` and `fastea`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fastea.answer import Output
from fastea.chat import Chat, converse
from fastea.check import WIRED, describe, head_of, verdict, zero_alpha
from fastea.config import FasteaError
from fastea.flags import Parser
from fastea.generator import Generator
from fastea.loading import load
from fastea.memory import peak_rss
from fastea.planner import drawn
from fastea.run import Run
from fastea.runtime import note, use_threads
from fastea.sampling import Sampling

PROMPT = "Explain why the sky is blue."
ALONE = {
    "json": "--json",
    "raw": "--raw",
    "check_head": "--check-head",
    "explain_tree": "--explain-tree",
    "profile": "--profile",
}  # not with --chat


def parser() -> argparse.ArgumentParser:
    p = Parser(
        "Write what the model alone would have written, sooner: EAGLE speculative decoding on one device.",
        epilog="Flags may be written with dashes or underscores. Exit codes: 0 done, 2 bad input, 130 interrupted.",
    )
    add = p.add_argument
    add("--prompt", help=f"text to answer; - reads standard input (default: {PROMPT})")
    add("--chat", action="store_true", help="a conversation at the terminal; /quit ends it")
    add(
        "--checkpoint",
        "--checkpoint-path",
        help="Hugging Face folder or .gguf file (default: the demo model, fetched once)",
    )
    add(
        "--head",
        default="auto",
        help="auto: the shipped head that fits, else a folder 'eagle' beside CHECKPOINT; none; or a folder",
    )
    add(
        "--drafter",
        default="auto",
        help="what proposes tokens: eagle (a head), ngram (what followed in the text before), hybrid (both), "
        "model:PATH (a small model of the same vocabulary), none; default auto: eagle if there is a head",
    )
    add(
        "--tree",
        help="auto (what is fastest here, by measurement), eagle1 (26 nodes, root included), chain:K (K drafts; "
        "ngram's default: 8, model's: 4), dynamic:N,K,D (EAGLE-2: N nodes with the root, K children a node, D draft "
        "forwards) or a .json of paths; default with a head: auto if its card says how often it is accepted, "
        "else eagle1 (EAGLE-3: dynamic:60,10,8) on a GPU, eagle1 in bf16 on a CPU with AMX, else chain:3",
    )
    add("--max-new-tokens", type=int, default=256, help="longest answer in tokens (default 256)")
    add("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    add("--top-k", type=int, default=0, help="sample among the K likeliest tokens; 0 = off (default)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="then among the likeliest with this probability in all; 1 = off (default)",
    )
    add("--seed", type=int, help="makes sampling repeatable (default: drawn from the system and printed)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add(
        "--accept",
        default="match",
        choices=["match", "rejection"],
        help="match: a seed gives the same text with any drafter (default); rejection: the EAGLE paper's sampling",
    )
    add(
        "--exact",
        action="store_true",
        help="rows independent of the rows beside them: ids equal plain decoding's, slower",
    )
    add("--device", default="auto", help="auto, cpu or cuda")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "float16", "bfloat16"],
        help="auto: bfloat16 where the CPU has instructions for it, else float16 weights (x86) or float32; on a GPU "
        "16 bit",
    )
    add(
        "--quant",
        choices=["none", "int8", "int4"],
        default="none",
        help="int8 (one scale a row) or int4 (groups of 32): round the weights, or take GGUF blocks of as many bits as "
        "they are; none (default): as the checkpoint has them, GGUF dequantized",
    )
    add(
        "--head-quant",
        choices=["auto", "none", "int8", "int4"],
        default="auto",
        help="the same for the head's weights; auto: int8 on a GPU and, in bfloat16, on a CPU with AVX-512, else none",
    )
    add("--max-seq-len", type=int, help="context in tokens, prompt and answer (default: the model's, at most 4096)")
    add("--system", help="system message (default: what the chat template puts)")
    add("--raw", action="store_true", help="continue the prompt as plain text, without the chat template")
    add("--ignore-eos", action="store_true", help="do not stop at end marks")
    add("--num-samples", type=int, default=1, help="answer this many times, with noise streams 0, 1, ... (default 1)")
    add("--compile", action="store_true", help="compile the round, once, at first; on a GPU make it one CUDA graph")
    add(
        "--kernels",
        choices=["auto", "triton", "torch"],
        default="auto",
        help="auto: the Triton kernels on a GPU that can run them, else torch's operators (same text, slower there)",
    )
    add("--profile", metavar="FILE", help="write a Chrome trace of the rounds to FILE (open it at ui.perfetto.dev)")
    add("--explain-tree", action="store_true", help="draw the tree that --tree auto takes, say why, and end")
    add("--check-head", action="store_true", help="say what the head is and how well it fits the model, and end")
    add("--threads", type=int, help="threads of a CPU (default: torch's choice, one a core)")
    add(
        "--wait-policy",
        choices=["active", "passive"],
        help="what threads do between parallel parts: spin (active: fastest on a quiet machine, far slower on a loaded "
        "one) or sleep (passive); default: OpenMP's own, which spins briefly",
    )
    add("--json", action="store_true", help="print one JSON document instead of text")
    add("--show-draft", action="store_true", help="colour what accepted draft tokens brought (green)")
    return p


def normalized(argv: Sequence[str]) -> list[str]:
    """--max_new_tokens 5 -> --max-new-tokens 5, in flag names only."""
    out = []
    for arg in argv:
        name, equals, value = arg.partition("=")
        out.append(name.replace("_", "-") + equals + value if name.startswith("--") else arg)
    return out


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for "-"."""
    if prompt == "-":
        if sys.stdin is None:
            raise FasteaError("there is no standard input; give the prompt with --prompt TEXT")
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise FasteaError(
                f"standard input is not UTF-8 (byte {error.start}); convert it, for example with iconv"
            ) from None
    if not prompt.strip():
        raise FasteaError("the prompt is empty; give one with --prompt TEXT, or --prompt - and text on standard input")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise FasteaError("the prompt is not valid UTF-8; check the terminal's encoding") from None
    return prompt


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parser().parse_args(normalized(sys.argv[1:] if argv is None else argv))
        use_threads(args.threads)
        if args.wait_policy and os.environ.get("OMP_WAIT_POLICY", "").lower() != args.wait_policy:
            restart(args.wait_policy)
        return run(args)
    except FasteaError as error:
        print(f"fastea: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fastea: interrupted before the first token", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough; nothing more can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"fastea: error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2


def restart(wait_policy: str) -> None:
    """Start this very command again with OpenMP's variable set, which is read when torch is loaded."""
    os.environ["OMP_WAIT_POLICY"] = wait_policy
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def run(args: argparse.Namespace) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still gets the rest
    if args.num_samples < 1:
        raise FasteaError(f"--num-samples {args.num_samples} is not possible; it must be at least 1")
    if args.show_draft and args.json:
        raise FasteaError("--show-draft colours text, --json prints none: leave one of them away")
    if args.chat:
        alone = [flag for name, flag in ALONE.items() if getattr(args, name)]
        if alone or args.num_samples > 1 or args.prompt == "-":
            raise FasteaError(f"--chat: {(alone or ['--num-samples and --prompt -'])[0]} cannot be used beside it")
    given = args.prompt is not None or not args.chat
    prompt = read_prompt(PROMPT if args.prompt is None else args.prompt) if given else None
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed).with_seed()
    model = load(
        args.checkpoint, args.head, drafter=args.drafter, tree=args.tree, accept=args.accept, exact=args.exact,
        quant=_or_none(args.quant), head_quant=args.head_quant,
        max_seq_len=args.max_seq_len, device=args.device, dtype=args.dtype, compile=args.compile,
        kernels=args.kernels,
    )  # fmt: skip
    if args.check_head:
        print(f"{model.info['head']}: {describe(head_of(model))}")
        alpha, count = zero_alpha(model)
        print(f"0-alpha {alpha:.2f} over {count} tokens: {verdict(alpha)}")
        return 0 if alpha >= WIRED else 2
    if args.explain_tree:
        print(explained(model, sampling))
        return 0
    if args.chat:
        talk(model, sampling, prompt, args)
        return 0
    assert prompt is not None
    if model.tokenizer.template is None and not args.raw:
        note("this checkpoint has no chat template: continuing the prompt as plain text")
    documents: list[dict[str, Any]] = []
    stopped: BaseException | None = None
    for sample in range(args.num_samples):
        answer = model.stream(
            prompt, max_new_tokens=args.max_new_tokens, temperature=sampling.temperature, top_k=sampling.top_k,
            top_p=sampling.top_p, seed=sampling.seed, stop=args.stop, system=args.system, raw=args.raw,
            ignore_eos=args.ignore_eos, streams=[sample],
        )  # fmt: skip
        if sample == 0:
            prepare(model, sampling, args)
        try:
            with profiled(args.profile):
                for _ in answer:
                    show(args, answer)
        except (KeyboardInterrupt, FasteaError) as error:  # what was produced is still shown and counted
            stopped = error
            if not answer.outputs[0].ids and isinstance(error, FasteaError):
                raise
            answer.interrupt()
            show(args, answer)
        if not args.json:
            print(flush=True)
        output = answer.outputs[0]
        documents.append(document(model, output))
        if not args.json:
            print(summary(model, output), file=sys.stderr)
        if stopped:
            break
    if args.json:
        print(json.dumps(documents[0] if args.num_samples == 1 else {"samples": documents}, ensure_ascii=False))
    if isinstance(stopped, FasteaError):
        raise stopped
    return 130 if stopped else 0


@contextlib.contextmanager
def profiled(path: str | None) -> Iterator[None]:
    """Write a trace of what runs inside to `path`, if there is one, also when it is interrupted."""
    if path is None:
        yield
        return
    with open(path, "w"):  # a place that cannot be written is found now
        pass
    trace = torch.profiler.profile()
    try:
        with trace:
            yield
    finally:
        trace.export_chrome_trace(path)


def prepare(model: Generator, sampling: Sampling, args: argparse.Namespace) -> None:
    """Say what memory is about to be taken, and compile."""
    if not args.json:
        if model.info["quant_report"]:
            note(f"weights: {model.info['quant_report']}")
        size, cache = model.weight_bytes / 1e6, model.cache_bytes() / 1e6
        note(f"weights {size:.0f} MB, KV cache {cache:.0f} MB for {model.max_seq_len} tokens")
    if model.compile:
        note("compiling the round, once ...")
    model.warm_up(1, sampling)
    if model.compile:
        note(f"compiled in {model.compile_s:.0f} s")
    if model.planner and not args.json:
        note(str(model.planner.plans[1, sampling.greedy]))


def explained(model: Generator, sampling: Sampling) -> str:
    """--explain-tree."""
    if model.planner is None:
        raise FasteaError(
            f"--explain-tree: the tree {model.info['tree']} was not chosen by measurement; use --tree auto and a head"
        )
    model.warm_up(1, sampling)
    return drawn(model.planner.plans[1, sampling.greedy])


def _or_none(choice: str) -> str | None:
    return None if choice == "none" else choice


def talk(model: Generator, sampling: Sampling, first: str | None, args: argparse.Namespace) -> None:
    """--chat: a conversation until the user ends it."""
    if model.tokenizer.template is None:
        raise FasteaError("--chat: this checkpoint has no chat template; continue a text with --prompt")
    chat = Chat(
        model, args.system, max_new_tokens=args.max_new_tokens, temperature=sampling.temperature, top_k=sampling.top_k,
        top_p=sampling.top_p, seed=sampling.seed, stop=args.stop, ignore_eos=args.ignore_eos,
    )  # fmt: skip
    prepare(model, sampling, args)
    converse(chat, first, lambda output: summary(model, output), lambda answer: show(args, answer))


def show(args: argparse.Namespace, answer: Run) -> None:
    """The last piece of an answer."""
    if args.json:
        return
    for text, drafted in answer.spans:
        sys.stdout.write(f"\x1b[32m{text}\x1b[0m" if drafted and text and args.show_draft else text)
    sys.stdout.flush()


def document(model: Generator, output: Output) -> dict[str, Any]:
    """Everything about one answer, as --json prints it."""
    return {
        "text": output.text,
        "ids": output.ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "new_tokens": output.new_tokens,
        "rounds": output.rounds,
        "tokens_per_round": round(output.tokens_per_round, 4),
        "accepted": output.accepted,
        "prefill_s": round(output.prefill_s, 4),
        "decode_s": round(output.decode_s, 4),
        "tokens_per_s": round(output.tokens_per_s, 3),
        "compile_s": round(model.compile_s, 3),
        "load_s": round(model.load_s, 3),
        "weight_bytes": model.weight_bytes,
        "cache_bytes": model.cache_bytes(),
        "peak_rss_bytes": peak_rss(),
        "threads": torch.get_num_threads(),
        **{key: value for key, value in model.info.items() if key != "model"},
        "seed": output.seed,
    }


def summary(model: Generator, output: Output) -> str:
    """Three lines for a person."""
    info = model.info
    new = output.prompt_tokens - output.cached_tokens
    prefill = new / output.prefill_s if output.prefill_s else 0.0
    cached = f" ({output.cached_tokens} more were in the cache)" if output.cached_tokens else ""
    seed = "" if output.seed is None else f", seed {output.seed}"
    quant = "" if info["quant"] == "none" else f" {info['quant']} ({info['bits_per_weight']:.2f} bits per weight),"
    peak = f", peak memory {rss / 1e6:.0f} MB" if (rss := peak_rss()) else ""
    return (
        f"prefill  {new} tokens{cached}, {prefill:.1f} tokens/s\n"
        f"decode   {output.new_tokens} tokens, {output.tokens_per_s:.1f} tokens/s, "
        f"{output.tokens_per_round:.2f} tokens per round (accepted + 1), ended by {output.finish_reason}\n"
        f"ran      {info['model']},{quant} {info['dtype']} on {info['device']}, tree {info['tree']}, "
        f"head {info['head']}{seed}{peak}"
    )
