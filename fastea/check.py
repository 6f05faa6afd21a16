"""Does a head fit its target? Measured on a short answer of the target's own."""

from __future__ import annotations

import torch

from fastea.config import FasteaError
from fastea.drafters.eagle import HeadDrafter
from fastea.drafters.hybrid import HybridDrafter
from fastea.eagle import DraftHead
from fastea.eagle3 import Eagle3Head
from fastea.generator import Generator

PROMPT = (
    "Explain in simple words how a bicycle stays upright while it is moving, why it falls over when it stands still, "
    "and what the rider does with the handlebars in a curve. Then give three short pieces of advice to somebody who is "
    "learning to ride."
)
TOKENS = 192
GOOD, WIRED = 0.5, 0.2  # 0-alpha of published heads on chat text is 0.7 to 0.8; below the second it is chance


def head_drafter(generator: Generator) -> HeadDrafter | None:
    """What drafts with a head, alone or beside prompt lookup; None where nothing does."""
    drafter = generator.drafter.inner if isinstance(generator.drafter, HybridDrafter) else generator.drafter
    return drafter if isinstance(drafter, HeadDrafter) else None


def head_of(generator: Generator) -> DraftHead:
    """The head that drafts. Raises FasteaError where there is none."""
    drafter = head_drafter(generator)
    if drafter is None:
        raise FasteaError("--check-head: nothing is drafted by a head here; give one with --head FOLDER")
    return drafter.head


@torch.inference_mode()
def zero_alpha(generator: Generator) -> tuple[float, int]:
    """How often the head's first guess is the target's greedy token, over TOKENS tokens that the target itself wrote,
    with true features before each; and how many tokens these were."""
    head, model, device = head_of(generator), generator.model, generator.device
    try:
        prompt = generator.encode(PROMPT)
    except FasteaError as error:
        raise FasteaError(f"--check-head: its own prompt cannot be used ({error})") from None
    answer = generator.beside(None).generate(prompt, max_new_tokens=TOKENS + 1, ignore_eos=True)
    assert not isinstance(answer, list)
    tokens = torch.tensor([prompt + answer.ids[:-1]], device=device)
    count = tokens.shape[1]
    start, positions = torch.zeros(1, dtype=torch.int64, device=device), torch.arange(count, device=device)[None]
    features = model(tokens, positions, start, None, model.new_cache(1, generator.max_seq_len))
    out = head(
        tokens[:, 1:], features[:, :-1], positions[:, :-1], start, None, 0, head.new_cache(1, generator.max_seq_len)
    )
    rows = slice(len(prompt) - 1, None)  # row p guesses token p + 2
    guesses = head.target_ids(head.top(head.logits(out[:, rows]), 1)[1])[0, :, 0]
    wanted = generator.round.logits(features[:, 1:][:, rows]).argmax(-1)[0]
    return float((guesses == wanted).float().mean()), wanted.numel()


def verdict(alpha: float) -> str:
    if alpha >= GOOD:
        return "the head fits"
    if alpha >= WIRED:
        return "the head fits, but is weak: little trained, or for other text or another version of the model"
    return "the head does not fit this model: its weights are wired wrongly, or belong to another one"


def describe(head: DraftHead) -> str:
    """One line: kind, shapes, and what is the head's own."""
    c = head.config
    layer = f"{c.hidden_size} wide, {c.num_heads} heads and {c.num_kv_heads} KV heads of {c.head_dim}"
    if isinstance(head, Eagle3Head):
        kind, reads, owner = 3, f"the states before layers {', '.join(map(str, head.taps))}", "of its own"
    else:
        kind, reads, owner = 1, "the final state", "of the target"
    rows = f"LM head {owner} over {head.lm.shape[0]} of {c.vocab_size} ids"
    embedding = "an embedding of its own" if hasattr(head, "embed") else "the target's embedding"
    biases = [n for n, part in (("fc", head.fc), ("q, k and v", head.layer.qkv)) if part.bias is not None]
    bias = f"; biases of {' and '.join(biases)}" if biases else ""
    return f"EAGLE-{kind}: {layer}, MLP {c.intermediate_size}; reads {reads}; {rows}; {embedding}{bias}"
