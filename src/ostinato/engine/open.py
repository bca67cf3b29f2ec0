"""Everything of one engine below requests, opened together: tables, memory, plan, start, decode mode, prefill.

The one place that chooses a mode: `auto` takes the highest that can run and keeps the reasons for those above it. A
loop is built when it is opened, so that a mode that fails at that is known here too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from ostinato.backends.base import Chunks
from ostinato.backends.cuda.chip import Chip
from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.plan import fused_plan, why_not_fused
from ostinato.backends.cuda.static_plan import SPARE_STATES, WHY_NO_LOOP, static_plan, why_not_static
from ostinato.backends.native.chunks import NativeChunks
from ostinato.backends.native.library import why_no_native
from ostinato.backends.native.pages import NativePages
from ostinato.backends.native.plan import NativeStep, native_plan, why_not_native_model
from ostinato.backends.native.start import NativeLoop
from ostinato.backends.tape.plan import TapeStep, tape_plan, why_no_tape_on, why_not_tape, why_too_large
from ostinato.backends.torch.chunks import TorchChunks
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import PAGE_TOKENS, PagedMemory
from ostinato.backends.torch.plan import torch_plan
from ostinato.backends.torch.start import CpuEager, CpuLoop
from ostinato.backends.torch.tables import as_tensors, tensor_tables
from ostinato.engine.cores import default_threads
from ostinato.errors import HardwareCannot, Unsupported
from ostinato.loop.guard import Guard
from ostinato.loop.host import HostSide
from ostinato.loop.layout import OUTBOX_ENTRIES, Layout, Tables
from ostinato.loop.mode import DecodeMode
from ostinato.loop.plan import Plan
from ostinato.loop.start import PendingWork, Start
from ostinato.loop.wake import FileWakeEvent, WakeEvent
from ostinato.options import Activations, KVType

if TYPE_CHECKING:
    from ostinato.backends.cuda.start import CudaStart
    from ostinato.backends.cuda.step import StepKernels

WHILE_NODES_SINCE: Final = 12_040  # the driver's number for CUDA 12.4
MODES: Final = ("eager", "graph", "loop", "persistent")  # from low to high
TAKEN: Final = "another engine of this process has it, and it fills the card"
NO_ROOM: Final = "its tape does not fit beside the weights (--mode persistent has prompts read it instead)"
TWIN: Final = "twin"  # the native loop's twin, paced by Python: for tests alone


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """What a loop is opened with, settled."""

    mode: str
    n_slots: int
    context: int
    n_pages: int
    kv_type: KVType
    n_tokens: int  # ids that the tokenizer knows; those beyond are never chosen
    activations: Activations = "wide"  # of weights in tiles
    threads: int | None = None  # of the native loop; None: as many as the machine has cores
    prompts_on_tape: bool = False  # of `persistent`: whether matrices lie on its tape alone, and prompts read that
    room_for_tape: bool = True  # False: `auto` must do without it

    def needs_tape(self, device: torch.device) -> bool:
        """Whether it says what no other mode of a GPU can do: then `auto` is `persistent`, or nothing."""
        return device.type != "cpu" and (self.prompts_on_tape or self.activations != "wide")


class Loop:
    """The running half of an engine. `changed` is set whenever the loop may have published something. `model` is the
    one that was given, or the same on the tape alone: whoever takes it from here can give up the other."""

    def __init__(
        self,
        model: Model,
        options: LoopOptions,
        *,
        outbox_entries: int | None = None,
    ) -> None:
        self.options, self.model = options, model
        self.page_tokens = PAGE_TOKENS[model.device.type]
        self.mode_name, self.why_not = choose_mode(options.mode, model, options)
        max_pages = -(-options.context // self.page_tokens)
        layout = Layout(options.n_slots, max_pages, model.shape.vocab, outbox_entries=outbox_entries or OUTBOX_ENTRIES)
        self.memory: Any  # pages and states, of the backend's own kind
        if self.is_native:
            self.memory = NativePages.of(model.shape, n_pages=options.n_pages, kv_type=options.kv_type)
            self.tables = Tables.of(layout)
        else:
            self.memory, self.tables = self._paged_memory(), tensor_tables(layout, model.device)
        self.host = HostSide(self.tables)
        self.guard = Guard()
        self.changed: WakeEvent = FileWakeEvent() if self.is_native else threading.Event()
        self.plan, self.start, self.prefill = self._made()
        self.mode = DecodeMode(self.plan, self.start, self.tables, self.guard)
        self.fell_back: str | None = None  # why `auto` does not run what it chose first
        try:
            self._build()
        except BaseException:
            self.start.close()
            raise

    def beside(self, job: Callable[[], None]) -> PendingWork:
        """Run a job of prefill on the device, beside the loop. On the CPU `changed` is set when it has ended; on a GPU
        its host's part has then, and the device's is asked for."""
        work = self.start.beside(job)
        if isinstance(work, Future):
            work.add_done_callback(lambda _: self.changed.set())
        else:
            self.changed.set()
        return work

    @property
    def is_native(self) -> bool:
        """Whether steps are native code of the CPU."""
        return self.mode_name == "loop" and self.model.device.type == "cpu"

    @property
    def fallen_back(self) -> tuple[str, ...]:
        """What runs otherwise than it was meant to, a sentence for each: to be said (E-57, E-58)."""
        steps = () if self.fell_back is None else (self.fell_back,)
        failures = self.prefill.failures.items()
        return (*steps, *(f"prompts of {rows} rows are launched node by node: {why}" for rows, why in failures))

    def close(self) -> None:
        """Leave decode mode when the loop has ended, and give everything back."""
        try:
            self.mode.exit()
        finally:
            self.guard.unlock()
            self.start.close()

    def _paged_memory(self) -> PagedMemory:
        model, options = self.model, self.options
        return PagedMemory.of(
            model,
            # A GPU's step has all rows at once; those that serve nobody need somewhere to leave their states.
            n_slots=options.n_slots + (SPARE_STATES if model.device.type == "cuda" else 0),
            n_pages=options.n_pages,
            kv_type=options.kv_type,
            page_tokens=self.page_tokens,
        )

    def _build(self) -> None:
        """Make the executable. What `auto` chose and cannot be made is not tried again: the mode below it is (E-57)."""
        try:
            self._enter_once()
        except HardwareCannot as error:
            lower = mode_below(self.mode_name, self.model)
            if self.options.mode != "auto" or lower is None or self.options.needs_tape(self.model.device):
                raise
            self.fell_back = f"{self.mode_name}: {error} (tried once; {lower} runs instead)"
            self.why_not = (self.fell_back, *self.why_not)
            has_own_plan = self.is_native or self.mode_name == "persistent"  # others run the nodes of the same one
            if self.is_native:  # what was staged stays: the same tables, as tensors
                self.memory, self.tables = self._paged_memory(), as_tensors(self.tables)
            self.mode_name = lower
            plan, start, prefill = self._made() if has_own_plan else (self.plan, self._start(self.plan), self.prefill)
            self.mode.replace(plan, start)  # closes the one that failed
            self.plan, self.start, self.prefill = plan, start, prefill
            self._enter_once()

    def _enter_once(self) -> None:
        """Into decode mode and out again: the executable is there then, its words are in the table, and the device was
        asked whether it is well (E-2)."""
        self.mode.enter()
        self.mode.exit()

    def _start(self, plan: Plan) -> Start:
        """A start of the chosen mode, not built yet."""
        if self.model.device.type == "cpu":
            kind = CpuLoop if self.mode_name == TWIN else CpuEager
            return kind(plan, self.tables, self.guard, self.changed.set)
        from ostinato.backends.cuda.graph import CudaGraph
        from ostinato.backends.cuda.start import CudaEager
        from ostinato.backends.cuda.while_graph import WhileGraph

        kinds = {"eager": CudaEager, "graph": CudaGraph, "loop": WhileGraph}
        return kinds[self.mode_name](plan, self.tables, self.guard, self.changed.set)

    def _made(self) -> tuple[Plan, Start, Chunks]:
        """The plan, the start of the chosen mode, and prefill."""
        model, n_tokens = self.model, self.options.n_tokens
        if model.device.type == "cuda":
            return self._made_for_cuda()
        if self.is_native:
            return self._made_native()
        plan = torch_plan(model, self.memory, self.tables, n_tokens)
        return plan, self._start(plan), TorchChunks(model, self.memory, self.tables, n_tokens)

    def _made_native(self) -> tuple[Plan, Start, Chunks]:
        model, options = self.model, self.options
        assert isinstance(self.changed, FileWakeEvent)
        native = NativeStep(
            model,
            self.memory,
            self.tables,
            options.n_tokens,
            activations=options.activations,
            threads=options.threads or default_threads(),
            wake=self.changed.fd,
        )
        constants = f"{model.shape}, {options.n_tokens} tokens, {options.activations} activations"
        plan = native_plan(model, self.memory, self.tables, native, constants)
        return plan, NativeLoop(plan, native, self.guard), NativeChunks(native)

    def _made_for_cuda(self) -> tuple[Plan, Start, Chunks]:
        from ostinato.backends.cuda.step import triton_kernels, triton_prompts

        model, n_tokens = self.model, self.options.n_tokens
        kernels = triton_kernels()
        if model.shape.recurrent is not None:
            plan = static_plan(model, self.memory, self.tables, n_tokens, kernels)
            in_torch = TorchChunks(model, self.memory, self.tables, n_tokens, kernels)
            in_torch.warm()
            return plan, self._start(plan), in_torch
        plan, start = self._tape() if self.mode_name == "persistent" else self._fused(kernels)
        prefill = FusedChunks(self.model, self.memory, self.tables, n_tokens, kernels, triton_prompts())
        prefill.capture(start.side)
        return plan, start, prefill

    def _fused(self, kernels: StepKernels) -> tuple[Plan, CudaStart]:
        from ostinato.backends.cuda.start import CudaStart

        plan = fused_plan(self.model, self.memory, self.tables, self.options.n_tokens, kernels)
        start = self._start(plan)
        assert isinstance(start, CudaStart)
        return plan, start

    def _tape(self) -> tuple[Plan, CudaStart]:
        from ostinato.backends.tape.start import TapeLoop

        model, options = self.model, self.options
        step = TapeStep(
            model,
            self.memory,
            self.tables,
            options.n_tokens,
            Chip.of(model.device),
            kv_type=options.kv_type,
            activations=options.activations,
            on_tape=options.prompts_on_tape,
        )
        self.model = step.model
        torch.cuda.empty_cache()  # what matrices were laid out in, one at a time
        plan = tape_plan(step.model, self.memory, self.tables, step)
        return plan, TapeLoop(plan, step, self.tables, self.guard, self.changed.set)


def choose_mode(wanted: str, model: Model, options: LoopOptions | None = None) -> tuple[str, tuple[str, ...]]:
    """The mode that will run, and why not each higher one."""
    if wanted == TWIN:
        return TWIN, ()
    if wanted == "auto" and options is not None and options.needs_tape(model.device):
        wanted = "persistent"
    reasons = {mode: reason for mode in MODES if (reason := why_not(mode, model, options)) is not None}
    if wanted == "auto":
        unasked = _why_not_unasked(model, options)
        reasons = reasons if unasked is None else {"persistent": unasked} | reasons
    if wanted != "auto":
        if wanted in reasons:
            raise HardwareCannot(f"mode {wanted!r} cannot run here: {reasons[wanted]}")
        best = wanted
    elif "eager" in reasons:
        raise HardwareCannot(f"no mode can run this model here: {reasons['eager']}")
    else:
        best = max((mode for mode in MODES if mode not in reasons), key=MODES.index)
    higher = MODES[MODES.index(best) + 1 :]
    return best, tuple(f"{mode}: {reasons.get(mode, 'not asked for')}" for mode in higher)


def _why_not_unasked(model: Model, options: LoopOptions | None) -> str | None:
    """Why `auto` does not take the persistent kernel, though whoever asks for it may have it."""
    if options is not None and not options.room_for_tape:
        return NO_ROOM
    if model.device.type == "cpu":
        return None
    from ostinato.backends.tape.start import is_taken

    return TAKEN if is_taken(model.device) else None


def mode_below(mode: str, model: Model) -> str | None:
    """The highest mode below this one that can run; None where there is none."""
    lower = [below for below in MODES[: MODES.index(mode)] if why_not(below, model) is None]
    return lower[-1] if lower else None


def why_not(mode: str, model: Model, options: LoopOptions | None = None) -> str | None:
    """Why a mode cannot run this model here, opened with these options; None where it can."""
    if not model.shape.causal:
        raise Unsupported(f"{model.shape.family} is an encoder: it embeds text and generates none")
    if mode == "persistent":
        return _why_not_persistent(model, options)
    if model.device.type == "cpu":
        if mode == "graph":
            return "graphs are CUDA's, and this model is on the CPU"
        return (why_not_native_model(model) or why_no_native()) if mode == "loop" else None
    recurrent = model.shape.recurrent is not None
    reason = why_not_static(model) if recurrent else why_not_fused(model)
    if reason is not None or mode != "loop":
        return reason
    return WHY_NO_LOOP if recurrent else why_no_while_graph()


def _why_not_persistent(model: Model, options: LoopOptions | None) -> str | None:
    if model.device.type == "cpu":
        return "the persistent kernel is CUDA's, and this model is on the CPU"
    asked = options or LoopOptions("persistent", 1, 1, 1, "bf16", model.shape.vocab)
    reason = why_not_tape(model, asked.n_slots, asked.kv_type) or why_no_while_graph()  # which wants the same packages
    if reason is not None or not torch.cuda.is_available():
        return reason
    chip, page = Chip.of(model.device), PAGE_TOKENS["cuda"]
    max_pages = -(-asked.context // page)
    return why_no_tape_on(chip.capability) or why_too_large(
        model, asked.n_slots, chip, kv_type=asked.kv_type, page_tokens=page, max_pages=max_pages
    )


def why_no_while_graph() -> str | None:
    """Why this machine cannot run a loop as one graph; None where it can."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "the packages cuda-core and cuda-bindings are not installed (pip install 'ostinato[gpu]')"
    error, version = driver.cuDriverGetVersion()
    return why_driver_has_no_while(None if int(error) else version)


def why_driver_has_no_while(version: int | None) -> str | None:
    """Why a driver of this version, as it numbers them (12040 is 12.4), has no WHILE nodes; None where it has."""
    if version is None:
        return "the NVIDIA driver does not tell which CUDA it knows; WHILE nodes need 12.4 or newer"
    if version < WHILE_NODES_SINCE:
        return f"the NVIDIA driver knows CUDA {version // 1000}.{version % 1000 // 10}; WHILE nodes need 12.4 or newer"
    return None
