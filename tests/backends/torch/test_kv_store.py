"""The tensors of memory: what goes in comes out, keys turn as positions move, states are kept by plane."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ostinato.backends.torch.kv_store import KVStore, StateStore
from ostinato.backends.torch.ops.rope import cos_sin, rope_torch
from ostinato.cache.kv_bytes import cell_bytes
from ostinato.cache.state_run import Move, StateRun, StateSource
from ostinato.errors import BadOption
from ostinato.models.rope import frequencies_of
from ostinato.models.shape import Shape
from ostinato.options import KVType
from tests.random_model import attention_shape

CPU = torch.device("cpu")
TYPES: Sequence[KVType] = ("f32", "bf16", "f16", "q8_0")


def store_of(shape: Shape, kv_type: KVType, *, streams: int = 1, cells: int = 8) -> KVStore:
    ropes = {rope: torch.from_numpy(frequencies_of(rope)) for rope in shape.rope_kinds}
    return KVStore(shape, {0: cells, 1: cells}, kv_type, streams=streams, device=CPU, frequencies=ropes)


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def shape() -> Shape:
    return attention_shape("llama", 128, 128, 1024)  # heads of 32


@pytest.mark.parametrize(("kv_type", "tolerance"), [("f32", 0), ("bf16", 0.02), ("f16", 0.002), ("q8_0", 0.02)])
def test_rows_come_back_as_they_went_in_to_the_precision_of_their_type(
    shape: Shape, kv_type: KVType, tolerance: float
) -> None:
    keys = store_of(shape, kv_type).keys[1]
    rows = noise(3, 2, 32)
    keys.write(0, torch.tensor([6, 1, 4]), rows)
    for place, cell in enumerate([6, 1, 4]):
        back = keys.read(0, slice(cell, cell + 1), torch.float32)[0]
        assert float((back - rows[place]).abs().max()) <= tolerance * float(rows.abs().max())
    assert float(keys.read(0, slice(0, 1), torch.float32).abs().max()) == 0  # an unwritten cell holds zeros


@pytest.mark.parametrize("kv_type", TYPES)
def test_bytes_are_counted_as_the_tensors_take_them(shape: Shape, kv_type: KVType) -> None:
    """E-39."""
    store = store_of(shape, kv_type, streams=2, cells=8)
    taken = sum(part.nbytes for half in store.halves for part in half.parts)
    assert taken == 2 * 2 * 8 * cell_bytes(shape.attention[0], kv_type)


def test_q8_0_refuses_heads_that_do_not_fill_its_blocks() -> None:
    """E-47."""
    with pytest.raises(BadOption, match="multiple of 32"):
        store_of(attention_shape("llama", 128, 64, 64), "q8_0")


@pytest.mark.parametrize("kv_type", TYPES)
def test_shifted_keys_are_those_of_the_new_position_and_values_never_turn(shape: Shape, kv_type: KVType) -> None:
    (rope,) = shape.rope_kinds

    def at(position: int) -> torch.Tensor:
        cos, sin = cos_sin(rope, torch.tensor([position]), torch.from_numpy(frequencies_of(rope)))
        return rope_torch(noise(1, 2, 32), cos, sin, rope.pairing)

    store = store_of(shape, kv_type)
    for half in store.halves:
        half.write(0, torch.tensor([2, 5]), torch.cat([at(9), at(9)]))
    before = store.values[0].read(0, slice(0, 8), torch.float32).clone()
    shifts = np.zeros(8, np.int64)
    shifts[2] = -4
    store.shift_keys(0, shifts)
    tolerance = 1e-5 if kv_type == "f32" else 0.1
    for layer in (0, 1):
        keys = store.keys[layer].read(0, slice(0, 8), torch.float32)
        torch.testing.assert_close(keys[2:3], at(5), atol=tolerance, rtol=0)
        torch.testing.assert_close(keys[5:6], at(9), atol=tolerance, rtol=0)
    assert torch.equal(store.values[0].read(0, slice(0, 8), torch.float32), before)


def test_a_stream_is_copied_whole(shape: Shape) -> None:
    store = store_of(shape, "q8_0", streams=3)
    for half in store.halves:
        half.write(1, torch.arange(8), noise(8, 2, 32))
    store.copy_stream(1, 2)
    for half in store.halves:
        for part in half.parts:
            assert torch.equal(part[2], part[1])
            assert not torch.equal(part[0], part[1])


def test_states_begin_where_the_run_says_and_are_kept_by_plane() -> None:
    store = StateStore({0: ((3,), (2, 2))}, rows=4, planes=2, device=CPU)
    first = (noise(2, 2, 3), noise(2, 2, 2, 2))
    store.commit(StateRun(head=1, count=2, starts=(None, None), moves=()), {0: first})
    run = StateRun(head=0, count=2, starts=(StateSource(2, 1), None), moves=(Move(1, 3),))
    begun = store.starts(0, run)
    assert torch.equal(begun[0][0], first[0][1, 1])  # row 2, the state one token earlier
    assert float(begun[1][1].abs().max()) == 0  # a new sequence
    second = (noise(2, 1, 3, seed=5), noise(2, 1, 2, 2, seed=6))
    store.commit(run, {0: second})
    kept = store.layers[0][0]
    assert torch.equal(kept[0, 0], second[0][0, 0])
    assert torch.equal(kept[3], first[0][0])  # moved out of the way before it was overwritten
