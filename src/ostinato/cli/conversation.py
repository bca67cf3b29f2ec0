"""A conversation that outlives the program: `run` and `chat` with `--state FILE` continue it and save it again.

The file is the model's memory with a note: the messages so far, or that the text was given without a template.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.errors import BadInput
from ostinato.options import Sampling

if TYPE_CHECKING:
    from ostinato.llm import LLM, Completion, Piece


def check_file(state: Path | None) -> None:
    """Refuse a file that could not be saved, before anything runs."""
    if state is not None and not state.parent.is_dir():
        raise BadInput(f"--state {state}: there is no folder {state.parent} to save it in")


@dataclass(slots=True)
class Conversation:
    """The messages so far; mutable, because they grow. `messages` is None for text without a template."""

    file: Path | None
    messages: list[dict[str, Any]] | None
    ids: list[int] = field(default_factory=list)  # of text without a template
    is_saved: bool = False  # the file exists, and the model's memory is loaded

    @staticmethod
    def at(file: Path | None, llm: LLM, raw: bool) -> Conversation:
        """The conversation in the file, loaded into the model's memory; a new one if there is no file."""
        plain = raw or llm.template is None
        if file is None or not file.exists():
            return Conversation(file, None if plain else [])
        from ostinato.text.template import check_messages

        note = llm.load_state(file)
        messages = None if note.get("messages") is None else check_messages(note["messages"])
        if plain != (messages is None):
            kind = "as plain text (--raw)" if messages is None else "through the chat template"
            raise BadInput(f"{file}: this conversation was held {kind}; go on in the same way, or take another file")
        return Conversation(file, messages, note.get("ids", []), is_saved=True)

    def open(self, system: str | None) -> list[dict[str, Any]]:
        """The messages so far; a new conversation begins with the system message, if one is given."""
        assert self.messages is not None  # callers have a chat template
        if system is not None:
            if self.messages:
                raise BadInput(f"{self.file}: --system opens a conversation, and this one has begun already")
            self.messages.append({"role": "system", "content": system})
        return self.messages

    def ask(self, llm: LLM, text: str, system: str | None, sampling: Sampling) -> Iterator[Piece]:
        """The answer to the next message."""
        reuse = self.file is not None
        if self.messages is None:
            if system is not None:
                raise BadInput(f"--system needs a chat template, and {llm.name} has none")
            return llm.stream([*self.ids, *llm.tokenize(text, bos=not self.ids)], sampling, reuse=reuse)
        self.open(system).append({"role": "user", "content": text})
        return llm.stream_chat(self.messages, sampling, reuse=reuse)

    def save(self, llm: LLM, answer: Completion) -> None:
        """Write the conversation with the shown part of its answer, so that it continues from what the user read."""
        if self.file is None:
            return
        if self.messages is not None:
            self.messages.append({"role": "assistant", "content": answer.text})
        elif answer.finish_reason == "length":
            self.ids = [*answer.prompt_ids, *answer.token_ids]
        else:  # an end token or a stop string was not shown
            self.ids = [*answer.prompt_ids, *llm.tokenize(answer.text, bos=False)]
        self.write(llm)

    def write(self, llm: LLM) -> None:
        """Write the conversation as it is, with the model's memory of its last answer."""
        if self.file is not None:
            llm.save_state(self.file, {"messages": self.messages, "ids": self.ids})
