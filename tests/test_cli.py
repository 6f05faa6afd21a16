"""The command line: flags, bad input in one line, JSON, interruption."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conftest import VOCAB
from fastea.check import verdict
from fastea.cli import main, normalized, parser
from fastea.loading import load
from fastea.quantize.__main__ import parser as quantize_parser

ROOT = Path(__file__).parent.parent


def run(capsys, *argv):
    """(exit code, stdout, stderr) of the command in this process."""
    code = main([str(a) for a in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


WRONG = [["--nonsense"], ["--top-k", "many"], ["--accept", "maybe"], ["hello"]]


@pytest.mark.parametrize(("make", "argv"), [*((parser, argv) for argv in WRONG), (quantize_parser, ["--group", "a"])])
def test_a_wrong_flag_is_one_line(capsys, make, argv):
    with pytest.raises(SystemExit) as stopped:
        make().parse_args(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and argv[0] in line and line.endswith("--help)")


def test_every_command_reads_its_flags_like_that():
    for path in [*ROOT.glob("scripts/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("quantize/*.py")]:
        assert "ArgumentParser(" not in path.read_text(encoding="utf-8"), path


def test_text_goes_to_stdout_and_memory_and_three_lines_to_stderr(capsys, folder):
    command = ["--checkpoint", folder, "--prompt", "hi", "--max-new-tokens", 12, "--ignore-eos", "--dtype", "float32"]
    code, out, err = run(capsys, *command)
    lines = err.strip().splitlines()
    assert code == 0 and out.endswith("\n") and len(lines) == 4
    memory, *lines = lines
    assert re.fullmatch(r"fastea: weights \d MB, KV cache \d MB for 512 tokens", memory)
    assert lines[0].startswith("prefill") and "tokens per round" in lines[1] and "ended by length" in lines[1]
    assert "float32 on cpu, tree chain:3" in lines[2]


def test_the_dtype_is_printed_as_the_weights_have_it(capsys, folder):
    """float16 on a CPU: the weights', whatever runs between them; the text is that of the weights rounded."""
    command = ["--checkpoint", folder, "--prompt", "hi", "--max-new-tokens", 4, "--json", "--dtype", "float16"]
    code, out, _ = run(capsys, *command)
    assert code == 0 and json.loads(out)["dtype"] == "float16" and json.loads(out)["new_tokens"] == 4


KEYS = {
    "text", "ids", "finish_reason", "prompt_tokens", "new_tokens", "rounds", "tokens_per_round", "accepted",
    "prefill_s", "decode_s", "tokens_per_s", "compile_s", "load_s", "weight_bytes",
    "cache_bytes", "peak_rss_bytes", "threads", "dtype", "device", "quant", "bits_per_weight",
    "quant_report", "tree", "head",
    "head_quant", "seed", "kernels",
}  # fmt: skip


@pytest.mark.parametrize("more", [[], ["--drafter", "ngram"], ["--tree", "chain:3"], ["--accept", "rejection"]])
@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "7"]])
def test_json_and_exactness(capsys, folder, more, sampling):
    common = ["--checkpoint", folder, "--prompt", "hi", "--max_new_tokens", 24, "--exact", "--json", *sampling]
    code, out, err = run(capsys, *common, *more)
    document = json.loads(out)
    assert code == 0 and set(document) == KEYS and err == ""
    assert document["new_tokens"] == len(document["ids"]) and document["rounds"] == len(document["accepted"])
    assert document["seed"] == (7 if sampling else None)
    plain = json.loads(run(capsys, *common, "--head", "none", "--drafter", "none")[1])
    assert plain["head"] == "none" and plain["tree"] == "none"
    if "rejection" not in more or not sampling:
        assert document["ids"] == plain["ids"] and document["text"] == plain["text"]


def test_a_profile_is_a_trace_of_the_rounds(capsys, folder, tmp_path):
    trace = tmp_path / "trace.json"
    common = ["--checkpoint", folder, "--prompt", "hi", "--max-new-tokens", 8]
    code, out, _ = run(capsys, *common, "--profile", trace)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert code == 0 and out and "fastea::attend" in names
    code, _, err = run(capsys, *common, "--profile", tmp_path / "none" / "trace.json")
    assert code == 2 and err.strip().splitlines()[-1].count("trace.json") == 1


def test_a_seed_is_drawn_and_printed(capsys, folder):
    common = ["--checkpoint", folder, "--prompt", "hi", "--max-new-tokens", 8, "--temperature", 1, "--json"]
    first = json.loads(run(capsys, *common)[1])
    again = json.loads(run(capsys, *common, "--seed", first["seed"])[1])
    assert again["ids"] == first["ids"]
    assert json.loads(run(capsys, *common)[1])["seed"] != first["seed"]


def test_samples_differ_and_repeat(capsys, folder):
    common = [
        "--checkpoint",
        folder,
        "--prompt",
        "hi",
        "--max-new-tokens",
        8,
        "--temperature",
        1,
        "--seed",
        3,
        "--json",
    ]
    samples = json.loads(run(capsys, *common, "--num-samples", 3)[1])["samples"]
    assert len({tuple(s["ids"]) for s in samples}) == 3
    assert json.loads(run(capsys, *common)[1])["ids"] == samples[0]["ids"]


def test_stop_text(capsys, folder):
    common = ["--checkpoint", folder, "--prompt", "hi", "--max-new-tokens", 40, "--ignore-eos", "--json"]
    text = json.loads(run(capsys, *common)[1])["text"]
    stop = text[10:13]
    document = json.loads(run(capsys, *common, "--stop", stop, "--stop", "never-there")[1])
    assert document["text"] == text[: text.index(stop)] and document["finish_reason"] == "stop"


def test_underscores_are_dashes_in_names_only():
    assert normalized(["--max_new_tokens=a_b", "x_y", "--top-k", "-1"]) == [
        "--max-new-tokens=a_b",
        "x_y",
        "--top-k",
        "-1",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--checkpoint", "/absent/place"], "/absent/place: no such checkpoint"),
        (["--checkpoint", "/absent/x.gguf"], "no such file"),
        (["--head", "/absent/head"], "/absent/head: no such head"),
        (["--temperature", "nan"], "temperature nan"),
        (["--top-p", "0"], "top_p 0.0"),
        (["--top-p", "1.5"], "top_p 1.5"),
        (["--top-k", "-2"], "top_k -2"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", " \n"], "prompt is empty"),
        (["--prompt", "x" * 600], "the context 512"),
        (["--max-seq-len", "100000"], "context is 512"),
        (["--max-new-tokens", "0"], "max_new_tokens 0"),
        (["--num-samples", "0"], "num-samples 0"),
        (["--tree", "oak"], "--tree oak"),
        (["--drafter", "ngram", "--tree", "eagle1"], "chains"),
        (["--drafter", "eagle", "--head", "none"], "needs a head"),
        (["--system", "x", "--raw"], "system message needs"),
        (["--seed", "-4"], "seed -4"),
        (["--device", "tpu"], "known are"),
        (["--device", "cuda:x"], "known are"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, folder, argv, message):
    if "--checkpoint" not in argv:
        argv = ["--checkpoint", str(folder), *argv]
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert message in err and err.startswith("fastea: error: ") and len(err.strip().splitlines()) == 1


def test_a_file_that_may_not_be_read(capsys, folder, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    code, _, err = run(capsys, "--checkpoint", folder)
    assert code == 2 and "Permission denied" in err and len(err.splitlines()) == 1


def test_output_that_cannot_show_a_character(folder):
    """An ASCII terminal gets replacement marks, not a traceback."""
    command = [sys.executable, str(ROOT / "generate.py"), "--checkpoint", str(folder), "--prompt", "hi", "--ignore-eos"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--max-new-tokens", "60"], env=environment, capture_output=True, check=False)
    assert done.returncode == 0 and b"?" in done.stdout and b"Traceback" not in done.stderr


def test_cuda_that_is_not_there(capsys, folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = run(capsys, "--checkpoint", folder, "--device", "cuda")
    assert code == 2 and "no CUDA device" in err and len(err.splitlines()) == 1


def test_prompt_from_standard_input(capsys, folder, monkeypatch):
    class Stdin:
        def __init__(self, data):
            self.buffer = self
            self.read = lambda: data

    monkeypatch.setattr("sys.stdin", Stdin("héllo".encode()))
    code, out, _ = run(capsys, "--checkpoint", folder, "--prompt", "-", "--max-new-tokens", 4, "--json", "--raw")
    assert code == 0 and json.loads(out)["prompt_tokens"] == 6  # bytes
    monkeypatch.setattr("sys.stdin", Stdin(b"\xff\xfe"))
    code, _, err = run(capsys, "--checkpoint", folder, "--prompt", "-")
    assert code == 2 and "not UTF-8" in err and len(err.splitlines()) == 1


def test_without_a_compiler_one_line_and_eager(capsys, folder, monkeypatch):
    monkeypatch.setattr("fastea.loading.can_compile", lambda device: False)
    common = ["--checkpoint", folder, "--prompt", "hi", "--max-new-tokens", 6, "--json"]
    code, out, err = run(capsys, *common, "--compile")
    assert code == 0 and "no C++ compiler" in err and len(err.splitlines()) == 1
    assert json.loads(out)["ids"] == json.loads(run(capsys, *common)[1])["ids"]


def test_no_head_is_said_in_one_line(capsys, folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.glob("*.*"):
        (bare / file.name).symlink_to(file)
    code, _, err = run(capsys, "--checkpoint", bare, "--prompt", "hi", "--max-new-tokens", 2, "--json")
    assert code == 0 and "no head for this model" in err and len(err.splitlines()) == 1
    code, _, err = run(capsys, "--checkpoint", bare, "--drafter", "eagle")
    assert code == 2 and "no head" in err


def test_interrupt_keeps_what_was_produced(folder):
    """Ctrl-C in the middle of a long run: the text so far, the summary, exit code 130, no traceback."""
    command = [sys.executable, str(ROOT / "generate.py"), "--checkpoint", str(folder), "--prompt", "hi", "--ignore-eos"]
    command += ["--max-new-tokens", "400", "--exact", "--max-seq-len", "512", "--tree", "eagle1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = os.read(process.stdout.fileno(), 10)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert first and process.returncode == 130
    assert b"Traceback" not in err and b"ended by interrupted" in err and len(err.strip().splitlines()) == 4


def test_interrupt_before_the_first_token(capsys, folder, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fastea.cli.load", stop)
    code, _, err = run(capsys, "--checkpoint", folder)
    assert code == 130 and "interrupted before the first token" in err and "Traceback" not in err


def test_help_names_every_flag_of_the_readme():
    text = (ROOT / "README.md").read_text()
    options = {o for p in (parser(), quantize_parser()) for action in p._actions for o in action.option_strings}
    for name in ("evaluate", "compare", "demo", "gpu_check"):
        options |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / "scripts" / f"{name}.py").read_text()))
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text.split("## Training")[0])):
        assert flag in options | {"--help"}, flag
    assert "--prompt" in parser().format_help()


def test_memory_is_counted_and_a_cache_that_cannot_fit_names_its_flag(capsys, folder, monkeypatch):
    common = ["--checkpoint", folder, "--prompt", "hi", "--max-new-tokens", 2, "--max-seq-len", 100]
    common += ["--dtype", "float32"]
    document = json.loads(run(capsys, *common, "--json", "--head", "none", "--threads", torch.get_num_threads())[1])
    layers = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 96) + (VOCAB + 304) * 64 + 5 * 64  # LM head in blocks of 16
    table = (100 + 64) * 16  # rotary cosines and sines
    assert document["weight_bytes"] == 4 * (layers + table)
    rows = 192  # 100 and 64 for a tree, up to a multiple of 64
    assert document["cache_bytes"] == 4 * 2 * 2 * 2 * rows * 16  # fp32, K and V, layers, heads, rows, width
    assert document["peak_rss_bytes"] > document["weight_bytes"] and document["threads"] == torch.get_num_threads()
    monkeypatch.setattr("fastea.generator.available_bytes", lambda device: 1000)
    code, _, err = run(capsys, *common)
    assert code == 2 and "lower --max-seq-len" in err and "1 x 100 tokens" in err
    for free, advice in ((200_000, "--quant int8 would fit"), (130_000, "--quant int4 would fit"), (1000, "smaller")):
        monkeypatch.setattr("fastea.memory.available_bytes", lambda device, free=free: free)
        code, _, err = run(capsys, *common)
        assert code == 2 and advice in err and f"{free / 1e9:.1f} GB are free" in err and err.count("\n") == 1
    code, _, err = run(capsys, *common, "--threads", 0)
    assert code == 2 and "--threads 0" in err


def test_the_cache_is_sized_by_the_limit_not_by_the_models_maximum(folder, tmp_path):
    """A model for 131,072 tokens gets a modest cache by default."""
    big = tmp_path / "big"
    shutil.copytree(folder, big)
    raw = json.loads((big / "config.json").read_text())
    (big / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 131072}))
    model = load(big, head="none", dtype="float32")
    assert model.max_seq_len == 4096 and model.cache_bytes() == 4 * 2 * 2 * 2 * (4096 + 64) * 16
    assert model.state(1).cache.nbytes == model.cache_bytes()


def test_wait_policy_reaches_openmp(folder):
    """The command starts again with the variable set, since it is read when torch is loaded."""
    code = "import os, sys; from fastea.cli import main; main(sys.argv[1:]); print(os.environ['OMP_WAIT_POLICY'])"
    command = [sys.executable, "-c", code, "--checkpoint", str(folder), "--prompt", "hi", "--max-new-tokens", "2"]
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([*command, "--wait-policy", "active"], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "active", done.stderr


def test_the_load_report_names_what_became_of_every_weight(capsys, folder):
    """Eight layer weights and the LM head; 96 inputs do not divide into groups of 64, so none are asked for here."""
    code, _, err = run(capsys, "--checkpoint", folder, "--quant", "int4", "--prompt", "hi", "--max-new-tokens", 2)
    assert code == 0
    report = next(line for line in err.splitlines() if line.startswith("fastea: weights: "))
    assert "8 x int4 group 32 with minimum rounded" in report and "1 x int8 rounded" in report
    bits = (5 * 2 * (64 * 128 + 64 * 64 + 3 * 64 * 96) + VOCAB * (8 * 64 + 16)) / (
        2 * (64 * 128 + 64 * 64 + 3 * 64 * 96) + VOCAB * 64
    )  # 4 bits, and two fp16 numbers for 32 weights; 8 bits, and one for a row
    assert f"{bits:.2f} bits per weight" in report
    assert f"int4 ({bits:.2f} bits per weight)" in err.splitlines()[-1]


def test_check_head_says_what_a_head_is_and_whether_it_fits(capsys, folder, tmp_path):
    """A random head is a wrong one; one that hands on what the target says next is right nearly always."""
    common = ["--checkpoint", str(folder), "--check-head", "--dtype", "float32"]
    code, out, _ = run(capsys, *common)
    assert code == 2 and "does not fit" in out and len(out.splitlines()) == 2
    assert "EAGLE-1: 64 wide, 4 heads and 2 KV heads of 16, MLP 96" in out and "biases of fc" in out
    code, _, err = run(capsys, *common, "--head", "none")
    assert (code == 2 and "no head" in err) or "nothing is drafted" in err
    assert (verdict(0.75), verdict(0.3), verdict(0.1)) == (verdict(0.5), verdict(0.2), verdict(0.0))


@pytest.mark.parametrize("more", [[], ["--quant", "int8"], ["--compile", "--quant", "int4"]])
def test_without_triton_and_without_a_gpu(folder, more):
    """Case 28: the same ids as with Triton there, and no trace of its absence; asking for it is one line."""
    command = ["--checkpoint", str(folder), "--prompt", "hi", "--max-new-tokens", "8", "--json", "--tree", "chain:2"]
    code = "import sys; sys.modules['triton'] = None; from fastea.cli import main; sys.exit(main(sys.argv[1:]))"

    def started(*argv):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        process = [sys.executable, *argv, *command, *more]
        return subprocess.run(process, capture_output=True, text=True, check=False, env=environment)

    without, usual = started("-c", code), started(str(ROOT / "generate.py"))
    assert without.returncode == usual.returncode == 0, without.stderr + usual.stderr
    assert json.loads(without.stdout)["ids"] == json.loads(usual.stdout)["ids"]
    assert "Traceback" not in without.stderr
    command += ["--kernels", "triton"]
    refused = started("-c", code)
    assert refused.returncode == 2 and "Triton cannot be loaded" in refused.stderr


def talk(folder, said, *argv, **environment):
    command = [sys.executable, str(ROOT / "generate.py"), "--chat", "--checkpoint", str(folder), "--dtype", "float32"]
    command += ["--max-new-tokens", "12", "--ignore-eos", *argv]
    return subprocess.run(
        command, input=said, capture_output=True, text=True, check=False, env=os.environ | environment
    )


def test_a_conversation_at_the_terminal(folder, tmp_path):
    said = "/stats\nhello\nand more\n/stats\n/nonsense\n/system be kind\nhello\n/reset\n\n/quit\nnot read\n"
    done = talk(folder, said, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    model = load(folder, dtype="float32")
    options = {"max_new_tokens": 12, "ignore_eos": True}
    first = model.generate("hello", **options).text
    messages = [("user", "hello"), ("assistant", first), ("user", "and more")]
    second = model.generate([{"role": role, "content": text} for role, text in messages], **options).text
    kind = model.generate("hello", system="be kind", **options).text
    assert "nothing has been said yet" in done.stdout and "more were in the cache" in done.stdout
    assert [done.stdout.count(text) >= 1 for text in (first, second, kind)] == [True] * 3
    assert "/nonsense is no command" in done.stderr and "not read" not in done.stdout
    assert talk(folder, "hello\n").returncode == 0  # the end of the input ends it
    assert first in talk(folder, "", "--prompt", "hello").stdout


def test_a_message_that_does_not_fit_is_forgotten(folder):
    done = talk(folder, "x" * 600 + "\nhello\n/quit\n")
    assert done.returncode == 0 and "the context 512" in done.stderr and "forgotten" in done.stderr
    assert load(folder, dtype="float32").generate("hello", max_new_tokens=12, ignore_eos=True).text in done.stdout


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(folder):
    command = [sys.executable, "-u", str(ROOT / "generate.py"), "--chat", "--checkpoint", str(folder), "--ignore-eos"]
    command += ["--max-new-tokens", "400", "--exact", "--max-seq-len", "512", "--tree", "eagle1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdin.write("hello\n")
    process.stdin.flush()
    process.stdout.read(12)  # the prompt sign and the beginning of the answer
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/stats\n/quit\n", timeout=120)
    assert process.returncode == 0 and "stopped; the conversation goes on" in err and "ended by interrupted" in out


@pytest.mark.parametrize("more", [["--json"], ["--raw"], ["--check-head"], ["--num-samples", 2], ["--prompt", "-"]])
def test_what_cannot_be_beside_a_chat(capsys, folder, more):
    code, out, err = run(capsys, "--chat", "--checkpoint", folder, *more)
    assert code == 2 and "--chat" in err and len(err.splitlines()) == 1 and not out


def test_accepted_drafts_are_coloured(capsys, folder):
    command = ["--checkpoint", folder, "--prompt", "hi", "--max-new-tokens", 40, "--ignore-eos", "--dtype", "float32"]
    command += ["--drafter", "ngram"]
    plain = run(capsys, *command)[1]
    code, out, err = run(capsys, *command, "--show-draft")
    assert code == 0 and re.sub(r"\x1b\[\d+m", "", out) == plain
    green = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", out, re.S))
    accepted = sum(
        load(folder, drafter="ngram", dtype="float32").generate("hi", max_new_tokens=40, ignore_eos=True).accepted
    )
    assert accepted - 8 <= len(green) <= accepted and green  # a token is a byte here; the last round may be cut
    code, _, err = run(capsys, *command, "--show-draft", "--json")
    assert code == 2 and len(err.splitlines()) == 1
