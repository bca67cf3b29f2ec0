// The ring: the loader of a block streams the block's run of the tape through shared memory, where the compute warps
// read it. With BULK_COPIES the loader is one thread, which asks the copy engine for a chunk at a time. Without them it
// is a warp, whose lanes copy 16 bytes at a time: lane 0 decides for all when the next chunk may be requested.
//
// A chunk of the tape lies in one stage of the ring. `full` of a stage opens when all its bytes have arrived, `empty`
// when every compute warp has read them. The loader walks the tape in the order of backends/tape/partition.py,
// endlessly, step after step: it runs ahead of the compute warps by as much as the ring holds, before the step boundary
// has decided whether there is another step. If there is none, at most one ring's worth of loads is wasted.
//
// Bound by memory. At most IN_FLIGHT chunks are in flight: with more, the small loads of the hand-offs wait behind the
// stream, and a step takes longer. In a long segment hand-offs are rare, and during the head there are none: there the
// limit is higher. A copy must not outlive its block: the loader waits for its copies before it exits.
#pragma once
#include "parts.h"

#define AT_MOST_A_RING(n) ((n) < STAGES ? (n) : STAGES)
#define IN_FLIGHT_LONG AT_MOST_A_RING(IN_FLIGHT + 1)
#define IN_FLIGHT_HEAD AT_MOST_A_RING(2 * IN_FLIGHT)
#define LONG_CHUNKS (2 * STAGES)  // that make a segment long
// Lane 0 arrives for its warp once the warp has read a stage. Race detectors credit an arrival only to the lane that
// made it; for them all lanes arrive.
#ifndef ARRIVALS_A_WARP
#define ARRIVALS_A_WARP 1
#endif
#define LOADER_LANES (BULK_COPIES ? 1 : 32)
#define POLLS_PER_ABORT_CHECK 64  // the loader reads `abort` after so many polls, `over` after each

// --- how a matrix is cut: the same as backends/tape/partition.py ---

// Column tiles that each compute warp has of a whole chunk.
DEVICE constexpr int tiles_a_chunk(int weight_type) { return weight_type == WEIGHT_HALF ? 4 : weight_type == WEIGHT_FOUR ? 16 : 8; }

// Bytes that a chunk has for each compute warp, of n column tiles.
DEVICE constexpr int quant_bytes(int weight_type, int n) {
    return (weight_type == WEIGHT_HALF ? 512 : weight_type == WEIGHT_EIGHT ? 256 : 128) * n;
}
DEVICE constexpr int high_bytes(int weight_type, int n) {
    return weight_type == WEIGHT_FIVE ? (n + 3) / 4 * 128 : weight_type == WEIGHT_SIX ? 64 * n : 0;
}
DEVICE constexpr int scale_bytes(int weight_type, int n) {
    return (weight_type == WEIGHT_HALF ? 0 : weight_type == WEIGHT_EIGHT ? 16 : 32) * n;
}
DEVICE constexpr int chunk_bytes(int weight_type, int n) {
    return N_COMPUTE_WARPS * (quant_bytes(weight_type, n) + high_bytes(weight_type, n) + scale_bytes(weight_type, n));
}

// Column tiles that each compute warp has of a whole matrix.
DEVICE int column_tiles(const Segment& segment) { return segment.columns / (16 * N_COMPUTE_WARPS); }

// This block's tiles of a segment: the first, and how many; from one to the next it is N_BLOCKS.
DEVICE int first_tile(const Segment& segment) {
    const int tile = block() - segment.first;
    return tile < 0 ? tile + N_BLOCKS : tile;
}
DEVICE int tiles_here(const Segment& segment) {
    const int tile = first_tile(segment);
    return tile < segment.n_tiles ? (segment.n_tiles - tile - 1) / N_BLOCKS + 1 : 0;
}

// --- places in the ring ---

// A stage, and the parity of its current phase.
struct Place {
    int stage, phase;
    MEMBER void go_on() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// By one thread, before the block's first sync.
DEVICE void set_up(Shared& shared) {
    for (int stage = 0; stage < STAGES; stage++) {
        gate_init(&shared.full[stage], LOADER_LANES);
        gate_init(&shared.empty[stage], N_COMPUTE_WARPS * ARRIVALS_A_WARP);
    }
    shared.over = 0;
}

// --- the compute warps' side; all lanes of a warp together ---

DEVICE void await_chunk(Shared& shared, State* state, const Place& place) {
    for (BoundedWait waiting(state); !gate_passed(&shared.full[place.stage], place.phase) && waiting.keep_waiting();) {
    }
}
DEVICE void free_chunk(Shared& shared, int lane, Place& place) {
    sync_warp();
    if (lane < ARRIVALS_A_WARP) gate_arrive(&shared.empty[place.stage]);
    place.go_on();
}

// --- the loader ---

struct Loader {
    Shared& shared;
    const State* state;
    char* ring;
    int lane;
    Place next;  // to be requested
    // Only lane 0 reads these.
    Place oldest;  // requested, and not known to have arrived
    int n_requested, polls;

    MEMBER Loader(Shared& given, const State* leaving, char* stages, int own_lane)
        : shared(given), state(leaving), ring(stages), lane(own_lane), next{0, 0}, oldest{0, 0}, n_requested(0),
          polls(0) {}

    // The loader's waits have no deadline: one of them may span many waits of the compute warps, which have deadlines.
    MEMBER bool is_over() {
        if (atomic_add_shared(&shared.over, 0u)) return true;
        return ++polls % POLLS_PER_ABORT_CHECK == 0 && load_fresh(&state->abort) != 0;
    }
    // Waits until the next stage may be filled; false: the loop is over and no stage is needed any more.
    MEMBER bool find_room(int in_flight) {
        const bool found = lane == 0 && await_room(in_flight);
        if (BULK_COPIES) return found;
        sync_warp();  // what lane 0 has seen at the gate, all lanes have: the stage was read
        return votes(found) != 0;
    }
    MEMBER bool await_room(int in_flight) {
        if (atomic_add_shared(&shared.over, 0u)) return false;
        while (n_requested >= in_flight) {
            if (gate_passed(&shared.full[oldest.stage], oldest.phase)) {
                oldest.go_on();
                n_requested--;
            } else if (is_over()) return false;
            else relax();
        }
        while (!gate_passed(&shared.empty[next.stage], next.phase ^ 1)) {
            if (is_over()) return false;
            relax();
        }
        return true;
    }
    MEMBER void request(const char* from, int bytes) {
        Gate* const gate = &shared.full[next.stage];
        char* const to = ring + next.stage * STAGE_BYTES;
        if (BULK_COPIES) {
            gate_expect(gate, bytes);
            bulk_copy(to, from, bytes, gate);
        } else {
            for (int at = 16 * lane; at < bytes; at += 16 * LOADER_LANES) copy_16_bytes(to + at, from + at);
            gate_arrive_copied(gate);
        }
        next.go_on();
        n_requested++;
    }
    MEMBER void drain() {
        for (; lane == 0 && n_requested > 0; n_requested--, oldest.go_on()) {
            while (!gate_passed(&shared.full[oldest.stage], oldest.phase)) relax();
        }
        if (!BULK_COPIES) sync_warp();  // no lane ends before its copies
    }
};

DEVICE int in_flight_of(const Segment& segment) {
    const int n_chunks = tiles_here(segment) * ((column_tiles(segment) - 1) / tiles_a_chunk(segment.weight_type) + 1);
    return n_chunks >= LONG_CHUNKS ? IN_FLIGHT_LONG : IN_FLIGHT;
}

// The block's tiles of one segment, from `from` on, which is advanced; false: the loop is over.
DEVICE bool load_segment(Loader& loader, const Segment& segment, int in_flight, const char*& from) {
    const int n_here = tiles_here(segment), of_matrix = column_tiles(segment), per = tiles_a_chunk(segment.weight_type);
    for (int first = 0; first < n_here; first += TILES_AT_ONCE) {
        const int n_tiles = min(TILES_AT_ONCE, n_here - first);
        for (int before = 0; before < of_matrix; before += per) {
            const int bytes = chunk_bytes(segment.weight_type, min(per, of_matrix - before));
            for (int tile = 0; tile < n_tiles; tile++) {
                if (!loader.find_room(in_flight)) return false;
                loader.request(from, bytes);
                from += bytes;
            }
        }
    }
    return true;
}

// Run by all threads behind the compute warps; the loader's run until the compute warps set `over`, or any thread sets
// `abort`.
DEVICE void load_tape(const Tape& tape, Shared& shared, char* ring) {
    const int lane = thread() - N_COMPUTE_THREADS;
    if (lane >= LOADER_LANES) return;
    const char* const begin = tape.tape + tape.tape_at[block()];
    Loader loader(shared, tape.state, ring, lane);
    Segment segment = tape.segments[0];
    for (bool goes = true; goes;) {
        const char* from = begin;
        for (int i = 0; i < N_SEGMENTS && goes; i++) {
            const bool is_head = i == N_SEGMENTS - 1;
            const Segment following = tape.segments[is_head ? 0 : i + 1];  // in flight while this one is read
            goes = load_segment(loader, segment, is_head ? IN_FLIGHT_HEAD : in_flight_of(segment), from);
            segment = following;
        }
        if (goes && from == begin) return;  // more blocks than tiles: there is nothing to read in any step
    }
    loader.drain();
}
