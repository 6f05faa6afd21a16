"""Is the text the model's own? Ids against plain decoding's, and a distribution against the exact one."""

from __future__ import annotations

from typing import Any

import torch
from tqdm import tqdm

from fastea.answer import Output
from fastea.config import ModelConfig
from fastea.drafters.eagle import EagleDrafter
from fastea.eagle import EagleHead
from fastea.evaluation.questions import Question
from fastea.generator import Generator
from fastea.llama import Llama
from fastea.sampling import Sampling, log_probs
from fastea.tokenizer import Tokenizer
from fastea.tree import Tree

TINY, CONTEXT = 8, 64  # ids and positions of the model whose distribution is known


def compare(plain: Generator, fast: Generator, questions: list[Question], options: dict[str, Any]) -> dict[str, Any]:
    """How many first turns get equal ids; the first difference of the others with its top-2 gap. With a temperature the
    seed is the same on both sides."""
    differences, tokens, same = [], 0, 0
    for question in tqdm(questions, unit="question"):
        a, b = (answer(model, question.turns[0], options) for model in (plain, fast))
        at = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        tokens, same = tokens + len(a), same + at
        if a != b:
            gap = top_gap(plain, question.turns[0], a[:at])
            differences.append(
                {"task": question.task, "question": question.number, "position": at, "gap": round(gap, 6)}
            )
            print(f"{question.task} {question.number}: first difference at token {at}, top-2 gap {gap:.2e}")
    return {
        "equal": len(questions) - len(differences),
        "questions": len(questions),
        "tokens": tokens,
        "tokens_before_a_difference": same,
        "differences": differences,
    }


def answer(model: Generator, prompt: str, options: dict[str, Any]) -> list[int]:
    """Ids of one answer."""
    output = model.generate(prompt, **options)
    assert isinstance(output, Output)
    return output.ids


@torch.inference_mode()
def top_gap(generator: Generator, prompt: str, ids: list[int]) -> float:
    """Difference of the two largest logits after prompt + ids."""
    state = generator.state(1)
    generator.prefill(state, 0, generator.encode(prompt) + ids)
    best = generator.model.logits(state.features[0, 0]).topk(2).values
    return float(best[0] - best[1])


def total_variation(seeds: int = 2000, batch: int = 50, rejection: bool = False) -> dict[str, float]:
    """The second and third token that speculation samples from a random model of TINY ids (the first comes with the
    prompt), over many seeds, against their exact joint distribution: half the sum of the differences of all cells.

    expected: what as many draws from the exact distribution give on average; bound: what they exceed in 0.1 % of all
    cases (from 2000 simulated experiments). More than that is no sampling from this distribution.
    """
    config = ModelConfig(
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=TINY,
        norm_eps=1e-5, rope_theta=10000.0, max_position=CONTEXT,
    )  # fmt: skip
    target = Llama(config).eval()
    head = EagleHead(ModelConfig(**(vars(config) | {"num_layers": 1})), fc_bias=True, qkv_bias=False).eval()
    noise = torch.Generator().manual_seed(0)
    for module in (target, head):
        for name, weight in module.named_parameters():
            weight.data.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3, generator=noise)
    target.set_context(CONTEXT)
    head.bind(target, CONTEXT)
    pieces = [bytes([65 + i]) for i in range(TINY)]
    tokenizer = Tokenizer(lambda text: [ord(c) - 65 for c in text], pieces, {})
    tree = Tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)], "six")
    drafter = EagleDrafter(head, tree, rejection)
    model = Generator(target, tokenizer, drafter, max_seq_len=CONTEXT, rejection=rejection)
    counts = torch.zeros(TINY, TINY)
    for first in tqdm(range(0, seeds, batch), unit="batch", desc="distribution"):
        streams = list(range(first, first + batch))
        outputs = model.generate(["ABC"] * batch, max_new_tokens=3, temperature=1.0, seed=1, streams=streams)
        assert isinstance(outputs, list)
        for output in outputs:
            counts[output.ids[1], output.ids[2]] += 1
    exact = joint(model, [0, 1, 2]).flatten()
    found = float((counts.flatten() / seeds - exact).abs().sum() / 2)
    drawn = torch.stack(
        [torch.bincount(torch.multinomial(exact, seeds, True, generator=noise), minlength=TINY**2) for _ in range(2000)]
    )
    usual = (drawn / seeds - exact).abs().sum(1) / 2
    return {
        "seeds": seeds,
        "total_variation": round(found, 4),
        "expected": round(float(usual.mean()), 4),
        "bound": round(float(usual.quantile(0.999)), 4),
    }


@torch.inference_mode()
def joint(model: Generator, prompt: list[int]) -> torch.Tensor:
    """Probabilities of the second and third token after a prompt [V, V] at temperature 1."""
    state, total = model.state(1), torch.zeros(TINY, TINY)
    sampling = Sampling(1.0, seed=0)

    def after(ids: list[int]) -> torch.Tensor:
        state.reset(sampling, [0])
        model.prefill(state, 0, ids)
        return log_probs(model.model.logits(state.features[0, :1]), sampling)[0].exp()

    for a, chance in enumerate(after(prompt)):
        for b, then in enumerate(after([*prompt, a])):
            total[b] += chance * then * after([*prompt, a, b])
    return total


def markdown(found: dict[str, Any]) -> str:
    text = f"{found['equal']} of {found['questions']} answers equal, {found['tokens']} tokens compared\n"
    if found["differences"]:
        text += "\n| task | question | first difference at token | top-2 gap |\n| --- | --- | --- | --- |\n"
        for row in found["differences"]:
            text += f"| {row['task']} | {row['question']} | {row['position']} | {row['gap']:.2e} |\n"
    if "distribution" in found:
        d = found["distribution"]
        text += (
            f"\nTotal variation of two sampled tokens from the exact distribution, {d['seeds']} seeds: "
            f"{d['total_variation']} (exact draws: {d['expected']} on average, above {d['bound']} in 0.1 % of cases)\n"
        )
    return text
