"""Routed experts against their twins, in Triton's interpreter: every weight type, sizes that no tile divides."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.triton.experts import (
    MAX_PARTS,
    ExpertWorkspace,
    bind_experts_down,
    bind_experts_gate_up,
    bind_route,
    expert_tile,
    experts_workspace,
)
from ostinato.backends.cuda.triton.tiles import Tile, step_columns
from ostinato.backends.torch.ops.matmul import experts_down_torch, experts_gate_up_torch, n_stats, route_rows_torch
from ostinato.backends.weights import Stack
from ostinato.errors import BadPointer, InternalError
from ostinato.models.shape import ExpertShape
from tests.backends.cuda.triton.test_matmul import CLOSE, NAN, TYPES, columns_of, noise, rows_of, weight_of

N_SLOTS, LIVE, N_EXPERTS, N_USED = 3, 2, 3, 2
TILE = Tile(16, 128, num_warps=1)
# A step's programs share outputs by a workspace, a prompt's do not.
SPREAD = pytest.mark.parametrize("n_parts", [None, 1, 2], ids=["together", "spread", "spread in two parts"])


def workspace_of(n_parts: int | None, width: int) -> ExpertWorkspace | None:
    """Full of what is no number: only what was left in it may be read."""
    if n_parts is None:
        return None
    workspace = experts_workspace(N_SLOTS, N_USED, width, width, torch.device("cpu"))
    workspace.parts.fill_(NAN)
    return workspace


def tile_of(n_parts: int | None) -> Tile:
    return replace(TILE, split_k=n_parts or 1)


def chosen_experts(n_slots: int, n_rows: int, n_experts: int, n_used: int) -> tuple[Tensor, Tensor]:
    """Experts of each row and their weights; those of rows that are not live point nowhere."""
    order = torch.stack([torch.randperm(n_experts)[:n_used].sort().values for _ in range(n_slots)]).int()
    weights = noise(n_slots, n_used, seed=3).softmax(-1)
    order[n_rows:], weights[n_rows:] = 1 << 30, NAN
    return order, weights


@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_takes_the_highest_scores_in_order_of_the_experts(renormalise: bool) -> None:
    scores = noise(5, 6)
    live = torch.tensor([4], dtype=torch.int32)
    results = []
    for run in (bind_route, None):
        experts, weights = torch.full((5, 3), -1, dtype=torch.int32), torch.full((5, 3), NAN)
        more: dict[str, Any] = {"shape": ExpertShape(6, 3, 1, renormalise)}
        if run is None:
            route_rows_torch(scores, experts, weights, live, **more)
        else:
            run(scores, experts, weights, live, **more)()
        results.append((experts, weights))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], equal_nan=True)


def test_an_experts_shares_are_multiplied_by_its_own_factor() -> None:
    scores, scales, live = noise(4, 6), torch.rand(6) + 0.5, torch.tensor([3], dtype=torch.int32)
    shape = ExpertShape(6, 2, 1, renormalise=True, share_scales=True)
    ours, theirs = ((torch.full((4, 2), -1, dtype=torch.int32), torch.full((4, 2), NAN)) for _ in range(2))
    bind_route(scores, *ours, live, shape=shape, scales=scales)()
    route_rows_torch(scores, *theirs, live, shape=shape, scales=scales)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], equal_nan=True)
    plain = ours[1][:3] / scales[ours[0][:3].long()]
    torch.testing.assert_close(plain.sum(-1), torch.ones(3))


def test_scores_that_are_no_numbers_still_choose_experts_that_exist() -> None:
    scores = torch.tensor([[NAN] * 5, [1.0, NAN, float("inf"), 1.0, 1.0]])
    experts, weights = torch.full((2, 3), -1, dtype=torch.int32), torch.zeros(2, 3)
    live = torch.tensor([2], dtype=torch.int32)
    bind_route(scores, experts, weights, live, shape=ExpertShape(5, 3, 1, renormalise=False))()
    assert experts.tolist() == [[0, 1, 2], [0, 2, 3]]


def gated(
    weight: Any, n: int, k: int, norm: str | None = "rms", *, n_parts: int | None = None
) -> tuple[Tensor, Tensor]:
    """What kernel and twin make of a random input, [slots, used, n], over the largest there is."""
    given = rows_of(LIVE, k, N_SLOTS)
    experts, _ = chosen_experts(N_SLOTS, LIVE, N_EXPERTS, N_USED)
    ours, theirs = (torch.full((N_SLOTS, N_USED, n), NAN) for _ in range(2))
    more: dict[str, Any] = {"norm": given.norm(norm), "activation": "silu"}
    workspace = workspace_of(n_parts, n)
    how: dict[str, Any] = {"tile": tile_of(n_parts), "workspace": workspace, **more}
    launch = bind_experts_gate_up(given.x, weight, ours, experts, given.n_rows, **how)
    for _ in range(2):  # the second finds the workspace as the first left it
        launch()
    assert workspace is None or not workspace.arrivals.any()
    experts_gate_up_torch(given.x, weight, theirs, experts, given.n_rows, **more)
    scale = float(theirs[:LIVE].abs().max())
    return ours / scale, theirs / scale


@pytest.mark.slow
@pytest.mark.parametrize("type", TYPES)
@SPREAD
def test_gate_and_up_of_each_rows_own_experts(type: str, n_parts: int | None) -> None:
    """E-17."""
    n, k = 20, columns_of(type)  # no whole tile of outputs, and experts that are no whole runs of rows
    ours, theirs = gated(weight_of(type, N_EXPERTS * 2 * n, k, seed=1), n, k, n_parts=n_parts)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("Q4_K", "Q6_K"), ("Q8_0", "Q5_0"), ("Q5_K", "F16"), ("BF16", "Q4_1")])
@pytest.mark.parametrize(("norm", "n_parts"), [(None, None), ("layer", 2)])
def test_gate_and_up_may_be_of_two_types(first: str, second: str, norm: str | None, n_parts: int | None) -> None:
    n, k = 20, max(columns_of(type) for type in (first, second) if not type.endswith("F16"))
    stack = Stack((weight_of(first, N_EXPERTS * n, k, seed=1), weight_of(second, N_EXPERTS * n, k, seed=2)))
    ours, theirs = gated(stack, n, k, norm, n_parts=n_parts)
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("type", TYPES)
@SPREAD
def test_a_row_is_the_weighted_sum_of_its_experts(type: str, n_parts: int | None) -> None:
    hidden, ff = 40, columns_of(type)
    down = weight_of(type, N_EXPERTS * hidden, ff, seed=2)
    experts, weights = chosen_experts(N_SLOTS, LIVE, N_EXPERTS, N_USED)
    n_rows = torch.tensor([LIVE], dtype=torch.int32)
    act = noise(N_SLOTS, N_USED, ff, seed=7).bfloat16().float()
    bias, workspace = noise(N_EXPERTS, hidden, seed=9), workspace_of(n_parts, hidden)
    outs = []
    for twin in (False, True):
        out, stats = noise(N_SLOTS, hidden, seed=5), torch.full((N_SLOTS, n_stats(hidden), 2), NAN)
        if twin:
            experts_down_torch(act, down, out, experts, weights, n_rows, stats=stats, bias=bias)
        else:
            more: dict[str, Any] = {"stats": stats, "bias": bias, "workspace": workspace, "tile": tile_of(n_parts)}
            bind_experts_down(act, down, out, experts, weights, n_rows, **more)()
            assert workspace is None or not workspace.arrivals.any()
        outs.append((out, stats))
    scale = float(outs[1][0][:LIVE].abs().max())
    torch.testing.assert_close(outs[0][0] / scale, outs[1][0] / scale, equal_nan=True, **CLOSE)
    torch.testing.assert_close(outs[0][1] / scale**2, outs[1][1] / scale**2, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_experts_of_the_wrong_number_of_rows_are_refused() -> None:
    x, out = torch.zeros(2, 64), torch.zeros(2, 2, 16)
    experts, live = torch.zeros(2, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(InternalError, match="50 rows of experts are not whole gated matrices of 16 outputs"):
        bind_experts_gate_up(x, torch.zeros(50, 64), out, experts, live, activation="silu")
    thirds = Stack((torch.zeros(32, 64),) * 3)
    with pytest.raises(InternalError, match=r"a stack of experts is \(gate, up\), not 3 parts"):
        bind_experts_gate_up(x, thirds, out, experts, live, activation="silu")
    with pytest.raises(InternalError, match="a product of experts in 2 parts needs a workspace"):
        bind_experts_gate_up(x, torch.zeros(64, 64), out, experts, live, activation="silu", tile=tile_of(2))
    with pytest.raises(BadPointer, match="experts"):
        bind_experts_gate_up(x, torch.zeros(64, 64), out, experts.long(), live, activation="silu")


def test_an_experts_columns_are_cut_by_type_and_shape_and_never_into_empty_parts() -> None:
    for type in TYPES:
        for k in (256, 768, 2304, 4096, 14336):
            weight = weight_of(type, 32, k)
            for epilogue in ("gated", "store"):
                assert expert_tile(weight, epilogue, spread=False).split_k == 1
                cut = expert_tile(weight, epilogue, spread=True)
                n_iterations = -(-k // step_columns(weight, cut))
                each = -(-n_iterations // cut.split_k)
                assert 1 <= cut.split_k <= MAX_PARTS
                assert each * (cut.split_k - 1) < n_iterations
