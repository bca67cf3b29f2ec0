"""falcon-h1: in every layer attention and a mamba2 block side by side, then a gated feed-forward block.

Its config.json states fixed factors on the embedding, the keys, the head and what goes into or comes out of nearly
every product. GGUF files hold the weights with those factors multiplied in, and state none.
"""

from dataclasses import replace

from ostinato.errors import BadFile
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description, Fields
from ostinato.models.mamba import (
    CONFIG_TRANSFORMS,
    GGUF_TRANSFORMS,
    divided,
    mamba2_block_from_gguf,
    mixer2_names,
    step_limit,
)
from ostinato.models.shape import (
    Mamba2Shape,
    Multipliers,
    Shape,
    common_from_config,
    common_from_gguf,
    only_silu,
    with_biases,
)


def shape_from_gguf(f: Description) -> Shape:
    return with_biases(common_from_gguf(f), f).with_layers(recurrent=mamba2_block_from_gguf(f))


def shape_from_config(c: Description) -> Shape:
    only_silu(c, "mamba blocks")
    shape = common_from_config(c)
    embedding, keys = c.number("embedding_multiplier", 1.0), c.number("key_multiplier", 1.0)
    scales = tuple(a.query_scale * keys for a in shape.attention.values())  # on the scores, it is the same
    return replace(
        shape.with_attention(query_scale=scales).with_layers(recurrent=mamba2_from_config(c, shape.hidden)),
        norm_eps=c.positive("rms_norm_eps", 1e-5),
        multipliers=multipliers_from_config(c),
        embedding_scale=None if embedding == 1 else embedding,
    )


def mamba2_from_config(c: Fields, hidden: int) -> Mamba2Shape:
    inner = c.integer("mamba_d_ssm", int(c.positive("mamba_expand", 2) * hidden))
    n_heads = c.integer("mamba_n_heads", 128)
    if c.raw("mamba_d_head") not in (None, "auto") and c.integer("mamba_d_head") * n_heads != inner:
        raise BadFile(f"{c.path}: {n_heads} heads of mamba_d_head {c.raw('mamba_d_head')} are not {inner} channels")
    shape = Mamba2Shape(
        inner=inner,
        state=c.integer("mamba_d_state", 256),
        kernel=c.integer("mamba_d_conv", 4),
        n_heads=n_heads,
        n_groups=c.integer("mamba_n_groups", 1),
        in_bias=c.flag("mamba_proj_bias", False),
        out_bias=c.flag("projectors_bias", False),
        conv_bias=c.flag("mamba_conv_bias", True),
        gated_norm=c.flag("mamba_rms_norm", False),
        norm_first=c.flag("mamba_norm_before_gate", True),
        dt_limit=step_limit(c),
    )
    return divided(shape, c)


def multipliers_from_config(c: Fields) -> Multipliers:
    gate, down = c.numbers("mlp_multipliers", 2) if c.has("mlp_multipliers") else (1.0, 1.0)
    parts = c.numbers("ssm_multipliers", 5) if c.has("ssm_multipliers") else (1.0,) * 5
    return Multipliers(
        attention_in=c.number("attention_in_multiplier", 1.0),
        attention_out=c.number("attention_out_multiplier", 1.0),
        mixer_in=c.number("ssm_in_multiplier", 1.0),
        mixer_out=c.number("ssm_out_multiplier", 1.0),
        mixer_parts=parts,
        ff_gate=gate,
        ff_down=down,
        head=c.number("lm_head_multiplier", 1.0),
    )


FALCON_H1 = Family(
    "falcon-h1",
    hf=("FalconH1ForCausalLM",),
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        "model.final_layernorm": "output_norm",
        "model.layers.*.pre_ff_layernorm": "blk.*.ffn_norm",
        "model.layers.*.feed_forward.gate_proj": "blk.*.ffn_gate",
        "model.layers.*.feed_forward.up_proj": "blk.*.ffn_up",
        "model.layers.*.feed_forward.down_proj": "blk.*.ffn_down",
        **mixer2_names("model.layers.*.mamba"),
        **{stem: ours for stem, ours in COMMON_NAMES.items() if ".mlp." not in stem and "post_attention" not in stem},
    },
    # The files that people have leave the last part off this one name.
    gguf_names={f"blk.*.ffn_norm{leaf}": "blk.*.ffn_norm.weight" for leaf in ("", ".weight")},
    gguf_transforms=GGUF_TRANSFORMS,
    config_transforms=CONFIG_TRANSFORMS,
)
