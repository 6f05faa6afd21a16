"""Training of an EAGLE-1 head on cached features."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from fastea.config import FasteaError, ModelConfig
from fastea.eagle import EagleHead
from fastea.llama import Llama
from fastea.training.data import Sample, draft_vocabulary, supervised_rows
from fastea.training.features import FeatureStore
from fastea.training.losses import cross_entropy


@dataclass
class Recipe:
    """Everything that decides a training run. The weights are those of feature loss and cross-entropy (the paper's)."""

    feature_weight: float = 1.0
    token_weight: float = 0.1
    learning_rate: float = 1e-3
    warmup: int = 100  # steps
    epochs: float = 10.0
    batch_tokens: int = 2048
    noise: float = 0.1  # features get U(-noise, noise)
    clip: float = 0.5  # gradient norm
    intermediate: int = 0  # 0 = the target's
    kv_heads: int = 0  # 0 = as many as query heads
    draft_vocab: int = 0  # 0 = the target's whole vocabulary
    self_feed: float = 0.0  # share of sequences that get the head's own features in half of their rows
    prompt_rows: bool = False  # train on the rows of prompts too (the target's distribution exists there as well)
    seed: int = 0


def new_head(target: Llama, recipe: Recipe, draft_ids: torch.Tensor | None) -> EagleHead:
    """A fresh head in fp32 with the target's width, head count and rotary base."""
    c = target.config
    config = ModelConfig(
        hidden_size=c.hidden_size,
        intermediate_size=recipe.intermediate or c.intermediate_size,
        num_layers=1,
        num_heads=c.num_heads,
        num_kv_heads=recipe.kv_heads or c.num_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        max_position=c.max_position,
    )
    head = EagleHead(config, fc_bias=True, qkv_bias=False, draft_ids=draft_ids)
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, p in head.named_parameters():
            if name.endswith("norm.weight"):
                p.fill_(1.0)
            elif name.endswith("bias"):
                p.zero_()
            else:
                scale = 0.2 if name.endswith(("o.weight", "down.weight")) else 1.0  # near the identity at first
                p.normal_(0.0, scale / math.sqrt(p.shape[1]), generator=generator)
    return head.requires_grad_(True)


def forward_rows(head: EagleHead, inputs: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Predicted features of the rows in `keep` [B, T] booleans -> [kept, h]. inputs: [B, T, 2h], right-padded."""
    layer = head.layer
    x = head.fc(inputs)
    q, k, v = layer.project(x, head.rope[: x.shape[1]].expand(x.shape[0], -1, -1, -1))
    shape = (x.shape[1], head.config.num_heads // head.config.num_kv_heads)
    k, v = (t.repeat_interleave(shape[1], dim=2).transpose(1, 2) for t in (k, v))
    mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)
    return layer.finish(x[keep], mixed[keep])


class Batches:
    """Batches of like-length samples, about `tokens` tokens each, in an order drawn from (seed, epoch)."""

    def __init__(self, store: FeatureStore, indices: list[int], tokens: int, seed: int, prompt_rows: bool = False):
        self.store, self.indices, self.tokens, self.seed = store, indices, tokens, seed
        self.first = store.shared if prompt_rows else None  # first trained token, None = the answer's first

    def epoch(self, number: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1000003 + number)
        shuffled = [self.indices[i] for i in torch.randperm(len(self.indices), generator=generator).tolist()]
        batches: list[list[int]] = []
        for lo in range(0, len(shuffled), 512):
            group: list[int] = []
            for i in sorted(shuffled[lo : lo + 512], key=lambda i: len(self.store.samples[i].tokens)):
                if group and (len(group) + 1) * len(self.store.samples[i].tokens) > self.tokens:
                    batches.append(group)
                    group = []
                group.append(i)
            batches.append(group)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def following(self, step: int) -> Iterator[list[int]]:
        """The batches after the first `step` ones, epoch after epoch without end; epochs may differ by a batch."""
        for number in itertools.count():
            order = self.epoch(number)
            yield from order[step:]
            step = max(0, step - len(order))

    def load(self, group: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens [B, T], features [B, T, h] fp32, supervised rows [B, T]; right-padded with zeros."""
        samples = [self.store.samples[i] for i in group]
        width = max(len(s.tokens) for s in samples)
        tokens = torch.zeros(len(group), width, dtype=torch.int64)
        features = torch.zeros(len(group), width, self.store.data.shape[1])
        rows = torch.zeros(len(group), width, dtype=torch.bool)
        for b, (i, sample) in enumerate(zip(group, samples, strict=True)):
            length = len(sample.tokens)
            tokens[b, :length] = torch.tensor(sample.tokens)
            features[b, :length] = self.store.features(i)
            first = sample.answer_start if self.first is None else self.first
            rows[b, :length] = supervised_rows(length, first)
        return tokens, features, rows


def head_inputs(
    target: Llama, scale: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor, noise: float, seed: int
) -> torch.Tensor:
    """[embedding of t_{p+1}, f_p + noise] for every row p, times scale [2h]. The last row's token is padding."""
    if noise:
        generator = torch.Generator().manual_seed(seed)
        features = features + (torch.rand(features.shape, generator=generator) * 2 - 1) * noise
    following = F.pad(tokens[:, 1:], (0, 1))
    return torch.cat((target.embed.weight[following], features), dim=-1) * scale


class Trainer:
    """One run: state in `folder` (checkpoint.pt, log.jsonl), resumable at any step."""

    def __init__(
        self,
        target: Llama,
        train: FeatureStore,
        held: FeatureStore,
        recipe: Recipe,
        folder: Path,
        limit: int | None = None,
        init: EagleHead | None = None,
    ):
        """limit: use this many samples at most. init: a head of this target to start from, its draft vocabulary too."""
        self.target, self.recipe, self.folder, self.held = target, recipe, folder, held
        count = min(len(train), limit or len(train))
        if not count or not len(held):
            raise FasteaError(f"{train.folder}: no features yet")
        self.samples: list[Sample] = train.samples[:count]
        self.batches = Batches(train, list(range(count)), recipe.batch_tokens, recipe.seed, recipe.prompt_rows)
        self.held_batches = Batches(held, list(range(len(held))), recipe.batch_tokens, recipe.seed)
        if init is None:
            draft_ids = draft_vocabulary(train.samples, recipe.draft_vocab) if recipe.draft_vocab else None
            self.head = new_head(target, recipe, draft_ids)
        else:
            self.head = init.float().requires_grad_(True)
        self.head.bind(target, max(len(s.tokens) for s in self.samples + held.samples))
        # fc sees inputs of unit variance while it is trained; the scale is folded into its weight afterwards.
        sample = torch.cat([train.features(i).float() for i in range(min(count, 200))])
        embedding = target.embed.weight.float().std().expand(target.config.hidden_size)
        self.scale = 1 / torch.cat((embedding, sample.std(dim=0) + 1e-3))
        if init is not None:
            self.head.fc.weight.data.div_(self.scale)
        elif self.head.fc.bias is not None:
            self.head.fc.bias.data.copy_(sample.mean(dim=0))  # start at the mean feature
        trained = [p for p in self.head.parameters() if p.requires_grad]  # not the target's LM head
        decay = [p for p in trained if p.dim() > 1]
        others = [p for p in trained if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
        self.step, self.seconds, self.losses = 0, 0.0, (0.0, 0.0)
        self.total = max(1, round(recipe.epochs * len(self.batches.epoch(0))))
        self.data = [train.identity, count]
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Continue from the folder's checkpoint; False if there is none. A different recipe is refused."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        changed = {k for k, v in asdict(self.recipe).items() if state["recipe"].get(k) != v and k != "epochs"}
        if state["data"] != self.data:
            changed.add("data")
        if changed:
            raise FasteaError(
                f"{path}: was made with other settings ({', '.join(sorted(changed))}); use another --work"
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.scale = state["step"], state["seconds"], state["scale"]
        return True

    def save(self) -> None:
        state: dict[str, Any] = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"step": self.step, "seconds": self.seconds, "scale": self.scale}
        temporary = self.folder / "checkpoint.new"
        torch.save(state | {"recipe": asdict(self.recipe), "data": self.data}, temporary)
        temporary.replace(self.folder / "checkpoint.pt")

    def rate(self, budget: float | None) -> float:
        """Learning rate: linear warm-up, then cosine to 2 % at the end of the steps or of the time budget."""
        progress = self.step / self.total
        if budget:
            progress = max(progress, self.seconds / budget)
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.recipe.learning_rate * decay * min(1.0, (self.step + 1) / self.recipe.warmup)

    def run(self, budget: float | None = None, evaluate_every: int = 500) -> None:
        """Train to the end of the epochs or of the time budget (seconds), logging and saving on the way."""
        bar = tqdm(total=self.total, initial=self.step, unit="step", desc="training")
        begin = time.monotonic() - self.seconds
        self.forget_log_after(self.step)
        for group in self.batches.following(self.step):
            if self.step >= self.total or (budget and self.seconds >= budget):
                break
            self.losses = self.train_step(group, budget)
            self.step += 1
            self.seconds = time.monotonic() - begin
            bar.update(1)
            last = self.step >= self.total or bool(budget and self.seconds >= budget)
            if self.step % 20 == 0 or last:
                feature, token = self.losses
                bar.set_postfix(feature=f"{feature:.3f}", token=f"{token:.3f}")
                self.log(step=self.step, seconds=self.seconds, feature=feature, token=token)
            if self.step % evaluate_every == 0 or last:
                self.log(step=self.step, seconds=self.seconds, held=self.evaluate())
                self.save()
        bar.close()

    @torch.no_grad()
    def mix_own_features(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """In a share of the sequences half of the rows get the feature that the head predicts for them, as rows of
        depth 2 and more do when drafting. [B, T, h] -> [B, T, h]."""
        generator = torch.Generator().manual_seed(self.step)
        some = torch.rand(features.shape[0], generator=generator) < self.recipe.self_feed
        if not some.any():
            return features
        rows = torch.rand(features[some].shape[:2], generator=generator) < 0.5
        rows[:, 0] = False  # nothing predicts the first feature
        inputs = head_inputs(self.target, self.scale, tokens[some], features[some], 0.0, 0)
        own = forward_rows(self.head, inputs, torch.ones_like(rows)).view_as(features[some]).roll(1, 1)
        mixed = features.clone()
        mixed[some] = torch.where(rows[..., None], own, features[some])
        return mixed

    def train_step(self, group: list[int], budget: float | None) -> tuple[float, float]:
        tokens, features, rows = self.batches.load(group)
        seen = self.mix_own_features(tokens, features) if self.recipe.self_feed else features
        inputs = head_inputs(self.target, self.scale, tokens, seen, self.recipe.noise, self.step)
        predicted = forward_rows(self.head, inputs, rows)
        wanted = features[:, 1:][rows[:, :-1]]  # row p predicts f_{p+1}
        feature_loss = F.smooth_l1_loss(predicted, wanted)
        token_loss = cross_entropy(predicted, wanted, self.head.lm.weight)
        self.optimizer.zero_grad(set_to_none=True)
        (self.recipe.feature_weight * feature_loss + self.recipe.token_weight * token_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.recipe.clip)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = self.rate(budget)
        self.optimizer.step()
        return feature_loss.item(), token_loss.item()

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Held-out 0-alpha: how often the target's greedy token is among the head's first 1, 2, 3, 4 guesses,
        with true features behind it."""
        hits, count = torch.zeros(4), 0
        for group in self.held_batches.epoch(0):
            tokens, features, rows = self.held_batches.load(group)
            predicted = forward_rows(self.head, head_inputs(self.target, self.scale, tokens, features, 0.0, 0), rows)
            wanted = self.target.logits(features[:, 1:][rows[:, :-1]]).argmax(-1)
            guesses = self.head.target_ids(self.head.logits(predicted).topk(4, dim=-1).indices)
            hits += (guesses == wanted[:, None]).sum(0).cumsum(0)
            count += wanted.numel()
        return {"rows": count, "top": [round(h, 4) for h in (hits / max(1, count)).tolist()]}

    def log(self, **entry: Any) -> None:
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(entry) + "\n")

    def forget_log_after(self, step: int) -> None:
        """A fresh or resumed run does not repeat steps in its log."""
        path = self.folder / "log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")

    def finished(self) -> EagleHead:
        """The head as it is used: the input scale folded into fc."""
        with torch.no_grad():
            self.head.fc.weight.mul_(self.scale)
        self.scale = torch.ones_like(self.scale)
        return self.head.requires_grad_(False).eval()
