"""Grammars in a GPU's memory: what is written arrives with `flush`, in order; here the device is the CPU."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.backends.torch import tables
from ostinato.backends.torch.tables import DeviceGrammars
from ostinato.loop.grammars import GrammarMemory
from tests.engine.test_grammars import compiled, room_for

MASK_WORDS = 4


def memories(n: int) -> tuple[DeviceGrammars, GrammarMemory]:
    """Room for so many small grammars, on a device and on the host."""
    host = room_for(n)
    return DeviceGrammars(host.words.nbytes, MASK_WORDS, torch.device("cpu")), host


def test_a_grammar_is_on_the_device_after_a_flush_and_not_before() -> None:
    device, host = memories(2)
    for text in ("[ab]", "[cd]"):
        assert device.lease(compiled(text)) == host.lease(compiled(text)) is not None
    assert not device.words.any()
    device.flush()
    np.testing.assert_array_equal(device.words.numpy(), host.words)


def test_of_two_grammars_in_one_region_the_later_one_is_there() -> None:
    device, host = memories(1)
    for memory in (device, host):
        first = memory.lease(compiled("[ab]"))
        assert first is not None
        memory.release(first)
        assert memory.lease(compiled("[cd]")) == first
    device.flush()
    np.testing.assert_array_equal(device.words.numpy(), host.words)
    device.plain_words.zero_()
    device.flush()  # sends nothing twice
    assert not device.words.any()


def test_copies_to_a_gpu_are_from_memory_that_was_pinned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def pinned_zeros(size: Sequence[int], dtype: torch.dtype, what: str) -> Tensor:
        pinned.append(torch.zeros(tuple(size), dtype=dtype))
        return pinned[-1]

    def refused(*_: object) -> Tensor:
        raise AssertionError("memory is pinned while the loop may run")

    on_cpu = torch.zeros
    monkeypatch.setattr(tables, "pinned_zeros", pinned_zeros)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device=None: on_cpu(*size, dtype=dtype))
    host = room_for(1)
    device = DeviceGrammars(host.words.nbytes, MASK_WORDS, torch.device("cuda"))
    assert device.lease(compiled("[ab]")) == host.lease(compiled("[ab]")) is not None
    np.testing.assert_array_equal(pinned[0].numpy(), host.words)
    device.flush()
    np.testing.assert_array_equal(device.words.numpy(), host.words)
    assert len(pinned) == 1
