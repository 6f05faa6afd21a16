"""--compile: everything compiles in the warm-up, nothing afterwards, and the text is the eager one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import byte_tokenizer, tiny_head, tiny_target
from fastea.drafters import Draft
from fastea.drafters.eagle import EagleDrafter
from fastea.drafters.ngram import NgramDrafter
from fastea.generator import Generator
from fastea.llama import TOGETHER
from fastea.loading import load
from fastea.runtime import can_compile, compiled
from fastea.sampling import Sampling
from fastea.tree import Tree, chain

ROOT = Path(__file__).parent.parent
needs_compiler = pytest.mark.skipif(not can_compile("cpu"), reason="no C++ compiler on this machine")


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle", {}),
        ("ngram", {}),
        ("plain", {}),
        ("eagle", {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 3}),
    ],
)
def test_no_recompiles_over_prompts_of_six_lengths(kind, settings):
    torch._dynamo.reset()
    target = tiny_target(num_layers=2 if kind == "eagle" else TOGETHER + 2)
    target.set_context(1024)
    head = tiny_head(target)
    head.bind(target, 1024)
    drafters = {"eagle": EagleDrafter(head, Tree([(0,), (1,), (0, 0)], "t")), "ngram": NgramDrafter(chain(3))}

    def build(compile):
        return Generator(target, byte_tokenizer(64), drafters.get(kind), max_seq_len=1024, compile=compile)

    eager, fast = build(False), build(True)
    first = fast.generate([1], max_new_tokens=2, **settings)
    assert len(first.ids) == 2 and fast.compile_s > 0 and first.prefill_s + first.decode_s < fast.compile_s
    kept, copies = [], []
    with torch.compiler.set_stance("fail_on_recompile"):
        for i, (length, count) in enumerate(zip((1, 7, 33, 130, 7, 500), (5, 30, 3, 20, 40, 30), strict=True)):
            prompt = [(i + 3 * j) % 64 for j in range(length)]
            output = fast.generate(prompt, max_new_tokens=count, **settings)
            assert output.ids == eager.generate(prompt, max_new_tokens=count, **settings).ids
            kept.append(output.ids)
            copies.append(list(output.ids))
    assert kept == copies  # a later run does not write into what an earlier one returned


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("tree", [None, Tree([(0,), (1,), (0, 0)], "t")])
def test_caches_are_not_copied_by_a_round(tree, compile):
    """They are written and compacted in place, in 16 bits too: a round allocates far less than copies would."""
    torch._dynamo.reset()
    target = tiny_target(num_layers=TOGETHER).to(torch.bfloat16)
    target.set_context(4096)
    head = tiny_head(target).to(torch.bfloat16)
    head.bind(target, 4096)
    drafter = EagleDrafter(head, tree) if tree else None
    generator = Generator(target, byte_tokenizer(64), drafter, max_seq_len=4096, compile=compile)
    generator.generate([1, 2, 3], max_new_tokens=3)
    state = generator.state(1)
    state.done.fill_(False)
    with torch.profiler.profile(profile_memory=True) as profile:
        generator.step(state)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert allocated < state.cache.nbytes / 4


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_rows_are_those_of_fewer_rows(dtype):
    """What is fused for one row and for many differs; where values are rounded must not."""
    torch._dynamo.reset()
    layer = tiny_target().layers[0].to(dtype)
    fast = compiled(lambda x, mixed: layer.attn_norm(layer.mlp_norm(x + mixed) + x))
    x, mixed = torch.randn(2, 1, 26, 64).to(dtype)
    with torch.inference_mode():
        alone = torch.cat([fast(x[:, i : i + 1].clone(), mixed[:, i : i + 1].clone()) for i in range(26)], 1)
        assert torch.equal(fast(x, mixed), alone)


@needs_compiler
@pytest.mark.parametrize("choice", [{"quant": "int8"}, {"quant": "int4", "head_quant": "int8"}, {"dtype": "float16"}])
def test_quantized_models_compile_once(choice, folder):
    """All layers are one graph: packed weights are its inputs, whatever their form. Its features are the eager ones up
    to what rounding between 16-bit operations makes."""
    torch._dynamo.reset()
    eager, fast = load(folder, **choice), load(folder, **choice, compile=True)
    fast.generate([1], max_new_tokens=2)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length, count in zip((1, 7, 33, 130, 7, 400), (5, 30, 3, 20, 40, 30), strict=True):
            prompt = [(3 * j) % 256 for j in range(length)]
            assert len(fast.generate(prompt, max_new_tokens=count, ignore_eos=True).ids) == count
            seen = []
            for generator in (eager, fast):
                state = generator.state(1)
                state.reset(Sampling(), [0])
                generator.prefill(state, 0, prompt)
                with torch.inference_mode():
                    tokens = torch.arange(len(generator.tree))[None]
                    seen.append(generator.round.verify(state, Draft(tokens))[0].double())
            assert (seen[0] - seen[1]).norm() < 0.05 * seen[0].norm()


@needs_compiler
def test_a_second_start_compiles_nothing_anew(folder, tmp_path):
    """The compiler's cache on disk is found again: same text, no new library."""
    command = [sys.executable, str(ROOT / "generate.py"), "--checkpoint", str(folder), "--compile", "--quant", "int4"]
    runs, libraries = [], []
    for _ in range(2):
        done = subprocess.run(
            [*command, "--json", "--prompt", "hello", "--max-new-tokens", "6"],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        runs.append(json.loads(done.stdout))
        libraries.append(len(list(tmp_path.rglob("*.so"))))
    assert runs[0]["ids"] == runs[1]["ids"] and libraries[0] == libraries[1] > 0
    assert runs[1]["compile_s"] < runs[0]["compile_s"]
