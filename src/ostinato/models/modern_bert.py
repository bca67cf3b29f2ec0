"""modern-bert: an encoder with norms before its blocks, a gated MLP, RoPE of two bases, and layers that see a window to
both sides between those that see the whole text. Its layer norms have no bias, and the first layer has no norm before
its attention. Pooling is what the file says, as for `bert.py`.
"""

import re
from dataclasses import replace
from functools import partial

from ostinato.errors import Unsupported
from ostinato.models import rope as ropes
from ostinato.models.bert import encoder_from_config, encoder_from_gguf, with_prefix
from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.family import BUFFERS, Family
from ostinato.models.fields import Description
from ostinato.models.pooling import GGUF_POOLING
from ostinato.models.rope import Rope
from ostinato.models.shape import ACTIVATIONS, Shape, activation_from_config, layer_types

GLOBAL_BASE, LOCAL_BASE = 160_000.0, 10_000.0
GLOBAL_EVERY = 3


def from_gguf(f: Description) -> Shape:
    shape = encoder_from_gguf(f)
    width = shape.widest(lambda a: a.head_width)
    whole = ropes.from_gguf(f, width, "halves", default_base=GLOBAL_BASE)
    local = Rope(f.positive("rope.freq_base_swa", LOCAL_BASE), whole.width, whole.pairing)
    key, n_layers = "attention.sliding_window_pattern", shape.n_layers
    if isinstance(f.raw(key), int | None):
        sees_all = [layer % f.integer(key, GLOBAL_EVERY) == 0 for layer in range(n_layers)]
    else:
        sees_all = [not near for near in f.per_layer(key, n_layers, least=0)]
    name = f.word("hidden_act", "gelu")
    if name not in ACTIVATIONS:
        raise Unsupported(f"{f.path}: the activation {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    shape = with_windows(shape, sees_all, f.integer("attention.sliding_window", 128), whole, local)
    rank_by = GGUF_POOLING[f.integer("classifier.pooling_type", GGUF_POOLING.index("mean"), least=0) % 4]
    return replace(shape, activation=ACTIVATIONS[name], rank_by=rank_by)


def from_config(c: Description) -> Shape:
    refused = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
    if stated := [key for key in refused if c.raw(key)]:
        raise Unsupported(f"{c.path}: a modern-bert with {', '.join(stated)} is not supported")
    if c.word("classifier_activation", "gelu") != "gelu":
        raise Unsupported(f"{c.path}: a modern-bert whose classifier_activation is not gelu is not supported")
    hidden, n_heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    sizes = {
        "n_layers": c.integer("num_hidden_layers"),
        "hidden": hidden,
        "n_heads": n_heads,
        "ff_width": c.integer("intermediate_size"),
        "context": c.integer("max_position_embeddings"),
        "norm_eps": c.positive("norm_eps", 1e-5),
        "activation": activation_from_config(c) if c.has("hidden_activation") else "gelu",
    }
    width = max(1, hidden // n_heads)
    whole = ropes.from_config(
        c, width, kind="full_attention", default_base=c.positive("global_rope_theta", GLOBAL_BASE)
    )
    local = ropes.from_config(
        c, width, kind="sliding_attention", default_base=c.positive("local_rope_theta", LOCAL_BASE)
    )
    shape = encoder_from_config(c, whole, sizes)
    if c.has("layer_types"):
        sees_all = [kind == "full_attention" for kind in layer_types(c, shape.n_layers)]
    else:
        sees_all = [n % c.integer("global_attn_every_n_layers", GLOBAL_EVERY) == 0 for n in range(shape.n_layers)]
    shape = with_windows(shape, sees_all, c.integer("local_attention", 128), whole, local)
    rank_by = c.word("classifier_pooling", "cls")
    if rank_by not in ("cls", "mean"):
        raise Unsupported(f"{c.path}: classifier_pooling is {rank_by!r}; supported are cls and mean")
    return replace(shape, rank_by=rank_by)


def with_windows(shape: Shape, sees_all: list[bool], window: int, whole: Rope, local: Rope) -> Shape:
    """`window`: half of it to either side."""
    return shape.with_attention(
        window=tuple(None if everything else window // 2 + 1 for everything in sees_all),
        rope=tuple(whole if everything else local for everything in sees_all),
    )


def layer(b: Builder, i: int) -> Layer:
    made = b.layer(i, norm_bias="zero", fused=True, mlp=partial(Builder.gated_mlp, fused="ffn_up"))
    has_norm = i > 0 or b.names.has("blk.0.attn_norm.weight")
    return made if has_norm else replace(made, attention_norm=None)


STEMS = {
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "layers.*.attn_norm": "blk.*.attn_norm",
    "layers.*.attn.Wqkv": "blk.*.attn_qkv",
    "layers.*.attn.Wo": "blk.*.attn_output",
    "layers.*.mlp_norm": "blk.*.ffn_norm",
    "layers.*.mlp.Wi": "blk.*.ffn_up",
    "layers.*.mlp.Wo": "blk.*.ffn_down",
    "final_norm": "output_norm",
    "head.dense": "cls",
    "head.norm": "cls.norm",
}

MODERN_BERT = Family(
    "modern-bert",
    layer,
    hf=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    shape_from_gguf=from_gguf,
    shape_from_config=from_config,
    names=with_prefix("model.", STEMS),
    ignored=re.compile(BUFFERS.pattern + r"|decoder\..*"),
    model=partial(Builder.encoder, first_norm="zero", last_norm="zero"),
)
