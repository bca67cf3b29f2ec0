"""Memory as the loop sees it: an address and a length, whichever library allocated it.

Host memory is numpy's. A backend may supply arrays of its own type, with the same attributes and with `data_ptr` for
the address, as torch's tensors have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import singledispatch
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike

from ostinato.errors import HardwareCannot, InternalError

ALIGNMENT: Final = 256  # bytes


def host_zeros(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Zeroed, aligned host memory; the system allocates each page when it is first written."""
    kind = np.dtype(dtype)
    n_bytes = prod(shape) * kind.itemsize
    try:
        memory = np.zeros(n_bytes + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: larger than the address space
        sizes = " x ".join(map(str, shape))
        raise HardwareCannot(
            f"the CPU has no memory for a tensor of {sizes} {kind}; take a smaller model or context"
        ) from error
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + n_bytes].view(kind).reshape(shape)


def address_of(memory: Any) -> int:
    """Where an array or a tensor begins."""
    return int(memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr())


@singledispatch
def read_only(memory: Any) -> Any:
    """A view of the same memory that cannot be written through. A backend registers its own type of memory."""
    raise InternalError(f"there is no read-only view of a {type(memory).__name__}")


@read_only.register
def _(memory: np.ndarray) -> np.ndarray:
    # Not a view with its flag cleared: numpy lets it set the flag again where the owner of the memory has it set.
    return np.asarray(memory.data.toreadonly())


def read_only_parts(part: Any, memo: dict[int, Any] | None = None) -> Any:
    """The same blocks, lists and mappings with a read-only view in place of every array and tensor that `memory_in`
    finds; a part that is in two places is so again."""
    memo = {} if memo is None else memo
    if id(part) not in memo:
        memo[id(part)] = _read_only_parts(part, memo)
    return memo[id(part)]


def _read_only_parts(part: Any, memo: dict[int, Any]) -> Any:
    if isinstance(part, np.ndarray) or hasattr(part, "data_ptr"):
        return read_only(part)
    if is_dataclass(part) and not isinstance(part, type):
        seen = copy(part)
        for field in fields(part):
            object.__setattr__(seen, field.name, read_only_parts(getattr(part, field.name), memo))
        return seen
    if isinstance(part, Mapping):
        return {key: read_only_parts(value, memo) for key, value in part.items()}
    if isinstance(part, list | tuple):
        values = [read_only_parts(value, memo) for value in part]
        return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)
    return part


def version_of(memory: Any) -> int | None:
    """How often an operation on the host has written to a tensor or a view of it; None where that is not counted."""
    try:
        found: int | None = getattr(memory, "_version", None)
    except RuntimeError:  # torch counts nothing for a tensor of its inference mode
        return None
    return found


def memory_in(part: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every array and tensor inside blocks, lists and mappings, by its path."""
    if isinstance(part, np.ndarray) or hasattr(part, "data_ptr"):
        yield name, part
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from memory_in(getattr(part, field.name), f"{name}.{field.name}")
    elif isinstance(part, Mapping):
        for number, value in enumerate(part.values()):
            yield from memory_in(value, f"{name}.{number}")
    elif isinstance(part, list | tuple):
        for number, value in enumerate(part):
            yield from memory_in(value, f"{name}.{number}")
