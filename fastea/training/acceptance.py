"""How often drafts are accepted, by depth and child rank, measured by decoding held-out prompts."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from fastea.acceptance import AcceptanceTable
from fastea.generator import Generator


def measure(
    generator: Generator, prompts: list[str], max_new_tokens: int, batch: int = 8, **options: Any
) -> dict[str, Any]:
    """Decode the prompts, `batch` at a time; tokens per round (accepted drafts + 1, averaged over all rounds) and the
    table."""
    table, rounds, tokens = AcceptanceTable(generator.tree), 0, 0
    bar = tqdm(total=len(prompts), unit="prompt", desc="acceptance")
    for lo in range(0, len(prompts), batch):
        outputs = generator.generate(
            prompts[lo : lo + batch], max_new_tokens=max_new_tokens, observe=table.add, **options
        )
        assert isinstance(outputs, list)
        for output in outputs:
            rounds += output.rounds
            tokens += output.round_tokens
        bar.update(len(outputs))
    bar.close()
    return {
        "tree": generator.tree.name,
        "prompts": len(prompts),
        "rounds": rounds,
        "tokens_per_round": round(tokens / max(1, rounds), 3),
        "rates": table.rates(),
    }
