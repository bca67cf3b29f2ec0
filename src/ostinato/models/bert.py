"""bert, xlm-roberta and nomic-bert: encoders, whose rows see the whole text; for embeddings, and with a head for
ranking.

Norms come after each block. bert adds a learned position and which of two texts a token is of; xlm-roberta's positions
begin behind that of padding, and in GGUF it is a bert; nomic-bert uses RoPE and a gated MLP. Pooling is what the file
says: GGUF's `pooling_type`, or the folder's `1_Pooling/config.json` (`pooling.py`); mean where neither does, and rank
where there is a head for it.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ostinato.errors import BadFile, Unsupported
from ostinato.models import rope as ropes
from ostinato.models.blocks import MLP, PostNormLayer
from ostinato.models.builder import Builder
from ostinato.models.family import BUFFERS, Family
from ostinato.models.fields import Description
from ostinato.models.pooling import pooling_of_folder, pooling_of_gguf
from ostinato.models.rope import Rope
from ostinato.models.shape import Shape, activation_from_config, alike, common_from_gguf, limited
from ostinato.models.tensors import Transform

NOMIC_BASE = 1000.0
FIRST_POSITION = 2  # of a text in xlm-roberta's table: positions count from the id of padding


# Shapes


def encoder_from_gguf(f: Description) -> Shape:
    if f.flag("attention.causal", False):
        raise Unsupported(f"{f.path}: a {f.family} that reads in one direction only is not supported")
    shape = common_from_gguf(f)
    heads = [f.tensors[name] for name in ("cls.output.weight", "cls.weight") if name in f.tensors]
    return replace(
        shape,
        norm_eps=f.positive("attention.layer_norm_epsilon", 1e-12),
        causal=False,
        pooling=pooling_of_gguf(f, ranks=bool(heads)),
        normalise=True,
        n_classes=heads[0].shape[0] if heads else None,
        tied_head=False,
    )


def bert_from_gguf(f: Description) -> Shape:
    shape = encoder_from_gguf(f).with_attention(rope=None)
    return replace(shape, activation="gelu", attention_bias=True, mlp_bias=True)


def encoder_from_config(
    c: Description, rope: Rope | None, sizes: dict[str, Any], out: str = "classifier.weight"
) -> Shape:
    """`out`: the last tensor of a ranking head."""
    limited(sizes["n_layers"], c)
    head = c.tensors.get(out)
    ranks = c.checkpoint.architecture.endswith("ForSequenceClassification")
    if ranks and head is None:
        raise BadFile(f"{c.path}: {c.checkpoint.architecture} without a tensor {out}; the file is incomplete")
    pooling, normalise = pooling_of_folder(c.path)
    return alike(
        c.family,
        rope,
        vocab=c.integer("vocab_size"),
        causal=False,
        pooling="rank" if ranks else pooling,
        normalise=normalise,
        n_classes=head.shape[0] if ranks and head is not None else None,
        **sizes,
    )


def bert_from_config(c: Description, out: str = "classifier.weight") -> Shape:
    kind = c.word("position_embedding_type", "absolute")
    if kind != "absolute" or c.flag("is_decoder", False):
        raise Unsupported(f"{c.path}: a bert with {kind} positions or as a decoder is not supported")
    sizes = {**usual_sizes(c), "activation": activation_from_config(c) if c.has("hidden_act") else "gelu"}
    return replace(encoder_from_config(c, None, sizes, out), attention_bias=True, mlp_bias=True)


def roberta_from_config(c: Description) -> Shape:
    if c.integer("pad_token_id", 1, least=0) + 1 != FIRST_POSITION:
        raise Unsupported(f"{c.path}: an xlm-roberta whose pad_token_id is not {FIRST_POSITION - 1} is not supported")
    shape = bert_from_config(c, "classifier.out_proj.weight")
    return replace(shape, context=shape.context - FIRST_POSITION)


def usual_sizes(c: Description) -> dict[str, Any]:
    return {
        "n_layers": c.integer("num_hidden_layers"),
        "hidden": c.integer("hidden_size"),
        "n_heads": c.integer("num_attention_heads"),
        "ff_width": c.integer("intermediate_size"),
        "context": c.integer("max_position_embeddings"),
        "norm_eps": c.positive("layer_norm_eps", 1e-12),
    }


def nomic_from_config(c: Description) -> Shape:
    if not c.has("n_embd"):
        return nomic_as_transformers_writes_it(c)
    refused = ("moe_every_n_layers", "prenorm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm",
               "rotary_emb_interleaved", "rotary_emb_scale_base", "rotary_scaling_factor")  # fmt: skip
    if stated := [key for key in refused if c.raw(key)]:
        raise Unsupported(f"{c.path}: a nomic-bert with {', '.join(stated)} is not supported")
    if c.word("activation_function", "swiglu") != "swiglu" or c.positive("rotary_emb_fraction", 1.0) != 1:
        raise Unsupported(f"{c.path}: a nomic-bert without swiglu or with partly turned heads is not supported")
    hidden, n_heads = c.integer("n_embd"), c.integer("n_head")
    sizes = {
        "n_layers": c.integer("n_layer"),
        "hidden": hidden,
        "n_heads": n_heads,
        "ff_width": c.integer("n_inner", 4 * hidden),
        # Beyond its trained context, its authors use other RoPE angles.
        "context": min(c.integer("n_positions"), c.integer("max_trained_positions", 2048)),
        "norm_eps": c.positive("layer_norm_epsilon", 1e-12),
    }
    rope = Rope(c.positive("rotary_emb_base", NOMIC_BASE), max(1, hidden // n_heads), "halves")
    return encoder_from_config(c, rope, sizes)


def nomic_as_transformers_writes_it(c: Description) -> Shape:
    sizes = usual_sizes(c)
    hidden, n_heads = sizes["hidden"], sizes["n_heads"]
    if c.integer("head_dim", hidden // n_heads) * n_heads != hidden:
        raise Unsupported(f"{c.path}: a nomic-bert whose heads are not as wide as its rows is not supported")
    rope = ropes.from_config(c, max(1, hidden // n_heads), default_base=NOMIC_BASE)
    return encoder_from_config(c, rope, {**sizes, "activation": activation_from_config(c)})


# Blocks


def layer(b: Builder, i: int, mlp: Callable[[Builder, int], MLP]) -> PostNormLayer:
    return PostNormLayer(
        attention=b.attention(i, fused=b.names.has(f"blk.{i}.attn_qkv.weight")),
        attention_norm=b.norm(f"blk.{i}.attn_output_norm", bias=True),
        mlp=mlp(b, i),
        mlp_norm=b.norm(f"blk.{i}.layer_output_norm", bias=True),
    )


# Names


def with_prefix(prefix: str, stems: dict[str, str]) -> dict[str, str]:
    """The names as a bare model has them, and as one inside another: with the inner model's name before them."""
    head = {f"{before}pooler.dense": "cls" for before in ("", prefix)} | {"classifier": "cls.output"}
    return {**stems, **{prefix + stem: ours for stem, ours in stems.items()}, **head}


BERT_STEMS = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "encoder.layer.*.attention.self.query": "blk.*.attn_q",
    "encoder.layer.*.attention.self.key": "blk.*.attn_k",
    "encoder.layer.*.attention.self.value": "blk.*.attn_v",
    "encoder.layer.*.attention.output.dense": "blk.*.attn_output",
    "encoder.layer.*.attention.output.LayerNorm": "blk.*.attn_output_norm",
    "encoder.layer.*.intermediate.dense": "blk.*.ffn_up",
    "encoder.layer.*.output.dense": "blk.*.ffn_down",
    "encoder.layer.*.output.LayerNorm": "blk.*.layer_output_norm",
}
NOMIC_STEMS = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "token_embd_norm",
    "encoder.layers.*.attn.Wqkv": "blk.*.attn_qkv",
    "encoder.layers.*.attn.out_proj": "blk.*.attn_output",
    "encoder.layers.*.norm1": "blk.*.attn_output_norm",
    "encoder.layers.*.mlp.fc11": "blk.*.ffn_up",
    "encoder.layers.*.mlp.fc12": "blk.*.ffn_gate",
    "encoder.layers.*.mlp.fc2": "blk.*.ffn_down",
    "encoder.layers.*.norm2": "blk.*.layer_output_norm",
}
ROBERTA_HEAD = {"classifier.dense": "cls", "classifier.out_proj": "cls.output"}
BEHIND_PADDING = Transform(lambda ours: (ours[0] + FIRST_POSITION, *ours[1:]), lambda rows: rows[FIRST_POSITION:])
# Heads that predict masked words or the next sentence: not used here.
OTHER_HEADS = re.compile(BUFFERS.pattern + r"|cls\.(predictions|seq_relationship)\..*|lm_head\..*")

BERT = Family(
    "bert",
    partial(layer, mlp=Builder.plain_mlp),
    hf=("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    shape_from_gguf=bert_from_gguf,
    shape_from_config=bert_from_config,
    names=with_prefix("bert.", BERT_STEMS),
    ignored=OTHER_HEADS,
    model=partial(Builder.encoder, learned_positions=True),
)

XLM_ROBERTA = Family(
    "xlm-roberta",
    partial(layer, mlp=Builder.plain_mlp),
    hf=("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
    in_gguf=False,
    shape_from_config=roberta_from_config,
    names=with_prefix("roberta.", BERT_STEMS) | ROBERTA_HEAD,
    config_transforms={"position_embd.weight": BEHIND_PADDING},
    ignored=OTHER_HEADS,
    model=partial(Builder.encoder, learned_positions=True),
)

NOMIC_BERT = Family(
    "nomic-bert",
    partial(layer, mlp=Builder.gated_mlp),
    hf=("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForSequenceClassification"),
    shape_from_gguf=encoder_from_gguf,
    shape_from_config=nomic_from_config,
    names=with_prefix("nomic_bert.", NOMIC_STEMS),
    ignored=OTHER_HEADS,
    model=Builder.encoder,
)
