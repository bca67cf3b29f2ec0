"""Decode attention against its twin and a float64 reference: every length, store, grouping and habit of a family.

Whatever a row must not read is poisoned with NaN, and a row's bits are compared across batches, slots, page tables and
numbers of programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from bench.compiling import specialisation_of
from ostinato.backends.cuda.chip import step_block
from ostinato.backends.cuda.launch import TritonLaunch
from ostinato.backends.cuda.triton import attend
from ostinato.backends.cuda.triton.attend import Workspace, attend_workspace, bind_attend
from ostinato.backends.machine import SHARED_BYTES, TUNED, Chip
from ostinato.backends.torch.ops.attend import Heads, PagedKV, StepRows, attend_torch
from ostinato.errors import BadOption, BadPointer
from ostinato.models.rope import Pairing

CPU = torch.device("cpu")
STORES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "q8_0": torch.int8}
# Of the largest output: float32 sums in another order; weights rounded to the store's type before they meet V.
TOLERANCE = {"f32": 2e-6, "bf16": 4e-3, "f16": 5e-4, "q8_0": 4e-3}


@dataclass(frozen=True, slots=True)
class Case:
    """A step: one sequence for each position, in slots and pages partition at random."""

    positions: tuple[int, ...]
    n_heads: int = 4
    n_kv_heads: int = 1
    width: int = 64
    store: str = "f32"
    page_tokens: int = 64
    max_pages: int | None = None
    n_slots: int | None = None
    normed: bool = False
    norm_last: bool = False
    temperature: tuple[float, int] | None = None
    n_rotary: int | None = None  # elements of a head that turn; None: all
    pairing: Pairing = "halves"
    rope_sets: int = 1  # the rows have them in turn
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False
    value_norm: bool = False
    reads_kv: bool = False  # the keys and values of the rows themselves are in the store already
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    qkv: Tensor
    seen: Tensor
    kv: PagedKV
    rows: StepRows
    heads: Heads
    workspace: Workspace


def made(case: Case) -> Step:
    """The case's tensors: past keys and values random, everything that no row may read NaN."""
    g = torch.Generator().manual_seed(case.seed)
    n = len(case.positions)
    n_slots = case.n_slots or n + 2
    max_pages = case.max_pages or max(case.positions) // case.page_tokens + 2
    pages = torch.randperm(n_slots * max_pages, generator=g).view(n_slots, max_pages).int()
    slots = torch.randperm(n_slots, generator=g)[:n].sort().values
    position = torch.full((n_slots,), 12_345_678, dtype=torch.int32)
    position[slots] = torch.tensor(case.positions, dtype=torch.int32)
    row_slot = torch.full((n_slots,), 77_777_777, dtype=torch.int32)
    row_slot[:n] = slots.int()
    n_rotary = case.width if case.n_rotary is None else case.n_rotary
    factors = torch.tensor([[1.0], [5.0]])[: case.rope_sets]
    rope_set = torch.full((n_slots,), 66_666_666, dtype=torch.int32)
    rope_set[slots] = torch.arange(n, dtype=torch.int32) % case.rope_sets
    heads = Heads(
        case.n_heads,
        case.n_kv_heads,
        case.width,
        scale=case.width**-0.5,
        softcap=case.softcap,
        window=case.window,
        frequencies=factors / 10_000 ** (torch.arange(0, n_rotary, 2).float() / n_rotary) if n_rotary else None,
        amplitude=1.1,
        pairing=case.pairing,
        q_norm=torch.rand(case.width, generator=g) + 0.5 if case.normed else None,
        k_norm=torch.rand(case.width, generator=g) + 0.5 if case.normed else None,
        norm_last=case.norm_last,
        temperature=case.temperature,
        value_norm=case.value_norm,
        reads_kv=case.reads_kv,
        sinks=2 * torch.randn(case.n_heads, generator=torch.Generator().manual_seed(11)) if case.sinks else None,
    )
    rows = StepRows(torch.tensor([n], dtype=torch.int32), row_slot, position, pages, rope_set)
    kv = poisoned(n_slots * max_pages * case.page_tokens, case)
    for slot, p in zip(slots, case.positions, strict=True):
        first = max(0, p - case.window + 1) if case.window else 0
        end = p + case.reads_kv
        past = torch.randn(2, end, case.n_kv_heads, case.width, generator=g)[:, first:]
        if first < end:
            kv.append(kv.cells(pages[slot], torch.arange(first, end)), past[0], past[1])
    qkv = torch.full((n_slots, heads.n_columns), math.nan)
    qkv[:n] = torch.randn(n, heads.n_columns, generator=g)
    workspace = attend_workspace(n_slots, [heads], CPU)
    workspace.sums.fill_(math.nan)
    workspace.norms.fill_(math.nan)
    seen = torch.full((n_slots, case.n_heads * case.width), math.nan)
    return Step(qkv, seen, kv, rows, heads, workspace)


def poisoned(cells: int, case: Case) -> PagedKV:
    size, dtype = (cells, case.n_kv_heads, case.width), STORES[case.store]
    if case.store != "q8_0":
        return PagedKV(
            torch.full(size, math.nan, dtype=dtype), torch.full(size, math.nan, dtype=dtype), case.page_tokens
        )
    scales = [torch.full((*size[:2], case.width // 32), math.nan, dtype=torch.float16) for _ in range(2)]
    return PagedKV(
        torch.full(size, 99, dtype=dtype), torch.full(size, 99, dtype=dtype), case.page_tokens, scales[0], scales[1]
    )


def copied(kv: PagedKV) -> PagedKV:
    scales = [None if t is None else t.clone() for t in (kv.key_scales, kv.value_scales)]
    return PagedKV(kv.keys.clone(), kv.values.clone(), kv.page_tokens, scales[0], scales[1])


def run(step: Step, programs: int = 3, chip: Chip = TUNED) -> tuple[Tensor, PagedKV]:
    """What the kernel leaves: seen, and the store."""
    seen, kv = step.seen.clone(), copied(step.kv)
    bind_attend(step.qkv, seen, kv, step.rows, step.heads, step.workspace, programs, chip=chip)()
    assert not step.workspace.arrivals.any(), "the counters must be ready for the next layer"
    return seen, kv


def bits(x: Tensor) -> Tensor:
    """To compare NaN with NaN."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same_store(a: PagedKV, b: PagedKV) -> bool:
    pairs = ((a.keys, b.keys), (a.values, b.values), (a.key_scales, b.key_scales), (a.value_scales, b.value_scales))
    return all(x is None or y is None or torch.equal(bits(x), bits(y)) for x, y in pairs)


def assert_like_the_twin(case: Case, chip: Chip = TUNED) -> None:
    step = made(case)
    seen, kv = run(step, chip=chip)
    expected, twin_kv = step.seen.clone(), copied(step.kv)
    attend_torch(step.qkv, expected, twin_kv, step.rows, step.heads)
    n = len(case.positions)
    assert torch.isfinite(seen[:n]).all()
    assert (seen[:n] - expected[:n]).abs().max() <= TOLERANCE[case.store] * expected[:n].abs().max()
    assert torch.isnan(seen[n:]).all(), "a dead row was written"
    own = torch.cat(
        [twin_kv.cells(step.rows.pages[s], step.rows.position[s : s + 1].long()) for s in step.rows.row_slot[:n]]
    )
    for got, want in zip(twin_kv.read(own), kv.read(own), strict=True):
        # A turned key may round to the neighbouring value of its type.
        assert (got - want).abs().max() <= (1e-6 if case.store == "f32" else 2e-2) * want.abs().max()
    for store in (kv, twin_kv):
        for part in (store.keys, store.values, store.key_scales, store.value_scales):
            if part is not None:
                part[own] = 0
    assert same_store(kv, twin_kv), "a cell that belongs to no row of the step was written"


def reference(step: Step, row: int) -> np.ndarray:
    """What a row sees, in float64 from the definition; the store must be float32."""
    heads, slot = step.heads, int(step.rows.row_slot[row])
    p, width = int(step.rows.position[slot]), heads.head_width
    parts = step.qkv[row].double().numpy().reshape(-1, width)
    q, k, v = np.split(parts, [heads.n_heads, heads.n_heads + heads.n_kv_heads])
    assert heads.frequencies is not None
    half = heads.frequencies.shape[1]
    angles = np.float32(p) * heads.frequencies[0].numpy()
    turn = np.exp(1j * angles.astype(np.float64)) * heads.amplitude

    def rotated(x: np.ndarray) -> np.ndarray:
        first, second = (
            (np.arange(half), np.arange(half) + half)
            if heads.pairing == "halves"
            else (
                2 * np.arange(half),
                2 * np.arange(half) + 1,
            )
        )
        z = (x[:, first] + 1j * x[:, second]) * turn
        out = x.copy()
        out[:, first], out[:, second] = z.real, z.imag
        return out

    q, k = rotated(q), rotated(k)
    cells = step.kv.cells(step.rows.pages[slot], torch.arange(p))
    keys = np.concatenate([step.kv.keys[cells].double().numpy(), k[None]])
    values = np.concatenate([step.kv.values[cells].double().numpy(), v[None]])
    first = max(0, p - heads.window + 1) if heads.window else 0
    out = []
    for head in range(heads.n_heads):
        shared = head // heads.group
        scores = keys[first:, shared] @ q[head] * heads.scale
        if heads.softcap:
            scores = np.tanh(scores / heads.softcap) * heads.softcap
        if heads.sinks is not None:
            scores = np.append(scores, float(heads.sinks[head]))
        weights = np.exp(scores - scores.max())
        out.append(weights[: len(values) - first] @ values[first:, shared] / weights.sum())
    return np.concatenate(out)


LENGTHS = (0, 1, 2, 15, 16, 17, 62, 63, 64, 65, 127, 128, 129, 191, 192, 255)


@pytest.mark.slow
def test_every_length_near_a_page_or_split_boundary_equals_the_float64_reference() -> None:
    """E-48, E-50."""
    step = made(Case(LENGTHS, n_heads=2, n_kv_heads=1, width=16, max_pages=4))
    seen, _ = run(step)
    for row in range(len(LENGTHS)):
        expected = reference(step, row)
        assert np.abs(seen[row].double().numpy() - expected).max() <= 2e-6 * np.abs(expected).max(), LENGTHS[row]


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
@pytest.mark.parametrize("n_rotary", [64, 24])
def test_caps_windows_and_both_pairings_equal_the_float64_reference(pairing: Pairing, n_rotary: int) -> None:
    case = Case((3, 130, 200), pairing=pairing, n_rotary=n_rotary, softcap=5.0, window=70)
    step = made(replace(case, window=None))
    step = replace(step, heads=replace(step.heads, window=70))
    seen, _ = run(step)
    for row in range(3):
        expected = reference(step, row)
        assert np.abs(seen[row].double().numpy() - expected).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("sink", [None, -60.0, 60.0], ids=["plain", "low", "high"])
def test_sinks_take_their_share_of_a_window_and_of_many_splits(sink: float | None) -> None:
    """However far they are from the other scores."""
    step = made(Case((0, 1, 63, 130, 200), n_heads=6, n_kv_heads=2, width=16, sinks=True))
    sinks = step.heads.sinks if sink is None else torch.full((6,), sink)
    for window in (None, 70):
        own = replace(step, heads=replace(step.heads, window=window, sinks=sinks))
        seen, _ = run(own)
        for row in range(5):
            expected = reference(own, row)
            assert np.abs(seen[row].double().numpy() - expected).max() <= 3e-6 * max(np.abs(expected).max(), 1e-20)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("group", "width"), [(1, 64), (4, 128), (7, 96), (8, 64)])
def test_every_store_grouping_and_width_equals_the_twin(store: str, group: int, width: int) -> None:
    """E-40, E-44, E-47."""
    assert_like_the_twin(Case((0, 70, 129), n_heads=group, width=width, store=store, normed=group == 4))


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_norms_after_the_rotation_and_queries_that_grow_equal_the_twin(pairing: Pairing) -> None:
    case = Case((0, 70, 129), n_heads=4, width=64, normed=True, norm_last=True, temperature=(0.5, 32), pairing=pairing)
    assert_like_the_twin(replace(case, n_rotary=48))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("reads_kv", [False, True])
def test_normed_values_and_those_of_another_layer_equal_the_twin(store: str, reads_kv: bool) -> None:
    case = Case((0, 70, 129), n_heads=8, n_kv_heads=2, width=96, store=store, normed=True, window=100)
    assert_like_the_twin(replace(case, value_norm=True, reads_kv=reads_kv))


@pytest.mark.parametrize("store", ["f32", "bf16", "q8_0"])
def test_heads_of_width_256_with_norm_cap_and_window_equal_the_twin(store: str) -> None:
    assert_like_the_twin(
        Case((1, 95, 200), n_heads=2, width=256, store=store, normed=True, softcap=30.0, window=65, n_rotary=64)
    )


def test_float32_heads_of_512_in_the_smaller_blocks_of_a_small_chip_equal_the_twin() -> None:
    chip = Chip((8, 9), 128, SHARED_BYTES[8, 9])
    assert (step_block(chip, 512, 4, 2), step_block(TUNED, 512, 4, 2)) == (16, 32)
    assert_like_the_twin(Case((1, 17, 130), n_heads=2, width=512, normed=True), chip)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 128, 1000])
def test_a_window_sees_exactly_its_positions(window: int) -> None:
    """Cells before the window are NaN: one look at them would show."""
    assert_like_the_twin(Case((0, 63, 64, 129), n_heads=2, width=16, window=window))


def test_several_kv_heads_small_pages_and_no_rotary_positions_equal_the_twin() -> None:
    assert_like_the_twin(Case((5, 66, 17), n_heads=6, n_kv_heads=3, width=32, store="bf16", page_tokens=16, n_rotary=0))


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_rows_of_two_rope_sets_equal_the_twin(pairing: Pairing) -> None:
    assert_like_the_twin(Case((5, 66, 67, 17), n_heads=2, width=32, n_rotary=24, rope_sets=2, pairing=pairing))


def test_splits_longer_than_the_least_equal_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows past MAX_SPLITS * SPLIT positions: lengths of one and of several blocks in a split, the last one short."""
    monkeypatch.setattr(attend, "MAX_SPLITS", 2)
    assert_like_the_twin(Case((127, 128, 129, 255, 256, 257, 300), n_heads=2, width=16))
    assert_like_the_twin(Case((300, 260), n_heads=2, width=16, window=200))


def test_more_splits_than_a_merge_takes_at_once_equal_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_MERGED", 64)
    assert_like_the_twin(Case((300, 64), n_heads=3, width=16))


@pytest.mark.slow
def test_the_border_where_splits_grow_equals_the_twin() -> None:
    assert_like_the_twin(Case((4095, 4096), n_heads=1, width=16))


def test_the_largest_score_last_is_not_lost() -> None:
    step = made(Case((130,), n_heads=1, width=16, n_rotary=0))
    step.qkv[0] *= 30
    step.qkv[0, 16:32] = step.qkv[0, :16]  # the row's own key is its query
    seen, _ = run(step)
    assert torch.allclose(seen[0], step.qkv[0, 32:], rtol=1e-5)


@pytest.mark.parametrize(
    "store", [pytest.param("f32", marks=pytest.mark.slow), "bf16", pytest.param("q8_0", marks=pytest.mark.slow)]
)
def test_a_rows_bits_do_not_depend_on_other_sequences(store: str) -> None:
    """E-49. The same sequence alone and beside others, in other slots, pages, rows, page tables and program counts."""
    case = Case((130,), n_heads=4, n_kv_heads=2, width=32, store=store)
    alone = made(replace(case, n_slots=1))
    expected, expected_kv = run(alone, programs=1)
    own = int(expected_kv.cells(alone.rows.pages[0], torch.tensor([130])))
    company = made(replace(case, positions=(65, 130, 3), seed=5, n_slots=9, max_pages=7))
    slot = int(company.rows.row_slot[1])
    past = torch.arange(130)
    keys, values = alone.kv.cells(alone.rows.pages[0], past), company.kv.cells(company.rows.pages[slot], past)
    for theirs, ours in zip(parts(company.kv), parts(alone.kv), strict=True):
        theirs[values] = ours[keys]
    company.qkv[1] = alone.qkv[0]
    for programs in (1, 5):
        seen, kv = run(company, programs)
        assert torch.equal(bits(seen[1]), bits(expected[0]))
        cell = int(kv.cells(company.rows.pages[slot], torch.tensor([130])))
        for theirs, ours in zip(parts(kv), parts(expected_kv), strict=True):
            assert torch.equal(bits(theirs[cell]), bits(ours[own]))


def parts(kv: PagedKV) -> list[Tensor]:
    return [t for t in (kv.keys, kv.values, kv.key_scales, kv.value_scales) if t is not None]


def test_no_live_row_means_no_work() -> None:
    step = made(Case((70,)))
    step.rows.n_rows.zero_()
    seen, kv = run(step)
    assert torch.isnan(seen).all()
    assert same_store(kv, step.kv)


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
@pytest.mark.parametrize("position", [0, 1, 7, 4095, 100_000, 1_048_575])
def test_keys_turn_right_to_six_digits_at_every_position(position: int, pairing: Pairing) -> None:
    """E-43. Seen in what is appended; with a window of one the row reads no past, so all its pages can be the same."""
    step = made(Case((0,), n_heads=1, width=128, window=1, n_slots=1, pairing=pairing))
    rows = replace(step.rows, pages=torch.zeros(1, position // 64 + 1, dtype=torch.int32))
    rows.position.fill_(position)
    frequencies = 1 / 500_000 ** (torch.arange(0, 128, 2).float() / 128)
    step = replace(step, rows=rows, heads=replace(step.heads, frequencies=frequencies[None], amplitude=1.0))
    _, kv = run(step, programs=1)
    k = step.qkv[0, 128:256].double()
    angles = (torch.tensor(float(position)) * frequencies).double()
    first, second = (k[:64], k[64:]) if pairing == "halves" else (k[0::2], k[1::2])
    rotated = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    expected = torch.cat(rotated) if pairing == "halves" else torch.stack(rotated, -1).flatten()
    assert (kv.keys[position % 64, 0] - expected).abs().max() < 1e-6 * expected.abs().max()


def test_what_a_kernel_cannot_read_is_refused_by_name() -> None:
    step = made(Case((5,)))
    with pytest.raises(BadPointer, match="attended"):
        bind_attend(step.qkv, step.seen.half(), step.kv, step.rows, step.heads, step.workspace, 1)
    with pytest.raises(BadOption, match="scales"):
        PagedKV(torch.zeros(4, 1, 32, dtype=torch.int8), torch.zeros(4, 1, 32, dtype=torch.int8), 16)
    with pytest.raises(BadOption, match="evenly"):
        Heads(7, 2, 64, 1.0)


# Compiling without a card


def compile_launch(launch: TritonLaunch, *, amd: bool = True) -> None:
    """Compile what would be launched, for Hopper and for AMD; needs the compiler, not the interpreter."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    specialised = specialisation_of(launch)
    targets = [GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)]
    for target in targets[: 1 + amd]:
        # AMD's shared memory holds one block at a time (`STAGES`).
        staged = specialised.options | ({"num_stages": 1} if target.backend == "hip" else {})
        source = ASTSource(launch.kernel, specialised.signature, specialised.fixed, specialised.aligned)
        triton.compile(source, target=target, options=staged)


def compile_all() -> None:
    odd = Case((5,), n_heads=14, n_kv_heads=2, width=96, store="q8_0", pairing="neighbours", page_tokens=16)
    gemma = Case((5,), n_heads=8, n_kv_heads=4, width=256, store="bf16", normed=True, softcap=50.0, window=1024)
    for case, amd in (
        (Case((5,), n_heads=32, n_kv_heads=8, width=64, store="bf16"), True),
        (odd, False),
        (gemma, False),
        (Case((5,), n_heads=64, n_kv_heads=8, width=64, store="bf16", window=128, sinks=True), True),
        (Case((5,), n_heads=4, n_kv_heads=2, store="bf16", normed=True, norm_last=True, temperature=(0.1, 16)), True),
        (Case((5,), n_heads=16, n_kv_heads=2, width=512, store="bf16", normed=True, value_norm=True), False),
        (Case((5,), n_heads=8, width=256, store="bf16", normed=True, window=512, reads_kv=True), False),
        (Case((5,), n_heads=4, n_kv_heads=4, width=64, store="f32", n_rotary=32, rope_sets=2), False),
    ):
        step = made(case)
        args = (step.qkv, step.seen, step.kv, step.rows, step.heads, step.workspace, 132)
        compile_launch(bind_attend(*args), amd=amd)
