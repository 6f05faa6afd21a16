"""One call of a model: prefill, then rounds until every answer has ended, as an iterator of text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as PyGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastea.answer import Answer, Output
from fastea.config import FasteaError
from fastea.round import Outcome
from fastea.sampling import Sampling
from fastea.tokenizer import Message
from fastea.tree import Tree

if TYPE_CHECKING:
    from fastea.generator import Generator

Prompt = str | Sequence[Message] | Sequence[int]


class Run:
    """An iterator of text pieces of the first prompt, and `outputs`, one for each prompt. Options as in
    `Generator.stream`. Nothing happens before the first piece is asked for; from then on the model is this run's until
    it ends, `interrupt` is called, or nobody holds it any more."""

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
        stop_when: Callable[[list[Output]], bool] | None = None,
        reuse: bool = False,
    ):
        generator.check_open()
        if max_new_tokens < 1:
            raise FasteaError(f"max_new_tokens {max_new_tokens} is not possible; it must be at least 1")
        if reuse and len(prompts) > 1:
            raise FasteaError("reuse is for one prompt at a time")
        prompt_ids = [generator.encode(p, system, raw) for p in prompts]
        sampling = Sampling(temperature, top_k, top_p, seed).with_seed()
        stop_ids = frozenset() if ignore_eos else generator.stop_ids
        stops = [stop] if isinstance(stop, str) else list(stop)
        self.answers: list[Answer] = []
        for ids in prompt_ids:
            room = min(max_new_tokens, generator.max_seq_len - len(ids))
            answer = Answer(generator.tokenizer, stop_ids, stops, room, ids)
            answer.output.seed = None if sampling.greedy else sampling.seed
            self.answers.append(answer)
        numbers = list(streams) if streams is not None else list(range(len(prompts)))
        call = _Call(generator, prompt_ids, self.answers, sampling, numbers, stop_ids, observe, stop_when, reuse)
        self._pieces = call.pieces()  # which does not hold this object: a dropped stream ends at once

    @property
    def outputs(self) -> list[Output]:
        return [answer.output for answer in self.answers]

    @property
    def spans(self) -> list[tuple[str, bool]]:
        """The last piece in parts: (text, whether an accepted draft token brought it)."""
        return self.answers[0].spans

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def interrupt(self) -> str:
        """Stop here; returns text that was still held back. `outputs` then hold what was produced."""
        self._pieces.close()
        return cut(self.answers)


def cut(answers: list[Answer]) -> str:
    """End them as interrupted; the first one's text that was still held back."""
    first, *_ = [answer.interrupt() for answer in answers]
    return first


@dataclass
class _Call:
    """What a run works on."""

    generator: Generator
    prompts: list[list[int]]
    answers: list[Answer]
    sampling: Sampling
    streams: list[int]
    stop_ids: frozenset[int]
    observe: Callable[[Outcome], None] | None
    stop_when: Callable[[list[Output]], bool] | None
    reuse: bool

    def pieces(self) -> PyGenerator[str, None, None]:
        """Text of the first answer; the model is this call's from the first piece to the last."""
        with self.generator.claimed():
            yield from self._decode()

    def _decode(self) -> PyGenerator[str, None, None]:
        generator, answers = self.generator, self.answers
        generator.warm_up(len(answers), self.sampling, again=not self.reuse)
        state = generator.state(len(answers))
        kept = generator.reusable(state, self.prompts[0]) if self.reuse else 0
        state.reset(self.sampling, self.streams, self.stop_ids, kept)
        for row, (ids, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            begin = time.perf_counter()
            first = generator.prefill(state, row, ids, answer.limit, kept)
            answer.output.prefill_s, answer.output.cached_tokens = time.perf_counter() - begin, kept
            piece = answer.push([first])
            if answer.finished:
                state.retire(row)
            if row == 0 and piece:
                yield piece
        try:
            yield from self._rounds()
        finally:  # the last token of an answer is not in the caches yet
            if len(answers) == 1:
                state.cached, state.prefilled = ids + answers[0].output.ids[:-1], len(ids)

    def _rounds(self) -> PyGenerator[str, None, None]:
        generator, answers = self.generator, self.answers
        state = generator.state(len(answers))
        replay = generator.replay(state)
        rounds, spent = 0, 0.0
        while not all(answer.finished for answer in answers):
            if self.stop_when and self.stop_when([answer.output for answer in answers]):
                yield cut(answers)
                return
            begin = time.perf_counter()
            outcome = generator.step(state, replay)
            emitted, counts = outcome.emitted.tolist(), outcome.count.tolist()
            seconds = time.perf_counter() - begin
            rounds, spent = rounds + 1, spent + seconds
            if generator.planner and isinstance(generator.tree, Tree):
                generator.engine.table.add(outcome)
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
        if generator.planner:
            generator.planner.observe(generator, len(answers), self.sampling, rounds, spent)
