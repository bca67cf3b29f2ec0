"""Tensors that the host can read and not write: what it gets of the device's tables and of a plan's buffers.

A tensor has no flag for it, so this is a subclass over the same memory that refuses operations in place. Kernels, nodes
and jobs of the device use the plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ostinato.errors import DecodeInvariantError
from ostinato.loop.memory import read_only

_ASSIGNED: Final = ("add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
_IN_PLACE: Final = frozenset({f"__i{name}__" for name in _ASSIGNED} | {"__setitem__", "__set__", "__delete__"})


class ReadOnlyTensor(Tensor):
    """A view that reads as any tensor; an operation that would write to it raises. Its own views are such views too;
    a result with memory of its own is a plain tensor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        words, name = dict(kwargs or {}), getattr(func, "__name__", "")
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        written = [args[:1] if in_place else (), words.get("out")]
        if any(isinstance(one, ReadOnlyTensor) for one in _tensors(written)):
            raise DecodeInvariantError("I-5", f"{name} would write to memory of the device, which the host only reads")
        found: Any = super().__torch_function__(func, types, args, words)  # type: ignore[no-untyped-call]  # torch has no types for it
        if isinstance(found, np.ndarray):  # over the same memory, on a CPU
            return read_only(found)
        return _plain(found, {_place(one) for one in _tensors([args, list(words.values())])})


def _plain(found: Any, places: set[int]) -> Any:
    """Results that share no memory with what they were made of, as plain tensors."""
    if isinstance(found, ReadOnlyTensor):
        return found if _place(found) in places else found.as_subclass(Tensor)
    if type(found) in (list, tuple):
        return type(found)(_plain(one, places) for one in found)
    return found


def _place(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def _tensors(parts: Any) -> Iterator[Tensor]:
    if isinstance(parts, Tensor):
        yield parts
    elif isinstance(parts, list | tuple):
        for part in parts:
            yield from _tensors(part)


@read_only.register
def _(memory: Tensor) -> ReadOnlyTensor:
    return memory.as_subclass(ReadOnlyTensor)
