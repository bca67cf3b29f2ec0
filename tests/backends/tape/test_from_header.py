"""A kernel's source from a header alone is the one that the loaded model has."""

from __future__ import annotations

import pytest

from ostinato.backends.machine import SHARED_BYTES, Capability, Chip
from ostinato.backends.tape.from_header import tape_build
from ostinato.backends.tape.matrices import sources_of
from ostinato.backends.tape.program import Traits, shape_header
from ostinato.backends.tape.sizes import TapeSizes
from ostinato.models.header import tensors_in
from tests.backends.tape.loop import CONTEXT
from tests.backends.tape.models import FAMILIES, shape_of, small


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mix", [None, "q4_k_m", "q8_0"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_header_gives_the_source_of_the_loaded_model(family: str, mix: str | None, capability: Capability) -> None:
    model = small(shape_of(family, hidden=256, ff_width=256), mix=mix)
    chip = Chip(capability, 5, SHARED_BYTES[capability])
    packed = mix is not None
    made = tape_build(model.shape, tensors_in(model), chip, n_slots=4, context=CONTEXT, packed=packed)
    matrices = [source.matrix for _, source in sources_of(model)]
    traits, room = Traits.of(model), {"page_tokens": 64, "max_pages": CONTEXT // 64}
    sizes = TapeSizes.of(model.shape, matrices, 4, chip, kv_type="bf16", after_norms=traits.after_norms, **room)
    types = {matrix.weight_type for matrix in matrices}
    expected = shape_header(model.shape, traits, sizes, model.shape.vocab, "bf16", types, "wide")
    assert (made.sizes, made.headers["shape.h"]) == (sizes, expected)
