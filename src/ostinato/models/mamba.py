"""mamba and mamba2: layers that remember by a state of fixed size; no attention, no feed-forward block.

falcon-mamba is mamba with its step, b and c normed. Safetensors keep the rates of decay as logarithms, GGUF as they
are; both keep mamba2's last norm by groups, each of which is normed alone.
"""

import math
from dataclasses import replace
from typing import Any

from ostinato.errors import BadFile
from ostinato.models.family import Family
from ostinato.models.fields import Description, Fields
from ostinato.models.shape import (
    LayerShape,
    Mamba2Shape,
    MambaShape,
    RecurrentShape,
    Shape,
    limited,
    only_silu,
    vocab_rows,
)
from ostinato.models.tensors import CHANNELS, COLUMN, FLAT, MINUS_EXP

# Their authors state no longest sequence: a state does not grow. The same number as in GGUF files.
CONTEXT = 2**20


def without_attention(family: str, recurrent: RecurrentShape, n_layers: int, **sizes: Any) -> Shape:
    """What all recurrent models have in common."""
    layers = (LayerShape(recurrent=recurrent),) * n_layers
    return Shape(family=family, layers=layers, **{"context": CONTEXT, "wide_residual": True, **sizes})


def recurrent_from_gguf(f: Description, recurrent: RecurrentShape) -> Shape:
    n_layers = limited(f.integer("block_count"), f)
    return without_attention(
        f.family,
        recurrent,
        n_layers,
        hidden=f.integer("embedding_length"),
        vocab=vocab_rows(f),
        norm_eps=f.positive("attention.layer_norm_rms_epsilon", 1e-5),
        context=f.integer("context_length", CONTEXT),
        tied_head="output.weight" not in f.tensors,
    )


def recurrent_from_config(c: Description, recurrent: RecurrentShape, *, tied: bool) -> Shape:
    only_silu(c, "mamba blocks")
    n_layers = limited(c.integer("num_hidden_layers"), c)
    return without_attention(
        c.family,
        recurrent,
        n_layers,
        hidden=c.integer("hidden_size"),
        vocab=c.integer("vocab_size"),
        norm_eps=c.positive("layer_norm_epsilon", 1e-5),
        tied_head=c.flag("tie_word_embeddings", tied),
        wide_residual=c.flag("residual_in_fp32", True),
    )


def mamba_from_gguf(f: Description) -> Shape:
    normed = f.flag("ssm.dt_b_c_rms", False)
    mamba = MambaShape(
        inner=f.integer("ssm.inner_size"),
        state=f.integer("ssm.state_size"),
        kernel=f.integer("ssm.conv_kernel"),
        dt_rank=f.integer("ssm.time_step_rank"),
        bias="blk.0.ssm_in.bias" in f.tensors,
        conv_bias="blk.0.ssm_conv1d.bias" in f.tensors,
        norm_eps=f.positive("attention.layer_norm_rms_epsilon", 1e-5) if normed else None,
    )
    return recurrent_from_gguf(f, mamba)


def mamba_from_config(c: Description) -> Shape:
    hidden = c.integer("hidden_size")
    rank = c.raw("time_step_rank")
    normed = c.checkpoint.architecture == "FalconMambaForCausalLM"
    mamba = MambaShape(
        inner=c.integer("intermediate_size", int(c.positive("expand", 2) * hidden)),
        state=c.integer("state_size", 16),
        kernel=c.integer("conv_kernel", 4),
        dt_rank=math.ceil(hidden / 16) if rank in (None, "auto") else c.integer("time_step_rank"),
        bias=c.flag("use_bias", False),
        conv_bias=c.flag("use_conv_bias", True),
        norm_eps=c.positive("mixer_rms_eps", 1e-6) if normed else None,
    )
    return recurrent_from_config(c, mamba, tied=True)


def mamba2_block_from_gguf(f: Description) -> Mamba2Shape:
    """What GGUF files state of mamba2 blocks; biases and the last norm are there or not."""
    found = {name.partition(".ssm_")[2] for name in f.tensors}  # in any layer: not all of them need recur
    shape = Mamba2Shape(
        inner=f.integer("ssm.inner_size"),
        state=f.integer("ssm.state_size"),
        kernel=f.integer("ssm.conv_kernel"),
        n_heads=f.integer("ssm.time_step_rank"),  # GGUF's word for it
        n_groups=f.integer("ssm.group_count", 1),
        in_bias="in.bias" in found,
        out_bias="out.bias" in found,
        conv_bias="conv1d.bias" in found,
        gated_norm="norm.weight" in found,
    )
    return divided(shape, f)


def divided(shape: Mamba2Shape, f: Fields) -> Mamba2Shape:
    """The shape, where its channels, heads and groups go into each other."""
    if shape.inner % shape.n_heads or shape.n_heads % shape.n_groups:
        raise BadFile(
            f"{f.path}: {shape.inner} channels in {shape.n_heads} heads in {shape.n_groups} groups do not come out even"
        )
    return shape


def step_limit(c: Fields) -> tuple[float, float]:
    """config.json's `time_step_limit`, where infinity may be a word in an object."""
    stated = c.raw("time_step_limit")
    if stated is None:
        return (0.0, math.inf)
    plain = [v.get("__float__") if isinstance(v, dict) else v for v in stated] if isinstance(stated, list) else []
    limit = [math.inf if v == "Infinity" else v for v in plain if isinstance(v, (int, float)) or v == "Infinity"]
    if len(limit) != 2 or len(plain) != 2 or not 0 <= limit[0] <= limit[1] or 2**128 <= limit[1] < math.inf:
        raise BadFile(f"{c.path}: time_step_limit is {stated!r}; it must be two numbers, the smaller first")
    return float(limit[0]), float(limit[1])


def mamba2_from_gguf(f: Description) -> Shape:
    return recurrent_from_gguf(f, replace(mamba2_block_from_gguf(f), gated_norm=True))


def mamba2_from_config(c: Description) -> Shape:
    n_heads, width = c.integer("num_heads", 128), c.integer("head_dim", 64)
    hidden, bias = c.integer("hidden_size"), c.flag("use_bias", False)
    if c.has("expand") and int(c.positive("expand") * hidden) != n_heads * width:
        raise BadFile(f"{c.path}: {n_heads} heads of {width} channels are not expand {c.raw('expand')} times {hidden}")
    shape = Mamba2Shape(
        inner=n_heads * width,
        state=c.integer("state_size", 128),
        kernel=c.integer("conv_kernel", 4),
        n_heads=n_heads,
        n_groups=c.integer("n_groups", 8),
        in_bias=bias,
        out_bias=bias,
        conv_bias=c.flag("use_conv_bias", True),
        dt_limit=step_limit(c),
    )
    return recurrent_from_config(c, divided(shape, c), tied=False)


def mixer_names(at: str) -> dict[str, str]:
    """A mixer's tensors, under the stem that a family gives it, as far as mamba and mamba2 call them alike."""
    return {
        f"{at}.in_proj": "blk.*.ssm_in",
        f"{at}.conv1d": "blk.*.ssm_conv1d",
        f"{at}.A_log": "blk.*.ssm_a",
        f"{at}.D": "blk.*.ssm_d",
        f"{at}.out_proj": "blk.*.ssm_out",
    }


def mixer2_names(at: str) -> dict[str, str]:
    return {**mixer_names(at), f"{at}.dt_bias": "blk.*.ssm_dt.bias", f"{at}.norm": "blk.*.ssm_norm"}


NAMES = {
    "backbone.embeddings": "token_embd",
    "backbone.embedding": "token_embd",  # in the first files
    "backbone.norm_f": "output_norm",
    "backbone.layers.*.norm": "blk.*.attn_norm",
    "lm_head": "output",
}
MAMBA_NAMES = {
    **NAMES,
    **mixer_names("backbone.layers.*.mixer"),
    "backbone.layers.*.mixer.x_proj": "blk.*.ssm_x",
    "backbone.layers.*.mixer.dt_proj": "blk.*.ssm_dt",
}
CONFIG_TRANSFORMS = {"ssm_a": MINUS_EXP, "ssm_conv1d.weight": CHANNELS, "ssm_norm.weight": FLAT}
GGUF_TRANSFORMS = {"ssm_a": COLUMN, "ssm_d": COLUMN}

MAMBA = Family(
    "mamba",
    hf=("MambaForCausalLM", "FalconMambaForCausalLM"),
    shape_from_gguf=mamba_from_gguf,
    shape_from_config=mamba_from_config,
    names=MAMBA_NAMES,
    config_transforms=CONFIG_TRANSFORMS,
)

MAMBA2 = Family(
    "mamba2",
    hf=("Mamba2ForCausalLM",),
    shape_from_gguf=mamba2_from_gguf,
    shape_from_config=mamba2_from_config,
    names={**NAMES, **mixer2_names("backbone.layers.*.mixer")},
    gguf_transforms=GGUF_TRANSFORMS,
    config_transforms=CONFIG_TRANSFORMS,
)
