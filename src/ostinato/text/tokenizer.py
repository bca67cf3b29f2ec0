"""Text to token ids and back, for one model: `Tokenizer`, made from a GGUF file here, or from a folder in `folder.py`.

The `tokenizers` library splits and merges; BOS, EOS and decoding are here. No torch. docs/tokenizers.md lists the
supported vocabularies.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ostinato.errors import BadInput, Unsupported, listing
from ostinato.text.byte_level import ByteLevelPieces, byte_level_encoder
from ostinato.text.pretokenizers import NOT_BYTE_LEVEL, find_pre_tokenizer
from ostinato.text.sentencepiece import sentencepiece_encoder, sentencepiece_pieces
from ostinato.text.specials import Encode
from ostinato.text.unigram import unigram_encoder
from ostinato.text.vocabulary import Facts, Vocabulary, read_vocabulary
from ostinato.text.wordpiece import wordpiece_encoder, wordpiece_pieces

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """One model's tokenizer; safe to use from many threads.

    >>> tokenizer.decode(tokenizer.encode("Hello"))            # doctest: +SKIP
    'Hello'
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    encoder: Encode = field(repr=False)
    texts: Sequence[str] = field(repr=False)  # the literal text of each token, as the vocabulary has it
    shown: Sequence[bytes] = field(repr=False)  # the bytes each token adds to a text
    hidden: frozenset[int] = field(repr=False)  # ids that add nothing, unless asked for
    drops_first_space: bool = False  # a text begins without the space that encoding put before it
    prefix: tuple[int, ...] = ()  # what goes before a text when BOS and EOS are asked for
    suffix: tuple[int, ...] = ()  # and after it
    between: tuple[int, ...] = ()  # what else stands between two texts, after the suffix of the first

    def encode(self, text: str, *, bos: bool = True, special: bool = False) -> list[int]:
        """The ids of `text`. `bos` adds BOS and EOS as the file says; without `special`, control tokens are text.

        Raises BadInput for a lone surrogate, a code point that no UTF-8 text can hold.
        """
        if (half := _SURROGATE.search(text)) is not None:
            raise BadInput(
                f"the text has half a character, the surrogate U+{ord(half[0]):04X}, which UTF-8 cannot hold; "
                'text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") mends it'
            )
        ids = self.encoder(text, special)
        if not bos:
            return ids
        return [*self.prefix, *ids, *self.suffix]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The ids of two texts that are read as one, for models that compare them."""
        return self.encode(first), [*self.between, *self.encode(second, bos=False), *self.suffix]

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a text that a chat template rendered: its control tokens are tokens, with one BOS before them.

        Most templates write BOS themselves; models are not trained with a second one.
        """
        ids = self.encode(text, bos=False, special=True)
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

    def decode(self, ids: Sequence[int], *, special: bool = False, at_start: bool = True) -> str:
        """The text of `ids`; control tokens show nothing unless `special`. Bytes that make no character are U+FFFD.

        `at_start=False` is for ids that continue others: then a leading space is kept where the vocabulary's
        texts begin without one.
        """
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        text: list[str] = []
        start = at_start
        for id in ids:
            text.append(characters.decode(self.piece_bytes(id, start=start, special=special)))
            start = start and not special and id in self.hidden
        return "".join([*text, characters.decode(b"", final=True)])

    def piece_bytes(self, id: int, *, start: bool, special: bool = False) -> bytes:
        """The bytes that `id` adds to a text, at its start or further on."""
        self._check(id)
        if id in self.hidden:
            return self.texts[id].encode() if special else b""
        piece = self.shown[id]
        return piece[1:] if start and self.drops_first_space and piece.startswith(b" ") else piece

    def control_ids(self, texts: Collection[str]) -> dict[str, int]:
        """The ids of those of these texts that are control tokens."""
        return {self.texts[id]: id for id in self.hidden if self.texts[id] in texts}

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One string per id for people to read: control tokens by name, stray bytes as in `\\xf0`."""
        return [
            self.token_text(id) if id in self.hidden else self.shown[id].decode(errors="backslashreplace")
            for id in map(self._check, ids)
        ]

    def token_text(self, id: int) -> str:
        """The literal text of a token, such as "<s>"."""
        return self.texts[self._check(id)]

    def _check(self, id: int) -> int:
        if not 0 <= id < self.vocab_size:
            raise BadInput(f"token id {id} is outside the vocabulary of {self.vocab_size} tokens")
        return id


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes; `path` is named in errors."""
    vocabulary = read_vocabulary(metadata, path)
    make = _KINDS.get("gemma4" if vocabulary.pre in NOT_BYTE_LEVEL else vocabulary.model)
    if make is None:
        known = listing(vocabulary.model, _KINDS)
        raise Unsupported(f"{path}: tokenizers of the kind {vocabulary.model!r} are not supported; supported: {known}")
    return make(vocabulary, Facts(metadata, path))


def _byte_level(vocabulary: Vocabulary, facts: Facts) -> Tokenizer:
    pre = find_pre_tokenizer(vocabulary.pre, vocabulary.path)
    encoder = byte_level_encoder(vocabulary, facts, pre)
    return _assemble(vocabulary, facts, encoder, ByteLevelPieces(vocabulary), add_bos=pre.add_bos)


def _sentencepiece(vocabulary: Vocabulary, facts: Facts) -> Tokenizer:
    space_first = facts.flag("add_space_prefix", vocabulary.model == "llama")
    encoder = sentencepiece_encoder(vocabulary, facts, space_first=space_first)
    made = _assemble(vocabulary, facts, encoder, sentencepiece_pieces(vocabulary), add_bos=True)
    return replace(made, drops_first_space=space_first)


def _unigram(vocabulary: Vocabulary, facts: Facts) -> Tokenizer:
    space_first = facts.flag("add_space_prefix", True)
    encoder = unigram_encoder(vocabulary, facts, space_first=space_first)
    made = _assemble(vocabulary, facts, encoder, sentencepiece_pieces(vocabulary), add_bos=False, add_eos=True)
    # Vocabularies with BOS and EOS are XLM-RoBERTa's, which stands two of the latter between the texts of a pair.
    between = made.suffix if made.add_bos and made.add_eos else ()
    return replace(made, drops_first_space=space_first, between=between)


def _wordpiece(vocabulary: Vocabulary, facts: Facts) -> Tokenizer:
    encoder = wordpiece_encoder(vocabulary, facts)
    made = _assemble(vocabulary, facts, encoder, wordpiece_pieces(vocabulary), add_bos=True)
    separator = [id for id in [vocabulary.sep_id] if id is not None and facts.flag("add_sep_token", True)]
    return replace(made, drops_first_space=True, suffix=(*made.suffix, *separator))


_KINDS: Mapping[str, Callable[[Vocabulary, Facts], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _sentencepiece,
    "t5": _unigram,
    "bert": _wordpiece,
}


def _assemble(
    vocabulary: Vocabulary,
    facts: Facts,
    encoder: Encode,
    shown: Sequence[bytes],
    *,
    add_bos: bool,
    add_eos: bool = False,
) -> Tokenizer:
    bos = [id for id in [vocabulary.bos_id] if id is not None and facts.flag("add_bos_token", add_bos)]
    eos = [id for id in [vocabulary.eos_id] if id is not None and facts.flag("add_eos_token", add_eos)]
    return Tokenizer(
        vocab_size=len(vocabulary.tokens),
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        eog_ids=vocabulary.eog_ids,
        add_bos=bool(bos),
        add_eos=bool(eos),
        encoder=encoder,
        texts=vocabulary.tokens,
        shown=shown,
        hidden=vocabulary.hidden,
        prefix=tuple(bos),
        suffix=tuple(eos),
    )
