"""A conversation that outlives the program: `run --state FILE` goes on from it and saves it again.

The file is the model's memory with a note: the messages so far, or that the text was given without a template.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.errors import BadInput
from ostinato.options import Sampling

if TYPE_CHECKING:
    from ostinato.llm import LLM, Piece


@dataclass(slots=True)
class Conversation:
    """What was said so far; mutable, because it grows. `messages` is None for text without a template."""

    file: Path
    messages: list[dict[str, Any]] | None

    @staticmethod
    def at(file: Path, llm: LLM, raw: bool) -> Conversation:
        """The conversation in the file, put into the model's memory; a new one where there is no file."""
        plain = raw or llm.template is None
        if not file.parent.is_dir():
            raise BadInput(f"--state {file}: there is no folder {file.parent} to save it in")
        if not file.exists():
            return Conversation(file, None if plain else [])
        messages = llm.load_state(file).get("messages")
        if plain != (messages is None):
            kind = "as plain text (--raw)" if messages is None else "through the chat template"
            raise BadInput(f"{file}: this conversation was held {kind}; go on in the same way, or take another file")
        return Conversation(file, messages)

    def ask(self, llm: LLM, text: str, system: str | None, sampling: Sampling) -> Iterator[Piece]:
        """The answer to what is said next."""
        if self.messages is None:
            if system is not None:
                raise BadInput(f"--system needs a chat template, and {llm.name} has none")
            before = llm.state_ids
            return llm.stream([*before, *llm.tokenize(text, bos=not before)], sampling, reuse=True)
        if system is not None:
            if self.messages:
                raise BadInput(f"{self.file}: --system opens a conversation, and this one has begun already")
            self.messages.append({"role": "system", "content": system})
        self.messages.append({"role": "user", "content": text})
        return llm.stream_chat(self.messages, sampling, reuse=True)

    def save(self, llm: LLM, answer: str) -> None:
        """Write the conversation with its answer."""
        if self.messages is not None:
            self.messages.append({"role": "assistant", "content": answer})
        llm.save_state(self.file, {"messages": self.messages})
