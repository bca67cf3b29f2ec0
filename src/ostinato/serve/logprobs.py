"""Log-probabilities in OpenAI's shapes: one for chats, an older one for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ostinato.engine.request import Token
from ostinato.text.stream import TextStream
from ostinato.text.tokenizer import Tokenizer

LEAST: Final = -9999.0  # JSON has no minus infinity


def for_chat(tokenizer: Tokenizer, tokens: Sequence[Token]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        shown = tokenizer.piece_bytes(id, start=False, special=True)
        return {"token": shown.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(shown)}

    content = [
        {**entry(token.token, token.logprob), "top_logprobs": [entry(id, value) for id, value in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class Entry(NamedTuple):
    """A token of a prompt: like one of an answer, but the first has no log-probability."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class CompletionLogprobs:
    """Formats `logprobs` of consecutive tokens in a completion's text."""

    def __init__(self, tokenizer: Tokenizer, n_top: int, offset: int = 0, *, at_start: bool) -> None:
        """`offset`: where in the text the first begins; `at_start`: it begins a text, as an echoed prompt does."""
        self._tokenizer, self._n_top, self._offset = tokenizer, n_top, offset
        self._text = TextStream(tokenizer, at_start=at_start)

    def part(self, tokens: Sequence[Token | Entry]) -> dict[str, Any]:
        """The next tokens."""
        return {
            "tokens": [self._name(token.token) for token in tokens],
            "token_logprobs": [None if token.logprob is None else max(token.logprob, LEAST) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens] if self._n_top else None,
            "text_offset": [self._begin(token.token) for token in tokens],
        }

    def _begin(self, token: int) -> int:
        begin = self._offset
        self._offset += len(self._text.push(token))
        return begin

    def _top(self, token: Token | Entry) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        return {self._name(id): max(value, LEAST) for id, value in token.top}

    def _name(self, id: int) -> str:
        """A token's text; escaped as OpenAI does if its bytes are not a whole character."""
        shown = self._tokenizer.piece_bytes(id, start=False, special=True)
        try:
            return shown.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in shown)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join at least one part of a choice's `logprobs`."""
    return {
        name: None if parts[0][name] is None else [one for part in parts for one in part[name]] for name in parts[0]
    }


class PendingTokens:
    """Tokens whose log-probabilities are not sent yet: they are sent with their text, or never."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []

    def add(self, token: Token, *, met_stop: bool) -> None:
        """`met_stop`: a stop string was met, and unsent tokens may be part of it. An end token is not sent either."""
        if met_stop:
            self._tokens.clear()
        elif token.finish_reason != "stop":
            self._tokens.append(token)

    def take(self) -> list[Token]:
        taken, self._tokens = self._tokens, []
        return taken
