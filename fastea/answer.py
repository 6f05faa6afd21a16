"""The host's side of one answer: where it stops, its text, and what is reported about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastea.tokenizer import TextStream, Tokenizer


@dataclass
class Output:
    """One finished (or interrupted) answer.

    text: without end marks and stop strings. ids: as generated, an id that ended the text included.
    finish_reason: "stop" (end id or stop string), "length" (max_new_tokens or the context) or "interrupted".
    cached_tokens: of the prompt, those that were in the KV cache already.
    rounds: verify forwards; accepted: draft tokens accepted in each. tokens_per_round counts accepted tokens and the
    target's own, before the last round is cut. Times in seconds; tokens_per_s = new tokens after the first / decode_s.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str = "interrupted"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    accepted: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    seed: int | None = None

    @property
    def new_tokens(self) -> int:
        return len(self.ids)

    @property
    def round_tokens(self) -> int:
        """Tokens that the rounds gave: accepted ones and the target's own, before the last round is cut."""
        return sum(self.accepted) + self.rounds

    @property
    def tokens_per_round(self) -> float:
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        return max(0, self.new_tokens - 1) / self.decode_s if self.decode_s else 0.0


class Answer:
    """Takes accepted tokens as rounds deliver them; cuts at the first end id, stop string or limit.

    limit: most new tokens; prompt: the ids before them. Text that could still turn into a stop string is held back.
    spans: what the last `push` returned, in parts (text, whether a drafted token brought it).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        stops: Sequence[str],
        limit: int,
        prompt: Sequence[int] = (),
    ):
        self.output, self.limit = Output(prompt_tokens=len(prompt)), limit
        self._stop_ids, self._stops = stop_ids, [s for s in stops if s]
        self._stream = TextStream(tokenizer, prompt)
        self._held = ""
        self.spans: list[tuple[str, bool]] = []
        self.finished = False

    def push(self, tokens: Sequence[int]) -> str:
        """Add the tokens of a round in order, drafted ones and the target's own as the last; returns the text that is
        now certain."""
        self.spans = []
        for place, token in enumerate(tokens, 1):
            if self.finished:
                break
            self.output.ids.append(token)
            if token in self._stop_ids:
                text = self._finish("stop")
            else:
                text = self._release(self._stream.push([token]))
                if not self.finished and len(self.output.ids) >= self.limit:
                    text += self._finish("length")
            self.spans.append((text, place < len(tokens)))
        certain = "".join(text for text, _ in self.spans)
        self.output.text += certain
        return certain

    def interrupt(self) -> str:
        """End here; returns what was held back."""
        rest = "" if self.finished else self._finish("interrupted")
        self.spans = [(rest, False)]
        self.output.text += rest
        return rest

    def _release(self, piece: str) -> str:
        """Text before a stop string, or all that cannot become one."""
        self._held += piece
        found = [(at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            self.finished, self.output.finish_reason = True, "stop"
            text, self._held = self._held[: min(found)[0]], ""
            return text
        keep = max((n for s in self._stops for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _finish(self, reason: str) -> str:
        text = self._release(self._stream.finish()) + self._held
        self._held = ""
        if not self.finished:
            self.finished, self.output.finish_reason = True, reason
        return text
