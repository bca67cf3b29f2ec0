"""How the tape shares out a card, and that its numbers are those of its headers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ctypes import c_int, c_uint64, c_void_p, sizeof
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.backends.cuda.packed import Packed
from ostinato.backends.machine import SHARED_BYTES, Capability, Chip
from ostinato.backends.tape.backend import HEAD_WIDTHS, group_of
from ostinato.backends.tape.matrices import sources_of
from ostinato.backends.tape.partition import Segment, TapeGrid, TapeMatrix, WeightType, padded_columns
from ostinato.backends.tape.plan import SUMMARY_WORDS, Argument, TapeStep, tape_plan
from ostinato.backends.tape.program import TapeProgram, Traits, shape_header
from ostinato.backends.tape.sizes import (
    IN_FLIGHT_BYTES,
    ITEM_BYTES,
    ITEMS_AT_ONCE,
    LEAST_SPLIT,
    LEAST_STAGES,
    QKV_SEGMENTS,
    ROW_PADDING,
    SLAB_COLUMNS,
    SPLITS,
    STATIC_BYTES,
    TapeSizes,
    Variant,
    attention_bytes,
)
from ostinato.backends.tape.start import SOURCES, tape_headers, tape_source
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.tables import tensor_tables
from ostinato.backends.weights import Stack
from ostinato.cache.groups import one_group
from ostinato.errors import HardwareCannot, InternalError
from ostinato.lab.random_weights import random_blocks
from ostinato.loop.layout import Layout
from ostinato.models.blocks import Linear
from ostinato.models.shape import Shape
from ostinato.options import Activations, KVType
from tests.backends.cuda.packing import pack
from tests.backends.tape.emulator import Program, compiled
from tests.backends.tape.models import gemma3, shape_of, small
from tests.backends.tape.test_backend import matrices_by_header

CPU = torch.device("cpu")
H200 = Chip((9, 0), 132, 227 << 10)
LLAMA = shape_of()
PACKABLE = shape_of(hidden=256, ff_width=256)


# --- the numbers of its headers ---


def header(name: str) -> str:
    return (SOURCES / name).read_text("utf-8")


def test_the_argument_has_the_fields_of_the_header_in_its_order() -> None:
    body = re.search(r"struct Tape \{(.*?)\n\};", header("parts.h"), re.DOTALL)
    assert body is not None
    fields: list[tuple[str, str]] = []
    for line in re.sub(r"//.*", "", body[1]).split(";"):
        found = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) (.*)", line, re.DOTALL)
        if found is None:
            assert not line.strip(), line
            continue
        weight_type = "pointer" if found[2] else found[1]
        fields += [(name.strip(), weight_type) for name in found[3].split(",")]
    weight_types = {c_void_p: "pointer", c_uint64: "u64", c_int: "int"}
    assert [(name, weight_types.get(weight_type, "View")) for name, weight_type, *_ in Argument._fields_] == fields


class Compiled:
    """What one shape's headers say of themselves, as the compiler has it."""

    NAMES = (
        *("sizeof(Tape)", "RING_AT", "ATTENTION_BYTES", "sizeof(Summing)", "sizeof(SamplingScratch)", "SLAB_COLUMNS"),
        *("SUMMARY_WORDS", "ROW_PADDING", "sizeof(Item)", "sizeof(AttentionPlan)", "ITEMS_AT_ONCE"),
    )

    def __init__(self, headers: dict[str, str]) -> None:
        told = "".join(f'extern "C" int told_{i}() {{ return (int)({name}); }}\n' for i, name in enumerate(self.NAMES))
        # Without the kernel the functions have no caller, and nothing but these numbers is compiled.
        quiet = '#pragma GCC diagnostic ignored "-Wunused-function"\n'
        source = tape_source().partition("KERNEL(")[0]
        self._library = compiled(f"{quiet}{source}{told}", "sizes.cpp", headers=headers).library

    def __getitem__(self, name: str) -> int:
        return int(getattr(self._library, f"told_{self.NAMES.index(name)}")())


def headers_for(
    model: Model, sizes: TapeSizes, layout: Layout, kv_type: KVType, activations: Activations = "wide"
) -> dict[str, str]:
    """As a step has them, without laying out a weight."""
    weight_types = {source.matrix.weight_type for _, source in sources_of(model)}
    header = shape_header(model.shape, Traits.of(model), sizes, layout.vocab, kv_type, weight_types, activations)
    return tape_headers(header, layout, 64)


def matrices_of(model: Model) -> list[TapeMatrix]:
    return [source.matrix for _, source in sources_of(model)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "n_slots", "kv_type", "n_compute_warps", "mix"),
    [
        (shape_of(), 4, "f32", 2, None),
        (shape_of(hidden=192, n_heads=16, n_kv_heads=2, head_width=128, ff_width=320, vocab=5000), 8, "bf16", 8, None),
        (shape_of("qwen3", hidden=256, n_heads=2, n_kv_heads=1, head_width=256, ff_width=256), 5, "f16", 8, "q4_k_m"),
        (gemma3(), 3, "bf16", 2, None),
        (shape_of(), 2, "q8_0", 2, None),
        (shape_of("glm4", n_heads=32, n_kv_heads=2, attention_bias=True), 8, "bf16", 8, None),
    ],
    ids=[
        "small",
        "wide groups",
        "packed",
        "norms after a block, and two kinds of RoPE",
        "bytes of keys and values",
        "two groups a KV head",
    ],
)
def test_sizes_are_those_of_the_compiled_source(
    shape: Shape, n_slots: int, kv_type: KVType, n_compute_warps: int, mix: str | None
) -> None:
    model, layout = small(shape, mix=mix), Layout(n_slots, 40, shape.vocab)
    how: dict[str, Any] = {"kv_type": kv_type, "page_tokens": 64, "max_pages": 40}
    after_norms = Traits.of(model).after_norms
    sizes = TapeSizes.of(shape, matrices_of(model), n_slots, H200, n_compute_warps, after_norms=after_norms, **how)
    found = Compiled(headers_for(model, sizes, layout, kv_type))
    assert found["sizeof(Tape)"] == sizeof(Argument)
    assert found["RING_AT"] == sizes.own_bytes
    kept = 4 if kv_type == "f32" else 2
    assert found["ATTENTION_BYTES"] == attention_bytes(shape, sizes.grid, n_slots, kept)
    assert found["sizeof(AttentionPlan)"] == sizes.attention_plan_bytes
    assert found["ITEMS_AT_ONCE"] <= ITEMS_AT_ONCE
    assert found["sizeof(Summing)"] == summing_bytes(n_slots, n_compute_warps)
    assert found["sizeof(SamplingScratch)"] == choosing_bytes(sizes.grid)
    assert found["SLAB_COLUMNS"] == slab_columns(sizes)
    constants = found["SUMMARY_WORDS"], found["ROW_PADDING"], found["sizeof(Item)"]
    assert constants == (SUMMARY_WORDS, ROW_PADDING, ITEM_BYTES)


def summing_bytes(n_slots: int, n_compute_warps: int) -> int:
    """Of each row and compute warp: the best, the largest and the sum of a part, and its weight."""
    return n_slots * n_compute_warps * (16 + 8)


def choosing_bytes(grid: TapeGrid) -> int:
    """Lists and buckets of 1024, two words of each block, a sum of each compute warp, and what was heard."""
    heard = 8 + 2 * 4 + 8 + 8
    return 1024 * (8 + 8 + 8 + 4) + 8 * grid.n_blocks + 8 * grid.n_compute_warps + heard + 8


def slab_columns(sizes: TapeSizes) -> int:
    unit = SLAB_COLUMNS * sizes.grid.n_compute_warps
    return (sizes.activation_bytes // (2 * sizes.n_slots) - ROW_PADDING) // unit * unit


# The header's own lines as a function of what they are compiled with: thousands of shapes for one compilation.
SIZED_BY = (
    *("N_HEADS", "GROUP", "HEAD_WIDTH", "N_BLOCKS", "N_COMPUTE_WARPS", "MAX_ROWS"),
    *("KEPT", "PAGE_TOKENS_", "MAX_PAGES_", "SPLITS", "LEAST_SPLIT", "ROPE_HALF"),
)


@cache
def attention_header() -> Program:
    text = re.sub(r"//.*", "", header("attention_plan.h") + header("attention.h")).partition("#define ATTENTION_BYTES")
    lines = re.findall(r"constexpr int \w+\s*=[^;]*;", text[0])
    assert len(lines) > 20
    body = "\n".join(lines).replace("constexpr int", "const int")
    total = text[2].partition("\n")[0]
    macros = {"PAGE_TOKENS(_)": "PAGE_TOKENS_", "MAX_PAGES(_)": "MAX_PAGES_", "QUERY_GROUPS": "(N_HEADS / GROUP)"}
    macros |= {"TYPE_F32": "0", "TYPE_F16": "1", "TYPE_BF16": "2"}
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    given = ", ".join(f"int {name}" for name in SIZED_BY)
    quiet = '#pragma GCC diagnostic ignored "-Wunused-variable"\n'
    return compiled(f'{quiet}{defines}extern "C" int sized({given}) {{\n{body}\nreturn {total};\n}}\n', "sized.cpp")


@settings(max_examples=200, deadline=None)
@given(
    group=st.integers(1, 64),
    n_kv_heads=st.integers(1, 16),
    width=st.sampled_from(HEAD_WIDTHS),
    n_blocks=st.integers(1, 200),
    n_compute_warps=st.sampled_from([1, 2, 4, 8]),
    n_slots=st.integers(1, 8),
    kept=st.sampled_from([0, 1, 2]),
    page_tokens=st.sampled_from([16, 64]),
    max_pages=st.integers(1, 8192),
)
def test_what_attention_works_in_is_counted_as_its_header_does(
    group: int,
    n_kv_heads: int,
    width: int,
    n_blocks: int,
    n_compute_warps: int,
    n_slots: int,
    kept: int,
    page_tokens: int,
    max_pages: int,
) -> None:
    n_heads = group * n_kv_heads
    shape = shape_of(n_heads=n_heads, n_kv_heads=n_kv_heads, head_width=width)
    expected = attention_header().library.sized(
        *(n_heads, group_of(shape.attention[0]), width, n_blocks, n_compute_warps, n_slots),
        *(kept, page_tokens, max_pages, SPLITS, LEAST_SPLIT, width // 2),
    )
    grid = TapeGrid(n_blocks, n_compute_warps)
    kept_bytes = 4 if kept == 0 else 2
    assert attention_bytes(shape, grid, n_slots, kept_bytes) == expected


# --- how a card is shared out ---

widths = st.integers(1, 256).map(lambda n: 64 * n)


@settings(max_examples=150, deadline=None)
@given(
    hidden=widths,
    ff_width=widths,
    group=st.integers(1, 24),
    n_kv_heads=st.integers(1, 8),
    width=st.sampled_from(HEAD_WIDTHS),
    vocab=st.integers(1, 200_000),
    weight_types=st.lists(st.sampled_from(list(WeightType)), min_size=5, max_size=5),
    n_slots=st.integers(1, 8),
    n_compute_warps=st.sampled_from([2, 4, 8]),
    kv_type=st.sampled_from(["f32", "f16", "bf16", "q8_0"]),
    max_pages=st.integers(1, 4096),
    n_multiprocessors=st.integers(1, 264),
    shared_kb=st.sampled_from([48, 99, 163, 227]),
)
@example(2176, 8192, 4, 8, 64, 128_256, [WeightType.HALF] * 5, 8, 8, "bf16", 64, 132, 227)
def test_every_shape_fits_a_block_with_three_stages_or_is_refused(
    hidden: int,
    ff_width: int,
    group: int,
    n_kv_heads: int,
    width: int,
    vocab: int,
    weight_types: Sequence[WeightType],
    n_slots: int,
    n_compute_warps: int,
    kv_type: KVType,
    max_pages: int,
    n_multiprocessors: int,
    shared_kb: int,
) -> None:
    heads = group * n_kv_heads
    shape = shape_of(
        hidden=hidden, ff_width=ff_width, n_heads=heads, n_kv_heads=n_kv_heads, head_width=width, vocab=vocab
    )
    rows = ((heads + 2 * n_kv_heads) * width, hidden, 2 * ff_width, hidden, vocab)
    columns = (hidden, heads * width, hidden, ff_width, hidden)
    matrices = [
        TapeMatrix(k, r, c, i == 2) for i, (k, r, c) in enumerate(zip(weight_types, rows, columns, strict=True))
    ]
    chip = Chip((9, 0), n_multiprocessors, shared_kb << 10)
    paged: dict[str, Any] = {"kv_type": kv_type, "page_tokens": 64, "max_pages": max_pages}
    try:
        sizes = TapeSizes.of(shape, matrices, n_slots, chip, n_compute_warps, **paged)
    except HardwareCannot:
        return
    assert sizes.shared_bytes + STATIC_BYTES <= chip.shared_bytes
    assert sizes.n_stages >= LEAST_STAGES
    assert sizes.with_stages(sizes.n_stages + 1).shared_bytes + STATIC_BYTES > chip.shared_bytes
    assert 2 <= sizes.in_flight <= sizes.n_stages
    assert sizes.in_flight < sizes.n_stages or sizes.n_stages == 2
    assert sizes.in_flight == 2 or sizes.in_flight * sizes.stage_bytes <= IN_FLIGHT_BYTES
    # What places of the source assert: the stages and the activations behind them are aligned for whatever lies there.
    assert sizes.own_bytes % 128 == sizes.stage_bytes % 128 == sizes.activation_bytes % 128 == 0
    grid, kept = sizes.grid, 4 if kv_type == "f32" else 2
    looking = attention_bytes(shape, grid, n_slots, kept)
    normed = padded_columns(WeightType.FOUR, hidden, n_compute_warps)
    needs = (
        looking,
        summing_bytes(n_slots, n_compute_warps),
        choosing_bytes(grid),
        2 * n_slots * (normed + ROW_PADDING),
    )
    assert sizes.activation_bytes >= max(needs)
    assert slab_columns(sizes) > 0
    # Every block has a tile of the head and one of gate and up.
    assert 1 <= grid.n_blocks <= min(n_multiprocessors, -(-vocab // 16), ff_width // 8)


def test_a_card_with_little_shared_memory_is_told_what_was_asked() -> None:
    model = small(shape_of(hidden=2048, ff_width=2048))
    says = r"needs \d+ bytes .* with --slots 1 .*2 stages of 16384 bytes, 32768 of .* sm_90 has 49152; use --mode loop$"
    with pytest.raises(HardwareCannot, match=says):
        TapeSizes.of(model.shape, matrices_of(model), 1, replace(H200, shared_bytes=48 << 10), **PAGED)


PAGED: dict[str, Any] = {"kv_type": "bf16", "page_tokens": 64, "max_pages": 4}


@pytest.mark.parametrize(
    ("capability", "pretended", "expected"),
    [
        ((8, 0), False, Variant(False, False, True, "sm_80", as_ptx=False)),
        ((8, 9), False, Variant(False, False, True, "sm_89", as_ptx=False)),
        ((8, 9), True, Variant(False, False, True, "sm_89", as_ptx=True)),
        ((9, 0), False, Variant(True, True, False, "sm_90a", as_ptx=False)),
        ((9, 0), True, Variant(True, False, False, "sm_90", as_ptx=True)),
        ((10, 0), False, Variant(True, False, True, "sm_90", as_ptx=True)),
        ((12, 1), False, Variant(True, False, True, "sm_90", as_ptx=True)),
    ],
)
def test_the_chip_decides_the_variant(capability: Capability, pretended: bool, expected: Variant) -> None:
    chip = Chip(capability, 84, SHARED_BYTES[capability], (12, 1) if pretended else None)
    assert Variant.of(chip) == expected
    assert expected.loader_threads == (128 if expected.move_registers else 32)


# --- the step and its plan ---


class Laid:
    """A model on the tape, with the memory and the tables around it."""

    def __init__(
        self,
        model: Model,
        n_slots: int = 3,
        kv_type: KVType = "f32",
        n_compute_warps: int = 2,
        *,
        on_tape: bool = False,
    ) -> None:
        self.memory = PagedMemory.of(
            model, one_group(model.shape.attention, 6), n_slots=n_slots, kv_type=kv_type, page_tokens=16
        )
        self.tables = tensor_tables(Layout(n_slots, 4, model.shape.vocab), CPU, grammar_bytes=1 << 16)
        chip = Chip((9, 0), 3, 227 << 10)
        given = model, self.tables.layout, self.memory.page_tokens, model.shape.vocab, chip
        program = TapeProgram.of(*given, kv_type=kv_type, n_compute_warps=n_compute_warps)
        self.step = TapeStep(model, self.memory, self.tables, program, on_tape=on_tape)
        self.plan = tape_plan(self.step.model, self.memory, self.tables, self.step)


@pytest.mark.parametrize(
    ("family", "mix", "optional"),
    [
        ("llama", None, ()),
        ("qwen2", None, ("qkv_bias",)),
        ("qwen3", None, ("qk_norms",)),
        ("llama", "q4_k_m", ()),
        ("gemma2", None, ("after_norms", "squares")),
    ],
)
def test_the_plan_holds_everything_that_the_argument_points_at(
    family: str, mix: str | None, optional: Sequence[str]
) -> None:
    laid = Laid(small(shape_of(family, hidden=256, ff_width=256), mix=mix))
    known = {buffer.address: buffer for buffer in laid.plan.buffers}
    argument = laid.step.argument
    assert argument.clock is None  # marks cost time, so `note_times` turns them on
    laid.step.note_times()
    places = {name: getattr(argument.view, name) for name, *_ in type(argument.view)._fields_}
    places |= {name: getattr(argument, name) for name, weight_type, *_ in Argument._fields_ if weight_type is c_void_p}
    absent = {"qkv_bias", "qk_norms", "after_norms", "squares"} - set(optional)
    assert {name for name, place in places.items() if not place} == absent
    for name, place in places.items():
        assert name in absent or known[place].n_bytes > 0
    caches = laid.step.buffers["caches"].tolist()
    assert len(caches) == 2 * 2
    assert all(place in known for place in caches)
    (node,) = laid.plan.nodes
    written = {name for name, *_ in Argument._fields_} & set(node.writes)
    assert {"x", "qkv", "parts", "attended", "inside", "summaries", "marks", "logits", "scaled", "state"} <= written
    assert not {"tape", "segments", "norms", "embedding"} & set(node.writes)
    with pytest.raises(InternalError, match="only the kernel of the tape can run its step"):
        node.run()


def test_what_a_tape_was_made_of_counts_as_weights_and_nothing_that_a_step_writes_does() -> None:
    """I-5: norms, frequencies, biases and the map of the tape are compared at every trigger, too."""
    laid = Laid(small(shape_of("gemma2", hidden=256, ff_width=256)))
    weights = {buffer.name for buffer in laid.plan.weights}
    made = {"tape", "tape_at", "segments", "norms", "after_norms", "frequencies", "windows", "caches", "groups"}
    assert made <= weights
    assert {laid.plan.buffer(name).address for name in weights} >= {laid.step.buffers["embedding"].data_ptr()}
    assert not weights & {*laid.plan.nodes[0].writes, "admissions"}
    before = laid.plan.buffer("norms").version
    laid.step.buffers["norms"].mul_(1)
    assert laid.plan.buffer("norms").version != before


def test_the_plans_text_states_both_copies_of_the_weights() -> None:
    model = small(PACKABLE, mix="q4_k_m")
    laid = Laid(model)
    tape = laid.step.buffers["tape"]
    assert tape.numel() == laid.step.n_bytes == laid.plan.weight_bytes
    assert f"tape of {tape.numel()} bytes for 3 blocks" in laid.plan.text
    assert f"a plain copy of {laid.step.n_plain_bytes} bytes for prompts" in laid.plan.text
    weights = [plane.nbytes for linear in linears(model) for part in packed_parts(linear) for plane in part.planes]
    assert laid.step.n_plain_bytes >= sum(weights)


def linears(model: Model) -> list[Linear]:
    found: list[Linear] = []
    for layer in model.layers:
        part: Any = layer
        found += [part.attention.qkv, part.attention.out, part.mlp.gate_up, part.mlp.down]
    return found


def packed_parts(linear: Linear) -> list[Packed]:
    parts = linear.weight.parts if isinstance(linear.weight, Stack) else (linear.weight,)
    return [part for part in parts if isinstance(part, Packed)]


def test_plans_of_other_kernels_have_other_hashes() -> None:
    model = small(LLAMA)
    assert Laid(model).plan.hash == Laid(model).plan.hash
    others = (Laid(model), Laid(model, n_slots=2), Laid(model, kv_type="f16"), Laid(model, n_compute_warps=4))
    assert len({laid.plan.hash for laid in others}) == len(others)


@pytest.mark.parametrize("n_parts", [1, 2, 3])
def test_q_k_and_v_are_three_segments_of_which_those_after_the_last_part_are_empty(n_parts: int) -> None:
    model = small(PACKABLE)
    before: Any = model.layers
    n_q, n_kv = 4 * 64, 2 * 64
    rows = {1: [n_q + 2 * n_kv], 2: [n_q + n_kv, n_kv], 3: [n_q, n_kv, n_kv]}[n_parts]
    mixes = ("q4_k", "q6_k", "q8_0")
    parts = tuple(quantised(mix, n) for mix, n in zip(mixes, rows, strict=False))
    weight = parts[0] if n_parts == 1 else Stack(parts)
    layers = [
        replace(layer, attention=replace(layer.attention, qkv=replace(before[0].attention.qkv, weight=weight)))
        for layer in before
    ]
    changed = replace(model, layers=layers)
    assert matrices_by_header(changed) == [source.matrix for _, source in sources_of(changed)]
    laid = Laid(changed)
    segments = [Segment(WeightType(row[0]), *row[1:]) for row in laid.step.buffers["segments"].tolist()]
    a_layer = QKV_SEGMENTS + 3
    assert len(segments) == a_layer * 2 + 1
    weight_types = [WeightType.FOUR, WeightType.SIX, WeightType.EIGHT][:n_parts]
    before = 0
    for layer in range(2):
        own = segments[layer * a_layer : (layer + 1) * a_layer]
        assert [s.n_tiles for s in own[:3]] == [*(n // 16 for n in rows), *[0] * (3 - n_parts)]
        assert [s.weight_type for s in own[:n_parts]] == weight_types
        assert [s.n_tiles for s in own[3:]] == [256 // 16, 2 * 256 // 16, 256 // 16]
        for segment in own:
            if segment.n_tiles:  # partition on from where the one before ended
                assert segment.first == before % 3
            before += segment.n_tiles
    assert segments[-1].n_tiles == -(-model.shape.vocab // 16)
    assert [s for s in segments if s.n_tiles] == list(laid.step.partition.segments)


def quantised(mix: str, n_rows: int) -> Packed:
    """So many rows of a packed matrix over 256 columns."""
    raw = torch.from_numpy(random_blocks(mix.upper(), n_rows, 256, np.random.default_rng(1)))
    return pack(mix.upper(), raw, n_rows, 256)


def test_a_packed_embedding_is_widened_once_for_the_rows_that_are_taken_in() -> None:
    model = small(PACKABLE, mix="q8_0")
    assert isinstance(model.embedding, Packed)
    embedding = Laid(model).step.buffers["embedding"]
    assert (embedding.dtype, list(embedding.shape)) == (torch.bfloat16, [203, 256])


def test_what_is_built_is_what_the_boundary_compares() -> None:
    laid = Laid(small(LLAMA))
    laid.step.built(laid.plan.hash, 7)
    assert (laid.step.argument.plan_hash, laid.step.argument.epoch) == (laid.plan.hash, 7)
