"""Hand-offs in the emulator: rows that are put word by word, late and in any order, arrive as the twins say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.backends.torch.ops.rms_norm import rms_norm_torch
from ostinato.backends.torch.tables import tensor_tables
from ostinato.build import cubin
from ostinato.loop.layout import Layout
from tests.backends.tape.emulator import headers_of
from tests.backends.tape.stage import PLAYER, SHARED_BYTES, TYPES, given, headers, program, words

LAYOUT = Layout(n_slots=8, max_pages=4, vocab=64, inbox_entries=4, outbox_entries=4)
TAG = 7
EPS = 1e-5

# Every block puts its share of the words, then receives all of them and copies out what lies in its memory.
SOURCE = (
    '#include "handoff.h"\n'
    + PLAYER
    + """
struct Given {
    char* table;
    const char* embedding;
    const u64* words;   // what is put into the hop
    u64* hop;
    const float* weights;
    char* out;          // [blocks][n_bytes]
    float* scales;      // [blocks][MAX_ROWS]
    float* residual;    // [blocks][RESIDUAL_TILES * 16][MAX_ROWS]
    State* state;
    int n_words, n_rows, n_pairs, begin, columns, n_bytes, tag;
};
DEVICE void put_share(const ComputeThread& p, const Given& given) {
    for (int i = block() + N_BLOCKS * p.thread; i < given.n_words; i += N_BLOCKS * N_COMPUTE_THREADS) {
        put(given.hop + i, (u32)given.words[i], (u32)(given.words[i] >> 32));
    }
}
DEVICE Tape tape_of(const Given& given) {
    Tape tape = {};
    tape.view.table = given.table;
    tape.embedding = given.embedding;
    tape.state = given.state;
    return tape;
}
DEVICE void copy_out(const ComputeThread& p, const Given& given) {
    sync_compute_warps();
    for (int i = p.thread; i < given.n_bytes; i += N_COMPUTE_THREADS) {
        given.out[block() * given.n_bytes + i] = ((const char*)p.activations)[i];
    }
    if (p.thread < given.n_rows) given.scales[block() * MAX_ROWS + p.thread] = p.shared->scale[p.thread];
}
KERNEL(normed, Given, given, N_COMPUTE_THREADS) {
    ComputeThread p = compute_warp(given.tag);
    put_share(p, given);
    const u64* const hop = given.n_words ? given.hop : nullptr;
    receive_normed(p, tape_of(given), hop, given.weights, given.n_rows, p.shared->residual[0], block());
    copy_out(p, given);
    constexpr int n = RESIDUAL_TILES * 16 * MAX_ROWS;
    for (int i = p.thread; i < n; i += N_COMPUTE_THREADS) given.residual[block() * n + i] = p.shared->residual[0][i];
}
KERNEL(pairs, Given, given, N_COMPUTE_THREADS) {
    ComputeThread p = compute_warp(given.tag);
    put_share(p, given);
    ManyRows ahead;
    forget(ahead);
    receive_pairs(p, tape_of(given), {given.hop, given.n_pairs, given.n_rows, given.begin, given.columns}, ahead);
    copy_out(p, given);
}
"""
)

BUILDS = {
    "bf16": {"ACTIVATION_BF16": 1, "WIDE": 1},
    "f16": {"ACTIVATION_BF16": 0, "WIDE": 1},
    "int8": {"ACTIVATION_BF16": 1, "WIDE": 0},
}
HALF = {"bf16": torch.bfloat16, "f16": torch.float16, "int8": torch.bfloat16}


def padded(columns: int, n_compute_warps: int = 2) -> int:
    return -(-columns // (32 * n_compute_warps)) * 32 * n_compute_warps


def received(
    build: str,
    kernel: str,
    *,
    n_rows: int,
    columns: int,
    hop: np.ndarray | None = None,
    weights: Tensor | None = None,
    embedding: Tensor | None = None,
    table: Tensor | None = None,
    seed: int = 0,
    n_pairs: int = 0,
    begin: int = 0,
    n_blocks: int = 2,
    residual: np.ndarray | None = None,
    **shape: int | str,
) -> tuple[Tensor, Tensor]:
    """What every block has of n_rows rows, float32 [blocks, rows, columns], and the scales [blocks, rows]."""
    made = program(SOURCE, LAYOUT, 16, N_BLOCKS=n_blocks, **{**BUILDS[build], **shape})
    n_bytes = n_rows * 2 * (columns + 8)
    out = np.zeros((n_blocks, n_bytes), dtype=np.uint8)
    scales = np.zeros((n_blocks, 8), dtype=np.float32)
    n_words = 0 if hop is None else hop.size
    # Words of an earlier tag lie there, with values that no thread may use.
    stale = words(np.full(max(n_words, 2), np.nan, dtype=np.float32), TAG - 2)
    argument = given(
        table=torch.zeros(16) if table is None else table,
        embedding=torch.zeros(16) if embedding is None else embedding,
        words=np.zeros(2, dtype=np.uint64) if hop is None else hop,
        hop=stale,
        weights=torch.zeros(16) if weights is None else weights,
        out=out,
        scales=scales,
        residual=np.zeros(1 << 18, dtype=np.float32) if residual is None else residual,
        state=np.zeros(4, dtype=np.uint32),
        **{"n_words": n_words, "n_rows": n_rows, "n_pairs": n_pairs, "begin": begin, "columns": columns},
        n_bytes=n_bytes,
        tag=TAG,
    )
    made.run(kernel, argument, n_blocks=n_blocks, shared_bytes=SHARED_BYTES, seed=seed)
    rows = torch.from_numpy(out).view(n_blocks, n_rows, 2 * (columns + 8))
    if build == "int8":
        steps = rows[:, :, columns : columns + columns // 8].contiguous().view(torch.float32)
        wide = rows[:, :, :columns].contiguous().view(torch.int8).float() * steps.repeat_interleave(32, -1)
    else:
        wide = rows[:, :, : 2 * columns].contiguous().view(HALF[build]).float()
    return wide, torch.from_numpy(scales)[:, :n_rows]


def assert_near(build: str, got: Tensor, wanted: Tensor) -> None:
    """As exact as the activations' type: bfloat16 to the bit, and half a step of int8."""
    if build == "int8":
        groups = wanted.reshape(*wanted.shape[:-1], -1, 32)
        steps = groups.abs().amax(-1, keepdim=True) / 127
        assert ((got.reshape(groups.shape) - groups).abs() <= 0.5001 * steps + 1e-12).all()
    elif build == "bf16":
        assert torch.equal(got, wanted.bfloat16().float())
    else:  # the scale is one of the factors that is rounded, and comes from another square root
        torch.testing.assert_close(got, wanted.half().float(), rtol=1e-3, atol=1e-6)


def some_rows(n_rows: int, hidden: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-2, 3, (n_rows, 1), generator=g)
    return torch.randn(n_rows, hidden, generator=g) * size, torch.randn(hidden, generator=g)


def check_normed(build: str, hidden: int, n_rows: int, seed: int) -> Tensor:
    x, weights = some_rows(n_rows, hidden, seed)
    columns = padded(hidden)
    got, scales = received(
        build,
        "normed",
        n_rows=n_rows,
        columns=columns,
        hop=words(x.numpy(), TAG),
        weights=weights,
        seed=seed,
        HIDDEN=hidden,
    )
    normed = rms_norm_torch(x, weights, EPS)
    for block in range(len(got)):
        wanted = normed if build == "f16" else x * weights
        assert_near(build, got[block, :, :hidden], wanted)
        assert (got[block, :, hidden:] == 0).all()
        if build == "f16":
            assert (scales[block] == 1).all()
        else:
            torch.testing.assert_close(wanted * scales[block, :, None], normed, rtol=2e-6, atol=1e-12)
    assert torch.equal(got[0], got[1])
    return got[0]


def test_a_block_keeps_what_its_own_tiles_will_be_added_to() -> None:
    hidden, n_rows, n_blocks = 192, 3, 2
    x, weights = some_rows(n_rows, hidden, 5)
    n_tiles = hidden // 16 // n_blocks
    kept = np.zeros((n_blocks, n_tiles, 16, 8), dtype=np.float32)
    received(
        "bf16",
        "normed",
        n_rows=n_rows,
        columns=padded(hidden),
        hop=words(x.numpy(), TAG),
        weights=weights,
        residual=kept,
        HIDDEN=hidden,
    )
    tiles = x.numpy().reshape(n_rows, n_tiles, n_blocks, 16)  # partition to the blocks in turn
    np.testing.assert_array_equal(kept[..., :n_rows], tiles.transpose(2, 1, 3, 0))


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_normed_rows_arrive_whole_from_any_order_of_words(build: str) -> None:
    for seed, n_rows in enumerate((1, 3, 8)):
        check_normed(build, 192, n_rows, seed)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_long_rows_come_in_several_turns(build: str) -> None:
    """More pairs than a thread fetches at once for all rows: 2,112 columns are 17 a thread."""
    check_normed(build, 2112, 2, 5)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_a_normed_row_is_the_same_alone_and_among_neighbours(build: str) -> None:
    x, weights = some_rows(8, 192, 9)
    kept = {"columns": padded(192), "weights": weights}
    among, among_scales = received(build, "normed", n_rows=8, hop=words(x.numpy(), TAG), seed=1, **kept)  # type: ignore[arg-type]
    alone, alone_scales = received(build, "normed", n_rows=1, hop=words(x[5:6].numpy(), TAG), seed=2, **kept)  # type: ignore[arg-type]
    assert torch.equal(among[0, 5], alone[0, 0])
    assert torch.equal(among_scales[0, 5], alone_scales[0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("kept", TYPES)
def test_layer_0_takes_the_embedding_of_the_rows_token(kept: str) -> None:
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kept]
    g = torch.Generator().manual_seed(3)
    embedding = torch.randn(64, 192, generator=g).to(dtype)
    weights = torch.randn(192, generator=g)
    tables = tensor_tables(LAYOUT, torch.device("cpu"))
    slots, tokens = torch.tensor([6, 0, 3]), torch.tensor([63, 0, 17])
    tables.table["row_slot"][:3] = slots.int()
    tables.table["token"][slots] = tokens.int()
    got, scales = received(
        "bf16",
        "normed",
        n_rows=3,
        columns=padded(192),
        weights=weights,
        embedding=embedding,
        table=tables.table.memory,
        EMBEDDING_TYPE=TYPES[kept],
    )
    x = embedding[tokens].float()
    assert_near("bf16", got[0, :, :192], x * weights)
    torch.testing.assert_close(x * weights * scales[1, :, None], rms_norm_torch(x, weights, EPS), rtol=2e-6, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("n_columns", "slab"), [(256, 256), (352, 384), (2208, 2240), (704, 256)])
def test_pairs_arrive_slab_by_slab(build: str, n_columns: int, slab: int) -> None:
    g = torch.Generator().manual_seed(n_columns)
    n_rows = 3
    values = torch.randn(n_rows, n_columns, generator=g).to(HALF[build])
    hop = words(values.view(torch.int16).numpy().view(np.uint32), TAG)
    whole = torch.cat((values.float(), torch.zeros(n_rows, slab)), 1)
    for begin in range(0, n_columns, slab):
        got, _ = received(
            build, "pairs", n_rows=n_rows, columns=slab, hop=hop, n_pairs=n_columns // 2, begin=begin, seed=begin
        )
        wanted = whole[:, begin : begin + slab]
        for block in range(2):
            if build == "int8":
                assert_near(build, got[block], wanted)
            else:
                assert torch.equal(got[block], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_hand_offs_compile_for_a_card(build: str) -> None:
    shape = {"N_COMPUTE_WARPS": 8, "N_BLOCKS": 132, "HIDDEN": 2048, **BUILDS[build]}
    made = headers(LAYOUT, 64, **shape)
    assert cubin(SOURCE, "handoff.cu", arch="sm_90", headers=headers_of(SOURCE, made))
