"""The package as users get it: editable and from a wheel, from another folder, with few imports."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python(code: str, cwd: Path, *path: str) -> str:
    """Run code in a fresh interpreter away from the repository; returns what it prints."""
    prefix = f"import sys; sys.path[:0] = {list(path)!r}\n"
    done = subprocess.run([sys.executable, "-c", prefix + code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_subpackages_import_from_elsewhere(tmp_path):
    out = python("import fastea.kernels.attention, fastea.quantize; print(fastea.kernels.__name__)", tmp_path)
    assert out.strip() == "fastea.kernels"


def test_wheel_holds_everything(tmp_path):
    source = tmp_path / "source"  # building writes into the tree it builds
    for name in ("fastea", "kernels", "quantize"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wheel = next(tmp_path.glob("fastea-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    expected = {f"fastea/{p.relative_to(ROOT / 'fastea')}" for p in (ROOT / "fastea").rglob("*.py")}
    expected |= {
        f"fastea/{folder}/{p.name}" for folder in ("kernels", "quantize") for p in (ROOT / folder).glob("*.[pj]*")
    }
    expected |= {f"fastea/{p.relative_to(ROOT / 'fastea')}" for p in (ROOT / "fastea" / "heads").rglob("*.safetensors")}
    assert expected <= names
    assert not any(n.split("/")[0] in ("kernels", "quantize", "tests", "scripts") for n in names)
    out = python("import fastea.kernels.rows as k; print(k.__file__)", tmp_path, str(tmp_path / "site"))
    assert out.startswith(str(tmp_path))


def test_few_libraries_are_imported():
    code = "import fastea; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(python(code, Path("/")).split())
    assert {"torch", "safetensors"} <= loaded
    assert not loaded & {"transformers", "gguf", "tokenizers", "triton", "jinja2", "matplotlib"}


def test_imports_run_downward():
    """No module imports from a layer above its own."""
    layers = [
        ["config", "flags"], ["kernels", "quantize", "cache", "tree", "memory"], ["linear"], ["triton_linear"],
        ["quantized", "llama", "sampling"], ["tokenizer", "checkpoint", "demo"], ["gguf_vocabulary"],
        ["eagle", "eagle3", "answer", "state"], ["drafters"], ["round"], ["fused", "replay", "runtime", "acceptance"],
        ["head_files", "costs", "tree_search"], ["pace"], ["generator", "run", "engine", "planner"],
        ["loading", "training", "check", "chat"], ["evaluation"], ["cli"],
    ]  # fmt: skip
    level = {name: i for i, names in enumerate(layers) for name in names}
    import re

    files = [*(ROOT / "fastea").rglob("*.py"), *(ROOT / "kernels").glob("*.py"), *(ROOT / "quantize").glob("*.py")]
    for path in files:
        if path.name == "__main__.py":  # a command of its own
            continue
        inside = path.is_relative_to(ROOT / "fastea")
        top = path.relative_to(ROOT / "fastea").parts[0] if inside else path.parent.name
        name = top.removesuffix(".py")
        if name == "__init__":
            continue
        for used in re.findall(r"^\s*from fastea\.(\w+)", path.read_text(), re.M):
            assert level[used] <= level[name], f"{path.name} imports fastea.{used}"
