"""Prompts in, answers out: prefill, then rounds until every sequence has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as PyGenerator
from typing import Any

import torch

from fastea.answer import Answer, Output
from fastea.config import FasteaError
from fastea.drafters import Drafter
from fastea.drafters.draft_model import DraftModelDrafter
from fastea.llama import DecoderLayer, Llama
from fastea.memory import available_bytes, tensor_bytes
from fastea.replay import Replay
from fastea.round import Outcome, Round
from fastea.runtime import compiled, compiling, note
from fastea.sampling import PICK, Sampling, noise_key, pick
from fastea.state import DecodeState
from fastea.tokenizer import Message, Tokenizer
from fastea.tree import AnyTree, chain

CHUNK = 64  # prompt tokens a prefill forward takes
REPLAYS = 4  # graphs that are kept, one for each kind of sampling: each has memory of its own

Prompt = str | Sequence[Message] | Sequence[int]


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
    ):
        self.model, self.tokenizer, self.drafter, self.max_seq_len = model, tokenizer, drafter, max_seq_len
        self.info, self.load_s, self.compile_s = info or {}, 0.0, 0.0
        self.tree: AnyTree = drafter.tree if drafter else chain(0).to(str(model.embed.weight.device))
        self.round = round_kind(model, self.tree, drafter, rejection, row_sizes, len(tokenizer))
        self.row_sizes = row_sizes
        self._use(compile)
        self.seconds = {"draft": 0.0, "verify": 0.0, "accept": 0.0}  # of all rounds; on a GPU, of launching them
        self._warm: set[tuple[int, Sampling]] = set()
        self._replays: dict[tuple[int, Sampling], Replay] = {}  # of the state that is held
        self._states: dict[int, DecodeState] = {}
        self.device = model.embed.weight.device
        self.closed = False

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
            if raw or self.tokenizer.template is None:
                ids = self.tokenizer.encode_prompt(prompt)
            else:
                messages = [{"role": "user", "content": prompt}]
                ids = self.tokenizer.encode_chat(
                    messages if system is None else [{"role": "system", "content": system}, *messages]
                )
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
        streams (noise stream of each prompt, default 0, 1, ...), observe (called with every round's Outcome).
        """
        return Run(self, [prompt], **options)  # type: ignore[arg-type]

    def cache_bytes(self, batch: int = 1) -> int:
        """Bytes of the KV caches for a batch, the drafter's included, made or not."""
        caches = [self.model.new_cache(batch, self.max_seq_len, "meta")]
        if self.drafter and (draft := self.drafter.new_cache(batch, self.max_seq_len, "meta")):
            caches.append(draft)
        return sum(cache.nbytes for cache in caches)

    def state(self, batch: int) -> DecodeState:
        """The preallocated state for a batch size; the one of another size is given up. Refused if it cannot fit."""
        if batch not in self._states:
            self._states.clear()
            self._warm -= self._replays.keys()
            self._replays.clear()
            needed, free = self.cache_bytes(batch), available_bytes(str(self.device))
            if free is not None and needed > free:
                raise FasteaError(
                    f"the KV cache for {batch} x {self.max_seq_len} tokens takes {needed / 1e9:.1f} GB, "
                    f"{free / 1e9:.1f} GB are free; lower --max-seq-len"
                )
            with torch.inference_mode(False):  # the state outlives a caller's inference mode
                cache = self.model.new_cache(batch, self.max_seq_len)
                draft = self.drafter.new_cache(batch, self.max_seq_len) if self.drafter else None
                width = self.tree.depth_max + 1
                stops = len(self.stop_ids)
                self._states[batch] = DecodeState(self.model, cache, draft, batch, width, self.max_seq_len, stops)
        return self._states[batch]

    def warm_up(self, batch: int, sampling: Sampling) -> None:
        """Compile the shapes that a run needs, by running them; nothing compiles afterwards."""
        if not self.compile or (batch, sampling.shape()) in self._warm:
            return
        begin = time.perf_counter()
        try:
            with compiling():
                state = self._run_twice(batch, sampling)
                if self.round.captures:
                    while len(self._replays) >= REPLAYS:
                        self._warm.discard(oldest := next(iter(self._replays)))
                        del self._replays[oldest]
                    self._replays[batch, sampling.shape()] = Replay(self.round, state)
        except FasteaError:
            raise
        except Exception as error:  # a compiler that is there but does not work
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            note(f"--compile is off: compiling failed ({reason}); running eager")
            self._use(compile=False)
        self._warm.add((batch, sampling.shape()))
        self.compile_s += time.perf_counter() - begin

    def _use(self, compile: bool) -> None:
        """The round's parts, compiled or as they are: one layer of the target for all of them, which compiles in
        seconds, drafting and accepting. Prefill stays eager: it is one forward of many rows."""
        self.compile = compile
        compile = compile and not self.round.captures  # there the round is one graph of kernels, and nothing compiles

        def part(function: Callable[..., Any]) -> Callable[..., Any]:
            return compiled(function) if compile else function

        self.round.run_layer = part(DecoderLayer.forward)
        if isinstance(self.drafter, DraftModelDrafter):  # a decoder of its own: layer by layer as well
            self.drafter.run_layer, self._draft = self.round.run_layer, self.round.draft
        else:
            self._draft = part(self.round.draft)
        self._accept = part(self.round.accept)

    def _run_twice(self, batch: int, sampling: Sampling) -> DecodeState:
        """A short prompt and two rounds: every shape that a run has."""
        state = self.state(batch)
        state.reset(sampling, list(range(batch)))
        for row in range(batch):
            self.prefill(state, row, [0, 0])
        for _ in range(2):
            self.step(state)
        return state

    @torch.inference_mode()
    def prefill(self, state: DecodeState, row: int, ids: list[int], room: int | None = None) -> int:
        """Run a prompt through target and drafter, chunk by chunk of one shape; returns the first new token. room:
        tokens that the answer may have, None: any number."""
        cache = state.cache.row(row)
        draft = state.draft_cache.row(row) if state.draft_cache else None
        tokens = torch.tensor(ids + [0] * (-len(ids) % CHUNK + 1), device=self.device)
        steps = torch.arange(CHUNK, device=self.device)
        for at in range(0, len(ids), CHUNK):
            start = torch.full((1,), at, device=self.device)
            chunk = tokens[at : at + CHUNK].clone()[None]  # cloned first: one stride, one compiled shape
            features = self.model(chunk, (at + steps)[None], start, None, cache)
            if self.drafter:
                self.drafter.prefill(tokens[None, at : at + 1 + CHUNK], features, start, draft)
        last = features[0, (len(ids) - 1) % CHUNK]
        logits = self.round.logits(last[None])
        if bool(logits.isnan().any()):
            raise FasteaError(_NAN)
        chosen_at = torch.tensor([[len(ids)]], device=self.device)
        key = noise_key(state.seed, state.stream[row : row + 1], chosen_at, PICK)
        first = pick(logits, key[:, 0], state.sampling)[0]
        state.begin(row, tokens[: len(ids)], last, first, self.max_seq_len if room is None else room)
        return int(first)

    def replay(self, state: DecodeState) -> Replay | None:
        """The graph of this state's rounds, ready for the first of them; None where rounds run part by part."""
        replay = self._replays.get((len(state.root), state.sampling.shape()))
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

    def _step(self, state: DecodeState) -> Outcome:
        times = [time.perf_counter()]
        draft = self._draft(state)
        times.append(time.perf_counter())
        features, logits = self.round.verify(state, draft)
        times.append(time.perf_counter())
        outcome: Outcome = self._accept(state, draft, features, logits)
        times.append(time.perf_counter())
        for name, begin, end in zip(self.seconds, times, times[1:], strict=False):
            self.seconds[name] += end - begin
        return outcome

    def plain(self) -> Generator:
        """The same model and settings without a drafter, sharing the weights: what speculation is compared with."""
        info = self.info | {"tree": "none", "head": "none"}
        return Generator(
            self.model, self.tokenizer, None, max_seq_len=self.max_seq_len, row_sizes=self.row_sizes,
            compile=self.compile, round_kind=type(self.round), info=info,
        )  # fmt: skip

    def close(self) -> None:
        """Give the model's memory back; the object is of no use afterwards."""
        self.__dict__ = {"closed": True}


_NAN = (
    "the model's logits are not numbers (NaN): its activations overflow in this dtype; try --dtype bfloat16 or float32"
)


class Run:
    """One call: an iterator of text pieces of the first prompt, and `outputs`, one for each prompt."""

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        system: str | None = None,
        raw: bool = False,
        ignore_eos: bool = False,
        streams: Sequence[int] | None = None,
        observe: Callable[[Outcome], None] | None = None,
    ):
        if generator.closed:
            raise FasteaError("this model is closed; load it again")
        if max_new_tokens < 1:
            raise FasteaError(f"max_new_tokens {max_new_tokens} is not possible; it must be at least 1")
        self.generator, self.observe = generator, observe
        self.sampling = Sampling(temperature, top_k, top_p, seed).with_seed()
        self.prompts = [generator.encode(p, system, raw) for p in prompts]
        self.streams = list(streams) if streams is not None else list(range(len(prompts)))
        self.stop_ids = frozenset() if ignore_eos else generator.stop_ids
        stops = [stop] if isinstance(stop, str) else list(stop)
        self.answers: list[Answer] = []
        for ids in self.prompts:
            room = min(max_new_tokens, generator.max_seq_len - len(ids))
            answer = Answer(generator.tokenizer, self.stop_ids, stops, room, ids)
            answer.output.seed = None if self.sampling.greedy else self.sampling.seed
            self.answers.append(answer)
        self._pieces = self._go()

    @property
    def outputs(self) -> list[Output]:
        return [answer.output for answer in self.answers]

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def interrupt(self) -> str:
        """Stop here; returns text that was still held back. `outputs` then hold what was produced."""
        self._pieces.close()
        rest = [answer.interrupt() for answer in self.answers]
        return rest[0]

    def _go(self) -> PyGenerator[str, None, None]:
        generator, answers = self.generator, self.answers
        generator.warm_up(len(answers), self.sampling)
        state = generator.state(len(answers))
        state.reset(self.sampling, self.streams, self.stop_ids)
        state.owner = self
        for row, (ids, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            begin = time.perf_counter()
            first = generator.prefill(state, row, ids, answer.limit)
            answer.output.prefill_s = time.perf_counter() - begin
            piece = answer.push([first])
            if answer.finished:
                state.retire(row)
            if row == 0 and piece:
                yield piece
        replay = generator.replay(state)
        while not all(answer.finished for answer in answers):
            if state.owner is not self:
                raise FasteaError("another generation was started on this model; finish one before the next")
            begin = time.perf_counter()
            outcome = generator.step(state, replay)
            emitted, counts = outcome.emitted.tolist(), outcome.count.tolist()
            seconds = time.perf_counter() - begin
            if self.observe:
                self.observe(outcome)
            for row, answer in enumerate(answers):
                if answer.finished:
                    continue
                answer.output.decode_s += seconds
                answer.output.rounds += 1
                answer.output.accepted.append(counts[row] - 1)
                piece = answer.push(emitted[row][: counts[row]])
                if answer.finished:
                    state.retire(row)
                if row == 0 and piece:
                    yield piece
