// From logits to tokens: what backends/torch/ops/sample_step.py defines, by all blocks together, then by one block for each row.
//
// `summarise`: every block applies penalties, bias and bans to the logits of its own head tiles and stores for each row
// the largest logit, the sum of exponentials and, if the row is sampled, the sum of its weights. `sample_row`: a greedy
// row is decided by these summaries alone, one hop after the head. A sampled row is ranked by one block, only as far
// as its random number requires: a first pass over `scaled` lists the ids above a floor that follows from the blocks'
// largest logits, which is enough for most settings; otherwise the row is counted into buckets by value, and only the
// bucket where a filter cuts and the one that holds the sample are listed. A bucket with too many ids for a list is
// divided into buckets again, by value and then by id.
//
// Greedy tokens are the twin's. Sampling goes through the ids by rank, as the twin's does. Weights are integers,
// e^(x - largest) in units of 2^-WEIGHT_BITS, so that their sums have the same bits in any order. The twin adds up
// float64: its sums differ by some 1e-12 of the largest weight, and a sample differs only where a limit falls between
// the two: a few samples in ten million from 128,000 ids, and much less often where few ids have weight.
// Log-probabilities are added up in float32 within a block and in float64 across blocks.
//
// Bound by reading 4 bytes an id from L2 for each pass, by one block; for a flat row also by one float64 exp an id.
#pragma once
#include "parts.h"
#include "philox.h"

#if !defined(LISTED)
#define LISTED 1024     // ids that are ranked at once; a power of two
#define N_BUCKETS 1024
#endif
#define REACH 32.0f     // below the largest; lower values have weight 0
#define QUADS 8         // loads of 16 bytes that a thread has in flight
#define LOWEST (-3.4028234663852886e38f)
#define NO_ID (-1)

constexpr int WEIGHT_BITS = VOCAB(any) <= 1 << 17 ? 45 : 42;  // the whole vocabulary weighs less than 2^63
static_assert(LISTED >= MAX_TOP, "the most likely are listed");
static_assert(VOCAB(any) <= 1 << 20, "the weights of so many ids may not fit 64 bits");
static_assert(MAX_ROWS <= 32 && N_COMPUTE_WARPS <= 32, "a row is a bit of a word, a compute warp a lane of a warp");

// --- ranks: a value and its id as one number, the larger before the smaller ---

// Of equal values the lowest id comes first, NaN comes before all, as in the twin; 0 is no id.
typedef u64 Ranked;

DEVICE u32 order_of(float value) {
    if (value != value) return 0xFFFFFFFFu;
    const u32 bits = bits_of(value + 0.0f);  // -0 becomes 0: the two are equals
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float value_of(u32 order) { return float_of(order >> 31 ? order ^ 0x80000000u : ~order); }

DEVICE Ranked ranked(float value, int id) { return (u64)order_of(value) << 32 | ~(u32)id; }
DEVICE float value_of(Ranked item) { return value_of((u32)(item >> 32)); }
DEVICE int id_of(Ranked item) { return (int)~(u32)item; }

DEVICE bool is_finite(float value) { return value >= LOWEST && value <= -LOWEST; }

// --- weights: e^(value - most) as integers, whose sums do not depend on the order ---

DEVICE u64 weight_of(float value, float most) {
    return (u64)(exp_exact((double)value - (double)most) * (double)(1ull << WEIGHT_BITS) + 0.5);
}

DEVICE float exp_of(float value) { return exp2_fast(value * 1.4426950408889634f); }

// --- the sampling settings of a row's slot ---

struct SamplingParams {
    int slot, n_top, top_k, n_bias, n_stop, grammar;
    bool samples, penalised, waits, constrained;
    float safe_temperature, repetition, presence, frequency;
};

// All loads are issued before the first use, so that their latencies overlap.
DEVICE SamplingParams params_of(const Tape& tape, int row) {
    const View& view = tape.view;
    const int slot = load_fresh(TABLE_row_slot(view) + row);
    const float temperature = load_fresh(TABLE_temperature(view) + slot);
    const int n_logprobs = load_fresh(TABLE_n_logprobs(view) + slot), top_k = load_fresh(TABLE_top_k(view) + slot);
    const int n_bias = load_fresh(TABLE_n_bias(view) + slot), n_stop = load_fresh(TABLE_n_stop(view) + slot);
    const int penalised = load_fresh(TABLE_penalised(view) + slot);
    const int constrained = load_fresh(TABLE_constrained(view) + slot), grammar = load_fresh(TABLE_grammar(view) + slot);
    const int made = load_fresh(TABLE_made(view) + slot), min_tokens = load_fresh(TABLE_min_tokens(view) + slot);
    SamplingParams params;
    params.repetition = load_fresh(TABLE_repetition(view) + slot);
    params.presence = load_fresh(TABLE_presence(view) + slot);
    params.frequency = load_fresh(TABLE_frequency(view) + slot);
    params.slot = slot;
    params.grammar = grammar;
    params.n_top = n_logprobs < MAX_TOP ? n_logprobs : MAX_TOP;
    if (params.n_top > VOCAB(view)) params.n_top = VOCAB(view);
    params.top_k = top_k < N_TOKENS ? top_k : 0;
    params.n_bias = n_bias < MAX_LOGIT_BIAS ? n_bias : MAX_LOGIT_BIAS;
    params.n_stop = n_stop < MAX_STOP_IDS ? n_stop : MAX_STOP_IDS;
    params.samples = temperature > 0.0f;
    params.penalised = penalised != 0;
    params.waits = made < min_tokens;
    params.constrained = constrained != 0;
    params.safe_temperature = temperature > 1e-6f ? temperature : 1e-6f;
    return params;
}

// What another lane has loaded.
DEVICE SamplingParams params_at(const SamplingParams& own, int lane) {
    SamplingParams params;
    params.slot = shuffle(own.slot, lane);
    params.grammar = 0;  // not passed on: only the loading lane reads it
    params.n_top = shuffle(own.n_top, lane);
    params.top_k = shuffle(own.top_k, lane);
    params.n_bias = shuffle(own.n_bias, lane);
    params.n_stop = shuffle(own.n_stop, lane);
    const int flags = shuffle(own.samples | own.penalised << 1 | own.waits << 2 | own.constrained << 3, lane);
    params.samples = flags & 1;
    params.penalised = flags & 2;
    params.waits = flags & 4;
    params.constrained = flags & 8;
    params.safe_temperature = shuffle(own.safe_temperature, lane);
    params.repetition = shuffle(own.repetition, lane);
    params.presence = shuffle(own.presence, lane);
    params.frequency = shuffle(own.frequency, lane);
    return params;
}

// Whether the row's block needs more than the summaries.
DEVICE bool needs_logits(const SamplingParams& params) { return params.samples || params.n_top > 0; }

// --- shape: penalties, bias and bans, each the same float32 operations as the twin's ---

DEVICE bool has_bit(const int* words, int id) { return load_fresh((const u32*)words + id / 32) >> id % 32 & 1; }

DEVICE float penalised(const Tape& tape, const SamplingParams& params, int id, float x) {
    const int made = load_fresh(TABLE_counts(tape.view) + (u64)params.slot * VOCAB(tape.view) + id);
    const bool in_prompt = has_bit(TABLE_prompt_bits(tape.view) + params.slot * MASK_WORDS(tape.view), id);
    const float factor = in_prompt || made > 0 ? params.repetition : 1.0f;
    x = x > 0.0f ? rounded_quotient(x, factor) : rounded_product(x, factor);
    x = rounded_sum(x, made > 0 ? -params.presence : -0.0f);
    return rounded_sum(x, -rounded_product(params.frequency, (float)made));
}

// All lanes of a warp together: each loads one pair at a time, and a pair whose id belongs to the warp is broadcast.
// The warp's 32 ids are two tiles.
DEVICE float bias_of(const ComputeThread& p, const Tape& tape, const SamplingParams& params, int id) {
    const int* const ids = TABLE_bias_ids(tape.view) + params.slot * MAX_LOGIT_BIAS;
    const float* const values = TABLE_bias_values(tape.view) + params.slot * MAX_LOGIT_BIAS;
    const int first = shuffle(id, 0) / 16, second = shuffle(id, 16) / 16;
    float bias = 0.0f;
    NOT_UNROLLED
    for (int begin = 0; begin < params.n_bias; begin += 32) {
        const int at = begin + p.lane < params.n_bias ? begin + p.lane : begin;
        const int named = load_fresh(ids + at), tile = named / 16;
        const float value = load_fresh(values + at);
        u32 hits = votes(begin + p.lane < params.n_bias && (tile == first || tile == second));
        NOT_UNROLLED
        for (; hits; hits &= hits - 1) {
            const int from = lowest_bit(hits), hit = shuffle(named, from);
            const float more = shuffle(value, from);
            if (hit == id) bias = rounded_sum(bias, more);
        }
    }
    return bias;
}

// A logit after penalties, bias and bans; called by all lanes of a warp, whose ids are those of two tiles.
DEVICE float shaped(const ComputeThread& p, const Tape& tape, const SamplingParams& params, int id, float x) {
    if (params.penalised) x = penalised(tape, params, id, x);
    if (params.n_bias > 0) x = rounded_sum(x, bias_of(p, tape, params, id));
    bool banned = false;
    NOT_UNROLLED
    for (int i = 0; params.waits && i < params.n_stop; ++i) {
        banned |= load_fresh(TABLE_stop_ids(tape.view) + params.slot * MAX_STOP_IDS + i) == id;
    }
    if (params.constrained) banned |= !has_bit(TABLE_mask_bits(tape.view) + params.slot * MASK_WORDS(tape.view), id);
    return banned ? float_of(0xFF800000u) : x;
}

// --- summaries: one for each row, of the logits of a block's own tiles ---

// Words of a summary; all have the step's tag. The last two are used only for a sampled row.
enum { SUMMARY_ORDER, SUMMARY_ID, SUMMARY_PEAK, SUMMARY_SUM, SUMMARY_RAW, SUMMARY_SPARE, SUMMARY_LOW, SUMMARY_HIGH };

DEVICE u64* summary_of(const Tape& tape, int row, int block) {
    return tape.summaries + ((u64)row * N_BLOCKS + block) * SUMMARY_WORDS;
}

// Of some of a row's ids.
struct Part {
    Ranked best;  // as they are chosen from
    float peak;   // the largest raw logit, LOWEST if there is none
    float sum;    // of e^(raw - peak)
};

DEVICE void join(Part& part, const Part& other) {
    const float peak = other.peak > part.peak ? other.peak : part.peak;
    part.sum = part.sum * exp_of(part.peak - peak) + other.sum * exp_of(other.peak - peak);
    part.peak = peak;
    if (other.best > part.best) part.best = other.best;
}

// Reduces over the warp by a fixed tree; lane 0 has the result.
DEVICE void join_lanes(Part& part) {
    for (int apart = 16; apart > 0; apart /= 2) {
        const Part other = {shuffle_xor(part.best, apart), shuffle_xor(part.peak, apart), shuffle_xor(part.sum, apart)};
        join(part, other);
    }
}

// Where the compute warps of a block combine their parts: in the activations' memory.
struct Summing {
    Part parts[MAX_ROWS][N_COMPUTE_WARPS];
    u64 weights[MAX_ROWS][N_COMPUTE_WARPS];
};
static_assert(sizeof(Summing) <= ACTIVATION_BYTES, "no room for the parts of a summary");

// Calls each(id, value, inside) for the ids of the block's own tiles, with all lanes of a warp at once.
template <class Each>
DEVICE void for_own_ids(const ComputeThread& p, const Segment& head, const float* values, Each each) {
    const int first = (block() - head.first + N_BLOCKS) % N_BLOCKS;
    const int n_own = first < head.n_tiles ? (head.n_tiles - first + N_BLOCKS - 1) / N_BLOCKS * 16 : 0;
    const auto id_at = [&](int at) {
        const int id = (first + at / 16 * N_BLOCKS) * 16 + at % 16;
        return at < n_own && id < VOCAB(any) ? id : NO_ID;
    };
    NOT_UNROLLED
    for (int begin = p.warp * 32; begin < n_own; begin += 4 * N_COMPUTE_THREADS) {
        float some[4];  // loaded together, so that the waits are one
        UNROLL
        for (int k = 0; k < 4; ++k) some[k] = values[max(id_at(begin + k * N_COMPUTE_THREADS + p.lane), 0)];
        NOT_UNROLLED
        for (int k = 0; k < 4 && begin + k * N_COMPUTE_THREADS < n_own; ++k) {
            const int id = id_at(begin + k * N_COMPUTE_THREADS + p.lane);
            each(max(id, 0), k == 0 ? some[0] : k == 1 ? some[1] : k == 2 ? some[2] : some[3], id != NO_ID);
        }
    }
}

// The thread's part of a row. For a sampled row, writes the logits that sampling reads to `scaled`.
DEVICE Part own_part(const ComputeThread& p, const Tape& tape, const Segment& head, int row, const SamplingParams& params) {
    float* const scaled = tape.scaled + (u64)row * VOCAB(tape.view);
    Part part = {0, LOWEST, 0.0f};
    for_own_ids(p, head, tape.logits + (u64)row * VOCAB(tape.view), [&](int id, float raw, bool inside) {
        float value = shaped(p, tape, params, id, raw);
        if (!inside) return;
        const float peak = raw > part.peak ? raw : part.peak;
        part.sum = part.sum * exp_of(part.peak - peak) + exp_of(raw - peak);
        part.peak = peak;
        if (id >= N_TOKENS) return;
        if (params.samples) scaled[id] = value = rounded_quotient(value, params.safe_temperature) + 0.0f;
        const Ranked item = ranked(value, id);
        if (item > part.best) part.best = item;
    });
    return part;
}

// By one warp: combines the compute warps' parts and sends the summary to the row's block.
DEVICE void put_summary(const ComputeThread& p, const Tape& tape, const Summing& summing, int row) {
    Part part = {0, LOWEST, 0.0f};
    if (p.lane < N_COMPUTE_WARPS) part = summing.parts[row][p.lane];
    join_lanes(part);
    const Ranked best = shuffle(part.best, 0);
    const float raw = best ? tape.logits[(u64)row * VOCAB(tape.view) + id_of(best)] : 0.0f;
    const u32 peak = bits_of(shuffle(part.peak, 0)), sum = bits_of(shuffle(part.sum, 0));
    const u32 words[] = {(u32)(best >> 32), (u32)id_of(best), peak, sum, bits_of(raw), 0};
    u32 word = 0;
    UNROLL
    for (int i = 0; i <= SUMMARY_SPARE; ++i) {
        if (p.lane == i) word = words[i];
    }
    if (p.lane <= SUMMARY_SPARE) put(summary_of(tape, row, block()) + p.lane, word, p.tag);
}

// The lane's sum over all lanes; of whole numbers, so that every lane has the same.
DEVICE u64 sum_over_lanes(u64 value) {
    for (int apart = 16; apart > 0; apart /= 2) value += shuffle_xor(value, apart);
    return value;
}

// The warp's weight of a row, beside the largest value of the block.
DEVICE u64 warp_weight(const ComputeThread& p, const Tape& tape, const Segment& head, const Summing& summing, int row) {
    Ranked best = 0;
    for (int compute_warp = 0; compute_warp < N_COMPUTE_WARPS; ++compute_warp) {
        const Ranked theirs = summing.parts[row][compute_warp].best;
        if (theirs > best) best = theirs;
    }
    const float* const scaled = tape.scaled + (u64)row * VOCAB(tape.view);
    const float most = value_of(best);
    u64 weight = 0;
    if (best && is_finite(most)) {
        for_own_ids(p, head, scaled, [&](int id, float value, bool inside) {
            if (inside && id < N_TOKENS) weight += weight_of(value, most);
        });
    }
    return sum_over_lanes(weight);
}

// Every block, once its logits are written: its summary of each row, then its mark, whose release makes everything that
// the block wrote in this step visible. Uses the activations' memory.
APART void summarise(ComputeThread p, const Tape& tape, const Segment& head, int n_rows) {
    Summing& summing = *(Summing*)p.activations;
    const SamplingParams own = params_of(tape, p.lane < n_rows ? p.lane : 0);  // a lane for each row, so that the waits are one
    // Masks were found before the first product of this step: the wait is for their order in memory.
    if (own.grammar && p.lane < n_rows) await_mark(tape, mask_mark(tape, p.lane), p.shared->masked_at);
    sync_compute_warps();  // the logits are written, and the activations are read
    u32 sampling = 0;
    bool row_summary = false;
    NOT_UNROLLED
    for (int row = 0; row < n_rows; ++row) {
        const SamplingParams params = params_at(own, row);
        sampling |= (u32)params.samples << row;
        row_summary |= needs_logits(params);
        Part part = own_part(p, tape, head, row, params);
        join_lanes(part);
        if (p.lane == 0) summing.parts[row][p.warp] = part;
    }
    sync_compute_warps();
    NOT_UNROLLED
    for (int row = p.warp; row < n_rows; row += N_COMPUTE_WARPS) put_summary(p, tape, summing, row);
    // By the last warp, since the first may have a row to sample; `scaled` of sampled rows has been written before.
    const bool raises = p.thread == N_COMPUTE_THREADS - 32;
    if (!row_summary) {
        if (raises) store_release(tape.marks + block(), (u64)p.tag << 32);
        return;
    }

    NOT_UNROLLED
    for (u32 rows = sampling; rows; rows &= rows - 1) {
        const int row = lowest_bit(rows);
        const u64 weight = warp_weight(p, tape, head, summing, row);
        if (p.lane == 0) summing.weights[row][p.warp] = weight;
    }
    sync_compute_warps();
    if (raises) store_release(tape.marks + block(), (u64)p.tag << 32);
    NOT_UNROLLED
    for (int row = p.warp; row < n_rows; row += N_COMPUTE_WARPS) {
        if (!(sampling >> row & 1)) continue;
        const u64 weight = sum_over_lanes(p.lane < N_COMPUTE_WARPS ? summing.weights[row][p.lane] : 0);
        u64* const to = summary_of(tape, row, block()) + SUMMARY_LOW;
        if (p.lane < 2) put(to + p.lane, (u32)(weight >> 32 * p.lane), p.tag);
    }
}

// --- the summaries, as the row's block receives them ---

struct RowSummary {
    Ranked best;
    float raw, peak;   // the logit of the best id, of a greedy row; the largest logit
    double log_total;  // of e^(logit - peak)
    u64 total;         // sum of the weights, of a sampled row
};

// What a row's block works in: the activations' memory.
struct SamplingScratch {
    Ranked list[LISTED];      // ranked
    u64 through[LISTED];      // the weight of the list up to and with each of them
    u64 sums[N_BUCKETS];      // the same of buckets
    u32 counts[N_BUCKETS];    // ids up to and with each bucket
    u32 tops[N_BLOCKS], peaks[N_BLOCKS];  // the blocks' largest, by order
    u64 of_warp[N_COMPUTE_WARPS];
    RowSummary row_summary;
    u32 n_found, floor;
};
static_assert(sizeof(SamplingScratch) <= ACTIVATION_BYTES, "no room to choose in");

#define BLOCKS_A_LANE ((N_BLOCKS + 31) / 32)

// By one warp: the summaries of all blocks as one. `tops` and `peaks` [N_BLOCKS], or null.
DEVICE RowSummary collect_summaries(const ComputeThread& p, const Tape& tape, int row, bool samples, u32* tops, u32* peaks) {
    u64 words[BLOCKS_A_LANE][6];
    bool all;
    BoundedWait waiting(tape.state);
    do {
        all = true;
        UNROLL
        for (int i = 0; i < BLOCKS_A_LANE; ++i) {
            const int block = p.lane + 32 * i < N_BLOCKS ? p.lane + 32 * i : N_BLOCKS - 1;
            const u64* const summary = summary_of(tape, row, block);
            load_two_relaxed(summary + SUMMARY_ORDER, words[i]);
            load_two_relaxed(summary + SUMMARY_PEAK, words[i] + 2);
            load_two_relaxed(summary + (samples ? SUMMARY_LOW : SUMMARY_RAW), words[i] + 4);
        }
        UNROLL
        for (int i = 0; i < 6 * BLOCKS_A_LANE; ++i) all &= (u32)(words[i / 6][i % 6] >> 32) == p.tag;
    } while (!all && waiting.keep_waiting());

    Ranked best = 0;
    float peak = LOWEST, raw = 0.0f;
    UNROLL
    for (int i = 0; i < BLOCKS_A_LANE; ++i) {  // lanes beyond the last block repeat it: no change
        const Ranked item = (u64)(u32)words[i][0] << 32 | ~(u32)words[i][1];
        const float theirs = float_of((u32)words[i][2]);
        if (item >= best) raw = float_of((u32)words[i][4]);
        if (item > best) best = item;
        if (theirs > peak) peak = theirs;
        if (tops && p.lane + 32 * i < N_BLOCKS) {
            tops[p.lane + 32 * i] = (u32)(item >> 32);
            peaks[p.lane + 32 * i] = order_of(theirs);
        }
    }
    const Ranked own = best;
    for (int apart = 16; apart > 0; apart /= 2) {
        const Ranked other = shuffle_xor(best, apart);
        const float theirs = shuffle_xor(peak, apart);
        if (other > best) best = other;
        if (theirs > peak) peak = theirs;
    }
    raw = shuffle(raw, lowest_bit(votes(own == best)));

    const float most = value_of(best);
    const bool weighs = samples && is_finite(most);
    double sum = 0, weight = 0;
    UNROLL
    for (int i = 0; i < BLOCKS_A_LANE; ++i) {
        if (p.lane + 32 * i >= N_BLOCKS) continue;
        sum += (double)(float_of((u32)words[i][3]) * exp_of(float_of((u32)words[i][2]) - peak));
        if (!weighs) continue;
        const u64 theirs = (u64)(u32)words[i][5] << 32 | (u32)words[i][4];
        if (theirs) weight += (double)theirs * exp_exact((double)value_of((u32)words[i][0]) - (double)most);
    }
    for (int apart = 16; apart > 0; apart /= 2) {
        sum += shuffle_xor(sum, apart);
        weight += shuffle_xor(weight, apart);
    }
    return {best, raw, peak, log_exact(shuffle(sum, 0)), (u64)(shuffle(weight, 0) + 0.5)};
}

DEVICE float logprob_of(const RowSummary& row_summary, float raw) {
    return (float)((double)raw - (double)row_summary.peak - row_summary.log_total);
}

// All compute warps: until the logits of every block lie in memory. They are there for all after the next sync.
DEVICE void await_logits(const ComputeThread& p, const Tape& tape) {
    NOT_UNROLLED
    for (int i = p.thread; i < N_BLOCKS; i += N_COMPUTE_THREADS) {
        await_mark(tape, tape.marks + i, p.tag);
    }
}

// --- passes over a row ---

DEVICE u32 word_of(const uint4& quad, int i) { return i == 0 ? quad.x : i == 1 ? quad.y : i == 2 ? quad.z : quad.w; }

// One of the words that a thread holds, selected by halving: registers cannot be indexed.
DEVICE u32 word_of(const uint4 (&quads)[QUADS], int i) {
    u32 words[QUADS];
    UNROLL
    for (int k = 0; k < QUADS; ++k) words[k] = word_of(quads[k], i & 3);
    UNROLL
    for (int k = 0; k < 4; ++k) words[k] = i & 16 ? words[k + 4] : words[k];
    UNROLL
    for (int k = 0; k < 2; ++k) words[k] = i & 8 ? words[k + 2] : words[k];
    return i & 4 ? words[1] : words[0];
}
static_assert(QUADS == 8, "word_of halves eight of them");

// Calls take(value, id) for each of the n values that is not below `least`; a row may begin at any multiple of 4 bytes.
template <class Take>
DEVICE void for_each_from(const ComputeThread& p, const float* values, int n, float least, Take take) {
    const int n_ahead = min(n, (int)(-(u64)values >> 2 & 3)), n_quads = (n - n_ahead) / 4;
    const uint4* const quads = (const uint4*)(values + n_ahead);
    const int alone = p.thread < n_ahead ? p.thread : 4 * n_quads + p.thread;  // ahead of the quads or behind them
    NOT_UNROLLED
    for (int begin = p.thread;; begin += N_COMPUTE_THREADS * QUADS) {
        uint4 some[QUADS];
        u32 taken = 0;
        const bool ends = begin >= n_quads;
        if (ends) {
            some[0].x = bits_of(load_fresh(values + (alone < n ? alone : 0)));
            taken = alone < n && !(float_of(some[0].x) < least);
        } else {
            UNROLL
            for (int k = 0; k < QUADS; ++k) {
                some[k] = load_fresh(quads + min(begin + k * N_COMPUTE_THREADS, n_quads - 1));
            }
            UNROLL
            for (int k = 0; k < 4 * QUADS; ++k) {
                const bool there = begin + k / 4 * N_COMPUTE_THREADS < n_quads;
                taken |= (u32)(there && !(float_of(word_of(some[k / 4], k % 4)) < least)) << k;
            }
        }
        NOT_UNROLLED
        for (; taken; taken &= taken - 1) {
            const int k = lowest_bit(taken);
            const int id = ends ? alone : n_ahead + 4 * (begin + k / 4 * N_COMPUTE_THREADS) + k % 4;
            take(float_of(word_of(some, k)), id);
        }
        if (ends) return;
    }
}

// The largest of all compute warps' items.
DEVICE Ranked first_of_block(const ComputeThread& p, SamplingScratch& c, Ranked item) {
    for (int apart = 16; apart > 0; apart /= 2) {
        const Ranked other = shuffle_xor(item, apart);
        if (other > item) item = other;
    }
    sync_compute_warps();
    if (p.lane == 0) c.of_warp[p.warp] = item;
    sync_compute_warps();
    for (int i = 0; i < N_COMPUTE_WARPS; ++i) {
        if (c.of_warp[i] > item) item = c.of_warp[i];
    }
    return item;
}

// Inclusive prefix sum of n items. All threads must have written them before, and may read them after.
template <class T>
DEVICE void accumulate(const ComputeThread& p, SamplingScratch& c, T* items, int n) {
    const int each = (n + N_COMPUTE_THREADS - 1) / N_COMPUTE_THREADS;
    const int begin = min(n, p.thread * each), end = min(n, begin + each);
    T sum = 0;
    NOT_UNROLLED
    for (int i = begin; i < end; ++i) sum += items[i];
    T with = sum;
    for (int apart = 1; apart < 32; apart *= 2) {
        const T lower = shuffle(with, (p.lane - apart) & 31);
        if (p.lane >= apart) with += lower;
    }
    if (p.lane == 31) c.of_warp[p.warp] = with;
    sync_compute_warps();
    T before = with - sum;
    for (int i = 0; i < p.warp; ++i) before += (T)c.of_warp[i];
    NOT_UNROLLED
    for (int i = begin; i < end; ++i) items[i] = before += items[i];
    sync_compute_warps();
}

// The first of n ascending items that reaches the goal, or n.
template <class T>
DEVICE int first_to_reach(const T* items, int n, T goal) {
    int low = 0, high = n;
    NOT_UNROLLED
    while (low < high) {
        const int middle = (low + high) / 2;
        if (items[middle] >= goal) high = middle;
        else low = middle + 1;
    }
    return low;
}

// --- the list: some ids that follow each other in rank ---

// Largest first, by a bitonic network. Pairs no more than 32 apart: a warp's are 64 items that no other warp touches.
DEVICE void sort(const ComputeThread& p, Ranked* items, int n) {
    int size = 2;
    while (size < n) size *= 2;
    for (int i = n + p.thread; i < size; i += N_COMPUTE_THREADS) items[i] = 0;
    sync_compute_warps();
    NOT_UNROLLED
    for (int run = 2; run <= size; run *= 2) {
        NOT_UNROLLED
        for (int apart = run / 2; apart > 0; apart /= 2) {
            NOT_UNROLLED
            for (int pair = p.thread; pair < size / 2; pair += N_COMPUTE_THREADS) {
                const int at = (pair & ~(apart - 1)) * 2 + (pair & (apart - 1));
                const Ranked first = items[at], second = items[at + apart];
                if ((first < second) == ((at & run) == 0)) {
                    items[at] = second;
                    items[at + apart] = first;
                }
            }
            if (apart > 32 || (apart == 1 && run > 32)) sync_compute_warps();
            else sync_warp();
        }
    }
    sync_compute_warps();
}

// Lists and ranks the counted ids from `least` on; returns how many there are. More than LISTED are not ranked.
template <class Belongs>
DEVICE int make_list(const ComputeThread& p, SamplingScratch& c, const float* values, int n, float least, Belongs belongs) {
    sync_compute_warps();
    if (p.thread == 0) c.n_found = 0;
    sync_compute_warps();
    for_each_from(p, values, n, least, [&](float value, int id) {
        const Ranked item = ranked(value, id);
        if (!belongs(value, item)) return;
        const u32 place = atomic_add_shared(&c.n_found, 1u);
        if (place < LISTED) c.list[place] = item;
    });
    sync_compute_warps();
    const int n_found = (int)c.n_found;
    if (n_found <= LISTED) sort(p, c.list, n_found);
    return n_found;
}

// The n-th largest of the blocks' largest values, by order: at least n ids reach it. 0: there are fewer than n blocks.
DEVICE u32 floor_of(const ComputeThread& p, SamplingScratch& c, const u32* largest, int n) {
    sync_compute_warps();
    if (p.thread == 0) c.floor = 0;
    sync_compute_warps();
    NOT_UNROLLED
    for (int i = p.thread; i < N_BLOCKS; i += N_COMPUTE_THREADS) {
        const u32 own = largest[i];
        int n_before = 0;
        for (int k = 0; k < N_BLOCKS; ++k) n_before += largest[k] > own || (largest[k] == own && k < i);
        if (n_before == n - 1) c.floor = own;
    }
    sync_compute_warps();
    return c.floor;
}

// --- sampling ---

// The state of a row's sampling, equal in all compute warps.
struct SampleSearch {
    const float* values;  // [N_TOKENS]
    float most, least;    // the largest of them, finite; an id below `least` has weight 0
    int n_listed;
    u32 n_before;         // how many ids come before the list, and their weight
    u64 before;
    float down_to;        // the list has all ids from here up
    bool counted;         // the buckets are those of the whole reach
};

// Which ids are counted, and into which bucket: by value over the whole reach, or by rank from `high` down to `low`.
struct Scope {
    bool by_value;
    Ranked high, low;
    int shift;
};

DEVICE int bucket_of(const SampleSearch& search, const Scope& scope, float value, Ranked item) {
    if (!scope.by_value) return item > scope.high || item < scope.low ? -1 : (int)((scope.high - item) >> scope.shift);
    const float below = (search.most - value) * (N_BUCKETS / REACH);
    return below < (float)N_BUCKETS ? (int)below : N_BUCKETS - 1;
}

DEVICE Scope scope_between(Ranked high, Ranked low) {
    int shift = 0;
    NOT_UNROLLED
    while ((high - low) >> shift >= N_BUCKETS) ++shift;
    return {false, high, low, shift};
}

// Two words, since native atomic additions in shared memory are 32 bits wide. Any order gives the same sum.
DEVICE void add_shared(u64* place, u64 value) {
    u32* const halves = (u32*)place;
    const u32 low = (u32)value, before = atomic_add_shared(halves, low);
    const u32 high = (u32)(value >> 32) + (before + low < before);
    if (high) atomic_add_shared(halves + 1, high);
}

DEVICE void count(const ComputeThread& p, SamplingScratch& c, const SampleSearch& search, const Scope& scope) {
    sync_compute_warps();
    for (int i = p.thread; i < N_BUCKETS; i += N_COMPUTE_THREADS) c.sums[i] = c.counts[i] = 0;
    sync_compute_warps();
    for_each_from(p, search.values, N_TOKENS, search.least, [&](float value, int id) {
        const int bucket = bucket_of(search, scope, value, ranked(value, id));
        if (bucket < 0) return;
        atomic_add_shared(&c.counts[bucket], 1u);
        add_shared(&c.sums[bucket], weight_of(value, search.most));
    });
    sync_compute_warps();
    accumulate(p, c, c.counts, N_BUCKETS);
    accumulate(p, c, c.sums, N_BUCKETS);
}

// The first and the last rank in a bucket.
DEVICE Scope scope_of_bucket(const ComputeThread& p, SamplingScratch& c, const SampleSearch& search, const Scope& scope, int bucket) {
    if (!scope.by_value) {
        const u64 width = 1ull << scope.shift;
        const Ranked high = scope.high - (u64)bucket * width, room = high - scope.low;
        return scope_between(high, room < width ? scope.low : high - width + 1);
    }
    Ranked high = 0, low = 0;  // the low one's complement, so that both are largest
    for_each_from(p, search.values, N_TOKENS, search.least, [&](float value, int id) {
        const Ranked item = ranked(value, id);
        if (bucket_of(search, scope, value, item) != bucket) return;
        if (item > high) high = item;
        if (~item > low) low = ~item;
    });
    high = first_of_block(p, c, high);
    low = ~first_of_block(p, c, low);
    return scope_between(high, low < high ? low : high);
}

DEVICE void weigh_list(const ComputeThread& p, SamplingScratch& c, SampleSearch& search, int n_found) {
    search.n_listed = n_found <= LISTED ? n_found : 0;
    NOT_UNROLLED
    for (int i = p.thread; i < search.n_listed; i += N_COMPUTE_THREADS) {
        c.through[i] = weight_of(value_of(c.list[i]), search.most);
    }
    sync_compute_warps();
    accumulate(p, c, c.through, search.n_listed);
}

DEVICE void list_from_top(const ComputeThread& p, SamplingScratch& c, SampleSearch& search, float down_to) {
    const int n_found = make_list(p, c, search.values, N_TOKENS, down_to, [](float, Ranked) { return true; });
    weigh_list(p, c, search, n_found);
    search.n_before = 0;
    search.before = 0;
    search.down_to = n_found <= LISTED ? down_to : -LOWEST;
}

// The place in the list of the first id in rank at which the count, or the weight, reaches the goal; or none.
#define NO_PLACE (-1)
DEVICE int place_in_list(const SamplingScratch& c, const SampleSearch& search, u64 goal, bool counting) {
    const u64 before = counting ? search.n_before : search.before;
    if (goal <= before) return NO_PLACE;
    const u64 wanted = goal - before;
    if (counting) return wanted <= (u64)search.n_listed ? (int)wanted - 1 : NO_PLACE;
    const int place = first_to_reach(c.through, search.n_listed, wanted);
    return place < search.n_listed ? place : NO_PLACE;
}

// The same for the whole row. If the list does not contain it, a new list is made, through ever narrower buckets.
DEVICE int place_of(const ComputeThread& p, SamplingScratch& c, SampleSearch& search, u64 goal, bool counting) {
    const int place = place_in_list(c, search, goal, counting);
    if (place != NO_PLACE) return place;
    Scope scope = {true, 0, 0, 0};
    u32 n_before = 0;
    u64 before = 0;
    NOT_UNROLLED
    for (int round = 0; round < 64; ++round) {
        if (!scope.by_value || !search.counted) count(p, c, search, scope);
        search.counted = scope.by_value;
        const u64 wanted = goal - (counting ? n_before : before);
        const int bucket = counting ? first_to_reach(c.counts, N_BUCKETS, (u32)wanted)
                                    : first_to_reach(c.sums, N_BUCKETS, wanted);
        if (bucket >= N_BUCKETS) return NO_PLACE;
        const bool from_top = scope.by_value && c.counts[bucket] <= LISTED;
        const u32 n_above = bucket > 0 ? c.counts[bucket - 1] : 0, n_here = c.counts[bucket] - n_above;
        if (!from_top && bucket > 0) {
            n_before += n_above;
            before += c.sums[bucket - 1];
        }
        if (from_top || n_here <= LISTED) {
            const int n_found = make_list(p, c, search.values, N_TOKENS, search.least, [&](float value, Ranked item) {
                const int theirs = bucket_of(search, scope, value, item);
                return theirs == bucket || (from_top && theirs < bucket);
            });
            weigh_list(p, c, search, n_found);
            search.n_before = n_before;
            search.before = before;
            search.down_to = -LOWEST;
            return place_in_list(c, search, goal, counting);
        }
        scope = scope_of_bucket(p, c, search, scope, bucket);
    }
    return NO_PLACE;
}

// The total weight of all ids whose weight is at least this.
DEVICE u64 weight_from(const ComputeThread& p, SamplingScratch& c, const SampleSearch& search, double least) {
    const auto weighs = [&](int place) { return c.through[place] - (place > 0 ? c.through[place - 1] : 0); };
    const int n = search.n_listed;
    const bool known = (double)weight_of(search.down_to < search.most ? search.down_to : search.most, search.most) < least;
    if (n > 0 && search.n_before == 0 && (known || (double)weighs(n - 1) < least)) {
        int low = 1, high = n;  // how many are kept: the first always is
        NOT_UNROLLED
        while (low < high) {
            const int middle = (low + high) / 2;
            if ((double)weighs(middle) < least) high = middle;
            else low = middle + 1;
        }
        return c.through[low - 1];
    }
    u64 weight = 0;
    for_each_from(p, search.values, N_TOKENS, search.least, [&](float value, int) {
        const u64 theirs = weight_of(value, search.most);
        if ((double)theirs >= least) weight += theirs;
    });
    weight = sum_over_lanes(weight);
    sync_compute_warps();
    if (p.lane == 0) c.of_warp[p.warp] = weight;
    sync_compute_warps();
    weight = 0;
    for (int i = 0; i < N_COMPUTE_WARPS; ++i) weight += c.of_warp[i];
    return weight;
}

// The limits that are looked for in the ranks, each within the one before; min-p is one of value.
enum { TOP_K, TOP_P, THE_SAMPLE };

// Samples one id from `scaled`, whose largest value is finite.
DEVICE int sample_token(const ComputeThread& p, const Tape& tape, SamplingScratch& c, int row, const SamplingParams& params, const RowSummary& row_summary) {
    const double top_p = load_fresh(TABLE_top_p(tape.view) + params.slot), one = (double)(1ull << WEIGHT_BITS);
    const double min_p = load_fresh(TABLE_min_p(tape.view) + params.slot);
    const u64 seed = load_fresh((const u64*)TABLE_seed(tape.view) + params.slot);
    const long long position = (long long)load_fresh(TABLE_position(tape.view) + params.slot) + 1;
    const double number = (double)random_24(seed, (u64)position) * 0x1p-24;
    SampleSearch search = {tape.scaled + (u64)row * VOCAB(tape.view), value_of(row_summary.best), 0.0f, 0, 0, 0, -LOWEST, false};
    search.least = search.most - REACH > LOWEST ? search.most - REACH : LOWEST;

    // The first list: as far down as the blocks' largest, or min-p, make likely that it is enough.
    const int n_wanted = params.top_k > 0 && params.top_k < N_BLOCKS ? params.top_k : N_BLOCKS - N_BLOCKS / 4;
    float down_to = LOWEST;
    if (params.top_k > 0 || top_p < 1 || min_p == 0) {
        const float floor = value_of(floor_of(p, c, c.tops, n_wanted));
        if (floor > down_to) down_to = floor;
    }
    if (params.top_k == 0 && min_p > 0) {
        const float bound = search.most + (float)log_exact(min_p) - 0.01f;  // a little lower, as it is rounded
        if (bound > down_to) down_to = bound;
    }
    list_from_top(p, c, search, down_to);

    u64 kept = row_summary.total;
    int place = NO_PLACE;
    NOT_UNROLLED
    for (int limit = TOP_K; limit <= THE_SAMPLE; ++limit) {  // a loop, so that the code of the search exists once
        u64 goal = (u64)params.top_k;
        if (limit == TOP_K && params.top_k == 0) continue;
        if (limit == TOP_P) {
            const double wanted = top_p * (double)kept;
            if (min_p > 0) kept = min(kept, weight_from(p, c, search, min_p * one));
            if (top_p >= 1 || wanted >= (double)kept) continue;
            goal = (u64)wanted;  // an id is kept if the weight before it is less than `wanted`; the first always
            if ((double)goal < wanted || goal == 0) ++goal;
        }
        if (limit == THE_SAMPLE) goal = 1 + (u64)((double)kept * number);
        place = place_of(p, c, search, goal, limit == TOP_K);
        if (place != NO_PLACE) kept = min(kept, search.before + c.through[place]);
    }
    return id_of(place != NO_PLACE ? c.list[place] : row_summary.best);
}

// --- the most likely ids, for requests with top log-probabilities ---

DEVICE void write_likely(const ComputeThread& p, const Tape& tape, SamplingScratch& c, int row, int n_top, const RowSummary& row_summary) {
    const float* const logits = tape.logits + (u64)row * VOCAB(tape.view);
    int* const ids = TABLE_top_ids(tape.view) + row * MAX_TOP;
    float* const logprobs = TABLE_top_logprobs(tape.view) + row * MAX_TOP;
    const float floor = value_of(floor_of(p, c, c.peaks, n_top));
    const float down_to = floor > LOWEST ? floor : float_of(0xFF800000u);
    const int n_found = make_list(p, c, logits, VOCAB(tape.view), down_to, [](float, Ranked) { return true; });
    const bool listed = n_found <= LISTED && n_found >= n_top;
    Ranked last = ~0ull;
    NOT_UNROLLED
    for (int i = 0; !listed && i < n_top; ++i) {  // more equal values than a list holds: one pass for each
        Ranked next = 0;
        for_each_from(p, logits, VOCAB(tape.view), float_of(0xFF800000u), [&](float value, int id) {
            const Ranked item = ranked(value, id);
            if (item < last && item > next) next = item;
        });
        last = first_of_block(p, c, next);
        if (p.thread == 0) c.list[i] = last;
    }
    sync_compute_warps();
    if (p.thread >= n_top) return;
    ids[p.thread] = id_of(c.list[p.thread]);
    logprobs[p.thread] = logprob_of(row_summary, value_of(c.list[p.thread]));
}

// --- the whole, by the row's block ---

DEVICE void write_chosen(const Tape& tape, int row, int token, float logprob) {
    TABLE_chosen(tape.view)[row] = token < 0 ? 0 : token < N_TOKENS ? token : N_TOKENS - 1;  // after a timeout it may be any number
    TABLE_chosen_logprob(tape.view)[row] = logprob;
}

// The token of a row, its log-probability and the most likely ones, into the table; then the row's mark. All compute
// warps of the row's block, after summarise. Uses the activations' memory.
APART void sample_row(ComputeThread p, const Tape& tape, int row) {
    const SamplingParams params = params_of(tape, row);
    // Before the row's mark is raised: after it the step boundary may change the slot's settings. And what
    // summarise has left is read.
    sync_compute_warps();
    u64* const mark = tape.marks + N_BLOCKS + row;
    if (!needs_logits(params)) {
        if (p.warp != 0) return;
        const RowSummary row_summary = collect_summaries(p, tape, row, false, nullptr, nullptr);
        if (p.lane == 0) {
            write_chosen(tape, row, id_of(row_summary.best), logprob_of(row_summary, row_summary.raw));
            store_release(mark, (u64)p.tag << 32);
        }
        return;
    }
    SamplingScratch& c = *(SamplingScratch*)p.activations;
    if (p.warp == 0) {
        const RowSummary row_summary = collect_summaries(p, tape, row, params.samples, c.tops, c.peaks);
        if (p.lane == 0) c.row_summary = row_summary;
    }
    await_logits(p, tape);
    sync_compute_warps();
    const RowSummary row_summary = c.row_summary;
    int token = id_of(row_summary.best);
    float raw = row_summary.raw;
    if (params.samples) {
        if (is_finite(value_of(row_summary.best))) token = sample_token(p, tape, c, row, params, row_summary);
        raw = load_fresh(tape.logits + (u64)row * VOCAB(tape.view) + ((u32)token < N_TOKENS ? token : 0));
    }
    if (p.thread == 0) write_chosen(tape, row, token, logprob_of(row_summary, raw));
    if (params.n_top > 0) write_likely(p, tape, c, row, params.n_top, row_summary);
    sync_compute_warps();
    if (p.thread == 0) store_release(mark, (u64)p.tag << 32);
}
