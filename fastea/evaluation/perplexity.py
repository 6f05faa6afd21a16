"""Perplexity of a text, and how far a model's distributions are from a reference's."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from fastea.config import FasteaError
from fastea.generator import Generator


def perplexity(model: Generator, reference: Generator, text: str, window: int, stride: int) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of a text's tokens, each with at least window - stride tokens before it
    where there are so many, and the mean KL divergence from the reference, in nats a token."""
    if model.tokenizer.pieces != reference.tokenizer.pieces:
        raise FasteaError("the reference has another vocabulary; it must be a version of the same model")
    ids = torch.tensor(model.tokenizer.encode_prompt(text), device=model.device)
    if len(ids) < 2:
        raise FasteaError("the text is too short: there must be at least two tokens to score")
    loss = other_loss = divergence = 0.0
    scored = 1  # the first token has nothing before it
    bar = tqdm(total=len(ids) - 1, unit="token")
    while scored < len(ids):
        end = min(len(ids), max(scored + stride, window) if scored == 1 else scored + stride)
        seen = ids[max(0, end - window) : end]
        count = end - scored
        mine, theirs = (log_likelihoods(g, seen, count) for g in (model, reference))
        wanted = seen[-count:, None]
        loss -= mine.gather(1, wanted).sum().item()
        other_loss -= theirs.gather(1, wanted).sum().item()
        divergence += F.kl_div(mine, theirs, log_target=True, reduction="sum").item()
        scored = end
        bar.update(count)
    bar.close()
    count = len(ids) - 1
    return {
        "tokens": count,
        "perplexity": round(math.exp(loss / count), 4),
        "reference_perplexity": round(math.exp(other_loss / count), 4),
        "kl_divergence": round(divergence / count, 6),
    }


@torch.inference_mode()
def log_likelihoods(generator: Generator, window: torch.Tensor, count: int) -> torch.Tensor:
    """Log-probabilities of the last `count` tokens' places [count, V] after the tokens before them."""
    cache = generator.state(1).cache
    start, places = (
        torch.zeros(1, dtype=torch.int64, device=window.device),
        torch.arange(len(window), device=window.device),
    )
    features = generator.model(window[None], places[None], start, None, cache)
    logits = generator.model.logits(features[0, -count - 1 : -1])
    return torch.log_softmax(logits[:, : generator.round.valid_vocab], -1)
