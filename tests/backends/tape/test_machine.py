"""The tape's machine: each primitive against an obvious oracle on the CPU, and all of them compiled for the card.

The emulator is worth what it catches: so wrong programs are run too, and have to be found out.
"""

import re
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import build
from ostinato.backends.machine import SHARED_BYTES, Capability, Chip
from ostinato.errors import HardwareCannot
from tests.backends.tape.emulator import DidNotEnd, Program, compiled, constants, headers_of, words

EVERYTHING = Path(__file__).with_name("every_primitive.cu").read_text()
N_COMPUTE_WARPS = 2
THREADS = 32 * N_COMPUTE_WARPS + 32  # the compute warps and the loader
SHAPE = {"shape.h": constants(N_COMPUTE_WARPS=N_COMPUTE_WARPS, DEADLINE_NS="100000000LL")}

SOURCE = r"""
#include "machine.h"

#define THREADS (N_COMPUTE_WARPS * 32 + 32)
struct State {
    u32 abort;
};
struct Words {
    u64* out;
    const u64* in;
    u64 n;
    State* state;
};

// --- a warp together ---

struct Fragments {
    const uint4* a;
    const uint2* b;
    uint4* c;
};
KERNEL(fragments_bf16, Fragments, all, 32) {
    multiply_bf16((float*)(all.c + thread()), all.a[thread()], all.b[thread()].x, all.b[thread()].y);
}
KERNEL(fragments_f16, Fragments, all, 32) {
    multiply_f16((float*)(all.c + thread()), all.a[thread()], all.b[thread()].x, all.b[thread()].y);
}
KERNEL(fragments_s8, Fragments, all, 32) {
    multiply_s8((int*)(all.c + thread()), all.a[thread()], all.b[thread()].x, all.b[thread()].y);
}

KERNEL(shuffles, Words, all, THREADS) {
    const int t = thread();
    const u64 value = all.in[t];
    u64* out = all.out + 4 * t;
    out[0] = shuffle_xor(value, (int)all.n);
    out[1] = shuffle_xor((u32)value, (int)all.n);
    out[2] = shuffle(value, (int)(value % 32));
    out[3] = votes(value % 3 == 0);
}

// --- all together ---

KERNEL(compute_warps_only, Words, all, THREADS) {  // the reader never comes
    if (thread() >= N_COMPUTE_WARPS * 32) return;
    u32* sums = (u32*)shared_memory();
    if (thread() == 0) sums[0] = 0;
    for (u64 i = 0; i < all.n; ++i) {
        sync_compute_warps();
        atomic_add_shared(sums, 1u);
        sync_compute_warps();
        if (sums[0] != (i + 1) * N_COMPUTE_WARPS * 32) all.out[0] += 1;
    }
}
KERNEL(compute_warps_short, Words, all, THREADS) {
    if (thread() != 3 && thread() < N_COMPUTE_WARPS * 32) sync_compute_warps();
    if (thread() == 3) all.out[0] = 1;
}
KERNEL(diverged, Words, all, THREADS) {
    u32 value = (u32)thread();
    if (thread() % 2) value = shuffle_xor(value, 2);
    else sync_warp();
    all.out[thread()] = value;
}
KERNEL(order, Words, all, THREADS) {
    const u32 place = atomic_add_shared((u32*)all.out, 1u);
    all.out[1 + place] = (u64)(block() * THREADS + thread());
}

// --- gates and copies: a ring of `n % 8` stages, filled by the reader, emptied by the compute warps ---

#define CHUNK 1536
struct Ring {
    Gate full[8], empty[8];
};
struct Stream {
    const char* from;
    u64 n_chunks, n_stages, hasty;  // hasty: the reader does not wait for a stage to be empty
    u64* sums;
};
// A chunk is requested by one thread, from the copy engine, or by a warp, which copies 16 bytes a lane.
template <bool BULK>
DEVICE void request(Ring* ring, char* stages, const char* from, u64 i, int stage) {
    Gate* gate = &ring->full[stage];
    if (BULK) {
        if (i % 2) gate_expect(gate, CHUNK);
        bulk_copy(stages + stage * CHUNK, from + i * CHUNK, CHUNK / 2, gate);
        bulk_copy(stages + stage * CHUNK + CHUNK / 2, from + i * CHUNK + CHUNK / 2, CHUNK / 2, gate);
        if (i % 2 == 0) gate_expect(gate, CHUNK);
    } else {
        for (int at = thread() % 32 * 16; at < CHUNK; at += 512) {
            copy_16_bytes(stages + stage * CHUNK + at, from + i * CHUNK + at);
        }
        gate_arrive_copied(gate);
    }
}
template <bool BULK>
DEVICE void stream_by(const Stream& all) {
    Ring* ring = (Ring*)shared_memory();
    char* stages = shared_memory() + 128;
    const bool reads = BULK ? thread() == N_COMPUTE_WARPS * 32 : thread() / 32 == N_COMPUTE_WARPS;
    if (thread() == 0) {
        for (u64 i = 0; i < all.n_stages; ++i) {
            gate_init(&ring->full[i], BULK ? 1 : 32);
            gate_init(&ring->empty[i], N_COMPUTE_WARPS);
        }
        gate_init_fence();
    }
    sync_block();
    const char* from = all.from + block() * all.n_chunks * CHUNK;
    for (u64 i = 0; i < all.n_chunks; ++i) {
        const int stage = (int)(i % all.n_stages), phase = (int)(i / all.n_stages) & 1;
        if (reads) {
            while (!all.hasty && !gate_passed(&ring->empty[stage], phase ^ 1)) {
            }
            request<BULK>(ring, stages, from, i, stage);
        } else if (thread() < N_COMPUTE_WARPS * 32) {
            while (!gate_passed(&ring->full[stage], phase)) {
            }
            u64 sum = 0;
            for (int at = thread(); at < CHUNK; at += N_COMPUTE_WARPS * 32) {
                if (at % 512 == thread()) relax();
                sum += (u8)stages[stage * CHUNK + at];
            }
            all.sums[(block() * all.n_chunks + i) * N_COMPUTE_WARPS * 32 + thread()] = sum;
            sync_warp();
            if (thread() % 32 == 0) gate_arrive(&ring->empty[stage]);
        }
    }
    if (reads) {
        for (u64 i = 0; i < all.n_stages; ++i) {  // all that was asked for has come
            const u64 last = all.n_chunks - 1 - (all.n_chunks - 1 - i) % all.n_stages;
            while (!gate_passed(&ring->full[i], (int)(last / all.n_stages) & 1)) {
            }
        }
    }
}
KERNEL(stream, Stream, all, THREADS) { stream_by<true>(all); }
KERNEL(stream_16_bytes, Stream, all, THREADS) { stream_by<false>(all); }
KERNEL(runs_away_16_bytes, Stream, all, THREADS) {
    Gate* gate = (Gate*)shared_memory();
    if (thread() > 0) return;
    gate_init(gate, 1);
    copy_16_bytes(shared_memory() + 128, all.from);
    if (all.hasty) gate_arrive(gate);  // which does not wait for copies
    else gate_arrive_copied(gate);
}
KERNEL(too_many_copied, Words, all, THREADS) {
    Gate* gate = (Gate*)shared_memory();
    if (thread() == 0) gate_init(gate, 2);
    sync_block();
    if (thread() < 1 + (int)all.n) gate_arrive_copied(gate);
}
KERNEL(not_aligned, Stream, all, THREADS) { copy_16_bytes(shared_memory() + 8, all.from); }
KERNEL(runs_away, Stream, all, THREADS) {
    Gate* gate = (Gate*)shared_memory();
    if (thread() == 0) {
        gate_init(gate, 1);
        gate_init_fence();
        gate_expect(gate, 4096);
        bulk_copy(shared_memory() + 128, all.from, 4096, gate);
    }
}
KERNEL(too_far, Stream, all, THREADS) {
    Gate* gate = (Gate*)shared_memory();
    gate_init(gate, THREADS);
    if (thread() == 0) bulk_copy(shared_memory() + 128, all.from, 4096, gate);
}
KERNEL(too_many, Words, all, THREADS) {
    Gate* gate = (Gate*)shared_memory();
    if (thread() == 0) gate_init(gate, 2);
    sync_block();
    if (thread() < 1 + (int)all.n) gate_expect(gate, 16);
}
KERNEL(unmade, Words, all, THREADS) { gate_arrive((Gate*)shared_memory() + all.n); }

// --- between blocks: block 0 tells, block 1 listens and counts what came in the wrong order ---

KERNEL(in_order, Words, all, 32) {  // wrong: takes the second put for a sign of the first
    for (u64 i = 1; i <= all.n; ++i) {
        if (block() == 0) {
            put(all.out + thread(), (u32)i, 1);
            put(all.out + 32 + thread(), (u32)i, 1);
        } else {
            while ((u32)load_relaxed(all.out + 32 + thread()) < i) {
            }
            if ((u32)load_relaxed(all.out + thread()) < i) all.out[64 + thread()] += 1;
        }
    }
}
KERNEL(tagged, Words, all, 32) {  // each value says by itself that it has come
    for (u64 i = 1; i <= all.n; ++i) {
        u64 both[2];
        u64* place = all.out + 4 * thread() + 2 * (i % 2);
        u64* answer = all.out + 128 + thread();
        if (block() == 0) {
            put(place, (u32)(i * 3), (u32)i);
            put(place + 1, (u32)(i * 5), (u32)i);
            while (load_relaxed(answer) >> 32 != i) {
            }
        } else {
            do load_two_relaxed(place, both);
            while (both[0] >> 32 != i || both[1] >> 32 != i);
            if ((u32)both[0] != (u32)(i * 3) || (u32)both[1] != (u32)(i * 5)) all.out[160 + thread()] += 1;
            put(answer, 0, (u32)i);
        }
    }
}
KERNEL(raised, Words, all, 64) {  // puts of all threads, a sync, one release; or no sync, or no release
    const bool synced = all.n & 1, released = all.n & 2;
    if (block() == 0) {
        put(all.out + thread(), 1, 1);
        if (synced) sync_block();
        if (thread() == 0 && released) store_release(all.out + 128, 1);
        if (thread() == 0 && !released) put(all.out + 128, 1, 0);
    } else {
        while (load_acquire(all.out + 128) == 0) relax();
        if (load_relaxed(all.out + thread()) == 0) all.out[64 + thread()] += 1;
    }
}
KERNEL(own_puts, Words, all, 32) {
    u64* place = all.out + thread();
    for (u64 i = 1; i <= all.n; ++i) {
        put(place, (u32)i, 7);
        if (load_relaxed(place) != (7ull << 32 | i)) all.out[32 + thread()] += 1;
    }
}

// --- waits ---

KERNEL(nothing_arrives, Words, all, THREADS) {
    for (u64 i = 0; i < all.n; ++i) {
        for (BoundedWait w(all.state); load_relaxed(all.in) == 0 && w.keep_waiting();) {
        }
    }
    all.out[block() * THREADS + thread()] = 1;
}
KERNEL(host_comes, Words, all, THREADS) {
    u64 i = 0;
    do {
        for (BoundedWait w(all.state); load_acquire(all.in) <= i && w.keep_waiting();) {
        }
        i = load_acquire(all.in);
        if (thread() == 0 && block() == 0) store_release(all.out, i);
    } while (i < all.n);
}
KERNEL(for_ever, Words, all, THREADS) {
    while (all.n) relax();
}

// --- what the card would not do ---

struct Inside {
    u32 first[4], second[4];
};
DEVICE void faults(const Words& all, char* shared, u64 n) {
    const u64 large = all.in[0];
    if (n == 0) shared[large] = 1;
    if (n == 1) all.out[0] = ((const uint4*)(all.in + large % 2))->x;
    if (n == 2) all.out[0] = 1u << large;
    if (n == 3) all.out[0] = ((const Inside*)shared)->first[large % 8];
    if (n == 4) all.out[0] = 7 / (large - large % 1024);
    if (n == 5) {
        volatile char frame[STACK_BYTES];
        frame[0] = 1;
        all.out[0] = (u64)frame[0];
    }
}
KERNEL(one_faults, Words, all, THREADS) {
    sync_block();
    if (thread() == 70) faults(all, shared_memory(), all.n);
}

// --- numbers ---

KERNEL(numbers, Words, all, 32) {
    for (u64 i = (u64)thread(); i < all.n; i += 32) {
        u64* out = all.out + 9 * i;
        const u32 x = (u32)all.in[2 * i], y = (u32)(all.in[2 * i] >> 32), z = (u32)all.in[2 * i + 1];
        const float a = float_of(x), b = float_of(y);
        float low, high, sine, cosine;
        out[0] = pair_bf16(a, b);
        out[1] = pair_f16(a, b);
        split_as<true>(z, low, high);
        out[2] = (u64)bits_of(high) << 32 | bits_of(low);
        split_as<false>(z, low, high);
        out[3] = (u64)bits_of(high) << 32 | bits_of(low);
        out[4] = (u64)to_bf16(a) << 16 | to_f16(b);
        out[5] = bits_of(from_f16((u16)z));
        out[6] = permute_bytes(x, y, z);
        out[7] = (u64)(lowest_bit(x) + 1);
        const float angle = (float)(int)z * 1e-3f;
        sincos_exact(angle, sine, cosine);
        out[8] = (u64)bits_of(sine) << 32 | bits_of(cosine);
    }
}
"""


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(SOURCE, "primitives.cpp", headers=SHAPE)


def zeros(n: int) -> np.ndarray:
    return np.zeros(n, np.uint64)


# --- a warp together ---


def fragments(matrix: np.ndarray, n_rows: int, per_word: int) -> np.ndarray:
    """Words [32 lanes, registers] of a or (transposed) b, in the order of the book."""
    halves = matrix.shape[1] // 2 // per_word
    cut = matrix.reshape(n_rows // 8, 8, 2, halves, per_word)  # row half, g, column half, q, value
    lanes = np.ascontiguousarray(cut.transpose(1, 3, 2, 0, 4)).reshape(32, -1)
    return lanes.view(np.uint32)


def multiplied(program: Program, kernel: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, seed: int) -> np.ndarray:
    """c [16, 8] + a [16, k] @ b [k, 8], through lanes."""
    per_word = 4 // a.itemsize
    lanes_a, lanes_b = fragments(a, 16, per_word), fragments(np.ascontiguousarray(b.T), 8, per_word)
    lanes_c = np.ascontiguousarray(c.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3))  # g, q, row half, value
    program.run(kernel, words(lanes_a, lanes_b, lanes_c), seed=seed)
    return np.ascontiguousarray(lanes_c.transpose(2, 0, 1, 3)).reshape(16, 8)


@pytest.mark.parametrize("seed", range(4))
def test_the_tensor_product_of_bfloat16_is_a_matrix_product(program: Program, seed: int) -> None:
    dice = np.random.default_rng(seed)
    wide_a, wide_b = (dice.normal(size=shape).astype(np.float32) for shape in ((16, 16), (16, 8)))
    a, b = ((wide.view(np.uint32) >> 16).astype(np.uint16) for wide in (wide_a, wide_b))
    c = dice.normal(size=(16, 8)).astype(np.float32)
    exact = [(half.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for half in (a, b)]
    got = multiplied(program, "fragments_bf16", a, b, c, seed)
    np.testing.assert_allclose(got, c + exact[0] @ exact[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_tensor_product_of_float16_is_a_matrix_product(program: Program, seed: int) -> None:
    dice = np.random.default_rng(seed)
    a, b = (dice.normal(size=shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    c = dice.normal(size=(16, 8)).astype(np.float32)
    got = multiplied(program, "fragments_f16", a, b, c, seed)
    np.testing.assert_allclose(got, c + a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_tensor_product_of_bytes_is_a_matrix_product(program: Program, seed: int) -> None:
    dice = np.random.default_rng(seed)
    a, b = (dice.integers(-128, 128, shape, np.int8) for shape in ((16, 32), (32, 8)))
    c = dice.integers(-1000, 1000, (16, 8), np.int32)
    got = multiplied(program, "fragments_s8", a, b, c, seed)
    np.testing.assert_array_equal(got, c + a.astype(np.int32) @ b.astype(np.int32))


@settings(deadline=None, max_examples=40)
@given(number=st.integers(0, 31), seed=st.integers(0, 2**32))
def test_shuffles_take_from_the_lane_that_they_name(program: Program, number: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**63, 2 * THREADS, np.uint64)
    out = zeros(2 * THREADS * 4).reshape(-1, 4)
    program.run("shuffles", words(out, values, number, 0), seed=seed)
    for thread in range(THREADS):
        lane, warp = thread % 32, thread - thread % 32
        value = [int(values[warp + i]) for i in range(32)]
        low = [v % 2**32 for v in value]
        everyone = sum(1 << i for i in range(32) if value[i] % 3 == 0)
        expected = [value[lane ^ number], low[lane ^ number], value[value[lane] % 32], everyone]
        assert out[thread].tolist() == expected


def test_lanes_that_meet_at_different_places_are_told(program: Program) -> None:
    with pytest.raises(DidNotEnd, match=r"misused the machine.*other lanes of the warp are at"):
        program.run("diverged", words(zeros(THREADS), 0, 0, 0))


# --- all together ---


@pytest.mark.parametrize("seed", range(8))
def test_compute_warps_meet_without_the_reader(program: Program, seed: int) -> None:
    out = zeros(1)
    program.run("compute_warps_only", words(out, 0, 20, 0), n_blocks=3, shared_bytes=64, seed=seed)
    assert out[0] == 0


def test_a_deadlock_is_told_with_who_waits_where(program: Program) -> None:
    with pytest.raises(DidNotEnd) as told:
        program.run("compute_warps_short", words(zeros(1), 0, 0, 0), n_blocks=2)
    text = str(told.value)
    line = 1 + SOURCE[: SOURCE.index("if (thread() != 3")].count("\n")
    assert "deadlock: no thread can go on" in text
    for block in (0, 1):
        assert f"block {block}: waits at sync_compute_warps (primitives.cpp:{line}), 63 threads, the first is 0" in text
    assert "66 threads have ended" in text


def test_a_seed_decides_the_order(program: Program) -> None:
    def order(seed: int) -> list[int]:
        out = zeros(1 + 4 * THREADS)
        program.run("order", words(out, 0, 0, 0), n_blocks=4, seed=seed)
        assert sorted(out[1:].tolist()) == list(range(4 * THREADS))
        return list(out[1:].tolist())

    assert order(1) == order(1)
    assert order(1) != order(2)


# --- gates and copies ---

CHUNK = 1536
RING_BYTES = 128 + 8 * CHUNK


STREAMS = ("stream", "stream_16_bytes")


def streamed(program: Program, kernel: str, n_chunks: int, n_stages: int, *, hasty: bool, seed: int) -> bool:
    """Whether every compute warp saw every chunk as it was sent."""
    n_blocks, compute_warps = 2, 32 * N_COMPUTE_WARPS
    data = np.random.default_rng(seed).integers(0, 256, (n_blocks, n_chunks, CHUNK), np.uint8)
    sums = np.zeros((n_blocks, n_chunks, compute_warps), np.uint64)
    given = words(data, n_chunks, n_stages, int(hasty), sums)
    program.run(kernel, given, n_blocks=n_blocks, shared_bytes=RING_BYTES, seed=seed)
    expected = data.reshape(n_blocks, n_chunks, -1, compute_warps).sum(axis=2, dtype=np.uint64)
    return bool((sums == expected).all())


@pytest.mark.parametrize("kernel", STREAMS)
@settings(deadline=None, max_examples=40)
@given(n_chunks=st.integers(8, 40), n_stages=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_a_ring_of_gates_hands_over_every_byte(
    program: Program, kernel: str, n_chunks: int, n_stages: int, seed: int
) -> None:
    assert streamed(program, kernel, n_chunks, n_stages, hasty=False, seed=seed)


@pytest.mark.parametrize("kernel", STREAMS)
def test_a_loader_that_does_not_wait_for_an_empty_stage_is_found_out(program: Program, kernel: str) -> None:
    def good(seed: int) -> bool:
        try:
            return streamed(program, kernel, 30, 2, hasty=True, seed=seed)
        except DidNotEnd as error:
            return "more arrivals" not in str(error) and "limit" not in str(error)

    assert not all(good(seed) for seed in range(10))


@pytest.mark.parametrize(("kernel", "hasty"), [("runs_away", 0), ("runs_away_16_bytes", 0), ("runs_away_16_bytes", 1)])
def test_a_block_that_ends_before_its_copies_is_told(program: Program, kernel: str, hasty: int) -> None:
    data = np.zeros(4096, np.uint8)
    told = 0
    for seed in range(10):
        try:
            program.run(kernel, words(data, 0, 0, hasty, 0), shared_bytes=RING_BYTES, seed=seed)
        except DidNotEnd as error:
            told += "block 0 ends before its copies" in str(error)
    assert told > 0


@pytest.mark.parametrize(
    ("kernel", "shared_bytes", "n", "says"),
    [
        ("too_far", 128 + 4080, 0, "does not lie in the block's shared memory"),
        ("unmade", 4096, 1, "was not made by gate_init"),
        ("unmade", 4096, 512, "the gate is not in the block's shared memory"),
        ("too_many", 4096, 2, "more arrivals"),
        ("too_many_copied", 4096, 2, "more arrivals"),
        ("not_aligned", 4096, 0, "not 16-byte aligned"),
    ],
)
def test_gates_and_copies_that_the_card_would_not_take_are_told(
    program: Program, kernel: str, shared_bytes: int, n: int, says: str
) -> None:
    data = np.zeros(4096, np.uint8)
    with pytest.raises(DidNotEnd, match=says):
        program.run(kernel, words(data, 0, n, 0, 0), shared_bytes=shared_bytes)


LARGE = 1023


@pytest.mark.parametrize(
    ("n", "says"),
    [
        (0, "no such memory"),
        (1, "a trap"),  # a word of 16 bytes at a multiple of 8
        (2, "a trap"),  # a shift by more than a word
        (3, "a trap"),  # number 7 of an array of 4
        (4, "divided by zero"),
        (5, "the stack is full"),
    ],
)
def test_what_the_card_would_not_do_is_told_with_its_line(program: Program, n: int, says: str) -> None:
    with pytest.raises(DidNotEnd) as told:
        program.run("one_faults", words(zeros(1), np.full(4, LARGE, np.uint64), n, 0), n_blocks=2, shared_bytes=128)
    assert f"thread 70: {says}" in str(told.value)
    line = 1 + SOURCE[: SOURCE.index("sync_block();\n    if (thread() == 70)")].count("\n")
    assert f"after sync_block (primitives.cpp:{line})" in str(told.value)
    if shutil.which("addr2line"):
        assert re.search(r"  0x[0-9a-f]+ in faults.* \(primitives\.cpp:\d+", str(told.value))


# --- between blocks ---


def wrongs(program: Program, kernel: str, n: int, counters: slice, seed: int, n_blocks: int = 2) -> int:
    """How many errors the threads found and counted."""
    out = zeros(256)
    program.run(kernel, words(out, 0, n, 0), n_blocks=n_blocks, seed=seed)
    return int(out[counters].sum())


def test_puts_overtake_each_other(program: Program) -> None:
    assert sum(wrongs(program, "in_order", 50, slice(64, 96), seed) for seed in range(10)) > 0


@pytest.mark.parametrize("seed", range(10))
def test_a_value_with_its_tag_is_whole(program: Program, seed: int) -> None:
    assert wrongs(program, "tagged", 30, slice(160, 192), seed) == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_thread_sees_its_own_puts(program: Program, seed: int) -> None:
    assert wrongs(program, "own_puts", 30, slice(32, 64), seed, n_blocks=1) == 0


def test_a_release_after_a_sync_shows_what_all_have_put(program: Program) -> None:
    synced, released = 1, 2

    def found(what: int) -> int:
        return sum(wrongs(program, "raised", what, slice(64, 128), seed) for seed in range(40))

    assert found(synced | released) == 0
    assert found(synced) > 0
    assert found(released) > 0


# --- waits ---


def test_a_wait_that_outlasts_its_deadline_ends_all_waits(program: Program) -> None:
    out, state = zeros(2 * THREADS), np.zeros(1, np.uint32)
    begun = time.monotonic()
    program.run("nothing_arrives", words(out, zeros(1), 50, state), n_blocks=2)
    assert 0.1 < time.monotonic() - begun < 2  # one deadline of a tenth of a second, not fifty
    assert out.all()
    assert state[0] == 1


def test_the_host_plays_along_in_another_thread(program: Program) -> None:
    out, told, state, n = zeros(1), zeros(1), np.zeros(1, np.uint32), 20

    def host() -> None:
        for i in range(1, n + 1):
            told[0] = i
            while out[0] < i and state[0] == 0:
                time.sleep(0.0001)

    other = threading.Thread(target=host)
    other.start()
    program.run("host_comes", words(out, told, n, state), n_blocks=4)
    other.join()
    assert out[0] == n
    assert state[0] == 0


def test_several_grids_run_in_several_threads(program: Program) -> None:
    good: list[bool] = []
    runs = [
        threading.Thread(target=lambda i=i: good.append(streamed(program, "stream", 20, 3, hasty=False, seed=i)))
        for i in range(4)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert good == [True] * 4


def test_a_run_that_goes_on_for_ever_is_ended(program: Program) -> None:
    with pytest.raises(DidNotEnd, match=r"took too long.*\n.*polls, last at relax"):
        program.run("for_ever", words(0, 0, 1, 0), limit_s=0.05)


# --- numbers ---


def narrowed(bits: np.ndarray) -> np.ndarray:
    """Of float32 bits, those of bfloat16 rounded to the nearest even; not-a-numbers as the card writes them."""
    wide = bits.astype(np.uint64)
    rounded = (wide + 0x7FFF + (wide >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded).astype(np.uint64)


def halved(bits: np.ndarray) -> np.ndarray:
    """Of float32 bits, those of float16, by numpy."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = bits.view(np.float32).astype(np.float16).view(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, half).astype(np.uint64)


def test_numbers_and_bits_are_those_of_the_book(program: Program) -> None:
    dice = np.random.default_rng(5)
    n = 4096
    given = dice.integers(0, 2**32, (n, 4), np.uint32)
    small = dice.normal(size=(n // 2, 2)).astype(np.float32) * np.float32(2.0) ** dice.integers(-28, 18, (n // 2, 2))
    given[: n // 2, :2] = small.astype(np.float32).view(np.uint32)  # where float16 has its edges
    given[:40, 0] = np.arange(0x477FEFF0, 0x477FEFF0 + 40)  # around what rounds to infinity
    given[40:80, 0] = np.arange(0x387FEFF0, 0x387FEFF0 + 40)  # around the subnormal
    given[80:84, :2] = [[0, 0x80000000], [0x7F800000, 0xFF800000], [0x7FC00000, 0x7F800001], [1, 0x33000000]]
    out = np.zeros((n, 9), np.uint64)
    program.run("numbers", words(out, np.ascontiguousarray(given), n, 0))
    x, y, z = (given[:, i].copy() for i in range(3))
    shift = np.uint64(16)
    np.testing.assert_array_equal(out[:, 0], narrowed(y) << shift | narrowed(x))
    np.testing.assert_array_equal(out[:, 1], halved(y) << shift | halved(x))
    np.testing.assert_array_equal(out[:, 4], narrowed(x) << shift | halved(y))
    np.testing.assert_array_equal(out[:, 2], (z & 0xFFFF0000).astype(np.uint64) << np.uint64(32) | z << 16)
    halves = np.ascontiguousarray(z).view(np.float16).astype(np.float32).reshape(n, 2)
    np.testing.assert_array_equal(out[:, 3].copy().view(np.float32).reshape(n, 2), halves)
    np.testing.assert_array_equal(out[:, 5].astype(np.uint32).view(np.float32), halves[:, 0])
    angles = (z.view(np.int32).astype(np.float32) * np.float32(1e-3)).astype(np.float64)
    both = out[:, 8].copy().view(np.float32).reshape(n, 2)
    np.testing.assert_allclose(both, np.stack([np.cos(angles), np.sin(angles)], axis=1), atol=1e-6)
    for i in range(0, n, 7):
        pool = [*int(x[i]).to_bytes(4, "little"), *int(y[i]).to_bytes(4, "little")]
        choices = [int(z[i]) >> 4 * k & 15 for k in range(4)]
        chosen = [255 * (pool[c & 7] >> 7) if c & 8 else pool[c & 7] for c in choices]
        assert int(out[i, 6]) == int.from_bytes(bytes(chosen), "little")
        bits = int(x[i])
        assert int(out[i, 7]) == (bits & -bits).bit_length()


# --- the card ---


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("bulk", [1, 0])
def test_every_primitive_runs_on_the_cpu(bulk: int) -> None:
    shape = constants(N_COMPUTE_WARPS=1, BULK_COPIES=bulk)
    program = compiled(EVERYTHING, "everything.cpp", headers={"shape.h": shape})
    places, data, numbers = zeros(64), np.ones(256, np.uint8), np.zeros(32, np.float32)
    program.run("every_primitive", words(places, data, numbers, np.zeros(2, np.uint32)), shared_bytes=1024)
    assert places[8] == 64


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_primitive_compiles_for_every_chip(capability: Capability) -> None:
    chip = Chip(capability, 1, SHARED_BYTES[capability])
    shape = {"shape.h": constants(N_COMPUTE_WARPS=1, BULK_COPIES=int(chip.has_bulk_copies))}
    headers = {name: text for name, text in headers_of(EVERYTHING, shape).items() if name != "machine_cpu.h"}
    try:
        binary = build.cubin(EVERYTHING, "everything.cu", arch=chip.exact_arch, headers=headers)
    except HardwareCannot as error:
        pytest.skip(f"nothing was compiled for CUDA: {error}")
    assert b"every_primitive" in binary
