"""The one gate that tensors pass before a kernel is bound to them, and what a bound kernel is.

A kernel launched on a null, foreign or short pointer can end the process or silently corrupt memory, long after the
call. Binding happens once, so the checks cost nothing per step.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from ostinato.backends.machine import Chip
from ostinato.errors import BadPointer, HardwareCannot

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
ALIGNED_TO: Final = 16  # bytes of an address, or a whole number: what Triton looks at in an argument
EITHER: Final = (torch.float32, torch.bfloat16)  # of rows that products take and leave


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """A Triton kernel with its grid and all its arguments: called without arguments, and open to inspection."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]  # by name: what it is compiled for, and options such as num_warps

    @staticmethod
    def of(kernel: Any, grid: tuple[int, ...], given: Mapping[str, Any], **options: Any) -> TritonLaunch:
        """The kernel over what it takes of `given`, by the names of its parameters; constants are upper case."""
        args = tuple(given[name] for name in kernel.arg_names if not name.isupper())
        constants = {name: given[name] for name in kernel.arg_names if name.isupper()}
        return TritonLaunch(kernel, grid, args, constants | options)

    def __call__(self) -> None:
        try:
            self.kernel[self.grid](*self.args, **self.constants)
        except Exception as error:
            if (why := _why_no_room(self.kernel.__name__, error)) is None:
                raise
            raise HardwareCannot(why) from error

    def compile(self) -> None:
        """Compile and load it for the current device without launching it. A launch with an equal `key` then finds it
        in Triton's memory. HardwareCannot, with the kernel's name, where that fails."""
        name = self.kernel.__name__
        try:
            # Triton loads a binary, and compares what it needs with what the GPU has, when `run` is first asked for.
            _ = self.kernel.warmup(*self.args, grid=self.grid, **self.constants).run
        except Exception as error:  # of the compiler, the assembler or the driver, which have no kind in common
            why = _why_no_room(name, error)
            raise HardwareCannot(why or f"Triton could not compile {name}: {_last_line(error)}") from error

    @property
    def key(self) -> Hashable:
        """Equal of two launches for which Triton compiles the same program: their kernels, constants and options are
        equal, and so are the types of their arguments and what the compiler is told of the values (E-9)."""
        constants = tuple(sorted((name, repr(value)) for name, value in self.constants.items()))
        return self.kernel.__module__, self.kernel.__name__, tuple(map(_specialised, self.args)), constants


@dataclass(frozen=True, slots=True)
class Launches:
    """Several, one after the other."""

    parts: tuple[TritonLaunch, ...]

    def __call__(self) -> None:
        for launch in self.parts:
            launch()


def grouped(given: Mapping[str, Any]) -> Any:
    """Arguments that go together, as one that a kernel has by their names; it is compiled as if they were apart."""
    return _group_of(tuple(given))(*given.values())


@cache
def _group_of(names: tuple[str, ...]) -> Any:
    made: Any = namedtuple  # which mypy knows only with names written out
    return made("Group", names)


def launches_in(part: Any) -> Iterator[TritonLaunch]:
    """Every launch of a kernel inside lists, mappings, and functions with bound arguments; a plain function has none
    that could be seen."""
    match part:
        case TritonLaunch():
            yield part
        case Launches():
            yield from part.parts
        case partial():
            yield from launches_in(part.args)
        case Mapping():
            yield from launches_in([*part.values()])
        case list() | tuple():
            for one in part:
                yield from launches_in(one)


def _specialised(value: Any) -> Hashable:
    """What Triton compiles for: whether an address or a whole number is a multiple of 16, and the number 1."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % ALIGNED_TO == 0
    if isinstance(value, tuple):
        return tuple(map(_specialised, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return 1 if value == 1 else ("int", value % ALIGNED_TO == 0, -(2**31) <= value < 2**31)
    return None if value is None else type(value).__name__


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:300] if lines else type(error).__name__


def _why_no_room(kernel: str, error: Exception) -> str | None:
    """What Triton says of a kernel that asks for more than the GPU has; None for another error."""
    from triton.runtime.errors import OutOfResources  # here: a plan of twins needs no Triton

    if not isinstance(error, OutOfResources):
        return None
    return f"{kernel} needs {error.required} ({error.name}), and this GPU has {error.limit}; use --device cpu"


def compile_as(chip: Chip) -> None:
    """Where OSTINATO_CHIP names another chip than the GPU that is there: make kernels of this process for that one, as
    far as PTX, and assemble them for the GPU, on which a binary for the other would not load."""
    if not chip.is_pretended:
        return
    from triton import knobs

    def hook(*found: Any) -> tuple[str, str] | None:
        if not found:  # Triton asks what tells these binaries from others in its cache
            return (chip.arch, chip.arch)
        backend, stages, options, _, capability = found
        stages["ptx"] = lambda source, metadata: backend.make_ptx(source, metadata, options, capability)
        return None

    knobs.runtime.override_arch = chip.arch.replace("_", "")
    knobs.runtime.add_stages_inspection_hook = hook


def checked(
    name: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype | Iterable[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device,
    columns: bool = False,
) -> Tensor:
    """`tensor` itself, once it is known to be what a kernel will take it for; else BadPointer naming the argument.

    It must lie on `device`, have one of the dtypes, be contiguous and not empty, have as many dimensions as `shape`,
    and be as long as `shape` says in each (None: any length; the first dimension may be longer). With `columns`, it may
    be some columns of a wider matrix.
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if not isinstance(tensor, Tensor):
        raise BadPointer(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.device != _with_index(device, tensor.device):
        raise BadPointer(f"{name} {_say(tensor)} lies on {tensor.device}; the kernel runs on {device}: move it there")
    if tensor.numel() == 0 or (tensor.data_ptr() == 0 and not tensor.is_meta):  # of which nothing is launched
        raise BadPointer(f"{name} {_say(tensor)} has no memory; allocate it before binding a kernel to it")
    if tensor.dtype not in dtypes:
        raise BadPointer(f"{name} {_say(tensor)} must be {' or '.join(_short(d) for d in dtypes)}")
    whole_rows = columns and tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]
    if not tensor.is_contiguous() and not whole_rows:
        raise BadPointer(f"{name} {_say(tensor)} has strides {tuple(tensor.stride())}; the kernel needs it contiguous")
    wanted = tuple(shape)
    fits = len(wanted) == tensor.dim() and all(
        want is None or (have >= want if place == 0 else have == want)
        for place, (have, want) in enumerate(zip(tensor.shape, wanted, strict=False))
    )
    if not fits:
        text = ", ".join("any" if want is None else str(want) for want in wanted)
        raise BadPointer(f"{name} {_say(tensor)} is too small or misshapen: the kernel touches [{text}]")
    return tensor


def _with_index(device: torch.device, like: torch.device) -> torch.device:
    """`cuda` without a number means the one that `like` is on."""
    if device.index is None and device.type == like.type:
        return like
    return device


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _say(tensor: Tensor) -> str:
    return f"({_short(tensor.dtype)} {list(tensor.shape)})"
