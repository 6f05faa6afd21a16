"""The end of a measuring script: figures as JSON, a table as Markdown, both with the command that made them; plots."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from fastea.runtime import note


def pyplot() -> Any:
    """matplotlib's, drawing into files; None, and one line that says so, where that optional extra is not installed."""
    try:
        import matplotlib
    except ImportError:
        note("no plot: matplotlib is not installed (pip install -e '.[plots]')")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def report(out: Path | None, name: str, found: dict[str, Any], text: str) -> None:
    """Writes OUT/name.json and OUT/name.md (out None: neither), then prints the table and, as the last line, the JSON
    document."""
    script = Path(sys.argv[0])
    command = shlex.join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]])
    found = {**found, "command": command}
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (out / f"{name}.md").write_text(f"    {command}\n\n{text}", encoding="utf-8")
    print(text)
    print(json.dumps(found))
