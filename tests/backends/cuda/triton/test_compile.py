"""Kernels compile ahead of time, without a GPU, for Hopper and for AMD's CDNA 3, and use the tensor cores.

The compiler must not be the interpreter, which this process has switched on: one child process compiles everything, and
says what it made in lines of JSON. A kernel joins by a `Case` in a list CASES of its own test module, which is found by
its name here; `case_of` makes one from a bound launch. A module of which nothing more is asked has a `compile_all`.
Triton keeps what it has compiled where it always does, and compiles again what has changed.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench.compiling import Specialisation, specialisation_of
from ostinato.backends.machine import TUNED
from tests.counts import soaking

WITH_CASES = ["tests.backends.cuda.triton.test_compile", "tests.backends.tape.test_unpack"]
WHOLE = [
    f"tests.backends.cuda.triton.test_{name}"
    for name in ("add_norm", "attend", "chunk_attention", "embed", "latent", "logprobs", "norm", "runs", "sample")
]
TARGETS = {"hopper": ("cuda", 90, 32), "cdna3": ("hip", "gfx942", 64)}
# Slow to compile where they are converted number by number, and nothing that others have not.
ONLY_HOPPER = {f"matmul {name}" for name in ("Q5_1 store", "Q8_0 add", "Q6_K store")} | {"gemm Q6_K"}
ONLY_HOPPER |= {f"experts {name}" for name in ("gate_up Q6_K", "down Q5_K", "down Q6_K", "gate Q5_0")}
ONLY_HOPPER |= set() if soaking() else {"experts gate_up Q4_K"}
Compiled = dict[str, list[dict[str, Any]]]


class Case(NamedTuple):
    """One kernel to compile, and what the compiler is told of it."""

    name: str
    kernel: Any
    specialised: Specialisation


def case_of(name: str, launch: Any) -> Case:
    """The case of a bound launch: what would be compiled when it is first called."""
    return Case(name, launch.kernel, specialisation_of(launch))


def weights(type: str, n: int, k: int) -> Any:
    from ostinato.files.quants import BLOCKS
    from tests.backends.cuda.packing import pack

    if type in ("F32", "F16", "BF16"):
        return torch.zeros(n, k, dtype={"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type])
    row_bytes = k // BLOCKS[type].elements * BLOCKS[type].n_bytes
    return pack(type, torch.zeros(n, row_bytes, dtype=torch.uint8), n, k)


def matmul_case(type: str, epilogue: Any = "store", *, norm: str | None = None, **more: Any) -> Case:
    from ostinato.backends.cuda.triton.matmul import bind_matmul
    from ostinato.backends.torch.ops.matmul import InputNorm, n_stats

    n, k = more.pop("shape", (2048, 1024))
    narrow = norm == "root"
    x = torch.zeros(32, k, dtype=torch.bfloat16 if narrow else torch.float32)
    out = torch.zeros(32, n // 2 if epilogue == "gated" else n)
    given = None
    if norm is not None:
        given = InputNorm(torch.zeros(32, n_stats(k), 2), None if narrow else torch.zeros(k), None, 1e-5)
    if epilogue == "add":
        more["stats"] = torch.zeros(32, n_stats(n), 2)
    live = torch.ones(1, dtype=torch.int32)
    launch = bind_matmul(x, weights(type, n, k), out, live, epilogue=epilogue, norm=given, **more)
    return case_of(f"matmul {type} {epilogue}", launch)


def gemm_case(type: str) -> Case:
    from ostinato.backends.cuda.triton.gemm import bind_gemm

    x = torch.zeros(512, 1024, dtype=torch.float32 if type in ("F32", "F16") else torch.bfloat16)
    return case_of(f"gemm {type}", bind_gemm(x, weights(type, 2048, 1024), torch.zeros(512, 2048)))


def expert_cases() -> list[Case]:
    from ostinato.backends.cuda.triton.experts import (
        bind_experts_down,
        bind_experts_gate_up,
        bind_route,
        experts_workspace,
    )
    from ostinato.backends.weights import Stack
    from ostinato.models.shape import ExpertGroups, ExpertShape

    x, act, wide = torch.zeros(8, 1024), torch.zeros(8, 2, 512), torch.zeros(8, 2, 2048)
    live, chosen = torch.ones(1, dtype=torch.int32), torch.zeros(8, 2, dtype=torch.int32)
    shares = torch.zeros(8, 2)
    step: Any = {"workspace": experts_workspace(8, 2, 512, 1024, x.device)}
    plain = ExpertShape(60, 2, 8, renormalise=True)
    groups = replace(plain, scoring="sigmoid", choice_bias=True, groups=ExpertGroups(5, 2, 2), shared_gate=True)
    beside = {"bias": torch.zeros(60), "shared": torch.zeros(8)}
    routes = {
        "route": bind_route(torch.zeros(8, 60), chosen, shares, live, shape=plain),
        "route by groups": bind_route(torch.zeros(8, 61), chosen, shares, live, shape=groups, **beside),
    }
    cases = [case_of(name, launch) for name, launch in routes.items()]
    more: dict[str, Any] = {"activation": "relu2", "bias": torch.zeros(4, 512), "gated": False}
    biased = bind_experts_gate_up(x, weights("BF16", 2048, 1024), act, chosen, live, **more)
    cases.append(case_of("plain experts with biases", biased))
    # Q6_K takes the compiler longer here than all others together; its decoding is compiled below every day.
    for type in ("Q4_0", "Q8_0", "Q4_K", "MXFP4", *(("Q6_K",) if soaking() else ())):
        launch = bind_experts_gate_up(x, weights(type, 2048, 1024), act, chosen, live, activation="silu", **step)
        cases.append(case_of(f"experts gate_up {type}", launch))
    together = bind_experts_down(act, weights("Q4_0", 2048, 512), x, chosen, shares, live)
    cases.append(case_of("experts down of a prompt", together))
    for type in ("BF16", "Q5_1", "Q5_K", "Q6_K", "MXFP4"):
        launch = bind_experts_down(wide, weights(type, 2048, 2048), x, chosen, shares, live, **step)
        cases.append(case_of(f"experts down {type}", launch))
    apart = Stack((weights("Q5_0", 1024, 1024), weights("Q4_1", 1024, 1024)))
    pair: Any = bind_experts_gate_up(x, apart, act, chosen, live, activation="silu")
    return [*cases, case_of("experts gate Q5_0", pair.parts[0]), case_of("experts up Q4_1", pair.parts[1])]


def activation_case() -> Case:
    from ostinato.backends.cuda.triton.activation import bind_gated

    inner, act = torch.zeros(512, 2048, dtype=torch.bfloat16), torch.zeros(512, 1024, dtype=torch.bfloat16)
    return case_of("gated", bind_gated(inner, act, "silu"))


def own_cases() -> list[Case]:
    from ostinato.backends.cuda.triton.tiles import Tile

    return [
        matmul_case("BF16", "gated", norm="rms", activation="silu"),
        matmul_case("BF16", "add", tile=Tile(16, 256, slices=4, split_k=2)),
        matmul_case("F16", norm="rms"),
        matmul_case("F32", norm="rms"),
        matmul_case("Q4_0", norm="root", tile=Tile(32, 256, slices=4)),
        matmul_case("Q5_1", norm="root", tile=Tile(32, 256, slices=4, few=False)),
        matmul_case("Q8_0", "add", tile=Tile(32, 256, slices=4, few=False)),
        matmul_case("Q4_K", norm="root", tile=Tile(32, 256, num_warps=2, few=False)),
        matmul_case("Q6_K", norm="root", tile=Tile(64, 64, num_warps=1, few=False)),
        *expert_cases(),
        activation_case(),
        gemm_case("BF16"),
        gemm_case("F32"),
        gemm_case("Q4_K"),
        gemm_case("Q6_K"),
    ]


CASES: list[Case] | Callable[[], list[Case]] = own_cases


@cache
def all_cases() -> list[Case]:
    listed = [importlib.import_module(module).CASES for module in WITH_CASES]
    return [case for cases in listed for case in (cases() if callable(cases) else cases)]


def compile_cases(target: str) -> Iterator[dict[str, Any]]:
    """In the child: compile every case of every module."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch, lanes = TARGETS[target]
    for case in all_cases():
        if backend == "hip" and case.name in ONLY_HOPPER:
            continue
        specialised, names = case.specialised, case.kernel.arg_names
        if backend == "hip":  # what binding on such a device would have chosen
            instead = {("ASM", True): False, ("PRECISION", "tf32x3"): "ieee"}
            fixed = {place: instead.get((names[place[0]], value), value) for place, value in specialised.fixed.items()}
            specialised = specialised._replace(
                fixed=fixed, options={"num_warps": specialised.options["num_warps"], "num_stages": 2}
            )
        source = ASTSource(case.kernel, specialised.signature, specialised.fixed, specialised.aligned)
        made = triton.compile(source, target=GPUTarget(backend, arch, lanes), options=specialised.options)
        text = made.asm["ptx" if backend == "cuda" else "amdgcn"]
        found = [word for word in ("mma.sync", "wgmma.mma_async", "v_mfma") if word in text]
        # A tile that goes back to shared memory after it was loaded: a detour on the way to the tensor cores.
        detours = sum("ttg.local_alloc %" in line for line in made.asm["ttgir"].splitlines())
        yield {"name": case.name, "found": found, "detours": detours, "shared": made.metadata.shared}


def compile_whole(module: str) -> Iterator[dict[str, Any]]:
    """In the child: compile what a module names itself."""
    importlib.import_module(module).compile_all()
    yield {"name": module}


def main() -> None:
    """The child: a line for each kernel, or for the error that ended a group of them."""
    groups = {target: partial(compile_cases, target) for target in TARGETS}
    groups |= {module: partial(compile_whole, module) for module in WHOLE}
    for group, rows in groups.items():
        try:
            for row in rows():
                print(json.dumps({"group": group, **row}), flush=True)
        except Exception:
            print(json.dumps({"group": group, "error": traceback.format_exc()}), flush=True)


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """What the child made, by target or module."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-m", "tests.backends.cuda.triton.test_compile"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[4],
    )
    assert child.returncode == 0, child.stderr[-3000:]
    rows = [json.loads(line) for line in child.stdout.splitlines()]
    return {group: [row for row in rows if row["group"] == group] for group in (*TARGETS, *WHOLE)}


def made_for(compiled: Compiled, group: str) -> dict[str, Any]:
    errors = [row["error"] for row in compiled[group] if "error" in row]
    assert not errors, errors[0][-3000:]
    assert compiled[group]
    return {row["name"]: row for row in compiled[group]}


@pytest.mark.slow
@pytest.mark.soak
def test_kernels_compile_for_hopper_and_multiply_on_its_tensor_cores(compiled: Compiled) -> None:
    made = made_for(compiled, "hopper")
    assert max(row["shared"] for row in made.values()) <= TUNED.shared_bytes  # as `doctor` says of such a chip
    for name, row in made.items():
        if name.startswith("gemm"):
            assert "wgmma.mma_async" in row["found"], name
        elif name.startswith(("matmul", "experts")) and "F32" not in name:
            assert "mma.sync" in row["found"], name
            assert row["detours"] == 0, name


@pytest.mark.slow
@pytest.mark.soak
def test_kernels_compile_for_amd_and_multiply_on_its_matrix_cores(compiled: Compiled) -> None:
    made = made_for(compiled, "cdna3")
    assert {name for name in made if "v_mfma" in made[name]["found"]} >= {"matmul BF16 gated", "gemm BF16"}


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("module", WHOLE)
def test_the_kernels_of_a_module_compile(module: str, compiled: Compiled) -> None:
    made_for(compiled, module)


if __name__ == "__main__":
    main()
