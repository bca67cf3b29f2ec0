"""The laboratory's calls to a GPU, over a stand-in that takes them on the CPU: every start, and what can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from ostinato.errors import BadOption, EngineDead, HardwareCannot, InternalError
from ostinato.lab import gpu as lab_gpu
from ostinato.lab.gpu import BASELINE, FED, GRAPH, PERSISTENT, STARTS, UPDATED, WHILE, GpuMachine
from ostinato.lab.model import BODIES, BodyName, Workload
from tests.lab.stand_in import Card, stand_in

WORK = Workload(n=37, steps=20, kernels=3, blocks=2, threads=32)
LAUNCHES = {BASELINE: 60, GRAPH: 1, UPDATED: 20, WHILE: 1, PERSISTENT: 1, FED: 1}
Opened = tuple[GpuMachine, Card]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    with stand_in(monkeypatch) as made:
        yield made


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("start", STARTS)
def test_every_start_computes_every_element_of_every_step(opened: Opened, start: str, body: BodyName) -> None:
    machine, _ = opened
    timing = machine.time(replace(WORK, body=body), start, 2)
    assert timing.max_abs_err < 1e-5
    assert (len(timing.step_us), timing.launches) == (2, LAUNCHES[start])


@pytest.mark.parametrize("start", [BASELINE, GRAPH, UPDATED, WHILE])
def test_a_launch_that_is_left_out_gives_no_figure(opened: Opened, start: str) -> None:
    machine, card = opened
    card.skips = 75  # of the second run, whose figure would count
    with pytest.raises(InternalError, match=f"{start} computed a wrong result"):
        machine.time(WORK, start, 1)


@pytest.mark.parametrize("start", [PERSISTENT, FED])
def test_a_pass_of_a_persistent_kernel_that_is_left_out_gives_no_figure(
    opened: Opened, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, card = opened
    run: Callable[..., None] = card._persistent
    monkeypatch.setattr(card, "_persistent", lambda *words: run(*words[:4], words[4] - 1, *words[5:]))
    with pytest.raises(InternalError, match="computed a wrong result"):
        machine.time(WORK, start, 1)


# What the host does


def test_the_host_launches_as_often_as_each_start_says(opened: Opened) -> None:
    machine, card = opened
    for start, called in {
        BASELINE: {"cuLaunchKernel": 60},
        GRAPH: {"cuGraphLaunch": 1},
        UPDATED: {"cuGraphExecKernelNodeSetParams_v2": 60, "cuGraphLaunch": 20},
        PERSISTENT: {"launch of persistent": 1},
        FED: {"launch of persistent": 1},
    }.items():
        card.calls.clear()
        machine.time(WORK, start, 2)  # and once to warm
        assert card.calls == {name: 3 * n for name, n in called.items()}


def test_graphs_are_built_node_by_node_and_a_while_graph_has_one_step_as_its_body(opened: Opened) -> None:
    machine, card = opened
    machine.time(WORK, GRAPH, 1)
    machine.time(WORK, UPDATED, 1)
    machine.time(WORK, WHILE, 1)
    whole, step, loop = card.instantiated
    assert [len(graph.nodes) for graph in (whole, step, loop)] == [60, 3, 0]
    assert [node.kernel.name for node in loop.body.nodes] == ["short_axpy"] * 3 + ["count_down"]


def test_a_long_run_is_one_graph_that_is_replayed(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, card = opened
    monkeypatch.setattr(lab_gpu, "MOST_NODES", 14)
    timing = machine.time(WORK, GRAPH, 1)
    assert [len(graph.nodes) for graph in card.instantiated] == [12]
    assert timing.launches == 5


def test_the_host_feeds_steps_to_four_requests_in_turn(opened: Opened) -> None:
    machine, card = opened
    assert machine.time(replace(WORK, steps=10), FED, 1).max_abs_err < 1e-5
    assert card.ran["persistent"] == 2


# Costs and facts


@pytest.mark.slow
def test_costs_are_measured_once_for_each_grid(opened: Opened) -> None:
    machine, card = opened
    costs = machine.costs(WORK)
    assert set(costs) == set(STARTS)
    assert np.isfinite(costs[BASELINE].submit_kernel_us)  # a slope of times: on a busy machine it may be of any sign
    ran = card.ran.copy()
    assert machine.costs(replace(WORK, n=5)) is costs
    assert card.ran == ran
    assert np.isfinite(machine.body_us(WORK))


@pytest.mark.slow
def test_facts_name_the_card_and_its_barrier(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, _ = opened
    monkeypatch.setattr(lab_gpu, "LOADED", replace(lab_gpu.LOADED, n=256))
    facts = machine.facts()
    assert (facts["kind"], facts["name"], facts["multiprocessors"]) == ("gpu", "a stand-in", 4)
    assert facts["barrier_loaded_us"] >= 0


# What is refused


def test_an_open_grid_has_a_block_for_each_multiprocessor(opened: Opened) -> None:
    assert opened[0].settle(Workload(n=8)).blocks == 4


def test_a_grid_that_cannot_be_resident_is_refused_with_its_limit(opened: Opened) -> None:
    machine, card = opened
    with pytest.raises(
        BadOption, match=r"--blocks 9: with 32 threads at most 8 blocks run at once on a stand-in \(2 on"
    ):
        machine.time(replace(WORK, blocks=9), PERSISTENT, 1)
    assert not card.ran["persistent"]


def test_more_than_the_card_holds_is_refused(opened: Opened) -> None:
    with pytest.raises(HardwareCannot, match=r"needs \d+\.\d GB with its check; 1\.1 are free"):
        opened[0].time(Workload(n=1 << 28), BASELINE, 1)


def test_a_card_without_while_graphs_says_why_and_has_the_other_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(monkeypatch, why_no_while="the driver is old") as (machine, _):
        assert machine.starts == tuple(start for start in STARTS if start != WHILE)
        assert machine.why_not == {WHILE: "the driver is old"}


@pytest.mark.parametrize("start", [BASELINE, GRAPH, UPDATED])
def test_an_error_of_the_driver_ends_the_measurement(opened: Opened, start: str) -> None:
    machine, card = opened
    card.refuses = 719
    with pytest.raises(InternalError, match="the driver refused a launch: error 719"):
        machine.time(WORK, start, 1)
    card.submit(lambda: None).result()  # when the stream has come so far
    assert not card.ran  # nothing that was refused: its memory is the caller's again


def test_a_device_that_does_not_end_is_given_up(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, card = opened
    monkeypatch.setattr(lab_gpu, "DEADLINE_S", 0.05)
    card.is_stuck = True
    with pytest.raises(EngineDead, match="this process must be restarted"):
        machine.time(WORK, PERSISTENT, 1)


def test_a_queue_that_the_host_does_not_fill_reaches_its_deadline(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, card = opened
    monkeypatch.setattr(lab_gpu, "DEADLINE_S", 0.05)
    feeds = machine._host.feed
    monkeypatch.setattr(machine._host, "feed", lambda *words: feeds(*words[:4], words[4] - 1))
    with pytest.raises(EngineDead, match="a wait on the device passed its deadline"):
        machine.time(WORK, FED, 1)
    assert card.ran["persistent"] == 1
