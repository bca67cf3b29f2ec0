"""A named shape with random weights as a GGUF file without a vocabulary, for an engine that needs a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from ostinato.lab.random_weights import RandomFile
from ostinato.models.named_shapes import named_shape
from ostinato.models.registry import family_named
from ostinato.models.shape import DeltaShape, Mamba2Shape, Shape, ShortConvShape
from ostinato.models.tensors import Transform, without_layer


def _add_lfm2(writer: Any, shape: Shape) -> None:
    (conv,) = {one for one in shape.recurrent.values() if isinstance(one, ShortConvShape)}
    writer.add_shortconv_l_cache(conv.kernel)


def _add_granite(writer: Any, shape: Shape) -> None:
    (heads,) = set(shape.attention.values())
    writer.add_embedding_scale(shape.embedding_scale)
    writer.add_residual_scale(shape.multipliers.ff_down)
    writer.add_logit_scale(1 / shape.multipliers.head)
    writer.add_attention_scale(heads.query_scale)


def _add_granite_hybrid(writer: Any, shape: Shape) -> None:
    (mamba2,) = {one for one in shape.recurrent.values() if isinstance(one, Mamba2Shape)}
    writer.add_rope_dimension_count(shape.widest(lambda one: one.head_width))
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(mamba2.kernel)
    writer.add_ssm_state_size(mamba2.state)
    writer.add_ssm_inner_size(mamba2.inner)
    writer.add_ssm_time_step_rank(mamba2.n_heads)
    writer.add_ssm_group_count(mamba2.n_groups)


def _add_qwen35(writer: Any, shape: Shape) -> None:
    (delta,) = {one for one in shape.recurrent.values() if isinstance(one, DeltaShape)}
    writer.add_head_count_kv(shape.widest(lambda one: one.n_kv_heads))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(delta.kernel)
    writer.add_ssm_state_size(delta.key_width)
    writer.add_ssm_inner_size(delta.inner)
    writer.add_ssm_time_step_rank(delta.n_heads)
    writer.add_ssm_group_count(delta.n_key_heads)
    writer.add_full_attention_interval(4)


# What a family states besides, and what its files call otherwise than we do.
_ADDED: Final[Mapping[str, Callable[[Any, Shape], None]]] = {
    "llama": lambda writer, shape: None,
    "lfm2": _add_lfm2,
    "granite": _add_granite,
    "granitehybrid": _add_granite_hybrid,
    "qwen35": _add_qwen35,
}
_RENAMED: Final[Mapping[str, tuple[str, str]]] = {
    "lfm2": ("output_norm", "token_embd_norm"),
    "qwen35": ("ffn_norm", "post_attention_norm"),
}


def random_gguf(shape_name: str, type: str, folder: Path) -> Path:
    """The file of a shape in `folder`, of llama or a family of `_ADDED`; made if it is not there."""
    import gguf

    out = folder / f"{shape_name}-{type}.gguf"
    if out.exists():
        return out
    file = RandomFile(named_shape(shape_name), type)
    shape = file.shape
    (heads,) = set(shape.attention.values())
    half_made = out.with_suffix(".part")
    writer: Any = gguf.GGUFWriter(half_made, shape.family)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.widest_ff)
    writer.add_head_count(heads.n_heads)
    if shape.family != "qwen35":
        writer.add_head_count_kv([heads.n_kv_heads if layer.attention else 0 for layer in shape.layers])
    writer.add_key_length(heads.head_width)
    writer.add_value_length(heads.head_width)
    if heads.rope is not None:
        writer.add_rope_dimension_count(heads.rope.width)
        writer.add_rope_freq_base(heads.rope.base)
    _ADDED[shape.family](writer, shape)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_tokenizer_model("none")
    transforms = family_named(shape.family).gguf_transforms
    for info in file.tensors.values():
        stored, transform = gguf.GGMLQuantizationType[info.type], transforms.get(without_layer(info.name), Transform())
        size = transform.shape(info.shape)
        row_bytes = info.n_bytes // prod(size[:-1])
        name = info.name.replace(*_RENAMED.get(shape.family, ("", "")))
        writer.add_tensor_info(name, (*size[:-1], row_bytes), np.dtype("uint8"), info.n_bytes, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for info in file.tensors.values():
        writer.write_tensor_data(file.raw(info.name).view("uint8").reshape(*info.shape[:-1], -1))
    writer.close()
    half_made.rename(out)
    return out
