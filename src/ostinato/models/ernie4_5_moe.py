"""ernie4_5-moe: ernie4_5 with experts whose choice has a bias of its own, beside a shared block without a gate."""

from dataclasses import replace

from ostinato.models import ernie4_5
from ostinato.models.experts import EXPERT_NAMES, experts_from_gguf, shared_names
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.shape import ExpertShape, Shape
from ostinato.models.tensors import IN_A_ROW

LEAST_SUM = 1e-12  # that shares are divided by, where a folder does not say


def dense_layers(n_layers: int, first: int, last: int, every: int) -> frozenset[int]:
    return frozenset(i for i in range(n_layers) if not first <= i <= last or (i + 1) % every)


def shape_from_gguf(f: Description) -> Shape:
    shape = ernie4_5.shape_from_gguf(f)
    first, every = f.integer("leading_dense_block_count", 0, least=0), f.integer("interleave_moe_layer_step", 1)
    dense = dense_layers(shape.n_layers, first, shape.n_layers, every)
    biased = any(name.endswith(".exp_probs_b.bias") for name in f.tensors)
    known = {"renormalise": True, "dense_layers": dense, "choice_bias": biased, "least_sum": LEAST_SUM}
    return replace(shape, experts=experts_from_gguf(f, shape.n_layers, **known))


def shape_from_config(c: Description) -> Shape:
    shape = ernie4_5.shape_from_config(c)
    width = c.integer("moe_intermediate_size")
    last = c.integer("moe_layer_end_index", -1, least=-1)
    experts = ExpertShape(
        c.integer("moe_num_experts"),
        c.integer("moe_k"),
        width,
        renormalise=True,
        dense_layers=dense_layers(
            shape.n_layers,
            c.integer("moe_layer_start_index", 0, least=0),
            shape.n_layers if last < 0 else last,
            c.integer("moe_layer_interval", 1),
        ),
        choice_bias=True,
        least_sum=c.positive("moe_norm_min", LEAST_SUM),
        shared_width=width * c.integer("moe_num_shared_experts", 0, least=0),
    )
    return replace(shape, experts=experts)


ERNIE4_5_MOE = Family(
    "ernie4_5-moe",
    hf=("Ernie4_5_MoeForCausalLM",),
    config_defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 2,
    },
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        **EXPERT_NAMES,
        **shared_names("shared_experts"),
        "model.layers.*.mlp.moe_statics.e_score_correction_bias": "blk.*.exp_probs_b.bias",
    },
    gguf_transforms={"exp_probs_b.bias": IN_A_ROW},
    config_transforms={"exp_probs_b.bias": IN_A_ROW},
)
