"""Byte-level BPE (`tokenizer.ggml.model` is `gpt2`): every byte has a printable stand-in, so any text fits.

Words are cut by the pre-tokenizer that the file names, then merged in the order of its merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import overload

from ostinato.errors import BadFile
from ostinato.text.guard import bpe
from ostinato.text.pretokenizers import PreTokenizer
from ostinato.text.specials import Encode, with_specials
from ostinato.text.vocabulary import Facts, TokenType, Vocabulary


def byte_characters() -> list[str]:
    """The printable character that stands for each byte, by byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    stand_ins = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [stand_ins[byte] for byte in range(256)]


_BYTE_OF: Mapping[str, bytes] = {character: bytes([byte]) for byte, character in enumerate(byte_characters())}


_LITERAL = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)


def token_bytes(text: str) -> bytes:
    """The bytes of a token; a character that stands for no byte is itself.

    >>> token_bytes("Ġthe")
    b' the'
    """
    return b"".join([_BYTE_OF.get(character) or character.encode() for character in text])


class ByteLevelPieces(Sequence[bytes]):
    """The bytes that each token of the vocabulary adds to a text, made when they are asked for: few of them are."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._texts, self._types = vocabulary.tokens, vocabulary.types

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, id: int) -> bytes: ...
    @overload
    def __getitem__(self, id: slice) -> list[bytes]: ...
    def __getitem__(self, id: int | slice) -> bytes | list[bytes]:
        if isinstance(id, slice):
            return [self[i] for i in range(*id.indices(len(self)))]
        text = self._texts[id]
        return text.encode() if self._types[id] in _LITERAL else token_bytes(text)


def byte_level_encoder(vocabulary: Vocabulary, facts: Facts, pre: PreTokenizer) -> Encode:
    """The encoder of a byte-level vocabulary with the merges of its file."""
    ids = vocabulary.id_of_text()
    try:
        library = bpe(vocabulary.path, vocab=ids, merges=listed_merges(facts), ignore_merges=pre.whole_words)
    except BadFile:
        _check_merges(facts.strings("merges"), ids, facts)  # to say which
        raise
    library.pre_tokenizer = pre.build()
    return with_specials(vocabulary, library)


def listed_merges(facts: Facts) -> list[tuple[str, str]]:
    """The merges of a file in order, each once: the first counts. A line without a space is its own right side, which
    is no token."""
    lines = facts.strings("merges")
    return list(dict.fromkeys([(line[: (cut := line.find(" ", 1))], line[cut + 1 :]) for line in lines]))


def _check_merges(lines: Iterable[str], ids: Mapping[str, int], facts: Facts) -> None:
    """Refuse the first merge whose sides, or what they make, are no tokens."""
    for rank, line in enumerate(lines):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or not (left in ids and right in ids and left + right in ids):
            raise facts.bad("merges", f"entry {rank} ({line[:60]!r}) does not name two tokens that make a third")
