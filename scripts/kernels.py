"""What every Triton kernel becomes on every card, and whether it may. Needs no GPU: Triton compiles for one without it.

    python scripts/kernels.py            # writes benchmarks/kernels.md
    python scripts/kernels.py --check    # compares with it instead

Kernels are compiled as they are launched: their bodies run on tensors of the meta device at the shapes of MODELS, with
each card's settings, and what they would start is recorded. Launches that differ in nothing but sizes are one
compilation, made for the first of them. Exit status 1 if a gate fails (`failures`), one line each, or if --check finds
other figures than the file's; those of another version of Triton are not compared.
"""

from __future__ import annotations

import difflib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fastea.flags import Parser
from fastea.kernels import launch
from kernel_launches import CARDS, FP16, MODELS, ORDER, Card, Launch, launches

TABLE = Path(__file__).parent.parent / "benchmarks" / "kernels.md"
SPILLED = 16  # bytes of stack that are no failure: ptxas gives up a few registers where one block more fits for it
MATHEMATICS = {"choose._best_kernel"}  # call libdevice's logarithm, which has fused products of its own


@dataclass(frozen=True)
class Figures:
    """One compilation. shared: bytes as launched. instructions: of tensor cores; wanted: as they have to be. fused:
    products and sums that are one instruction, or may become one. waves: blocks that splitting counts on."""

    title: str
    label: str
    card: Card
    registers: int
    stack: int
    local: int
    shared: int
    warps: int
    stages: int
    instructions: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()
    fused: int = 0
    waves: int = 1

    @property
    def room(self) -> dict[str, int]:
        return self.card.room(self.registers, self.shared, self.warps)

    @property
    def blocks(self) -> int:
        return min(self.room.values())


class Absent:
    """In place of Triton's driver: the device that is not there. Devices are numbered by their capability."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compiled(made: Launch, card: Card) -> Any:
    """The kernel that this launch would start, through the same `launch`."""
    driver.set_active(Absent(card.capability))  # type: ignore[arg-type]
    grid, kernels = (1,), []

    def compile_only(*args: Any, **options: Any) -> None:
        kernels.append(made.kernel.warmup(*args, grid=grid, **options))

    options = {"warps": made.warps, "stages": made.stages, **made.constants}
    launch.launch({grid: compile_only}, grid, *made.args, **options)
    return kernels[0]


def wanted(made: Launch, card: Card) -> frozenset[str]:
    """The tensor-core instructions of a kernel: one form for every number of rows, since bits depend on it. m and k are
    of the weight and the sum; n, the rows, is a multiple of 8."""
    dtype = "f16" if FP16 in made.types[:1] else "bf16"
    small = f"mma m16n8k16 f32.{dtype}"
    if made.title.startswith("tree_attention."):
        return frozenset((small,))
    if made.title not in ("gemm._matrix_kernel", "gemm._words_kernel"):
        return frozenset()
    sums = "f16" if made.constants.get("HALF") else "f32"
    form = f"wgmma m64n{made.constants['BM']}k16" if card.capability == 90 else "mma m16n8k16"
    return frozenset((f"{form} {sums}.{dtype}", *([small] if made.constants.get("MINIMUM") else [])))


def instructions(ptx: str) -> frozenset[str]:
    """The tensor-core instructions in it: name, shape, types of the sum and of the factors."""
    found = re.findall(r"\b(wgmma|mma)\.(?:sync|mma_async)[\w.]*?\.(m\d+n\d+k\d+)(?:\.row\.col)?\.(\w+)\.(\w+)", ptx)
    return frozenset(" ".join((name, shape, f"{sums}.{factors}")) for name, shape, sums, factors in found)


def figures(made: Launch, card: Card) -> Figures:
    kernel = compiled(made, card)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = kernel.asm["ptx"]
    fused = re.findall(r"\b(?:fma\.\S*?f\d|(?:add|sub|mul)\.(?:ftz\.)?f\d)", ptx)  # only .rn is rounded in any case
    return Figures(
        made.title, f"{made.label}{f', {made.rows} rows' if made.rows else ''}", card,
        used["REG"], used["STACK"], used["LOCAL"], kernel.metadata.shared, made.warps, made.stages,
        instructions(ptx), wanted(made, card), len(fused),
        card.settings().waves if "BM" in made.constants and made.title.startswith("gemm.") else 1,
    )  # fmt: skip


def failures(f: Figures) -> list[str]:
    """What this compilation must not be, one line each."""
    found = []
    if f.shared > (f.card.shared - 1) * 1024:
        found.append(f"{f.shared} bytes of shared memory, a block gets {(f.card.shared - 1) * 1024}")
    elif f.blocks < f.waves:
        found.append(f"{f.blocks} blocks a multiprocessor, splitting counts on {f.waves}")
    if f.local or f.stack > SPILLED:
        found.append(f"registers are spilled: {f.stack} bytes of stack, {f.local} of local memory")
    if f.instructions != f.wanted:
        found.append(f"tensor cores run {spoken(f.instructions)}, not {spoken(f.wanted)}")
    if f.fused and f.title not in MATHEMATICS:
        found.append(f"{f.fused} products and sums are fused, or may be, that the source rounds apart")
    return [f"{f.card.name} {f.title} ({f.label}): {text}" for text in found]


def spoken(names: frozenset[str]) -> str:
    return " + ".join(sorted(names, reverse=True)) or "nothing"


def brief(kernels: list[frozenset[str]]) -> str:
    """Their instructions as the table names them."""
    return " or ".join(dict.fromkeys(map(spoken, kernels))).replace("nothing", "").replace("mma m16n8k16", "mma")


@dataclass
class Row:
    """A compilation on every card that launches it. sites: of models."""

    title: str
    label: str
    rows: int
    sites: dict[str, list[str]] = field(default_factory=dict)
    cells: dict[str, Figures] = field(default_factory=dict)

    def launched_by(self) -> str:
        together: dict[str, list[str]] = {}
        for model, sites in self.sites.items():
            named = "" if len(sites) == len(MODELS[0].weights()) else ", ".join(filter(None, sites))
            together.setdefault(named, []).append(model)
        return "; ".join(f"{', '.join(m)}{f': {named}' if named else ''}" for named, m in together.items())

    def setting(self) -> str:
        used = {(f.warps, f.stages): None for f in self.cells.values()}
        return " or ".join(f"{warps} warp{'s' if warps > 1 else ''}, {stages} stages" for warps, stages in used)

    def tensor_cores(self, hopper: bool) -> str:
        return brief([f.instructions for f in self.cells.values() if (f.card.capability == 90) == hopper])


class Job(NamedTuple):
    row: Row
    made: Launch
    card: Card


def plan() -> tuple[list[Row], list[Job]]:
    """Rows of the table, and what has to be compiled for them."""
    rows: dict[tuple[Any, ...], Row] = {}
    jobs: dict[tuple[Any, ...], Job] = {}
    for card in CARDS:
        for made in launches(card):
            row = rows.setdefault(made.key, Row(made.title, made.label, made.rows))
            sites = row.sites.setdefault(made.model, [])
            if made.site not in sites:
                sites.append(made.site)
            jobs.setdefault((card, *made.key), Job(row, made, card))
    return list(rows.values()), list(jobs.values())


def cell(f: Figures | None) -> str:
    if f is None:
        return ""
    spilled = f" +{f.stack + f.local}" if f.stack or f.local else ""
    shared = f"{f.shared / 1024:.2f}".rstrip("0").rstrip(".")
    return f"{f.registers}{spilled} / {shared} / {f.blocks}{min(f.room, key=lambda name: f.room[name])}"


def section(title: str, rows: list[Row]) -> str:
    """The table of one kernel. Lines that only differ in their numbers of rows are one; columns that say nothing are
    left out."""
    settings = {row.setting() for row in rows}
    head = ["form", "rows", "launched", *(card.name for card in CARDS), "below sm_90", "on sm_90", "by"]
    body: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        figures = [cell(row.cells.get(card.name)) for card in CARDS]
        cores = row.tensor_cores(False), row.tensor_cores(True)
        line = (row.label, row.setting() if len(settings) > 1 else "", *figures, *cores, row.launched_by())
        body.setdefault(line, []).append(str(row.rows or ""))
    lines = [head, ["---"] * len(head), *([line[0], ", ".join(counts), *line[1:]] for line, counts in body.items())]
    used = [i for i in range(len(head)) if any(line[i] for line in lines[2:])]
    heading = f"## {title}{f', {settings.pop()}' if len(settings) == 1 else ''}"
    return "\n".join((heading, "", *("| " + " | ".join(line[i] for i in used) + " |" for line in lines), ""))


HEADING = """# What the kernels become

    python scripts/kernels.py

Triton {version}, {count} compilations; no GPU, nothing is measured. A cell: registers a thread (+ bytes of stack, where
there are any) / KiB of shared memory a block / blocks that a multiprocessor can hold at once, and what ends them: r
registers, s shared memory, t threads, b the card's most. An empty cell: not launched on this card.

Cards: {cards}, each with its settings of
kernels/tiles.json; sums are split as for {multiprocessors} multiprocessors. Rows: those of the call. mma: mma.sync
m16n8k16; types are of the sum and of the factors. By: the models that launch it, and with which of their weights, where
not with all.

`python scripts/kernels.py --check` fails if a figure has changed, or if on any card

- a block takes more shared memory than it can get (KiB: {limits});
- a kernel uses local memory, or more than {spilled} bytes of stack: up to four registers ptxas spills of its own
  accord, where one more block then fits;
- a product runs on other tensor-core instructions than mma.sync m16n8k16 (attention, every card; weights, below sm_90)
  and wgmma with k16 (weights, sm_90), at any number of rows, or sums in fp16 where that is not asked for;
- a product and a sum are fused, or left to ptxas to fuse (in PTX; the logarithms in choose._best_kernel are
  libdevice's, with fused products of their own);
- a multiprocessor holds fewer blocks of a product with a weight than splitting counts on ({waves}).
"""


def document(rows: list[Row], count: int) -> str:
    settings = CARDS[0].settings()
    heading = HEADING.format(
        version=triton.__version__, count=count, spilled=SPILLED, waves=settings.waves,
        cards=", ".join(f"{card.name} ({card.example})" for card in CARDS),
        limits=", ".join(f"{card.shared - 1} on {card.name}" for card in CARDS),
        multiprocessors=settings.multiprocessors,
    )  # fmt: skip
    modules = [module.__name__.rpartition(".")[2] for module in ORDER]
    titles = sorted({row.title: None for row in rows}, key=lambda title: modules.index(title.partition(".")[0]))
    return "\n".join([heading, *(section(title, [row for row in rows if row.title == title]) for title in titles)])


def differences(text: str) -> list[str]:
    """Lines that differ from the file's; none, and a word about it, if another version of Triton wrote it."""
    if not TABLE.exists():
        return [f"{TABLE} does not exist"]
    kept = TABLE.read_text(encoding="utf-8")
    version = re.search(r"^Triton ([^,\s]+),", kept, re.MULTILINE)
    if version is None or version[1] != triton.__version__:
        print(f"kernels.py: figures are of Triton {version and version[1]}, not {triton.__version__}: gates only")
        return []
    changed = difflib.unified_diff(kept.splitlines(), text.splitlines(), TABLE.name, "now", lineterm="", n=0)
    return [line for line in changed if not line.startswith("@@")]


_jobs: list[Job] = []  # of the forked processes, since kernels cannot be sent to them


def _figures_of(index: int) -> Figures:
    return figures(_jobs[index].made, _jobs[index].card)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare with benchmarks/kernels.md, write nothing")
    check = parser.parse_args().check
    if launch.INTERPRETED:
        print("kernels.py: TRITON_INTERPRET must not be set: interpreted kernels are not compiled", file=sys.stderr)
        return 2
    rows, jobs = plan()
    _jobs.extend(jobs)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        found = pool.imap(_figures_of, range(len(jobs)))
        for job, made in zip(jobs, tqdm(found, total=len(jobs), unit="kernel"), strict=True):
            job.row.cells[job.card.name] = made
    text = document(rows, len(jobs))
    problems = [line for row in rows for f in row.cells.values() for line in failures(f)]
    if check:
        problems += differences(text)
    else:
        TABLE.write_text(text, encoding="utf-8")
    print("\n".join(problems) or f"{len(jobs)} compilations, as they have to be")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
