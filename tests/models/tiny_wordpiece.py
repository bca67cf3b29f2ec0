"""A WordPiece vocabulary of 300 tokens for the tiny encoders, as tokenizer.json and as GGUF metadata."""

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = (
    "the of and to in a is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over"
)
_ENDINGS = (
    "ing",
    "ed",
    "er",
    "est",
    "ly",
    "ion",
    "al",
    "ness",
    "es",
    "en",
    "able",
    "ful",
    "less",
    "ment",
    "ous",
    "ity",
)


def vocabulary() -> list[str]:
    """All 300 tokens in the order of their ids."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [word for word in dict.fromkeys(_WORDS.split()) if len(word) > 1]
    known = [*SPECIAL, *letters, *"0123456789", *".,;:!?'-()", *words, *("##" + c for c in letters)]
    known += ["##" + ending for ending in _ENDINGS]
    return [*known, *(f"[unused{i}]" for i in range(300 - len(known)))]


def tokenizer() -> Tokenizer:
    """The vocabulary as the `tokenizers` library runs it: one text, or a pair."""
    ids = {token: number for number, token in enumerate(vocabulary())}
    made = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    made.add_special_tokens(list(SPECIAL))
    return made


def write_files(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer().save(str(folder / "tokenizer.json"))
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    settings = {**names, "do_lower_case": True, "tokenizer_class": "BertTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def add_to(writer: Any, n_types: int = 2) -> None:
    """The vocabulary as GGUF has it: the beginning of a word marked, the rest bare."""
    tokens, kinds = [], []
    for number, token in enumerate(vocabulary()):
        plain = number >= len(SPECIAL)
        tokens.append(token if not plain else token.removeprefix("##") if token[:2] == "##" else "\u2581" + token)
        kinds.append(gguf.TokenType.NORMAL if plain else gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(n_types)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(CLS)
    writer.add_uint32("tokenizer.ggml.cls_token_id", CLS)
    writer.add_sep_token_id(SEP)
    writer.add_eos_token_id(SEP)
    writer.add_unk_token_id(UNK)
    writer.add_pad_token_id(PAD)
    writer.add_mask_token_id(MASK)
