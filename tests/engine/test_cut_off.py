"""A step that is cut off leaves nothing committed, on every backend (docs/ring.md, "When keys and values count").

The step is cut before its step boundary, after all of its arithmetic or between two nodes. What counts afterwards is
what counted before: the same rows of the slot table, the same outbox, the same keys and values below every position.
The step can therefore be run again, and the answers are those of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.machine import TUNED
from ostinato.backends.native.pages import LayerPages
from ostinato.backends.torch.kernels import twin_kernels
from ostinato.errors import EngineDead, InternalError
from ostinato.loop.layout import Fault, Word
from tests.backends.cuda.test_plan import fused_driver
from tests.backends.families import family_model
from tests.backends.tape.loop import tape_driver
from tests.backends.tape.models import shape_of, small
from tests.engine.rig import Driver, open_loop, stray

PROMPTS = {0: [5, 9, 2, 77, 31], 2: [*range(1, 20)]}
MOST = 6
# What a step boundary commits, by slot, and what it publishes.
COMMITTED = ("state", "generation", "token", "position", "left", "made", "counts", "granted", "pages")
PUBLISHED = (Word.OUTBOX_HEAD, Word.INBOX_TAIL, Word.STEPS)

BACKENDS: dict[str, Callable[[], Driver]] = {
    "torch": lambda: open_loop(model=family_model("llama"), mode="twin", n_slots=3),
    "native": lambda: open_loop(model=family_model("llama"), mode="loop", n_slots=3),
    "cuda by its references": lambda: fused_driver(family_model("llama"), twin_kernels()),
    "cuda interpreted": lambda: fused_driver(family_model("llama"), triton_kernels(TUNED)),
    "tape emulated": lambda: tape_driver(small(shape_of()), n_slots=3),
}
SLOW = ("cuda interpreted", "tape emulated")
EVERY = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in BACKENDS]
BY_NODES = [name for name in EVERY if name.values[0] not in ("native", "tape emulated")]


@dataclass(frozen=True)
class Counted:
    """What counts between two steps, and the keys and values by cell [cells, ...]."""

    table: dict[str, np.ndarray]
    words: dict[Word, int]
    cells: list[np.ndarray]

    @staticmethod
    def of(driver: Driver) -> Counted:
        table, host = driver.runner.tables.table, driver.runner.host
        return Counted(
            {name: stray(table[name]).copy() for name in COMMITTED},
            {word: host.word(word) for word in PUBLISHED},
            [cells.copy() for cells in cells_of(driver)],
        )

    def check(self, after: Counted) -> None:
        for name, value in self.table.items():
            assert np.array_equal(value, after.table[name]), name
        assert self.words == after.words


def cells_of(driver: Driver) -> Iterator[np.ndarray]:
    """Keys and values of every layer, a row for each cell, as bytes."""
    layers: Any = getattr(driver.runner._kept, "layers", None)
    if layers is not None:  # native pages hold keys [pages, heads, width, 16] and values [pages, heads, 16, width]
        for layer in layers.values():
            assert isinstance(layer, LayerPages)
            for array, axis in ((layer.keys, -1), (layer.values, -2)):
                turned = np.moveaxis(stray(array), axis, 1)
                yield np.ascontiguousarray(turned).reshape(turned.shape[0] * turned.shape[1], -1).view(np.uint8)
        return
    n_cells = driver.runner.settled.n_pages * driver.runner.page_tokens
    for buffer in driver.runner.plan.buffers:
        if buffer.name.startswith("memory."):
            yield stray(buffer.tensor).reshape(n_cells, -1).view(np.uint8)


def next_cells(driver: Driver) -> set[int]:
    """Where the next step writes: one cell for each live slot."""
    table, page = driver.runner.tables.table, driver.runner.page_tokens
    found = set()
    for slot in PROMPTS:
        position = int(table["position"][slot])
        found.add(int(table["pages"][slot][0][position // page]) * page + position % page)
    return found


def admitted(driver: Driver) -> list[int]:
    return [driver.admit(slot, prompt, most=MOST) for slot, prompt in PROMPTS.items()]


@cache
def undisturbed(name: str) -> list[list[int]]:
    driver = BACKENDS[name]()
    generations = admitted(driver)
    while driver.step():
        pass
    driver.runner.close()
    return [driver.tokens(generation) for generation in generations]


@pytest.mark.parametrize("name", EVERY)
def test_a_step_that_ends_before_its_step_boundary_leaves_nothing_committed(name: str) -> None:
    driver = BACKENDS[name]()
    generations, goes_on = admitted(driver), driver.step()
    table, words = driver.runner.tables.table, driver.runner._shared.rings.host("words")
    while goes_on:
        before, expected = Counted.of(driver), next_cells(driver)
        stray(table["epoch"])[0] += 1  # the step boundary refuses to commit (I-10)
        with pytest.raises(EngineDead):
            driver.step()
        assert driver.word(Word.FAULT) == Fault.EPOCH
        after = Counted.of(driver)
        before.check(after)
        for one, two in zip(before.cells, after.cells, strict=True):
            changed = set(np.flatnonzero((one != two).any(-1)).tolist())
            assert changed == expected, "the step has written its own cells, and no other"
        # No engine goes on after a fault; here it shows that the step left no trace.
        stray(table["epoch"])[0] -= 1
        words[Word.FAULT, 0] = Fault.NONE
        driver.runner.decode_mode._dead = None
        driver.step()  # gathers the rows again
        goes_on = driver.step()
    assert [driver.tokens(generation) for generation in generations] == undisturbed(name)
    driver.runner.close()


@pytest.mark.parametrize("name", BY_NODES)
def test_a_step_that_fails_at_any_node_leaves_nothing_committed(name: str) -> None:
    driver = BACKENDS[name]()
    generations, goes_on = admitted(driver), driver.step()
    start: Any = driver.runner.start
    whole = start._plan

    def fail() -> None:
        raise InternalError("cut off")

    n_steps, cuts = 0, set[int]()
    while goes_on:
        for cut in range(n_steps, len(whole.nodes), MOST - 1):  # other nodes at every step, all of them in the end
            nodes = [replace(node, run=fail) if number == cut else node for number, node in enumerate(whole.nodes)]
            before = Counted.of(driver)
            start._plan = replace(whole, nodes=tuple(nodes))
            with pytest.raises(EngineDead, match="cut off"):
                driver.step()
            before.check(Counted.of(driver))
            cuts.add(cut)
        start._plan = whole
        goes_on = driver.step()
        n_steps += 1
    assert cuts == set(range(len(whole.nodes)))
    assert [driver.tokens(generation) for generation in generations] == undisturbed(name)
    driver.runner.close()
