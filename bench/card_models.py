"""The models whose kernels `bench/cards.py` compiles: some of every family that the CUDA backend runs.

Families, and what can be turned on in one, come from the tiny models that tests compare with transformers, so that a
new family is here with them. Its widths, which decide what a kernel takes of a chip, are those that transformers gives
its configuration by default: a published model's, for nearly all. Some well-known models are here by their own sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from ostinato.backends.cuda.backend import why_not_blocks
from ostinato.models.gemma import two_ropes
from ostinato.models.named_shapes import SHAPES
from ostinato.models.rope import Rope
from ostinato.models.shape import Shape, alike


def _shape(family: str, hidden: int, heads: tuple[int, int, int], ff_width: int, vocab: int, **more: Any) -> Shape:
    n_heads, n_kv_heads, width = heads
    sizes = {"hidden": hidden, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_width": width, "vocab": vocab}
    rope = Rope(10_000.0, width, "halves")
    return alike(family, rope, n_layers=2, ff_width=ff_width, context=4096, norm_eps=1e-6, **{**sizes, **more})


_GEMMA: Final = {"activation": "gelu_tanh", "tied_head": True, "embedding_scale": 48.0}
# Sizes that are run often and are no default of transformers.
WELL_KNOWN: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        **{name: shape for name, shape in SHAPES.items() if not name.startswith("tiny")},
        "qwen2-7b": _shape("qwen2", 3584, (28, 4, 128), 18_944, 152_064, attention_bias=True),
        "qwen2-0.5b": _shape("qwen2", 896, (14, 2, 64), 4864, 151_936, attention_bias=True, tied_head=True),
        "qwen3-0.6b": _shape("qwen3", 1024, (16, 8, 128), 3072, 151_936, tied_head=True),
        "gemma3-1b": two_ropes(
            _shape("gemma3", 1152, (4, 1, 256), 6912, 262_144, **_GEMMA).with_attention(window=(512, None)),
            Rope(1_000_000.0, 256, "halves"),
            10_000.0,
        ),
    }
)
# What the defaults of a family lack: a layer of each kind, or widths that heads and blocks of packed weights can have.
_MIXER: Final = {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "head_dim": 128}
_TWO_KINDS: Final = ["linear_attention", "full_attention"]
PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "deepseek2": {  # DeepSeek V2 Lite
            **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102_400},
            **{"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "intermediate_size": 10_944, "moe_intermediate_size": 1408, "n_routed_experts": 64},
            **{"num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "greedy"},
        },
        # A quarter of its experts: all of them in float32 are more than a host lends addresses for.
        "deepseek2 of DeepseekV3ForCausalLM": {"n_routed_experts": 64},
        "glm4moe": {"head_dim": 128},
        "granitehybrid": {"layer_types": _TWO_KINDS, "num_hidden_layers": 2},
        "granitehybrid of BambaForCausalLM": {"attn_layer_indices": [1], "num_hidden_layers": 2},
        "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
        "lfm2moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
        "nemotron_h": {
            **_MIXER,
            **{"hidden_size": 4480, "intermediate_size": 15_680, "mamba_num_heads": 128, "mamba_head_dim": 80},
            **{"layers_block_type": ["linear_attention", "mlp", "full_attention"], "num_attention_heads": 40},
        },
        "nemotron_h_moe": {
            **_MIXER,
            **{"hidden_size": 2688, "layers_block_type": ["linear_attention", "moe", "full_attention"]},
            **{"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856},
            **{"moe_shared_expert_intermediate_size": 3712, "num_key_value_heads": 2},
        },
    }
)


@cache
def models() -> Mapping[str, Shape]:
    """Shapes by name, with as many layers as it takes to have one of each kind; of equal ones the first."""
    found: dict[Shape, str] = {}
    for name, shape in {**WELL_KNOWN, **dict(_of_families())}.items():
        found.setdefault(shortened(shape), name)
    return MappingProxyType({name: shape for shape, name in found.items()})


@cache
def tiny_models() -> Mapping[str, Shape]:
    """Of every family what can be turned on in it, in widths of their own."""
    from tests.families import samples

    found = {
        f"tiny {one.name}": replace(shortened(one.shape), family=family)
        for family, own in samples().items()
        for one in own
        if _runs(one.shape)
    }
    return MappingProxyType(found)


def _of_families() -> Iterator[tuple[str, Shape]]:
    from tests.families import samples
    from tests.models.stated import read

    for family, own in samples().items():
        for number, kind in enumerate(dict.fromkeys(one.kind for one in own if _runs(one.shape))):
            name = family if number == 0 else f"{family} of {kind}"
            _, shape = read(kind, PUBLISHED.get(name, {}))
            yield name, replace(shape, family=family)


def _runs(shape: Shape) -> bool:
    return why_not_blocks(shape) is None


def shortened(shape: Shape) -> Shape:
    """Without the last layers that are like others."""
    dense = frozenset() if shape.experts is None else shape.experts.dense_layers
    kinds = [(layer, number in dense) for number, layer in enumerate(shape.layers)]
    n_layers = max(kinds.index(kind) for kind in kinds) + 1
    return replace(shape, layers=shape.layers[: max(2, n_layers)])
