"""What a caller hands to `LLM` and `AsyncLLM`, checked before any work: words, prompts, token ids, paths."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from os import PathLike
from typing import Any

from ostinato.errors import BadInput, BadOption
from ostinato.options import OLD_NAMES, PYTHON_WORDS, SAMPLING_NAMES, LoadWords, Sampling, check_word
from ostinato.other_engines import OTHER_ENGINES
from ostinato.text.template import ChatTemplate


def check_path(path: object) -> None:
    if not isinstance(path, str | PathLike):
        raise BadInput(f"the path of a state is needed, not {type(path).__name__}")


def check_call(call: str, sampling: object, words: Mapping[str, Any]) -> None:
    """Refuse options of a request outside a `Sampling`; `call` is how the call begins."""
    if words:
        for word in words.keys() - OLD_NAMES.keys():
            check_word(Sampling, word)
        given = ", ".join(f"{name}={value!r}" for name, value in words.items())
        raise BadOption(f"options of a request go into a Sampling: {call}, Sampling({given}))")
    if not isinstance(sampling, Sampling | None):
        raise BadOption(f"sampling is {sampling!r}; it must be a Sampling, as in {call}, Sampling(max_tokens=64))")


def sampling_words(words: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a chat's words that are options of a request; the others go to the template."""
    meant = SAMPLING_NAMES | OLD_NAMES.keys() | OTHER_ENGINES.keys()
    return {word: value for word, value in words.items() if word in meant}


def each_sampling(call: str, n: int, sampling: object, words: Mapping[str, Any]) -> list[Sampling | None]:
    """Check as `check_call` does; the options of each of `n` prompts: of a list its own, else the same for all."""
    if not isinstance(sampling, list | tuple):
        check_call(call, sampling, words)
        return [sampling] * n  # type: ignore[list-item]  # it was checked
    if len(sampling) != n:
        prompts = "one prompt" if n == 1 else f"{n} prompts"
        raise BadOption(f"sampling has {len(sampling)} items for {prompts}; give one Sampling, or one for each prompt")
    for one in sampling:
        check_call(call, one, words)
    return list(sampling)


def check_template_words(template: ChatTemplate, words: Mapping[str, Any], *, tools: bool) -> None:
    """Refuse a word that the template does not read, with what it may have been meant for."""
    if not words:
        return
    reads = template.reads(tools=tools)
    for word in sorted(words.keys() - reads):
        if word in PYTHON_WORDS:
            raise BadOption(f"unknown option {word!r}: {PYTHON_WORDS[word]}")
        if word in LoadWords.__annotations__:
            check_word(Sampling, word)
        if near := get_close_matches(word, SAMPLING_NAMES, 1, cutoff=0.8):
            raise BadOption(f"unknown option {word!r}; a request's options go into a Sampling: Sampling({near[0]}=...)")
        known = sorted(reads - {"messages", "tools", "bos_token", "eos_token"})
        raise BadOption(f"{template.name} does not read {word!r}; it reads {', '.join(known) or 'no such option'}")


def is_several(messages: Any) -> bool:
    """Whether these are conversations, and not the messages of one."""
    return isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple | str)


def is_one_prompt(prompt: Any) -> bool:
    """Whether this is a text or token ids, and not a list of prompts."""
    if isinstance(prompt, str):
        return True
    if not hasattr(prompt, "__getitem__") or isinstance(prompt, bytes | bytearray | Mapping):
        raise BadInput(f"a prompt is text, token ids, or a list of prompts; not {type(prompt).__name__}")
    try:
        operator.index(prompt[0])  # numpy's and torch's whole numbers are ids too
    except (IndexError, TypeError):
        return False
    return True


def is_one_text(texts: Any) -> bool:
    return isinstance(texts, str) or (hasattr(texts, "__getitem__") and is_one_prompt(texts))


def listed(texts: Sequence[Any]) -> Sequence[Any]:
    """Refuse what is no list of texts; one text alone would be a list of its characters."""
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Sequence):
        raise BadInput(f"a list of texts is needed, not {type(texts).__name__}")
    return texts


def whole_ids(ids: Any, wanted: str = "a list of token ids is needed") -> list[int]:
    """Token ids of a list or an array, as a list."""
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise BadInput(f"{wanted}; not {type(ids).__name__}")
    return [_whole(token, index) for index, token in enumerate(ids)]


def _whole(token: Any, index: int) -> int:
    if not isinstance(token, bool):  # to Python, True is 1
        with suppress(TypeError):
            return operator.index(token)
    raise BadInput(f"token id {token!r} at index {index}: a prompt is text, or a list of whole numbers")
