// The tape: one cooperative kernel that plays the whole decode loop, a block on every multiprocessor.
//
// A step is: the border (block 0; everybody else waits for its word), for each layer norm and q k v, attention, output,
// norm and gate and up, down; then norm and head, and the choice of each row's token. Between phases blocks hand each
// other values with tags (handoff.h); there is no barrier over the grid. Meanwhile one warp of every block streams the
// block's weights in the order of use (ring.h), and never waits for the arithmetic as long as the ring has room.
//
// Every wait has a deadline. Once one has passed, nobody waits any more: the step runs out on what there is, and the
// border, which finds `leave`, ends the loop with a fault before any of it is believed.
#include "parts.h"

#define THREAD thread()
#define N_THREADS N_PLAYER_THREADS
#define SYNC() sync_players()
#define SHARED SHARED_BY_BLOCK
#define BORDER_FN FUNCTION
#define BORDER_TABLE CONSTANT_TABLE
#define UNROLLED UNROLL
#include "border.h"

#include "ring.h"

#include "handoff.h"
#include "product.h"

#include "attention.h"
#include "choose.h"

// --- when each block began what, in its last step: for the timeline (lab/tape.py), where it is asked for ---

enum { CLOCK_QKV, CLOCK_ATTENTION, CLOCK_OUT, CLOCK_GATE_UP, CLOCK_DOWN, CLOCKED_A_LAYER };
enum { CLOCK_HEAD = CLOCKED_A_LAYER * N_LAYERS, CLOCK_CHOOSE, CLOCK_BORDER };
static_assert(CLOCK_BORDER + 1 == N_CLOCKED, "loop/tape_plan.py makes room for other marks");

DEVICE void note_time(const Player& p, const Tape& tape, int phase) {
    if (tape.clock && p.thread == 0) tape.clock[block() * N_CLOCKED + phase] = timer_ns();
}

// --- the border: block 0 plays it, the others wait for what it decides ---

DEVICE u64* border_mark(const Tape& tape) { return tape.marks + N_BLOCKS + MAX_ROWS; }

DEVICE void await_mark(const Tape& tape, const u64* mark, u32 beat) {
    for (Waiting waiting(tape.state); (u32)(seen_at(mark) >> 32) != beat && waiting.goes_on();) {
    }
}

// Whether a step follows. `n_chosen`: rows of the step before, whose choices the border commits. Through it everything
// that a block wrote plainly in that step (keys and values, choices) reaches all others: block 0 has acquired every
// block's mark before it raises its own, which they acquire.
FUNCTION bool go_on(Player& p, const Tape& tape, int n_chosen) {
    const u32 chosen_at = p.beat++;
    u64* const mark = border_mark(tape);
    if (block() == 0) {
        if (p.thread < n_chosen) await_mark(tape, tape.marks + N_BLOCKS + p.thread, chosen_at);
        for (int i = p.thread; n_chosen > 0 && i < N_BLOCKS; i += N_PLAYER_THREADS) {
            await_mark(tape, tape.marks + i, chosen_at);
        }
        sync_players();  // only now: any of these waits may have been the one that gave up
        if (p.thread == 0 && load_fresh(&tape.state->leave)) store(word_at(tape.view, WORD_FAULT), FAULT_STUCK);
        sync_players();
        const int goes = run_border(tape.view, tape.plan_hash, tape.epoch, now_ns());
        sync_players();
        if (p.thread == 0) raise(mark, (u64)p.beat << 32 | (u32)goes);
        return goes;
    }
    if (p.thread == 0) {  // what the border wrote is seen by all threads once one of them has acquired its mark
        await_mark(tape, mark, p.beat);
        const u64 decided = seen_at(mark);
        p.shared->goes = (u32)(decided >> 32) == p.beat && (u32)decided;
    }
    sync_players();
    return p.shared->goes;
}

// The last thing a block does. Block 0 waits for the others: one that came late would begin at the wrong beat.
FUNCTION void leave_the_stage(Player& p, const Tape& tape) {
    if (p.thread == 0) p.shared->over = 1;
    sync_players();
    if (p.thread == 0) raise(tape.marks + block(), (u64)p.beat << 32);
    if (block() != 0) return;
    for (int i = p.thread; i < N_BLOCKS; i += N_PLAYER_THREADS) await_mark(tape, tape.marks + i, p.beat);
    sync_players();
    if (p.thread == 0) tape.state->beat = p.beat;
}

// --- a step ---

DEVICE u64* hop_x(const Tape& tape, int buffer, int row) {
    return tape.x + ((u64)buffer * MAX_ROWS + row) * HIDDEN;
}

DEVICE float residual(const Tape& tape, int layer, int row, int column) {
    if (layer == 0) return embedded(tape, row, column);
    return float_of((u32)look(hop_x(tape, layer & 1, row) + column));
}

FUNCTION void query_key_value(Player& p, const Tape& tape, const Segment* segments, int layer, int n_rows) {
    receive_normed(p, tape, layer == 0 ? nullptr : hop_x(tape, layer & 1, 0), tape.norms + 2 * layer * HIDDEN, n_rows);
    u64* const to = tape.qkv + (u64)(layer & 1) * MAX_ROWS * QKV_COLUMNS;
    int begin = 0;
    for (int part = SEGMENT_Q; part <= SEGMENT_V; part++) {
        product(p, tape, segments[part], n_rows, [&](int tile, int r, int row, float value) {
            const int column = begin + tile * 16 + r;
            float out = value * p.shared->scale[row];
            if (HAS_BIAS) out += tape.qkv_bias[layer * QKV_COLUMNS + column];
            put(to + row * QKV_COLUMNS + column, bits_of(out), p.beat);
        });
        begin += segments[part].n_tiles * 16;
    }
}

FUNCTION void output(Player& p, const Tape& tape, const Segment& segment, int layer, int n_rows) {
    const u64* const from = tape.seen + (u64)(layer & 1) * MAX_ROWS * (QUERY_COLUMNS / 2);
    product_of_pairs(p, tape, segment, from, QUERY_COLUMNS / 2, n_rows, [&](int tile, int r, int row, float value) {
        const int column = tile * 16 + r;
        put(hop_x(tape, 2 + (layer & 1), row) + column, bits_of(residual(tape, layer, row, column) + value), p.beat);
    });
    // A block may have had nothing to do since it began this layer: all must have left its norm before the next.
    if (tiles_here(segment) == 0) sync_players();
}

FUNCTION void gate_and_up(Player& p, const Tape& tape, const Segment& segment, int layer, int n_rows) {
    receive_normed(p, tape, hop_x(tape, 2 + (layer & 1), 0), tape.norms + (2 * layer + 1) * HIDDEN, n_rows);
    u64* const to = tape.inside + (u64)(layer & 1) * MAX_ROWS * (FF / 2);
    const auto gated = [&](float gate, float up, float scale) {
        const float given = gate * scale;
        return given / (1.0f + exp2_fast(-1.4426950408889634f * given)) * (up * scale);
    };
    product_of_units(p, tape, segment, n_rows, [&](int unit, int row, float gate0, float up0, float gate1, float up1) {
        const float scale = p.shared->scale[row];
        const u32 pair = pair_of(gated(gate0, up0, scale), gated(gate1, up1, scale));
        put(to + row * (FF / 2) + unit / 2, pair, p.beat);
    });
}

FUNCTION void down(Player& p, const Tape& tape, const Segment& segment, int layer, int n_rows) {
    const u64* const from = tape.inside + (u64)(layer & 1) * MAX_ROWS * (FF / 2);
    product_of_pairs(p, tape, segment, from, FF / 2, n_rows, [&](int tile, int r, int row, float value) {
        const int column = tile * 16 + r;
        const float before = float_of((u32)look(hop_x(tape, 2 + (layer & 1), row) + column));
        put(hop_x(tape, (layer + 1) & 1, row) + column, bits_of(before + value), p.beat + 1);
    });
}

FUNCTION void head(Player& p, const Tape& tape, int n_rows) {
    const Segment& segment = tape.segments[N_SEGMENTS - 1];
    receive_normed(p, tape, hop_x(tape, N_LAYERS & 1, 0), tape.norms + 2 * N_LAYERS * HIDDEN, n_rows);
    product(p, tape, segment, n_rows, [&](int tile, int r, int row, float value) {
        const int id = tile * 16 + r;
        if (id < VOCAB(tape.view)) tape.logits[(u64)row * VOCAB(tape.view) + id] = value * p.shared->scale[row];
    });
    summarise(p, tape, segment, n_rows);
}

FUNCTION void step(Player& p, const Tape& tape, int n_rows) {
    for (int layer = 0; layer < N_LAYERS; layer++) {
        const Segment* const segments = tape.segments + layer * SEGMENTS_A_LAYER;
        p.beat++;
        note_time(p, tape, layer * CLOCKED_A_LAYER + CLOCK_QKV);
        query_key_value(p, tape, segments, layer, n_rows);
        note_time(p, tape, layer * CLOCKED_A_LAYER + CLOCK_ATTENTION);
        attention(p, tape, layer, n_rows);
        note_time(p, tape, layer * CLOCKED_A_LAYER + CLOCK_OUT);
        output(p, tape, segments[SEGMENT_OUT], layer, n_rows);
        note_time(p, tape, layer * CLOCKED_A_LAYER + CLOCK_GATE_UP);
        gate_and_up(p, tape, segments[SEGMENT_GATE_UP], layer, n_rows);
        note_time(p, tape, layer * CLOCKED_A_LAYER + CLOCK_DOWN);
        down(p, tape, segments[SEGMENT_DOWN], layer, n_rows);
    }
    p.beat++;
    note_time(p, tape, CLOCK_HEAD);
    head(p, tape, n_rows);
    note_time(p, tape, CLOCK_CHOOSE);
    for (int row = block(); row < n_rows; row += N_BLOCKS) choose(p, tape, row);
}

// --- the loop ---

FUNCTION void play(Player& p, const Tape& tape) {
    for (bool goes = tape.single || go_on(p, tape, 0); goes;) {
        const int n_rows = (int)load_fresh((const u32*)TABLE_n_rows(tape.view));
        step(p, tape, n_rows);
        sync_players();
        note_time(p, tape, CLOCK_BORDER);
        goes = go_on(p, tape, n_rows) && !tape.single;
    }
    leave_the_stage(p, tape);
}

KERNEL(tape, Tape, given, N_PLAYER_THREADS + 32) {
    Shared* const shared = (Shared*)shared_memory();
    char* const ring = shared_memory() + RING_AT;
    if (thread() == 0) {
        set_up(*shared);
        gate_init_fence();
    }
    sync_block();
    if (thread() >= N_PLAYER_THREADS) {
        if (thread() == N_PLAYER_THREADS) read_tape(given, *shared, ring);
        return;
    }
    Player p;
    p.thread = thread();
    p.warp = p.thread / 32;
    p.lane = p.thread % 32;
    p.stage = p.phase = p.turn = 0;
    p.beat = load_fresh(&given.state->beat);
    p.ring = ring;
    p.activations = (u16*)(ring + STAGES * STAGE_BYTES);
    p.shared = shared;
    play(p, given);
}
