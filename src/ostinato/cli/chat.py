"""`ostinato chat`: a conversation in the terminal, with history and a few commands.

Ctrl-C stops an answer, not the program. With piped input every line is one message, and no prompt is shown.
"""

from __future__ import annotations

import signal
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from ostinato.cli import flags
from ostinato.cli.conversation import Conversation, check_file
from ostinato.cli.flags import Flag
from ostinato.cli.input import check_text, decode_text, is_typed
from ostinato.cli.loading import opened
from ostinato.cli.output import AnswerWriter, detail, talk, told, write
from ostinato.errors import BadInput, BadTemplate, PromptTooLong, listing
from ostinato.files.store import DEFAULT
from ostinato.options import Sampling

if TYPE_CHECKING:
    from ostinato.llm import LLM, Piece

_HELP = """\
/reset        forget the conversation (the system message stays)
/system TEXT  set the system message; alone, show it
/help         this list
/quit         leave (Ctrl-D too); Ctrl-C stops an answer"""


class CtrlC:
    """Raises an exception on Ctrl-C where the code expects it, and ignores it elsewhere.

    Without this a second Ctrl-C, typed while the first is still being answered, would end the program.
    """

    def __init__(self) -> None:
        self._is_awaited = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, *_: object) -> None:
        if self._is_awaited:
            self._is_awaited = False
            raise KeyboardInterrupt

    @contextmanager
    def awaited(self) -> Iterator[None]:
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False


class Dialogue:
    """The conversation so far and the model that answers it.

    Attributes:
        messages: the system message, if there is one, and the turns; the conversation's own list.
        has_state: whether the model remembers an answer, a loaded one or a new one, so that a state can be saved.
    """

    def __init__(self, llm: LLM, sampling: Sampling, conversation: Conversation, ctrl_c: CtrlC) -> None:
        self.ctrl_c = ctrl_c
        self.llm = llm
        self.sampling = sampling
        self.messages = conversation.open(None)
        self.has_state = conversation.is_saved
        self._reuse = conversation.file is not None

    @property
    def system(self) -> str | None:
        return self.messages[0]["content"] if self._n_system else None

    @property
    def _n_system(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def say(self, text: str) -> None:
        """Answer one message of the user; the history keeps the shown part of an answer that was stopped."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer: list[str] = []
        try:
            with self.ctrl_c.awaited():
                asked, pieces = self._submitted(asked)
                self._show(pieces, answer)
        except PromptTooLong as error:
            talk(f"your message does not fit: {told(error)}; it was dropped")
            return
        except BadTemplate as error:
            talk(f"error: {error}; your message was dropped")
            return
        except KeyboardInterrupt:
            write("\n")
            talk("(stopped)")
        self.messages[:] = [*asked, {"role": "assistant", "content": "".join(answer)}]

    def _submitted(self, asked: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Iterator[Piece]]:
        """The conversation and its answer; if it is too long for the context, without its oldest turns."""
        try:
            return asked, self.llm.stream_chat(asked, self.sampling, reuse=self._reuse)
        except PromptTooLong:
            if (shorter := self._shortened(asked)) is None:
                raise
        pieces = self.llm.stream_chat(shorter, self.sampling, reuse=self._reuse)
        dropped = len(asked) - len(shorter)
        talk(f"(the context of {self.llm.context} tokens is full: the oldest {dropped} messages are dropped)")
        return shorter, pieces

    def _shortened(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The conversation from the earliest turn from which an answer has room, or else from the last."""
        from ostinato.text.chat import room_for_answer, without_oldest_turns

        most = self.llm.context - room_for_answer(self.sampling, self.llm.context)
        shorter = without_oldest_turns(asked)
        first = bisect_left(shorter, True, key=lambda messages: len(self.llm.chat_ids(messages)) <= most)
        return shorter[min(first, len(shorter) - 1)] if shorter else None

    def _show(self, pieces: Iterator[Piece], answer: list[str]) -> None:
        last: Piece | None = None
        writer = AnswerWriter()
        for last in pieces:
            answer.append(last.text)
            writer.write(last)
        writer.end()
        completion = last.completion if last else None
        if completion is None:
            return
        self.has_state = True
        used = len(completion.prompt_ids) + len(completion.token_ids)
        detail(f"[{used} of {self.llm.context} tokens, {completion.timings.decode_tok_s or 0:.1f} tok/s]")
        if completion.finish_reason == "length" and used >= self.llm.context:
            talk(f"(cut: the context of {self.llm.context} tokens is full; the next message drops the oldest)")
        elif completion.finish_reason == "length":
            talk(f"(cut after {len(completion.token_ids)} tokens, see --max-tokens)")

    # --- commands ---

    def reset(self, _: str) -> None:
        del self.messages[self._n_system :]
        talk("(a new conversation)")

    def set_system(self, text: str) -> None:
        if text:
            self.messages[: self._n_system] = [{"role": "system", "content": text}]
            talk("(the system message is set; /reset forgets what was said before)")
        else:
            talk(f"(system message: {self.system})" if self.system else "(no system message)")


def converse(dialogue: Dialogue, lines: Iterator[str]) -> None:
    """Handle lines until they end or one is /quit."""
    commands: dict[str, Callable[[str], None]] = {
        "/reset": dialogue.reset,
        "/system": dialogue.set_system,
        "/help": lambda _: talk(_HELP),
    }
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word in ("/quit", "/exit"):
            return
        if word in commands:
            commands[word](rest.strip())
        elif word.startswith("/"):
            talk(f"unknown command {word}; known: {listing(word, [*commands, '/quit'])}")
        elif word:
            dialogue.say(line.strip())


def typed_lines(ctrl_c: CtrlC) -> Iterator[str]:
    """Lines that a person types, with the editing that the terminal offers; Ctrl-C gives a fresh line."""
    with suppress(ImportError):  # not on every system; its import is what gives input() its line editing
        import readline  # noqa: F401  imported for what it does to input()
    while True:
        try:
            with ctrl_c.awaited():
                line = _ask()
            yield check_text(line, "the message")
        except EOFError:
            write("\n")
            return
        except BadInput as error:
            talk(f"error: {error}")
        except KeyboardInterrupt:
            write("\n")
            talk("(/quit or Ctrl-D leaves)")


def _ask() -> str:
    if sys.stdout.isatty():
        return input("> ")
    sys.stderr.write("> ")  # standard output is redirected, and the prompt is not part of it
    sys.stderr.flush()
    return input()


def piped_lines(ctrl_c: CtrlC) -> Iterator[str]:
    """Lines of a file or a pipe; none if standard input is closed."""
    for number in count(1):
        with ctrl_c.awaited():
            line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
        if not line:
            return
        yield decode_text(line, f"line {number} of standard input")


@flags.verb
def chat(
    *,
    model: flags.ModelAnywhere = DEFAULT,
    system: Annotated[str | None, Flag("A system message before the conversation.", "TEXT")] = None,
    state: Annotated[
        Path | None, Flag("Continue the conversation in FILE, if it exists; save it on leaving.", "FILE")
    ] = None,
    sampling: flags.Choosing,
    load: flags.ToGenerate,
) -> None:
    """Talk with a model in the terminal.

    /reset, /system TEXT, /help and /quit are commands; Ctrl-C stops an answer; Ctrl-D leaves.
    """
    check_file(state)
    with opened(model, load, chats=True) as llm:
        if llm.template is None:
            raise BadInput(f"{llm.name} has no chat template, so it cannot chat; use `ostinato run --raw`")
        conversation = Conversation.at(state, llm, raw=False)
        conversation.open(system)
        if is_typed():
            talk(f"{llm.name} on {llm.device}, context {llm.context}; /help lists commands, Ctrl-D leaves")
        with CtrlC() as ctrl_c:
            lines = typed_lines(ctrl_c) if is_typed() else piped_lines(ctrl_c)
            dialogue = Dialogue(llm, sampling, conversation, ctrl_c)
            try:
                converse(dialogue, lines)
            finally:
                if dialogue.has_state:
                    conversation.write(llm)
                elif state is not None and len(dialogue.messages) > 1:
                    talk(f"({state} is not written: no answer was completed)")
