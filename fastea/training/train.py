"""Training of EAGLE-1 and EAGLE-3 heads on cached features."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from fastea.config import FasteaError, ModelConfig
from fastea.eagle import DraftHead, EagleHead
from fastea.eagle3 import Eagle3Head, default_taps
from fastea.llama import Llama
from fastea.training.data import Sample, draft_vocabulary, supervised_rows
from fastea.training.features import FeatureStore, by_length
from fastea.training.losses import cross_entropy, distributions
from fastea.training.unroll import ScaledLinear, unroll

INPUTS = ("feature+shifted", "feature+unshifted", "token", "feature")  # figure 8 of the EAGLE paper
CHAIN = 5  # drafts of a chain that `evaluate` follows


@dataclass
class Recipe:
    """Everything that decides a training run; the defaults are for EAGLE-1 on a few million tokens."""

    kind: str = "eagle1"  # or eagle3
    inputs: str = "feature+shifted"  # what an EAGLE-1 head reads: one of INPUTS
    feature_weight: float = 1.0  # of the loss on features; the paper's
    token_weight: float = 0.1  # of the cross-entropy; the paper's
    steps: int = 1  # drafting steps that are trained; from the second on the head reads its own states
    step_weight: float = 0.8  # a step's weight in the loss, relative to the one before (EAGLE-3's)
    learning_rate: float = 1e-3
    warmup: int = 100  # optimizer steps, a tenth of all at most
    epochs: float = 10.0
    batch_tokens: int = 2048
    noise: float = 0.1  # features get U(-noise, noise)
    clip: float = 0.5  # gradient norm
    intermediate: int = 0  # 0 = the target's
    kv_heads: int = 0  # 0 = as many as query heads
    draft_vocab: int = 0  # 0 = the target's whole vocabulary
    prompt_rows: bool = False  # train on the rows of prompts too (the target's distribution exists there as well)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in RECIPES or self.inputs not in INPUTS:
            raise FasteaError(
                f"--kind {self.kind} --inputs {self.inputs}: known are {' and '.join(RECIPES)}; {', '.join(INPUTS)}"
            )
        if self.warmup < 1:
            raise FasteaError(f"--warmup {self.warmup} is not possible; it must be at least 1")
        if self.steps < 1 or (self.kind == "eagle3" and (self.inputs != INPUTS[0] or self.feature_weight)):
            raise FasteaError("--steps must be at least 1; EAGLE-3 has no feature loss and always reads all its inputs")
        if min(self.feature_weight, self.token_weight) < 0 or not self.feature_weight + self.token_weight:
            raise FasteaError("--feature-weight and --token-weight must not be negative, nor both 0")


# What each kind of head changes in these defaults. EAGLE-3 (arXiv 2503.01840): no loss on features, no noise.
RECIPES: dict[str, dict[str, Any]] = {
    "eagle1": {},
    "eagle3": {"feature_weight": 0.0, "token_weight": 1.0, "steps": 5, "noise": 0.0},
}


def new_head(target: Llama, recipe: Recipe, draft_ids: torch.Tensor | None) -> DraftHead:
    """A fresh head in fp32 with the target's width, head count and rotary base. EAGLE-3's LM head starts as the
    target's rows. Raises FasteaError for head counts that do not divide."""
    c = target.config
    if c.num_heads % (recipe.kv_heads or c.num_heads):
        raise FasteaError(f"--kv-heads {recipe.kv_heads} does not divide the {c.num_heads} heads")
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
    if recipe.kind == "eagle3":
        head: DraftHead = Eagle3Head(config, default_taps(c.num_layers), c.hidden_size, draft_ids)
    else:
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
        if isinstance(head, Eagle3Head):
            rows = target.lm_head.weight if draft_ids is None else target.lm_head.weight[draft_ids]
            head.lm.weight.copy_(rows)
            head.norm.weight.fill_(0.5 / (head.lm.weight.std().item() * math.sqrt(c.hidden_size)))  # calm logits
    return head.requires_grad_(True)


class Batch(NamedTuple):
    """tokens: [B, T]; features: [B, T, F] fp32; rows: [B, A] those trained on; room: [B, A] how many steps of each row
    have a token of the text to predict, 0 = padding. Right-padded with zeros."""

    tokens: torch.Tensor
    features: torch.Tensor
    rows: torch.Tensor
    room: torch.Tensor


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
            batches += by_length(shuffled[lo : lo + 512], self.store.samples, self.tokens)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def following(self, step: int) -> Iterator[list[int]]:
        """The batches after the first `step` ones, epoch after epoch without end; epochs may differ by a batch."""
        for number in itertools.count():
            order = self.epoch(number)
            yield from order[step:]
            step = max(0, step - len(order))

    def load(self, group: list[int]) -> Batch:
        samples = [self.store.samples[i] for i in group]
        width = max(len(s.tokens) for s in samples)
        features = [self.store.features(i) for i in group]
        tokens = torch.zeros(len(group), width, dtype=torch.int64)
        padded = torch.zeros(len(group), width, features[0].shape[1])
        chosen = []
        for b, sample in enumerate(samples):
            length = len(sample.tokens)
            tokens[b, :length] = torch.tensor(sample.tokens)
            padded[b, :length] = features[b]
            first = sample.answer_start if self.first is None else self.first
            chosen.append(supervised_rows(length, first).nonzero()[:, 0])
        rows = torch.zeros(len(group), max(1, *map(len, chosen)), dtype=torch.int64)
        room = torch.zeros_like(rows)
        for b, (sample, at) in enumerate(zip(samples, chosen, strict=True)):
            rows[b, : len(at)] = at
            room[b, : len(at)] = len(sample.tokens) - 2 - at
        return Batch(tokens, padded, rows, room)


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
        init: DraftHead | None = None,
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
        self.head.bind(target, max(len(s.tokens) for s in self.samples + held.samples) + CHAIN)
        assert target.feature_size == train.features(0).shape[1], "the store was made for another kind of head"
        device, self.low = target.embed.weight.device, target.embed.weight.dtype  # of products
        self.device = device
        self.head.embed_weight = self.head.embed_weight.float()
        self.head.to(device)
        scale = self._scale(train, count, init is None).to(device)
        self.head.fc = ScaledLinear(self.head.fc, scale)
        if init is not None:
            self.head.fc.weight.data.div_(scale.where(scale > 0, 1))
        rows = target.lm_head.weight
        self.scored = (rows if self.head.draft_ids is None else rows[self.head.draft_ids]).to(self.low)
        trained = [p for p in self.head.parameters() if p.requires_grad]  # not the target's LM head
        decay = [p for p in trained if p.dim() > 1]
        others = [p for p in trained if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)
        self.step, self.seconds, self.losses = 0, 0.0, (0.0, 0.0)
        self.total = max(1, round(recipe.epochs * len(self.batches.epoch(0))))
        ids = None if self.head.draft_ids is None else self.head.draft_ids.tolist()
        shapes = [list(p.shape) for p in self.head.parameters()]
        self.data = [train.identity, count]
        self.shape = hashlib.sha256(json.dumps([ids, shapes]).encode()).hexdigest()
        self.result: dict[str, Any] | None = None  # of the last evaluation
        folder.mkdir(parents=True, exist_ok=True)

    def _scale(self, train: FeatureStore, count: int, fresh: bool) -> torch.Tensor:
        """What brings fc's inputs to unit variance; zero for those that the recipe leaves out."""
        sample = torch.cat([train.features(i).float() for i in range(min(count, 200))])
        scale = 1 / (sample.std(dim=0) + 1e-3)
        if isinstance(self.head, Eagle3Head):
            return scale[self.target.config.hidden_size :]  # the states inside the target, not the final one
        if fresh and self.head.fc.bias is not None:
            self.head.fc.bias.data.copy_(sample.mean(dim=0))  # start at the mean feature
        embedding = (1 / self.target.embed.weight.float().std().cpu()).expand(len(scale))
        if self.recipe.inputs == "token":
            scale = torch.zeros_like(scale)
        if self.recipe.inputs == "feature":
            embedding = torch.zeros_like(embedding)
        return torch.cat((embedding, scale))

    def resume(self) -> bool:
        """Continue from the folder's checkpoint; False if there is none. A different recipe is refused."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        changed = {k for k, v in asdict(self.recipe).items() if state["recipe"].get(k) != v and k != "epochs"}
        if state["data"] != self.data:
            changed.add("data")
        if state["shape"] != self.shape:
            changed.add("the head that it started from")
        if changed:
            raise FasteaError(
                f"{path}: was made with other settings ({', '.join(sorted(changed))}); use another --work"
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        return True

    def save(self) -> None:
        state: dict[str, Any] = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"step": self.step, "seconds": self.seconds}
        temporary = self.folder / "checkpoint.new"
        torch.save(state | {"recipe": asdict(self.recipe), "data": self.data, "shape": self.shape}, temporary)
        temporary.replace(self.folder / "checkpoint.pt")

    def rate(self, budget: float | None) -> float:
        """Learning rate: linear warm-up, then cosine to 2 % at the end of the steps or of the time budget."""
        progress = self.step / self.total
        if budget:
            progress = max(progress, self.seconds / budget)
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        warmup = min(self.recipe.warmup, max(1, self.total // 10))
        return self.recipe.learning_rate * decay * min(1.0, (self.step + 1) / warmup)

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
                self.result = self.evaluate()
                self.log(step=self.step, seconds=self.seconds, held=self.result)
                self.save()
        bar.close()

    def products(self) -> torch.autocast:
        """Where products are made in the target's dtype."""
        return torch.autocast(self.device.type, self.low, enabled=self.low != torch.float32)

    def passes(self, batch: Batch, steps: int) -> list[torch.Tensor]:
        """The head's outputs [B, A, h] of each step."""
        ahead = 0 if self.recipe.inputs == "feature+unshifted" else 1
        features = batch.features.to(self.device)
        if self.recipe.noise and torch.is_grad_enabled():
            generator = torch.Generator().manual_seed(self.step)
            noise = torch.rand(batch.features.shape, generator=generator) * 2 - 1
            features = features + (noise * self.recipe.noise).to(self.device)
        rows = batch.rows.to(self.device)
        with self.products():
            return list(unroll(self.head, batch.tokens.to(self.device), features, rows, steps, ahead))

    def train_step(self, group: list[int], budget: float | None) -> tuple[float, float]:
        """Losses on features and tokens. What the target says is its distribution over the draft vocabulary,
        renormalised: the best proposal, given that one is possible. (EAGLE's own code leaves out rows whose likeliest
        token is outside.)"""
        recipe, head, batch = self.recipe, self.head, self.batches.load(group)
        final = batch.features[..., : self.target.config.hidden_size].to(self.device)
        rows, room = batch.rows.to(self.device), batch.room.to(self.device)
        real = room > 0
        # Row p of step j predicts what the target says at p + 1 + j, as row p + j of the first step does.
        following = (rows + 1).clamp(max=final.shape[1] - 1)[..., None].expand(-1, -1, final.shape[2])
        wanted = final.gather(1, following)[real]
        place = torch.cumsum(real.flatten(), 0).view_as(room) - 1
        steps = torch.arange(recipe.steps, device=self.device)
        used = [room > step for step in steps]
        hidden = torch.cat([out[some] for out, some in zip(self.passes(batch, recipe.steps), used, strict=True)])
        at = torch.cat([place[some] + step for some, step in zip(used, steps, strict=True)])
        weights = recipe.step_weight**steps / (recipe.step_weight**steps).sum()
        counts = torch.stack([some.sum() for some in used])
        shares = (weights / counts.clamp(min=1)).repeat_interleave(counts)
        feature = token = torch.zeros((), device=self.device)
        if recipe.feature_weight:
            feature = (F.smooth_l1_loss(hidden, wanted[at], reduction="none").mean(-1) * shares).sum()
        if recipe.token_weight:
            target = distributions(wanted, self.scored)
            token = cross_entropy(head.lm_input(hidden), head.lm.weight, target, at, shares)
        total = recipe.feature_weight * feature + recipe.token_weight * token
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), recipe.clip)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = self.rate(budget)
        self.optimizer.step()
        return feature.item(), token.item()

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Held-out rows against the target's greedy tokens. top: how often these are among the head's first 1, 2, 3, 4
        guesses, with true features behind it. alpha: n-alpha of a chain, n = 0 .. 4: how often the first guess of step
        n is right where all guesses before it were the text's tokens."""
        hits, right, tried = torch.zeros(4), torch.zeros(CHAIN), torch.zeros(CHAIN)
        for group in self.held_batches.epoch(0):
            batch = self.held_batches.load(group)
            final = batch.features[..., : self.target.config.hidden_size].to(self.device, self.low)
            greedy = self.target.logits(final).argmax(-1).cpu()  # [B, T]
            last = batch.tokens.shape[1] - 1
            agreed = torch.ones_like(batch.rows, dtype=torch.bool)
            for j, hidden in enumerate(self.passes(batch, CHAIN)):
                with self.products():
                    guesses = self.head.target_ids(self.head.logits(hidden).topk(4, dim=-1).indices).cpu()
                wanted = greedy.gather(1, (batch.rows + 1 + j).clamp(max=last))
                some = agreed & (batch.room > j)
                right[j] += (guesses[..., 0] == wanted)[some].sum()
                tried[j] += some.sum()
                if j == 0:
                    hits += (guesses == wanted[..., None])[some].sum(0).cumsum(0)
                agreed = some & (guesses[..., 0] == batch.tokens.gather(1, (batch.rows + 2 + j).clamp(max=last)))
        return {
            "rows": int(tried[0]),
            "top": [round(h, 4) for h in (hits / tried[0].clamp(min=1)).tolist()],
            "alpha": [round(a, 4) for a in (right / tried.clamp(min=1)).tolist()],
        }

    def log(self, **entry: Any) -> None:
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(entry) + "\n")

    def forget_log_after(self, step: int) -> None:
        """A fresh or resumed run does not repeat steps in its log."""
        path = self.folder / "log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")

    def finished(self) -> DraftHead:
        """The head as it is used: the input scale folded into fc."""
        assert isinstance(self.head.fc, ScaledLinear)
        self.head.fc = self.head.fc.plain()
        return self.head.requires_grad_(False).eval()
