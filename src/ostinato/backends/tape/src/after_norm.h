// Norms after a block: in some models what attention and the MLP give is normed before it is added to the residual stream.
//
// x += y * factor * weight, and the factor of a row needs all columns of y. So a block keeps its own tiles of y and hands
// on the squares of each tile, one word; a block that has tiles adds up the squares of all, in the order of the tiles,
// then hands on its tiles of x, which all blocks wait for as they do without such norms. It is one more hand-off, of a
// sixteenth of the words. Its buffers are used in turn as those of x are. Twin: rms_norm_torch.
#pragma once
#include "handoff.h"

constexpr int OUTPUT_KEPT = RESIDUALS - 1;  // of shared->residual: the block's tiles of y
constexpr int SQUARES = HIDDEN / 16;        // words of a row: one for each tile
constexpr int SQUARE_LOADS = (SQUARES + 31) / 32;  // by a lane

// The order of additions follows from HIDDEN alone: the 16 columns of a tile, then tiles by lane.
DEVICE void hand_on_squares(const ComputeThread& p, const Segment& segment, u64* squares, int n_rows) {
    for (int i = p.thread; i < tiles_here(segment) * MAX_ROWS; i += N_COMPUTE_THREADS) {
        const int row = i % MAX_ROWS, own = i / MAX_ROWS;
        if (row >= n_rows) continue;
        const float* const values = p.shared->residual[OUTPUT_KEPT] + own * 16 * MAX_ROWS + row;
        float sum = 0.0f;
        UNROLL
        for (int r = 0; r < 16; r++) sum += values[r * MAX_ROWS] * values[r * MAX_ROWS];
        put(squares + row * SQUARES + first_tile(segment) + own * N_BLOCKS, bits_of(sum), p.tag);
    }
}

// The squares of a row, added up by a warp once all have arrived.
DEVICE float receive_squares(const ComputeThread& p, const Tape& tape, const u64* squares) {
    u64 words[SQUARE_LOADS];
    for (BoundedWait waiting(tape.state);;) {
        bool all = true;
        UNROLL
        for (int j = 0; j < SQUARE_LOADS; j++) {
            const int i = p.lane + 32 * j;
            words[j] = i < SQUARES ? load_relaxed(squares + i) : (u64)p.tag << 32;
        }
        UNROLL
        for (int j = 0; j < SQUARE_LOADS; j++) all &= (u32)(words[j] >> 32) == p.tag;
        if (all || !waiting.keep_waiting()) break;
    }
    float sum = 0.0f;
    UNROLL
    for (int j = 0; j < SQUARE_LOADS; j++) sum += float_of((u32)words[j]);
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    return sum;
}

// After `segment`, which was `output` or `down`: the block's tiles of y, normed, are added to `residual` and handed on
// to `x`. `shared->scale` holds the factors meanwhile.
APART void add_normed(
    ComputeThread p, const Tape& tape, const Segment& segment, const float* residual, const float* weights, u64* squares,
    u64* x, int n_rows
) {
    sync_compute_warps();  // all tiles of y are kept
    hand_on_squares(p, segment, squares, n_rows);
    const int n_here = tiles_here(segment);
    for (int row = p.warp; n_here > 0 && row < n_rows; row += N_COMPUTE_WARPS) {
        const float sum = receive_squares(p, tape, squares + row * SQUARES);
        if (p.lane == 0) p.shared->scale[row] = rsqrt_fast(sum * (1.0f / HIDDEN) + AFTER_NORM_EPS);
    }
    sync_compute_warps();
    for (int i = p.thread; i < n_here * 16 * MAX_ROWS; i += N_COMPUTE_THREADS) {
        const int row = i % MAX_ROWS, r = i / MAX_ROWS % 16, own = i / MAX_ROWS / 16;
        if (row >= n_rows) continue;
        const int column = (first_tile(segment) + own * N_BLOCKS) * 16 + r;
        const float added = p.shared->residual[OUTPUT_KEPT][i] * p.shared->scale[row] * weights[column];
        put(x + row * HIDDEN + column, bits_of(residual[i] + added), p.tag);
    }
}
