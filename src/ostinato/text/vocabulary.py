"""A vocabulary as a GGUF file states it: tokens with types, scores and merges, and the ids with a special meaning.

The metadata is untrusted, so every list and number is checked here once; nothing below checks again.
What the tokens mean as text depends on the kind, in `byte_level.py`, `sentencepiece.py`, `unigram.py` and
`wordpiece.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.errors import BadFile

KEY = "tokenizer.ggml."
MAX_TOKENS = 4_000_000

# fmt: off
END_MARKERS = frozenset([
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|eom_id|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "</s>", "<eos>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<turn|>", "<|tool_response>", "[e~[",
])
# fmt: on


class TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Facts:
    """The tokenizer's metadata, read key by key; whatever has the wrong kind is refused with the key's name."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path

    def bad(self, key: str, what: str) -> BadFile:
        return BadFile(f"{self._path}: {KEY}{key} {what}; the file is damaged or was converted wrongly")

    def word(self, key: str, default: str) -> str:
        value = self._metadata.get(KEY + key, default)
        if not isinstance(value, str):
            raise self.bad(key, f"is {type(value).__name__}, not a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(KEY + key, default)
        if not isinstance(value, (bool, np.bool_)):
            raise self.bad(key, f"is {type(value).__name__}, not true or false")
        return bool(value)

    def id(self, key: str, n_tokens: int, default: int | None = None) -> int | None:
        """A token id; None where the file says nothing and the default is not a token of this vocabulary."""
        value = self._metadata.get(KEY + key)
        if value is None:
            return default if default is not None and default < n_tokens else None
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise self.bad(key, f"is {type(value).__name__}, not a token id")
        if not 0 <= value < n_tokens:
            raise self.bad(key, f"is {value}, but there are {n_tokens} tokens")
        return int(value)

    def strings(self, key: str) -> list[str]:
        value = self._metadata.get(KEY + key)
        if value is None:
            raise self.bad(key, "is missing")
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise self.bad(key, "is not a list of strings")
        try:
            "".join(value).encode()
        except UnicodeEncodeError:
            raise self.bad(key, "holds a string that is not valid UTF-8") from None
        return list(value)

    def bytes(self, key: str) -> bytes:
        """A list of bytes as one; empty where the file says nothing."""
        value = self._metadata.get(KEY + key)
        if value is None:
            return b""
        numbers = np.asarray(value)
        if numbers.ndim != 1 or numbers.dtype not in (np.int8, np.uint8):
            raise self.bad(key, "is not a list of bytes")
        return numbers.tobytes()

    def numbers(self, key: str, n_tokens: int, default: float) -> np.ndarray[Any, Any]:
        """One finite number per token; `default` for each where the file says nothing."""
        value = self._metadata.get(KEY + key)
        if value is None:
            return np.full(n_tokens, default)
        try:
            numbers = np.asarray(value)
        except (ValueError, OverflowError):
            raise self.bad(key, "is not a list of numbers") from None
        if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
            raise self.bad(key, "is not a list of numbers")
        if len(numbers) != n_tokens:
            raise self.bad(key, f"has {len(numbers)} entries for {n_tokens} tokens")
        if not np.isfinite(numbers).all():
            raise self.bad(key, "holds a number that is not finite")
        return numbers


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of one GGUF file and the ids with a special meaning, checked."""

    path: Path
    model: str
    pre: str
    name: str
    tokens: Sequence[str]
    types: Sequence[int]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    sep_id: int | None
    eog_ids: frozenset[int]

    def ids_of(self, *types: TokenType) -> list[int]:
        """The ids of the given types, ascending."""
        return [id for id, kind in enumerate(self.types) if kind in types]

    def id_of_text(self) -> dict[str, int]:
        """Token text to id; of two equal texts (some files have them) the lower id is the one that is written."""
        last = len(self.tokens) - 1
        return {text: last - back for back, text in enumerate(reversed(self.tokens)) if text}

    @property
    def unknown(self) -> tuple[str, int] | None:
        """The token for what no other covers, with its id; None where there is none, or it has no text."""
        text = "" if self.unk_id is None else self.tokens[self.unk_id]
        return None if self.unk_id is None or not text else (text, self.unk_id)

    @property
    def hidden(self) -> frozenset[int]:
        """The ids that show nothing in output text."""
        return frozenset(self.ids_of(TokenType.CONTROL, TokenType.UNKNOWN))


# What a kind of vocabulary means where its file says nothing.
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102},  # the format's own spelling
}


def read_vocabulary(metadata: Mapping[str, Any], path: Path) -> Vocabulary:
    """The vocabulary that GGUF metadata states; `BadFile` names the first thing that cannot be."""
    facts = Facts(metadata, path)
    model = facts.word("model", "")
    if not model:
        raise BadFile(f"{path}: the file holds no tokenizer ({KEY}model is missing); choose a file that has one")
    tokens = facts.strings("tokens")
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise facts.bad("tokens", f"has {len(tokens)} entries; 1 to {MAX_TOKENS} can be used")
    types = [int(kind) for kind in facts.numbers("token_type", len(tokens), TokenType.NORMAL).tolist()]
    _mark_end_tokens(tokens, types)
    special = _special_ids(facts, model, len(tokens))
    name = metadata.get("general.name", "")
    return Vocabulary(
        path=path,
        model=model,
        pre=facts.word("pre", "default"),
        name=name if isinstance(name, str) else "",
        tokens=tokens,
        types=types,
        bos_id=special["bos"],
        eos_id=special["eos"],
        unk_id=special["unknown"],
        sep_id=special["seperator"],
        eog_ids=end_ids(tokens, [special["eos"], special["eot"], special["eom"]]),
    )


def _special_ids(facts: Facts, model: str, n_tokens: int) -> dict[str, int | None]:
    defaults = _DEFAULT_IDS.get(model, {})
    names = ("bos", "eos", "eot", "eom", "unknown", "seperator", "cls")
    ids = {name: facts.id(f"{name}_token_id", n_tokens, defaults.get(name)) for name in names}
    if model == "bert" and ids["cls"] is not None:
        ids["bos"] = ids["cls"]
    return ids


def _mark_end_tokens(tokens: Sequence[str], types: list[int]) -> None:
    """Give tokens that end a generation the control type: converters sometimes leave them plain text."""
    markers = _end_markers(tokens)
    for id, text in enumerate(tokens):
        if text in markers:
            types[id] = TokenType.CONTROL


def end_ids(tokens: Sequence[str], named: Sequence[int | None]) -> frozenset[int]:
    """The ids that end a generation: those the files name, and those whose text is a known end marker."""
    known = _end_markers(tokens)
    markers = {text: id for id, text in enumerate(tokens) if text in known}
    if (
        "<|end|>" in markers
        and {"<|call|>", "<|calls|>"} & markers.keys()
        and {"<|return|>", "<|flush|>"} & markers.keys()
    ):
        del markers["<|end|>"]  # there it ends a message, and the same turn may go on with another
    return frozenset([*markers.values(), *(id for id in named if id is not None)])


def _end_markers(tokens: Sequence[str]) -> frozenset[str]:
    """The end markers that count in a vocabulary with these tokens."""
    return END_MARKERS - {"</s>"} if "<|tool_response>" in tokens else END_MARKERS  # there an HTML tag
