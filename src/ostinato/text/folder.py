"""Tokenizers of safetensors folders: `tokenizer.json` unchanged, and the special ids that the files beside it name.

The library's own file has its normalizer, pre-tokenizer and model; here is only what it does not cover: which ids
begin and end a text, which end a generation, and what each id looks like as bytes, so that a stream of ids and
a whole list decode alike.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from ostinato.errors import BadFile, Unsupported
from ostinato.files.json_file import read_json_if_there, read_text
from ostinato.text.byte_level import token_bytes
from ostinato.text.guard import guarded, library_ids
from ostinato.text.sentencepiece import spelt_byte
from ostinato.text.specials import Encode
from ostinato.text.tokenizer import Tokenizer
from ostinato.text.vocabulary import END_MARKERS, MAX_TOKENS, end_ids

MAX_TOKENIZER_BYTES = 1 << 28  # the largest vocabularies in use take about 2^25


def folder_encoder(source: str, path: Path, parsing: Library) -> Encode:
    """Two of the library's tokenizers, because whether special tokens are parsed is a setting of the object."""
    lock = threading.Lock()

    @cache
    def plain() -> Library:  # made when first asked for: a conversation never needs it
        library = load_library(source, path)
        library.encode_special_tokens = True
        return library

    def encode(text: str, parse_control: bool) -> list[int]:
        with lock:
            library = parsing if parse_control else plain()
        return library_ids(library, text, path)

    return encode


def load_library(source: str, path: Path) -> Library:
    """The library's tokenizer out of the text of a tokenizer.json, without truncation and padding."""
    library: Library = guarded(lambda: Library.from_str(source), path, "is not a tokenizer.json that can be used")
    library.no_truncation()
    library.no_padding()
    return library


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a safetensors folder; `BadFile` or `Unsupported` says what is wrong with which file."""
    path = folder / "tokenizer.json"
    if not os.path.exists(path):
        raise _no_tokenizer(folder)
    source = read_text(path, most=MAX_TOKENIZER_BYTES)
    library = load_library(source, path)
    settings = read_json_if_there(folder / "tokenizer_config.json")
    config = read_json_if_there(folder / "config.json")
    named = {**config, **_mapping(config.get("text_config"))}
    texts = _texts(library, path, named.get("vocab_size"))
    added = library.get_added_tokens_decoder()
    hidden = frozenset(id for id, token in added.items() if token.special)
    # The library keeps its parts as JSON; parsing the whole file a second time would take longer than loading it.
    decoder = None if library.decoder is None else json.loads(library.decoder.__getstate__())
    pieces = decoder_pieces(decoder, path)
    bos_id = _token_id(library, settings.get("bos_token"), named.get("bos_token_id"), len(texts))
    eos_id = _token_id(library, settings.get("eos_token"), named.get("eos_token_id"), len(texts))
    generation = read_json_if_there(folder / "generation_config.json")
    ends = [*_ids(generation.get("eos_token_id")), *_ids(named.get("eos_token_id"))]
    markers = [texts[id] if id in hidden and texts[id] in END_MARKERS else "" for id in range(len(texts))]
    whole, bare = library_ids(library, "a", path, whole=True), library_ids(library, "a", path)
    prefix, suffix = _around(whole, bare, settings, bos_id, eos_id)
    pair = library_ids(library, "a", path, whole=True, second="a")
    return Tokenizer(
        vocab_size=len(texts),
        bos_id=bos_id,
        eos_id=eos_id,
        eog_ids=end_ids(markers, [eos_id, *(id for id in ends if id < len(texts))]),
        add_bos=bos_id is not None and bos_id in prefix,
        add_eos=eos_id is not None and eos_id in suffix,
        encoder=folder_encoder(source, path, library),
        texts=texts,
        shown=[text.encode() if id in added else pieces.of(text) for id, text in enumerate(texts)],
        hidden=hidden,
        drops_first_space=pieces.drops_first_space,
        prefix=prefix,
        suffix=suffix,
        between=_between(pair, [*prefix, *bare, *suffix], [*bare, *suffix]),
    )


def _no_tokenizer(folder: Path) -> BadFile | Unsupported:
    others = [
        name for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model") if (folder / name).exists()
    ]
    if others:
        return Unsupported(
            f"{folder} has {others[0]} but no tokenizer.json; write one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return BadFile(f"{folder} has no tokenizer.json; fetch it from where the model came from")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(library: Library, path: Path, config_size: object) -> list[str]:
    """The token of each id; ids that only the model's matrices have are empty."""
    vocabulary = library.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if isinstance(config_size, int) and 0 < config_size <= MAX_TOKENS:
        size = max(size, config_size)
    if not 0 < size <= MAX_TOKENS:
        raise BadFile(f"{path} has token ids up to {size - 1}; 1 to {MAX_TOKENS} tokens can be used")
    texts = [""] * size
    for text, id in vocabulary.items():
        texts[id] = text
    return texts


def _token_id(library: Library, token: object, fallback: object, n_tokens: int) -> int | None:
    """The id of a token given as text, or as a record with its text; else the first id that config.json names."""
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str) and content:
        return library.token_to_id(content)
    return next((id for id in _ids(fallback) if id < n_tokens), None)


def _ids(value: object) -> list[int]:
    """Ids from an entry that may be one id, a list, or absent."""
    listed = value if isinstance(value, list) else [value]
    return [id for id in listed if isinstance(id, int) and not isinstance(id, bool) and id >= 0]


def _around(
    whole: list[int], bare: list[int], settings: Mapping[str, Any], bos_id: int | None, eos_id: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What goes before and after a text: the file's own post-processor, unless tokenizer_config.json speaks."""
    at = next((at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare), None)
    prefix, suffix = ((), ()) if at is None or not bare else (tuple(whole[:at]), tuple(whole[at + len(bare) :]))
    add_bos, add_eos = settings.get("add_bos_token"), settings.get("add_eos_token")
    if isinstance(add_bos, bool) and bos_id is not None and add_bos != (bos_id in prefix):
        prefix = (bos_id, *prefix) if add_bos else tuple(id for id in prefix if id != bos_id)
    if isinstance(add_eos, bool) and eos_id is not None and add_eos != (eos_id in suffix):
        suffix = (*suffix, eos_id) if add_eos else tuple(id for id in suffix if id != eos_id)
    return prefix, suffix


def _between(pair: list[int], first: list[int], last: list[int]) -> tuple[int, ...]:
    """What else stands between two texts: nothing where their post-processor treats pairs in another way."""
    fits = len(pair) >= len(first) + len(last) and pair[: len(first)] == first and pair[len(pair) - len(last) :] == last
    return tuple(pair[len(first) : len(pair) - len(last)]) if fits else ()


@dataclass(frozen=True, slots=True)
class Pieces:
    """How a decoder turns the text of a token into bytes."""

    bytes_stand_in: bool = False  # every character stands for a byte
    byte_tokens: bool = False  # <0x0A> is a byte
    replaced: tuple[tuple[str, str], ...] = ()
    rest: str | None = None  # a token with this mark continues a word, any other brings a space
    drops_first_space: bool = False

    def of(self, text: str) -> bytes:
        """The bytes of one token."""
        if self.bytes_stand_in:
            return token_bytes(text)
        byte = spelt_byte(text) if self.byte_tokens else None
        if byte is not None:
            return byte
        for old, new in self.replaced:
            text = text.replace(old, new)
        if self.rest is None:
            return text.encode()
        return (text.removeprefix(self.rest) if self.rest and text.startswith(self.rest) else f" {text}").encode()


def decoder_pieces(decoder: object, path: Path) -> Pieces:
    """What the `decoder` entry of a tokenizer.json means token by token; one that cannot be read so is refused."""
    if decoder is None:
        return Pieces(rest="", drops_first_space=True)
    sequence = _mapping(decoder).get("decoders") if _mapping(decoder).get("type") == "Sequence" else [decoder]
    steps = [step for step in sequence if isinstance(step, dict)] if isinstance(sequence, list) else []
    by_type = {step.get("type"): step for step in steps}
    known = {"ByteLevel", "ByteFallback", "Fuse", "Strip", "Replace", "Metaspace", "WordPiece"}
    strange = [str(kind) for kind in by_type if kind not in known]
    if strange or not by_type:
        what = ", ".join(strange) or "of an unknown form"
        raise Unsupported(f"{path}: the decoder {what} is not supported; supported: {', '.join(sorted(known))}")
    if "ByteLevel" in by_type:
        return Pieces(bytes_stand_in=True)
    if "WordPiece" in by_type:
        return Pieces(rest=str(by_type["WordPiece"].get("prefix", "##")), drops_first_space=True)
    strip = by_type.get("Strip", {})
    drops = strip.get("content") == " " and bool(strip.get("start"))
    replaced = _replaced(steps, path)
    if "Metaspace" in by_type:
        space = by_type["Metaspace"]
        replaced = (*replaced, (str(space.get("replacement", "\u2581")), " "))
        scheme = space.get("prepend_scheme", "always" if space.get("add_prefix_space", True) else "never")
        drops = drops or scheme != "never"
    return Pieces(byte_tokens="ByteFallback" in by_type, replaced=replaced, drops_first_space=drops)


def _replaced(steps: Sequence[Mapping[str, Any]], path: Path) -> tuple[tuple[str, str], ...]:
    pairs = []
    for step in steps:
        if step.get("type") == "Replace":
            old, new = _mapping(step.get("pattern")).get("String"), step.get("content")
            if not isinstance(old, str) or not old or not isinstance(new, str):
                raise Unsupported(f"{path}: the decoder replaces by a pattern; only plain strings are supported")
            pairs.append((old, new))
    return tuple(pairs)
