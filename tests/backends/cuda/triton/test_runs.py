"""Recurrent blocks over runs of rows, interpreted, against their twins; their bits depend on the sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.launch import Launches
from ostinato.backends.cuda.triton import delta, scans
from ostinato.backends.cuda.triton import runs as kernels
from ostinato.backends.cuda.triton.gate_heads import bind_gate_heads
from ostinato.backends.torch.ops import runs as twins
from ostinato.backends.torch.ops.attend import Heads, gate_heads_torch
from ostinato.backends.torch.ops.runs import ChunkRuns, RowRun, Runs, StepRuns
from ostinato.errors import BadPointer
from ostinato.models.blocks import Decay, DeltaDecay, Norm
from ostinato.models.shape import DeltaShape, Mamba2Shape, MambaShape
from tests.backends.cuda.triton.test_attend import compile_launch

SLOTS = 5
MAMBA = MambaShape(inner=88, state=6, kernel=3, dt_rank=7)
MAMBA2 = Mamba2Shape(inner=120, state=24, kernel=4, n_heads=6, n_groups=2, dt_limit=(0.01, 2.0))
DELTA = DeltaShape(n_heads=6, n_key_heads=2, key_width=20, value_width=24, kernel=4)
# Cut where fewer rows follow than the convolution looks back, among others.
CHUNK = [RowRun(0, 7, 3, True), RowRun(7, 1, 0, False), RowRun(8, 2, 4, True), RowRun(10, 9, 1, False)]


def chunk_of(found: Sequence[RowRun], most: int = 8) -> ChunkRuns:
    n = sum(run.n for run in found)
    table = torch.zeros(most, 4, dtype=torch.int32)
    table[: len(found)] = torch.tensor(found, dtype=torch.int32)
    run_of = torch.tensor([number for number, run in enumerate(found) for _ in range(run.n)], dtype=torch.int32)
    n_rows, n_runs = (torch.tensor([count], dtype=torch.int32) for count in (n, len(found)))
    return ChunkRuns(n_rows, n_runs, table, run_of)


def step_of(slots: Sequence[int]) -> StepRuns:
    row_slot = torch.zeros(SLOTS, dtype=torch.int32)
    row_slot[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return StepRuns(torch.tensor([len(slots)], dtype=torch.int32), row_slot, torch.full((SLOTS,), 9, dtype=torch.int32))


ROWS = ("x", "dt", "bc", "gate", "beta_alpha", "out")
RUNS: list[Runs] = [chunk_of(CHUNK), step_of([4, 0, 2])]


def noise(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def columns(n: int, width: int) -> Tensor:
    """Columns of a wider buffer."""
    return noise(n, width + 24)[:, 16 : 16 + width]


def decay(n: int, *size: int) -> Decay:
    return Decay(-noise(*size).abs() - 0.1, noise(n), noise(n + 1)[:n].contiguous())


def both(bind: Any, twin: Any, given: dict[str, Any], written: Sequence[str]) -> None:
    """The kernel writes what its twin does, and nothing else."""
    ours, theirs = ({name: given[name].clone() for name in written} for _ in range(2))
    bind(**given | ours)()
    twin(**given | theirs)
    for name in written:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


def rows_of(runs: Runs) -> int:
    return 24 if isinstance(runs, ChunkRuns) else SLOTS


def conv_case(runs: Runs, *, bias: bool = True, kernel: int = 4, channels: int = 150) -> dict[str, Any]:
    n = rows_of(runs)
    return {
        "x": columns(n, channels),
        "out": torch.full((n, channels), float("nan")),
        "state": noise(SLOTS, channels, kernel - 1),
        "weight": noise(channels, kernel),
        "bias": noise(channels) if bias else None,
        "runs": runs,
    }


def ssd_case(runs: Runs, shape: Mamba2Shape = MAMBA2) -> dict[str, Any]:
    n, width = rows_of(runs), shape.inner // shape.n_heads
    return {
        "x": noise(n, shape.conv_width),
        "dt": columns(n, shape.n_heads),
        "out": torch.full((n, shape.inner), float("nan")),
        "state": noise(SLOTS, shape.n_heads, width, shape.state),
        "decay": decay(shape.n_heads, shape.n_heads),
        "shape": shape,
        "runs": runs,
    }


def delta_case(runs: Runs, shape: DeltaShape = DELTA) -> dict[str, Any]:
    n = rows_of(runs)
    return {
        "x": noise(n, sum(shape.conv_parts)),
        "beta_alpha": columns(n, 2 * shape.n_heads),
        "out": torch.full((n, shape.inner), float("nan")),
        "state": noise(SLOTS, shape.n_heads, shape.value_width, shape.key_width),
        "decay": DeltaDecay(-noise(shape.n_heads).abs() - 0.1, noise(shape.n_heads + 1)[1:].contiguous()),
        "shape": shape,
        "runs": runs,
    }


def short_conv_case(runs: Runs, *, bias: bool = True, kernel: int = 3, width: int = 150) -> dict[str, Any]:
    n = rows_of(runs)
    return {
        "x": noise(n, 3 * width),
        "out": torch.full((n, width), float("nan")),
        "state": noise(SLOTS, width, kernel - 1),
        "weight": noise(width, kernel),
        "bias": noise(width) if bias else None,
        "runs": runs,
    }


def selective_case(runs: Runs, shape: MambaShape = MAMBA) -> dict[str, Any]:
    n = rows_of(runs)
    return {
        "x": noise(n, shape.inner),
        "dt": noise(n, shape.inner),
        "bc": noise(n, 2 * shape.state),
        "gate": columns(n, shape.inner),
        "out": torch.full((n, shape.inner), float("nan")),
        "state": noise(SLOTS, shape.inner, shape.state),
        "decay": decay(shape.inner, shape.inner, shape.state),
        "shape": shape,
        "runs": runs,
    }


def gate_case(
    runs: Runs, *, groups: int = 2, norm: bool = True, first: bool = False, shared: bool = False
) -> dict[str, Any]:
    n = rows_of(runs)
    return {
        "x": noise(n, 120),
        "gate": columns(n, 120),
        "out": torch.full((n, 120), float("nan")),
        "weight": noise(1 if shared else groups, 120 // groups) if norm else None,
        "eps": 1e-5,
        "norm_first": first,
        "runs": runs,
    }


def selected_case(runs: Runs, *, normed: bool) -> dict[str, Any]:
    n, rank, width = rows_of(runs), 7, 6
    norms = tuple(Norm(noise(size), None, 1e-5) for size in (rank, width, width))
    return {
        "x": noise(n, rank + 2 * width),
        "dt": torch.full((n, rank), float("nan")),
        "bc": torch.full((n, 2 * width), float("nan")),
        "norms": norms if normed else None,
        "runs": runs,
    }


@pytest.mark.parametrize("runs", RUNS, ids=["chunk", "step"])
def test_a_convolution_carries_on_from_each_slots_inputs(runs: Runs) -> None:
    for case in (conv_case(runs), conv_case(runs, bias=False, kernel=3), conv_case(runs, kernel=2, channels=64)):
        both(kernels.bind_conv_runs, twins.conv_runs_torch, case, ["out", "state"])


@pytest.mark.parametrize("runs", RUNS, ids=["chunk", "step"])
def test_scans_carry_on_from_each_slots_state(runs: Runs) -> None:
    both(scans.bind_ssd_runs, twins.ssd_runs_torch, ssd_case(runs), ["out", "state"])
    both(scans.bind_selective_runs, twins.selective_runs_torch, selective_case(runs), ["out", "state"])
    for shape in (DELTA, replace(DELTA, tiled=True, key_width=16, value_width=32)):
        both(delta.bind_delta_runs, twins.delta_runs_torch, delta_case(runs, shape), ["out", "state"])


@pytest.mark.parametrize("runs", RUNS, ids=["chunk", "step"])
def test_a_short_convolution_has_a_gate_before_it_and_one_after_it(runs: Runs) -> None:
    for bias, kernel, width in ((True, 3, 150), (False, 4, 150), (True, 2, 64)):
        case = short_conv_case(runs, bias=bias, kernel=kernel, width=width)
        both(delta.bind_short_conv_runs, twins.short_conv_runs_torch, case, ["out", "state"])


@pytest.mark.parametrize("runs", RUNS, ids=["chunk", "step"])
def test_rows_are_gated_and_normed_by_groups_in_either_order(runs: Runs) -> None:
    for words in ({}, {"first": True}, {"norm": False}, {"groups": 1}, {"first": True, "shared": True}):
        both(kernels.bind_gate_runs, twins.gate_runs_torch, gate_case(runs, **words), ["out"])


@pytest.mark.parametrize("normed", [True, False])
def test_mambas_selected_parts_are_normed_and_set_apart(normed: bool) -> None:
    for runs in RUNS:
        both(kernels.bind_selected_runs, twins.selected_runs_torch, selected_case(runs, normed=normed), ["dt", "bc"])


def test_bits_do_not_depend_on_where_a_sequence_was_cut_nor_on_its_slot() -> None:
    """Nine rows of one sequence: at once in slot 2, and in slot 4 by chunks of 4, 1 and 2 and two steps."""
    binds: list[Any] = [kernels.bind_conv_runs, scans.bind_ssd_runs, scans.bind_selective_runs]
    binds += [delta.bind_delta_runs, delta.bind_short_conv_runs]
    cases = [made(RUNS[0]) for made in (conv_case, ssd_case, selective_case, delta_case, short_conv_case)]
    for bind, case in zip(binds, cases, strict=True):
        whole, cut = (case | {name: case[name].clone() for name in ("out", "state")} for _ in range(2))
        bind(**whole | {"runs": chunk_of([RowRun(0, 9, 2, True)])})()
        for first, n in ((0, 4), (4, 1), (5, 2), (7, 1), (8, 1)):
            mine = cut | {name: cut[name][first : first + SLOTS] for name in ROWS if name in cut}
            bind(**mine | {"runs": step_of([4]) if first >= 7 else chunk_of([RowRun(0, n, 4, first == 0)])})()
        assert torch.equal(cut["out"][:9], whole["out"][:9])
        assert torch.equal(cut["state"][4], whole["state"][2])


def heads_case(dtype: torch.dtype) -> dict[str, Any]:
    heads = Heads(n_heads=6, n_kv_heads=2, head_width=80, scale=1.0, gated=True)
    qkv, attended = noise(5, heads.n_columns).to(dtype), noise(5, 480).to(dtype)
    return {"qkv": qkv, "attended": attended, "heads": heads, "n_rows": torch.tensor([3], dtype=torch.int32)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_heads_have_seen_is_gated_for_live_rows(dtype: torch.dtype) -> None:
    case = heads_case(dtype)
    both(bind_gate_heads, gate_heads_torch, case, ["attended"])
    bind_gate_heads(**case)()
    untouched = heads_case(dtype)["attended"]
    assert torch.equal(case["attended"][3:], untouched[3:])
    gate = case["qkv"][1, 160 + 80 : 320].float()  # of the second head
    torch.testing.assert_close(
        case["attended"][1, 80:160].float(), untouched[1, 80:160].float() * gate.sigmoid(), rtol=1e-2, atol=1e-6
    )


@pytest.mark.parametrize("one_gate", [True, False], ids=["one for a head", "one for each number"])
def test_softplus_gates_apart_from_queries_open_as_the_twins_do(one_gate: bool) -> None:
    heads = Heads(6, 2, 80, 1.0, gated=True, gates_apart=True, one_gate=one_gate, gate_activation="softplus")
    qkv, attended = 30 * noise(5, heads.n_columns), noise(5, 480)
    case: dict[str, Any] = {
        "qkv": qkv,
        "attended": attended,
        "heads": heads,
        "n_rows": torch.tensor([3], dtype=torch.int32),
    }
    both(bind_gate_heads, gate_heads_torch, case, ["attended"])
    seen = attended.clone()
    bind_gate_heads(**case)()
    gate = qkv[1, 480 + 1] if one_gate else qkv[1, 480 + 80 : 480 + 160]  # of the second head
    expected = seen[1, 80:160] * torch.nn.functional.softplus(gate)
    torch.testing.assert_close(attended[1, 80:160], expected, rtol=1e-5, atol=1e-6)


def test_memory_that_does_not_fit_is_refused_by_name() -> None:
    case = ssd_case(RUNS[0])
    with pytest.raises(BadPointer, match="state"):
        scans.bind_ssd_runs(**case | {"state": case["state"][:, :2]})
    with pytest.raises(BadPointer, match="n_rows"):
        kernels.bind_conv_runs(**conv_case(StepRuns(*(torch.zeros(0) for _ in range(3)))))


def compile_all() -> None:
    """In the child of test_compile.py: every kernel, as a real model has it."""
    shape = Mamba2Shape(inner=4096, state=128, kernel=4, n_heads=64, n_groups=1)
    for found in RUNS:
        for launch in (
            kernels.bind_conv_runs(**conv_case(found)),
            kernels.bind_gate_runs(**gate_case(found)),
            kernels.bind_selected_runs(**selected_case(found, normed=True)),
            scans.bind_ssd_runs(**ssd_case(found, shape)),
            delta.bind_delta_runs(**delta_case(found, replace(DELTA, key_width=128, value_width=128))),
            delta.bind_short_conv_runs(**short_conv_case(found)),
            bind_gate_heads(**heads_case(torch.bfloat16)),
            scans.bind_selective_runs(**selective_case(found, MambaShape(inner=512, state=16, kernel=4, dt_rank=32))),
        ):
            for part in launch.parts if isinstance(launch, Launches) else (launch,):
                compile_launch(part)
