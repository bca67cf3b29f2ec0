// The tape: one cooperative kernel that runs the whole decode loop, a block on every multiprocessor.
//
// A step is: the step boundary (block 0; all other blocks wait for its result); for each layer norm and q k v,
// attention, output, norm and gate and up, down; then norm and head, and sampling of each row's token. Between phases
// blocks hand each other values with tags (handoff.h); there is no barrier over the grid. Meanwhile the loader warp of
// every block streams the block's weights in the order of use (ring.h), and never waits for the arithmetic as long as
// the ring has room.
//
// Every wait has a deadline. Once one has passed, no thread waits any more: the step runs to its end on undefined
// values, and the step boundary, which reads `abort`, ends the loop with a fault before any token is committed.
#include "parts.h"

#define THREAD thread()
#define N_THREADS N_COMPUTE_THREADS
#define SYNC() sync_compute_warps()
#define SHARED SHARED_BY_BLOCK
#define BOUNDARY_FN FUNCTION
#define BOUNDARY_TABLE CONSTANT_TABLE
#define UNROLLED UNROLL
#define NAP() nap()
#include "step_masks.h"

#include "ring.h"

#include "handoff.h"
#include "product.h"
#include "after_norm.h"
#include "activation.h"

#include "attention.h"
#include "sampling.h"

// --- when each block began what, in its last step: for the timeline (lab/tape.py), if `clock` is set ---

enum { CLOCK_QKV, CLOCK_ATTENTION, CLOCK_OUT, CLOCK_GATE_UP, CLOCK_DOWN, CLOCKED_A_LAYER };
enum { CLOCK_HEAD = CLOCKED_A_LAYER * N_LAYERS, CLOCK_SAMPLING, CLOCK_BOUNDARY };
static_assert(CLOCK_BOUNDARY + 1 == N_CLOCKED, "backends/tape/program.py makes room for other marks");

DEVICE int clock_of(int segment) {
    if (segment == SEGMENT_HEAD) return CLOCK_HEAD - CLOCKED_A_LAYER * N_LAYERS;
    if (segment == SEGMENT_Q) return CLOCK_QKV;
    return segment == SEGMENT_OUT ? CLOCK_OUT : segment == SEGMENT_GATE_UP ? CLOCK_GATE_UP : CLOCK_DOWN;
}
DEVICE void note_time(const ComputeThread& p, const Tape& tape, int phase) {
    if (tape.clock && p.thread == 0) tape.clock[block() * N_CLOCKED + phase] = timer_ns();
}

// --- the step boundary: block 0 runs it, the others wait for its result ---

DEVICE u64* boundary_mark(const Tape& tape) { return tape.marks + N_BLOCKS + MAX_ROWS; }

enum { END, STEP, STEP_WITH_MASKS };  // what follows a step boundary

// What follows, at the compute warp's tag. `n_chosen`: rows of the previous step, whose tokens the step boundary
// commits. It also makes everything that a block wrote with plain stores in that step (keys and values, tokens)
// visible to all others: block 0 acquires every block's mark before it releases its own, which they acquire.
APART int go_on(ComputeThread p, const Tape& tape, int n_chosen) {
    const u32 chosen_at = p.tag - 1;
    u64* const mark = boundary_mark(tape);
    if (block() == 0) {
        if (p.thread < n_chosen) await_mark(tape, tape.marks + N_BLOCKS + p.thread, chosen_at);
        for (int i = p.thread; n_chosen > 0 && i < N_BLOCKS; i += N_COMPUTE_THREADS) {
            await_mark(tape, tape.marks + i, chosen_at);
        }
        sync_compute_warps();  // only now: any of these waits may have been the one that gave up
        if (p.thread == 0 && load_fresh(&tape.state->abort)) store(word_at(tape.view, WORD_FAULT), FAULT_STUCK);
        sync_compute_warps();
        const bool goes = tape.single ? run_boundary(tape.view, tape.plan_hash, tape.epoch, now_ns())
                                      : await_boundary(tape.view, tape.plan_hash, tape.epoch);
        sync_compute_warps();
        const int next = !goes ? END : *TABLE_finds_masks(tape.view) ? STEP_WITH_MASKS : STEP;
        if (p.thread == 0) store_release(mark, (u64)p.tag << 32 | (u32)next);
        return next;
    }
    if (p.thread == 0) {  // what the step boundary wrote is seen by all threads once one of them has acquired its mark
        await_mark(tape, mark, p.tag);
        const u64 decided = load_acquire(mark);
        p.shared->goes = (u32)(decided >> 32) == p.tag ? (u32)decided : (u32)END;
    }
    sync_compute_warps();
    return (int)p.shared->goes;
}

// The masks of the step's rows, by all blocks, before their first product: the loader fills the ring meanwhile. Sampling
// awaits the marks that are set here. Uses the activations' memory.
APART void find_masks_here(ComputeThread p, const Tape& tape) {
    static_assert(sizeof(MaskWork) <= ACTIVATION_BYTES, "no room to find masks in");
    if (p.thread == 0) p.shared->masked_at = p.tag;
    find_masks(tape.view, block(), N_BLOCKS, *(MaskWork*)p.activations, [&](int row) {
        store_release(mask_mark(tape, row), (u64)p.tag << 32);
    });
}

// The last thing a block does. Block 0 waits for the others: one that came late would begin at the wrong tag.
DEVICE void finish_block(const ComputeThread& p, const Tape& tape) {
    if (p.thread == 0) atomic_add_shared(&p.shared->over, 1u);
    sync_compute_warps();
    if (p.thread == 0) store_release(tape.marks + block(), (u64)p.tag << 32);
    if (block() != 0) return;
    for (int i = p.thread; i < N_BLOCKS; i += N_COMPUTE_THREADS) await_mark(tape, tape.marks + i, p.tag);
    sync_compute_warps();
    if (p.thread == 0) tape.state->tag = p.tag;
}

// --- a step: the segments of the tape in their order ---
//
// All of them are run by the same code, so that it exists once and is short: an instruction that misses the
// multiprocessor's instruction cache waits behind the stream of weights.

DEVICE u64* hop_x(const Tape& tape, int buffer, int row) {
    return tape.x + ((u64)buffer * MAX_ROWS + row) * HIDDEN;
}

// The current position of a step on the tape.
struct SegmentRef {
    int layer, segment;  // SEGMENT_Q to SEGMENT_DOWN, or SEGMENT_HEAD
};
DEVICE SegmentRef segment_ref(int number) {
    const int layer = number / SEGMENTS_A_LAYER;
    return {layer, number == N_SEGMENTS - 1 ? SEGMENT_HEAD : number - layer * SEGMENTS_A_LAYER};
}

// Before a product: x is normed for q, k and v, for gate and up, and for the head; before `output` is attention.
DEVICE void prepare(ComputeThread& p, const Tape& tape, const SegmentRef& ref, int n_rows) {
    const int layer = ref.layer;
    if (ref.segment == SEGMENT_K || ref.segment == SEGMENT_V) return;
    if (ref.segment == SEGMENT_Q || ref.segment == SEGMENT_HEAD) p.tag++;
    if (ref.segment == SEGMENT_OUT) {
        note_time(p, tape, layer * CLOCKED_A_LAYER + CLOCK_ATTENTION);
        attention(p, tape, layer, n_rows);
    }
    note_time(p, tape, clock_of(ref.segment) + layer * CLOCKED_A_LAYER);
    if (ref.segment == SEGMENT_OUT || ref.segment == SEGMENT_DOWN) return;
    const bool is_second = ref.segment == SEGMENT_GATE_UP;
    const bool is_embedded = ref.segment == SEGMENT_Q && layer == 0;
    const int buffer = (is_second ? 2 : 0) + (layer & 1);
    u64* const from = hop_x(tape, buffer, 0);
    if (HAS_AFTER_NORMS && !is_embedded) {
        const int before = layer * SEGMENTS_A_LAYER + (is_second ? SEGMENT_OUT : SEGMENT_DOWN - SEGMENTS_A_LAYER);
        add_normed(
            p, tape, p.shared->segments[before], p.shared->residual[!is_second],
            tape.after_norms + (2 * layer - !is_second) * HIDDEN, tape.squares + buffer * MAX_ROWS * SQUARES, from, n_rows
        );
    }
    // Which segment adds to it: `output` to the residual before attention, `down` to the residual before the MLP.
    const int adding = layer * SEGMENTS_A_LAYER + (is_second ? SEGMENT_DOWN : SEGMENT_OUT);
    const bool is_head = ref.segment == SEGMENT_HEAD;  // no later segment adds to the residual stream
    const int first = is_head ? HIDDEN : first_tile(p.shared->segments[adding]);
    receive_normed(
        p, tape, is_embedded ? nullptr : from,
        tape.norms + (2 * layer + is_second) * HIDDEN, n_rows, p.shared->residual[is_second], first
    );
}

DEVICE Source source_of(const Tape& tape, const SegmentRef& ref) {
    const int parity = ref.layer & 1;
    constexpr int ATTENDED = QUERY_COLUMNS / 2, INSIDE = FF / 2;
    if (ref.segment == SEGMENT_OUT) return {tape.attended + (u64)parity * MAX_ROWS * ATTENDED, ATTENDED};
    if (ref.segment == SEGMENT_DOWN) return {tape.inside + (u64)parity * MAX_ROWS * INSIDE, INSIDE};
    return {nullptr, 0};
}

// Stores one value of a product for the blocks that need it. `begin`: of the rows of q, k and v, the segment's first.
DEVICE void store_output(
    const ComputeThread& p, const Tape& tape, const SegmentRef& ref, int begin, int own, int tile, int r, int row, float value
) {
    const int parity = ref.layer & 1, column = tile * 16 + r;
    if (ref.segment == SEGMENT_OUT || ref.segment == SEGMENT_DOWN) {
        const bool is_down = ref.segment == SEGMENT_DOWN;  // which begins the next layer
        const float added = value * (is_down ? DOWN_SCALE : OUT_SCALE);
        if (HAS_AFTER_NORMS) {
            p.shared->residual[OUTPUT_KEPT][(own * 16 + r) * MAX_ROWS + row] = added;
            return;
        }
        const float sum = p.shared->residual[is_down][(own * 16 + r) * MAX_ROWS + row] + added;
        u64* const to = hop_x(tape, is_down ? parity ^ 1 : 2 + parity, row);
        put(to + column, bits_of(sum), p.tag + is_down);
    } else if (ref.segment == SEGMENT_HEAD) {
        if (column >= VOCAB(tape.view)) return;
        const float logit = value * p.shared->scale[row] * HEAD_SCALE;
        tape.logits[(u64)row * VOCAB(tape.view) + column] = LOGIT_CAP > 0.0f ? soft_capped(logit, LOGIT_CAP) : logit;
    } else {
        float out = value * p.shared->scale[row];
        if (HAS_BIAS) out += tape.qkv_bias[ref.layer * QKV_COLUMNS + begin + column];
        put(tape.qkv + ((u64)parity * MAX_ROWS + row) * QKV_COLUMNS + begin + column, bits_of(out), p.tag);
    }
}

DEVICE void step(ComputeThread& p, const Tape& tape, int n_rows) {
    int begin = 0;
    NOT_UNROLLED
    for (int number = 0; number < N_SEGMENTS; number++) {
        const Segment& segment = p.shared->segments[number];
        if (segment.n_tiles == 0) continue;  // q, k and v of one type are one segment
        const SegmentRef ref = segment_ref(number);
        renew(p);
        if (ref.segment == SEGMENT_Q) begin = 0;
        prepare(p, tape, ref, n_rows);
        multiply_here(p, tape, segment, source_of(tape, ref), n_rows, [&](int first, int n_tiles, Sums sums) {
            if (ref.segment == SEGMENT_GATE_UP) {
                u64* const to = tape.inside + (u64)(ref.layer & 1) * MAX_ROWS * (FF / 2);
                const auto done = [&](int unit, int row, float gate0, float up0, float gate1, float up1) {
                    const float scale = p.shared->scale[row];
                    const u32 pair = pair_of(gated(gate0, up0, scale), gated(gate1, up1, scale));
                    put(to + row * (FF / 2) + unit / 2, pair, p.tag);
                };
                hand_on_units(p, segment, n_rows, first, n_tiles, sums, done);
            } else {
                const auto done = [&](int own, int tile, int r, int row, float value) {
                    store_output(p, tape, ref, begin, own, tile, r, row, value);
                };
                hand_on(p, segment, n_rows, first, n_tiles, sums, done);
            }
        });
        // A block may have had no tiles since it began this layer: all its warps must leave its norm before the next.
        if (ref.segment == SEGMENT_OUT && tiles_here(segment) == 0) sync_compute_warps();
        begin += segment.n_tiles * 16;
    }
    renew(p);
    summarise(p, tape, p.shared->segments[N_SEGMENTS - 1], n_rows);
    note_time(p, tape, CLOCK_SAMPLING);
    for (int row = block(); row < n_rows; row += N_BLOCKS) sample_row(p, tape, row);
}

// --- the loop ---

DEVICE int rows_of(const Tape& tape) { return (int)load_fresh((const u32*)TABLE_n_rows(tape.view)); }

DEVICE void run_loop(ComputeThread& p, const Tape& tape) {
    // A launch begins with a step boundary, which lets requests in; a single step, as the host paces them, with the
    // step.
    int n_rows = tape.single ? rows_of(tape) : 0;
    for (int next = tape.single ? STEP_WITH_MASKS : STEP; next != END;) {
        if (next == STEP_WITH_MASKS) find_masks_here(p, tape);
        if (tape.single || n_rows > 0) step(p, tape, n_rows);
        renew(p);
        sync_compute_warps();
        note_time(p, tape, CLOCK_BOUNDARY);
        p.tag++;
        next = go_on(p, tape, n_rows);
        if (tape.single) next = END;
        n_rows = rows_of(tape);
    }
    finish_block(p, tape);
}

KERNEL(tape, Tape, given, N_COMPUTE_THREADS + N_LOADER_THREADS) {
    Shared* const shared = (Shared*)shared_memory();
    char* const ring = shared_memory() + RING_AT;
    if (thread() == 0) {
        set_up(*shared);
        gate_init_fence();
    }
    for (int i = thread(); i < N_SEGMENTS; i += N_COMPUTE_THREADS) shared->segments[i] = given.segments[i];
    sync_block();
    if (thread() >= N_COMPUTE_THREADS) {
        give_registers();
        load_tape(given, *shared, ring);
    } else {
        take_registers();
        ComputeThread p;
        p.thread = thread();
        p.warp = p.thread / 32;
        p.lane = p.thread % 32;
        p.stage = p.phase = p.parity = 0;
        p.tag = load_fresh(&given.state->tag);
        p.ring = ring;
        p.activations = (u16*)(ring + STAGES * STAGE_BYTES);
        p.shared = shared;
        run_loop(p, given);
    }
}
