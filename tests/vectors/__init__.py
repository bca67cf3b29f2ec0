"""One module per component of the vector file, each named after its component and each with one function:

    def run(given: dict[str, Any], op: Any) -> dict[str, Any]

It does `op` on `given` and returns what a vector may expect; extra keys do no harm. Absent things are `None` inside
the package; here, and only here, they become the -1 and the numeric codes of the file (`compare.py` compares).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast


class Component(Protocol):
    """A module of this folder that runs vectors."""

    def run(self, given: dict[str, Any], op: Any) -> dict[str, Any]: ...


def component(name: str) -> Component | None:
    """The module that runs the vectors of a component; None where this folder has none."""
    if not name.isidentifier() or find_spec(f"tests.vectors.{name}") is None:
        return None
    module = import_module(f"tests.vectors.{name}")
    return cast(Component, module) if hasattr(module, "run") else None
