"""qwen3, qwen3vl and qwen3moe: llama's blocks with an RMS norm on every query and key head, dense or with routed
experts. A qwen3 that was trained for embeddings pools as its files say; one that ranks has a head of two words in GGUF,
and in a folder a head of its own or the words of the model's (`pooling.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ostinato.errors import BadFile, Unsupported
from ostinato.models.blocks import AnyLayer, ModelBlocks
from ostinato.models.builder import Builder
from ostinato.models.experts import EXPERT_NAMES, count_from_config, dense_layers, experts_from_gguf
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.pooling import pooling_of_gguf
from ostinato.models.qwen2 import without_unused_window
from ostinato.models.shape import ExpertShape, Shape, common_from_config, common_from_gguf, sectioned
from ostinato.models.tensors import SWAPPED, Transform


def moe_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f)
    return replace(shape, experts=experts_from_gguf(f, shape.n_layers, renormalise=True))


def moe_from_config(c: Description) -> Shape:
    """A window is one of all layers: Qwen's key for those without, max_window_layers, is not used by this class."""
    windowed = c.flag("use_sliding_window", False) and c.has("sliding_window")
    window = c.integer("sliding_window") if windowed else None
    return vl_moe_from_config(c).with_attention(window=window)


def vl_moe_from_config(c: Description) -> Shape:
    shape = common_from_config(c)
    experts = ExpertShape(
        count_from_config(c, 128),
        c.integer("num_experts_per_tok", 8),
        c.integer("moe_intermediate_size", 768),
        c.flag("norm_topk_prob", False),
        dense_layers(c, shape.n_layers),
    )
    return replace(shape, experts=experts)


def qwen3_from_gguf(f: Description) -> Shape:
    """A model that ranks has the rows of `yes` and `no` of its head, whose difference says how likely yes is."""
    shape = common_from_gguf(f)
    if "cls.output.weight" not in f.tensors:
        return shape
    labels = list(f.raw("classifier.output_labels") or ())
    if labels != ["yes", "no"]:
        raise Unsupported(f"{f.path}: a {f.family} that ranks by {labels} is not supported; known: yes and no")
    return replace(shape, pooling=pooling_of_gguf(f, ranks=True), rank_by="last", n_classes=1)


def qwen3_from_config(c: Description) -> Shape:
    """A folder for classes has a head of them, which takes the last row, in place of one for words."""
    shape = without_unused_window(c)
    if not c.checkpoint.architecture.endswith("ForSequenceClassification"):
        return shape
    head = c.tensors.get("score.weight")
    if head is None:
        raise BadFile(f"{c.path}: {c.checkpoint.architecture} without a tensor score.weight; the file is incomplete")
    return replace(shape, pooling="rank", rank_by="last", n_classes=head.shape[0], tied_head=True)


def model_or_ranker(b: Builder, layers: Sequence[AnyLayer]) -> ModelBlocks:
    model, n_classes = b.model(layers), b.shape.n_classes
    return model if n_classes is None or b.shape.rank_tokens else replace(model, ranking=b.ranking(n_classes))


LAYER = partial(Builder.layer, qk_norm=True)

YES_MINUS_NO = Transform(lambda ours: (2, *ours[1:]), lambda rows: rows[:1] - rows[1:])

QWEN3 = Family(
    "qwen3",
    LAYER,
    hf=("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"),
    config_defaults={"head_dim": 128, "sliding_window": 4096},
    shape_from_gguf=qwen3_from_gguf,
    shape_from_config=qwen3_from_config,
    names={**COMMON_NAMES, "score": "cls.output"},
    gguf_transforms={"cls.output.weight": YES_MINUS_NO},
    model=model_or_ranker,
)

# The text part of Qwen3-VL. Its rotary sections are of time, height and width, which are one position in a text.
QWEN3_VL = Family(
    "qwen3vl",
    LAYER,
    text_types=("qwen3_vl_text",),
    config_defaults={"head_dim": 128, "rope_theta": 500_000.0},
    shape_from_gguf=sectioned(common_from_gguf),
    shape_from_config=sectioned(without_unused_window),
)

# The same of its sizes with experts, which a folder keeps in one tensor for all: as [expert, in, out] where its authors
# published it, as [expert, out, in] where newer tools wrote it.
QWEN3_VL_MOE = Family(
    "qwen3vlmoe",
    LAYER,
    text_types=("qwen3_vl_moe_text",),
    config_defaults={
        "num_local_experts": 60,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "rope_theta": 500_000.0,
    },
    shape_from_gguf=sectioned(moe_from_gguf),
    shape_from_config=sectioned(vl_moe_from_config),
    names={
        **COMMON_NAMES,
        "model.layers.*.mlp.gate": "blk.*.ffn_gate_inp",
        "model.layers.*.mlp.experts.gate_up_proj": "blk.*.ffn_gate_up_exps.weight",
        "model.layers.*.mlp.experts.down_proj": "blk.*.ffn_down_exps.weight",
    },
    config_transforms={
        "ffn_gate_up_exps.weight": replace(SWAPPED, unless=lambda stored, hidden: stored[2:] == (hidden,)),
        "ffn_down_exps.weight": replace(SWAPPED, unless=lambda stored, hidden: stored[1:2] == (hidden,)),
    },
)

QWEN3_MOE = Family(
    "qwen3moe",
    LAYER,
    hf=("Qwen3MoeForCausalLM",),
    config_defaults={"sliding_window": 4096},
    shape_from_gguf=moe_from_gguf,
    shape_from_config=moe_from_config,
    names={**COMMON_NAMES, **EXPERT_NAMES},
)
