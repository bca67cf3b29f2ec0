"""WordPiece (`tokenizer.ggml.model` is `bert`): words in lower case, each cut into the longest pieces from its start.

GGUF files mark the beginning of a word with U+2581 and leave the rest bare; the `tokenizers` library wants the
rest marked with ##.
"""

from __future__ import annotations

from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from ostinato.text.sentencepiece import SPACE
from ostinato.text.specials import Encode, with_specials
from ostinato.text.vocabulary import Facts, TokenType, Vocabulary

MAX_WORD_CHARACTERS = 100  # a longer word is unknown, as it was in training
_REST = "##"


def wordpiece_pieces(vocabulary: Vocabulary) -> list[bytes]:
    """The bytes that each token adds to a text: a word brings the space before it."""
    return [text.replace(SPACE, " ").encode() for text in vocabulary.tokens]


def wordpiece_encoder(vocabulary: Vocabulary, facts: Facts) -> Encode:
    """The encoder, with case and accents treated as the file says."""
    unknown = vocabulary.unknown
    if unknown is None:
        raise facts.bad("unknown_token_id", "is missing or names no text, and a WordPiece vocabulary needs it")
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    ids = {
        text.removeprefix(SPACE) if text.startswith(SPACE) else _REST + text: id
        for text, id in vocabulary.id_of_text().items()
        if text and vocabulary.types[id] not in special
    }
    ids[unknown[0]] = unknown[1]
    library = Library(
        models.WordPiece(
            vocab=ids,
            unk_token=unknown[0],
            max_input_chars_per_word=MAX_WORD_CHARACTERS,
            continuing_subword_prefix=_REST,
        )
    )
    lowercase = facts.flag("normalizer.lowercase", True)
    library.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=facts.flag("normalizer.strip_accents", lowercase)
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return with_specials(vocabulary, library)
