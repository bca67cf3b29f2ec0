"""gemma, gemma2 and gemma3: scaled embeddings and tanh-GELU. From gemma2 on norms before and after each block, layers
that see a window and layers that see everything. gemma2 caps its scores and logits by tanh; gemma3 norms query and key
heads and has another RoPE base for its window layers. Safetensors keep a norm's weight as its distance from 1, GGUF as
it is.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ostinato.errors import Unsupported
from ostinato.models import rope as ropes
from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.pooling import pooling_of_folder, pooling_of_gguf
from ostinato.models.rope import Rope
from ostinato.models.shape import Shape, common_from_config, common_from_gguf, layer_types
from ostinato.models.tensors import PLUS_ONE

LOCAL_BASE = 10_000.0
# GGUF does not state the scale of the queries: these sizes take it from the hidden size, all others from the head.
SCALED_BY_HIDDEN = {("gemma2", 46), ("gemma3", 62)}


def gemma1_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f)
    return replace(shape, activation="gelu_tanh", embedding_scale=shape.hidden**0.5)


def causal(read: Callable[[Description], Shape]) -> Callable[[Description], Shape]:
    """How a decoder reads its shape: a folder whose rows see what follows is refused."""

    def shape(c: Description) -> Shape:
        if c.flag("use_bidirectional_attention", False):
            raise Unsupported(f"{c.path}: use_bidirectional_attention is true; such a {c.family} is not supported")
        return read(c)

    return shape


def gemma1_from_config(c: Description) -> Shape:
    shape = common_from_config(c)
    tied = c.flag("tie_word_embeddings", True)
    # Published files say gelu, which their authors' own code takes as tanh-GELU.
    return replace(shape, activation="gelu_tanh", embedding_scale=shape.hidden**0.5, tied_head=tied)


def windowed(shape: Shape, window: int, global_every: int) -> Shape:
    """Every `global_every`-th layer sees everything, the rest a window."""
    every = range(1, shape.n_layers + 1)
    return shape.with_attention(window=tuple(None if i % global_every == 0 else window for i in every))


def gemma_from_gguf(f: Description, window: int, global_every: int) -> Shape:
    """`window`: of a file that states none; 0: there is none."""
    shape = common_from_gguf(f)
    if (f.family, shape.n_layers) in SCALED_BY_HIDDEN:
        shape = shape.with_attention(query_scale=(shape.hidden / shape.widest(lambda a: a.n_heads)) ** -0.5)
    shape = replace(shape, activation="gelu_tanh", embedding_scale=shape.hidden**0.5)
    every = f.integer("attention.sliding_window_pattern", global_every)
    window = f.integer("attention.sliding_window", window, least=0)
    return windowed(shape, window, every) if window else shape


def gemma2_from_gguf(f: Description) -> Shape:
    shape = gemma_from_gguf(f, 4096, global_every=2)
    shape = shape.with_attention(softcap=f.positive("attn_logit_softcapping", 50.0))
    return replace(shape, logit_softcap=f.positive("final_logit_softcapping", 30.0))


def gemma3_from_gguf(f: Description) -> Shape:
    shape = gemma_from_gguf(f, 0, global_every=6)  # Rnj-1 sees everything in every layer
    whole = ropes.from_gguf(f, shape.widest(lambda a: a.head_width), "halves", default_base=1_000_000.0)
    cap = f.positive("final_logit_softcapping") if f.has("final_logit_softcapping") else None
    return replace(two_ropes(shape, whole, f.positive("rope.freq_base_swa", LOCAL_BASE)), logit_softcap=cap)


def two_ropes(shape: Shape, whole: Rope, local_base: float) -> Shape:
    """With the usual rope of layers that see a window, which is not scaled."""
    return with_ropes(shape, whole, Rope(local_base, whole.width, whole.pairing))


def with_ropes(shape: Shape, whole: Rope, local: Rope) -> Shape:
    return shape.with_attention(rope=tuple(whole if a.window is None else local for a in shape.attention.values()))


def gemma_from_config(c: Description, global_every: int) -> Shape:
    shape = common_from_config(c)
    window = c.integer("sliding_window", 4096)
    if c.has("layer_types"):
        kinds = layer_types(c, shape.n_layers)
        shape = shape.with_attention(window=tuple(window if k == "sliding_attention" else None for k in kinds))
    else:
        shape = windowed(shape, window, c.integer("sliding_window_pattern", global_every))
    cap, width = "final_logit_softcapping", shape.widest(lambda a: a.head_width)
    return replace(
        shape.with_attention(query_scale=c.positive("query_pre_attn_scalar", width) ** -0.5),
        embedding_scale=shape.hidden**0.5,
        logit_softcap=c.positive(cap) if c.has(cap) else None,
        tied_head=c.flag("tie_word_embeddings", True),
    )


def gemma2_from_config(c: Description) -> Shape:
    shape = gemma_from_config(c, global_every=2)
    cap = "attn_logit_softcapping"
    return shape.with_attention(softcap=c.positive(cap) if c.has(cap) else None)


def gemma3_from_config(c: Description) -> Shape:
    shape = gemma_from_config(c, global_every=6)
    width = shape.widest(lambda a: a.head_width)
    whole = ropes.from_config(c, width, kind="full_attention", default_base=1_000_000.0)
    usual = Rope(c.positive("rope_local_base_freq", LOCAL_BASE), whole.width, whole.pairing)
    return with_ropes(shape, whole, ropes.of_windows(c, width, usual))


def embedding_from_gguf(f: Description) -> Shape:
    return seeing_both_sides(gemma3_from_gguf(f), pooling_of_gguf(f, ranks=False), normalise=True)


def embedding_from_config(c: Description) -> Shape:
    if not c.flag("use_bidirectional_attention", False):
        raise Unsupported(f"{c.path}: a Gemma3TextModel whose rows do not see what follows is not supported")
    return seeing_both_sides(gemma3_from_config(c), *pooling_of_folder(c.path))


def seeing_both_sides(shape: Shape, pooling: str, normalise: bool) -> Shape:
    """An encoder with gemma's layers; half of a window is to either side."""
    windows = tuple(None if a.window is None else a.window // 2 + 1 for a in shape.attention.values())
    made = replace(shape, causal=False, pooling=pooling, normalise=normalise, tied_head=False, logit_softcap=None)
    return made.with_attention(window=windows)


NAMES = {
    **COMMON_NAMES,
    "model.layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "model.layers.*.pre_feedforward_layernorm": "blk.*.ffn_norm",
    "model.layers.*.post_feedforward_layernorm": "blk.*.post_ffw_norm",
}
NORMS = {
    f"{name}.weight": PLUS_ONE
    for name in (
        "output_norm", "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm",
    )
}  # fmt: skip

GEMMA = Family(
    "gemma",
    hf=("GemmaForCausalLM",),
    config_defaults={"head_dim": 256},
    shape_from_gguf=gemma1_from_gguf,
    shape_from_config=causal(gemma1_from_config),
    config_transforms=NORMS,
)

GEMMA2 = Family(
    "gemma2",
    partial(Builder.layer, sandwich=True),
    hf=("Gemma2ForCausalLM",),
    config_defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    shape_from_gguf=gemma2_from_gguf,
    shape_from_config=causal(gemma2_from_config),
    names=NAMES,
    config_transforms=NORMS,
)

GEMMA3_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_208,
}

GEMMA3 = Family(
    "gemma3",
    partial(Builder.layer, qk_norm=True, sandwich=True),
    hf=("Gemma3ForCausalLM",),
    text_types=("gemma3_text",),
    config_defaults=GEMMA3_DEFAULTS,
    shape_from_gguf=gemma3_from_gguf,
    shape_from_config=causal(gemma3_from_config),
    names=NAMES,
    config_transforms=NORMS,
)

# embeddinggemma: gemma3's blocks, whose rows see both what precedes and what follows; products behind the pooling.
GEMMA_EMBEDDING = Family(
    "gemma-embedding",
    partial(Builder.layer, qk_norm=True, sandwich=True),
    hf=("Gemma3TextModel",),
    config_defaults={**GEMMA3_DEFAULTS, "rms_norm_eps": 1e-6},
    shape_from_gguf=embedding_from_gguf,
    shape_from_config=embedding_from_config,
    names=NAMES,
    config_transforms=NORMS,
    model=partial(Builder.encoder, first_norm=None, last_norm=False),
)
