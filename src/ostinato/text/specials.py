"""Special tokens in text: which are matched, and the split of a text at them before merging.

A special token is matched by its literal text, a longer one before a shorter; user-defined tokens always, control
tokens only when the caller asks. The encoder made here keeps no state, so one serves many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as Library

from ostinato.text.guard import library_ids
from ostinato.text.vocabulary import TokenType, Vocabulary

Encode = Callable[[str, bool], list[int]]  # a text, and whether control tokens in it are parsed
_BLANKS = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is matched in text before any merging."""

    text: str
    id: int
    control: bool  # matched only when the caller asks
    strip_left: bool = False  # blanks before it are dropped
    strip_right: bool = False


def special_tokens(vocabulary: Vocabulary) -> list[SpecialToken]:
    """The special tokens of a vocabulary, the longest first."""
    ids = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    # The files do not say which tokens take the blanks beside them; these families are known to.
    phi3 = any(word in vocabulary.name.lower() for word in ("phi-3", "phi3"))
    masked = vocabulary.pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code")
    found = [
        SpecialToken(
            text=text,
            id=id,
            control=vocabulary.types[id] != TokenType.USER_DEFINED,
            strip_left=masked and text == "<mask>",
            strip_right=phi3 and text not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for id in ids
        if (text := vocabulary.tokens[id])
    ]
    return sorted(found, key=lambda token: len(token.text.encode()), reverse=True)


def partition(text: str, specials: Sequence[SpecialToken], parse_control: bool) -> list[str | int]:
    """Cut `text` at special tokens: pieces of plain text, none of them empty, and ids."""
    parts: list[str | int] = [text] if text else []
    for token in specials:
        if (parse_control or not token.control) and token.text in text:
            parts = [cut for part in parts for cut in (_cut(part, token) if isinstance(part, str) else [part])]
    return parts


def _cut(text: str, token: SpecialToken) -> list[str | int]:
    pieces = text.split(token.text)
    parts: list[str | int] = []
    for place, piece in enumerate(pieces):
        if place > 0:
            parts.append(token.id)
            piece = piece.lstrip(_BLANKS) if token.strip_right else piece
        if token.strip_left and place < len(pieces) - 1:
            piece = piece.rstrip(_BLANKS)
        if piece:
            parts.append(piece)
    return parts


def with_specials(
    vocabulary: Vocabulary, library: Library, spelt: Callable[[str, bool], str] = lambda text, _: text
) -> Encode:
    """An encoder that cuts out special tokens and gives every piece between them to the library; as `spelt`, given
    also whether the piece begins a text or follows a special token."""
    specials = special_tokens(vocabulary)

    def encode(text: str, parse_control: bool) -> list[int]:
        ids: list[int] = []
        at_start = True
        for part in partition(text, specials, parse_control):
            if isinstance(part, int):
                ids.append(part)
                at_start = True
            else:
                ids += library_ids(library, spelt(part, at_start), vocabulary.path)
                at_start = False
        return ids

    return encode
