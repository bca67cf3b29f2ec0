"""Tensors that the host can read and not write: what it gets of the device's tables and of a plan's buffers.

A tensor has no flag for it, so this is a subclass over the same memory that refuses operations in place. Kernels, nodes
and jobs of the device use the plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.errors import DecodeInvariantError
from ostinato.loop.memory import read_only

# What gives the memory itself to code that torch does not see, or exchanges it without an operation.
_REFUSED: Final = frozenset(
    {
        *("__set__", "__delete__", "share_memory_"),
        *("apply_", "map_", "map2_"),
        *("__dlpack__", "storage", "typed_storage", "untyped_storage", "_typed_storage"),
    }
)


class ReadOnlyTensor(Tensor):
    """A view that reads as any tensor; an operation that would write to it raises. Its own views are such views too;
    a result with memory of its own is a plain tensor. Its address can be had, for launches are bound to addresses."""

    def as_subclass(self, cls: type[Tensor]) -> NoReturn:  # torch asks no `__torch_function__` here
        raise _refusal("as_subclass")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        words, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in _REFUSED and any(isinstance(one, ReadOnlyTensor) for one in args[:1]):
            raise _refusal(name)
        with _WithoutWrites():
            found: Any = super().__torch_function__(func, types, args, words)  # type: ignore[no-untyped-call]  # torch has no types for it
        if isinstance(found, np.ndarray):  # over the same memory, on a CPU
            return read_only(found)
        return _plain(found, {_place(one) for one in _tensors([args, words])})


class _WithoutWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Runs the operations that a function of torch consists of. Each states which arguments it writes to; one that
    would write to a `ReadOnlyTensor`, or to a view that was taken of it on the way, raises before it runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._views: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        words, known = dict(kwargs or {}), func._schema.arguments
        given = [*zip(known, args, strict=False), *((one, words[one.name]) for one in known if one.name in words)]
        written = [value for one, value in given if one.alias_info is not None and one.alias_info.is_write]
        if any(self._is_held(one) for one in _tensors(written)):
            raise _refusal(func.__name__)
        found = func(*args, **words)
        places = {_place(one) for one in _tensors([args, words]) if self._is_held(one)}
        self._views += [one for one in _tensors(found) if _place(one) in places]
        return found

    def _is_held(self, tensor: Tensor) -> bool:
        return isinstance(tensor, ReadOnlyTensor) or any(tensor is one for one in self._views)


def _refusal(name: str) -> DecodeInvariantError:
    return DecodeInvariantError("I-5", f"{name} would write to memory of the device, which the host only reads")


def _plain(found: Any, places: set[int]) -> Any:
    """Results that share no memory with what they were made of, as plain tensors."""
    if isinstance(found, ReadOnlyTensor):
        return found if _place(found) in places else _as(Tensor, found)
    if type(found) in (list, tuple):
        return type(found)(_plain(one, places) for one in found)
    return found


def _as(kind: type[Tensor], tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(tensor, kind)


def _place(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def _tensors(parts: Any) -> Iterator[Tensor]:
    if isinstance(parts, Tensor):
        yield parts
    elif isinstance(parts, list | tuple):
        for part in parts:
            yield from _tensors(part)
    elif isinstance(parts, dict):
        yield from _tensors(list(parts.values()))


@read_only.register
def _(memory: Tensor) -> Tensor:
    return _as(ReadOnlyTensor, memory)
