"""What the tape says that it cannot play, from a model's header alone, and what it counts of memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from ostinato.backends.base import Settled
from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.backends.machine import SHARED_BYTES, Chip, Machine
from ostinato.backends.tape.backend import (
    HEAD_WIDTHS,
    TAPE,
    group_of,
    matrices_of,
    tape_bytes,
    why_not_rows,
    why_not_shape,
    why_not_tensors,
)
from ostinato.backends.tape.matrices import sources_of, why_not_values
from ostinato.backends.tape.partition import RUN_ALIGNMENT, WEIGHT_TYPES, TapeGrid, TapeMatrix, make_partition
from ostinato.backends.torch.model import Model
from ostinato.files.checkpoint import TensorInfo
from ostinato.lab.random_weights import RandomFile
from ostinato.models.blocks import Layer
from ostinato.models.header import HeaderTensors, tensors_in
from ostinato.models.named_shapes import named_shape
from ostinato.models.shape import ExpertShape, MambaShape, Multipliers, Shape
from ostinato.options import LoadOptions
from tests.backends.tape.models import EMULATED, FAMILIES, shape_of, small

LLAMA = shape_of()
PACKABLE = shape_of(hidden=256, ff_width=256)
CARD = Machine("cuda:0", 1 << 40, 1 << 40, Chip((9, 0), 132, 227 << 10), 13_000)


def matrices_by_header(model: Model) -> list[TapeMatrix]:
    return matrices_of(model.shape, tensors_in(model), packed=True)


# --- what it cannot play, a sentence for each thing ---

SHAPES: dict[str, tuple[Shape, str]] = {
    "experts": (replace(LLAMA, experts=ExpertShape(8, 2, 64, renormalise=True)), "experts"),
    "recurrent": (
        LLAMA.with_layers(recurrent=MambaShape(inner=1, state=1, kernel=2, dt_rank=1)),
        "layers that are not causal attention",
    ),
    "no attention": (LLAMA.with_layers(attention=None), "layers that are not causal attention"),
    "encoder": (replace(LLAMA, causal=False), "layers that are not causal attention"),
    "multipliers": (
        replace(LLAMA, multipliers=Multipliers(ff_gate=0.5)),
        "factors on what goes into attention, or on the gate",
    ),
    "activation": (replace(LLAMA, activation="relu2"), "the activation relu2: it has silu, gelu_tanh, gelu"),
    "bias": (replace(LLAMA, mlp_bias=True), "a bias in the feed-forward block"),
    "width": (shape_of(head_width=80), "heads of width 80: it has 64, 96, 128, 256"),
    "group": (
        LLAMA.with_attention(n_heads=22, n_kv_heads=2),
        "11 query heads per KV head: it has 1 to 8, or a multiple of a number from 3 to 8",
    ),
    "hidden": (replace(LLAMA, hidden=96), "a hidden size of 96: it wants a multiple of 64"),
    "feed-forward": (LLAMA.with_layers(ff_width=200), "a feed-forward size of 200: it wants a multiple of 64"),
    "no rope": (LLAMA.with_attention(rope=None), "models without rotary positions"),
    "ropes": (
        LLAMA.with_attention(rope=(*LLAMA.rope_kinds, replace(LLAMA.rope_kinds[0], width=32))),
        "rotary positions of different widths, pairs or amplitudes",
    ),
    "a layer without attention": (
        LLAMA.with_layers(attention=(LLAMA.attention[0], None)),
        "layers that are not causal attention",
    ),
    "heads": (LLAMA.with_attention(n_heads=(4, 2)), "layers with different heads"),
    "values": (LLAMA.with_attention(value_width=32), "values that are not as wide as keys"),
    "feed-forward sizes": (LLAMA.with_layers(ff_width=(192, 128)), "layers with different feed-forward sizes"),
}


@pytest.mark.parametrize("what", SHAPES)
def test_a_shape_that_it_cannot_express_is_named(what: str) -> None:
    shape, words = SHAPES[what]
    assert why_not_shape(shape) == f"the tape does not know {words}"
    assert TAPE.why_not("persistent", shape, tensors_in(small(LLAMA)), LoadOptions(), CARD) == why_not_shape(shape)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", HEAD_WIDTHS)
def test_shapes_of_its_families_have_no_reason(family: str, width: int) -> None:
    assert why_not_shape(shape_of(family, head_width=width)) is None


@pytest.mark.parametrize(
    ("group", "part"), [(1, 1), (2, 2), (7, 7), (8, 8), (9, 3), (10, 5), (16, 8), (24, 8), (28, 7)]
)
def test_the_queries_of_a_kv_head_attend_in_equal_parts_of_at_most_eight(group: int, part: int) -> None:
    shape = LLAMA.with_attention(n_heads=2 * group, n_kv_heads=2)
    assert (why_not_shape(shape), group_of(shape.attention[0])) == (None, part)


@pytest.mark.parametrize("family", EMULATED)
def test_shapes_with_what_only_one_family_has_have_none(family: str) -> None:
    model = small(EMULATED[family]())
    assert TAPE.why_not("persistent", model.shape, tensors_in(model), LoadOptions(), CARD) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mix", [None, "q4_k_m", "q5_0", "q6_k", "q8_0"])
def test_models_that_it_plays_have_none(family: str, mix: str | None) -> None:
    model = small(shape_of(family, hidden=256, ff_width=256), mix=mix)
    for n_slots in (1, 8):
        for kv in ("f32", "f16", "bf16", "q8_0"):
            options = LoadOptions(slots=n_slots, kv_type=kv)
            assert TAPE.why_not("persistent", model.shape, tensors_in(model), options, CARD) is None
    assert why_not_values(model) is None


def with_tensor(name: str, type: str = "F32", *sizes: int) -> Callable[[HeaderTensors], HeaderTensors]:
    return lambda tensors: {**tensors, name: TensorInfo(name, sizes or (8,), type, 32)}


def without_gate(tensors: HeaderTensors) -> HeaderTensors:
    return {name: tensor for name, tensor in tensors.items() if "ffn_gate" not in name}


WANTS = "the tape wants RMS norms, rotary positions and a gate in the feed-forward block"
TENSORS: dict[str, tuple[Callable[[HeaderTensors], HeaderTensors], str]] = {
    "no gate": (without_gate, WANTS),
    "layer norm": (with_tensor("blk.1.attn_norm.bias"), WANTS),
    "learned positions": (with_tensor("position_embd.weight"), WANTS),
    "after attention": (with_tensor("blk.0.post_attention_norm.weight"), "the tape wants norms before every block"),
    "after the mlp": (with_tensor("blk.1.post_ffw_norm.weight"), "the tape wants norms before every block"),
    "bias of the head": (with_tensor("output.bias"), "the tape has no bias of output"),
    "bias of a product": (with_tensor("blk.1.attn_output.bias"), "the tape has no bias of blk.1.attn_output"),
    "two kinds": (
        with_tensor("blk.1.ffn_up.weight", "Q6_K", 256, 256),
        "layer.1.gate_up: a matrix of Q4_K and Q6_K cannot be laid out on the tape: gate and up share their tiles",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_it_cannot_lay_out_are_named(what: str) -> None:
    change, words = TENSORS[what]
    tensors = tensors_in(small(PACKABLE, mix="q4_k_m"))
    assert why_not_tensors(PACKABLE, tensors, packed=True) is None
    reason = why_not_tensors(PACKABLE, change(tensors), packed=True)
    assert reason is not None
    assert reason.startswith(words)


def test_a_bias_of_q_k_and_v_is_no_reason() -> None:
    tensors = tensors_in(small(shape_of("qwen2")))
    assert "blk.0.attn_q.bias" in tensors
    assert why_not_tensors(shape_of("qwen2"), tensors, packed=True) is None


def test_two_types_of_one_kind_and_dense_weights_can_share_their_tiles() -> None:
    tensors = tensors_in(small(PACKABLE, mix="q4_k_m"))
    mixed = with_tensor("blk.1.ffn_up.weight", "Q4_0", 256, 256)(tensors)
    assert why_not_tensors(PACKABLE, mixed, packed=True) is None
    other = with_tensor("blk.1.ffn_up.weight", "Q6_K", 256, 256)(tensors)
    assert why_not_tensors(PACKABLE, other, packed=False) is None


def test_every_type_that_stays_packed_has_a_place_or_is_refused() -> None:
    assert set(PACKED_TYPES) == {*WEIGHT_TYPES, "MXFP4"}
    other = with_tensor("blk.1.ffn_up.weight", "MXFP4", 256, 256)(tensors_in(small(PACKABLE, mix="q4_k_m")))
    assert why_not_tensors(PACKABLE, other, packed=True) == "layer.1.gate_up: the tape has no MXFP4 weights"


def changed_weight(model: Model, change: Callable[[Tensor], Tensor]) -> Model:
    """The model with another first product in its second layer."""
    first, layer = model.layers
    assert isinstance(layer, Layer)
    mlp: Any = layer.mlp
    linear = replace(mlp.gate_up, weight=change(mlp.gate_up.weight))
    return replace(model, layers=[first, replace(layer, mlp=replace(mlp, gate_up=linear))])


def test_values_that_a_half_cannot_hold_are_found_when_they_are_there() -> None:
    model = small(PACKABLE)
    assert why_not_values(changed_weight(model, lambda weight: weight.float())) is None
    reason = why_not_values(changed_weight(model, lambda weight: weight.float() + 1e-6))
    assert reason == (
        "layer.1.gate_up: the tape keeps these float32 weights as bfloat16, which cannot hold their values"
    )


def test_slots_and_types_that_it_has_not_are_named() -> None:
    assert why_not_rows(8, "float16") is None
    assert why_not_rows(9, "bfloat16") == "the tape has up to 8 slots, and 9 are asked for"
    reason = "the tape multiplies bfloat16 or float16, and this model's rows are float32"
    assert why_not_rows(1, "float32") == reason
    model = small(LLAMA)
    asked = (model.shape, tensors_in(model), LoadOptions(dtype="float32"), CARD)
    assert TAPE.why_not("persistent", *asked) == reason


@pytest.mark.parametrize("capability", [*SHARED_BYTES, (7, 5)])
def test_every_card_from_ampere_on_can_run_it(capability: tuple[int, int]) -> None:
    model, can = small(LLAMA), capability >= (8, 0)
    card = replace(CARD, chip=Chip(capability, 84, SHARED_BYTES.get(capability, 64 << 10)))
    reason = TAPE.why_not("persistent", model.shape, tensors_in(model), LoadOptions(slots=8), card)
    assert (reason is None) == can
    assert can or (reason or "").startswith("compute capability 7.5 is too old")


def test_a_model_that_needs_fewer_slots_on_a_card_is_told_how_many() -> None:
    shape = named_shape("llama-8b")
    tensors = RandomFile(shape, "bf16").tensors
    card = replace(CARD, chip=Chip((8, 9), 128, SHARED_BYTES[8, 9]))
    reason = TAPE.why_not("persistent", shape, tensors, LoadOptions(slots=8, context=8192), card)
    found = re.search(r"with --slots 8 .* and sm_89 has 101376; use --slots (\d), with which", reason or "")
    assert found is not None, reason
    fits = int(found[1])
    assert 1 <= fits < 8
    for slots in range(1, 9):
        told = TAPE.why_not("persistent", shape, tensors, LoadOptions(slots=slots, context=8192), card)
        assert (told is None) == (slots <= fits)


# --- what it counts ---


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mix", [None, "q8_0", "q4_k_m"])
def test_the_tape_is_counted_as_it_will_be_laid_out(family: str, tied: bool, mix: str | None) -> None:
    shape = shape_of(family, hidden=256, ff_width=256, tied_head=tied)
    model = small(shape, mix=mix)
    matrices = [source.matrix for _, source in sources_of(model)]
    assert matrices_by_header(model) == matrices
    weights = "dense" if mix is None else "packed"
    settled = Settled("cuda:0", "tape", "persistent", "bfloat16", "bf16", 256, weights=weights)  # type: ignore[arg-type]
    counted = tape_bytes(shape, tensors_in(model), settled)
    widened = 0 if mix is None else 203 * 256 * 2  # the embedding, whose rows the kernel reads as they are
    assert 0 <= make_partition(matrices, TapeGrid(3)).n_bytes + widened - counted < 3 * RUN_ALIGNMENT
