"""Prompts in, answers out: prefill, then rounds until every sequence has ended."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from fastea.answer import Output
from fastea.config import FasteaError
from fastea.drafters import Draft, Drafter
from fastea.engine import Engine
from fastea.llama import Llama
from fastea.memory import available_bytes, tensor_bytes
from fastea.planner import Planner
from fastea.replay import Replay
from fastea.round import Outcome, Round
from fastea.run import Prompt, Run
from fastea.runtime import compiling, note
from fastea.sampling import PICK, Sampling, noise_key, pick
from fastea.state import DecodeState
from fastea.tokenizer import Tokenizer
from fastea.tree import AnyTree

CHUNK = 64  # prompt tokens a prefill forward takes
REPLAYS = 4  # graphs that are kept, one for each kind of sampling: each has memory of its own


class Generator:
    """A loaded model, ready to answer. Made by `fastea.load`.

    drafter None = plain decoding. row_sizes: None = fast path, else the exact path. info: what runs, for reports
    (model, dtype, device, quant, tree, head).
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        drafter: Drafter | None,
        *,
        max_seq_len: int,
        rejection: bool = False,
        row_sizes: tuple[int, ...] | None = None,
        compile: bool = False,
        round_kind: type[Round] = Round,
        info: dict[str, Any] | None = None,
        planner: Planner | None = None,
    ):
        self.model, self.tokenizer, self.max_seq_len = model, tokenizer, max_seq_len
        self.info, self.load_s, self.compile_s = info or {}, 0.0, 0.0
        self.row_sizes, self.rejection, self.round_kind, self.compile = row_sizes, rejection, round_kind, compile
        self.device = model.embed.weight.device
        self.seconds = {"draft": 0.0, "verify": 0.0, "accept": 0.0}  # of all rounds; on a GPU, of launching them
        self._states: dict[tuple[Any, ...], DecodeState] = {}
        self.planner = planner
        self.engine = Engine(self, drafter)
        self.closed = False
        self._busy = threading.Lock()

    @property
    def drafter(self) -> Drafter | None:
        return self.engine.drafter

    @property
    def round(self) -> Round:
        return self.engine.round

    @property
    def tree(self) -> AnyTree:
        return self.engine.round.tree

    def check_open(self) -> None:
        """Raises FasteaError after `close`."""
        if self.closed:
            raise FasteaError("this model is closed; load it again")

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """The model is one caller's, in this thread or another. Raises FasteaError while it is another's."""
        self.check_open()
        if not self._busy.acquire(blocking=False):
            raise FasteaError(
                "this model is writing another answer, and it writes one at a time: let that stream end, or "
                "interrupt() it"
            )
        try:
            yield
        finally:
            self._busy.release()

    @property
    def stop_ids(self) -> frozenset[int]:
        """End marks of tokenizer and model."""
        return self.tokenizer.stop_ids | frozenset(self.model.config.eos_ids)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, the head's included."""
        return tensor_bytes(self.model, self.drafter.module if self.drafter else None)

    def encode(self, prompt: Prompt, system: str | None = None, raw: bool = False) -> list[int]:
        """Token ids of a prompt: text or messages through the chat template (raw: text as it is), ids as they are."""
        if system is not None and (raw or self.tokenizer.template is None or not isinstance(prompt, str)):
            raise FasteaError(
                "a system message needs the chat template and a prompt in text (not raw, ids or messages)"
            )
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_prompt(prompt) if raw else self.tokenizer.encode_question(prompt, system)
        elif prompt and isinstance(prompt[0], dict):
            ids = self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        else:
            ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        if not ids:
            raise FasteaError("the prompt is empty; give at least one character")
        vocab = self.model.config.vocab_size
        if not all(0 <= i < vocab for i in ids):
            raise FasteaError(f"the prompt holds the id {max(ids)}, the model's vocabulary has {vocab} ids")
        if len(ids) >= self.max_seq_len:
            raise FasteaError(
                f"the prompt has {len(ids)} tokens, the context {self.max_seq_len}: "
                "no room for an answer; shorten it or raise --max-seq-len"
            )
        return ids

    def generate(self, prompt: Prompt | list[str], **options: object) -> Output | list[Output]:
        """The whole answer. A list of texts is decoded together, each as it would be alone; options as `stream`."""
        many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str)
        prompts = list(prompt) if many else [prompt]
        run = Run(self, prompts, **options)  # type: ignore[arg-type]
        for _ in run:
            pass
        return run.outputs if many else run.outputs[0]

    def stream(self, prompt: Prompt, **options: object) -> Run:
        """An iterator of text pieces, which join to the answer's text; `.outputs[0]` is the report, at any time.

        Options: max_new_tokens (256), temperature, top_k, top_p, seed, stop (strings), system, raw, ignore_eos,
        streams (noise stream of each prompt, default 0, 1, ...), observe (called with every round's Outcome),
        stop_when (called between rounds with the outputs so far; true ends them as "interrupted"), reuse (keep what
        the caches hold of this prompt's beginning since the last call; see `reusable`).
        """
        return Run(self, [prompt], **options)  # type: ignore[arg-type]

    def cache_bytes(self, batch: int = 1) -> int:
        """Bytes of the KV caches for a batch, the drafter's included, made or not."""
        caches = [self.model.new_cache(batch, self.max_seq_len, "meta")]
        if self.drafter and (draft := self.drafter.new_cache(batch, self.max_seq_len, "meta")):
            caches.append(draft)
        return sum(cache.nbytes for cache in caches)

    def check_memory(self, batch: int, instead: str) -> None:
        """Raises FasteaError if the KV caches for a batch cannot fit. instead: what to try."""
        needed, free = self.cache_bytes(batch), available_bytes(str(self.device))
        if free is not None and needed > free:
            raise FasteaError(
                f"the KV cache for {batch} x {self.max_seq_len} tokens takes {needed / 1e9:.1f} GB, "
                f"{free / 1e9:.1f} GB are free; try {instead}"
            )

    def state(self, batch: int) -> DecodeState:
        """The preallocated state for a batch size; the one of another size is given up. Refused if it cannot fit."""
        key = (batch, *self.engine.layout)
        if key not in self._states:
            self._states.clear()
            for engine in (self.engine, *(self.planner.engines.values() if self.planner else ())):
                engine.forget_graphs()
            self.check_memory(batch, "a lower --max-seq-len")
            with torch.inference_mode(False):  # the state outlives a caller's inference mode
                cache = self.model.new_cache(batch, self.max_seq_len)
                draft = self.drafter.new_cache(batch, self.max_seq_len) if self.drafter else None
                width = self.tree.depth_max + 1
                stops = len(self.stop_ids)
                self._states[key] = DecodeState(self.model, cache, draft, batch, width, self.max_seq_len, stops)
        return self._states[key]

    def warm_up(self, batch: int, sampling: Sampling, again: bool = True) -> None:
        """With `--tree auto`, take the tree that is best for these settings; and compile the shapes that a run needs,
        by running them: nothing compiles afterwards. again: also give up a tree that was chosen before, if what it
        accepted speaks for another."""
        begin = time.perf_counter()
        try:
            self._choose_tree(batch, sampling, again)
            if self.compile:
                self._compile(batch, sampling)
        except FasteaError:
            raise
        except Exception as error:  # a compiler that is there but does not work
            if not self.compile:
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            note(f"--compile is off: compiling failed ({reason}); running eager")
            self.compile = False
            self.engine.use(compile=False)
            if self.planner:
                self.planner.engines.clear()
            self._choose_tree(batch, sampling, again)
        if self.compile:
            self.compile_s += time.perf_counter() - begin

    def _choose_tree(self, batch: int, sampling: Sampling, again: bool) -> None:
        if self.planner:
            self.engine = self.planner.engine(self, batch, sampling, again)
            self.info["tree"] = self.planner.plans[batch, sampling.greedy].name

    def _compile(self, batch: int, sampling: Sampling) -> None:
        engine, key = self.engine, (batch, sampling.shape())
        if key in engine.warm:
            return
        with compiling():
            state = self._run_twice(batch, sampling)
            if engine.round.captures:
                while len(engine.replays) >= REPLAYS:
                    engine.warm.discard(oldest := next(iter(engine.replays)))
                    del engine.replays[oldest]
                engine.replays[key] = Replay(engine.round, state)
        engine.warm.add(key)

    def _run_twice(self, batch: int, sampling: Sampling) -> DecodeState:
        """A short prompt and two rounds: every shape that a run has."""
        state = self.state(batch)
        state.reset(sampling, list(range(batch)))
        for row in range(batch):
            self.prefill(state, row, [0, 0])
        pace = self.engine.pace
        for count in pace.buckets if pace else (None, None):
            self._step(state, count)
        return state

    @torch.inference_mode()
    def prefill(self, state: DecodeState, row: int, ids: list[int], room: int | None = None, kept: int = 0) -> int:
        """Run a prompt through target and drafter, chunk by chunk of one shape; returns the first new token. room:
        tokens that the answer may have, None: any number; kept: of the prompt's tokens, already in the caches."""
        cache = state.cache.row(row)
        draft = state.draft_cache.row(row) if state.draft_cache else None
        tokens = torch.tensor(ids + [0] * (-(len(ids) - kept) % CHUNK + 1), device=self.device)
        steps = torch.arange(CHUNK, device=self.device)
        for at in range(kept, len(ids), CHUNK):
            start = torch.full((1,), at, device=self.device)
            chunk = tokens[at : at + CHUNK].clone()[None]  # cloned first: one stride, one compiled shape
            features = self.model(chunk, (at + steps)[None], start, None, cache)
            if self.drafter:
                self.drafter.prefill(tokens[None, at : at + 1 + CHUNK], features, start, draft)
        last = features[0, (len(ids) - kept - 1) % CHUNK]
        logits = self.round.logits(last[None])
        if bool(logits.isnan().any()):
            raise FasteaError(_NAN)
        chosen_at = torch.tensor([[len(ids)]], device=self.device)
        key = noise_key(state.seed, state.stream[row : row + 1], chosen_at, PICK)
        first = pick(logits, key[:, 0], state.sampling)[0]
        state.begin(row, tokens[: len(ids)], last, first, self.max_seq_len if room is None else room)
        return int(first)

    def reusable(self, state: DecodeState, ids: list[int]) -> int:
        """How many rows of the caches a prompt may keep: of the tokens that it shares with the text of the last call,
        all but the last few, which a head drafted after with guessed features. On the exact path only whole chunks that
        a prefill made, since it sums in another order than a round: the text is then that of a fresh call."""
        pairs = zip(state.cached, ids, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self.row_sizes is None:
            return max(0, same - state.emitted.shape[1])
        return max(0, min(same - 1, state.prefilled)) // CHUNK * CHUNK

    def replay(self, state: DecodeState) -> Replay | None:
        """The graph of this state's rounds, ready for the first of them; None where rounds run part by part."""
        replay = self.engine.replays.get((len(state.root), state.sampling.shape()))
        if replay:
            replay.begin()
        return replay

    @torch.inference_mode()
    def step(self, state: DecodeState, replay: Replay | None = None) -> Outcome:
        """One round. replay: its graph, if there is one."""
        if replay:
            begin = time.perf_counter()
            outcome = replay.step()
            self.seconds["round"] = self.seconds.get("round", 0.0) + time.perf_counter() - begin
        else:
            outcome = self._step(state)
        if not bool(outcome.finite.all()):
            raise FasteaError(_NAN)
        return outcome

    @torch.inference_mode()
    def _step(self, state: DecodeState, count: int | None = None) -> Outcome:
        """A round part by part. count: the nodes that it verifies, None: as its pace says."""
        engine, times = self.engine, [time.perf_counter()]
        draft: Draft = engine.draft(state)
        if engine.pace:
            draft = draft.first(count) if count else engine.pace.cut(draft)
        times.append(time.perf_counter())
        features, logits = engine.round.verify(state, draft)
        times.append(time.perf_counter())
        outcome: Outcome = engine.accept(state, draft, features, logits)
        if engine.pace and not count:  # waits for the device, so that the time is the round's
            advanced = [n for n in outcome.count.tolist() if n]
        times.append(time.perf_counter())
        for name, begin, end in zip(self.seconds, times, times[1:], strict=False):
            self.seconds[name] += end - begin
        if engine.pace and not count:
            engine.pace.learn(sum(advanced) / max(1, len(advanced)), times[-1] - times[0])
        return outcome

    def beside(self, drafter: Drafter | None) -> Generator:
        """The same model and settings with another drafter, sharing the weights; None: without one, which is what
        speculation is compared with."""
        ran = {"tree": drafter.tree.name} if drafter else {"tree": "none", "head": "none"}
        return Generator(
            self.model, self.tokenizer, drafter, max_seq_len=self.max_seq_len,
            rejection=self.rejection and drafter is not None,
            row_sizes=self.row_sizes, compile=self.compile, round_kind=self.round_kind, info=self.info | ran,
        )  # fmt: skip

    def close(self) -> None:
        """Give the model's memory back; the object is of no use afterwards. Refused while a stream is open."""
        if not self.closed:
            with self.claimed():
                self.__dict__ = {"closed": True, "_busy": self._busy}


_NAN = (
    "the model's logits are not numbers (NaN): its activations overflow in this dtype; try --dtype bfloat16 or float32"
)
