"""The whole kernel in the emulator with either loader, bulk copies or a warp's 16-byte copies: the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch

from ostinato.backends.machine import Capability
from ostinato.backends.torch.model import Model
from ostinato.loop.host import OutEntry
from ostinato.options import Sampling
from tests.backends.tape.loop import tape_driver
from tests.backends.tape.models import shape_of, small
from tests.engine.rig import GREEDY, Driver

pytestmark = pytest.mark.slow

HOPPER, AMPERE, ADA, BLACKWELL = (9, 0), (8, 0), (8, 9), (12, 0)
PACKABLE = shape_of(hidden=256, ff_width=256)
WARM = Sampling(temperature=0.9, top_k=30, top_p=0.95, seed=5)
PROMPTS = ([5, 9, 33, 7], [120], [1, 2, 3, 4, 5, 6, 7, 8, 9], [40], [41, 7], [9] * 20, [3, 3], [77])
TIMES_AND_PLACES = ("table", "rings", "admissions", "caches", "clock")  # hold clocks and addresses


def opened(model: Model, capability: Capability, n_slots: int, seed: int, **how: Any) -> Driver:
    return tape_driver(model, n_slots=n_slots, seed=seed, capability=capability, kv_type="bf16", **how)


def decoded(driver: Driver, n_rows: int) -> list[OutEntry]:
    """Every entry of the outbox, without its time: greedy and sampled rows, of different lengths."""
    for slot, prompt in enumerate(PROMPTS[:n_rows]):
        driver.admit(slot, prompt, most=4 + slot % 3, sampling=WARM if slot % 2 else GREEDY)
    driver.run()
    return [entry._replace(time_ns=0) for entry in driver.entries]


def check_same_bytes(model: Model, n_rows: int, capabilities: Sequence[Capability] = (HOPPER, AMPERE)) -> None:
    """Tokens and entries of the outbox are the same, and so are the logits and all else that blocks handed on."""
    drivers = [opened(model, capability, n_rows, seed) for seed, capability in enumerate(capabilities)]
    entries = [decoded(driver, n_rows) for driver in drivers]
    first, *others = drivers
    assert len(entries[0]) >= 4 * n_rows
    for driver, told in zip(others, entries[1:], strict=True):
        assert told == entries[0]
        for buffer in first.runner.plan.buffers:
            if buffer.name not in TIMES_AND_PLACES:
                other = driver.runner.plan.buffer(buffer.name).tensor
                assert torch.equal(buffer.tensor.view(torch.uint8), other.view(torch.uint8)), buffer.name
    for driver in drivers:
        driver.runner.close()


@pytest.mark.parametrize("n_rows", [1, 3, 8])
def test_plain_weights_give_the_same_bytes(n_rows: int) -> None:
    check_same_bytes(small(PACKABLE), n_rows, (HOPPER, AMPERE, ADA, BLACKWELL))


@pytest.mark.parametrize("mix", ["q4_0", "q4_k_m", "q5_k", "q6_k", "q8_0"])
def test_packed_weights_give_the_same_bytes(mix: str) -> None:
    check_same_bytes(small(PACKABLE, mix=mix), 3)


@pytest.mark.parametrize("n_rows", [1, 8])
def test_mixed_weights_give_the_same_bytes(n_rows: int) -> None:
    check_same_bytes(small(PACKABLE, mix="q4_k_m"), n_rows)


def test_no_schedule_changes_what_it_gives() -> None:
    """Random delays of copies, puts and warps, by their seed."""
    model = small(PACKABLE, mix="q4_k_m")
    expected: list[OutEntry] | None = None
    for seed in range(8):
        with closing(opened(model, ADA, 3, 100 * seed)) as driver:
            entries = decoded(driver, 3)
        expected = expected or entries
        assert entries == expected
