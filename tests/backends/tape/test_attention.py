"""The tape's attention in the emulator against `attend_torch`: every grouping, width, store, length and habit.

Cells that a row must not read are NaN; a row's bits are compared alone and among neighbours, on other blocks and under
other orders of events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.backends.torch.ops.attend import Heads, PagedKV, StepRows, attend_torch
from ostinato.backends.torch.tables import tensor_tables
from ostinato.build import cubin
from ostinato.loop.layout import Arena, Layout
from ostinato.models.rope import Pairing
from tests.backends.tape import stage
from tests.backends.tape.emulator import headers_of
from tests.backends.tape.stage import PLAYER, SHARED_BYTES, TYPES, words

TAG = 40
N_LAYERS = N_GROUPS = 2
MAX_ROWS = 8
TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Of the largest output. It is handed on as float16, and q, k and v may be rounded to the other neighbour where a sine
# or a sum ends in another last bit.
TOLERANCE = {"f32": 7e-4, "f16": 1e-3, "bf16": 4e-3, "q8_0": 8e-3}

# Every block puts its share of each layer's q, k and v, attends, and receives what all have seen.
SOURCE = (
    '#include "attention.h"\n'
    + PLAYER
    + """
struct Given {
    char* table;
    const u64* words;    // [N_LAYERS][MAX_ROWS][QKV_COLUMNS], put into the hop layer by layer
    u64 *qkv, *parts, *attended;
    const float *qk_norms, *frequencies;
    const Cache* caches;
    const int *windows, *groups;
    u16* out;            // [N_LAYERS][blocks][MAX_ROWS][columns]
    State* state;
    int n_rows, tag, n_blocks;
};
KERNEL(attend, Given, given, N_COMPUTE_THREADS) {
    ComputeThread p = compute_warp(given.tag);
    Tape tape = {};
    tape.view.table = given.table;
    tape.qkv = given.qkv;
    tape.parts = given.parts;
    tape.attended = given.attended;
    tape.qk_norms = given.qk_norms;
    tape.frequencies = given.frequencies;
    tape.caches = given.caches;
    tape.windows = given.windows;
    tape.groups = given.groups;
    tape.state = given.state;
    constexpr int ROW = MAX_ROWS * QKV_COLUMNS, COLUMNS = (QUERY_COLUMNS + 31) / 32 * 32;
    learn_rows(p, tape, given.n_rows);
    sync_compute_warps();
    for (int layer = 0; layer < N_LAYERS; layer++, p.tag++) {
        const int n_words = given.n_rows * QKV_COLUMNS;
        for (int i = block() + N_BLOCKS * p.thread; i < n_words; i += N_BLOCKS * N_COMPUTE_THREADS) {
            put(tape.qkv + (layer & 1) * ROW + i, (u32)given.words[layer * ROW + i], p.tag);
        }
        attention(p, tape, layer, given.n_rows);
        const u64* const hop = tape.attended + (layer & 1) * MAX_ROWS * (QUERY_COLUMNS / 2);
        ManyRows ahead;
        forget(ahead);
        receive_pairs(p, tape, {hop, QUERY_COLUMNS / 2, given.n_rows, 0, COLUMNS}, ahead);
        for (int i = p.thread; i < given.n_rows * COLUMNS; i += N_COMPUTE_THREADS) {
            const int row = i / COLUMNS, column = i % COLUMNS;
            u16* const out = given.out + ((layer * N_BLOCKS + block()) * MAX_ROWS + row) * COLUMNS;
            out[column] = p.activations[row * (COLUMNS + ROW_PADDING) + column];
        }
        sync_compute_warps();
    }
}
"""
)


@dataclass(frozen=True, slots=True)
class Case:
    """A step of some layers: one sequence for each position, in slots and pages partition at random."""

    positions: tuple[int, ...]
    group: int = 2
    n_kv_heads: int = 1
    width: int = 64
    parts: int = 1  # in which the queries of a KV head attend
    store: str = "bf16"
    page_tokens: int = 16
    normed: bool = False
    rope_half: int | None = None  # None: all of a head turns
    pairing: Pairing = "halves"
    amplitude: float = 1.0
    rope_sets: int = 1  # the rows have them in turn
    windows: tuple[int, int] = (0, 0)
    n_blocks: int = 3
    n_compute_warps: int = 2
    splits: int = 4
    data: int = 0

    @property
    def n_heads(self) -> int:
        return self.group * self.n_kv_heads

    @property
    def half(self) -> int:
        return self.width // 2 if self.rope_half is None else self.rope_half

    @property
    def layout(self) -> Layout:
        longest = 4096 if max(self.positions) >= 1024 else 1024
        return Layout(MAX_ROWS, longest // self.page_tokens, 64, inbox_entries=4, outbox_entries=4, n_groups=N_GROUPS)

    @property
    def groups(self) -> tuple[int, ...]:
        """Each layer's page table: one for all layers with the same window."""
        return tuple(self.windows.index(window) for window in self.windows)

    @property
    def shape(self) -> dict[str, int | str]:
        return {
            "N_BLOCKS": self.n_blocks,
            "N_COMPUTE_WARPS": self.n_compute_warps,
            "N_LAYERS": N_LAYERS,
            "N_HEADS": self.n_heads,
            "N_KV_HEADS": self.n_kv_heads,
            "GROUP": self.group // self.parts,
            "HEAD_WIDTH": self.width,
            "QUERY_SCALE": f"{self.width**-0.5}f",
            "ROPE_SETS": self.rope_sets,
            "ROPE_HALF": self.half,
            "ROPE_NEIGHBOURS": int(self.pairing == "neighbours"),
            "ROPE_AMPLITUDE": f"{float(self.amplitude)}f",
            "SPLITS": self.splits,
            "ACTIVATION_BF16": 0,
            "KEPT": TYPES.get(self.store, "TYPE_BF16"),
            "KEPT_Q8": int(self.store == "q8_0"),
            "HAS_QK_NORM": int(self.normed),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """What a case starts from."""

    qkv: Tensor  # [layers, rows, columns]
    kv: list[PagedKV]
    heads: list[Heads]
    rows: list[StepRows]  # by layer
    table: Arena


def made(case: Case) -> Step:
    """Past keys and values random, NaN wherever no row may read. Each row has its own source of chance."""
    layout = case.layout
    tables = tensor_tables(layout, torch.device("cpu"))
    g = torch.Generator().manual_seed(case.data)
    slots = torch.randperm(MAX_ROWS, generator=g)[: len(case.positions)]
    pages = torch.randperm(MAX_ROWS * N_GROUPS * layout.max_pages, generator=g).int()
    tables.table["pages"].copy_(pages.view(tables.table["pages"].shape))
    tables.table["position"].fill_(12_345_678)
    tables.table["row_slot"].fill_(77_777_777)
    tables.table["row_slot"][: len(slots)] = slots.int()
    tables.table["position"][slots] = torch.tensor(case.positions, dtype=torch.int32)
    tables.table["n_rows"].fill_(len(slots))
    norms = torch.rand(N_LAYERS, 2, case.width, generator=torch.Generator().manual_seed(4)) + 0.5
    tables.table["rope_set"].fill_(66_666_666)
    tables.table["rope_set"][slots] = torch.arange(len(slots), dtype=torch.int32) % case.rope_sets
    plain = 10_000.0 ** (-torch.arange(case.half) / max(case.half, 1))
    frequencies = torch.stack([plain / (1 + 3 * number) for number in range(case.rope_sets)])
    heads = [
        Heads(
            case.n_heads,
            case.n_kv_heads,
            case.width,
            case.width**-0.5,
            window=case.windows[layer] or None,
            frequencies=frequencies if case.half else None,
            amplitude=case.amplitude,
            pairing=case.pairing,
            q_norm=norms[layer, 0] if case.normed else None,
            k_norm=norms[layer, 1] if case.normed else None,
        )
        for layer in range(N_LAYERS)
    ]
    cells = (MAX_ROWS * N_GROUPS * layout.max_pages * case.page_tokens, case.n_kv_heads, case.width)
    kv = [empty_kv(cells, case) for _ in range(N_LAYERS)]
    rows = [StepRows.of(tables.table, group) for group in case.groups]
    qkv = torch.zeros(N_LAYERS, len(slots), heads[0].n_columns)
    for row, (slot, position) in enumerate(zip(slots, case.positions, strict=True)):
        for layer in range(N_LAYERS):
            own = torch.Generator().manual_seed(1000 * position + layer)
            qkv[layer, row] = torch.randn(heads[0].n_columns, generator=own) * 2
            window = case.windows[layer] or position + 1
            seen = torch.arange(max(0, position - window + 1), position)
            past = torch.randn(2, len(seen), *cells[1:], generator=own)
            where = kv[layer].cells(rows[layer].pages[slot], seen)
            if len(where):
                kv[layer].append(where, *past)
    return Step(qkv, kv, heads, rows, tables.table)


def empty_kv(cells: tuple[int, int, int], case: Case) -> PagedKV:
    """All NaN: where keys and values are bytes, by their scales."""
    if case.store != "q8_0":
        empty = torch.full(cells, torch.nan, dtype=TORCH[case.store])
        return PagedKV(empty, empty.clone(), case.page_tokens)
    quants = torch.ones(cells, dtype=torch.int8)
    scales = torch.full((*cells[:2], cells[2] // 32), torch.nan, dtype=torch.float16)
    return PagedKV(quants, quants.clone(), case.page_tokens, scales, scales.clone())


def stores_of(kv: PagedKV) -> list[Tensor]:
    return [one for one in (kv.keys, kv.values, kv.key_scales, kv.value_scales) if one is not None]


def played(case: Case, step: Step, seed: int) -> Tensor:
    """Run the kernel on a step, whose keys and values it appends to: float16 [layers, rows, columns]."""
    program = stage.program(SOURCE, case.layout, case.page_tokens, **case.shape)
    n_rows, columns = len(case.positions), case.n_heads * case.width
    padded = -(-columns // 32) * 32
    n_columns = step.heads[0].n_columns
    sent = np.zeros((N_LAYERS, MAX_ROWS * n_columns), dtype=np.uint64)
    for layer in range(N_LAYERS):
        sent[layer, : n_rows * n_columns] = words(step.qkv[layer].numpy(), 0).ravel()
    caches = np.array([[store.data_ptr() for store in stores_of(kv)] for kv in step.kv], dtype=np.uint64)
    hops = {
        "qkv": 2 * MAX_ROWS * n_columns,
        "parts": 2 * MAX_ROWS * case.n_heads * case.splits * (case.width + 2),
        "seen": 2 * MAX_ROWS * columns // 2,
    }
    nan = np.float32(np.nan)
    out = np.zeros((N_LAYERS, case.n_blocks, MAX_ROWS, padded), dtype=np.uint16)
    normed, n_rotary = step.heads[0].q_norm is not None, step.heads[0].frequencies
    norms = (
        torch.stack([w for h in step.heads for w in (h.q_norm, h.k_norm) if w is not None])
        if normed
        else torch.zeros(4)
    )
    argument = stage.given(
        table=step.table.memory,
        words=sent,
        # The hops still hold other values, of two tags ago.
        **{name: words(np.full(n, nan, dtype=np.float32), TAG - 2) for name, n in hops.items()},
        qk_norms=norms,
        frequencies=torch.zeros(4) if n_rotary is None else n_rotary,
        caches=caches,
        windows=np.array(case.windows, dtype=np.int32),
        groups=np.array(case.groups, dtype=np.int32),
        out=out,
        state=np.zeros(4, dtype=np.uint32),
        n_rows=n_rows,
        tag=TAG,
        n_blocks=case.n_blocks,
    )
    program.run("attend", argument, n_blocks=case.n_blocks, shared_bytes=SHARED_BYTES, seed=seed)
    seen = torch.from_numpy(out).view(torch.float16)[:, :, :n_rows, :columns]
    assert all(torch.equal(seen[:, 0], seen[:, block]) for block in range(case.n_blocks))
    return seen[:, 0]


def check(case: Case, seed: int = 0) -> Tensor:
    """Play a case, and compare what was seen and what was appended with the twin."""
    step, wanted = made(case), made(case)
    got = played(case, step, seed)
    for layer in range(N_LAYERS):
        seen = torch.zeros(len(case.positions), case.n_heads * case.width)
        attend_torch(wanted.qkv[layer], seen, wanted.kv[layer], wanted.rows[layer], wanted.heads[layer])
        assert not seen.isnan().any()
        worst = float((got[layer].float() - seen).abs().max() / seen.abs().max())
        assert worst < TOLERANCE[case.store], f"layer {layer}: {worst}"
        for ours, twins in zip(stores_of(step.kv[layer]), stores_of(wanted.kv[layer]), strict=True):
            if ours.dtype == torch.int8:  # a byte may be rounded to its other neighbour
                assert int((ours.int() - twins.int()).abs().max()) <= 1
                continue
            assert torch.equal(ours.isnan(), twins.isnan())  # nothing else was written
            torch.testing.assert_close(
                ours, twins, rtol=8e-3 if case.store == "bf16" else 1e-3, atol=1e-5, equal_nan=True
            )
    return got


MANY = (0, 1, 15, 16, 31, 33, 100, 257)
CASES = {
    "alone at the first position": Case((0,), group=4, n_kv_heads=2, store="f32"),
    "eight rows, more items than blocks": Case(MANY, group=4, n_kv_heads=2),
    "fewer items than blocks": Case((5,), group=1, n_kv_heads=2, n_blocks=7, store="f16"),
    "group 3, normed": Case((63, 64, 65), group=3, normed=True, store="f16"),
    "group 5, in two halves": Case((40, 300), group=5, n_kv_heads=2, width=64, normed=True),
    "group 6": Case((90,), group=6, n_blocks=2),
    "group 7, wide": Case((130, 17), group=7, width=128),
    "group 8": Case((31, 32), group=8, n_kv_heads=2, store="f32"),
    "group 16, in two parts": Case((63, 64, 300), group=16, n_kv_heads=2, parts=2),
    "group 24, in three parts, normed": Case((31, 200), group=24, parts=3, normed=True, windows=(33, 0)),
    "group 9, in three parts, bytes": Case((47, 129), group=9, n_kv_heads=2, parts=3, store="q8_0"),
    "width 96": Case((47, 48, 200), group=1, n_kv_heads=3, width=96),
    "width 96 in float32": Case((47, 129), group=2, width=96, store="f32", normed=True),
    "width 128, neighbours": Case((77, 500), width=128, pairing="neighbours", store="f16"),
    "width 256": Case((150,), width=256, n_kv_heads=2),
    "width 256 in float32": Case((70, 33), width=256, store="f32", n_compute_warps=4),
    "a part of the head cos_sin": Case((35, 99), width=64, rope_half=16, amplitude=1.25, store="f32"),
    "a part of the head cos_sin, neighbours": Case((35, 99), width=96, rope_half=20, pairing="neighbours"),
    "nothing cos_sin": Case((50,), rope_half=0),
    "two rope sets": Case((35, 36, 99), width=64, rope_half=16, rope_sets=2, store="f32"),
    "windows": Case((10, 33, 64, 200, 700), windows=(33, 0), group=4),
    "windows of every layer": Case((95, 96, 97, 511), windows=(64, 20), store="f32"),
    "long": Case((3000, 1025), n_kv_heads=2, splits=16, n_blocks=8, page_tokens=64),
    "long, odd pages, many splits": Case((2500,), page_tokens=24, splits=32, store="f16", n_compute_warps=4),
    "bytes": Case((0, 31, 64, 300), group=4, n_kv_heads=2, store="q8_0"),
    "bytes, width 96, neighbours": Case((47, 129), n_kv_heads=3, width=96, pairing="neighbours", store="q8_0"),
    "bytes, width 128, a part of the head": Case((77, 500), width=128, rope_half=32, store="q8_0", windows=(33, 0)),
    "bytes, width 256, normed": Case((70,), width=256, normed=True, store="q8_0", n_compute_warps=4),
    "eight warps": Case((20, 600), group=4, n_kv_heads=2, n_compute_warps=8, n_blocks=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_twins(name: str) -> None:
    check(CASES[name], seed=len(name))


@cache
def bits_alone(position: int, case: Case) -> Tensor:
    return check(replace(case, positions=(position,), data=position + 1), seed=position)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    positions=st.lists(
        st.sampled_from([0, 1, 30, 31, 32, 63, 64, 127, 128, 129, 255, 256, 400]), min_size=1, max_size=8, unique=True
    ),
    seed=st.integers(0, 2**32),
)
def test_a_rows_bits_do_not_depend_on_who_is_beside_it(positions: list[int], seed: int) -> None:
    case = Case((0,), group=4, n_kv_heads=2, windows=(0, 48))
    among = check(replace(case, positions=tuple(positions), data=seed % 1000), seed=seed)
    for row, position in enumerate(positions):
        assert torch.equal(among[:, row], bits_alone(position, case)[:, 0]), position


@pytest.mark.slow
def test_a_rows_bits_do_not_depend_on_how_many_blocks_there_are() -> None:
    """E-83."""
    for case in (Case((300, 31, 64), group=8, n_kv_heads=2), Case((300, 31), group=16, n_kv_heads=2, parts=2)):
        assert torch.equal(check(replace(case, n_blocks=1)), check(replace(case, n_blocks=11), seed=3))


@pytest.mark.slow
def test_a_query_has_the_same_bits_in_a_group_of_any_size() -> None:
    case = Case((300, 31, 64), group=8, n_kv_heads=2)
    assert torch.equal(check(case), check(replace(case, parts=2), seed=3))


@pytest.mark.slow
def test_any_order_of_events_gives_the_same() -> None:
    case = Case((100, 5), group=2, n_kv_heads=2, n_blocks=5)
    first = played(case, made(case), 0)
    for seed in range(1, 30):
        assert torch.equal(played(case, made(case), seed), first), seed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "group", "width"), [("bf16", 4, 64), ("f16", 8, 128), ("f32", 7, 256), ("q8_0", 4, 128)]
)
def test_attention_compiles_for_a_card(store: str, group: int, width: int) -> None:
    case = Case((0,), group=group, n_kv_heads=8, width=width, store=store, n_blocks=132, n_compute_warps=8, splits=16)
    made = stage.headers(Layout(MAX_ROWS, 2048, 64), 64, **case.shape)
    assert cubin(SOURCE, "attention.cu", arch="sm_90", headers=headers_of(SOURCE, made))
