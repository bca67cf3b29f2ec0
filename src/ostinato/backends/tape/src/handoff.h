// Hand-offs: loads what other blocks have stored and writes it to `activations` in the layout that products read.
//
// A hop is an array of 64-bit words: a value in the low half, its tag in the high half. A word has arrived when its tag
// is the phase's tag; there is no barrier and no fence, and words arrive in any order. So a thread polls the first
// words that it needs, loads all the others once those have arrived, and loads again those that were late. Polling all
// words from the start is slower: the polls take bandwidth from the stream of weights. All code here runs between the
// last word of one phase and the first product of the next, in every block: it is short, and exists once.
//
// Activations lie [row][columns + ROW_PADDING], 2 bytes each, columns a multiple of 32; those beyond the real ones are
// zero. In the int8 build (WIDE 0) a row has the same bytes: int8 [columns], then float32 scales [columns / 32].
// Twins: rms_norm_torch without its scale, which the product's epilogue applies; quantize_q8_0_torch but for the type
// of the scales.
#pragma once
#include "parts.h"

#define PADDED(columns) (((columns) + 32 * N_COMPUTE_WARPS - 1) / (32 * N_COMPUTE_WARPS) * (32 * N_COMPUTE_WARPS))
#define NORMED_COLUMNS PADDED(HIDDEN)
// Columns of pairs that are multiplied between two additions to the sums: whole chunks of every kind.
#define SLAB_UNIT (256 * N_COMPUTE_WARPS)
#define SLAB_COLUMNS ((ACTIVATION_BYTES / (2 * MAX_ROWS) - ROW_PADDING) / SLAB_UNIT * SLAB_UNIT)
static_assert(SLAB_COLUMNS > 0, "MAX_ROWS rows of one chunk's activations must fit");
static_assert(MAX_ROWS * 2 * (NORMED_COLUMNS + ROW_PADDING) <= ACTIVATION_BYTES, "MAX_ROWS normed rows must fit");

// Loads of two words each that a thread has in flight at most: four registers a load.
#define LOADS_AT_ONCE 16

// float16 overflows where bfloat16 does not: there a row is normed before it is rounded, not after.
#define NORM_FIRST (WIDE && !ACTIVATION_BF16)

DEVICE u32 pair_of(float low, float high) { return pair_as<ACTIVATION_BF16>(low, high); }

DEVICE constexpr int at_most(int n, int most) { return n < most ? n : most; }

// --- waiting for words ---

DEVICE bool have_arrived(const u64 words[2], u32 tag) {
    return (u32)(words[0] >> 32) == tag && (u32)(words[1] >> 32) == tag;
}

DEVICE void await_two(const Tape& tape, const u64* place, u32 tag, u64 words[2]) {
    for (BoundedWait waiting(tape.state); !have_arrived(words, tag) && waiting.keep_waiting();) {
        load_two_relaxed(place, words);
    }
}

// What a thread has loaded of some rows; its consecutive loads lie N_COMPUTE_THREADS loads apart.
template <int ROWS, int LOADS>
struct Words {
    u64 of[ROWS][LOADS][2];
};

// How many of the `n` loads of a row, which the compute warps share, one thread does.
DEVICE int loads_of(int thread, int n) { return n > thread ? (n - thread - 1) / N_COMPUTE_THREADS + 1 : 0; }

template <int ROWS, int LOADS>
DEVICE void forget(Words<ROWS, LOADS>& words) {  // no tag is 0
    UNROLL
    for (int i = 0; i < ROWS * LOADS; i++) words.of[i / LOADS][i % LOADS][0] = words.of[i / LOADS][i % LOADS][1] = 0;
}

// Loads the words that have not arrived yet. `own`: the thread's first words of the first row; `row_words`: from row to
// row.
template <int ROWS, int LOADS>
DEVICE void load_late(
    u32 tag, const u64* own, int row_words, int n_rows, int n_loads, Words<ROWS, LOADS>& words
) {
    UNROLL
    for (int i = 0; i < ROWS * LOADS; i++) {
        const int r = i / LOADS, j = i % LOADS;
        if (r >= n_rows || j >= n_loads || have_arrived(words.of[r][j], tag)) continue;
        load_two_relaxed(own + r * row_words + 2 * j * N_COMPUTE_THREADS, words.of[r][j]);
    }
}

// Waits until all needed words have arrived; the others stay as they are. `polls`: these are the first of the phase,
// and all the others are loaded once one has arrived.
template <int ROWS, int LOADS>
DEVICE void await_words(
    const Tape& tape, u32 tag, const u64* own, int row_words, int n_rows, int n_loads, bool polls,
    Words<ROWS, LOADS>& words
) {
    if (polls && n_loads > 0) {
        load_two_relaxed(own, words.of[0][0]);
        await_two(tape, own, tag, words.of[0][0]);
    }
    for (BoundedWait waiting(tape.state);;) {
        load_late(tag, own, row_words, n_rows, n_loads, words);
        bool all = true;
        UNROLL
        for (int i = 0; i < ROWS * LOADS; i++) {
            const int r = i / LOADS, j = i % LOADS;
            all &= r >= n_rows || j >= n_loads || have_arrived(words.of[r][j], tag);
        }
        if (all || !waiting.keep_waiting()) return;
    }
}

// --- storing activations ---

DEVICE u32* wide_row(const ComputeThread& p, int row, int columns) {
    return (u32*)(p.activations + row * (columns + ROW_PADDING));
}
DEVICE u8* narrow_row(const ComputeThread& p, int row, int columns) { return (u8*)wide_row(p, row, columns); }

DEVICE float larger(float a, float b) { return a > b ? a : b; }
DEVICE float size_of(float value) { return value < 0.0f ? -value : value; }

DEVICE u32 byte_of(float value, float per_step) { return (u32)round_to_int(value * per_step) & 255; }

// The int8 scale of the 32 columns that `n_lanes` neighbouring lanes hold together. Called by all lanes of the warp.
DEVICE float step_of(float largest, int n_lanes) {
    for (int mask = n_lanes / 2; mask > 0; mask /= 2) largest = larger(largest, shuffle_xor(largest, mask));
    return largest * (1.0f / 127.0f);
}
DEVICE float steps_per_unit(float step) { return step > 0.0f ? 1.0f / step : 0.0f; }

// --- rows of the residual stream, normed ---

constexpr int NORMED_LOADS = (HIDDEN / 2 + N_COMPUTE_THREADS - 1) / N_COMPUTE_THREADS;  // by a thread, of a row
static_assert(HIDDEN % 64 == 0, "a warp has a pair of columns for every lane, or none");

// What a thread holds of some rows: columns 2 i and 2 i + 1 of each, i = thread + load * N_COMPUTE_THREADS.
template <int ROWS>
struct Pairs {
    float of[ROWS][NORMED_LOADS][2];
};

// The rows of this step: read once, since only the step boundary changes them.
DEVICE void learn_rows(const ComputeThread& p, const Tape& tape, int n_rows) {
    if (p.thread >= n_rows) return;
    const int slot = load_fresh(TABLE_row_slot(tape.view) + p.thread);
    p.shared->slot[p.thread] = slot;
    p.shared->position[p.thread] = load_fresh(TABLE_position(tape.view) + slot);
}

// The embedding of a row's input token.
DEVICE u64 embedding_begin(const Tape& tape, int row) {
    const int slot = load_fresh(TABLE_row_slot(tape.view) + row);
    return (u64)load_fresh(TABLE_token(tape.view) + slot) * HIDDEN;
}

// Times the model's factor on embeddings, rounded to their type, as such models were trained.
DEVICE void scale_embedded(float pair[2]) {
    if (EMBEDDING_SCALE == 1.0f) return;
    pair[0] *= EMBEDDING_SCALE;
    pair[1] *= EMBEDDING_SCALE;
    if (EMBEDDING_TYPE == TYPE_F32) return;
    constexpr bool BF16 = EMBEDDING_TYPE == TYPE_BF16;
    split_as<BF16>(pair_as<BF16>(pair[0], pair[1]), pair[0], pair[1]);
}

template <int ROWS>
DEVICE void fetch_embedded(const ComputeThread& p, const Tape& tape, int row, int n, Pairs<ROWS>& pairs) {
    u64 begin[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) begin[r] = r < n ? embedding_begin(tape, row + r) / 2 : 0;
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        UNROLL
        for (int j = 0; j < NORMED_LOADS; j++) {
            const int i = p.thread + j * N_COMPUTE_THREADS;
            float* const pair = pairs.of[r][j];
            pair[0] = pair[1] = 0.0f;
            if (r >= n || i >= HIDDEN / 2) continue;
            if (EMBEDDING_TYPE == TYPE_F32) {
                const uint2 bits = ((const uint2*)tape.embedding)[begin[r] + i];
                pair[0] = float_of(bits.x);
                pair[1] = float_of(bits.y);
            } else {
                const u32 bits = ((const u32*)tape.embedding)[begin[r] + i];
                split_as<EMBEDDING_TYPE == TYPE_BF16>(bits, pair[0], pair[1]);
            }
            scale_embedded(pair);
        }
    }
}

template <int ROWS>
DEVICE void fetch_put(const ComputeThread& p, const Tape& tape, const u64* source, int row, int n, Pairs<ROWS>& pairs) {
    Words<ROWS, NORMED_LOADS> words;
    const u64* const own = source + (u64)row * HIDDEN + 2 * p.thread;
    forget(words);
    await_words(tape, p.tag, own, HIDDEN, n, loads_of(p.thread, HIDDEN / 2), row == 0, words);
    UNROLL
    for (int i = 0; i < ROWS * NORMED_LOADS; i++) {
        const int r = i / NORMED_LOADS, j = i % NORMED_LOADS;
        pairs.of[r][j][0] = float_of((u32)words.of[r][j][0]);
        pairs.of[r][j][1] = float_of((u32)words.of[r][j][1]);
    }
}

// The residual that the block will add its tiles of `segment` to: kept, since loading it again then would take as long
// as a hop.
DEVICE void keep_residual(float* kept, int first, int row, int i, const float pair[2]) {
    UNROLL
    for (int tile = 0; tile < RESIDUAL_TILES; tile++) {
        if (i / 8 != first + tile * N_BLOCKS) continue;
        float* const place = kept + (tile * 16 + i % 8 * 2) * MAX_ROWS + row;
        place[0] = pair[0];
        place[MAX_ROWS] = pair[1];
    }
}

// Each warp leaves its share of every row's squares. What is added to what follows from HIDDEN alone.
template <int ROWS>
DEVICE void store_squares(const ComputeThread& p, int row, int n, const Pairs<ROWS>& pairs) {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        if (r >= n) continue;
        float sum = 0.0f;
        UNROLL
        for (int j = 0; j < NORMED_LOADS; j++) {
            sum += pairs.of[r][j][0] * pairs.of[r][j][0] + pairs.of[r][j][1] * pairs.of[r][j][1];
        }
        for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
        if (p.lane == 0) p.shared->small[p.warp * MAX_ROWS + row + r] = sum;
    }
}
DEVICE float scale_of_row(const ComputeThread& p, int row) {
    float sum = 0.0f;
    UNROLL
    for (int warp = 0; warp < N_COMPUTE_WARPS; warp++) sum += p.shared->small[warp * MAX_ROWS + row];
    return rsqrt_fast(sum * (1.0f / HIDDEN) + NORM_EPS);
}

DEVICE void lay_pair(const ComputeThread& p, int row, int i, float low, float high) {
    if (WIDE) {
        wide_row(p, row, NORMED_COLUMNS)[i] = pair_of(low, high);
        return;
    }
    const float step = step_of(larger(size_of(low), size_of(high)), 16), per_step = steps_per_unit(step);
    u8* const bytes = narrow_row(p, row, NORMED_COLUMNS);
    ((u16*)bytes)[i] = (u16)(byte_of(low, per_step) | byte_of(high, per_step) << 8);
    if (i % 16 == 0) ((float*)(bytes + NORMED_COLUMNS))[i / 16] = step;
}

// Padding columns: zeroed again with every row, since attention uses the same memory.
DEVICE void lay_padding(const ComputeThread& p, int n_rows) {
    constexpr int n = (NORMED_COLUMNS - HIDDEN) / 2;
    constexpr int ROW = n > 0 ? n : 1;
    for (int i = p.thread; i < n * n_rows; i += N_COMPUTE_THREADS) {
        const int row = i / ROW, pair = HIDDEN / 2 + i % ROW;
        if (WIDE) {
            wide_row(p, row, NORMED_COLUMNS)[pair] = 0;
            continue;
        }
        u8* const bytes = narrow_row(p, row, NORMED_COLUMNS);
        ((u16*)bytes)[pair] = 0;
        if (pair % 16 == 0) ((float*)(bytes + NORMED_COLUMNS))[pair / 16] = 0.0f;
    }
}

// ROWS of them at once.
template <int ROWS>
DEVICE void receive_normed_rows(
    const ComputeThread& p, const Tape& tape, const u64* source, const float* weights, int n_rows, float* kept, int first
) {
    float weight[NORMED_LOADS][2];
    UNROLL
    for (int j = 0; j < NORMED_LOADS; j++) {
        const int i = p.thread + j * N_COMPUTE_THREADS;
        const float2 both = i < HIDDEN / 2 ? ((const float2*)weights)[i] : float2{0.0f, 0.0f};
        weight[j][0] = both.x;
        weight[j][1] = both.y;
    }
    if (source == nullptr) learn_rows(p, tape, n_rows);
    lay_padding(p, n_rows);
    NOT_UNROLLED
    for (int row = 0; row < n_rows; row += ROWS) {
        const int n = min(ROWS, n_rows - row);
        Pairs<ROWS> pairs;
        if (source == nullptr) fetch_embedded(p, tape, row, n, pairs);
        else fetch_put(p, tape, source, row, n, pairs);
        store_squares(p, row, n, pairs);
        if (NORM_FIRST) sync_compute_warps();
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            if (r >= n) continue;
            const float scale = NORM_FIRST ? scale_of_row(p, row + r) : 1.0f;
            UNROLL
            for (int j = 0; j < NORMED_LOADS; j++) {
                const int i = p.thread + j * N_COMPUTE_THREADS;
                const float* const pair = pairs.of[r][j];
                if (i >= HIDDEN / 2) continue;
                lay_pair(p, row + r, i, pair[0] * scale * weight[j][0], pair[1] * scale * weight[j][1]);
                keep_residual(kept, first, row + r, i, pair);
            }
        }
    }
    sync_compute_warps();
    if (p.thread < n_rows) p.shared->scale[p.thread] = NORM_FIRST ? 1.0f : scale_of_row(p, p.thread);
}

// Rows of x, times the norm's weights, to `activations`; the norm's factor that is not applied yet (1 / rms, or 1 with
// NORM_FIRST) to shared->scale, which may be read after the next sync. `source`: the hop of row 0; null in layer 0,
// where x is the embedding of the row's token. The residual that the block's tiles from `first` on will be added to is
// kept.
DEVICE void receive_normed(
    const ComputeThread& p, const Tape& tape, const u64* source, const float* weights, int n_rows, float* kept, int first
) {
    constexpr int MOST = LOADS_AT_ONCE / NORMED_LOADS < 1 ? 1 : LOADS_AT_ONCE / NORMED_LOADS;
    constexpr int ROWS = at_most(MOST, MAX_ROWS);
    if (n_rows == 1) receive_normed_rows<1>(p, tape, source, weights, 1, kept, first);
    else receive_normed_rows<ROWS>(p, tape, source, weights, n_rows, kept, first);
}

// --- pairs of 16-bit activations, which attention and the gated MLP hand over ---

DEVICE void lay_two_pairs(const ComputeThread& p, int row, int at, int columns, bool wanted, u32 first, u32 second) {
    if (WIDE) {
        if (wanted) ((uint2*)wide_row(p, row, columns))[at] = uint2{first, second};
        return;
    }
    float values[4];
    split_as<ACTIVATION_BF16>(first, values[0], values[1]);
    split_as<ACTIVATION_BF16>(second, values[2], values[3]);
    float largest = 0.0f;
    UNROLL
    for (int i = 0; i < 4; i++) largest = larger(largest, size_of(values[i]));
    const float step = step_of(largest, 8), per_step = steps_per_unit(step);
    if (!wanted) return;
    u32 word = 0;
    UNROLL
    for (int i = 0; i < 4; i++) word |= byte_of(values[i], per_step) << 8 * i;
    u8* const bytes = narrow_row(p, row, columns);
    ((u32*)bytes)[at] = word;
    if (at % 8 == 0) ((float*)(bytes + columns))[at / 8] = step;
}

// What products of pairs are made of: columns [begin, begin + columns) of every row of a hop, n_pairs words a row.
struct Slab {
    const u64* hop;
    int n_pairs, n_rows, begin, columns;
    MEMBER int loads() const { return columns / 4; }  // at a row
    MEMBER int real() const { return min(loads(), (2 * n_pairs - begin) / 4); }  // the others are zero
    MEMBER const u64* words_at(int row, int load_relaxed) const { return hop + (u64)row * n_pairs + begin / 2 + 2 * load_relaxed; }
};

// Receives a slab into `activations`; `words`: the words of the first rows may have been loaded already.
template <int ROWS, int LOADS>
DEVICE void receive_slab(const ComputeThread& p, const Tape& tape, const Slab& slab, Words<ROWS, LOADS>& words) {
    NOT_UNROLLED
    for (int row = 0; row < slab.n_rows; row += ROWS) {
        NOT_UNROLLED
        for (int at = p.thread; at - p.lane < slab.loads(); at += LOADS * N_COMPUTE_THREADS) {  // by warps: lanes meet
            const bool polls = row == 0 && slab.begin == 0 && at == p.thread;
            const int n_rows = min(ROWS, slab.n_rows - row), n_loads = loads_of(at, slab.real());
            await_words(tape, p.tag, slab.words_at(row, at), slab.n_pairs, n_rows, n_loads, polls, words);
            UNROLL
            for (int i = 0; i < ROWS * LOADS; i++) {
                const int r = row + i / LOADS, place = at + i % LOADS * N_COMPUTE_THREADS;
                const u64* const two = words.of[i / LOADS][i % LOADS];
                const bool wanted = r < slab.n_rows && place < slab.loads();
                lay_two_pairs(p, r, place, slab.columns, wanted, (u32)two[0], (u32)two[1]);
            }
            forget(words);
        }
    }
}

DEVICE constexpr int loads_for(int columns) { return (columns / 4 + N_COMPUTE_THREADS - 1) / N_COMPUTE_THREADS; }

// A single row has its own code: all of it is loaded at once. Of several rows the next slab may be loaded ahead
// (product.h).
using OneRow = Words<1, at_most(loads_for(PADDED(FF > QUERY_COLUMNS ? FF : QUERY_COLUMNS)), LOADS_AT_ONCE)>;
constexpr int SLAB_LOADS = at_most(loads_for(SLAB_COLUMNS), LOADS_AT_ONCE);
using ManyRows = Words<at_most(LOADS_AT_ONCE / SLAB_LOADS, MAX_ROWS), SLAB_LOADS>;

DEVICE void ask_ahead(const ComputeThread& p, const Slab& slab, ManyRows& words) {
    load_late(p.tag, slab.words_at(0, p.thread), slab.n_pairs, slab.n_rows, loads_of(p.thread, slab.real()), words);
}

// No compute warp may be reading what lies in `activations`; after it all may.
DEVICE void receive_pairs(const ComputeThread& p, const Tape& tape, const Slab& slab, ManyRows& ahead) {
    if (slab.n_rows == 1) {
        OneRow words;
        forget(words);
        receive_slab(p, tape, slab, words);
    } else receive_slab(p, tape, slab, ahead);
    sync_compute_warps();
}
