"""qwen2: llama's blocks with biases on query, key and value, and rotary pairs as halves in both formats."""

from dataclasses import replace

from ostinato.files.checkpoint import Checkpoint
from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Fields
from ostinato.models.shape import Shape, common_from_config, common_from_gguf, everywhere, windows_from_config


def shape_from_gguf(checkpoint: Checkpoint) -> Shape:
    return replace(common_from_gguf(checkpoint, "qwen2", "halves"), attention_bias=True)


def shape_from_config(checkpoint: Checkpoint) -> Shape:
    return replace(without_unused_window(checkpoint, common_from_config(checkpoint, "qwen2")), attention_bias=True)


def without_unused_window(checkpoint: Checkpoint, shape: Shape) -> Shape:
    """Qwen's config.json names a window even where use_sliding_window, false when absent, turns it off."""
    c = Fields(checkpoint.metadata, checkpoint.path)
    if c.flag("use_sliding_window", False):
        return replace(shape, windows=windows_from_config(c, shape.n_layers, first_windowed=28))
    return replace(shape, windows=everywhere(None, shape.n_layers))


def layer(b: Builder, i: int) -> Layer:
    return Layer(
        attention_norm=b.norm(f"blk.{i}.attn_norm"),
        attention=b.attention(i, out_bias=False),
        mlp_norm=b.norm(f"blk.{i}.ffn_norm"),
        mlp=b.gated_mlp(i),
    )


QWEN2 = Family(
    "qwen2",
    layer,
    gguf="qwen2",
    hf=("Qwen2ForCausalLM",),
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
)
