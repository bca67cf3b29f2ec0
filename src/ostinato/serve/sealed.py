"""Reasoning that travels through a client as an opaque text, for clients that keep none of what was thought."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from ostinato.serve.errors import Refusal

_SEALED: Final = "ostinato:"


def sealed(reasoning: str) -> str:
    """Reasoning as one opaque word. It hides nothing: the client that gets it may have the text too.

    >>> unsealed(sealed("hm"), "x"), unsealed("of another server", "x")
    ('hm', '')
    """
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def unsealed(word: str, field: str) -> str:
    """The reasoning in a word that a client sent back in a `field`; empty if another server made the word."""
    if not word.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(word.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise Refusal(400, f"{field} was changed on its way; send it back as it was received", param=field) from None
