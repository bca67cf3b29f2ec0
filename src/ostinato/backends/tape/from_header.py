"""The kernel's source for a model of which only the header is there: to compile it, on any chip, without a weight.

A loaded model goes through `program.py`, and gets the same source (`tests/backends/tape/test_from_header.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ostinato.backends.base import PAGE_TOKENS
from ostinato.backends.machine import Chip
from ostinato.backends.tape.backend import matrices_of
from ostinato.backends.tape.program import Traits, shape_header
from ostinato.backends.tape.sizes import TapeSizes
from ostinato.backends.tape.start import tape_binary, tape_headers
from ostinato.loop.layout import Layout
from ostinato.models.header import HeaderTensors, has_norm_after_block
from ostinato.models.shape import Shape
from ostinato.options import Activations, KVType


class TapeBuild(NamedTuple):
    """What the compiler is given for one model and one chip."""

    sizes: TapeSizes
    headers: dict[str, str]
    chip: Chip

    def binary(self) -> bytes:
        """A cubin or PTX, as `sizes.variant` says."""
        return tape_binary(self.headers, self.chip, {})


def tape_build(
    shape: Shape,
    tensors: HeaderTensors,
    chip: Chip,
    *,
    n_slots: int,
    context: int,
    packed: bool,
    dtype: torch.dtype = torch.bfloat16,
    kv_type: KVType = "bf16",
    activations: Activations = "wide",
) -> TapeBuild:
    """Raises HardwareCannot where the chip's shared memory is too small for `n_slots`."""
    page, matrices = PAGE_TOKENS["cuda"], matrices_of(shape, tensors, packed=packed)
    layout, after_norms = Layout(n_slots, -(-context // page), shape.vocab), has_norm_after_block(tensors)
    room = {"page_tokens": page, "max_pages": layout.max_pages}
    sizes = TapeSizes.of(shape, matrices, n_slots, chip, kv_type=kv_type, after_norms=after_norms, **room)
    has_bias = any(name.startswith("blk.0.attn_") and name.endswith(".bias") for name in tensors)
    qk_norm_eps = shape.norm_eps if "blk.0.attn_q_norm.weight" in tensors else None
    traits = Traits(dtype, dtype, has_bias, qk_norm_eps, after_norms)
    weight_types = {matrix.weight_type for matrix in matrices}
    header = shape_header(shape, traits, sizes, shape.vocab, kv_type, weight_types, activations)
    return TapeBuild(sizes, tape_headers(header, layout, page), chip)
