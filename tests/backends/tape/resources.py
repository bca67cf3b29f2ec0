"""What the assembler says of a kernel of the tape: registers, what was spilled, shared memory.

Its PTX is made by NVRTC and assembled by ptxas, of the machine or of Triton's wheel: the driver does the same.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from ostinato import build
from ostinato.backends.tape.from_header import TapeBuild
from ostinato.backends.tape.start import tape_source
from ostinato.errors import HardwareCannot

PARTITIONS = 4  # of a multiprocessor, which take warps in turn
REGISTERS_A_PARTITION = 16_384


class Resources(NamedTuple):
    registers: int  # of a thread
    stored_bytes: int  # spilled, by all functions; `loaded_bytes` counts each place that reads them back
    loaded_bytes: int
    static_bytes: int  # of shared memory


def assembler() -> str:
    """The newest ptxas; raises HardwareCannot where there is none."""
    triton = importlib.util.find_spec("triton")
    folders = [
        Path(folder) / "backends" / "nvidia" / "bin" for folder in (triton and triton.submodule_search_locations) or ()
    ]
    for name, path in (*(("ptxas-blackwell", str(folder)) for folder in folders), ("ptxas", None)):
        if found := shutil.which(name, path=path):
            return found
    raise HardwareCannot("no ptxas: it comes with triton, or with the CUDA toolkit")


def resources_of(made: TapeBuild) -> Resources:
    """Compiles it; raises HardwareCannot where there is no NVRTC or no ptxas."""
    variant, ptxas = made.sizes.variant, assembler()
    ptx = build.cubin(tape_source(), "tape.cu", headers=made.headers, arch=variant.arch, fused=False, as_ptx=True)
    arch = variant.arch if variant.move_registers else made.chip.arch
    with tempfile.TemporaryDirectory() as folder:
        (source := Path(folder) / "tape.ptx").write_bytes(ptx.rstrip(b"\0"))
        asked = [ptxas, "-v", f"-arch={arch}", "-o", str(Path(folder) / "tape.cubin"), str(source)]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
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
    warps = -(-(n_threads // 32) // PARTITIONS)
    return warps * 32 * registers <= REGISTERS_A_PARTITION
