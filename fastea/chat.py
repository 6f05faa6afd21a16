"""A conversation: every turn prefills only what is new in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fastea.answer import Output
from fastea.config import FasteaError
from fastea.demo import cache_folder
from fastea.generator import Generator
from fastea.run import Run
from fastea.runtime import note
from fastea.tokenizer import Message

COMMANDS = "/reset forgets the conversation, /system TEXT sets the system message and resets, /stats, /quit"
HISTORY = 1000  # lines of input that are remembered


class Chat:
    """messages: the conversation so far, as the chat template takes it. run: the last turn's, None before it.

    Options as in `Generator.stream`, for every turn, whose text is what `Generator.generate` gives for its messages: on
    the exact path always, else up to near-ties, since cached rows were summed in another order.
    """

    def __init__(self, generator: Generator, system: str | None = None, **options: Any):
        self.generator, self.options = generator, options
        self.run: Run | None = None
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Forget the conversation. system: the new system message, None: what the template puts."""
        self.system = system
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def send(self, text: str) -> Iterator[str]:
        """The answer's text in pieces. What was said until it ends, or the iterator is closed, joins the conversation.

        Raises FasteaError, and forgets `text`, if the conversation no longer fits the context.
        """
        turn = [*self.messages, {"role": "user", "content": text}]
        self.run = run = Run(self.generator, [turn], reuse=True, **self.options)
        try:
            yield from run
        finally:
            run.interrupt()
            if run.outputs[0].ids:
                self.messages = [*turn, {"role": "assistant", "content": run.outputs[0].text}]


def converse(chat: Chat, first: str | None, summary: Callable[[Output], str], show: Callable[[Run], None]) -> None:
    """Talk at a terminal until /quit or the end of the input. first: the first message, if there is one already;
    summary: what /stats prints of the last answer; show: prints the last piece of a run."""
    note(f"{COMMANDS}; Ctrl-C stops an answer, Ctrl-D ends")
    with _line_editing():
        while True:
            try:
                text = input("> ") if first is None else first
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return
            except UnicodeDecodeError:
                note("this input is not UTF-8; check the terminal's encoding")
                continue
            first = None
            command, _, rest = text.strip().partition(" ")
            if command == "/quit":
                return
            if command == "/reset":
                chat.reset(chat.system)
            elif command == "/system":
                chat.reset(rest.strip() or None)
            elif command == "/stats":
                print(summary(chat.run.outputs[0]) if chat.run else "nothing has been said yet")
            elif command.startswith("/"):
                note(f"{command} is no command: {COMMANDS}")
            elif command:
                _answer(chat, text, show)


def _answer(chat: Chat, text: str, show: Callable[[Run], None]) -> None:
    before = chat.messages
    try:
        for _ in chat.send(text):
            assert chat.run is not None
            show(chat.run)
        print()
    except KeyboardInterrupt:
        if chat.run:
            show(chat.run)  # what was held back
        print()
        note("stopped; the conversation goes on")
    except FasteaError as error:
        print()
        forgotten = chat.messages is before
        note(f"{error}{'; this message is forgotten, /reset starts anew' if forgotten else ''}")


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Line editing and history, where the standard library has them."""
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    path = cache_folder() / "chat_history"
    readline.set_history_length(HISTORY)
    with contextlib.suppress(OSError):  # there is none yet
        readline.read_history_file(path)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
        except OSError as error:
            note(f"{path}: the history is not kept ({error.strerror})")
