"""How byte-level BPE vocabularies cut text into words before merging, by the names that GGUF files use.

Each name of `tokenizer.ggml.pre` stands for one or more patterns, applied in order: a pattern cuts every piece that
the ones before it left. Only patterns and defaults live here; docs/tokenizers.md says which names have been checked
against the ids of another implementation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

from ostinato.errors import Unsupported, listing


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The patterns of one kind of vocabulary, and what its files leave unsaid."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken as it is, whatever the merges say
    add_bos: bool = False  # when the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer: words cut by the patterns, their UTF-8 bytes written as printable characters."""
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, as_bytes])


# Contractions are spelt out letter by letter: a case-insensitive group would also take "ſ" for "s".
_SHORT = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _tiktoken(digits: str) -> str:
    """The pattern of the Llama 3 and Qwen 2 kind; they differ in how many digits make a word."""
    return rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"


def _cased(digits: str, short: str, without: str = "", behind: str = r"[\r\n/]*") -> str:
    """The pattern of the GPT-4o and Tekken kind, which cuts between lower and upper case. `without`: what no letter of
    a word is, as the rest of a class; `behind`: what other characters take with them."""
    start, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    return (
        rf"{start}{upper}*{lower}+{short}|{start}{upper}+{lower}*{short}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{behind}|{_LINES}"
    )


# Cased letters, as the first DeepSeek vocabularies list them one by one.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "ὙὛὝ\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffcℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN_TO_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

# Digits in threes from the right, with one or two before them.
_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_OPTIONAL_SHORT = f"(?:{_SHORT})?"
# Scripts that the first pattern of afmoe and of youtu sets apart.
_EASTERN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_EASTERN_AND_MARKS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)

_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_TIKTOKEN_3 = PreTokenizer((_tiktoken(r"\p{N}{1,3}"),))
_LLAMA3 = PreTokenizer(_TIKTOKEN_3.patterns, whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer((_tiktoken(r"\p{N}"),))
_MARKED_WORDS = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, rf"{_MARKED_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"))
_BLOOM = PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",))
_BAILING = PreTokenizer(
    (
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        rf"|\s*[\r\n]|{_SPACES}",
    )
)
_GPT4O = PreTokenizer((_cased(r"\p{N}{1,3}", _OPTIONAL_SHORT),))

_BY_KIND: Sequence[tuple[PreTokenizer, str]] = (
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (
        _PLAIN_GPT2,
        "gpt-2 mpt olmo jais trillion granite-docling phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de"
        " jina-v2-code roberta-bpe gigachat a.x-4.0 mellum modern-bert exaone4",
    ),
    (_DIGITS_THEN_GPT2, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    (_TIKTOKEN_3, "dbrx smaug-bpe glm4 chatglm-bpe"),
    (PreTokenizer(_TIKTOKEN_3.patterns, whole_words=True), "glm5"),
    (_QWEN2, "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open kormo f2llmv2 grok-2"),
    (
        PreTokenizer(
            (
                rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",
            )
        ),
        "qwen35",
    ),
    (
        PreTokenizer(
            (
                "[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _HAN_TO_HANGUL,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL, r"\p{N}")), "deepseek-coder"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (PreTokenizer((_cased(r"\p{N}", ""),), whole_words=True, add_bos=True), "tekken"),
    (_GPT4O, "gpt-4o llama4 kanana2 minimax-m2 talkie"),
    (PreTokenizer(_GPT4O.patterns, whole_words=True), "granite-embed-multi-97m"),
    (_BLOOM, "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((*_BLOOM.patterns, r"\p{N}")), "viking"),
    (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
    (
        PreTokenizer(
            (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",),
        ),
        "seed-coder",
    ),
    (PreTokenizer((r"\n+", *_QWEN2.patterns)), "laguna"),
    (
        PreTokenizer(
            (
                rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
            )
        ),
        "exaone-moe",
    ),
    (PreTokenizer((r"\p{N}{1,3}", _tiktoken(r"\p{N}+")), whole_words=True), "minicpm5"),
    (
        PreTokenizer(
            (
                _TIKTOKEN_3.patterns[0].removesuffix(_SPACES)
                + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
                + r"|\s",
            )
        ),
        "jais-2",
    ),
    (
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _HAN_AND_KANA,
                rf"{_MARKED_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}",
                r"\p{N}",
            )
        ),
        "spark2_5",
    ),
    (PreTokenizer((_FROM_THE_RIGHT, _EASTERN, _DEEPSEEK3.patterns[-1])), "afmoe"),
    (PreTokenizer((_EASTERN_AND_MARKS, _cased(r"\p{N}", _OPTIONAL_SHORT)), whole_words=True), "youtu"),
    (PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns)), "tiny_aya cohere2moe"),
    (
        PreTokenizer((r"\p{Han}+|" + _cased(r"\p{N}{1,3}", _OPTIONAL_SHORT, r"&&[^\p{Han}]", r"[\r\n]*"),)),
        "kimi-k2",
    ),
    (PreTokenizer((_QWEN2.patterns[0].removeprefix(f"{_SHORT}|"),)), "ufakzeka"),
    (
        PreTokenizer((_TIKTOKEN_3.patterns[0].replace(r"]?\p{L}+", r"]?[\p{L}\p{M}\u200c\u200d]+"),)),
        "k2-horizon",
    ),
    (
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
        "chameleon",
    ),
    (PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
)

# Names of vocabularies that are not byte-level although their files say `gpt2`: `sentencepiece.py` reads them.
NOT_BYTE_LEVEL = frozenset(["gemma4", "granite-embed-multi-311m", "sarvam-moe"])

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: kind for kind, names in _BY_KIND for name in names.split()}


def find_pre_tokenizer(name: str, path: Path) -> PreTokenizer:
    """The pre-tokenizer that the file at `path` names; an unknown name is refused with the known ones.

    >>> find_pre_tokenizer("llama-bpe", Path("model.gguf")).add_bos
    True
    """
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        known = listing(name, PRE_TOKENIZERS)
        raise Unsupported(f"{path}: the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known: {known}")
    return found
