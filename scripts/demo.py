"""A race at the terminal: the same prompt, plain and speculative, side by side.

    python scripts/demo.py --prompt "Write a haiku about rain." --quant int4 --compile
    python scripts/demo.py --record race.svg

Both run on the same device, so they take turns: the one whose clock is behind writes next, and a clock counts only its
own side's time. What accepted draft tokens brought is green. --record keeps the last picture (.svg) or the whole race
as an asciinema recording (.cast; agg and svg-term make GIFs and SVGs of it). Needs the rich library:
pip install -e '.[demo]'.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastea.config import FasteaError
from fastea.flags import Parser
from fastea.generator import Generator
from fastea.loading import load
from fastea.run import Run
from fastea.runtime import exit_code, use_threads

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
NARROW, FRAMES = 60, 12  # columns that two panes need; pictures a second


class Pane:
    """One side: its text, its clock and its figures."""

    def __init__(self, title: str, run: Run, colour: str):
        from rich.text import Text

        self.title, self.run, self.colour = title, run, colour
        self.text, self.clock, self.ended = Text(), 0.0, False

    def step(self) -> None:
        """Write the next piece."""
        begin = time.perf_counter()
        piece = next(self.run, None)
        self.clock += time.perf_counter() - begin
        self.ended = piece is None
        for text, drafted in self.run.spans if piece is not None else ():
            shown = "".join(c for c in text if c.isprintable() or c == "\n")  # no control codes to the terminal
            self.text.append(shown, "green" if drafted else "")

    @property
    def rate(self) -> float:
        return self.run.outputs[0].tokens_per_s

    @property
    def figures(self) -> str:
        output = self.run.outputs[0]
        per_round = f"{output.tokens_per_round:.2f} a round  " if output.rounds else ""
        return f"{self.rate:5.1f} tokens/s  {per_round}{self.clock:.1f} s"


def picture(panes: list[Pane], width: int, height: int, limit: int) -> Any:
    """Two panes and, under them, how far each has come; the end of a text that is too long is shown."""
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    inner, rows = width // 2 - 4, height - 8
    measure = Console(width=inner, file=io.StringIO())
    grid = Table.grid(expand=True)
    cells = []
    for pane in panes:
        grid.add_column(ratio=1)
        lines = pane.text.wrap(measure, inner)
        body = Text("\n").join(lines[-rows:])
        end = f" ended: {pane.run.outputs[0].finish_reason} " if pane.ended else None
        cells.append(
            Panel(body, title=f"[bold]{pane.title}[/]", subtitle=end, height=rows + 2, border_style=pane.colour)
        )
    grid.add_row(*cells)
    bars = Table.grid(padding=(0, 1))
    best = max(pane.rate for pane in panes) or 1.0
    done = all(pane.ended for pane in panes)
    for pane in panes:
        share = pane.rate / best if done else pane.run.outputs[0].new_tokens / limit
        length = max(1, round(share * (width - 50)))
        bars.add_row(f"{pane.title:11}", Text("█" * length, pane.colour), pane.figures)
    plain, fast = panes
    ratio = f"{fast.rate / plain.rate:.2f} times as fast" if plain.rate and fast.rate else ""
    equal = plain.run.outputs[0].ids == fast.run.outputs[0].ids
    verdict = f"{ratio}, {'the same text' if equal else 'texts that differ in a near-tie'}" if done else ratio
    return Group(grid, bars, Text(verdict, "bold"))


def race(panes: list[Pane], draw: Callable[[], None]) -> None:
    """Step the side whose clock is behind until both have ended; draw now and then."""
    drawn = 0.0
    while running := [pane for pane in panes if not pane.ended]:
        min(running, key=lambda pane: pane.clock).step()
        if time.perf_counter() - drawn > 1 / FRAMES:
            draw()
            drawn = time.perf_counter()
    draw()


def sides(args: argparse.Namespace) -> tuple[Generator, Generator]:
    names = ("checkpoint", "head", "drafter", "tree", "quant", "dtype", "device", "compile", "exact")
    fast = load(**{name: getattr(args, name) for name in names}, max_seq_len=args.max_seq_len)
    if fast.drafter is None:
        raise FasteaError("there is nothing to race with: no head was found; give one with --head, or --drafter ngram")
    return fast.beside(None), fast


def demo(args: argparse.Namespace) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        raise FasteaError("the demo needs the rich library: pip install -e '.[demo]'") from None
    if args.record and args.record.suffix not in (".svg", ".cast"):
        raise FasteaError(f"--record {args.record}: known are .svg and .cast")
    if args.max_new_tokens < 2:
        raise FasteaError(f"--max-new-tokens {args.max_new_tokens}: it must be at least 2")
    use_threads(args.threads)
    size = shutil.get_terminal_size((80, 24))
    width, height = args.width or size.columns, max(14, min(size.lines - 1, 30))
    if width < NARROW:
        raise FasteaError(f"{width} columns are too few for two panes; {NARROW} are needed (--width)")
    plain, fast = sides(args)
    sampling = {"temperature": args.temperature, "seed": args.seed}
    console = Console(width=width)
    console.print(Text(args.prompt, style="dim"))
    for model in (plain, fast):  # compiled and warm before the clocks start
        model.generate(args.prompt, max_new_tokens=8, **sampling)
    options = {"max_new_tokens": args.max_new_tokens, **sampling}
    panes = [
        Pane("plain", plain.stream(args.prompt, **options), "bright_black"),
        Pane("speculative", fast.stream(args.prompt, **options), "cyan"),
    ]
    frames: list[tuple[float, str]] = []
    begin = time.perf_counter()

    def frame() -> Any:
        return picture(panes, width, height, args.max_new_tokens)

    with Live(frame(), console=console, auto_refresh=False) as live:

        def draw() -> None:
            live.update(frame(), refresh=True)
            if args.record and args.record.suffix == ".cast":
                frames.append((time.perf_counter() - begin, rendered(frame(), width)))

        race(panes, draw)
    if args.record:
        record(args.record, args.prompt, frame(), frames, width, height)
        console.print(f"\n[dim]kept in {args.record}[/]")


def rendered(picture: Any, width: int) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(width=width, file=out, force_terminal=True, color_system="256").print(picture)
    return "\x1b[H\x1b[2J" + out.getvalue().replace("\n", "\r\n")


def record(path: Path, prompt: str, last: Any, frames: list[tuple[float, str]], width: int, height: int) -> None:
    from rich.console import Console
    from rich.text import Text

    if path.suffix == ".svg":
        console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
        console.print(Text(prompt, style="dim"))
        console.print(last)
        console.save_svg(str(path), title="python scripts/demo.py")
        return
    lines = [{"version": 2, "width": width, "height": height + 1, "title": prompt}]
    lines += [[round(at, 3), "o", text] for at, text in frames]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--prompt", default=PROMPT)
    for flag in ("--checkpoint", "--tree", "--quant"):
        add(flag)
    for flag in ("--head", "--drafter", "--dtype", "--device"):
        add(flag, default="auto")
    add("--compile", action="store_true")
    add("--exact", action="store_true")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--max-new-tokens", type=int, default=160)
    add("--max-seq-len", type=int, help="context in tokens")
    add("--threads", type=int)
    add("--width", type=int, help="columns (default: the terminal's)")
    add("--record", type=Path, metavar="FILE", help="keep the last picture (.svg) or the race (.cast)")
    args = parser.parse_args()
    return exit_code(lambda: demo(args), "demo", "demo: interrupted")


if __name__ == "__main__":
    sys.exit(main())
