"""What a stranger may send: schemas that explode, and bytes that are no HTTP."""

from __future__ import annotations

import random
from typing import Any, Final


def exploding() -> dict[str, Any]:
    """Each definition holds the next ten times: a hundred million strings, in a few hundred bytes."""
    steps = {
        f"s{n}": {"type": "object", "properties": {f"p{i}": {"$ref": f"#/$defs/s{n + 1}"} for i in range(10)}}
        for n in range(8)
    }
    return {"$defs": {**steps, "s8": {"type": "string"}}, "$ref": "#/$defs/s0"}


SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "references": exploding(),
    "pattern": {"type": "string", "pattern": "(a{1,1000}){1,1000}(b{1,1000}){1,1000}"},
    "items": {"type": "array", "items": {"type": "string"}, "minItems": 1_000_000, "maxItems": 2_000_000},
    "enums": {
        "type": "object",
        "properties": {f"p{i}": {"enum": [f"{i}-{j}" for j in range(50)]} for i in range(200)},
    },
    "nowhere": {"$ref": "#/nowhere"},
    "itself": {"$ref": "#"},
    "nonsense": {"type": "nonsense"},
    "impossible": {"allOf": [{"type": "string"}, {"type": "integer"}]},
}

NOISE: Final = (random.Random(0).randbytes(200), b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\0" * 100)
