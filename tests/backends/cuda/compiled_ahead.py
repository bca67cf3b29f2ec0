"""The child of `test_ahead.py`: Triton's own cache of kernels, over a compiler and a driver that are stand-ins.

Triton's interpreter, which tests run with, has no such cache, so this is a process of its own. A backend compiles for a
model; then the same model is bound to memory and launched, as an engine does, on the host. Each model is a line of
JSON: how many programs were compiled ahead, which of them were never launched, and which were compiled when launched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from ostinato.backends.base import ChunkWant, Settled
from ostinato.backends.cuda import gpu, ready, start
from ostinato.backends.cuda.backend import CUDA, loader_of
from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.cuda.launch import launches_in
from ostinato.backends.cuda.plan import FusedPlan
from ostinato.backends.machine import TUNED
from ostinato.backends.tape import start as tape_start
from ostinato.backends.tape.backend import TAPE
from ostinato.backends.tape.plan import TapeStep
from ostinato.backends.tape.program import TapeProgram
from ostinato.backends.torch.kernels import play
from ostinato.backends.torch.load import load
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.tables import tensor_tables
from ostinato.errors import NotWarmed
from ostinato.lab.random_weights import RandomFile
from ostinato.models.shape import Shape
from ostinato.models.tensors import TensorTable
from tests.backends.families import FAMILIES, LATENT, RECURRENT, family_model
from tests.backends.tape.models import shape_of

CPU = torch.device("cpu")


class Program:
    """What the compiler gives Triton for a kernel."""

    function, packed_metadata = 0, ()

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.name, self.launched = kernel, kernel.__name__, False

    def launch_metadata(self, *_: object) -> None:
        """There is none."""

    def run(self, *_: object) -> None:
        self.launched = True


compiled: list[Program] = []  # in the order in which Triton's compiler was called
loaded: list[str] = []  # what else is compiled before weights are read


class Case(NamedTuple):
    """A model, and how it is opened."""

    name: str
    shape: Shape
    type: str
    more: Mapping[str, Any] = MappingProxyType({})
    opened: Mapping[str, Any] = MappingProxyType({})  # otherwise than it was compiled for


def use_stand_ins() -> None:
    def compile(source: Any, target: Any, options: Any, **_: Any) -> Any:
        compiled.append(Program(source.fn))
        return compiled[-1]

    device: Any = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    triton.runtime.driver.set_active(device)
    triton.compiler.compile = compile
    stand_ins: Any = (gpu, ready, start, tape_start)
    for module, name, instead in zip(
        stand_ins,
        ("chip_of", "_current", "loaded", "tape_kernel"),
        (
            lambda _: TUNED,
            lambda _: nullcontext(),
            lambda name, *_: loaded.append(name),
            lambda header, *_: loaded.append(header),
        ),
        strict=True,
    ):
        setattr(module, name, instead)


def settled_for(case: Case) -> Settled:
    plain = Settled("cuda:0", "cuda", "loop", "bfloat16", "bf16", 256, n_slots=3, n_pages=12, weights="packed")
    return replace(plain, **case.more)


def opened(settled: Settled, model: Model) -> tuple[list[Any], FusedChunks, str | None]:
    """What a runner makes of the loaded model, on the host: launches of a step, chunks, and the tape's own header."""
    shape, header = model.shape, None
    groups, words = settled.groups(shape), {"kv_type": settled.kv_type}
    memory = PagedMemory.of(model, groups, n_slots=settled.n_slots, page_tokens=settled.page_tokens, **words)
    tables = tensor_tables(settled.tables_layout(shape), CPU)
    n_tokens, kernels, launches = settled.tokens_of(shape), triton_kernels(TUNED), []
    if settled.backend == "tape":
        given = model, tables.layout, settled.page_tokens, n_tokens, TUNED
        program = TapeProgram.of(*given, kv_type=settled.kv_type)
        step = TapeStep(model, memory, tables, program, on_tape=settled.prompts == "tape")
        model, header = step.model, step.header
    else:
        launches = [node.run for node in FusedPlan(model, memory, tables, n_tokens, kernels).plan().nodes]
    return launches, FusedChunks(model, memory, tables, n_tokens, kernels), header


def launch_all(step: list[Any], chunks: FusedChunks) -> None:
    play(step)
    for launches in chunks._launches.values():
        play(launches)
    chunks._first.play()
    outputs = chunks._outputs
    outputs.max_outputs = 6  # so that rows come in several slices
    for n in (1, 5, 6, 13):
        rows, targets = list(range(n)), [0] * n
        for want in (ChunkWant("hidden"), ChunkWant("logprobs", targets), ChunkWant("logprobs", targets, top=3)):
            outputs.of_rows(chunks._x, rows, want)


def both_phases(case: Case) -> dict[str, Any]:
    """What was compiled in which of the two."""
    settled, file = settled_for(case), RandomFile(case.shape, case.type)
    for program in compiled:
        program.kernel.device_caches.clear()  # of Triton, as in a new process
    table = TensorTable(file, {name: name for name in file.tensors})
    backend = TAPE if settled.backend == "tape" else CUDA
    del compiled[:], loaded[:]
    ready._READY.clear()
    backend.compile(file.blocks, table, settled)
    ahead, first = compiled.copy(), loaded.copy()
    backend.compile(file.blocks, table, settled)  # as for a second engine
    again = len(compiled) - len(ahead)
    dtype = getattr(torch, settled.dtype)
    model = load(file.blocks, table, dtype=dtype, device=CPU, loader=loader_of(settled))
    step, chunks, header = opened(replace(settled, **case.opened), model)
    told = None
    try:
        ready.check_ready(launches_in([step, chunks.bound()]), torch.device(settled.device))
    except NotWarmed as error:
        told = str(error)
    launch_all(step, chunks)
    file.close()
    return {
        **{"model": case.name, "ahead": len(ahead), "again": again, "told": told},
        "late": [program.name for program in compiled[len(ahead) :]],
        "never_launched": [program.name for program in ahead if not program.launched],
        "kernels": sorted({program.name for program in ahead}),
        "loaded": [name for name in first if name != header],
        "same_header": header in first if header else None,
    }


def cases() -> Iterator[Case]:
    for family in (*FAMILIES, *RECURRENT, *LATENT):
        yield Case(family, family_model(family).shape, "q4_0")
    wide = shape_of(hidden=256, ff_width=512, vocab=203)
    yield Case("K types", wide, "q4_k_m")
    yield Case("q8_0 cache", wide, "q4_k_m", {"kv_type": "q8_0", "n_slots": 1})
    yield Case("fewer tokens than the embedding", wide, "bf16", {"n_tokens": 200})
    yield Case("opened for fewer tokens", wide, "bf16", opened={"n_tokens": 200})
    tape: dict[str, Any] = {"backend": "tape", "mode": "persistent"}
    yield Case("tape", wide, "q4_k_m", tape)
    yield Case("prompts from the tape", wide, "q4_k_m", {**tape, "prompts": "tape"})


if __name__ == "__main__":
    use_stand_ins()
    with torch.no_grad():
        for one in cases():
            print(json.dumps(both_phases(one)), flush=True)
