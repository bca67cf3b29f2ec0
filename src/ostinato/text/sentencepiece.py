"""SentencePiece-style BPE (`tokenizer.ggml.model` is `llama` or `gemma4`): bytes are the last resort.

For `llama`, scores decide what merges: of all neighbours that join to a token, those whose token has the highest score
join first. The `tokenizers` library merges by rank, so every way to cut a token into two becomes a merge, ranked by
the token's score. A file for `gemma4` lists its merges. Spaces are written as U+2581 and runs are not cut into words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ostinato.text.byte_level import listed_merges
from ostinato.text.guard import bpe
from ostinato.text.specials import Encode, with_specials
from ostinato.text.vocabulary import Facts, TokenType, Vocabulary

SPACE = "\u2581"
MAX_TOKEN_CHARACTERS = 1_000
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def sentencepiece_pieces(vocabulary: Vocabulary) -> list[bytes]:
    """The bytes that each token of the vocabulary adds to a text."""
    return [piece(text, kind) for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)]


def piece(text: str, kind: int) -> bytes:
    """The bytes of one token of the given type."""
    if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
        return text.encode()
    byte = spelt_byte(text) if kind == TokenType.BYTE else None
    return text.replace(SPACE, " ").encode() if byte is None else byte


def spelt_byte(text: str) -> bytes | None:
    """The byte that a token such as `<0x0A>` spells; None for any other."""
    spelt = _BYTE.fullmatch(text)
    return bytes([int(spelt[1], 16)]) if spelt else None


def sentencepiece_encoder(vocabulary: Vocabulary, facts: Facts, *, space_first: bool) -> Encode:
    """The encoder; `space_first` puts a space before a text and before what follows a special token."""
    ids = _mergeable(vocabulary, facts)
    if vocabulary.model == "llama":
        merges = _merges_by_score(ids, facts.numbers("scores", len(vocabulary.tokens), 0.0).tolist())
    else:
        merges = [pair for pair in listed_merges(facts) if "".join(pair) in ids]
    bytes_there = {text: id for id, text in enumerate(vocabulary.tokens) if vocabulary.types[id] == TokenType.BYTE}
    unknown = vocabulary.unknown
    known = ids | bytes_there | ({unknown[0]: unknown[1]} if unknown else {})
    unk_token = unknown[0] if unknown else None
    library = bpe(vocabulary.path, vocab=known, merges=merges, byte_fallback=True, unk_token=unk_token)

    def spelt(text: str, at_start: bool) -> str:
        return (f" {text}" if space_first and at_start else text).replace(" ", SPACE)

    return with_specials(vocabulary, library, spelt)


def _mergeable(vocabulary: Vocabulary, facts: Facts) -> dict[str, int]:
    """The tokens that merging may make. Control and byte tokens are left out: text that spells one is only text."""
    kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)
    ids = {text: id for text, id in vocabulary.id_of_text().items() if text and vocabulary.types[id] not in kinds}
    longest = max(ids, key=len, default="")
    if len(longest) > MAX_TOKEN_CHARACTERS:
        raise facts.bad("tokens", f"holds a token of {len(longest)} characters; {MAX_TOKEN_CHARACTERS} is the limit")
    return ids


def _merges_by_score(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every cut of every token into two tokens, the highest score first."""
    best_first = sorted(ids, key=lambda text: (-scores[ids[text]], ids[text]))
    return [
        (text[:cut], text[cut:])
        for text in best_first
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
