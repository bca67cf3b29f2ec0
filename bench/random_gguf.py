"""A named shape with random weights as a GGUF file without a vocabulary, for an engine that needs a file."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.lab.random_weights import RandomFile
from ostinato.models.named_shapes import named_shape


def random_gguf(shape_name: str, type: str, folder: Path) -> Path:
    """The file of a llama shape in `folder`; made if it is not there."""
    import gguf

    out = folder / f"{shape_name}-{type}.gguf"
    if out.exists():
        return out
    file = RandomFile(named_shape(shape_name), type)
    shape = file.shape
    (heads,) = set(shape.attention.values())
    rope = heads.rope
    assert shape.family == "llama"
    assert rope is not None
    half_made = out.with_suffix(".part")
    writer: Any = gguf.GGUFWriter(half_made, "llama")
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.widest_ff)
    writer.add_head_count(heads.n_heads)
    writer.add_head_count_kv(heads.n_kv_heads)
    writer.add_rope_dimension_count(rope.width)
    writer.add_rope_freq_base(rope.base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_tokenizer_model("none")
    for info in file.tensors.values():
        stored = gguf.GGMLQuantizationType[info.type]
        row_bytes = info.n_bytes // prod(info.shape[:-1])
        writer.add_tensor_info(info.name, (*info.shape[:-1], row_bytes), np.dtype("uint8"), info.n_bytes, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for info in file.tensors.values():
        writer.write_tensor_data(file.raw(info.name).view("uint8").reshape(*info.shape[:-1], -1))
    writer.close()
    half_made.rename(out)
    return out
