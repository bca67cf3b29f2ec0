// Products of one warp: its columns of some tiles, chunk by chunk, as they arrive in the ring.
//
// TILES_AT_ONCE tiles are multiplied together: a compute warp keeps the activations of a chunk's columns in registers
// while it multiplies the same columns of each of those tiles, a *piece* each. The sums of pieces are added in shared
// memory: in registers they would lengthen the loop and leave few registers for the rest. Here are the parts that all
// weight types share, and HALF, 16-bit weights; packed weights are in packed.h. Twin: linear_torch over the weights
// that pack.py defines.
#pragma once
#include "fragments.h"
#include "handoff.h"

// What a warp multiplies in one call. It holds no pointers to shared memory: the compiler knows the address space of a
// pointer made on the spot from shared_memory(), and then an access costs half as much.
struct Work {
    State* state;
    Place place;
    int warp, lane;
    int width, begin, n_rows;         // activations: [rows][width + ROW_PADDING], from the matrix's column `begin` on
    int of_matrix, chunk, end_chunk;  // column tiles of each compute warp; which chunks
    int n_tiles;                      // at most TILES_AT_ONCE
    int first_sum, pitch;             // where its sums begin, and how many rows they have: 2, 4 or 8
    bool adds;                        // to sums that are there already
};

DEVICE Shared& shared_here() { return *(Shared*)shared_memory(); }
DEVICE const char* stage_at(const Place& place) { return shared_memory() + RING_AT + place.stage * STAGE_BYTES; }
DEVICE const u16* activations_here() { return (const u16*)(shared_memory() + RING_AT + STAGES * STAGE_BYTES); }

DEVICE int first_column(const Work& work, int weight_type, int chunk, int n) {
    return (chunk * tiles_a_chunk(weight_type) * N_COMPUTE_WARPS + work.warp * n) * 16 - work.begin;
}
DEVICE const u16* row_of(const Work& work, int row) {
    return activations_here() + (row < work.n_rows ? row : 0) * (work.width + ROW_PADDING);
}

// Whether some matrix of this model has a last chunk that is not whole.
DEVICE constexpr bool leaves_rest(int weight_type, int columns) {
    const int unit = (weight_type == WEIGHT_HALF ? 16 : 32) * N_COMPUTE_WARPS;
    return (columns + unit - 1) / unit * unit / (16 * N_COMPUTE_WARPS) % tiles_a_chunk(weight_type) != 0;
}
DEVICE constexpr bool has_rest(int weight_type) {
    return leaves_rest(weight_type, HIDDEN) || leaves_rest(weight_type, FF) || leaves_rest(weight_type, QUERY_COLUMNS);
}

// --- HALF: weights as they are ---

struct HalfActivations {
    u32 b[tiles_a_chunk(WEIGHT_HALF)][2];
    float step[tiles_a_chunk(WEIGHT_HALF)][2];  // int8: the step of the activations, for the rows of c[0] and c[1]
};

template <bool WHOLE>
DEVICE void prepare_activations(const Work& work, int chunk, int n, HalfActivations& out) {
    const int g = work.lane / 4, q = work.lane % 4, column = first_column(work, WEIGHT_HALF, chunk, n);
    const u16* const row = row_of(work, g);
    UNROLL
    for (int t = 0; t < tiles_a_chunk(WEIGHT_HALF); t++) {
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
    uint4 of[tiles_a_chunk(WEIGHT_HALF)];
};

// The next piece to registers; its stage may be filled again.
template <bool WHOLE>
DEVICE void take_piece(const Work& work, Place& place, int n, HalfPiece& piece) {
    await_chunk(shared_here(), work.state, place);
    const uint4* const quants = (const uint4*)(stage_at(place) + work.warp * quant_bytes(WEIGHT_HALF, n)) + work.lane;
    UNROLL
    for (int t = 0; t < tiles_a_chunk(WEIGHT_HALF); t++) {
        piece.of[t] = WHOLE || t < n ? quants[t * 32] : uint4{0, 0, 0, 0};
    }
    free_chunk(shared_here(), work.lane, place);
}

template <bool WHOLE>
DEVICE void multiply_piece(const Work&, int, const HalfPiece& piece, const HalfActivations& x, float (&c)[2][4]) {
    UNROLL
    for (int t = 0; t < tiles_a_chunk(WEIGHT_HALF); t++) {
        if (WIDE) {
            multiply_as<ACTIVATION_BF16>(c[t % 2], piece.of[t], x.b[t][0], x.b[t][1]);
            continue;
        }
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_as<ACTIVATION_BF16>(sum, piece.of[t], x.b[t][0], x.b[t][1]);
        UNROLL
        for (int k = 0; k < 4; k++) c[t % 2][k] = fmaf(sum[k], x.step[t][k % 2], c[t % 2][k]);
    }
}

// Where a lane's sums of the first tile are; those of the next are 16 rows on.
DEVICE float* own_sums(const Work& work, HalfPiece&) {
    const int r = work.warp * TILES_AT_ONCE * 16 + work.lane / 4;
    return shared_here().sums + work.first_sum + r * work.pitch + work.lane % 4 * 2;
}

// To the sums of the chunks before: rows g (c[0], c[1]) and g + 8 (c[2], c[3]) of a tile, rows 2 q and 2 q + 1 of the
// activations.
template <int, int>
DEVICE void add_sums(const Work& work, float* sums, bool adds, const float (&c)[2][4]) {
    if (work.lane % 4 * 2 >= work.pitch) return;
    UNROLL
    for (int h = 0; h < 2; h++) {
        float2* const two = (float2*)(sums + 8 * h * work.pitch);
        const float2 before = adds ? *two : float2{0.0f, 0.0f};
        *two = float2{before.x + (c[0][2 * h] + c[1][2 * h]), before.y + (c[0][2 * h + 1] + c[1][2 * h + 1])};
    }
}
