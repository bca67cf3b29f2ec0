"""Log-probabilities as OpenAI tells them: one shape for chats, an older one for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ostinato.engine.request import Token
from ostinato.text.tokenizer import Tokenizer

LEAST: Final = -9999.0  # JSON has no minus infinity


def for_chat(tokenizer: Tokenizer, tokens: Sequence[Token]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        shown = tokenizer.piece_bytes(id, start=False, special=True)
        return {"token": _text(shown), "logprob": max(logprob, LEAST), "bytes": list(shown)}

    content = [
        {**entry(token.token, token.logprob), "top_logprobs": [entry(id, value) for id, value in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def for_completion(
    tokenizer: Tokenizer, tokens: Sequence[Token], n_top: int, offset: int
) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion's choice, and where in the text they end; `offset`: where they begin."""
    texts = [_name(tokenizer, token.token) for token in tokens]
    offsets, at = [], offset
    for token in tokens:
        offsets.append(at)
        at += len(_text(tokenizer.piece_bytes(token.token, start=False, special=True)))
    top = [{_name(tokenizer, id): max(value, LEAST) for id, value in token.top} for token in tokens]
    told = {
        "tokens": texts,
        "token_logprobs": [max(token.logprob, LEAST) for token in tokens],
        "top_logprobs": top if n_top else None,
        "text_offset": offsets,
    }
    return told, at


def _name(tokenizer: Tokenizer, id: int) -> str:
    """A token's text; as OpenAI writes it where its bytes are no whole character."""
    shown = tokenizer.piece_bytes(id, start=False, special=True)
    try:
        return shown.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in shown)


def _text(shown: bytes) -> str:
    return shown.decode(errors="replace")


class Untold:
    """Tokens whose log-probabilities are still to be told: with the text that shows them, or never."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []

    def add(self, token: Token, *, met_stop: bool) -> None:
        """`met_stop`: a stop string was met; what is untold may be a part of it. An end token is not told either."""
        if met_stop:
            self._tokens.clear()
        elif token.finish_reason != "stop":
            self._tokens.append(token)

    def take(self) -> list[Token]:
        taken, self._tokens = self._tokens, []
        return taken
