"""What Triton's compiler is told of a bound launch, without a card."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

POINTERS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip
Path = tuple[int, ...]  # the number of an argument, and of its part where it is a group


class Told(NamedTuple):
    signature: dict[str, Any]  # the type of each argument, by its name
    fixed: dict[Path, Any]  # constants, by their place
    aligned: dict[Path, Any]  # pointers, which are aligned to 16 bytes
    options: dict[str, Any]  # such as num_warps


def told_of(launch: Any) -> Told:
    """What would be compiled when the launch is first called."""
    names, constants = launch.kernel.arg_names, launch.constants
    told = Told({}, {}, {}, {name: value for name, value in constants.items() if name not in names})
    args = iter(launch.args)
    for place, name in enumerate(names):
        if name in constants:
            told.fixed[(place,)] = constants[name]
            told.signature[name] = "constexpr"
        else:
            told.signature[name] = _type_of(next(args), (place,), told)
    return told


def _type_of(value: Any, path: Path, told: Told) -> Any:
    if isinstance(value, tuple):
        made: Any = type(value)
        return made(*(_type_of(part, (*path, number), told) for number, part in enumerate(value)))
    if isinstance(value, Tensor):
        told.aligned[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype]
    if value is None:
        told.fixed[path] = None
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"
