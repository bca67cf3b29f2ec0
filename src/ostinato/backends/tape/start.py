"""`persistent` on CUDA: one cooperative kernel, a block on every multiprocessor, that runs until no slot is live.

It is compiled for one model and one card (`src/`), and kept on disk. A launch is one call with one struct. It
fills the card, so that nothing runs beside it: a job is enqueued on its own stream, behind the kernel, and its caller
sets YIELD, so that the kernel exits at the next step boundary; the next trigger resumes there (docs/tape.md). So `auto`
gives it to one engine of a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import addressof, c_void_p
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import torch

from ostinato.backends import cards
from ostinato.backends.cuda import gpu
from ostinato.backends.cuda.start import DevicePaced, EventWork, module_of
from ostinato.backends.machine import Chip
from ostinato.backends.tape.plan import TapeStep
from ostinato.backends.tape.sizes import TapeSizes, Variant
from ostinato.build import cubin
from ostinato.errors import HardwareCannot
from ostinato.loop.guard import Guard
from ostinato.loop.layout import Layout, Tables
from ostinato.loop.plan import Plan
from ostinato.loop.sources import source
from ostinato.loop.start import next_executable
from ostinato.loop.step_boundary import native_headers

SOURCES: Final = Path(__file__).parent / "src"


def tape_headers(shape_header: str, layout: Layout, page_tokens: int) -> dict[str, str]:
    """What `tape.cu` includes, by name."""
    own = {path.name: path.read_text("utf-8") for path in sorted(SOURCES.glob("*.h"))}
    return own | native_headers(layout, page_tokens) | {"philox.h": source("philox.h"), "shape.h": shape_header}


def tape_source() -> str:
    return (SOURCES / "tape.cu").read_text("utf-8")


def tape_binary(headers: Mapping[str, str], chip: Chip, defines: Mapping[str, int]) -> bytes:
    """The kernel, compiled: a cubin, or PTX (`Variant`). Nothing is fused by the compiler's choice: a row's bits must
    not depend on which of several loops it goes through, nor on the number of slots that the kernel was compiled for
    (E-80)."""
    variant = Variant.of(chip)
    return cubin(
        tape_source(),
        "tape.cu",
        headers=headers,
        arch=variant.arch,
        defines=defines,
        fused=False,
        as_ptx=variant.as_ptx,
    )


def tape_kernel(
    header: str,
    sizes: TapeSizes,
    layout: Layout,
    page_tokens: int,
    device: torch.device,
    defines: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """The kernel, compiled for this card and loaded; HardwareCannot where its blocks would not all be there at once
    (E-83)."""
    from cuda.bindings import driver

    chip = gpu.chip_of(device)
    binary = tape_binary(tape_headers(header, layout, page_tokens), chip, defines)
    kernel = driver.CUkernel(int(module_of(binary, device).get_kernel("tape").handle))
    most_shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    number = device.index or 0
    _ok(driver.cuKernelSetAttribute(most_shared, sizes.shared_bytes, kernel, number), "give it its memory")
    function = _ok(driver.cuKernelGetFunction(kernel), "load it")
    answer = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, sizes.n_threads, sizes.shared_bytes)
    fit = _ok(answer, "ask how many blocks fit") * chip.n_multiprocessors
    if fit < sizes.grid.n_blocks:
        raise HardwareCannot(
            f"the persistent kernel has {sizes.grid.n_blocks} blocks that wait for each other, and {fit} fit on "
            "this card at once; use --mode loop"
        )
    return function


class TapeLoop(DevicePaced):
    """The whole loop as one kernel; the host launches it once per trigger."""

    name = "persistent"
    alone = True
    comparison: Literal["bits", "tolerance"] = "tolerance"  # sums of its own order
    defines: Mapping[str, int] = MappingProxyType({})  # for tools that watch it; see ring.h

    def __init__(
        self, plan: Plan, step: TapeStep, tables: Tables, guard: Guard, wake: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(plan, tables, guard, wake)
        self._step = step
        self._counts = True
        cards.hold(str(self.device))

    def build(self) -> None:
        self._guard.allow("I-1", "building the step again")
        self.executable = next_executable()
        self._kernel = self._loaded()
        self._step.built(self._plan.hash, self.executable)
        self.n_instantiations += 1

    def launch(self) -> None:
        self._guard.allow_launch()
        self.n_launches += 1
        self._run(single=False)
        self._passed.record(self.stream)

    def step(self) -> None:
        self._guard.allow("I-2", "submitting a single step from the host")
        self._run(single=True)
        self._await_device()

    def beside(self, job: Callable[[], None]) -> EventWork:
        return self._on(self.stream, job)

    def note_times(self) -> None:
        """From the next launch on, blocks note in the plan's `clock` when they begin what."""
        self._step.note_times()

    def close(self) -> None:
        super().close()
        self._kernel = None
        if self._counts:
            self._counts = False
            cards.release(str(self.device))

    def _loaded(self) -> Any:
        step, layout = self._step, self._tables.layout
        return tape_kernel(step.header, step.sizes, layout, self._plan.page_tokens, self.device, self.defines)

    def _run(self, *, single: bool) -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        Device(self.device.index or 0).set_current()  # of this thread, which need not be the one that built
        argument = self._step.checked_argument(single=single)
        places = (c_void_p * 1)(addressof(argument))
        sizes, stream = self._step.sizes, driver.CUstream(self.stream.cuda_stream)
        grid, threads = (sizes.grid.n_blocks, 1, 1), (sizes.n_threads, 1, 1)
        _ok(
            driver.cuLaunchCooperativeKernel(
                self._kernel, *grid, *threads, sizes.shared_bytes, stream, addressof(places)
            ),
            "launch it",
        )


def _ok(answer: Any, what: str) -> Any:
    error, *values = answer
    if int(error) != 0:
        raise HardwareCannot(f"the driver could not {what}: the persistent kernel ended with {error}; use --mode loop")
    return values[0] if values else None
