"""Tensors that the host only reads: every way of writing is refused, and reading is as of any tensor."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from ostinato.backends.torch.arrays import as_tensor
from ostinato.backends.torch.read_only import ReadOnlyTensor
from ostinato.errors import DecodeInvariantError
from ostinato.loop.memory import read_only

WRITES: dict[str, Callable[[Any], object]] = {
    "an item": lambda t: t.__setitem__(0, 7),
    "a slice of a view": lambda t: t[1:].view(-1).__setitem__(slice(None), 7),
    "an operation in place": lambda t: t.add_(1),
    "an assignment": lambda t: t.__iadd__(1),
    "a copy": lambda t: t.copy_(torch.ones(4)),
    "zeroing a row": lambda t: t[0].zero_(),
    "the result of another operation": lambda t: torch.add(torch.ones(4), 1, out=t),
    "a function of torch": lambda t: torch.nn.init.ones_(t),
    "several at once": lambda t: torch._foreach_add_([t], 1),
    "by index": lambda t: t.index_put_((torch.tensor([0]),), torch.tensor(7.0)),
    "other data": lambda t: setattr(t, "data", torch.ones(4)),
    "as numpy": lambda t: t.numpy().__setitem__(0, 7),
    "as an array": lambda t: np.asarray(t).__setitem__(0, 7),
    "detached": lambda t: t.detach().fill_(7),
    "split": lambda t: t.split(2)[0].fill_(7),
    "by the name of its argument": lambda t: torch.fill_(input=t, value=7),
    "a limit, by name": lambda t: torch.clamp_(input=t, min=5),
    "a function that is told to work in place": lambda t: functional.threshold(t, 9.0, 7.0, inplace=True),
    "the same by position": lambda t: functional.elu(t, 1.0, True),
    "an operator itself": lambda t: torch.ops.aten.fill_.Scalar(t, 7),
    "a packet of operators": lambda t: torch.ops.aten.fill_(t, 7),
    "a plain tensor": lambda t: t.as_subclass(torch.Tensor).fill_(7),
    "dlpack to numpy": lambda t: np.from_dlpack(t).__setitem__(0, 7),
    "dlpack to torch": lambda t: torch.utils.dlpack.from_dlpack(t).fill_(7),
    "its storage": lambda t: t.untyped_storage().fill_(7),
    "its typed storage": lambda t: t.storage().fill_(7),
    "another size": lambda t: t.resize_(0),
    "memory shared between processes": lambda t: t.share_memory_(),
    "rows that an embedding scales": lambda t: functional.embedding(torch.tensor([1]), t.view(2, 2), max_norm=0.5),
    "a list of results": lambda t: torch._foreach_copy_([t], [torch.ones(4)]),
    "as a tensor": lambda t: torch.as_tensor(t).fill_(7),
    "as an array of torch": lambda t: torch.asarray(t).fill_(7),
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False).fill_(7),
    "its data": lambda t: t.data.mul_(2),
    "with other strides": lambda t: torch.as_strided(t, (2,), (2,)).fill_(7),
    "a function for each number": lambda t: t.apply_(lambda number: 7),
    "a function of two": lambda t: t.map_(torch.ones(4), lambda one, other: 7),
    "random numbers": lambda t: torch.nn.init.normal_(t),
    "the result of a matrix product": lambda t: torch.mv(torch.eye(4), torch.ones(4), out=t),
}


@pytest.mark.parametrize("way", WRITES)
def test_no_way_of_writing_is_open(way: str) -> None:
    own = torch.arange(4.0)
    with pytest.raises((DecodeInvariantError, ValueError), match=r"only reads|read-only"):
        WRITES[way](read_only(own))
    assert own.tolist() == [0, 1, 2, 3]


def test_it_reads_as_any_tensor_and_follows_its_memory() -> None:
    own = torch.arange(4.0)
    seen = read_only(own)
    assert isinstance(seen, ReadOnlyTensor)
    assert (seen.data_ptr(), seen.nbytes, seen.dtype, seen.shape) == (own.data_ptr(), 16, torch.float32, (4,))
    own[0] = 9
    assert torch.equal(seen, own)
    assert [seen.tolist(), seen[1:].numpy().tolist(), float(seen.sum())] == [[9, 1, 2, 3], [1, 2, 3], 15]


def test_what_has_memory_of_its_own_can_be_written() -> None:
    own = torch.arange(4.0)
    for made in (read_only(own).clone(), read_only(own) + 1, torch.stack([read_only(own)])):
        assert type(made) is torch.Tensor
        made.zero_()
    own.copy_(read_only(torch.ones(4)))
    assert own.tolist() == [1, 1, 1, 1]


def test_an_array_that_is_locked_becomes_a_tensor_over_the_same_memory_without_a_warning() -> None:
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    assert as_tensor(array).data_ptr() == array.ctypes.data
    assert not array.flags.writeable
