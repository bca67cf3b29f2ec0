"""`ostinato chat`: history, commands, a full context, and Ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ostinato.cli.chat import CtrlC, Dialogue, converse
from ostinato.cli.conversation import Conversation
from ostinato.errors import BadTemplate, PromptTooLong
from ostinato.options import Sampling
from tests.cli.conftest import RunCli, start


class Parrot:
    """A model that says what it was asked, and remembers what it was shown."""

    context = 100
    name = "parrot"

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        return [0] * sum(len(message["content"]) for message in messages)

    def stream_chat(self, messages: list[dict[str, str]], sampling: Sampling, *, reuse: bool) -> Iterator[Any]:
        if (n_tokens := len(self.chat_ids(messages))) >= self.context:
            raise PromptTooLong(f"the prompt has {n_tokens} tokens and the context 100")
        self.seen.append([dict(message) for message in messages])
        text = messages[-1]["content"]
        if text == "no template":
            raise BadTemplate("the template raised: no")
        return self._pieces(text)

    def _pieces(self, text: str) -> Iterator[Any]:
        if text.startswith("think"):
            yield SimpleNamespace(text="", reasoning="hm, ", completion=None)
            yield SimpleNamespace(text="", reasoning="well", completion=None)
        yield SimpleNamespace(text=text[:2], reasoning="", completion=None)
        if text == "interrupt me":
            raise KeyboardInterrupt
        reason, n_tokens = ("length", 98) if text == "fill it" else ("stop", 5)
        timings = SimpleNamespace(decode_tok_s=None)
        done = SimpleNamespace(prompt_ids=(1, 2), token_ids=(3,) * n_tokens, finish_reason=reason, timings=timings)
        yield SimpleNamespace(text=text[2:], reasoning="", completion=done)


def talked(*lines: str, system: str | None = None) -> Parrot:
    parrot = Parrot()
    conversation = Conversation(None, [])
    conversation.open(system)
    converse(Dialogue(cast(Any, parrot), Sampling(), conversation, CtrlC()), iter(lines))
    return parrot


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_history_goes_along_with_every_message(capsys: pytest.CaptureFixture[str]) -> None:
    parrot = talked("one", "two")
    assert contents(parrot.seen[1]) == ["one", "one", "two"]
    assert [message["role"] for message in parrot.seen[1]] == ["user", "assistant", "user"]
    assert capsys.readouterr().out == "one\ntwo\n"


def test_reasoning_is_shown_beside_the_answer_and_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    parrot = talked("think", "two")
    assert contents(parrot.seen[1]) == ["think", "think", "two"]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("think\ntwo\n", "hm, well\n\n")


def test_reset_forgets_the_conversation_and_keeps_the_system_message() -> None:
    parrot = talked("one", "/reset", "two", system="be kind")
    assert contents(parrot.seen[1]) == ["be kind", "two"]


def test_the_system_message_can_be_set_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    parrot = talked("/system", "/system  talk like a pirate ", "/system", "ahoy")
    assert parrot.seen[0][0] == {"role": "system", "content": "talk like a pirate"}
    err = capsys.readouterr().err
    assert "(no system message)" in err
    assert "(system message: talk like a pirate)" in err


def test_quit_ends_it_and_empty_lines_say_nothing() -> None:
    parrot = talked("", "   ", "one", "/quit", "two")
    assert contents(parrot.seen[-1]) == ["one"]


def test_an_unknown_command_is_not_sent_to_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert talked("/rest").seen == []
    assert "unknown command /rest; known: /reset (the nearest), /help, /quit, /system" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    talked("/help")
    err = capsys.readouterr().err
    assert all(command in err for command in ("/reset", "/system", "/quit", "/help", "Ctrl-C"))


def test_a_message_that_does_not_fit_by_itself_is_dropped_alone(capsys: pytest.CaptureFixture[str]) -> None:
    parrot = talked("one", "x" * 120, "two")
    assert contents(parrot.seen[1]) == ["one", "one", "two"]
    err = capsys.readouterr().err
    assert "120 tokens and the context 100; shorten it, or give a larger --context" in err
    assert "it was dropped" in err


def test_the_oldest_messages_make_room_for_a_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    parrot = talked("a" * 20, "b" * 20, "c" * 20, "d", system="be kind")
    assert contents(parrot.seen[2]) == ["be kind", "b" * 20, "b" * 20, "c" * 20]  # a quarter is left for the answer
    assert contents(parrot.seen[3]) == ["be kind", "b" * 20, "b" * 20, "c" * 20, "c" * 20, "d"]
    assert capsys.readouterr().err == "(the context of 100 tokens is full: the oldest 2 messages are dropped)\n"


def test_a_long_message_is_answered_alone_where_it_leaves_little_room() -> None:
    assert contents(talked("one", "x" * 95, system="ab").seen[1]) == ["ab", "x" * 95]


def test_a_context_that_fills_up_during_the_answer_says_what_follows(capsys: pytest.CaptureFixture[str]) -> None:
    talked("fill it")
    assert "the context of 100 tokens is full; the next message drops the oldest" in capsys.readouterr().err


def test_a_template_that_refuses_does_not_end_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    parrot = talked("no template", "two")
    assert contents(parrot.seen[1]) == ["two"]
    assert "error: the template raised: no" in capsys.readouterr().err


def test_an_interrupted_answer_stays_as_far_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    parrot = talked("interrupt me", "two")
    assert contents(parrot.seen[1]) == ["interrupt me", "in", "two"]
    assert "(stopped)" in capsys.readouterr().err


def test_piped_lines_are_messages(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato(
        "chat", "--model", tiny, "--max-tokens", "4", "--ignore-eos", "--seed", "1", stdin=b"hi\nagain\n/quit\nno\n"
    )
    assert ran.code == 0
    assert ran.err.count("(cut after 4 tokens, see --max-tokens)") == 2


def test_a_small_context_is_filled_and_survived(ostinato: RunCli, tiny: Path) -> None:
    lines = b"hello there\nhello there\nhello there\n/reset\nhi\n"
    ran = ostinato("chat", "--model", tiny, "--context", "60", "--ignore-eos", "--seed", "1", stdin=lines)
    assert ran.code == 0
    assert ran.err.count("the context of 60 tokens is full; the next message drops the oldest") == 4
    assert ran.err.count("(the context of 60 tokens is full: the oldest 2 messages are dropped)") == 2
    assert "(a new conversation)" in ran.err


def test_a_line_that_is_not_utf8_is_named(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato("chat", "--model", tiny, "--max-tokens", "1", stdin=b"hi\n\xff\n")
    assert ran.code == 2
    assert "line 2 of standard input is not UTF-8" in ran.err


def test_a_model_without_a_template_cannot_chat(ostinato: RunCli, base: Path) -> None:
    ran = ostinato("chat", "--model", base, stdin=b"hi\n")
    assert ran.code == 2
    assert "run --raw" in ran.err


def test_ctrl_c_does_nothing_where_it_is_not_awaited() -> None:
    before = signal.getsignal(signal.SIGINT)
    with CtrlC() as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), ctrl_c.awaited():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.slow
def test_a_signal_stops_the_answer_and_not_the_program(tiny: Path) -> None:
    with start(("chat", "--model", tiny, "--ignore-eos")) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        for _ in range(3):
            program.stdin.write(b"hi\n")
            program.stdin.flush()
            assert program.stdout.read(1)  # an answer has begun
            program.send_signal(signal.SIGINT)
            assert program.stderr.readline() == b"(stopped)\n"
            while select.select([program.stdout], [], [], 0.2)[0]:
                program.stdout.read(65536)  # the rest of it
        _, err = program.communicate(b"/system x\n/system\n", timeout=30)
        assert program.returncode == 0
    assert b"(system message: x)" in err


class Person:
    """A person at a terminal, who reads what is on the screen and types."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "ostinato", *arguments]
        environment = {**os.environ, "TERM": "dumb"}
        self.program = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, preexec_fn=_own
        )
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str) -> None:
        """Read the screen until `text` is on it; what was read before does not count again."""
        end = time.monotonic() + 30
        while text not in self.screen:
            assert time.monotonic() < end, f"{text!r} did not appear: {self.screen[-2000:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.screen += os.read(self.master, 65536).decode(errors="replace")
        self.screen = self.screen.partition(text)[2]

    def leave(self) -> int:
        """Read on to the end, so that a full terminal does not block the program; its exit code."""
        while True:
            try:
                if not os.read(self.master, 65536):
                    break
            except OSError:  # what Linux answers when the other end is closed
                break
        os.close(self.master)
        return self.program.wait(30)


def _own() -> None:
    """Make the terminal the program's own, so that Ctrl-C typed there reaches it and its children."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="terminals are opened the Linux way")
def test_a_person_can_stop_an_answer_and_go_on_and_leave(tiny: Path) -> None:
    person = Person("chat", "--model", str(tiny), "--ignore-eos")
    person.wait_for("/help lists commands")
    person.wait_for("> ")
    person.type("hi\n")
    time.sleep(0.5)
    person.type("\x03\x03")
    person.wait_for("(stopped)")
    person.wait_for("> ")
    time.sleep(0.2)
    person.type("\x03")
    person.wait_for("(/quit or Ctrl-D leaves)")
    person.type("again\n")
    time.sleep(0.5)
    person.type("\x03")
    person.wait_for("(stopped)")
    person.wait_for("> ")
    person.type("\x04")
    assert person.leave() == 0
