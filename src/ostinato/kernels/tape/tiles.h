// What a warp multiplies: its columns of some tiles, chunk by chunk, as they come through the ring.
//
// Tiles are multiplied TILES_AT_ONCE together: of a chunk's columns a player keeps the activations in registers while
// the same columns of each of those tiles pass. Here are the parts that all kinds of weights share, and HALF, weights
// as they are; packed ones are in packed.h. Twin: linear_torch over what pack.py says the weights are.
#pragma once
#include "fragments.h"
#include "handoff.h"

// What a warp multiplies between two looks at anything else. It has no pointers to shared memory: those that are made
// from shared_memory() at hand are known to lie there, and cost half as much.
struct Work {
    State* state;
    Place place;
    int warp, lane;
    int width, begin, n_rows;         // activations: [rows][width + ROW_PADDING], from the matrix's column `begin` on
    int of_matrix, chunk, end_chunk;  // column tiles of each player; which chunks
    int n_tiles;                      // at most TILES_AT_ONCE
    int first_sum, pitch;             // where its sums begin, and how many rows they have: 2, 4 or 8
    bool adds;                        // to sums that are there already
    int slab_chunks;                  // what so many chunks come to is put aside before the next is added
};

DEVICE Shared& shared_here() { return *(Shared*)shared_memory(); }
DEVICE const char* stage_at(const Place& place) { return shared_memory() + RING_AT + place.stage * STAGE_BYTES; }
DEVICE const u16* activations_here() { return (const u16*)(shared_memory() + RING_AT + STAGES * STAGE_BYTES); }

DEVICE int first_column(const Work& work, int kind, int chunk, int n) {
    return (chunk * tiles_a_chunk(kind) * N_PLAYERS + work.warp * n) * 16 - work.begin;
}
DEVICE const u16* row_of(const Work& work, int row) {
    return activations_here() + (row < work.n_rows ? row : 0) * (work.width + ROW_PADDING);
}

// Whether some matrix of this model has a last chunk that is not whole.
DEVICE constexpr bool leaves_rest(int kind, int columns) {
    const int unit = (kind == KIND_HALF ? 16 : 32) * N_PLAYERS;
    return (columns + unit - 1) / unit * unit / (16 * N_PLAYERS) % tiles_a_chunk(kind) != 0;
}
DEVICE constexpr bool has_rest(int kind) {
    return leaves_rest(kind, HIDDEN) || leaves_rest(kind, FF) || leaves_rest(kind, QUERY_COLUMNS);
}

// --- sums of one lane: rows g (c[0], c[1]) and g + 8 (c[2], c[3]) of a tile, two rows of activations each ---

DEVICE void leave_two(const Work& work, float* place, float first, float second) {
    float2* const both = (float2*)place;
    const float2 before = work.adds ? *both : float2{0.0f, 0.0f};
    *both = work.adds ? float2{before.x + first, before.y + second} : float2{first, second};
}
// Rows 2 q and 2 q + 1.
DEVICE void leave_sums(const Work& work, int tile, const float c[4]) {
    const int g = work.lane / 4, row = work.lane % 4 * 2;
    if (row >= work.pitch) return;
    const int r = (work.warp * TILES_AT_ONCE + tile) * 16 + g;
    float* const place = shared_here().sums + work.first_sum + r * work.pitch + row;
    leave_two(work, place, c[0], c[1]);
    leave_two(work, place + 8 * work.pitch, c[2], c[3]);
}
// Rows 0 and 1, of which every lane has one of four partial sums; afterwards each lane has one of the four results.
DEVICE void leave_few_sums(const Work& work, int tile, float c[4]) {
    UNROLL
    for (int k = 0; k < 4; k++) {
        c[k] += shuffle_xor(c[k], 1);
        c[k] += shuffle_xor(c[k], 2);
    }
    const int g = work.lane / 4, q = work.lane % 4;
    const float mine = q < 2 ? (q == 0 ? c[0] : c[1]) : (q == 2 ? c[2] : c[3]);
    const int r = (work.warp * TILES_AT_ONCE + tile) * 16 + g + q / 2 * 8;
    float* const place = shared_here().sums + work.first_sum + r * 2 + q % 2;
    *place = work.adds ? *place + mine : mine;
}

// --- HALF: weights as they are ---

struct HalfActivations {
    u32 b[tiles_a_chunk(KIND_HALF)][2];
    float step[tiles_a_chunk(KIND_HALF)][2];  // int8: what a step is worth, for the rows of c[0] and c[1]
};

template <bool WHOLE>
DEVICE void prepare_half(const Work& work, int chunk, int n, HalfActivations& out) {
    const int g = work.lane / 4, q = work.lane % 4, column = first_column(work, KIND_HALF, chunk, n);
    const u16* const row = row_of(work, g);
    UNROLL
    for (int t = 0; t < tiles_a_chunk(KIND_HALF); t++) {
        const bool there = WHOLE || t < n;
        const int at = column + 16 * t + 2 * q;
        UNROLL
        for (int h = 0; h < 2; h++) {
            if (WIDE) {
                out.b[t][h] = there ? *(const u32*)(row + at + 8 * h) : 0;
                continue;
            }
            const u16 two = there ? *(const u16*)((const u8*)row + at + 8 * h) : 0;
            out.b[t][h] = pair_of((float)(signed char)two, (float)(signed char)(two >> 8));
            const u8* const scaled = (const u8*)row_of(work, 2 * q + h);
            out.step[t][h] = there ? *(const float*)(scaled + work.width + (column + 16 * t) / 32 * 4) : 0.0f;
        }
    }
}

// A lane's weights of a piece: one tile of one chunk.
struct HalfPiece {
    uint4 of[tiles_a_chunk(KIND_HALF)];
};
template <bool WHOLE>
DEVICE void read_half(const Work& work, const char* chunk, int n, HalfPiece& piece) {
    const uint4* const quants = (const uint4*)(chunk + work.warp * quant_bytes(KIND_HALF, n)) + work.lane;
    UNROLL
    for (int t = 0; t < tiles_a_chunk(KIND_HALF); t++) {
        piece.of[t] = WHOLE || t < n ? quants[t * 32] : uint4{0, 0, 0, 0};
    }
}

DEVICE void multiply_half(const HalfPiece& piece, const HalfActivations& x, float c[2][4]) {
    UNROLL
    for (int t = 0; t < tiles_a_chunk(KIND_HALF); t++) {
        if (WIDE) {
            multiply_wide(c[t % 2], piece.of[t], x.b[t][0], x.b[t][1]);
            continue;
        }
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_wide(sum, piece.of[t], x.b[t][0], x.b[t][1]);
        UNROLL
        for (int k = 0; k < 4; k++) c[t % 2][k] = fmaf(sum[k], x.step[t][k % 2], c[t % 2][k]);
    }
}

// A slab of N tiles. A piece is multiplied when the next one is on its way to registers: what a warp waits for between
// two pieces is the ring, not shared memory. `place` is that of the next piece, `held` of the one that is in registers.
template <int N>
DEVICE void half_slab(const Work& work, Place& place, int chunk, int end_chunk, float total[N][4]) {
    float c[N][2][4] = {};
    HalfActivations x;
    HalfPiece piece;
    Place held = place;
    bool holds = false;
    NOT_UNROLLED
    for (; chunk < end_chunk; chunk++) {
        const int n = tiles_in_chunk(KIND_HALF, work.of_matrix, chunk);
        const bool whole = !has_rest(KIND_HALF) || n == tiles_a_chunk(KIND_HALF);
        UNROLL
        for (int tile = 0; tile < N; tile++) {
            HalfPiece next;
            await_chunk(shared_here(), work.state, place);
            if (whole) read_half<true>(work, stage_at(place), tiles_a_chunk(KIND_HALF), next);
            else read_half<false>(work, stage_at(place), n, next);
            place.go_on();
            if (tile > 0 || holds) {
                multiply_half(piece, x, c[(tile + N - 1) % N]);
                free_chunk(shared_here(), work.lane, held);
            }
            if (tile == 0 && whole) prepare_half<true>(work, chunk, tiles_a_chunk(KIND_HALF), x);
            else if (tile == 0) prepare_half<false>(work, chunk, n, x);
            piece = next;
        }
        holds = true;
    }
    multiply_half(piece, x, c[N - 1]);
    free_chunk(shared_here(), work.lane, held);
    UNROLL
    for (int i = 0; i < 4 * N; i++) total[i / 4][i % 4] += c[i / 4][0][i % 4] + c[i / 4][1][i % 4];
}

template <int N>
DEVICE Place half_tiles(Work work) {
    float total[N][4] = {};
    Place place = work.place;
    NOT_UNROLLED
    for (int chunk = work.chunk; chunk < work.end_chunk; chunk += work.slab_chunks) {
        half_slab<N>(work, place, chunk, min(chunk + work.slab_chunks, work.end_chunk), total);
    }
    UNROLL
    for (int tile = 0; tile < N; tile++) leave_sums(work, tile, total[tile]);
    return place;
}

// Code for each number of tiles: few ones are soon done, and pass over nothing.
template <int N = TILES_AT_ONCE>
DEVICE Place half_chunks(const Work& work) {
    if constexpr (N > 1) {
        if (work.n_tiles < N) return half_chunks<N - 1>(work);
    }
    return half_tiles<N>(work);
}
