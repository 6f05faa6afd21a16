"""Every kernel compiled for every card without one, and whether the gates would notice what they are there for."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent.parent / "scripts" / "kernels.py"
spec = importlib.util.spec_from_file_location("kernels_script", SCRIPT)
assert spec and spec.loader
sys.path.append(str(SCRIPT.parent))  # of what the script imports
k = sys.modules["kernels_script"] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
spec.loader.exec_module(k)

pytestmark = pytest.mark.kernels

CARDS = {card.capability: card for card in k.CARDS}
MMA, WGMMA = "mma m16n8k16 f32.f16", "wgmma m64n16k16 f32.f16"
GOOD = k.Figures(
    "gemm._words_kernel", "int4", CARDS[86], registers=72, stack=0, local=0, shared=24576, warps=4, stages=3,
    instructions=frozenset((MMA,)), wanted=frozenset((MMA,)), waves=2,
)  # fmt: skip


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=kept | environment)


def test_kernels_are_what_the_table_says_and_may_be():
    done = run("--check")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_interpreted_kernels_are_refused():
    done = run("--check", TRITON_INTERPRET="1")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stack": 24}, "spilled: 24 bytes of stack"),
        ({"local": 8}, "8 of local memory"),
        ({"shared": 99 * 1024 + 1}, "a block gets 101376"),
        ({"card": CARDS[80], "shared": 164 * 1024}, "a block gets 166912"),
        ({"instructions": frozenset()}, "run nothing, not mma m16n8k16 f32.f16"),
        ({"instructions": frozenset(("mma m16n8k16 f16.f16",))}, "run mma m16n8k16 f16.f16, not mma m16n8k16 f32.f16"),
        ({"card": CARDS[90], "wanted": frozenset((WGMMA,))}, f"run {MMA}, not {WGMMA}"),
        ({"fused": 1}, "1 products and sums are fused"),
        ({"registers": 255, "warps": 8}, "1 blocks a multiprocessor, splitting counts on 2"),
        ({"shared": 64 * 1024}, "1 blocks a multiprocessor, splitting counts on 2"),
    ],
)
def test_every_gate_can_fail(change, message):
    assert k.failures(GOOD) == []
    lines = k.failures(replace(GOOD, **change))
    assert len(lines) == 1 and message in lines[0]
    assert lines[0].startswith(f"{change.get('card', GOOD.card).name} gemm._words_kernel (int4): ")


def test_what_ptxas_may_do():
    assert k.failures(replace(GOOD, stack=k.SPILLED)) == []
    assert k.failures(replace(GOOD, title="choose._best_kernel", fused=24)) == []


def test_instructions_of_ptx():
    ptx = """
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 };
    @%p1 mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 { %r1 }, { %r2 };
    wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {$0}, $1;
    wgmma.fence.sync.aligned; wgmma.commit_group.sync.aligned;
    """
    forms = {"mma m16n8k16 f32.bf16", "mma m16n8k16 f16.f16", "wgmma m64n32k16 f32.f16"}
    assert k.instructions(ptx) == forms


@pytest.mark.parametrize(
    ("capability", "figures", "blocks"),
    [  # registers, bytes, warps; by NVIDIA's occupancy calculator
        (86, (32, 0, 4), {"r": 16, "s": 100, "t": 12, "b": 16}),
        (86, (168, 24576, 4), {"r": 3, "s": 4, "t": 12, "b": 16}),
        (89, (33, 8448, 1), {"r": 48, "s": 10, "t": 48, "b": 24}),
        (80, (65, 40960, 8), {"r": 3, "s": 4, "t": 8, "b": 32}),
        (90, (255, 57344, 4), {"r": 2, "s": 4, "t": 16, "b": 32}),
    ],
)
def test_blocks_of_a_multiprocessor(capability, figures, blocks):
    assert CARDS[capability].room(*figures) == blocks


def test_launches_are_those_of_the_settings():
    """fp16 sums only where tiles.json asks for them; rows padded as it says."""
    for card in k.CARDS:
        settings, launches = card.settings(), list(k.launches(card))
        products = [made for made in launches if made.title == "gemm._words_kernel"]
        assert any(made.constants["HALF"] for made in products) == settings.half_sums
        assert {made.rows: made.constants["BM"] for made in products} == {
            1: settings.least_rows,
            16: 16,
            26: 32,
            64: 64,
        }
        assert len({made.model for made in launches}) == 3 and len({made.title for made in launches}) >= 15
    assert k.launch.recorder is None


def test_what_differs_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(k, "TABLE", tmp_path / "kernels.md")
    assert "does not exist" in k.differences("now")[0]
    text = f"Triton {k.triton.__version__}, 1 compilation\n| 72 / 24 |\n"
    k.TABLE.write_text(text)
    assert k.differences(text) == []
    assert k.differences(text.replace("72", "80"))[-2:] == ["-| 72 / 24 |", "+| 80 / 24 |"]
    k.TABLE.write_text(text.replace(k.triton.__version__, "1.0.0"))
    assert k.differences("anything") == [] and "gates only" in capsys.readouterr().out
