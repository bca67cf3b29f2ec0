// Products: the block's tiles of a matrix times the rows of activations.
//
// Every player has its own columns (tiles.h); their sums meet in shared memory, and are added in the order of the
// players, spread over all threads. Two sets of sums take turns, so that one sync is enough for a group of tiles;
// meanwhile the ring fills.
//
// The order in which a row's products are added follows from the shape alone: player by player, in each four sums
// (HALF: two), chunk by chunk, and slab by slab, where a slab is what activations hold at MAX_ROWS rows, however many
// there are. Bound by memory, packed weights with few bits by the instructions that unpack them.
#pragma once
#include "packed.h"

// Kinds that the model has not are not compiled.
DEVICE Place multiply_chunks(int kind, const Work& work) {
    if constexpr (HAS_KIND_HALF) {
        if (kind == KIND_HALF) return half_chunks(work);
    }
    if constexpr (HAS_KIND_FOUR) {
        if (kind == KIND_FOUR) return packed_chunks_of<KIND_FOUR>(work);
    }
    if constexpr (HAS_KIND_FIVE) {
        if (kind == KIND_FIVE) return packed_chunks_of<KIND_FIVE>(work);
    }
    if constexpr (HAS_KIND_SIX) {
        if (kind == KIND_SIX) return packed_chunks_of<KIND_SIX>(work);
    }
    if constexpr (HAS_KIND_EIGHT) {
        if (kind == KIND_EIGHT) return packed_chunks_of<KIND_EIGHT>(work);
    }
    return work.place;
}

// --- a block's part of a product ---

// The sums of a group of tiles.
struct Sums {
    const float* of_players;
    int pitch;
    MEMBER float at(int tile, int r, int row) const {
        const float* const place = of_players + (tile * 16 + r) * pitch + row;
        float sum = 0.0f;
        UNROLL
        for (int player = 0; player < N_PLAYERS; player++) sum += place[player * TILES_AT_ONCE * 16 * pitch];
        return sum;
    }
};

// A step without a row still takes its weights off the ring.
DEVICE void pass_chunks(Player& p, const Tape& tape, const Segment& segment, int n_here) {
    const int of_matrix = column_tiles(segment), per = tiles_a_chunk(segment.kind);
    Place place = {p.stage, p.phase};
    for (int i = 0; i < (of_matrix + per - 1) / per * n_here; i++) {
        await_chunk(*p.shared, tape.state, place);
        free_chunk(*p.shared, p.lane, place);
    }
    p.stage = place.stage;
    p.phase = place.phase;
}

// fetch(work, is the first group, begin, columns): sees to it that these columns lie in activations, and tells the work
// how wide they lie and which comes first. finish(first tile, number of tiles, sums): by all players, after a sync.
template <class Fetch, class Finish>
DEVICE void multiply_here(
    Player& p, const Tape& tape, const Segment& segment, int n_rows, int slab_columns, Fetch fetch, Finish finish
) {
    const int n_here = tiles_here(segment);
    if (n_rows == 0) pass_chunks(p, tape, segment, n_here);
    if (n_here == 0 || n_rows == 0) return;
    const int pitch = n_rows <= 2 ? 2 : n_rows <= 4 ? 4 : 8;
    const bool takes_turns = 2 * pitch <= SUM_ROWS;
    const int chunk_columns = tiles_a_chunk(segment.kind) * 16 * N_PLAYERS;
    Work work;
    work.state = tape.state;
    work.warp = p.warp;
    work.lane = p.lane;
    work.n_rows = n_rows;
    work.of_matrix = column_tiles(segment);
    work.pitch = pitch;
    work.place = {p.stage, p.phase};
    NOT_UNROLLED
    for (int first = 0; first < n_here; first += TILES_AT_ONCE) {
        work.n_tiles = min(TILES_AT_ONCE, n_here - first);
        work.first_sum = takes_turns ? p.turn * N_PLAYERS * TILES_AT_ONCE * 16 * pitch : 0;
        NOT_UNROLLED
        for (int begin = 0; begin < segment.columns; begin += slab_columns) {
            const int columns = min(slab_columns, segment.columns - begin);
            fetch(work, first == 0, begin, columns);
            work.chunk = begin / chunk_columns;
            work.end_chunk = (begin + columns + chunk_columns - 1) / chunk_columns;
            work.adds = begin > 0;
            work.place = multiply_chunks(segment.kind, work);
        }
        sync_players();
        finish(first, work.n_tiles, Sums{p.shared->sums + work.first_sum, pitch});
        if (takes_turns) p.turn ^= 1;
        else sync_players();
    }
    p.stage = work.place.stage;
    p.phase = work.place.phase;
}

// Each value of a tile to done(tile, r, row, value), by a thread of its own.
template <class Done>
DEVICE void hand_on(const Player& p, const Segment& segment, int n_rows, int first, int n_tiles, Sums sums, Done done) {
    for (int i = p.thread; i < n_tiles * 16 * sums.pitch; i += N_PLAYER_THREADS) {
        const int row = i % sums.pitch, r = i / sums.pitch % 16, tile = i / sums.pitch / 16;
        if (row < n_rows) done(first_tile(segment) + (first + tile) * N_BLOCKS, r, row, sums.at(tile, r, row));
    }
}

// Activations that lie there whole, as receive_normed leaves them.
struct Whole {
    MEMBER void operator()(Work& work, bool, int, int) const {
        work.width = NORMED_COLUMNS;
        work.begin = 0;
    }
};

// y = W x for the block's tiles of W: done(tile, r, row, value) for each row r < 16 of a tile and each row of x.
template <class Done>
DEVICE void product(Player& p, const Tape& tape, const Segment& segment, int n_rows, Done done) {
    multiply_here(p, tape, segment, n_rows, segment.columns, Whole(), [&](int first, int n_tiles, Sums sums) {
        hand_on(p, segment, n_rows, first, n_tiles, sums, done);
    });
}

// Gate and up, whose rows stand eight and eight in a tile: done(unit, row, gate, up, gate, up) for each even unit and
// the next, since the two are handed on as a pair.
template <class Done>
DEVICE void product_of_units(Player& p, const Tape& tape, const Segment& segment, int n_rows, Done done) {
    multiply_here(p, tape, segment, n_rows, segment.columns, Whole(), [&](int first, int n_tiles, Sums sums) {
        const int n = n_tiles * 8 * sums.pitch;
        for (int i = p.thread; i - p.lane < n; i += N_PLAYER_THREADS) {  // by whole warps: neighbours meet
            const int row = i % sums.pitch, r = i / sums.pitch % 8, tile = i / sums.pitch / 8;
            const float gate = i < n ? sums.at(tile, r, row) : 0.0f, up = i < n ? sums.at(tile, r + 8, row) : 0.0f;
            const float next_gate = shuffle_xor(gate, sums.pitch), next_up = shuffle_xor(up, sums.pitch);
            if (i >= n || row >= n_rows || r % 2 != 0) continue;
            done((first_tile(segment) + (first + tile) * N_BLOCKS) * 8 + r, row, gate, up, next_gate, next_up);
        }
    });
}

// The same for activations that come as pairs: `hop` is that of row 0, n_pairs words a row. They are fetched at once
// where all rows have room, else slab by slab, again for each group of tiles.
template <class Done>
DEVICE void product_of_pairs(
    Player& p, const Tape& tape, const Segment& segment, const u64* hop, int n_pairs, int n_rows, Done done
) {
    const bool at_once = n_rows * 2 * (segment.columns + ROW_PADDING) <= ACTIVATION_BYTES;
    const int width = (segment.columns + 31) / 32 * 32;
    const auto fetch = [&](Work& work, bool is_first, int begin, int columns) {
        work.width = at_once ? width : (columns + 31) / 32 * 32;
        work.begin = at_once ? 0 : begin;
        if (at_once && (begin > 0 || !is_first)) return;
        if (begin > 0) sync_players();  // nobody reads the slab before any more
        receive_pairs(p, tape, hop, n_pairs, n_rows, work.begin, work.width);
    };
    multiply_here(p, tape, segment, n_rows, SLAB_COLUMNS, fetch, [&](int first, int n_tiles, Sums sums) {
        hand_on(p, segment, n_rows, first, n_tiles, sums, done);
    });
}
