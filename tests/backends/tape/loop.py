"""The whole tape on the CPU: a `Runner` whose start runs the kernel's own source in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ostinato.backends.base import Chunks, Settled, why_not_kept
from ostinato.backends.cuda.packed import Packed, dequantize_torch, unpack
from ostinato.backends.machine import SHARED_BYTES, Capability, Chip
from ostinato.backends.tape.backend import TAPE, why_not_rows, why_not_shape, why_not_tensors
from ostinato.backends.tape.matrices import why_not_values
from ostinato.backends.tape.plan import TapeStep, tape_plan
from ostinato.backends.tape.program import TapeProgram
from ostinato.backends.tape.start import tape_headers, tape_source
from ostinato.backends.torch.backend import TWIN, TorchRunner
from ostinato.backends.torch.chunks import TorchChunks
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.start import torch_device
from ostinato.backends.weights import Stack
from ostinato.engine.choose import settle_model
from ostinato.loop.guard import Guard
from ostinato.loop.plan import Plan
from ostinato.loop.start import STEP_DEADLINE_S, Launched, Start, next_executable
from ostinato.models import blocks
from ostinato.models.header import tensors_in
from ostinato.options import Activations, KVType
from tests.backends.tape.emulator import Program, compiled
from tests.engine.rig import Driver

CONTEXT, N_PAGES, OUTBOX = 256, 64, 64


class EmulatedTape(Launched):
    """`TapeLoop` on the CPU: one thread plays the kernel, and jobs go behind it, as on a stream."""

    name = "persistent"
    device_paced = True
    alone = True
    comparison: Literal["bits", "tolerance"] = "tolerance"
    helper: None = None

    def __init__(self, plan: Plan, step: TapeStep, program: Program, guard: Guard, seed: int) -> None:
        self._plan, self._step, self._program, self._guard, self._seed = plan, step, program, guard, seed
        self._card = torch_device("emulated-tape")
        self.executable = self.n_launches = self.n_instantiations = 0

    def build(self) -> None:
        self._guard.allow("I-1", "building the step again")
        self.executable = next_executable()
        self.n_instantiations += 1
        self._step.built(self._plan.hash, self.executable)

    def launch(self) -> None:
        self._guard.allow_launch()
        self.n_launches += 1
        self._launched = self._card.submit(lambda: self._run(single=False))

    def step(self) -> None:
        self._guard.allow("I-2", "submitting a single step from the host")
        self._card.submit(lambda: self._run(single=True)).result(STEP_DEADLINE_S)

    def beside(self, job: Callable[[], None]) -> Future[None]:
        return self._card.submit(job)

    def health(self) -> None:
        """The emulator is as well as this process."""

    def close(self) -> None:
        self._guard.allow("I-3", "destroying the executable")
        self._card.close()

    def _run(self, *, single: bool) -> None:
        argument = self._step.checked_argument(single=single)
        self._seed += 1
        sizes = self._step.sizes
        self._program.run(
            "tape",
            argument,
            n_blocks=sizes.grid.n_blocks,
            shared_bytes=sizes.shared_bytes,
            seed=self._seed,
            limit_s=300,
        )


class EmulatedLoop(TorchRunner):
    """A loop over a model as a card has it; torch, for prompts, has the same numbers as float32."""

    def __init__(
        self,
        model: Model,
        settled: Settled,
        *,
        seed: int = 0,
        n_compute_warps: int = 2,
        n_blocks: int = 3,
        capability: Capability = (9, 0),
        deadline_ns: int | None = None,
        outbox_entries: int | None = None,
        watched: bool = False,
    ) -> None:
        self._watched = watched
        self._on_card, self._seed, self._n_compute_warps = model, seed, n_compute_warps
        self._chip, self._deadline_ns = Chip(capability, n_blocks, SHARED_BYTES[capability]), deadline_ns
        super().__init__(widened(model), settled, outbox_entries=outbox_entries)

    def _made(self) -> tuple[Plan, Start, Chunks]:
        model, settled = self._on_card, self.settled
        reason = why_not_tape(model, settled.n_slots, settled.kv_type)
        assert reason is None, reason
        program = TapeProgram.of(
            model,
            self._shared.layout,
            self.page_tokens,
            self.n_tokens,
            self._chip,
            kv_type=settled.kv_type,
            activations=settled.activations,
            n_compute_warps=self._n_compute_warps,
        )
        self.step = TapeStep(model, self._kept, self._shared, program)
        plan = tape_plan(model, self._kept, self._shared, self.step)
        headers = tape_headers(self.step.header, self._shared.layout, self.page_tokens)
        if self._deadline_ns is not None:
            headers["shape.h"] += f"#undef DEADLINE_NS\n#define DEADLINE_NS {self._deadline_ns}LL\n"
        kernel = compiled(tape_source(), "tape.cpp", headers=headers, watched=self._watched)
        prefill = TorchChunks(self.plain_model, self._kept, self._shared, self.n_tokens)
        return plan, EmulatedTape(plan, self.step, kernel, self.guard, self._seed), prefill


def why_not_tape(model: Model, n_slots: int, kv_type: KVType) -> str | None:
    """Why the tape cannot run a model that is loaded, whatever the card."""
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        why_not_shape(model.shape)
        or why_not_rows(n_slots, dtype)
        or why_not_kept("the tape", TAPE.kv_types, kv_type)
        or why_not_tensors(model.shape, tensors_in(model), packed=True)
        or why_not_values(model)
    )


def tape_driver(
    model: Model,
    *,
    n_slots: int = 4,
    kv_type: KVType = "f32",
    activations: Activations = "wide",
    n_tokens: int | None = None,
    **more: Any,
) -> Driver:
    """A driver of the tape over a small model. Sizes are the same unless they must differ: every layout is compiled."""
    settled = settle_model(
        model,
        TWIN,
        context=CONTEXT,
        n_pages=N_PAGES,
        n_slots=n_slots,
        kv_type=kv_type,
        n_tokens=n_tokens,
        activations=activations,
    )
    return Driver(EmulatedLoop(model, settled, outbox_entries=OUTBOX, **more))


def widened(part: Any) -> Any:
    """The same blocks with every weight as float32."""
    if isinstance(part, Tensor):
        return part.float()
    if isinstance(part, Packed):
        return dequantize_torch(unpack(part), part.type)
    if isinstance(part, Stack):
        return torch.cat([widened(one) for one in part.parts])
    if isinstance(part, list | tuple):
        return [widened(one) for one in part]
    if isinstance(part, Model):
        changed = {name: widened(getattr(part, name)) for name in ("embedding", "layers", "norm", "head")}
        return replace(part, dtype=torch.float32, **changed)
    if is_dataclass(part) and not isinstance(part, type) and part.__class__.__module__ == blocks.__name__:
        return replace(part, **{f.name: widened(getattr(part, f.name)) for f in fields(part)})
    return part
