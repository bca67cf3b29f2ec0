"""Compiles bound launches ahead of time, without a GPU, for any chip: what each takes of it.

Triton must not be interpreting: a process in which it is (the tests) starts another one for this.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ostinato.backends.machine import SHARED_BYTES, Chip, arch_of
from ostinato.errors import InternalError

POINTERS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip
Place = tuple[int, ...]  # the number of an argument, and of its part where it is a group

AMD_BYTES: Final = 65_536  # of a group's local memory
LANES: Final = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32, "gfx1201": 32}  # of a wave
N_MULTIPROCESSORS: Final = 128  # of no particular chip: no kernel depends on it


class Specialisation(NamedTuple):
    signature: dict[str, Any]  # the type of each argument, by its name
    fixed: dict[Place, Any]  # constants, by their place
    aligned: dict[Place, Any]  # pointers, which are aligned to 16 bytes
    options: dict[str, Any]  # such as num_warps


def specialisation_of(launch: Any) -> Specialisation:
    """What would be compiled when the launch is first called."""
    names, constants = launch.kernel.arg_names, launch.constants
    specialised = Specialisation({}, {}, {}, {name: value for name, value in constants.items() if name not in names})
    args = iter(launch.args)
    for place, name in enumerate(names):
        if name in constants:
            specialised.fixed[(place,)] = constants[name]
            specialised.signature[name] = "constexpr"
        else:
            specialised.signature[name] = _type_of(next(args), (place,), specialised)
    return specialised


def _type_of(value: Any, path: Place, specialised: Specialisation) -> Any:
    if isinstance(value, tuple):
        made: Any = type(value)
        return made(*(_type_of(part, (*path, number), specialised) for number, part in enumerate(value)))
    if isinstance(value, Tensor):
        specialised.aligned[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype]
    if value is None:
        specialised.fixed[path] = None
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


class Taken(NamedTuple):
    """What a compiled kernel takes of a block."""

    shared_bytes: int
    registers: int  # of a thread
    spilled_bytes: int  # of a thread: stack, which lies in the device's memory


def chip_named(arch: str) -> Chip:
    """The chip of that name with its limits: sm_89, or gfx942, which has AMD's."""
    if arch in LANES:
        return Chip((0, 0), N_MULTIPROCESSORS, AMD_BYTES, has_ptx=False)
    capability = next(one for one in SHARED_BYTES if arch_of(one) == arch)
    return Chip(capability, N_MULTIPROCESSORS, SHARED_BYTES[capability])


def compile_fast() -> None:
    """Leave out the pass that widens asynchronous copies, for the rest of this process, and the numbers of lines. It
    takes five sixths of the compiler's time with packed weights, and moves no buffer: shared memory is the same to the
    byte, registers nearly. What is compiled so is kept in a cache of its own, since Triton would take it for the real
    one."""
    from triton import knobs
    from triton._C.libtriton import passes

    knobs.cache.dir = f"{knobs.cache.dir}-without-coalescing"
    knobs.compilation.disable_line_info = True
    passes.ttgpuir.add_coalesce_async_copy = lambda manager: None


def compiled_for(kernel: Any, specialised: Specialisation, archs: Sequence[str]) -> list[Taken]:
    """A kernel of a bound launch, compiled for chips of one generation: Triton makes the same PTX for all of them but
    for the line that names the chip (`tests/backends/cuda/triton/test_cards.py`), which each one's assembler gets."""
    made = _made(kernel, specialised, archs[0])
    first = _taken(made, archs[0])
    return [first, *(_assembled(made, specialised.options, arch, first.shared_bytes) for arch in archs[1:])]


def _assembled(made: Any, options: Mapping[str, Any], arch: str, shared_bytes: int) -> Taken:
    from triton.compiler.compiler import make_backend

    target = _target(arch)
    backend = make_backend(target)
    name = arch if target.arch < 90 else f"{arch}a"
    ptx = re.sub(r"^\.target \w+", f".target {name}", made.asm["ptx"], flags=re.MULTILINE)
    binary = backend.make_cubin(ptx, {}, backend.parse_options(dict(options)), target.arch)
    return Taken(shared_bytes, *registers_of(binary, made.name))


def compiled(kernel: Any, specialised: Specialisation, arch: str) -> Taken:
    """A kernel of a bound launch, compiled for a chip."""
    return _taken(_made(kernel, specialised, arch), arch)


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", arch, LANES[arch]) if arch in LANES else GPUTarget("cuda", int(arch[3:]), 32)


def _made(kernel: Any, specialised: Specialisation, arch: str) -> Any:
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(kernel, specialised.signature, specialised.fixed, specialised.aligned)
    return triton.compile(source, target=_target(arch), options=specialised.options)


def _taken(made: Any, arch: str) -> Taken:
    if arch in LANES:
        text = made.asm["amdgcn"]
        found = [
            int(re.findall(rf"\.{name}: +(\d+)", text)[-1]) for name in ("vgpr_count", "private_segment_fixed_size")
        ]
        return Taken(made.metadata.shared, *found)
    return Taken(made.metadata.shared, *registers_of(made.asm["cubin"], made.name))


def registers_of(binary: bytes, name: str) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, of a kernel in a binary for NVIDIA."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"Function {re.escape(name)}:\s+REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise InternalError(f"cuobjdump says nothing of {name}: {said}")
    return int(found[1]), int(found[2])


@cache
def _cuobjdump() -> str:
    """NVIDIA's, which Triton brings along."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
