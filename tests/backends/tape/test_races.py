"""Accesses that nothing orders: small kernels that race are found, and the whole tape has no race."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from ostinato.models.shape import Shape
from ostinato.options import KVType, Sampling
from tests.backends.tape.emulator import DidNotEnd, compiled, constants, words
from tests.backends.tape.loop import tape_driver
from tests.backends.tape.models import glm4, shape_of, small
from tests.engine.rig import GREEDY

SOURCE = r"""
#include "machine.h"

struct Words {
    u32* out;
};
KERNEL(ordered, Words, all, 96) {
    u32* shared = (u32*)shared_memory();
    if (thread() < 64) shared[thread()] = thread();
    sync_block();
    if (thread() < 64) all.out[thread()] = shared[63 - thread()];
}
KERNEL(read_early, Words, all, 96) {
    u32* shared = (u32*)shared_memory();
    if (thread() < 64) shared[thread()] = thread();
    if (thread() < 64) all.out[thread()] = shared[63 - thread()];
}
KERNEL(same_written_twice, Words, all, 96) { all.out[0] = 7; }
KERNEL(written_twice, Words, all, 96) { all.out[0] = thread(); }
"""


def run(kernel: str, seed: int) -> np.ndarray:
    out = np.zeros(64, np.uint32)
    program = compiled(SOURCE, headers={"shape.h": constants(N_COMPUTE_WARPS=2)}, watched=True)
    program.run(kernel, words(out), shared_bytes=256, seed=seed)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_accesses_that_a_barrier_orders_are_no_race(seed: int) -> None:
    assert run("ordered", seed).tolist() == list(range(64))[::-1]
    assert run("same_written_twice", seed)[0] == 7


@pytest.mark.parametrize("kernel", ["read_early", "written_twice"])
@pytest.mark.parametrize("seed", range(3))
def test_accesses_that_nothing_orders_are_named_by_line(kernel: str, seed: int) -> None:
    with pytest.raises(DidNotEnd, match=r"threads race: (?s:.*)\(test.cpp"):
        run(kernel, seed)


PACKED = shape_of(hidden=256, ff_width=256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "kv_type", "mix"),
    [
        (shape_of(), "f32", None),
        (shape_of(), "q8_0", None),
        (PACKED, "f32", "q4_k_m"),
        (PACKED, "q8_0", "q4_k_m"),
        (glm4(), "bf16", None),  # three blocks store the same new key
    ],
    ids=["f32", "q8_0", "packed", "packed, q8_0", "parts of the queries of a KV head"],
)
def test_the_tape_has_no_race_over_greedy_and_sampled_rows(shape: Shape, kv_type: KVType, mix: str | None) -> None:
    warm = Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)
    with closing(tape_driver(small(shape, mix=mix), kv_type=kv_type, watched=True)) as driver:
        made = [driver.admit(i, [5 + i, 9, 33], most=4, sampling=warm if i % 2 else GREEDY) for i in range(4)]
        driver.run()
        assert [len(driver.tokens(generation)) for generation in made] == [4] * 4
