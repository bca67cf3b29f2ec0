"""Our ids against llama.cpp's: the default model on awkward texts, and every kind of vocabulary on random ones."""

import random
import unicodedata
from pathlib import Path

import pytest

from ostinato.files.checkpoint import open_checkpoint
from ostinato.text.byte_level import byte_characters
from ostinato.text.pretokenizers import PRE_TOKENIZERS
from ostinato.text.tokenizer import tokenizer_from_gguf
from ostinato.text.vocabulary import TokenType
from tests.counts import soak, soaking
from tests.text.llama_cpp import reference_ids, write_model
from tests.text.test_vocabularies import WITHOUT_TEXTS
from tests.text.vocabularies import ATOMS, Metadata

pytestmark = pytest.mark.slow

AWKWARD = [
    "",
    " ",
    "    four spaces, then\ttabs\t\t and   runs  of   them   ",
    "\n\n\n\nlines\r\nand\rreturns\n \n\n",
    "0 1 12 123 1234 12345678901234567890 3.14159 1,000,000 ١٢٣ ½ ² Ⅷ",
    "don't I'm you'LL they'Ve we'd it'S 's 't ' ''",
    "日本語のテキスト、中文字符。한국어 문장 ไทย हिन्दी עברית العربية",
    "👨\u200d👩\u200d👧\u200d👦 👍🏽 🇩🇪🇫🇷 ❤\ufe0f \U0001f9d1\u200d\U0001f680",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|><|im_end|><|im_start|",
    "\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff",
    "\ufffd\ufffd half\ufffdway",
    "e\u0301 Z\u0351\u036b\u0343\u032a a\u0300\u0301\u0302 \u0301alone",
    "a" * 3_000,
    "Pneumono" + "ultra" * 200 + "microscopic",
    "=" * 100 + "-" * 63 + "_" * 17 + " " * 129 + "\n" * 33,
    "\u00a0\u2028\u2029\u3000\u200b\ufeff\x0b\x0c\x85\x1c",
    "def f(x: int) -> list[str]:\n    return [f'{x!r}' for _ in range(10)]  # ok\n",
    "http://example.org/?q=%20&x=1#y a@b.example C:\\Windows\\System32",
    "ßẞſ'ſ ǅ ʰ ª Ω Ω K İ ı ﬁ",
    "\x01\x02 \x1b[0m",
]


def random_texts(seed: int, n: int, atoms: list[str]) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(atoms, k=chance.randint(1, 14))) for _ in range(n)]


def compare(metadata: Metadata, model: Path, texts: list[str], folder: Path, *, bos: bool = False) -> None:
    tokenizer = tokenizer_from_gguf(metadata, model)
    for text, (plain, parsed) in zip(texts, reference_ids(model, texts, folder, bos=bos), strict=True):
        assert tokenizer.encode(text, bos=bos) == plain, repr(text)
        assert tokenizer.encode(text, bos=bos, special=True) == parsed, repr(text)


@pytest.mark.soak
@pytest.mark.model
def test_the_default_model_on_awkward_texts(default_model: Path, tmp_path: Path) -> None:
    metadata = dict(open_checkpoint(default_model).metadata)
    texts = [*AWKWARD, *random_texts(7, soak(3_000), ATOMS)]
    compare(metadata, default_model, texts, tmp_path)


@pytest.mark.model
def test_the_default_model_with_bos_and_eos(default_model: Path, tmp_path: Path) -> None:
    compare(dict(open_checkpoint(default_model).metadata), default_model, AWKWARD, tmp_path, bos=True)


def all_pairs(pre: str) -> Metadata:
    """A vocabulary where any two bytes of one word may merge, in random order: ids then show where words are cut. The
    bytes are those of `ATOMS`, of which the texts are made."""
    characters = byte_characters()
    merging = [characters[byte] for byte in sorted({*"".join(ATOMS).encode()})]
    pairs = [(left, right) for left in merging for right in merging]
    random.Random(3).shuffle(pairs)
    special = {"<|im_end|>": TokenType.CONTROL, "<|user|>": TokenType.USER_DEFINED}
    tokens = [*characters, *(left + right for left, right in pairs), *special]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [int(kind) for kind in special.values()],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in pairs],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def one_name_of_each_kind() -> list[str]:
    return list({kind: name for name, kind in reversed([*PRE_TOKENIZERS.items()])}.values())


def shared_atoms(pre: str) -> list[list[str]]:
    """The texts on which llama.cpp follows the pattern of the models' own files, by the atoms that each is made of;
    docs/tokenizers.md says where not."""
    match pre:
        case "deepseek-llm" | "deepseek-coder":
            return [[atom for atom in ATOMS if not any(c in atom for c in "\u2028\u3000")]]
        case "afmoe":
            others = [atom for atom in ATOMS if not any(c in atom for c in "\ud7ff\ue000")]
            attached = [atom for atom in others if not atom.isspace() and atom not in ("\x7f", "\x80", "\u200b")]
            return [_without(others, "N"), [atom for atom in attached if _categories(atom) <= set("LMNPS")]]
        case "tiny_aya" | "cohere2moe":
            plain = [atom for atom in ATOMS if atom.isascii() and not atom.isspace() and "_" not in atom]
            return [_without(ATOMS, "N", "Lu", "Lt"), _without(plain, "L")]
        case "youtu":
            return [_without(ATOMS, "Lu", "Lt")]
        case "kimi-k2":
            return [_without(ATOMS, "Lu", "Lt", "M")]
        case "k2-horizon":
            return [[atom for atom in ATOMS if atom != "'ſ"]]
        case "superbpe":
            return [[atom for atom in ATOMS if atom != "٣"]]
    cased = (PRE_TOKENIZERS[name].patterns[-1] for name in ("tekken", "gpt-4o"))
    if PRE_TOKENIZERS[pre].patterns[-1] in cased:
        caseless = ["日本", "中文", "ひらがな", "カタカナ", "한국어"]
        return [[atom for atom in ATOMS if atom in caseless or not any(map(_letter_or_mark, atom))]]
    return [ATOMS]


def _letter_or_mark(character: str) -> bool:
    return ord(character) > 127 and unicodedata.category(character)[0] in "LM"


def _categories(atom: str) -> set[str]:
    return {unicodedata.category(character)[0] for character in atom}


def _without(atoms: list[str], *categories: str) -> list[str]:
    """The atoms without a character of these categories."""
    return [atom for atom in atoms if not any(unicodedata.category(c).startswith(categories) for c in atom)]


NAMES = list(PRE_TOKENIZERS) if soak(10) == 10 else one_name_of_each_kind()


@pytest.mark.soak
@pytest.mark.parametrize("pre", NAMES)
def test_every_kind_of_pre_tokenizer_cuts_the_same_words(pre: str, tmp_path: Path) -> None:
    metadata = all_pairs(pre)
    model = write_model(tmp_path / "pairs.gguf", metadata)
    texts = [text for atoms in shared_atoms(pre) for text in random_texts(5, soak(3_000), atoms)]
    compare(metadata, model, texts, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-spm", {}),
        ("llama-spm", {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_eos_token": True}),
        ("phi-3", {}),
    ],
)
@pytest.mark.parametrize("bos", [False, True])
def test_sentencepiece_vocabularies_on_random_texts(
    vocab_data: Path, tmp_path: Path, name: str, changes: Metadata, bos: bool
) -> None:
    metadata = {**open_checkpoint(vocab_data / f"{name}.gguf").metadata, **changes}
    model = write_model(tmp_path / "words.gguf", metadata)
    texts = random_texts(11, soak(3_000), [*ATOMS, "<|assistant|>", "▁▁", "░", "--------"])
    compare(metadata, model, texts, tmp_path, bos=bos)


@pytest.mark.soak
def test_user_defined_blanks_and_tags_are_matched_before_merging(vocab_data: Path, tmp_path: Path) -> None:
    metadata = dict(open_checkpoint(vocab_data / "llama-spm.gguf").metadata)
    added = {"  ": 4, "   ": 4, "\n\n": 4, "\t\t": 4, "<table>": 4, "<start_of_turn>": 3, "<end_of_turn>": 3}
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *added]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *added.values()]
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], *[-1000.0] * len(added)]
    metadata["tokenizer.ggml.add_space_prefix"] = False
    model = write_model(tmp_path / "tags.gguf", metadata)
    compare(metadata, model, random_texts(13, soak(3_000), [*ATOMS, *list(added) * 3]), tmp_path)


@pytest.mark.soak
@pytest.mark.skipif(not soaking(), reason="the vocabularies have up to a quarter of a million tokens")
@pytest.mark.parametrize("name", ["gemma-4", *WITHOUT_TEXTS])
def test_large_vocabularies_without_words_on_random_texts(llama_cpp_models: Path, tmp_path: Path, name: str) -> None:
    metadata = dict(open_checkpoint(llama_cpp_models / f"ggml-vocab-{name}.gguf").metadata)
    model = write_model(tmp_path / "large.gguf", metadata)
    # Of a letter and its marks, the library normalises the first part alone where only that is in the table.
    atoms = [atom for atom in ATOMS if name != "nomic-bert-moe" or "\u0301" not in atom]
    compare(metadata, model, random_texts(17, 3_000, [*atoms, "<|turn>", "\n" * 40, "▁▁"]), tmp_path)


def merged_words() -> Metadata:
    """A vocabulary like Gemma 4's: spaces as U+2581, merges listed, and every byte as a last resort."""
    letters = sorted({*"▁abcdehlotn\n\t.,é日"})
    random_pairs = random.Random(9)
    words, merges = list(letters), []
    while len(words) < 300:
        left, right = random_pairs.choices(words, k=2)
        if left + right not in words and ("\n" in left + right) == ({*left + right} == {"\n"}):
            words.append(left + right)
            merges.append(f"{left} {right}")
    special = {"<bos>": 3, "<eos>": 3, "<unk>": 2, "<|turn>": 3, "<|channel>": 4}
    types = {**special, **{f"<0x{byte:02X}>": 6 for byte in range(256)}, **dict.fromkeys(words, 1)}
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": list(types),
        "tokenizer.ggml.token_type": list(types.values()),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }


@pytest.mark.soak
@pytest.mark.parametrize("bos", [False, True])
def test_merges_over_whole_texts(tmp_path: Path, bos: bool) -> None:
    metadata = merged_words()
    model = write_model(tmp_path / "merged.gguf", metadata)
    texts = random_texts(19, soak(3_000), [*metadata["tokenizer.ggml.tokens"][-300:], " ", "  ", "<|turn>", "x", "👍"])
    compare(metadata, model, [text.replace("▁", " ") for text in texts], tmp_path, bos=bos)


def unigrams() -> Metadata:
    """A vocabulary whose words have random scores: ids show which cut has the highest total."""
    chance = random.Random(21)
    longer = ("".join(chance.choices("▁abcdehlot", k=chance.randint(2, 5))) for _ in range(300))
    words = ["▁", *"abcdehlot.,é日", *(word for word in longer if "▁▁" not in word)]  # of equal totals, either may win
    special = {"<s>": 3, "<pad>": 3, "</s>": 3, "<unk>": 2}
    types = {**special, **dict.fromkeys(words, 1)}
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": list(types),
        "tokenizer.ggml.token_type": list(types.values()),
        "tokenizer.ggml.scores": [0.0] * 4 + [-chance.uniform(1, 12) for _ in range(len(types) - 4)],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }


@pytest.mark.soak
@pytest.mark.parametrize("one_space", [False, True])
@pytest.mark.parametrize("space_first", [False, True])
def test_the_best_cut_of_a_unigram_vocabulary(tmp_path: Path, one_space: bool, space_first: bool) -> None:
    spaces = {"remove_extra_whitespaces": one_space, "add_space_prefix": space_first}
    metadata = {**unigrams(), **{f"tokenizer.ggml.{key}": value for key, value in spaces.items()}}
    model = write_model(tmp_path / "unigrams.gguf", metadata)
    texts = random_texts(23, soak(3_000), [*"abcdehlot.,é日 ", "  ", "the", "hello", "<s>", "x", "👍", "</s>"])
    compare(metadata, model, texts, tmp_path, bos=space_first)
