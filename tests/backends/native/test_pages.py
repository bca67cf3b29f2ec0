"""The native loop's own keys and values: as many bytes as are counted for them, and no more."""

from typing import get_args

import pytest

from ostinato.backends.native.pages import PAGE_TOKENS, NativePages
from ostinato.cache.groups import one_group
from ostinato.cache.kv_bytes import page_bytes
from ostinato.errors import BadOption
from ostinato.loop.memory import memory_in
from ostinato.options import KVType
from tests.random_model import random_model


@pytest.mark.parametrize("kv_type", get_args(KVType))
def test_pages_take_the_bytes_that_are_counted_for_them(kv_type: KVType) -> None:
    shape = random_model("kv", hidden=128).shape
    assert shape.widest(lambda a: a.head_width) % 32 == 0
    pages = NativePages.of(shape, one_group(shape.attention, 5), n_slots=1, kv_type=kv_type)
    assert len(pages.layers) == shape.n_layers
    arrays = [array for _, array in memory_in(pages.layers, "")]
    assert sum(array.nbytes for array in arrays) == 5 * page_bytes(shape, kv_type, PAGE_TOKENS)
    assert not any(array.any() for array in arrays)


def test_heads_of_no_whole_blocks_are_refused_for_q8_0() -> None:
    with pytest.raises(BadOption, match="multiple of 32, and this model's is 16; use f16"):
        NativePages.of(random_model("kv", hidden=64).shape, one_group((0, 1), 1), n_slots=1, kv_type="q8_0")
