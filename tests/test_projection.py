"""The cost model's arithmetic against figures worked out by hand, and the script as a command."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "project_3090.py"
spec = importlib.util.spec_from_file_location("project_3090", SCRIPT)
assert spec and spec.loader
p = sys.modules["project_3090"] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
spec.loader.exec_module(p)


def test_bytes_flops_and_floors_of_llama_2_7b():
    m = p.LLAMA2
    assert [round(p.read(p.layer(m, w, 0)) * m.layers / 1e9, 3) for w in p.WEIGHTS] == [12.953, 6.479, 3.340, 4.048]
    floors = [round(p.floor_ms(p.RTX_3090, m, w, 1024), 2) for w in p.WEIGHTS]
    assert floors == [14.69, 7.64, 4.28, 5.04]
    assert [round(p.floor_ms(p.H200, m, w, 1024), 2) for w in p.WEIGHTS] == [2.86, 1.49, 0.83, 0.98]
    flops = [sum(part.flops for part in p.target_step(m, p.FP16, context)) / 1e9 for context in (0, 1024)]
    assert flops[0] == pytest.approx(13.214, abs=1e-3) and flops[1] - flops[0] == pytest.approx(0.537, abs=1e-3)


def test_draft_step_bytes():
    sizes = {(m.name, d): round(p.read(p.draft_step(m, d, 0)) / 1e6) for m in (p.LLAMA2, p.LLAMA3) for d in p.DRAFTS}
    assert sizes["LLaMA-2-7B", "fp16"] == 734 and sizes["LLaMA-2-7B", "int4"] == 253
    assert sizes["LLaMA-3-8B", "fp16"] == 503 + 1051


def test_break_even_rows():
    def rows(card, weights):
        return [round(p.break_even(card, p.LLAMA2, weights, sums)) for sums in card.peaks]

    assert rows(p.RTX_3090, p.INT4) == [20, 40] and rows(p.RTX_3090, p.FP16) == [76, 152]
    assert rows(p.RTX_4090, p.INT4) == [43, 86] and rows(p.H200, p.INT8) == [103]


def test_time_is_the_floor_at_full_shares_and_grows_by_padded_rows():
    ideal = p.Costs(1.0, 1.0, 0.0)
    setup = p.Setup(p.RTX_3090, p.LLAMA2, p.INT4, p.PLAIN)
    assert 1e3 / p.tokens_per_s(setup, ideal) == pytest.approx(p.floor_ms(p.RTX_3090, p.LLAMA2, p.INT4, 1024))
    step = p.target_step(p.LLAMA2, p.INT4, 1024)
    times = [p.seconds(step, rows, 32, setup, p.Costs()) for rows in (1, 8, 25, 32, 33)]
    assert times[0] == times[1] < times[2] == times[3] < times[4]
    a_kernel_more = p.seconds(step, 1, 32, setup, p.Costs(layer_kernels=11)) - times[0]
    assert a_kernel_more == pytest.approx(32 * 1.3e-6)


def test_projection_of_a_memory_bound_round():
    """Eight rows of fp16 are bound by memory everywhere: bytes over bandwidth, and 326 + 5 x 16 kernels."""
    setup = p.Setup(p.RTX_3090, p.LLAMA2, p.FP16, p.CHAIN)
    read = p.read(p.target_step(p.LLAMA2, p.FP16, 1024)) + 5 * p.read(p.draft_step(p.LLAMA2, "fp16", 1024))
    expected = 3.0 / (read / (936e9 * 0.85) + 406 * 1.3e-6)
    assert p.tokens_per_s(setup, p.Costs()) == pytest.approx(expected)


def test_published_fp16_figure_of_a_3090_is_met():
    stack, _, _, _, _, _, projected, published, *_ = p.check_rows(p.Costs())[0]
    assert (stack, published) == ("gpt-fast", 55.1) and projected == pytest.approx(published, rel=0.05)


def test_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert p.main(["--card", "3090", "h200", "--model", "llama-3-8b", "--context", "512", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    *_, last = out.splitlines()
    figures, written = json.loads(last), (tmp_path / "projection.md").read_text()
    assert (
        figures["projected"] is True and figures["context"] == 512 and list(figures["tokens_per_s"]) == ["LLaMA-3-8B"]
    )
    assert len(figures["tokens_per_s"]["LLaMA-3-8B"]) == 4 * (2 + 1) and len(figures["checks"]) == len(p.PUBLISHED)
    assert written in out and "scripts/project_3090.py --card 3090 h200" in written and "projected" in written
    assert not (tmp_path / "projection.png").exists() and "png" not in written
    assert err.count("\n") == 1 and "pip install -e '.[plots]'" in err


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    p.main(["--card", "3090", "--model", "llama-2-7b", "--out", str(tmp_path)])
    assert (tmp_path / "projection.png").stat().st_size > 10_000 and "(projection.png)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--card", "5090"], "'5090'"),
        (["--model", "gpt-2"], "'gpt-2'"),
        (["--context", "-1"], "--context -1"),
        (["--context", "much"], "'much'"),
        (["--bandwidth-share", "0"], "(0, 1]"),
        (["--tensor-share", "1.2"], "(0, 1]"),
        (["--tensor-share", "nan"], "(0, 1]"),
        (["--kernel-us", "-2"], "--kernel-us -2.0"),
        (["--out", str(SCRIPT)], "project_3090.py"),
    ],
)
def test_bad_input_is_one_line(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        p.main(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert err.startswith("project_3090.py: ") and err.count("\n") == 1 and words in err
