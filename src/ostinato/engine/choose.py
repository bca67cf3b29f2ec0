"""Which backend runs a model, in which mode and with how much memory: chosen here and nowhere else.

Before any weights are read, every backend is asked, from the fastest to the plainest, whether it can run the model.
`auto` takes the first that can, and reports why those above it cannot; if the user asked for a mode that cannot run,
that is an error. `decide` only decides; `prepared` also prepares the backend, and passes over one that cannot be
prepared. Then `fit` fits context and pages to the free memory: a default context that does not fit is lowered with a
message; one that the user asked for is refused with the figures. The result is the record `Settled`, with which the
runner is opened.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from ostinato.backends import cards
from ostinato.backends.base import CHUNK_ROWS, Backend, PromptWeights, Settled, WeightLayout, dtype_of, kv_type_of
from ostinato.backends.cuda.backend import CUDA
from ostinato.backends.machine import DeviceKind, Machine, host_bytes
from ostinato.backends.native.backend import NATIVE
from ostinato.backends.tape.backend import TAPE
from ostinato.backends.torch.backend import TORCH, TWIN
from ostinato.cache.kv_bytes import check_kv_widths, kv_bytes
from ostinato.engine.cores import default_threads
from ostinato.engine.known_cards import PERSISTENT_KINDS, has_run, kind_of_kernel
from ostinato.engine.machine import choose_device, machine_at, why_gpu_unused
from ostinato.engine.memory_plan import LEAST_CONTEXT, USABLE_SHARE, MemoryPlan
from ostinato.engine.verified import NEED_VERIFICATION
from ostinato.errors import BadOption, ContextTooLarge, HardwareCannot
from ostinato.extras import check_extra
from ostinato.loop.grammars import GRAMMAR_BYTES
from ostinato.models.header import HeaderTensors, tensors_in, tensors_of
from ostinato.models.registry import describe, why_left_out
from ostinato.options import MODES, Activations, DType, KVType, LoadOptions, Talk

if TYPE_CHECKING:
    from ostinato.files.checkpoint import Checkpoint
    from ostinato.models.blocks import LoadedModel
    from ostinato.models.shape import Shape

BACKENDS: Final[tuple[Backend, ...]] = (TAPE, CUDA, NATIVE, TORCH)  # from the fastest to the plainest
DENSE: Final = {"F32", "F16", "BF16"}
HELD: Final = "another engine of this process has it, and it fills the card"
UNVERIFIED: Final = "not chosen by auto until `ostinato verify {options} MODEL` has passed on this card"
UNVERIFIED_KIND: Final = "it has run on no card with {kind} yet, and is " + UNVERIFIED
NO_ROOM: Final = "its tape and a context do not fit, not even with prompts that read the tape (--prompts tape)"
GRAMMAR_SHARE: Final = 32  # of free memory: one part in so many is for grammars
OWN_BYTES: Final = 1 << 30  # of a GPU's memory that are in use with no other process: its context, and a desktop's
ROOM_CONTEXT: Final = 16_384  # with which `auto` has prompts read the tape, where no context was asked for


def backend_of(settled: Settled) -> Backend:
    return next(backend for backend in BACKENDS if backend.name == settled.backend)


def backend_for(mode: str, kind: DeviceKind) -> Backend:
    """The backend that runs a mode on this kind of device."""
    return next(backend for backend in BACKENDS if backend.device == kind and mode in backend.modes)


def modes_of(kind: DeviceKind) -> tuple[str, ...]:
    """The modes that there are on this kind of device, from low to high: a CPU has no graphs, say."""
    return tuple(mode for mode in MODES if any(one.device == kind and mode in one.modes for one in BACKENDS))


@dataclass(frozen=True, slots=True)
class LoadCase:
    """What a choice depends on: a model's header, the user's options and the machine."""

    shape: Shape
    tensors: HeaderTensors
    options: LoadOptions
    machine: Machine
    layout: WeightLayout | None = None  # of weights that are already in memory

    @property
    def dtype(self) -> str:
        return dtype_of(self.options, self.machine.kind)

    @property
    def kv_type(self) -> KVType:
        return kv_type_of(self.options, self.dtype)

    def plan(self, settled: Settled) -> MemoryPlan:
        """The memory of a record, beside the free memory."""
        return MemoryPlan(backend_of(settled), self.shape, self.tensors, settled, self.machine.free_bytes)

    def plan_of_one_context(self, settled: Settled, prompts: PromptWeights = "plain") -> MemoryPlan:
        """The plan with pages for one slot's context; further pages come from the remaining memory."""
        return self.plan(replace(settled, n_pages=settled.max_pages, prompts=prompts))


def why_not_here(machine: Machine) -> dict[str, str | None]:
    """Every mode from low to high, and why this machine cannot run it with any model; None where it can."""
    return {mode: backend.why_not_here(mode, machine) for mode, backend in _asked(machine.kind).items()}


def why_not(case: LoadCase) -> dict[str, str | None]:
    """Every mode from low to high, and why it cannot run such a model; None where it can."""
    given = (case.shape, case.tensors, case.options, case.machine)
    reasons = {mode: backend.why_not(mode, *given) for mode, backend in _asked(case.machine.kind).items()}
    if case.machine.kind == "cpu" and case.layout not in (None, "tiles"):
        reasons |= dict.fromkeys(NATIVE.modes, "the native loop multiplies packed weights, and these are dense")
    return reasons


def _asked(kind: DeviceKind) -> dict[str, Backend]:
    """The backend to ask for each mode: one that has the mode on this kind of device, else one that has it at all."""
    having = {mode: [backend for backend in BACKENDS if mode in backend.modes] for mode in MODES}
    return {mode: next((b for b in found if b.device == kind), found[0]) for mode, found in having.items()}


def choose(
    checkpoint: Checkpoint, shape: Shape, options: LoadOptions, talk: Talk, *, machine: Machine | None = None
) -> Settled:
    """Settle what the options leave open, and refuse what cannot run or does not fit. `talk` is called with a sentence
    where a choice may surprise the user."""
    if machine is None:
        machine = machine_at(choose_device(options.device), talk)
        if options.device == "auto" and (unused := why_gpu_unused()) is not None:
            talk(unused)
    describe(checkpoint, shape)  # a file that contradicts itself is refused before its sizes are believed
    if (aside := why_left_out(checkpoint)) is not None:
        talk(aside)
    case = LoadCase(shape, tensors_of(checkpoint), options, machine)
    return fit(prepared(case, talk), case, talk)


# Backend and mode


def decide(case: LoadCase, failed: Mapping[str, str] = MappingProxyType({})) -> Settled:
    """The backend and the mode, with pages for every slot's whole context; `fit` then reduces that to the free memory.

    `failed`: modes that were tried already, and why they failed.
    """
    options, machine = case.options, case.machine
    check_kv_widths(case.kv_type, case.shape)
    reasons = {mode: why for mode, why in why_not(case).items() if why is not None}
    _check_options(options, machine, reasons)
    reasons |= failed
    asked = "persistent" if options.mode == "auto" and _only_tape(options, machine) else options.mode
    for mode in [mode for mode in reversed(MODES) if asked in ("auto", mode) and mode not in reasons]:
        settled = _draft(backend_for(mode, machine.kind), mode, case)
        if asked == "auto" and (unasked := _why_not_unasked(settled, case)) is not None:
            reasons[mode] = unasked
            continue
        below = [lower for lower in MODES[: MODES.index(mode)] if lower not in reasons]
        higher = [one for one in MODES[MODES.index(mode) + 1 :] if one in modes_of(machine.kind)]
        return replace(
            settled,
            why_not=tuple(f"{one}: {reasons.get(one, 'not asked for')}" for one in higher),
            # The other backends' runners open no encoder: torch's decoder runs it, and no runner falls back to that.
            fallback=below[-1] if asked == "auto" and below and case.shape.causal else None,
        )
    if asked != "auto":
        raise HardwareCannot(f"mode {asked!r} cannot run here: {reasons[asked]}")
    raise HardwareCannot(f"no mode can run this model here: {'; '.join(_why_none(reasons, machine))}")


def _why_none(reasons: dict[str, str], machine: Machine) -> list[str]:
    """The reasons to tell: those of this device's modes, the highest first. Where this machine lacks what the native
    loop needs, that alone: the reference backend is no remedy."""
    here = [reasons[mode] for mode in reversed(modes_of(machine.kind)) if mode in reasons]
    for mode in NATIVE.modes if machine.kind == "cpu" else ():
        if (lacking := NATIVE.why_not_here(mode, machine)) is not None and lacking == reasons.get(mode):
            return [lacking]
    return list(dict.fromkeys(here))


def prepared(case: LoadCase, talk: Talk) -> Settled:
    """Decide, and prepare the backend for loading and running: compile its kernels, say. One that cannot be prepared is
    passed over."""
    failed: dict[str, str] = {}
    while True:
        settled = decide(case, failed)
        try:
            backend_of(settled).prepare(settled, talk)
        except HardwareCannot as error:
            failed[settled.mode] = str(error)
            continue
        if settled.kind == "cpu" and case.options.mode == "auto" and not _asks_dense(case.options):
            for mode, _, why in (told.partition(": ") for told in settled.why_not):
                if mode in NATIVE.modes:
                    lacking = why in (failed.get(mode), NATIVE.why_not_here(mode, case.machine))  # not the model's
                    much = ", many times slower" if lacking else ""
                    talk(f"the native loop cannot run here: {why}; {settled.mode} runs instead{much}")
        return settled


def _only_tape(options: LoadOptions, machine: Machine) -> bool:
    """Whether the options ask a GPU for something that only `persistent` can do: then `auto` takes no other mode."""
    return machine.kind == "cuda" and (options.prompts == "tape" or options.activations != "wide")


def _check_options(options: LoadOptions, machine: Machine, reasons: dict[str, str]) -> None:
    """Refuse options for a backend that will not run. If its mode was asked for, the reason why that mode cannot run is
    reported instead."""
    if machine.kind == "cpu" and _asks_dense(options):
        check_extra("torch", f"--dtype {options.dtype}")
    at_hand = [backend_for(mode, machine.kind) for mode in MODES if _may_run(mode, options, machine, reasons)]
    if options.activations != "wide" and not any(options.activations in one.activations for one in at_hand):
        raise BadOption(
            f"--activations {options.activations} is for the CPU's native loop and for --mode persistent on a GPU, and "
            "neither will run here; leave it out"
        )
    if options.prompts == "tape" and TAPE not in at_hand:
        raise BadOption("--prompts tape is for --mode persistent on a GPU, which will not run here; leave it out")


def _asks_dense(options: LoadOptions) -> bool:
    """Whether the options ask a CPU for a dtype that only the reference backend computes in, from dense weights."""
    return options.dtype not in ("auto", "float32")


def _may_run(mode: str, options: LoadOptions, machine: Machine, reasons: dict[str, str]) -> bool:
    wanted = options.mode == mode or (options.mode == "auto" and mode not in reasons)
    return wanted and mode in modes_of(machine.kind)


def _why_not_unasked(settled: Settled, case: LoadCase) -> str | None:
    """Why `auto` does not take a backend that fills its card; None where it may. Asking for its mode still runs it."""
    if not backend_of(settled).alone:
        return None
    if cards.is_held(settled.device):
        return HELD
    kind = kind_of_kernel(case.shape, settled.kv_type)
    if (unverified := why_unverified(settled.mode, case.machine, kind)) is not None:
        return unverified
    return None if case.plan_of_one_context(settled).fits or _fits_once(settled, case) else NO_ROOM


def _fits_once(settled: Settled, case: LoadCase) -> bool:
    """Whether the tape fits where prompts read it, and no plain copy lies beside it; a default context may be
    lowered, as it is in other modes."""
    if (
        case.options.prompts == "plain"
        or case.plan_of_one_context(settled).bytes_of("weights") > case.machine.host_bytes
    ):
        return False
    context = settled.context if case.options.context else min(settled.context, ROOM_CONTEXT)
    return case.plan_of_one_context(replace(settled, context=context), "tape").fits


def why_unverified(mode: str, machine: Machine, kind: str | None = None) -> str | None:
    """Why `auto` does not trust a mode on this card, with a kind of kernel (`kind_of_kernel`) if one is named; None
    where it does: where it ran before a release, or was verified by the user with this driver and this version."""
    if mode not in NEED_VERIFICATION or machine.chip is None:
        return None
    passed = machine.verified.get(mode, ())
    if kind in passed or (kind is None and passed):
        return None
    options = f"--mode {mode}{''.join((kind or '').partition(' --')[1:])}"
    if not has_run(machine.chip.capability):
        return UNVERIFIED.format(options=options)
    return None if kind is None or kind in PERSISTENT_KINDS else UNVERIFIED_KIND.format(options=options, kind=kind)


def _draft(backend: Backend, mode: str, case: LoadCase) -> Settled:
    options, machine = case.options, case.machine
    settled = Settled(
        device=machine.device,
        backend=backend.name,
        mode=mode,
        dtype=case.dtype,
        kv_type=case.kv_type,
        context=options.context or case.shape.default_context,
        n_slots=options.slots if case.shape.causal else 1,  # no sequence of an encoder stays
        weights=backend.layout(case.shape, options, machine.kind),
        activations=options.activations,
        threads=options.threads or (default_threads() if machine.kind == "cpu" else None),
        grammar_bytes=grammar_bytes(machine) if case.shape.causal else 0,
    )
    return replace(
        settled,
        n_pages=settled.n_slots * settled.max_pages,
        other_sums=backend.other_sums(case.shape, settled, machine.chip),
    )


# What memory allows


def grammar_bytes(machine: Machine) -> int:
    """Of the memory from which loops read grammars: a small share of what is free, and no more than so many schemas of
    ordinary size take."""
    return min(GRAMMAR_BYTES, machine.free_bytes // GRAMMAR_SHARE)


def fit(settled: Settled, case: LoadCase, talk: Talk) -> Settled:
    """The record with as much context and as many pages as memory allows; refuse what does not fit.

    Where pages for the whole context of every slot do not fit, there are fewer, and requests wait for pages. The
    context is lowered only where one sequence of it does not fit.
    """
    shape = case.shape
    if backend_of(settled).alone:
        settled = replace(settled, prompts=_prompts(settled, case, talk))
    if settled.prompts == "tape":
        settled = replace(settled, fallback=None)  # the other modes' kernels read a plain copy, which there is not
    plan = case.plan(settled)
    free, tape, weights = plan.usable_bytes, plan.bytes_of("tape"), plan.bytes_of("weights", "tape")
    if weights > free:
        how = f"as {settled.dtype}" if settled.weights == "dense" else "packed"
        if tape:
            how += f", {gib(tape)} of it {'once more ' if settled.prompts == 'plain' else ''}for the persistent kernel,"
        advice = "try --prompts tape, or " if tape and settled.prompts == "plain" else _narrower(settled)
        has = f"{settled.device} has {gib(free)} to give{_in_use(case.machine)}"
        raise HardwareCannot(
            f"the weights need {gib(weights)} {how} and {has}; {advice}take {plan.smaller or 'a smaller model'}"
        )
    left = plan.left_for_pages
    if left < context_bytes(shape, replace(settled, context=min(LEAST_CONTEXT, shape.context))):
        raise HardwareCannot(
            f"{settled.device} has {gib(left)} left beside the weights and buffers: too little for keys and values"
            f"{_in_use(case.machine)}; take {plan.smaller or 'a smaller model'}"
        )
    settled = replace(settled, context=choose_context(shape, settled, case.options.context, left, talk))
    runs = shape.causal or backend_of(settled).opens_encoders
    return replace(settled, n_pages=choose_pages(shape, settled, left) if runs else 0)


def _prompts(settled: Settled, case: LoadCase, talk: Talk) -> PromptWeights:
    """Which weights prompts read: the tape if the user asked for it, or if it does not fit beside a plain copy of the
    weights; else the plain copy, which is faster."""
    asked, plan = case.options.prompts, case.plan_of_one_context(settled)
    if asked == "plain" or (asked == "auto" and plan.fits):
        return "plain"
    tape, weights, host_bytes = plan.bytes_of("tape"), plan.bytes_of("weights"), case.machine.host_bytes
    if asked == "auto":
        talk(
            f"prompts read the persistent kernel's tape of {gib(tape)}: beside a plain copy of {gib(weights)} this "
            f"engine would need {gib(plan.device_bytes)}, and {settled.device} has {gib(plan.usable_bytes)}"
        )
    if weights > host_bytes:
        raise HardwareCannot(
            f"{gib(weights)} of weights wait in the host's memory while they are laid out for --prompts tape, and it "
            f"has {gib(host_bytes)} to give; use --prompts plain, or --mode loop"
        )
    return "tape"


def _in_use(machine: Machine) -> str:
    """That other processes have a part of a GPU's memory, where they have; the part that every process takes for itself
    is not told."""
    used = 0 if machine.total_bytes is None else machine.total_bytes - machine.free_bytes
    if used < OWN_BYTES:
        return ""
    return f" ({gib(used)} of its {gib(machine.total_bytes or 0)} are in use: `nvidia-smi` lists the processes)"


def _narrower(settled: Settled) -> str:
    """Advice on how weights that were dequantised would be smaller."""
    return "try --dtype bfloat16, or " if settled.dtype == "float32" and settled.weights != "tiles" else ""


def choose_context(shape: Shape, settled: Settled, wanted: int | None, free: int, talk: Talk) -> int:
    """The context asked for, or as much of the model's own as fits, of which there is some."""
    device, kv_type = settled.device, settled.kv_type

    def needed(context: int) -> int:
        return context_bytes(shape, replace(settled, context=context))

    most = bisect_right(range(shape.context + 1), free, key=needed) - 1
    if wanted is not None:
        if wanted > shape.context:
            raise ContextTooLarge(f"context {wanted}: this model was trained for {shape.context} positions at most")
        if wanted > most:
            raise ContextTooLarge(
                f"context {wanted} needs {gib(needed(wanted))} for keys and values as {kv_type}, and {device} "
                f"has {gib(free)} left; at most {most} fit"
            )
        return wanted
    if most < shape.default_context:
        talk(
            f"the model's context of {shape.default_context} tokens needs {gib(needed(shape.default_context))} and "
            f"{gib(free)} are left on {device}; using {most}"
        )
    return min(most, shape.default_context)


def choose_pages(shape: Shape, settled: Settled, free: int) -> int:
    """Pages for every slot's whole context, or what fits the free memory; at least one whole context. An encoder keeps
    nothing: it has pages for the longest text, and for a chunk of texts that fill half of their pages."""
    one = settled.max_pages
    most = settled.n_slots * one if shape.causal else max(one, 2 * settled.pages_for(CHUNK_ROWS[settled.kind]))

    def needed(n_pages: int) -> int:
        return _kv_bytes(shape, replace(settled, n_pages=n_pages))

    return max(one, bisect_right(range(most + 1), free, key=needed) - 1)


def context_bytes(shape: Shape, settled: Settled) -> int:
    """Bytes of the pages of one sequence as long as the context."""
    return _kv_bytes(shape, replace(settled, n_pages=settled.max_pages))


def _kv_bytes(shape: Shape, settled: Settled) -> int:
    return kv_bytes(shape, settled.groups(shape), settled.kv_type, settled.page_tokens)


def gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


# Beside other engines


class Room(NamedTuple):
    """What a model would take of a device's memory if it had the device for itself, and what the device has."""

    device: str
    need_bytes: int
    usable_bytes: int  # now
    whole_bytes: int  # usable if no other engine were there


def room_for(checkpoint: Checkpoint, shape: Shape, options: LoadOptions) -> Room:
    """The memory that a model would get alone: context and pages do not depend on which engines run beside it. Refused
    is what could not even run alone. No weights are read, and nothing is compiled."""
    machine = machine_at(choose_device(options.device))
    describe(checkpoint, shape)
    whole_bytes = machine.total_bytes or max(machine.free_bytes, host_bytes())
    case = LoadCase(shape, tensors_of(checkpoint), options, replace(machine, free_bytes=whole_bytes))
    plan = case.plan(fit(decide(case), case, lambda _: None))
    return Room(machine.device, plan.device_bytes, int(machine.free_bytes * USABLE_SHARE), plan.usable_bytes)


# A model that is already in memory


def settle_model(
    model: LoadedModel,
    mode: str = "auto",
    *,
    context: int,
    n_pages: int | None = None,
    n_slots: int = 1,
    kv_type: KVType | None = None,
    n_tokens: int | None = None,
    activations: Activations = "wide",
    prompts: PromptWeights = "plain",
    threads: int | None = None,
    machine: Machine | None = None,
) -> Settled:
    """The record for a model whose weights are already in memory: the same choices, for the layout they have."""
    machine = machine or machine_at(str(model.device))
    options = LoadOptions(
        mode=mode if mode in MODES else "auto",
        dtype=_asked_dtype(model, machine.kind),
        kv_type=kv_type,
        context=context,
        slots=n_slots,
        activations=activations if mode == "auto" else "wide",
        prompts=prompts if mode == "auto" else "plain",
    )
    # Loaded weights need no further memory, and the caller says how many pages there are.
    machine = replace(machine, free_bytes=sys.maxsize)
    case = LoadCase(model.shape, tensors_in(model), options, machine, layout_of(model))
    settled = _draft(TORCH, TWIN, case) if mode == TWIN else decide(case)
    return replace(
        settled,
        dtype=str(model.dtype).removeprefix("torch."),
        n_pages=settled.n_pages if n_pages is None else n_pages,
        n_tokens=n_tokens,
        weights=layout_of(model),
        activations=activations,
        prompts=prompts,
        threads=threads or settled.threads,
    )


def why_not_model(model: LoadedModel, *, n_slots: int = 1, machine: Machine | None = None) -> dict[str, str | None]:
    """Every mode from low to high, and why it cannot run a model whose weights are already in memory, however short the
    context; None where it can."""
    machine = machine or machine_at(str(model.device))
    options = LoadOptions(dtype=_asked_dtype(model, machine.kind), slots=n_slots, context=1)
    return why_not(LoadCase(model.shape, tensors_in(model), options, machine, layout_of(model)))


def layout_of(model: LoadedModel) -> WeightLayout:
    """The layout of a model's weights."""
    from ostinato.backends.native.tiles import TileMatrix

    if isinstance(model.embedding, TileMatrix):
        return "tiles"
    return "dense" if {tensor.type for tensor in tensors_in(model).values()} <= DENSE else "packed"


def _asked_dtype(model: LoadedModel, kind: DeviceKind) -> DType:
    """The --dtype with which a user would have got these weights on this device."""
    if layout_of(model) == ("tiles" if kind == "cpu" else "packed"):
        return "auto"
    known: dict[str, DType] = {"torch.float32": "float32", "torch.bfloat16": "bfloat16"}
    return known.get(str(model.dtype), "float32" if kind == "cpu" else "auto")
