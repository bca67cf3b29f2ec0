"""A script: texts that the server answers with in place of the model's own, for tests of clients.

Only `ostinato serve --script FILE` has one, never a request. The texts are forced on the model token by token, so they
pass the engine, the tokenizer, the parsers and the streams as the model's own text does. Which text answers depends on
the prompt alone: a client may send its requests in any order, again, or at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.errors import BadOption


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """A text in the format that the model's parsers read, and what a prompt must contain to be answered with it."""

    text: str
    prompt_has: str = ""


def read_script(text: str, name: str) -> tuple[ScriptedAnswer, ...]:
    """The script in a JSON text: a list of objects with `text` and, unless it answers every prompt, `prompt_has`.

    >>> read_script('[{"prompt_has": "sunny", "text": "Take a hat."}, {"text": "Hello."}]', "a.json")[1]
    ScriptedAnswer(text='Hello.', prompt_has='')
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadOption(f"--script {name} is no JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise BadOption(f'--script {name} must be a list of answers such as [{{"prompt_has": "...", "text": "..."}}]')
    return tuple(_read_entry(entry, f"--script {name}, entry {number}") for number, entry in enumerate(entries))


def _read_entry(entry: object, where: str) -> ScriptedAnswer:
    if not isinstance(entry, dict) or not set(entry) <= {"text", "prompt_has"}:
        raise BadOption(f"{where} must be an object with text, and prompt_has if it does not answer every prompt")
    text, prompt_has = entry.get("text"), entry.get("prompt_has", "")
    if not isinstance(text, str) or not text or not isinstance(prompt_has, str):
        raise BadOption(f"{where}: text must be a text that is not empty, and prompt_has a text")
    return ScriptedAnswer(text, prompt_has)


def scripted_text(script: Sequence[ScriptedAnswer], prompt: str) -> str | None:
    """The text of the first entry that answers a prompt; None if there is none."""
    return next((one.text for one in script if one.prompt_has in prompt), None)
