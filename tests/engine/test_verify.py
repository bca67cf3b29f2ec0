"""`verify`: what agrees is found to agree, and what does not is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from ostinato.backends.base import Settled
from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.plan import FusedPlan
from ostinato.backends.runner import Runner
from ostinato.backends.torch.compare import RouteJudge, checksums, compare_weights, first_difference
from ostinato.backends.torch.forward import through_mlp
from ostinato.backends.torch.kernels import Kernels, twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.plan import tensors_of
from ostinato.backends.torch.start import CpuEager, CpuLoop
from ostinato.engine.checks import Compared
from ostinato.engine.choose import settle_model
from ostinato.engine.driver import GREEDY, LoopDriver
from ostinato.engine.open import open_runner
from ostinato.engine.verify import (
    Verifier,
    _tied,
    same_checksums,
    tolerance_of,
)
from ostinato.errors import HardwareCannot
from ostinato.loop.host import OutEntry
from ostinato.loop.layout import Finish
from ostinato.loop.mode import DecodeMode
from ostinato.loop.plan import Node, Plan
from ostinato.models.blocks import Experts, Layer
from tests.backends.families import FAMILIES, LATENT, RECURRENT, family_model
from tests.backends.native.tiled import packed_blocks, tiled
from tests.named_model import named_model
from tests.random_model import MemoryKind, random_model

pytestmark = pytest.mark.slow  # together they take seconds

Change = Callable[[Node], Node]


def verifier(model: Model, **changes: object) -> Verifier:
    return replace(Verifier(model, "f32", model.shape.vocab), **changes)  # type: ignore[arg-type]  # by name


def with_nodes(runner: Runner, change: Change) -> Runner:
    """The loop with other nodes in what it runs; its plan, and the plan's hash, stay what they were."""
    plan = replace(runner.plan, nodes=tuple(change(node) for node in runner.plan.nodes))
    assert plan.hash == runner.plan.hash
    start = type(runner.start)(plan, runner.tables, runner.guard, runner.changed.set)  # type: ignore[call-arg]  # a CPU start
    runner.decode_mode.replace(runner.plan, start)
    runner.start = start
    return runner


def without(name: str) -> Change:
    def change(node: Node) -> Node:
        return replace(node, run=lambda: None) if node.name == name else node

    return change


def second_is(change: Change) -> Callable[[Model, Settled], Runner]:
    """Opens loops of which every second one is changed: the one that is compared with `eager`."""
    opened: list[Runner] = []

    def open(model: Model, settled: Settled) -> Runner:
        runner = open_runner(model, settled)
        opened.append(runner)
        return with_nodes(runner, change) if len(opened) % 2 == 0 else runner

    return open


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    tensor.view(-1).view(torch.int32)[place] ^= 1 << bit


@pytest.mark.parametrize("kind", ["kv", "swa"])
def test_the_native_loop_agrees_with_eager_over_the_same_tiles_and_with_dense_twins(kind: MemoryKind) -> None:
    report = verifier(tiled(random_model(kind))).verify(
        lambda: tiled(random_model(kind)), dense=lambda: random_model(kind)
    )
    assert [check.difference for check in report.checks] == [None] * 4
    assert report.passed
    assert [(check.name, check.comparison) for check in report.checks] == [
        ("weights", "bits"),
        ("eager", "tolerance"),
        ("loop", "tolerance"),
        ("weights", "bits"),
    ]
    assert report.not_run == {}  # a CPU has no graphs, and none were asked for


@pytest.mark.parametrize("kind", ["kv", "swa", "recurrent", "hybrid"])
def test_the_modes_of_every_memory_agree_to_the_bit_and_with_the_twins(kind: MemoryKind) -> None:
    model = random_model(kind)
    report = verifier(model).verify(lambda: random_model(kind))
    assert [check.difference for check in report.checks] == [None] * 3
    assert [(check.name, check.comparison) for check in report.checks] == [
        ("weights", "bits"),
        ("eager", "tolerance"),
        ("weights", "bits"),
    ]
    assert "loop" in report.not_run
    check = verifier(model).compare("twin")
    assert (check.comparison, check.difference) == ("bits", None)


def test_only_the_modes_asked_for_are_compared() -> None:
    report = verifier(tiled(random_model("kv")), modes=("loop",)).verify(None)
    assert [check.name for check in report.checks] == ["loop", "weights"]
    assert report.not_run == {}
    with pytest.raises(HardwareCannot, match="mode 'persistent' cannot run here: the persistent kernel is CUDA's"):
        verifier(tiled(random_model("kv")), modes=("persistent",)).verify(None)


def test_eight_bits_of_activations_are_allowed_more_and_ties_are_counted() -> None:
    model = tiled(random_model("kv", hidden=256), packed_blocks("Q4_1", wide=False))
    assert tolerance_of(model) == 1e-1
    check = verifier(model, activations="int8").compare("loop")
    assert (check.comparison, check.difference) == ("tolerance", None)
    assert check.figures["ties"] >= 0


def test_a_token_that_was_as_likely_is_a_tie_and_another_is_a_difference() -> None:
    top = ((5, -1.0), (9, -1.005))
    one = OutEntry(0, 1, 5, 7, Finish.NONE, -1.0, 0, top)
    assert _tied(one, one._replace(token=9), 1e-3)
    assert not _tied(one, one._replace(token=9), 1e-4)
    assert not _tied(one, one._replace(token=6), 1e-3)
    assert not _tied(one, one._replace(token=9, position=8), 1e-3)


def test_the_sequences_are_greedy_and_drawn_cross_a_page_and_leave_a_slot_free() -> None:
    cases = verifier(random_model("kv")).cases()
    assert {case.sampling.temperature == 0 for case in cases} == {True, False}
    crossing = [case for case in cases if len(case.prompt) // 16 != (len(case.prompt) + case.most - 1) // 16]
    assert len(crossing) >= 2
    assert len({len(case.prompt) for case in cases}) == len(cases)
    assert max(case.slot for case in cases) >= len(cases)


def test_a_flipped_bit_of_a_weight_is_found_and_named() -> None:
    """E-28."""
    model = random_model("kv")
    flip(dict(tensors_of(model, "model"))["model.layers.1.mlp.down.weight"], 77, 3)
    report = verifier(model).verify(lambda: random_model("kv"))
    assert not report.passed
    weights = report.checks[0]
    assert weights.difference is not None
    assert (weights.difference.buffer, weights.difference.place) == ("model.layers.1.mlp.down.weight", (1, 13))
    assert weights.difference.text.startswith("load: model.layers.1.mlp.down.weight[1, 13] is ")


def test_a_large_flip_is_seen_by_the_twins_too() -> None:
    model = random_model("kv")
    flip(dict(tensors_of(model, "model"))["model.layers.0.attention.qkv.weight"], 5, 30)
    found = verifier(model).near_twins(random_model("kv"))
    assert found.difference is not None
    assert found.difference.buffer in ("logits", "logprob")


def test_a_step_that_writes_into_the_weights_is_found_and_the_weight_named() -> None:
    """E-15."""
    model = random_model("kv")
    before = checksums(model)
    assert same_checksums(model, before).difference is None
    flip(dict(tensors_of(model, "model"))["model.norm.weight"], 0, 1)
    found = same_checksums(model, before).difference
    assert found is not None
    assert found.buffer == "model.norm.weight"


@pytest.mark.parametrize(
    ("removed", "node", "buffer"),
    [
        ("layer.0", "layer.0", "memory.0.keys"),
        ("layer.1", "layer.1", "x"),
        ("head", "head", "logits"),
        ("sample", "sample", "table.chosen"),
    ],
)
def test_a_node_that_is_missing_from_what_a_mode_runs_is_named(removed: str, node: str, buffer: str) -> None:
    """E-62."""
    check = verifier(random_model("kv"), open=second_is(without(removed))).compare("twin")
    assert check.difference is not None
    assert (check.difference.node, check.difference.buffer, check.difference.step) == (node, buffer, 1)


def test_a_mode_that_dies_is_told() -> None:
    def broken(node: Node) -> Node:
        return replace(node, run=lambda: 1 // 0) if node.name == "head" else node

    died = verifier(random_model("kv"), open=second_is(broken)).compare("twin")
    assert died.difference is not None
    assert "modulo by zero" in died.difference.text


def test_a_host_paced_mode_is_compared_after_every_step_and_the_step_is_named() -> None:
    runs = []

    def late(node: Node) -> Node:
        if node.name != "layer.1":
            return node

        def run() -> None:
            runs.append(node.run)
            if len(runs) != 5:  # the first step admits: the fifth is step 4
                node.run()

        return replace(node, run=run)

    check = verifier(random_model("kv"), open=second_is(late)).compare("eager")
    assert check.difference is not None
    assert (check.difference.node, check.difference.step) == ("layer.1", 4)
    assert "after step 4" in check.difference.text


def test_a_host_paced_mode_that_agrees_is_compared_at_every_step() -> None:
    model = random_model("kv")
    once, each = verifier(model).compare("twin"), verifier(model).compare("eager")
    assert each.passed
    assert each.n_compared > 10 * once.n_compared


def test_another_plan_is_told_by_its_first_line_that_differs() -> None:
    def open(model: Model, settled: Settled) -> Runner:
        runner = open_runner(model, settled)
        if settled.mode == "twin":
            runner.plan = replace(runner.plan, nodes=runner.plan.nodes[:-1])
        return runner

    found = verifier(random_model("kv"), open=open).compare("twin").difference
    assert found is not None
    assert (found.node, found.expected) == ("plan", "sample (sample): logits, table -> table")
    assert found.found == "nothing"


def test_arithmetic_of_its_own_is_compared_by_greedy_tokens_and_a_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuLoop, "comparison", "tolerance", raising=False)
    check = verifier(random_model("kv")).compare("twin")
    assert (check.comparison, check.difference) == ("tolerance", None)
    assert check.figures["cosine"] > 0.999
    broken = verifier(random_model("kv"), open=second_is(without("layer.0"))).compare("twin")
    assert broken.difference is not None
    assert (broken.difference.node, broken.difference.buffer) == ("sample", "token")


def opens_fused(kernels: Kernels) -> Callable[[Model, Settled], Runner]:
    """Opens loops as on a GPU: prompts and steps by kernels, which say whom they chose."""

    def open(model: Model, settled: Settled) -> Runner:
        runner = open_runner(model, settled)
        runner.start.close()
        runner.plan = FusedPlan(model, runner.memory, runner.tables, runner.n_tokens, kernels).plan()
        runner.start = CpuEager(runner.plan, runner.tables, runner.guard, runner.changed.set)
        runner.decode_mode = DecodeMode(runner.plan, runner.start, runner.tables, runner.guard)
        runner.chunks = FusedChunks(model, runner.memory, runner.tables, runner.n_tokens, kernels, buckets=(32,))
        return runner

    return open


def route_then(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> Kernels:
    """The twins, with something done to (scores, experts, shares) behind every route."""
    right = twin_kernels()

    def route(
        scores: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor, *rest: object, **more: object
    ) -> Callable[[], None]:
        run = right.route(scores, experts, shares, *rest, **more)

        def both() -> None:
            run()
            change(scores, experts, shares)

        return both

    return replace(right, route=route)


def take(
    place: int, scores: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor, *, within: float = torch.inf
) -> None:
    """Who has that place among the scores in place of the second, where so near to it, with the share it deserves."""
    best = scores.topk(4, -1)
    near = best.values[:, 1] - best.values[:, place] <= within
    for row in near.nonzero().flatten().tolist():
        chosen = best.indices[row, [0, place]].sort().values
        experts[row] = chosen.int()
        shares[row] = scores[row, chosen].softmax(-1)


def mixtral_beside_twins(kernels: Kernels) -> Compared:
    """A model of which two experts score nearly alike for every row, by these kernels beside the twins."""
    model = named_model("tiny-mixtral", torch.bfloat16, seed=3)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        assert isinstance(layer.mlp, Experts)
        router = layer.mlp.router.weight
        assert isinstance(router, torch.Tensor)
        router[2] = router[1] * 1.01
    return verifier(model, kv_type="bf16", open=opens_fused(kernels)).near_twins(model)


# Rounding to bfloat16 moves the logits of gemma4-shared by a tenth of their size and more in every implementation.
@pytest.mark.parametrize("family", [name for name in FAMILIES + RECURRENT + LATENT if name != "gemma4-shared"])
def test_kernels_of_every_family_are_near_the_twins_in_bfloat16(family: str) -> None:
    model = family_model(family, dtype=torch.bfloat16)
    found = verifier(model, kv_type="bf16", open=opens_fused(twin_kernels())).near_twins(model)
    assert found.difference is None


def test_another_route_of_a_near_tie_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mixtral_beside_twins(twin_kernels())
    assert plain.difference is None
    turned = mixtral_beside_twins(route_then(partial(take, 2, within=0.03)))
    assert turned.difference is None
    assert turned.figures is not None
    assert turned.figures["route_ties"] > 0
    assert 0 < turned.figures["route_widest"] < 0.1
    assert turned.figures["relative"] < 0.05
    # What a comparison would say that did not look at the routes.
    monkeypatch.setattr(FusedChunks, "routes", None)
    assert mixtral_beside_twins(route_then(partial(take, 2, within=0.03))).difference is not None


def test_an_expert_that_is_not_near_the_choice_is_found_and_its_layer_named() -> None:
    found = mixtral_beside_twins(route_then(partial(take, 3))).difference
    assert found is not None
    assert (found.node, found.buffer) == ("layer.0.route", "experts")
    assert "behind" in found.text


@pytest.mark.parametrize("wrong", [4, -1])
def test_an_expert_that_does_not_exist_is_found(wrong: int) -> None:
    model = named_model("tiny-mixtral", torch.bfloat16, torch.device("cpu"))
    judge = RouteJudge(torch.tensor([[[0, wrong]]] * 2), 0.1)
    layer = model.layers[1]
    assert layer.mlp is not None
    through_mlp(judge.routed(model).ops, layer.mlp, torch.ones(1, 256, dtype=torch.bfloat16))
    assert judge.difference is not None
    assert str([0, wrong]) in judge.difference.found


@pytest.mark.parametrize("what", ["expert", "share"])
def test_kernels_that_do_not_compute_what_they_say_they_chose_are_found(what: str) -> None:
    right = twin_kernels()

    def down(x: object, weight: object, out: object, experts: torch.Tensor, shares: torch.Tensor, *rest: object,
             **more: object) -> Callable[[], object]:  # fmt: skip
        def run() -> None:
            chosen = (experts + 1) % 4 if what == "expert" else experts
            weights = shares.flip(-1) if what == "share" else shares
            right.experts_down(x, weight, out, chosen, weights, *rest, **more)()

        return run

    found = mixtral_beside_twins(replace(right, experts_down=down)).difference
    assert found is not None
    assert found.buffer in ("experts", "logits", "logprob")


@pytest.mark.slow
def test_packed_weights_are_allowed_the_rounding_of_what_they_are_multiplied_with() -> None:
    cpu = torch.device("cpu")
    assert tolerance_of(named_model("tiny", torch.float32, cpu)) == 1e-3
    packed = named_model("tiny", torch.float32, cpu, mix="q4_k_m")
    assert tolerance_of(packed) == tolerance_of(named_model("tiny", torch.bfloat16, cpu)) == 1e-1
    assert verifier(packed).verify(lambda: named_model("tiny", torch.float32, cpu, mix="q4_k_m")).passed


def test_elements_are_compared_by_their_bits_and_the_first_one_is_named() -> None:
    zeros = torch.zeros(3, 4)
    assert first_difference("n", "b", zeros, zeros.clone()) is None
    minus = zeros.clone()
    minus[1, 2] = -0.0
    found = first_difference("n", "b", zeros, minus)
    assert found is not None
    assert (found.place, found.n_elements) == ((1, 2), 1)
    assert found.expected != found.found
    nan = zeros.clone().fill_(float("nan"))
    assert first_difference("n", "b", nan, nan.clone()) is None
    longer = first_difference("n", "b", zeros, torch.zeros(3, 5))
    assert longer is not None
    assert (longer.expected, longer.found) == ("float32 [3, 4]", "float32 [3, 5]")


def test_weights_of_the_same_model_are_the_same() -> None:
    assert compare_weights(random_model("kv"), random_model("kv"))[1] is None


def test_a_loop_driven_by_hand_gives_the_same_by_steps_and_by_a_trigger() -> None:
    model = random_model("kv")
    tokens = []
    for steps in (True, False):
        driver = LoopDriver(open_runner(model, settle_model(model, "eager", context=64, n_pages=8, n_slots=2)))
        driver.admit(1, [3, 1, 4], most=5, sampling=GREEDY)
        if steps:
            while driver.step():
                pass
        else:
            driver.run()
        tokens.append([entry.token for entry in driver.entries])
        driver.close()
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 5


def test_a_plan_keeps_its_hash_when_only_what_a_node_does_changes() -> None:
    """What the tests above stand on."""
    model = random_model("kv")
    driver = LoopDriver(open_runner(model, settle_model(model, "eager", context=16, n_pages=1)))
    plan: Plan = driver.runner.plan
    driver.close()
    assert replace(plan, nodes=tuple(map(without("head"), plan.nodes))).hash == plan.hash
    assert replace(plan, nodes=plan.nodes[1:]).hash != plan.hash
