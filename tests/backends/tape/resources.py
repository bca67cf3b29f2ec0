"""What the compiler says of a kernel of the tape: registers, the stack, what was spilled, shared memory."""

from __future__ import annotations

import re
from typing import NamedTuple

from ostinato import build
from ostinato.backends.tape.from_header import TapeBuild
from ostinato.backends.tape.start import tape_source

WARPS_A_PARTITION = 4  # a multiprocessor has four partitions, which take warps in turn
REGISTERS_A_PARTITION = 16_384


class Resources(NamedTuple):
    registers: int  # of a thread
    stored_bytes: int  # spilled, by all functions; `loaded_bytes` counts each place that reads them back
    loaded_bytes: int
    static_bytes: int  # of shared memory


def resources_of(made: TapeBuild) -> Resources:
    """Compiles it; raises HardwareCannot where there is no NVRTC."""
    from cuda.bindings import nvrtc

    build._nvrtc_version()
    names, texts = [name.encode() for name in made.headers], [text.encode() for text in made.headers.values()]
    given = [f"--gpu-architecture={made.chip.exact_arch}", "--std=c++17", "--fmad=false", "--ptxas-options=-v"]
    options = [option.encode() for option in given]
    program = build._asked(nvrtc.nvrtcCreateProgram(tape_source().encode(), b"tape.cu", len(names), texts, names))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = bytearray(build._asked(nvrtc.nvrtcGetProgramLogSize(program)))
        build._asked(nvrtc.nvrtcGetProgramLog(program, log))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    text = log.decode("utf-8", "replace")
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, text
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers, shared = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes smem", text)
    assert spills, text
    assert registers is not None, text
    return Resources(
        int(registers[1]),
        sum(int(stored) for stored, _ in spills),
        sum(int(loaded) for _, loaded in spills),
        0 if shared is None else int(shared[1]),
    )


def fits_registers(n_threads: int, registers: int) -> bool:
    """Whether the warps of a block find registers in each partition, of which one may have a warp more."""
    warps = -(-n_threads // 32 // WARPS_A_PARTITION)
    return warps * 32 * registers <= REGISTERS_A_PARTITION
