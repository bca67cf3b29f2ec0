"""Which experts a row goes to, and how much it takes of each: the twin against a slow definition in plain Python, the
kernel and the native loop against the twin, over every way to choose; and ties, which all of them resolve alike."""

from __future__ import annotations

import ctypes
import math
from itertools import product
from typing import Any, Final, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.triton.experts import bind_route
from ostinato.backends.native.library import cpu_library
from ostinato.backends.native.plan import RouterStruct
from ostinato.backends.torch.ops.experts import route_torch
from ostinato.backends.torch.ops.matmul import route_rows_torch
from ostinato.models.shape import ExpertGroups, ExpertShape

N, USED, ROWS = 12, 3, 5
GROUPS = (None, ExpertGroups(4, 2, 1), ExpertGroups(3, 2, 2))
SCORING: Final[tuple[Literal["softmax", "sigmoid"], ...]] = ("softmax", "sigmoid")
SHAPES = [
    ExpertShape(
        N, USED, 8, renormalise, scoring=scoring, choice_bias=bias, groups=groups, share_scale=2.5 if bias else 1.0,
        shared_gate=renormalise,
    )
    for scoring, renormalise, bias, groups in product(SCORING, (True, False), (True, False), GROUPS)
]  # fmt: skip
# Of which the scores that are chosen by their bias are so low that it matters.
FAINT = [
    ExpertShape(N, USED, 8, True, scoring="sigmoid", choice_bias=True, sum_epsilon=1e-3),
    ExpertShape(N, USED, 8, True, scoring="sigmoid", choice_bias=True, least_sum=0.1),
]


def name_of(shape: ExpertShape) -> str:
    groups = "" if shape.groups is None else f"-{shape.groups.n_groups}groups-{shape.groups.n_best}best"
    return f"{shape.scoring}{'-renormalised' * shape.renormalise}{'-bias' * shape.choice_bias}{groups}"


def given(shape: ExpertShape, *, coarse: bool, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """Scores and bias; `coarse`: of few different values, so that most experts have an equal."""
    random = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(ROWS, shape.n_scores, generator=random)
    bias = torch.randn(shape.n_experts, generator=random) / 2 if shape.choice_bias else None
    if coarse:
        scores, bias = scores.sign(), None if bias is None else bias.sign()
    return scores, bias


def slow(scores: list[float], bias: list[float] | None, shape: ExpertShape) -> tuple[list[int], list[float]]:
    """One row, by the words of `ExpertShape`, in the order of experts."""
    scores = scores[: shape.n_experts]
    if shape.scoring == "sigmoid":
        likely = [1 / (1 + math.exp(-score)) for score in scores]
    else:
        likely = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
    by = likely if bias is None else [p + b for p, b in zip(likely, bias, strict=True)]
    left = list(range(shape.n_experts))
    if shape.groups is not None:
        size = shape.n_experts // shape.groups.n_groups
        groups = [by[start : start + size] for start in range(0, shape.n_experts, size)]
        strength = [sum(sorted(group)[-shape.groups.n_best :]) for group in groups]
        best = sorted(range(len(groups)), key=lambda g: -strength[g])[: shape.groups.n_used]
        left = [e for e in left if e // size in best]
    chosen = sorted(sorted(left, key=lambda e: -by[e])[: shape.n_used])
    shares = [likely[e] for e in chosen]
    total = max(sum(shares) + shape.sum_epsilon, shape.least_sum) if shape.renormalise else 1.0
    return chosen, [share / total * shape.share_scale for share in shares]


def in_order(shares: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    order = chosen.argsort(-1)
    return chosen.gather(-1, order), shares.gather(-1, order)


def by_native(scores: Tensor, bias: Tensor | None, shape: ExpertShape) -> tuple[Tensor, Tensor]:
    router, room = RouterStruct.of(shape), np.zeros(2 * shape.n_experts, np.float32)
    rows = scores.numpy().copy()
    chosen, shares = np.zeros((len(rows), shape.n_used), np.int32), np.zeros((len(rows), shape.n_used), np.float32)
    of_bias = None if bias is None else bias.numpy().ctypes.data
    for row, ids, own in zip(rows, chosen, shares, strict=True):
        pointers = (ctypes.c_void_p(at) for at in (row.ctypes.data, of_bias, room.ctypes.data))
        outs = ctypes.c_void_p(ids.ctypes.data), ctypes.c_void_p(own.ctypes.data)
        cpu_library().ostinato_route(ctypes.byref(router), *pointers, *outs)
    return in_order(torch.from_numpy(shares), torch.from_numpy(chosen).long())


def by_kernel(scores: Tensor, bias: Tensor | None, shape: ExpertShape) -> tuple[Tensor, Tensor, Tensor]:
    chosen, shares = torch.zeros(ROWS, shape.n_used, dtype=torch.int32), torch.zeros(ROWS, shape.n_used)
    shared, live = torch.zeros(ROWS), torch.tensor([ROWS], dtype=torch.int32)
    more: dict[str, Any] = {"shape": shape, "bias": bias, "shared": shared if shape.shared_gate else None}
    bind_route(scores, chosen, shares, live, **more)()
    return chosen.long(), shares, shared


@pytest.mark.parametrize("coarse", [False, True], ids=["scattered", "ties"])
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_the_twin_chooses_as_the_slow_definition_does(shape: ExpertShape, coarse: bool) -> None:
    for seed in range(4):
        scores, bias = given(shape, coarse=coarse, seed=seed)
        shares, chosen = route_torch(scores, shape, bias)
        for row in range(ROWS):
            ids, expected = slow(scores[row].tolist(), None if bias is None else bias.tolist(), shape)
            found, own = in_order(shares[row], chosen[row])
            assert found.tolist() == ids
            torch.testing.assert_close(own, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("coarse", [False, True], ids=["scattered", "ties"])
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_the_native_loop_and_the_kernel_choose_as_the_twin_does(shape: ExpertShape, coarse: bool) -> None:
    scores, bias = given(shape, coarse=coarse, seed=7)
    chosen, shares = in_order(*route_torch(scores, shape, bias))
    for found in (by_native(scores, bias, shape), by_kernel(scores, bias, shape)[:2]):
        assert torch.equal(found[0], chosen)
        torch.testing.assert_close(found[1], shares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", FAINT, ids=["epsilon", "least"])
def test_what_faint_shares_are_divided_by_is_the_shape_s_everywhere(shape: ExpertShape) -> None:
    scores, bias = given(shape, coarse=False)
    scores -= 12
    chosen, shares = in_order(*route_torch(scores, shape, bias))
    for row in range(ROWS):
        ids, expected = slow(scores[row].tolist(), None if bias is None else bias.tolist(), shape)
        assert chosen[row].tolist() == ids
        assert sum(expected) < 0.999
        torch.testing.assert_close(shares[row], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    for found in (by_native(scores, bias, shape), by_kernel(scores, bias, shape)[:2]):
        assert torch.equal(found[0], chosen)
        torch.testing.assert_close(found[1], shares, rtol=1e-5, atol=1e-6)


def test_the_score_of_a_shared_block_becomes_its_share() -> None:
    shape = ExpertShape(N, USED, 8, renormalise=True, shared_gate=True)
    scores, _ = given(shape, coarse=False)
    shared = torch.zeros(ROWS)
    outs = torch.zeros(ROWS, USED, dtype=torch.int32), torch.zeros(ROWS, USED)
    route_rows_torch(scores, *outs, torch.tensor([ROWS]), shape=shape, shared=shared)
    torch.testing.assert_close(shared, scores[:, N].sigmoid())
    torch.testing.assert_close(by_kernel(scores, None, shape)[2], shared)


def test_experts_far_apart_are_told_apart_by_their_scores() -> None:
    shape = ExpertShape(4, 2, 8, renormalise=True)
    scores = torch.tensor([[0.0, -300.0, -250.0, -200.0]]).expand(ROWS, -1).contiguous()
    found = [in_order(*route_torch(scores, shape)), by_native(scores, None, shape), by_kernel(scores, None, shape)]
    assert [each[0][0].tolist() for each in found] == [[0, 3]] * 3


def test_scores_that_are_no_numbers_choose_different_experts_natively() -> None:
    for shape in SHAPES:
        scores = torch.full((ROWS, shape.n_scores), torch.nan)
        chosen, _ = by_native(scores, torch.zeros(N) if shape.choice_bias else None, shape)
        assert all(len(set(row)) == USED and set(row) <= set(range(N)) for row in chosen.tolist())
