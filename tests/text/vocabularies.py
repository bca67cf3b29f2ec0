"""Tiny real vocabularies of each kind, as the metadata of a GGUF file, and awkward texts to try on them."""

from pathlib import Path
from typing import Any

from ostinato.text.byte_level import byte_characters
from ostinato.text.tokenizer import Tokenizer, tokenizer_from_gguf
from ostinato.text.vocabulary import TokenType

NOWHERE = Path("tiny.gguf")
Metadata = dict[str, Any]


def _metadata(model: str, tokens: list[tuple[str, TokenType]], more: Metadata) -> Metadata:
    keys = {"model": model, "tokens": [text for text, _ in tokens], "token_type": [int(kind) for _, kind in tokens]}
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **more}.items()}


def byte_level(pre: str = "gpt-2", **more: Any) -> Metadata:
    """Every byte, a few merges (one makes half a character), two control tokens, and a user-defined one."""
    merges = ["t h", "th e", "Ġ the", "a b", "Ã ©", "ð Ł", "Ġ Ġ", "1 2", "12 3"]
    made = [merge.replace(" ", "") for merge in merges]
    texts = [(text, TokenType.NORMAL) for text in [*byte_characters(), *made]]
    control = [("<|im_start|>", TokenType.CONTROL), ("<|im_end|>", TokenType.CONTROL)]
    tokens = [*texts, *control, ("<tool>", TokenType.USER_DEFINED)]
    end = len(tokens) - 2
    facts = {"pre": pre, "merges": merges, "bos_token_id": end - 1, "eos_token_id": end}
    return _metadata("gpt2", tokens, {**facts, **more})


def sentencepiece(**more: Any) -> Metadata:
    """Bytes, a few scored words, `<s>`, `</s>`, and user-defined blanks."""
    special = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    bytes_ = [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    words = [*"▁abcdehlot<s>/", "ab", "the", "th", "▁the", "he", "▁▁", "▁a", "ll", "hell", "hello", "▁hello", "é"]
    normal = [(text, TokenType.NORMAL) for text in dict.fromkeys(words)]
    tokens = [*special, *bytes_, *normal, ("\n\n", TokenType.USER_DEFINED)]
    scores = [0.0] * 259 + [-float(place) for place in range(len(normal))] + [-1000.0]
    facts = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return _metadata("llama", tokens, {**facts, **more})


def wordpiece(**more: Any) -> Metadata:
    """A few words and word ends, and the tokens that a BERT vocabulary must have."""
    special = [(f"[{name}]", TokenType.CONTROL) for name in ("PAD", "UNK", "CLS", "SEP")]
    words = ["▁hello", "▁world", "▁the", "▁un", "able", "s", "▁.", "▁a", "▁é"]
    tokens = [*special, *((text, TokenType.NORMAL) for text in words)]
    facts = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3, "padding_token_id": 0}
    return _metadata("bert", tokens, {**facts, **more})


def tokenizer_of(metadata: Metadata) -> Tokenizer:
    return tokenizer_from_gguf(metadata, NOWHERE)


# Pieces of text that vocabularies disagree about.
ATOMS = [
    *[" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\x0b", "\x85", "\u2028"],
    *["a", "Hello", "WORLD", "camelCase", "XMLHttp", "the", "ing", "tion", "aaaaa", "=====", "x" * 40],
    *["'s", "'S", "'ll", "'LL", "'re", "'", "don't", "I'm", "'ſ"],
    *["1", "12", "123", "1234", "1234567", "٣", "½", "²", "Ⅷ"],
    *[
        ".",
        ",",
        "!",
        "...",
        "…",
        "。",
        "，",
        "(",
        ")",
        "[",
        "{",
        "<",
        "|",
        "`",
        "~",
        "^",
        "$",
        "+",
        "-",
        "_",
        "/",
        "\\",
    ],
    *["é", "É", "ñ", "ß", "Ω", "я", "Ж", "ǅ", "ʰ", "ª", "日本", "中文", "ひらがな", "カタカナ", "한국어"],
    *["ไทย", "हिन्दी", "عربي", "e\u0301", "\u0301", "Z\u0351\u036b"],
    *["👍", "👨\u200d👩\u200d👧", "🇩🇪", "👍🏽", "❤\ufe0f"],
    *["\x7f", "\x80", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\ufffd", "\uffff", "\U00010000", "\U0010ffff"],
    *["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|end|>", "<0x0A>", "▁"],
]
