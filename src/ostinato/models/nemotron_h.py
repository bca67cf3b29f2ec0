"""nemotron_h and nemotron_h_moe: a layer is a mamba2 block, attention without positions, or an MLP with squared ReLU
and no gate; or experts of that kind, chosen by sigmoids, beside a shared one, perhaps in a narrower space."""

from dataclasses import replace

from ostinato.errors import BadFile, Unsupported
from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.experts import DEEPSEEK_EPSILON, deepseek_from_config, experts_from_gguf
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.mamba import CONFIG_TRANSFORMS, GGUF_TRANSFORMS, divided, mamba2_block_from_gguf, mixer2_names
from ostinato.models.shape import (
    ExpertShape,
    LayerShape,
    Mamba2Shape,
    Shape,
    activation_from_config,
    common_from_config,
    common_from_gguf,
    with_biases,
)

MAMBA2, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
# What config.json calls a layer, newer and older names.
KINDS = {
    **{"linear_attention": MAMBA2, "mamba": MAMBA2},
    **{"full_attention": ATTENTION, "attention": ATTENTION},
    **{"mlp": MLP, "moe": EXPERTS},
}


def shape_from_gguf(f: Description) -> Shape:
    shape = with_biases(common_from_gguf(f), f).with_attention(rope=None)
    mamba2 = replace(mamba2_block_from_gguf(f), gated_norm=True)
    recurs = {i for i, one in enumerate(shape.layers) if one.attention is None and not one.ff_width}
    return replace(shape.with_recurrent_in(recurs, mamba2), activation="relu2")


def moe_from_gguf(f: Description) -> Shape:
    shape = shape_from_gguf(f)
    dense = frozenset(i for i, one in enumerate(shape.layers) if not one.ff_width)
    known = {"dense_layers": dense, "scoring": "sigmoid", "choice_bias": True, "gated": False}
    latent = f.integer("moe_latent_size", 0, least=0) or None
    return replace(
        shape, experts=experts_from_gguf(f, shape.n_layers, latent_width=latent, sum_epsilon=DEEPSEEK_EPSILON, **known)
    )


def experts_from_config(c: Description, pattern: str) -> ExpertShape | None:
    if EXPERTS not in pattern:
        return None
    return replace(
        deepseek_from_config(c, len(pattern)),
        dense_layers=frozenset(i for i, letter in enumerate(pattern) if letter != EXPERTS),
        gated=False,
        shared_width=c.integer("moe_shared_expert_intermediate_size", 7688, least=0),
        latent_width=c.integer("moe_latent_size", 0, least=0) or None,
    )


def shape_from_config(c: Description) -> Shape:
    pattern = pattern_from_config(c)
    n_heads, width = c.integer("mamba_num_heads", 128), c.integer("mamba_head_dim", 64)
    bias = c.flag("use_bias", False)
    if activation_from_config(c, c.word("mamba_hidden_act", "silu")) != "silu":
        raise Unsupported(
            f"{c.path}: mamba_hidden_act is {c.word('mamba_hidden_act')!r}; mamba2 blocks have silu alone"
        )
    mamba2 = Mamba2Shape(
        inner=n_heads * width,
        state=c.integer("ssm_state_size", 128),
        kernel=c.integer("conv_kernel", 4, least=2),
        n_heads=n_heads,
        n_groups=c.integer("n_groups", 8),
        in_bias=bias,
        out_bias=bias,
        conv_bias=c.flag("use_conv_bias", True),
        dt_limit=(c.number("time_step_min", 0.001), float("inf")),
    )
    mamba2 = divided(mamba2, c)
    # The list of layers says how many there are.
    stated = replace(c, values={"head_dim": 128, **c.values, "num_hidden_layers": len(pattern)})
    usual = common_from_config(stated).with_attention(rope=None)
    attention, ff_width = usual.layers[0].attention, usual.widest_ff
    kinds = {
        MAMBA2: LayerShape(recurrent=mamba2),
        ATTENTION: LayerShape(attention),
        MLP: LayerShape(ff_width=ff_width),
        EXPERTS: LayerShape(),
    }
    return replace(
        usual,
        layers=tuple(kinds[letter] for letter in pattern),
        norm_eps=c.positive("layer_norm_epsilon", 1e-5),
        activation=activation_from_config(c, c.word("mlp_hidden_act", "relu2")),
        attention_bias=False,  # stated, and not used
        experts=experts_from_config(c, pattern),
    )


def pattern_from_config(c: Description) -> str:
    """A letter for each layer."""
    key = "hybrid_override_pattern"
    if c.has(key):
        pattern = c.word(key)
    else:
        key = "layer_types" if c.has("layer_types") else "layers_block_type"
        stated = c.raw(key)
        pattern = "".join(KINDS.get(str(kind), "?") for kind in stated) if isinstance(stated, list) else ""
    if not pattern or set(pattern) - set(KINDS.values()):
        raise BadFile(
            f"{c.path}: {key} is {str(c.raw(key))[:80]!r}; it must name layers of mamba2, attention, MLPs and experts"
        )
    return pattern


def layer(b: Builder, i: int) -> Layer:
    own, experts = b.shape.layers[i], b.shape.experts
    if own.attention is not None or own.recurrent is not None:
        return b.layer(i)
    routed = experts is not None and i not in experts.dense_layers
    # One norm, of whatever the layer is.
    return Layer(mlp_norm=b.norm(f"blk.{i}.attn_norm"), mlp=b.experts(i) if routed else b.plain_mlp(i))


NAMES = {
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    "layers.*.norm": "blk.*.attn_norm",
    **mixer2_names("layers.*.mixer"),
    "layers.*.mixer.q_proj": "blk.*.attn_q",
    "layers.*.mixer.k_proj": "blk.*.attn_k",
    "layers.*.mixer.v_proj": "blk.*.attn_v",
    "layers.*.mixer.o_proj": "blk.*.attn_output",
    "layers.*.mixer.up_proj": "blk.*.ffn_up",
    "layers.*.mixer.down_proj": "blk.*.ffn_down",
    "layers.*.mixer.gate": "blk.*.ffn_gate_inp",
    "layers.*.mixer.gate.e_score_correction_bias": "blk.*.exp_probs_b.bias",
    "layers.*.mixer.experts.*.up_proj": "blk.*.ffn_up.*",
    "layers.*.mixer.experts.*.down_proj": "blk.*.ffn_down.*",
    "layers.*.mixer.shared_experts.up_proj": "blk.*.ffn_up_shexp",
    "layers.*.mixer.shared_experts.down_proj": "blk.*.ffn_down_shexp",
    "layers.*.mixer.fc1_latent_proj": "blk.*.ffn_latent_down",
    "layers.*.mixer.fc2_latent_proj": "blk.*.ffn_latent_up",
}

NEMOTRON_H = Family(
    "nemotron_h",
    layer,
    hf=("NemotronHForCausalLM",),
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        "lm_head": "output",
        **{f"{at}.{name}": ours for at in ("model", "backbone") for name, ours in NAMES.items()},
    },
    gguf_transforms=GGUF_TRANSFORMS,
    config_transforms=CONFIG_TRANSFORMS,
)

NEMOTRON_H_MOE = Family("nemotron_h_moe", layer, shape_from_gguf=moe_from_gguf, gguf_transforms=GGUF_TRANSFORMS)
