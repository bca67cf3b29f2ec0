"""From the hidden rows of a text to one vector, by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from torch import Tensor

from ostinato.errors import BadOption, listing

POOLINGS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "mean": lambda rows: rows.mean(0),
        "last": lambda rows: rows[-1],
        "cls": lambda rows: rows[0],
    }
)


def pooling(name: str) -> Callable[[Tensor], Tensor]:
    """The function that takes hidden rows [rows, hidden] to one vector [hidden]."""
    if name not in POOLINGS:
        raise BadOption(f"unknown pooling {name!r}; known: {listing(name, POOLINGS)}")
    return POOLINGS[name]
