"""A plan refuses launches that overwrite what they read, and names a buffer that was moved (E)."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from ostinato.errors import InternalError, PlanStale
from ostinato.loop.plan import Buffer, Node, Plan
from tests.engine.rig import open_loop

pytestmark = pytest.mark.slow


def test_a_plan_in_which_a_launch_overwrites_what_it_reads_is_refused() -> None:
    """E-38."""
    memory = torch.zeros(8)
    buffers = (Buffer.of("a", memory[:6]), Buffer.of("b", memory[4:]), Buffer.of("c", memory[6:]))

    def plan(reads: str, writes: str) -> Plan:
        return Plan("cpu", buffers, (Node("n", "test", lambda: None, (reads,), (writes,)),), 16)

    with pytest.raises(InternalError, match="node n writes b, which overlaps a"):
        plan("a", "b")
    plan("a", "c")
    plan("a", "a")  # said to be in place


def test_a_plan_in_which_a_node_writes_to_a_weight_is_refused() -> None:
    weight, x = Buffer.of("w", torch.ones(2), is_weight=True), Buffer.of("x", torch.ones(2))
    nodes = [Node("n", "test", lambda: None, (one,), (other,)) for one, other in (("w", "x"), ("x", "w"))]
    assert Plan("cpu", (weight, x), (nodes[0],), 16).weights == (weight,)
    with pytest.raises(InternalError, match=r"nodes write to \['w'\], which the plan holds as weights"):
        Plan("cpu", (weight, x), tuple(nodes), 16)


@pytest.mark.parametrize("mode", ["twin", "loop"])
def test_any_buffer_of_a_plan_that_was_moved_is_named(mode: str) -> None:
    """E-31: tensors and arrays."""
    driver = open_loop(mode=mode)
    plan = driver.runner.plan
    plan.check()
    for number, buffer in enumerate(plan.buffers):
        elsewhere = replace(buffer, _memory=deepcopy(buffer._memory))
        stale = replace(plan, buffers=(*plan.buffers[:number], elsewhere, *plan.buffers[number + 1 :]))
        with pytest.raises(PlanStale, match=f"the buffer {re.escape(buffer.name)} was at"):
            stale.check()
    driver.runner.close()
