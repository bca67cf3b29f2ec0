"""Unigram vocabularies (`tokenizer.ggml.model` is `t5`): of all ways to cut a text, the one of the highest total score.

Texts are normalised by the table that the file holds, and spaces become U+2581. The `tokenizers` library searches for
the best cut.
"""

from __future__ import annotations

from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers

from ostinato.text.guard import guarded
from ostinato.text.sentencepiece import SPACE
from ostinato.text.specials import Encode, with_specials
from ostinato.text.vocabulary import Facts, TokenType, Vocabulary


def unigram_encoder(vocabulary: Vocabulary, facts: Facts, *, space_first: bool) -> Encode:
    """The encoder; `space_first` puts a space before the first word of a text and of what follows a special token."""
    if vocabulary.unk_id is None:
        raise facts.bad("unknown_token_id", "is missing, and a unigram vocabulary needs it")
    scores = facts.numbers("scores", len(vocabulary.tokens), 0.0).tolist()
    # The library scores what is unknown by the lowest score of all, so none is below those of ordinary tokens.
    lowest = min([scores[id] for id in vocabulary.ids_of(TokenType.NORMAL)], default=0.0)
    # A space never reaches the library, so a text that begins with one is never matched.
    pieces = [(f" {id}", lowest) for id in range(len(vocabulary.tokens))]
    for id in vocabulary.ids_of(TokenType.NORMAL, TokenType.UNUSED):
        if vocabulary.tokens[id] and scores[id] >= lowest:
            pieces[id] = (vocabulary.tokens[id], scores[id])
    library = Library(
        guarded(lambda: models.Unigram(pieces, vocabulary.unk_id, False), vocabulary.path, "has a bad vocabulary")
    )
    table = facts.bytes("precompiled_charsmap")
    normalizer = None
    if table:
        what = "has a table of characters that cannot be used"
        normalizer = guarded(lambda: normalizers.Precompiled(table), vocabulary.path, what)
    one_space = facts.flag("remove_extra_whitespaces", False)

    def spelt(text: str, at_start: bool) -> str:
        text = text if normalizer is None else normalizer.normalize_str(text)
        if one_space:
            return "".join(SPACE + word for word in text.split(" ") if word)
        words = text.lstrip(" ")
        before = len(text) - len(words) + (space_first and at_start and bool(words))
        return SPACE * before + words.replace(" ", SPACE)

    return with_specials(vocabulary, library, spelt)
