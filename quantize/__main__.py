"""Quantize a checkpoint into a folder that fastea loads: python -m fastea.quantize CHECKPOINT OUT --scheme int4

CHECKPOINT is a Hugging Face folder or a GGUF file ("demo": the demo model). Round to nearest goes weight by weight;
GPTQ holds the model in --dtype and works layer by layer on calibration texts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fastea.checkpoint import Checkpoint
from fastea.config import FasteaError, config_to_hf
from fastea.demo import demo_model
from fastea.flags import Parser
from fastea.gguf_vocabulary import save_gguf_vocabulary
from fastea.loading import load
from fastea.quantize.calibrate import products, quantize_layers
from fastea.quantize.forms import SCHEMES, QuantizedWeight, Scheme
from fastea.quantized import KEY, VERSION, Quantizer, Weight, entry_of
from fastea.runtime import exit_code, note
from fastea.training.data import make_samples, read_json_lines

TEXTS = Path(__file__).parent / "calibration.jsonl"
KEPT = (  # of a Hugging Face folder, beside config.json
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


class Recorder(Quantizer):
    """Keeps whole weights in canonical form instead of placing them into the model."""

    def __init__(self, quant: str | None, scheme: Scheme | None, dtype: torch.dtype, bar: tqdm):
        super().__init__(quant, dtype, "cpu")
        self.scheme, self.lm_scheme = scheme, SCHEMES["int8"]
        self.kept: dict[str, Weight] = {}
        self.bar = bar

    def place(self, model: torch.nn.Module, name: str, weight: Weight) -> None:
        self.kept[name] = self.decided(model, name, weight)
        stem, _, kind = name.rpartition(".")
        setattr(model.get_submodule(stem), kind, torch.nn.Parameter(torch.empty(0), requires_grad=False))
        self.bar.update(1)


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__, prog="python -m fastea.quantize")
    p.add_argument("checkpoint", help="Hugging Face folder, .gguf file, or demo")
    p.add_argument("out", type=Path, help="folder to write; it must not hold a model yet")
    p.add_argument("--scheme", choices=sorted(SCHEMES), default="int4", help="default int4")
    p.add_argument("--group", type=int, help="inputs that share a scale: int4 32 (default), 64, 128; int8 0 = row, 32")
    p.add_argument("--symmetric", action="store_true", help="int4 without a minimum of each group")
    p.add_argument("--method", choices=["nearest", "gptq"], default="nearest", help="default nearest")
    p.add_argument(
        "--calibration",
        type=Path,
        default=TEXTS,
        metavar="FILE",
        help="gptq: JSON lines with 'text', or 'prompt' (and 'answer'; else the model answers first)",
    )
    p.add_argument("--calibration-tokens", type=int, default=256, help="longest calibration sequence (default 256)")
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="gptq: the model's (default float32)"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_code(
        lambda: quantize(args), "fastea.quantize: error", "fastea.quantize: interrupted; nothing was written"
    )


def quantize(args: argparse.Namespace) -> None:
    default = SCHEMES[args.scheme]
    group = default.group if args.group is None else args.group
    scheme = Scheme(default.bits, group, default.minimum and not args.symmetric)
    path = demo_model() if args.checkpoint == "demo" else Path(args.checkpoint)
    files = Checkpoint(path)
    if files.quant:
        raise FasteaError(f"{path} is quantized already ({files.quant}); give a checkpoint in 16 or 32 bits")
    if (args.out / "config.json").exists():
        raise FasteaError(f"{args.out}: there is a model already; give another folder")
    found = by_gptq(path, scheme, args) if args.method == "gptq" else {}
    dtype = files.config.dtype if files.config.dtype != torch.float32 else torch.bfloat16
    with tqdm(unit="weight", desc="writing" if found else "rounding") as bar:
        blocks = args.scheme if group == 32 and not found else None  # GGUF's own, where they are such groups
        recorder = Recorder(blocks, None if found else scheme, dtype, bar)
        if files.load_into(recorder).rope_factors is not None:
            raise FasteaError(
                f"{path}: its rope_freqs have no place in a config.json; quantize the Hugging Face folder"
            )
    kept = recorder.kept | {f"{name}.weight": weight for name, weight in found.items()}
    write(args.out, files, kept, args.scheme, dtype)
    quantized = [w for w in kept.values() if isinstance(w, QuantizedWeight)]
    bits = 8 * sum(w.nbytes for w in quantized) / sum(w.shape[0] * w.shape[1] for w in quantized)
    others = sorted({w.scheme.name for w in quantized} - {scheme.name})
    also = f" (some as {', '.join(others)})" if others else ""
    note(f"{args.out}: {len(quantized)} weights as {scheme.name}{also}, {bits:.2f} bits per weight")


def by_gptq(path: Path, scheme: Scheme, args: argparse.Namespace) -> dict[str, QuantizedWeight]:
    generator = load(path, head="none", drafter="none", device="cpu", dtype=args.dtype, pack=False)
    texts = calibration(generator, args.calibration, args.calibration_tokens)
    note(f"calibrating on {len(texts)} texts, {sum(map(len, texts))} tokens")
    model = generator.model
    with tqdm(total=sum(len(products(layer)) for layer in model.layers), unit="weight", desc="gptq") as bar:
        return quantize_layers(model, texts, scheme, lambda: bar.update(1))


def calibration(generator: Any, path: Path, longest: int) -> list[list[int]]:
    """Token ids of the calibration texts; prompts without an answer are answered by the model itself, greedily."""
    rows = read_json_lines(path)
    texts = [generator.tokenizer.encode_prompt(r["text"])[:longest] for r in rows if isinstance(r.get("text"), str)]
    asked = [r for r in rows if isinstance(r.get("prompt"), str)]
    if len(texts) + len(asked) < len(rows):
        raise FasteaError(f"{path}: every line must have a 'text' or a 'prompt' (and an 'answer')")
    open_prompts = [r["prompt"] for r in asked if not r.get("answer")]
    for lo in tqdm(range(0, len(open_prompts), 8), unit="batch", desc="answers", disable=not open_prompts):
        group = open_prompts[lo : lo + 8]
        for prompt, output in zip(group, generator.generate(group, max_new_tokens=96), strict=True):
            asked.append({"prompt": prompt, "answer": output.text, "ids": output.ids})
    answered = [r for r in asked if r.get("answer")]
    samples = make_samples(answered, generator.tokenizer, None, generator.max_seq_len)
    return [*texts, *([*s.tokens][:longest] for s in samples)]


def write(out: Path, files: Checkpoint, kept: dict[str, Weight], scheme: str, dtype: torch.dtype) -> None:
    """The folder: config.json with the record of every quantized weight, safetensors, tokenizer."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    entries = {}
    for name, weight in kept.items():
        if isinstance(weight, QuantizedWeight):
            stem = name.rpartition(".")[0]
            entries[stem] = entry_of(weight)
            tensors |= {f"{stem}.{suffix}": t.contiguous() for suffix, t in weight.tensors().items()}
        else:
            tensors[name] = weight.to(dtype).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt", "fastea": str(VERSION)})
    if files.gguf:
        config = config_to_hf(files.config)
        save_gguf_vocabulary(files.gguf.meta, str(files.path), out)
    else:
        config = {k: v for k, v in files.raw.items() if k != "quantization_config"}
        for name in KEPT:
            if (files.folder / name).is_file():
                shutil.copyfile(files.folder / name, out / name)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config[KEY] = {"version": VERSION, "scheme": scheme, "weights": entries}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
