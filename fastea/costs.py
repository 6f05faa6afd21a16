"""What the parts of a round cost on this machine: measured once, kept in the user's cache folder."""

from __future__ import annotations

import functools
import itertools
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fastea.demo import cache_folder
from fastea.runtime import note

COUNTS = (4, 8, 16, 32, 64)  # nodes at which verifying is timed
TRIES, SECONDS = 7, 0.4  # of one measurement, at most


@dataclass
class Costs:
    """Seconds. plain: a round without a draft. verify: (rows, seconds) of verifying and accepting. first, level: of
    drafting a static tree's first depth and each further one; grown_first, grown_level: the same of a dynamic tree."""

    plain: float
    verify: list[tuple[int, float]]
    first: float
    level: float
    grown_first: float
    grown_level: float

    @functools.cached_property
    def _stretches(self) -> list[tuple[tuple[int, float], tuple[int, float]]]:
        """Neighbours among the measured (rows, seconds); none costs more than one of more rows, since a measurement can
        be disturbed."""
        points, least = [], math.inf
        for count, seconds in reversed([(1, self.plain), *self.verify]):
            least = min(least, seconds)
            points.append((count, least))
        return list(itertools.pairwise(reversed(points)))

    def verified(self, rows: int) -> float:
        """Seconds for this many rows: between two measured counts in proportion."""
        below, above = next((pair for pair in self._stretches if rows <= pair[1][0]), self._stretches[-1])
        return below[1] + (above[1] - below[1]) / (above[0] - below[0]) * (rows - below[0])

    def static(self, nodes: int, depth: int) -> float:
        return self.verified(nodes) + self.first + (depth - 1) * self.level

    def grown(self, nodes: int, depth: int) -> float:
        return self.verified(nodes) + self.grown_first + (depth - 1) * self.grown_level


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of an action that has run before: the best of some tries, since what disturbs a machine only adds."""
    times: list[float] = []
    while len(times) < TRIES and (len(times) < 3 or sum(times) < SECONDS):
        _wait(device)
        begin = time.perf_counter()
        action()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> str:
    """This device, its software and threads: where costs are comparable."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_processor()}, {capability}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def remembered(key: str) -> Costs | None:
    """Costs that were measured before under this key."""
    try:
        stored = json.loads(_file().read_text(encoding="utf-8"))[key]
        return Costs(**(stored | {"verify": [tuple(pair) for pair in stored["verify"]]}))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(key: str, costs: Costs | None) -> None:
    """Keep them; None: forget what was kept. A cache folder that cannot be written is said in one line."""
    try:
        known = dict(json.loads(_file().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = {}
    if costs is None and known.pop(key, None) is None:
        return
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        part = _file().with_suffix(".part")
        part.write_text(json.dumps(known | ({key: asdict(costs)} if costs else {}), indent=1) + "\n", encoding="utf-8")
        part.replace(_file())
    except OSError as error:
        note(f"{_file()}: timings are not kept ({error.strerror})")


def _file() -> Path:
    return cache_folder() / "timings.json"
