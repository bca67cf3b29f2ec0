// From a row of logits to a token: what backends/torch/ops/sample_step.py defines, for one row, by one thread, with no allocation.
//
// The same token as the twin for the same logits: penalties, bias and bans are the same float32 operations, ranks are
// decided by value and then by id, and the sums that place a sample are float64. Log-probabilities are the model's own.
//
// The vocabulary is never sorted. What the filters keep is a run of the ranked ids from the first one on, so the ids
// within a reach of the largest are ranked, and more only if those cannot decide. Passes over the vocabulary bound the
// speed: one for the largest, one for the sum of exponentials; for sampling, one more of each and one for each reach.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "layout.h"
#include "philox.h"
#include "scalars.h"

// --- what it works in ---

struct Ranked {
    float value;
    int id;
};

struct SamplerWorkspace {               // of one thread, over memory that the caller owns
    float* values;           // [vocab] logits as penalties, bans and temperature leave them
    Ranked *ranked, *other;  // [vocab + 1] the ids within reach
    double* weights;         // [vocab] their exponentials
};

static inline size_t whole_lines(size_t n_bytes) { return (n_bytes + 63) / 64 * 64; }

static inline size_t sampler_bytes(int vocab) {
    const size_t n = (size_t)vocab + 1;
    return whole_lines(n * sizeof(float)) + 2 * whole_lines(n * sizeof(Ranked)) + whole_lines(n * sizeof(double));
}

static inline SamplerWorkspace workspace_over(void* scratch, int vocab) {
    const size_t n = (size_t)vocab + 1;
    char* at = (char*)scratch;
    char* ranked = at + whole_lines(n * sizeof(float));
    char* other = ranked + whole_lines(n * sizeof(Ranked));
    return {(float*)at, (Ranked*)ranked, (Ranked*)other, (double*)(other + whole_lines(n * sizeof(Ranked)))};
}

// --- passes over the vocabulary ---

#define AT_ONCE (4 * LANES)

static inline Lanes larger_of_block(const float* x) {
    return max(max(load(x), load(x + LANES)), max(load(x + 2 * LANES), load(x + 3 * LANES)));
}

static inline void divide(const float* x, int n, float by, float* out) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, div(load(x + i), lanes(by)));
    for (; i < n; ++i) out[i] = x[i] / by;
}

// The largest; NaN is skipped.
static inline float largest_of(const float* x, int n) {
    Lanes most = lanes(-INFINITY);
    int i = 0;
    for (; i + AT_ONCE <= n; i += AT_ONCE) most = max(larger_of_block(x + i), most);
    float found = largest(most);
    for (; i < n; ++i) found = x[i] > found ? x[i] : found;
    return found;
}

// The first NaN, or the first of the largest.
static inline int first_largest(const float* x, int n, float most, bool numbers) {
    if (!numbers) {
        for (int i = 0; i < n; ++i) {
            if (x[i] != x[i]) return i;
        }
    }
    int i = 0;
    while (i + AT_ONCE <= n && largest(larger_of_block(x + i)) < most) i += AT_ONCE;
    for (; i < n; ++i) {
        if (x[i] == most) return i;
    }
    return 0;
}

// The sum of e^(x - most), each addend float32; right to SUM_ERROR of itself, and NaN if one of x is NaN.
#define SUM_ERROR 1e-5
static inline double sum_of_exp(const float* x, int n, float most) {
    const Lanes top = lanes(most);
    double total = 0;
    int i = 0;
    while (i + LANES <= n) {
        Lanes part = lanes(0.0f);  // sixteen addends a lane, then on in float64
        for (int k = 0; k < 16 && i + LANES <= n; ++k, i += LANES) part = add(part, exp(sub(load(x + i), top)));
        total += sum(part);
    }
    if (i < n) total += sum(exp(sub(keep_first(load_some(x + i, n - i), n - i, -INFINITY), top)));
    return total;
}

// Eight numbers side by side, in whatever registers there are.
#define DOUBLES 8
typedef float Floats __attribute__((vector_size(4 * DOUBLES)));
typedef double Doubles __attribute__((vector_size(8 * DOUBLES)));
typedef long long Longs __attribute__((vector_size(8 * DOUBLES)));

// e^x of x between -708 and 0, in place, right to 1e-15 of itself.
static inline void exp64(Doubles& x) {
    const double shift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, which the low bits count
    const Doubles t = x * 1.4426950408889634 + shift, n = t - shift;
    const Doubles r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10, s = r * r;
    Doubles even = s * (1.0 / 479001600.0) + 1.0 / 3628800.0, odd = s * (1.0 / 39916800.0) + 1.0 / 362880.0;
    even = even * s + 1.0 / 40320.0;
    odd = odd * s + 1.0 / 5040.0;
    even = even * s + 1.0 / 720.0;
    odd = odd * s + 1.0 / 120.0;
    even = even * s + 1.0 / 24.0;
    odd = odd * s + 1.0 / 6.0;
    even = even * s + 0.5;
    const Doubles p = even * s + (odd * s * r + r) + 1.0;
    const Longs power = ((Longs)t + 1023) << 52;
    x = p * (Doubles)power;
}
static inline double exp64(double x) {
    Doubles one = {x};
    exp64(one);
    return one[0];
}

// e^(x - most) of the first eight of x, or of n where there are fewer. What is banned weighs e^-700: nothing to any sum.
static inline void weights_of(const float* x, int n, float most, Doubles& out) {
    Floats some = {};
    if (n >= DOUBLES) memcpy(&some, x, sizeof some);
    for (int k = 0; n < DOUBLES && k < DOUBLES; ++k) some[k] = k < n ? x[k] : -INFINITY;
    const float low = most - 700.0f;
    some = some > low ? some : low;
    out = __builtin_convertvector(some, Doubles) - (double)most;
    exp64(out);
}

// The same sum with nothing rounded to float32.
static inline double exact_sum_of_exp(const float* x, int n, float most) {
    Doubles sums = {}, part;
    int i = 0;
    for (; i + DOUBLES <= n; i += DOUBLES) {
        weights_of(x + i, DOUBLES, most, part);
        sums += part;
    }
    if (i < n) {
        weights_of(x + i, n - i, most, part);
        sums += part;
    }
    double total = 0;
    for (int k = 0; k < DOUBLES; ++k) total += sums[k];
    return total;
}

// All ids whose value is at least `least`, in the order of ids; returns how many.
static inline int within(const float* x, int n, float least, Ranked* out) {
    int found = 0, i = 0;
    for (; i < n; i += AT_ONCE) {
        const int end = i + AT_ONCE < n ? i + AT_ONCE : n;
        if (end - i == AT_ONCE && largest(larger_of_block(x + i)) < least) continue;
        for (int j = i; j < end; ++j) {
            out[found] = {x[j] + 0.0f, j};  // -0 becomes 0: the two are equals
            found += x[j] >= least;
        }
    }
    return found;
}

// Largest first, the lowest id of equals first, given in the order of ids: four stable passes, a byte of the value each.
static inline void rank(Ranked* items, Ranked* other, int n) {
    if (n <= 16) {  // a few: put each in its place
        for (int i = 1; i < n; ++i) {
            const Ranked item = items[i];
            int place = i;
            for (; place > 0 && items[place - 1].value < item.value; --place) items[place] = items[place - 1];
            items[place] = item;
        }
        return;
    }
    int counts[4][256] = {};
    const auto key_of = [](float value) {
        const uint32_t bits = bits_of(value);
        return bits >> 31 ? bits : ~bits & 0x7fffffffu;  // falls as the value rises
    };
    for (int i = 0; i < n; ++i) {
        const uint32_t key = key_of(items[i].value);
        for (int byte = 0; byte < 4; ++byte) ++counts[byte][key >> 8 * byte & 255];
    }
    for (int byte = 0; byte < 4; ++byte) {
        int before = 0;
        for (int& count : counts[byte]) {
            const int here = count;
            count = before;
            before += here;
        }
        for (int i = 0; i < n; ++i) other[counts[byte][key_of(items[i].value) >> 8 * byte & 255]++] = items[i];
        Ranked* const swapped = items;
        items = other;
        other = swapped;
    }
}

// --- shape: penalties, bias and bans ---

// Repetition divides (or multiplies a negative logit) once for any token seen; the others subtract by count.
static inline float penalised(float x, bool in_prompt, int made, float repetition, float presence, float frequency) {
    const float factor = in_prompt || made > 0 ? repetition : 1.0f;
    x = x > 0 ? x / factor : x * factor;
    x = x - presence * (made > 0 ? 1.0f : 0.0f);
    return x - frequency * (float)made;
}

static inline void penalise(const View& admission, const View& view, float* values, int n, int slot, bool first) {
    const int* in_prompt = TABLE_prompt_bits(admission) + (long long)slot * MASK_WORDS(view);
    const int* counts = first ? nullptr : TABLE_counts(view) + (long long)slot * VOCAB(view);
    const float repetition = TABLE_repetition(admission)[slot];
    const float presence = TABLE_presence(admission)[slot], frequency = TABLE_frequency(admission)[slot];
    for (int begin = 0; begin < n; begin += 32) {
        const int end = begin + 32 < n ? begin + 32 : n;
        const uint32_t bits = (uint32_t)in_prompt[begin / 32];
        bool any = bits != 0;
        if (counts && end - begin == 32) any |= sum(add(load(counts + begin), load(counts + begin + LANES))) != 0;
        if (counts && end - begin < 32) any = true;
        for (int i = begin; any && i < end; ++i) {
            const int made = counts ? counts[i] : 0;
            values[i] = penalised(values[i], bits >> (i - begin) & 1, made, repetition, presence, frequency);
        }
    }
}

static inline void add_bias(const View& admission, float* values, int n, int slot) {
    const int n_bias = TABLE_n_bias(admission)[slot];
    const int* ids = TABLE_bias_ids(admission) + (long long)slot * MAX_LOGIT_BIAS;
    const float* biases = TABLE_bias_values(admission) + (long long)slot * MAX_LOGIT_BIAS;
    for (int i = 0; i < n_bias; ++i) {
        bool again = false;  // an id named twice gets the sum of its biases, once
        for (int j = 0; j < i; ++j) again |= ids[j] == ids[i];
        if (again || ids[i] < 0 || ids[i] >= n) continue;
        float bias = 0.0f;
        for (int j = i; j < n_bias; ++j) {
            if (ids[j] == ids[i]) bias += biases[j];
        }
        values[ids[i]] += bias;
    }
}

static inline void ban_stops(const View& admission, float* values, int n, int slot) {
    const int* stops = TABLE_stop_ids(admission) + slot * MAX_STOP_IDS;
    for (int i = 0; i < TABLE_n_stop(admission)[slot]; ++i) {
        if (stops[i] >= 0 && stops[i] < n) values[stops[i]] = -INFINITY;
    }
}

static inline void ban_masked(const View& admission, float* values, int n, int slot) {
    const int* words = TABLE_mask_bits(admission) + (long long)slot * MASK_WORDS(admission);
    for (int begin = 0; begin < n; begin += 32) {
        const uint32_t banned = ~(uint32_t)words[begin / 32];
        const int end = begin + 32 < n ? begin + 32 : n;
        for (int i = begin; banned && i < end; ++i) {
            if (banned >> (i - begin) & 1) values[i] = -INFINITY;
        }
    }
}

// The logits of ids below n as they are to be chosen from: the row itself where nothing applies.
static inline const float* shaped(
    const View& admission, const View& view, const float* logits, float* values, int n, int slot, bool first
) {
    const int made = first ? 0 : TABLE_made(view)[slot];
    const bool is_penalised = TABLE_penalised(admission)[slot], constrained = TABLE_constrained(admission)[slot];
    const bool biased = TABLE_n_bias(admission)[slot] > 0, waits = made < TABLE_min_tokens(admission)[slot];
    if (!(is_penalised || biased || waits || constrained)) return logits;
    memcpy(values, logits, (size_t)n * sizeof(float));
    if (is_penalised) penalise(admission, view, values, n, slot, first);
    if (biased) add_bias(admission, values, n, slot);
    if (waits) ban_stops(admission, values, n, slot);
    if (constrained) ban_masked(admission, values, n, slot);
    return values;
}

// --- sampling ---

#define UNDECIDED (-1)

struct Filters {
    int top_k;
    double top_p, min_p, uniform;
};

static inline void to_weights(const Ranked* ranked, int n, float most, double* weights) {
    for (int i = 0; i < n; i += DOUBLES) {
        float values[DOUBLES] = {};
        const int n_here = n - i < DOUBLES ? n - i : DOUBLES;
        for (int k = 0; k < n_here; ++k) values[k] = ranked[i + k].value;
        Doubles out;
        weights_of(values, n_here, most, out);
        for (int k = 0; k < n_here; ++k) weights[i + k] = out[k];
    }
}

// The rank of the sampled id among the ranked, given the sum of all weights; UNDECIDED where it may lie beyond them. A
// larger sum never keeps fewer ids, nor samples an earlier one: if two sums agree, every sum between them agrees too.
static inline int sampled_place(const Filters& filters, const double* weights, int n, double total, bool no_more) {
    const double least = filters.min_p * (weights[0] / total);
    double sum = 0, kept_sum = 0;
    int n_kept = 0;
    for (; n_kept < n; ++n_kept) {
        const double share = weights[n_kept] / total;
        sum += share;
        const bool kept = sum - share < filters.top_p && share >= least && share > 0;
        if (!kept && n_kept > 0) break;
        kept_sum = sum;
    }
    const bool all_known = no_more || n_kept < n, unfiltered = filters.top_p >= 1 && filters.min_p == 0;
    const double target = filters.uniform * (all_known ? kept_sum : 1.0);
    if (!all_known && !(unfiltered && target < kept_sum)) return UNDECIDED;
    double reached = 0;
    for (int place = 0; place < n_kept; ++place) {
        reached += weights[place] / total;
        if (reached > target) return place;
    }
    return n_kept - 1;
}

static inline double sum_of(const double* weights, int n) {
    double total = 0;
    for (int i = 0; i < n; ++i) total += weights[i];
    return total;
}

// Sampling that a few ids decide: those within a reach of the largest, which grows until they do.
#define A_FEW 4096
static inline int sample_few(const SamplerWorkspace& workspace, int n, float most, const Filters& filters) {
    static const float REACHES[] = {1.0f, 2.0f, 4.0f, 8.0f, 16.0f, INFINITY};
    const bool unfiltered = filters.top_p >= 1 && filters.min_p == 0;
    bool exact = n <= A_FEW;
    double total = 0;  // with top-k, the sum is that of the top-k
    if (!filters.top_k) total = exact ? exact_sum_of_exp(workspace.values, n, most) : sum_of_exp(workspace.values, n, most);
    for (const float reach : REACHES) {
        const float least = most - reach;
        const bool is_all = !(least >= -FLT_MAX), no_more = is_all || filters.top_k;
        int found = within(workspace.values, n, is_all ? -FLT_MAX : least, workspace.ranked);
        if (found < filters.top_k && !is_all) continue;
        if (found > A_FEW) return UNDECIDED;
        if (!no_more) {  // before they are ranked: could they decide?
            to_weights(workspace.ranked, found, most, workspace.weights);
            const double needed = (unfiltered ? filters.uniform : filters.top_p) * total * (1 - SUM_ERROR);
            if (sum_of(workspace.weights, found) < needed && exp64(-reach) > filters.min_p) continue;
        }
        rank(workspace.ranked, workspace.other, found);
        if (filters.top_k && found > filters.top_k) found = filters.top_k;
        to_weights(workspace.ranked, found, most, workspace.weights);
        if (filters.top_k) total = sum_of(workspace.weights, found);
        int place;
        if (filters.top_k || exact) {
            place = sampled_place(filters, workspace.weights, found, total, no_more);
        } else {
            place = sampled_place(filters, workspace.weights, found, total * (1 - SUM_ERROR), no_more);
            if (place != sampled_place(filters, workspace.weights, found, total * (1 + SUM_ERROR), no_more)) {
                total = exact_sum_of_exp(workspace.values, n, most);
                exact = true;
                place = sampled_place(filters, workspace.weights, found, total, no_more);
            }
        }
        if (place != UNDECIDED) return workspace.ranked[place].id;
    }
    return UNDECIDED;
}

// Sampling from many ids: values in buckets of equal width, each with its count and its sum, so that only the bucket
// where a filter cuts and the one that holds the sample are ranked.
#define N_BUCKETS 512
#define BUCKETS_PER_UNIT 16.0f

struct Buckets {
    int counts[N_BUCKETS];
    double sums[N_BUCKETS];
};

static inline bool is_allowed(float value) { return value >= -FLT_MAX; }

static inline int bucket_of(float value, float most) {
    const float below = (most - value) * BUCKETS_PER_UNIT;
    return below < N_BUCKETS - 1 ? (int)below : N_BUCKETS - 1;
}

static inline void fill(Buckets& buckets, const float* values, int n, float most) {
    buckets = {};
    for (int i = 0; i < n; i += DOUBLES) {
        Doubles weights;
        weights_of(values + i, n - i, most, weights);
        int at[DOUBLES];
        const int n_here = n - i < DOUBLES ? n - i : DOUBLES;
        for (int k = 0; k < n_here; ++k) at[k] = bucket_of(values[i + k], most);
        for (int k = 0; k < n_here; ++k) {
            buckets.counts[at[k]] += is_allowed(values[i + k]);
            buckets.sums[at[k]] += weights[k];
        }
    }
}

// The members of one bucket, ranked and weighed; returns how many.
static inline int ranked_bucket(const SamplerWorkspace& workspace, int n, float most, int bucket) {
    const float least = most - (bucket + 1) / BUCKETS_PER_UNIT, slack = 1e-6f * (std::fabs(most) + 64.0f);
    int found = 0;
    for (int i = 0; i < n; i += AT_ONCE) {
        const int end = i + AT_ONCE < n ? i + AT_ONCE : n;
        const bool known = end - i == AT_ONCE && bucket < N_BUCKETS - 1;
        if (known && largest(larger_of_block(workspace.values + i)) < least - slack) continue;
        for (int j = i; j < end; ++j) {
            workspace.ranked[found] = {workspace.values[j] + 0.0f, j};
            found += bucket_of(workspace.values[j], most) == bucket && is_allowed(workspace.values[j]);
        }
    }
    rank(workspace.ranked, workspace.other, found);
    to_weights(workspace.ranked, found, most, workspace.weights);
    return found;
}

static inline int sample_many(const SamplerWorkspace& workspace, int n, float most, const Filters& filters) {
    Buckets buckets;
    fill(buckets, workspace.values, n, most);

    // What top-k leaves, and its sum: the last bucket that it reaches may be cut.
    int n_left = 0;
    for (const int count : buckets.counts) n_left += count;
    if (filters.top_k && filters.top_k < n_left) n_left = filters.top_k;
    double total = 0;
    for (int bucket = 0, before = 0; before < n_left; before += buckets.counts[bucket++]) {
        if (before + buckets.counts[bucket] <= n_left) {
            total += buckets.sums[bucket];
            continue;
        }
        ranked_bucket(workspace, n, most, bucket);
        for (int i = 0; i < n_left - before; ++i) total += workspace.weights[i];
    }

    // What top-p and min-p keep of it: whole buckets, then one by one.
    const double least = filters.min_p / total;  // the largest has the weight 1
    double kept_sum = 0;
    int n_kept = 0;
    bool goes_on = true;
    for (int bucket = 0; goes_on && n_kept < n_left; ++bucket) {
        const double after = kept_sum + buckets.sums[bucket] / total;
        const double lowest = exp64(-(bucket + 1.001) / BUCKETS_PER_UNIT);
        const bool within_p = filters.top_p >= 1 || after * (1 + 1e-9) < filters.top_p;
        const bool within_min_p = filters.min_p == 0 || (lowest > filters.min_p && bucket < N_BUCKETS - 1);
        if (n_kept + buckets.counts[bucket] <= n_left && within_p && within_min_p) {
            n_kept += buckets.counts[bucket];
            kept_sum = after;
            continue;
        }
        const int n_here = ranked_bucket(workspace, n, most, bucket);
        for (int i = 0; i < n_here && goes_on; ++i) {
            const double share = workspace.weights[i] / total, sum = kept_sum + share;
            goes_on = n_kept < n_left && ((sum - share < filters.top_p && share >= least) || n_kept == 0);
            if (!goes_on) break;
            kept_sum = sum;
            ++n_kept;
        }
    }

    const double target = filters.uniform * kept_sum;
    double reached = 0;
    int bucket = 0, n_before = 0;
    for (; n_before + buckets.counts[bucket] < n_kept; ++bucket) {
        const double after = reached + buckets.sums[bucket] / total;
        if (after > target) break;
        reached = after;
        n_before += buckets.counts[bucket];
    }
    const int n_here = ranked_bucket(workspace, n, most, bucket);
    const int n_kept_here = n_here < n_kept - n_before ? n_here : n_kept - n_before;
    for (int i = 0; i < n_kept_here; ++i) {
        reached += workspace.weights[i] / total;
        if (reached > target) return workspace.ranked[i].id;
    }
    return workspace.ranked[n_kept_here - 1].id;
}

// Samples one id from the scaled values; `most` is the largest of them, and finite.
static inline int sampled_id(const SamplerWorkspace& workspace, int n, float most, const Filters& filters) {
    const int token = sample_few(workspace, n, most, filters);
    return token != UNDECIDED ? token : sample_many(workspace, n, most, filters);
}

static inline int chosen_of(
    const View& admission, const SamplerWorkspace& workspace, const float* logits, int n, int slot, long long position, bool numbers
) {
    const float temperature = TABLE_temperature(admission)[slot];
    if (!(temperature > 0)) return first_largest(logits, n, largest_of(logits, n), numbers);
    const float safe_temperature = temperature > 1e-6f ? temperature : 1e-6f;
    divide(logits, n, safe_temperature, workspace.values);
    const float most = largest_of(workspace.values, n);
    if (!numbers || !std::isfinite(most)) return first_largest(workspace.values, n, most, numbers);
    const Filters filters = {
        TABLE_top_k(admission)[slot], TABLE_top_p(admission)[slot], TABLE_min_p(admission)[slot],
        (float)random_24(TABLE_seed(admission)[slot], position) * 0x1p-24f,
    };
    return sampled_id(workspace, n, most, filters);
}

// --- the most likely ids, for requests with top log-probabilities ---

static inline int ranked_top(const float* x, int n, int n_top, Ranked* top) {
    int n_held = 0;
    for (int begin = 0; begin < n; begin += AT_ONCE) {
        const int end = begin + AT_ONCE < n ? begin + AT_ONCE : n;
        const bool whole = end - begin == AT_ONCE && n_held == n_top;
        if (whole && largest(larger_of_block(x + begin)) <= top[n_top - 1].value) continue;
        for (int i = begin; i < end; ++i) {
            if (n_held == n_top && !(x[i] > top[n_top - 1].value)) continue;
            int place = n_held < n_top ? n_held++ : n_top - 1;
            for (; place > 0 && x[i] > top[place - 1].value; --place) top[place] = top[place - 1];
            top[place] = {x[i], i};
        }
    }
    return n_held;
}

// --- the whole: row `row` of a step, or the first token of a slot ---

// `logits` is that row alone, VOCAB floats; ids from n_tokens on are never chosen. For a step, settings are read from the
// table, and the choice is left in row `row` of `chosen` and its companions. `first`: nothing was made yet, settings are
// read from the admissions, and the choice is left in the slot's `first_token` and its companions.
static inline void sample_row(
    const View& view, const float* logits, int row, int slot, bool first, int n_tokens, void* scratch
) {
    const int vocab = VOCAB(view);
    const SamplerWorkspace workspace = workspace_over(scratch, vocab);
    View admission = view;  // an admission has its fields at the places that the table has
    if (first) admission.table = view.admissions;

    const float most = largest_of(logits, vocab);
    const double total = sum_of_exp(logits, vocab, most);
    const double log_total = log_of(total);
    const bool numbers = total == total;
    const float* const ready = shaped(admission, view, logits, workspace.values, n_tokens, slot, first);
    const long long position = (long long)TABLE_position(admission)[slot] + (first ? 0 : 1);
    const int token = chosen_of(admission, workspace, ready, n_tokens, slot, position, numbers);

    const auto logprob_of = [&](int id) { return (float)((double)logits[id] - (double)most - log_total); };
    const int at = first ? slot : row;
    (first ? TABLE_first_token(view) : TABLE_chosen(view))[at] = token;
    (first ? TABLE_first_logprob(view) : TABLE_chosen_logprob(view))[at] = logprob_of(token);
    int n_top = TABLE_n_logprobs(admission)[slot];
    n_top = n_top < MAX_TOP ? n_top : MAX_TOP;
    if (n_top <= 0) return;
    Ranked top[MAX_TOP];
    n_top = ranked_top(logits, vocab, n_top, top);
    int* const ids = (first ? TABLE_first_top_ids(view) : TABLE_top_ids(view)) + at * MAX_TOP;
    float* const logprobs = (first ? TABLE_first_top_logprobs(view) : TABLE_top_logprobs(view)) + at * MAX_TOP;
    for (int i = 0; i < n_top; ++i) {
        ids[i] = top[i].id;
        logprobs[i] = logprob_of(top[i].id);
    }
}
