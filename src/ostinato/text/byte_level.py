"""Byte-level BPE (`tokenizer.ggml.model` is `gpt2`): every byte has a printable stand-in, so any text fits.

Words are cut by the pre-tokenizer that the file names, then merged in the order of its merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def token_bytes(text: str) -> bytes:
    """The bytes of a token; a character that stands for no byte is itself.

    >>> token_bytes("Ġthe")
    b' the'
    """
    return b"".join([_BYTE_OF.get(character) or character.encode() for character in text])


def byte_level_pieces(vocabulary: Vocabulary) -> list[bytes]:
    """The bytes that each token of the vocabulary adds to a text."""
    literal = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return [text.encode() if kind in literal else token_bytes(text) for text, kind in pairs]


def byte_level_encoder(vocabulary: Vocabulary, facts: Facts, pre: PreTokenizer) -> Encode:
    """The encoder of a byte-level vocabulary with the merges of its file."""
    ids = vocabulary.id_of_text()
    merges = _checked_merges(facts.strings("merges"), ids, facts)
    library = bpe(vocabulary.path, vocab=ids, merges=merges, ignore_merges=pre.whole_words)
    library.pre_tokenizer = pre.build()
    return with_specials(vocabulary, library)


def _checked_merges(lines: Iterable[str], ids: Mapping[str, int], facts: Facts) -> list[tuple[str, str]]:
    """The merges in order, each once (the first counts); both sides and what they make must be tokens."""
    merges: dict[tuple[str, str], None] = {}
    for rank, line in enumerate(lines):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or not (left in ids and right in ids and left + right in ids):
            raise facts.bad("merges", f"entry {rank} ({line[:60]!r}) does not name two tokens that make a third")
        merges[left, right] = None
    return list(merges)
