"""Vectors of derived settings (C)."""

from dataclasses import asdict
from typing import Any

from ostinato.decoder.cells.settings import settle
from ostinato.errors import InvalidBatch
from tests.vectors.sanitizer import refused


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    if op != "create":
        raise ValueError(f"{op!r} is no operation on settings")
    try:
        return {"ok": True, **asdict(settle(**given))}
    except InvalidBatch as error:
        return refused(error)
