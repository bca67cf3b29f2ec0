"""Weights of the tape in the model's own order, in Triton's interpreter: to the bit what the twin says."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.backends.tape.pack import TapeSource, source_of, tape_of
from ostinato.backends.tape.partition import TapeGrid, make_partition
from ostinato.backends.tape.tape_weight import Tape, TapeWeight
from ostinato.backends.tape.unpack import bind_unpack
from ostinato.backends.torch.weight import Weight
from ostinato.errors import BadPointer, InternalError
from ostinato.files.quants import BLOCKS
from tests.backends.cuda.triton.test_compile import Case, case_of
from tests.backends.cuda.triton.test_matmul import weight_of
from tests.backends.tape.unpacked import unpack_torch

CPU = torch.device("cpu")
TYPES = ("BF16", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")


def laid(sources: list[TapeSource], grid: TapeGrid, half: torch.dtype = torch.bfloat16) -> Tape:
    partition = make_partition([source.matrix for source in sources], grid)
    return Tape(tape_of(sources, partition, CPU, half), partition, half)


def some(type: str, rows: int, columns: int, half: torch.dtype = torch.bfloat16) -> Weight:
    block = 1 if type == "BF16" else BLOCKS[type].elements
    weight: Weight = weight_of(type, rows, columns + -columns % block)
    return weight.to(half) if isinstance(weight, Tensor) else weight


def as_integers(values: Tensor) -> Tensor:
    return values.view(torch.int16)


def check(weight: TapeWeight, first: int = 0, n: int | None = None) -> None:
    rows, columns = weight.shape
    found, expected = (torch.zeros((n or rows, columns), dtype=weight.dtype) for _ in range(2))
    bind_unpack(weight, found, first)()
    unpack_torch(weight, expected, first)
    assert torch.equal(as_integers(found), as_integers(expected))


@settings(max_examples=30, deadline=None)
@given(
    type=st.sampled_from(TYPES),
    half=st.sampled_from([torch.bfloat16, torch.float16]),
    units=st.integers(1, 40),
    columns=st.sampled_from([32, 96, 256, 768, 1312]),
    paired=st.booleans(),
    n_before=st.integers(1, 50),
    grid=st.builds(TapeGrid, st.integers(1, 5), st.sampled_from([1, 2, 8]), st.sampled_from([1, 4])),
)
def test_it_gives_to_the_bit_what_the_twin_gives(
    type: str, half: torch.dtype, units: int, columns: int, paired: bool, n_before: int, grid: TapeGrid
) -> None:
    before = source_of(some("BF16", n_before, 32, half))
    source = source_of(some(type, 2 * units if paired else units, columns, half), paired=paired)
    check(TapeWeight(laid([before, source, before], grid, half), range(1, 2)))


@pytest.mark.parametrize("type", TYPES)
def test_whole_chunks_and_a_rest_of_every_kind(type: str) -> None:
    """As a card has them: eight compute warps; 16 column tiles each, at most, and fewer in the last chunk."""
    check(TapeWeight(laid([source_of(some(type, 40, 2304))], TapeGrid(3)), range(1)))


def test_plain_weights_come_back_to_the_bit() -> None:
    weight = some("BF16", 50, 200)
    assert isinstance(weight, Tensor)
    out = torch.zeros(50, 200, dtype=torch.bfloat16)
    bind_unpack(TapeWeight(laid([source_of(weight)], TapeGrid(3, 2)), range(1)), out)()
    assert torch.equal(as_integers(out), as_integers(weight))


def test_matrices_of_several_kinds_come_one_above_the_other() -> None:
    parts = [some(type, rows, 256) for type, rows in (("Q4_K", 40), ("Q6_K", 24), ("BF16", 8))]
    check(TapeWeight(laid([source_of(part) for part in parts], TapeGrid(2, 2)), range(3)))


@pytest.mark.parametrize("first", [0, 16, 48])
def test_some_rows_of_a_matrix(first: int) -> None:
    check(TapeWeight(laid([source_of(some("Q8_0", 70, 64))], TapeGrid(3, 2)), range(1)), first, 22)


def test_rows_that_are_no_tiles_are_refused() -> None:
    tape = laid([source_of(some("BF16", 64, 64), paired=True), source_of(some("BF16", 64, 64))], TapeGrid(3, 2))
    room = torch.zeros(32, 64, dtype=torch.bfloat16)
    for weight, first in (
        (TapeWeight(tape, range(1)), 0),
        (TapeWeight(tape, range(1, 2)), 8),
        (TapeWeight(tape, range(1, 2)), 48),
    ):
        with pytest.raises(InternalError, match="are no tiles of"):
            bind_unpack(weight, room, first)
    with pytest.raises(BadPointer, match="out"):
        bind_unpack(TapeWeight(tape, range(1, 2)), room.float())


def cases() -> list[Case]:
    """To be compiled for a card (`test_compile.py`)."""
    from tests.backends.cuda.triton.test_compile import weights

    made = []
    for type in ("BF16", "Q4_K", "Q5_0", "Q6_K", "Q8_0"):
        tape_weight = TapeWeight(laid([source_of(weights(type, 256, 2304))], TapeGrid(3)), range(1))
        launches = bind_unpack(tape_weight, torch.zeros(256, 2304, dtype=torch.bfloat16))
        made.append(case_of(f"unpack {type}", launches.parts[0]))
    return made


CASES: Any = cases
