"""What to answer when a command line cannot be parsed: where the option, the verb or the text belongs instead.

The parser says what it did not understand; here a user learns what to type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Final

from ostinato.errors import first_few
from ostinato.files.store import is_model
from ostinato.other_engines import OTHER_VERBS, answer_flag

_OPTION: Final = re.compile(r"--?[A-Za-z][\w-]*(=.*)?", re.DOTALL)
_TEXTS: Final = ("prompt", "text", "texts")  # what verbs call the text that they take as an argument
_CLOSE: Final = 0.8
_CLOSE_VERB: Final = 0.6


def answer_to(error: Any, arguments: Sequence[str], program: Any) -> str:
    """The message for an error of the parser; its own where we know nothing better. `program` has every verb."""
    context, message = getattr(error, "ctx", None), str(error.format_message())
    if context is None:
        return message
    if hasattr(error, "possibilities"):
        return _no_such_option(error.option_name, context, arguments, program)
    for word in arguments:
        if message.startswith(f"No such command {word!r}"):
            return _no_such_verb(word, context, program)
    if extra := re.match(r"Got unexpected extra argument\S* \((.*)\)$", message, re.DOTALL):
        return _too_many(extra[1], context) or message
    return message


def _no_such_verb(word: str, context: Any, program: Any) -> str:
    path = context.command_path
    own = {name: f"did you mean `{path} {name}`?" for name in context.command.commands}
    others = dict(OTHER_VERBS) if context.parent is None else {}
    paths = [name for name, _ in _verbs(program) if " " in name and context.parent is None]
    below = {name.split()[-1]: f"it is `{path} {name}`" for name in reversed(paths)}  # of two, the first
    answers = {**below, **others, **own}
    if word in answers:
        return f"no such command {word}: {answers[word]}"
    if is_model(word):
        return f'{word} is a model, and a command comes before it: `ostinato run --model {word} "a prompt"`'
    if " " in word:
        return f'a command comes before a text: `ostinato run "{word}"`'
    near = get_close_matches(word, answers, n=1, cutoff=_CLOSE_VERB)
    return f"no such command {word}" + (f": {answers[near[0]]}" if near else "")


def _no_such_option(begins: str, context: Any, arguments: Sequence[str], program: Any) -> str:
    """Of `-ngl` the parser names only `-n`, and of `-hf` only `-f`, hence the search among the arguments."""
    short = re.compile(rf"-[^-]*{re.escape(begins[1:])}" if len(begins) == 2 else re.escape(begins))
    words = [word for word in arguments if short.match(word)] or [begins]
    for word in words:
        if (answer := answer_flag(word, _flags(context.command))) is not None:
            return f"no such option {word}: {answer}"
    word = words[0]
    if not _OPTION.fullmatch(word):
        takes_text = any(one.name in _TEXTS for one in context.command.params)
        advice = (
            f'; a text that begins with - comes after --: `{context.command_path} -- "{word}"`' if takes_text else ""
        )
        return f"no such option {word!r}{advice}"
    name = word.partition("=")[0]
    owners = [f"`{path}`" for path, verb in _verbs(program) if name in _flags(verb)]
    if owners:
        return f"no such option {name} of `{context.command_path}`; it belongs to {first_few(owners)}"
    near = get_close_matches(name, _flags(context.command), n=1, cutoff=_CLOSE)
    return f"no such option {name}" + (f"; did you mean {near[0]}?" if near else "")


def _too_many(extra: str, context: Any) -> str | None:
    """More than one text was given: the prompt is not quoted, or the first is a model."""
    first = next((context.params[name] for name in _TEXTS if isinstance(context.params.get(name), str)), None)
    if first is None:
        return None
    if is_model(first):
        return f'{first} is a model, which is an option here: `{context.command_path} --model {first} "{extra}"`'
    return f'one text is taken and several words were given; quote it: `{context.command_path} "{first} {extra}"`'


def _verbs(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, verb in getattr(command, "commands", {}).items():
        yield f"{path}{name}", verb
        yield from _verbs(verb, f"{path}{name} ")


def _flags(verb: Any) -> list[str]:
    return [flag for one in verb.params if not getattr(one, "hidden", False) for flag in one.opts if flag[0] == "-"]
