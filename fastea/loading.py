"""`load`: a checkpoint, a head and some choices -> a Generator."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import torch

from fastea.checkpoint import Checkpoint, read_json, same_model
from fastea.config import FasteaError
from fastea.demo import demo_model
from fastea.drafters import Drafter
from fastea.drafters.draft_model import DraftModelDrafter
from fastea.drafters.dynamic import DynamicEagleDrafter
from fastea.drafters.eagle import EagleDrafter, HeadDrafter
from fastea.drafters.hybrid import HybridDrafter
from fastea.drafters.ngram import NgramDrafter
from fastea.eagle import DraftHead
from fastea.eagle3 import Eagle3Head
from fastea.generator import Generator
from fastea.gguf_vocabulary import from_gguf
from fastea.head_files import load_head
from fastea.kernels.packed import has_amx
from fastea.kernels.rows import find_row_sizes
from fastea.linear import probes
from fastea.llama import Llama
from fastea.memory import check_weights_fit
from fastea.planner import Planner
from fastea.quantized import Quantizer
from fastea.round import Round
from fastea.runtime import can_compile, note, resolve_device, resolve_dtype, resolve_head_quant, use_triton
from fastea.tokenizer import Tokenizer, from_folder
from fastea.tree import MAX_NODES, DynamicTree, Tree, parse_tree

DEFAULT_CONTEXT = 4096  # tokens, where the model allows them
DRAFTERS = ("auto", "eagle", "ngram", "hybrid", "none", "model")
COPIED = 8  # tokens of an earlier continuation that join a head's tree
SHIPPED_HEADS = Path(__file__).parent / "heads"


def load(
    checkpoint: str | Path | None = None,
    head: str | Path = "auto",
    *,
    drafter: str = "auto",
    tree: str | Tree | DynamicTree | None = None,
    accept: str = "match",
    quant: str | None = None,
    head_quant: str = "auto",
    exact: bool = False,
    max_seq_len: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    compile: bool = False,
    kernels: str = "auto",
    pack: bool = True,
) -> Generator:
    """Load a model for generation.

    checkpoint: a Hugging Face folder or a GGUF file; None is the demo model, fetched once. head: "auto" (a shipped
    head that fits, else the folder `eagle` beside the checkpoint, else none), "none", or a head's folder. drafter:
    "auto" (eagle if there is a head), "eagle", "ngram", "hybrid" (both), "none", or "model:PATH", a small model. tree:
    see `fastea.tree.parse_tree`; "auto", which is the default where the head's card says how often it is accepted, is
    chosen by measurement (`fastea.planner`); accept: "match" (the same text for a seed with any drafter) or
    "rejection" (the paper's sampling). quant: "int8" or "int4" rounds
    the target's linear weights (GGUF blocks of as many bits stay as they are), None takes the file as it is, a GGUF
    file dequantized; head_quant: "none", "int8", "int4" for the head, or "auto", what is fastest here. exact: the path
    whose rows do not depend on the rows beside them. max_seq_len: context in tokens. kernels: "triton", "torch", or
    "auto", Triton's on a GPU that can run them. pack: False keeps the target's weights as plain matrices, for training
    and quantizing.
    Raises FasteaError with one clear line.
    """
    begin = time.perf_counter()
    kind_of_drafter, _, draft_path = drafter.partition(":")
    if kind_of_drafter not in DRAFTERS or (kind_of_drafter == "model") != bool(draft_path):
        raise FasteaError(f"--drafter {drafter}: known are {', '.join(DRAFTERS[:-1])} and model:PATH")
    if accept not in ("match", "rejection"):
        raise FasteaError(f"--accept {accept}: known are match and rejection")
    where = resolve_device(device)
    automatic = tree == "auto"
    shape: Tree | DynamicTree | None = None
    if not automatic:
        shape = parse_tree(tree) if isinstance(tree, str) else tree
    files = Checkpoint(checkpoint if checkpoint is not None else demo_model())
    limit = files.config.max_position
    context = max_seq_len if max_seq_len is not None else min(limit, DEFAULT_CONTEXT)
    if not 1 < context <= limit:
        raise FasteaError(f"--max-seq-len {context}: the model's context is {limit} tokens, at least 2 are needed")
    tokenizer = _tokenizer(files)
    stored = quant or files.quant
    kind = resolve_dtype(dtype, where, files.config.dtype, stored is not None)
    check_weights_fit(files.config, kind, stored, where)
    triton = use_triton(kernels, where, kind, files.config)
    quantizer = Quantizer(quant, kind, where, pack, triton)
    target_kind, round_kind = Llama, Round
    if triton:
        from fastea import fused

        target_kind, round_kind = fused.FusedLlama, fused.FusedRound
    model = files.load(quantizer, target_kind)
    model.set_context(context)
    small = resolve_head_quant(head_quant, kind, triton)
    rejection = accept == "rejection"
    found: tuple[str, DraftHead] | None = None
    proposer: Drafter | None
    if draft_path:
        if str(head) not in ("auto", "none"):
            note(f"--head {head} is not used: --drafter {drafter} needs none")
        draft = Checkpoint(draft_path)
        if draft.quant and head_quant not in ("auto", "none"):
            raise FasteaError(f"--head-quant {head_quant}: {draft_path} is quantized already ({draft.quant})")
        small = None if draft.quant else small
        check_weights_fit(draft.config, kind, draft.quant or small, where)
        if triton and not use_triton("auto", where, kind, draft.config):
            raise FasteaError(f"{draft_path}: the kernels cannot run this draft model; --kernels torch can")
        small_quantizer = Quantizer(small, kind, where, triton=triton)
        proposer = _draft_model(draft, shape, model, tokenizer, context, rejection, small_quantizer)
    else:
        found = _find_head(head, drafter, model, files.folder, Quantizer(small, kind, where, triton=triton))
        proposer = _drafter(found, drafter, shape, model, context, rejection, where)
    if compile and not triton and not can_compile(where):
        note("--compile is off: no C++ compiler (or, on a GPU, no Triton) was found; running eager")
        compile = False
    exact = exact and not triton  # there every path is exact
    if compile and exact:
        note("--compile is off: --exact runs eager, since compiled kernels may sum in another order")
        compile = False
    row_sizes = find_row_sizes(probes(model)) if exact else None
    planner = None
    if found and isinstance(proposer, HeadDrafter) and (automatic or (tree is None and "acceptance" in found[1].card)):
        head_shape = f"{type(found[1]).__name__} {found[1].config.intermediate_size}, {len(found[1].ids)} ids"
        where_kept = (
            f"{_shape(model)}, {kind}, quant {stored}; {head_shape}, quant {small}; accept {accept}, exact {exact}, "
            f"triton {triton}"
        )
        planner = Planner(functools.partial(_head_drafter, found[1], rejection, where), found[1].card, where_kept)
    if automatic and planner is None:
        tree_taken = proposer.tree.name if proposer else "none"
        note(f"--tree auto is for a head that drafts alone; here the tree is {tree_taken}")
    generator = Generator(
        model,
        tokenizer,
        proposer,
        max_seq_len=context,
        rejection=rejection,
        row_sizes=row_sizes,
        compile=compile,
        round_kind=round_kind,
        info={
            "model": files.path.name,
            "dtype": str(kind).removeprefix("torch."),
            "device": where,
            "kernels": "triton" if triton else "torch",
            "quant": stored or "none",
            "bits_per_weight": quantizer.bits_per_weight,
            "quant_report": quantizer.report() if stored else None,
            "head_quant": small or "none",
            "tree": "auto" if planner else (proposer.tree.name if proposer else "none"),
            "head": found[0] if found else (proposer.name if proposer else "none"),
        },
        planner=planner,
    )
    generator.load_s = time.perf_counter() - begin
    return generator


def _find_head(
    head: str | Path, drafter: str, model: Llama, folder: Path, quantizer: Quantizer
) -> tuple[str, DraftHead] | None:
    """(name, head) by the rule of `load`, None where there is none to use."""
    if str(head) == "none" or drafter in ("ngram", "none"):
        if drafter in ("eagle", "hybrid"):
            raise FasteaError(f"--drafter {drafter} needs a head, but --head is none")
        return None
    if str(head) != "auto":
        return Path(head).name, load_head(head, model, quantizer)
    for path in sorted(SHIPPED_HEADS.glob("*/config.json")):
        if same_model(model, read_json(path).get("fastea", {}).get("target", [])):
            return path.parent.name, load_head(path.parent, model, quantizer)
    beside = folder / "eagle"
    if (beside / "config.json").is_file():
        return str(beside), load_head(beside, model, quantizer)
    if drafter in ("eagle", "hybrid"):
        raise FasteaError(f"--drafter {drafter}: no head for this model; pass --head FOLDER or put one into {beside}")
    note("no head for this model: decoding plain (train one with scripts/train_head.py, or try --drafter ngram)")
    return None


def _shape(model: Llama) -> str:
    c = model.config
    return f"{c.num_layers} layers of {c.hidden_size} and {c.intermediate_size}, {c.vocab_size} ids"


def default_tree(head: DraftHead, device: str, dtype: torch.dtype) -> str:
    """On a GPU, where more rows cost little, the published tree of the head's kind; in bf16 on a CPU with AMX the first
    of them. Elsewhere a product's time grows from a few rows on."""
    if device.startswith("cuda"):
        return "dynamic:60,10,8" if isinstance(head, Eagle3Head) else "eagle1"
    return "eagle1" if dtype == torch.bfloat16 and has_amx() else "chain:3"


def _drafter(
    found: tuple[str, DraftHead] | None,
    drafter: str,
    tree: Tree | DynamicTree | None,
    model: Llama,
    context: int,
    rejection: bool,
    device: str,
) -> Drafter | None:
    """Over a head, or from the text alone."""
    if found:
        found[1].bind(model, context)
        shape = tree or parse_tree(default_tree(found[1], device, model.embed.weight.dtype))
        inner = _head_drafter(found[1], rejection, device, shape)
        if isinstance(shape, DynamicTree) and inner.tree != shape:
            note(f"--tree {shape.name} is {inner.tree.name} here: more does not exist, or less is no tree")
        if drafter != "hybrid":
            return inner
        if rejection:
            raise FasteaError("--drafter hybrid needs --accept match: under rejection no token may stand there twice")
        length = min(COPIED, MAX_NODES - len(inner.tree))
        if length < 1:
            raise FasteaError(f"--drafter hybrid: the tree {inner.tree.name} leaves no room; at most {MAX_NODES} nodes")
        return HybridDrafter(inner, length)
    if drafter == "ngram":
        return NgramDrafter(_chain(tree, drafter, "chain:8").to(device))
    if tree is not None:
        note(f"--tree {tree.name} is not used: there is no drafter")
    return None


def _head_drafter(head: DraftHead, rejection: bool, device: str, tree: Tree | DynamicTree) -> HeadDrafter:
    if isinstance(tree, DynamicTree):
        return DynamicEagleDrafter(head, tree, rejection)
    return EagleDrafter(head, tree.to(device), rejection)


def _chain(tree: Tree | DynamicTree | None, drafter: str, default: str) -> Tree:
    shape = tree or parse_tree(default)
    if isinstance(shape, DynamicTree) or not shape.is_chain:
        raise FasteaError(f"--drafter {drafter} drafts chains, not the tree {shape.name}; use --tree chain:K")
    return shape


def _draft_model(
    files: Checkpoint,
    tree: Tree | DynamicTree | None,
    target: Llama,
    tokenizer: Tokenizer,
    context: int,
    rejection: bool,
    quantizer: Quantizer,
) -> DraftModelDrafter:
    """A small model of the same vocabulary, from a folder or a GGUF file."""
    path, theirs = files.path, _tokenizer(files)
    if (theirs.pieces, theirs.specials) != (tokenizer.pieces, tokenizer.specials):
        sizes = f"{len(theirs)} ids, the target's {len(tokenizer)}"
        reason = sizes if len(theirs) != len(tokenizer) else f"{sizes}, but not the same ones"
        raise FasteaError(f"{path}: the draft model's vocabulary has {reason}; it belongs to another family of models")
    if files.config.vocab_size < len(tokenizer):
        raise FasteaError(f"{path}: it embeds {files.config.vocab_size} ids, its tokenizer has {len(tokenizer)}")
    shape = _chain(tree, "model", "chain:4").to(quantizer.device)
    model = files.load(quantizer, type(target))
    model.set_context(context)
    return DraftModelDrafter(model, shape, len(tokenizer), rejection, target.config.vocab_size)


def _tokenizer(files: Checkpoint) -> Tokenizer:
    if files.gguf:
        return from_gguf(files.gguf.meta, str(files.path), files.config.eos_ids)
    return from_folder(files.folder, files.config.eos_ids)
