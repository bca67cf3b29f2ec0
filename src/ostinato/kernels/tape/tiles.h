// What a warp multiplies: its columns of some tiles, chunk by chunk, as they come through the ring.
//
// Tiles are multiplied TILES_AT_ONCE together: of a chunk's columns a player keeps the activations in registers while
// the same columns of each of those tiles pass. Here are the parts that all kinds of weights share, and HALF, weights
// as they are; packed ones are in packed.h. Twin: linear_torch over what pack.py says the weights are.
#pragma once
#include "fragments.h"
#include "handoff.h"

// Columns of pairs that are multiplied between two additions to the sums: whole chunks of every kind.
#define SLAB_UNIT (256 * N_PLAYERS)
#define SLAB_COLUMNS ((ACTIVATION_BYTES / (2 * MAX_ROWS) - ROW_PADDING) / SLAB_UNIT * SLAB_UNIT)
static_assert(SLAB_COLUMNS > 0, "MAX_ROWS rows of one chunk's activations must fit");
static_assert(MAX_ROWS * 2 * (NORMED_COLUMNS + ROW_PADDING) <= ACTIVATION_BYTES, "MAX_ROWS normed rows must fit");

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
        if (!WHOLE && t >= n) continue;
        const int at = column + 16 * t + 2 * q;
        UNROLL
        for (int h = 0; h < 2; h++) {
            if (WIDE) {
                out.b[t][h] = *(const u32*)(row + at + 8 * h);
                continue;
            }
            const u16 two = *(const u16*)((const u8*)row + at + 8 * h);
            out.b[t][h] = pair_of((float)(signed char)two, (float)(signed char)(two >> 8));
            const u8* const scaled = (const u8*)row_of(work, 2 * q + h);
            out.step[t][h] = *(const float*)(scaled + work.width + (column + 16 * t) / 32 * 4);
        }
    }
}

template <bool WHOLE>
DEVICE void multiply_half(const Work& work, const char* chunk, int n, const HalfActivations& x, float c[2][4]) {
    const uint4* const quants = (const uint4*)(chunk + work.warp * quant_bytes(KIND_HALF, n)) + work.lane;
    UNROLL
    for (int t = 0; t < tiles_a_chunk(KIND_HALF); t++) {
        if (!WHOLE && t >= n) continue;
        const uint4 a = quants[t * 32];
        if (WIDE) {
            multiply_wide(c[t % 2], a, x.b[t][0], x.b[t][1]);
            continue;
        }
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_wide(sum, a, x.b[t][0], x.b[t][1]);
        UNROLL
        for (int k = 0; k < 4; k++) c[t % 2][k] = fmaf(sum[k], x.step[t][k % 2], c[t % 2][k]);
    }
}

template <bool WHOLE>
DEVICE void half_chunk(const Work& work, Place& place, int chunk, int n, float c[TILES_AT_ONCE][2][4]) {
    HalfActivations x;
    prepare_half<WHOLE>(work, chunk, n, x);
    UNROLL
    for (int tile = 0; tile < TILES_AT_ONCE; tile++) {
        if (tile >= work.n_tiles) continue;
        await_chunk(shared_here(), work.state, place);
        multiply_half<WHOLE>(work, stage_at(place), n, x, c[tile]);
        free_chunk(shared_here(), work.lane, place);
    }
}

APART Place half_chunks(Work work) {
    float c[TILES_AT_ONCE][2][4] = {};
    Place place = work.place;
    NOT_UNROLLED
    for (int chunk = work.chunk; chunk < work.end_chunk; chunk++) {
        const int n = tiles_in_chunk(KIND_HALF, work.of_matrix, chunk);
        if (!has_rest(KIND_HALF) || n == tiles_a_chunk(KIND_HALF)) {
            half_chunk<true>(work, place, chunk, tiles_a_chunk(KIND_HALF), c);
        } else half_chunk<false>(work, place, chunk, n, c);
    }
    UNROLL
    for (int tile = 0; tile < TILES_AT_ONCE; tile++) {
        if (tile >= work.n_tiles) continue;
        UNROLL
        for (int k = 0; k < 4; k++) c[tile][0][k] += c[tile][1][k];
        leave_sums(work, tile, c[tile][0]);
    }
    return place;
}
