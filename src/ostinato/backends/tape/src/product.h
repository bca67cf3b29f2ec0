// Products: the block's tiles of a matrix times the rows of activations.
//
// Every compute warp has its own columns (tiles.h); their sums meet in shared memory, and are added in the order of the
// compute warps, spread over all threads. The sums are double-buffered, so that a group of tiles needs one sync;
// meanwhile the ring fills.
//
// The order in which a row's products are added follows from the shape alone: compute warp by compute warp, in each
// chunk by four sums (HALF: two), chunk by chunk. Bound by memory; for packed weights with few bits, by the
// instructions that unpack them.
#pragma once
#include "packed.h"

// Weight types that the model does not have are not compiled.
DEVICE Place multiply_chunks(int weight_type, const Work& work) {
    if constexpr (HAS_WEIGHT_HALF) {
        if (weight_type == WEIGHT_HALF) return chunks_of<WEIGHT_HALF, MAX_ROWS>(work);
    }
    if constexpr (HAS_WEIGHT_FOUR) {
        if (weight_type == WEIGHT_FOUR) return packed_chunks_of<WEIGHT_FOUR>(work);
    }
    if constexpr (HAS_WEIGHT_FIVE) {
        if (weight_type == WEIGHT_FIVE) return packed_chunks_of<WEIGHT_FIVE>(work);
    }
    if constexpr (HAS_WEIGHT_SIX) {
        if (weight_type == WEIGHT_SIX) return packed_chunks_of<WEIGHT_SIX>(work);
    }
    if constexpr (HAS_WEIGHT_EIGHT) {
        if (weight_type == WEIGHT_EIGHT) return packed_chunks_of<WEIGHT_EIGHT>(work);
    }
    return work.place;
}

// --- a block's part of a product ---

// The sums of a group of tiles.
struct Sums {
    const float* of_compute_warps;
    int pitch;
    MEMBER float at(int tile, int r, int row) const {
        const float* const place = of_compute_warps + (tile * 16 + r) * pitch + row;
        float sum = 0.0f;
        UNROLL
        for (int compute_warp = 0; compute_warp < N_COMPUTE_WARPS; compute_warp++) sum += place[compute_warp * TILES_AT_ONCE * 16 * pitch];
        return sum;
    }
};

// A step without rows still consumes its weights from the ring.
DEVICE void pass_chunks(ComputeThread& p, const Tape& tape, const Segment& segment, int n_here) {
    const int of_matrix = column_tiles(segment), per = tiles_a_chunk(segment.weight_type);
    Place place = {p.stage, p.phase};
    for (int i = 0; i < (of_matrix + per - 1) / per * n_here; i++) {
        await_chunk(*p.shared, tape.state, place);
        free_chunk(*p.shared, p.lane, place);
    }
    p.stage = place.stage;
    p.phase = place.phase;
}

// Whether the next slab is loaded while one is multiplied: with packed weights no registers are left for it.
#define ASKS_AHEAD (!(HAS_WEIGHT_FOUR || HAS_WEIGHT_FIVE || HAS_WEIGHT_SIX || HAS_WEIGHT_EIGHT))

// Where the activations of a product come from.
struct Source {
    const u64* hop;  // of row 0, pairs; null: they lie there whole, as receive_normed leaves them
    int n_pairs;     // words of a row
};

// The block's tiles of W, times all rows: finish(first tile, number of tiles, sums) for each few tiles, by all compute
// warps, after a sync. Pairs are fetched at once where all rows have room, else slab by slab, again for each few tiles.
template <class Finish>
DEVICE void multiply_here(
    ComputeThread& p, const Tape& tape, const Segment& segment, const Source& source, int n_rows, Finish finish
) {
    const int n_here = tiles_here(segment);
    if (n_rows == 0) pass_chunks(p, tape, segment, n_here);
    if (n_here == 0 || n_rows == 0) return;
    const int pitch = n_rows <= 2 ? 2 : n_rows <= 4 ? 4 : 8;
    const bool takes_turns = 2 * pitch <= SUM_ROWS;
    const int chunk_columns = tiles_a_chunk(segment.weight_type) * 16 * N_COMPUTE_WARPS;
    const int width = source.hop ? PADDED(2 * source.n_pairs) : NORMED_COLUMNS;
    const bool whole = !source.hop || n_rows * 2 * (width + ROW_PADDING) <= ACTIVATION_BYTES;
    const int at_once = whole ? segment.columns : SLAB_COLUMNS;
    Work work;
    work.state = tape.state;
    work.n_rows = n_rows;
    work.of_matrix = column_tiles(segment);
    work.pitch = pitch;
    work.place = {p.stage, p.phase};
    ManyRows ahead;
    forget(ahead);
    NOT_UNROLLED
    for (int first = 0; first < n_here; first += TILES_AT_ONCE) {
        work.n_tiles = min(TILES_AT_ONCE, n_here - first);
        work.first_sum = takes_turns ? p.parity * N_COMPUTE_WARPS * TILES_AT_ONCE * 16 * pitch : 0;
        NOT_UNROLLED
        for (int begin = 0; begin < segment.columns; begin += at_once) {
            const int columns = min(at_once, segment.columns - begin);
            Slab slab = {source.hop, source.n_pairs, n_rows, begin, whole ? width : (columns + 31) / 32 * 32};
            work.begin = begin;
            work.width = slab.columns;
            if (source.hop && (!whole || first == 0)) {
                if (begin > 0) sync_compute_warps();  // all compute warps have read the previous slab
                receive_pairs(p, tape, slab, ahead);
                slab.begin += at_once;
                if (ASKS_AHEAD && slab.begin < segment.columns) {
                    slab.columns = (min(at_once, segment.columns - slab.begin) + 31) / 32 * 32;
                    ask_ahead(p, slab, ahead);
                }
            }
            renew(p);
            work.warp = p.warp;
            work.lane = p.lane;
            work.chunk = begin / chunk_columns;
            work.end_chunk = (begin + columns + chunk_columns - 1) / chunk_columns;
            work.adds = begin > 0;
            work.place = multiply_chunks(segment.weight_type, work);
        }
        sync_compute_warps();
        renew(p);
        finish(first, work.n_tiles, Sums{p.shared->sums + work.first_sum, pitch});
        if (takes_turns) p.parity ^= 1;
        else sync_compute_warps();
    }
    p.stage = work.place.stage;
    p.phase = work.place.phase;
}

// Each value of a tile to done(which of the block's, tile, r, row, value), r < 16, by a thread of its own.
template <class Done>
DEVICE void hand_on(const ComputeThread& p, const Segment& segment, int n_rows, int first, int n_tiles, Sums sums, Done done) {
    for (int i = p.thread; i < n_tiles * 16 * sums.pitch; i += N_COMPUTE_THREADS) {
        const int row = i % sums.pitch, r = i / sums.pitch % 16, tile = i / sums.pitch / 16;
        const int own = first + tile;
        if (row < n_rows) done(own, first_tile(segment) + own * N_BLOCKS, r, row, sums.at(tile, r, row));
    }
}

// Gate and up, whose rows stand eight and eight in a tile: done(unit, row, gate, up, gate, up) for each even unit and
// the next, since the two are handed on as a pair.
template <class Done>
DEVICE void hand_on_units(
    const ComputeThread& p, const Segment& segment, int n_rows, int first, int n_tiles, Sums sums, Done done
) {
    const int n = n_tiles * 8 * sums.pitch;
    for (int i = p.thread; i - p.lane < n; i += N_COMPUTE_THREADS) {  // by whole warps: neighbours meet
        const int row = i % sums.pitch, r = i / sums.pitch % 8, tile = i / sums.pitch / 8;
        const float gate = i < n ? sums.at(tile, r, row) : 0.0f, up = i < n ? sums.at(tile, r + 8, row) : 0.0f;
        const float next_gate = shuffle_xor(gate, sums.pitch), next_up = shuffle_xor(up, sums.pitch);
        if (i >= n || row >= n_rows || r % 2 != 0) continue;
        done((first_tile(segment) + (first + tile) * N_BLOCKS) * 8 + r, row, gate, up, next_gate, next_up);
    }
}
