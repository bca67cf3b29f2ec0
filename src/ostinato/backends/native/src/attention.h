// Attention over pages of keys and values: softmax(scale * q k^T, masked) v, heads in groups that share a key head.
//
// A page is 16 positions. Keys of a page and head lie [width][16], positions side by side, so that a score is a sum of
// products lane by lane and nothing is reduced across lanes; values lie [16][width]. The past is walked in blocks of
// 256 positions that begin at multiples of it. Each block gives a largest score, a sum of weights and a mix of values,
// and blocks are joined in order: so a row's bits do not depend on the other rows, on where a prompt was cut, or on
// which thread had which block. Bound by reading keys and values in a decode step, and by products in a chunk of a prompt.
#pragma once

#include <cstddef>

#include "lanes.h"

namespace attention {

enum Kept { KEPT_F32, KEPT_F16, KEPT_BF16, KEPT_Q8_0 };

constexpr int PAGE = LANES, BLOCK = 256, Q8_BLOCK = 32;
constexpr float MASKED = -1e30f;
// Queries and pages per call. Each pair has a register of scores, enough independent sums to hide the latency of an
// addition. While mixing, a query has a row of four registers.
#if LANES_AVX512
constexpr int MOST_QUERIES = 8;
#else
constexpr int MOST_QUERIES = 4;
#endif
constexpr int SCORED_PAGES = 2;

// Keys and values of one layer; without values, a key's last numbers are its value. Scales where they are Q8_0, float16: keys' [width / 32][16], values' [16][width / 32].
struct Cache {
    unsigned char *keys, *values;
    unsigned short *key_scales, *value_scales;
};

struct Heads {
    int kept;  // a Kept
    int n_kv, group, width, value_width;  // values that are kept are as wide as keys
    float softcap;  // 0: none

    size_t page_items() const { return size_t(n_kv) * PAGE * width; }
};

constexpr size_t kept_bytes(int kept) { return kept == KEPT_F32 ? 4 : kept == KEPT_Q8_0 ? 1 : 2; }

// The keys and values of one key head of one sequence.
struct Past {
    Heads heads;
    Cache cache;
    const int* pages;
    int kv;

    size_t item(int page) const { return page * heads.page_items() + size_t(kv) * PAGE * heads.width; }
};

// What one query (a head of a row) sees of one block, or of all blocks so far.
struct SoftmaxState {
    float top, sum;
    float* mixed;  // [value_width]
};

struct Query {
    const float* q;     // [width], scaled
    int first, last;    // the positions it sees: [first, last)
    const float* sink;  // one more score in its softmax, which stands for no value; null: none
};

// --- one page of a head, widened as it is read ---

template <int KEPT>
static inline Lanes kept_lanes(const unsigned char* base, size_t item) {
    if (KEPT == KEPT_F32) return load(reinterpret_cast<const float*>(base) + item);
    if (KEPT == KEPT_F16) return from_f16(base + 2 * item);
    if (KEPT == KEPT_BF16) return from_bf16(base + 2 * item);
    return to_float(from_int8(base + item));
}

struct PageOfHead {
    const unsigned char *keys, *values;
    const unsigned short *key_scales, *value_scales;
};

template <int KEPT>
static inline PageOfHead page_of(const Past& past, int page) {
    const size_t item = past.item(page);
    const Cache& cache = past.cache;
    PageOfHead at{cache.keys + item * kept_bytes(KEPT), cache.values + item * kept_bytes(KEPT), nullptr, nullptr};
    if (KEPT == KEPT_Q8_0) {
        at.key_scales = cache.key_scales + item / Q8_BLOCK;
        at.value_scales = cache.value_scales + item / Q8_BLOCK;
    }
    return at;
}

constexpr int PAGES_AHEAD = 8;  // between the prefetch of a page's keys or values and their use

// The pages that are read first after a block: the keys of the next block, or of the next sequence.
struct NextPages {
    const unsigned char* at[PAGES_AHEAD];
    int n = 0;
};

static inline NextPages first_keys(const Past& past, int first, int last) {
    NextPages next;
    for (int p = first / PAGE; p * PAGE < last && next.n < PAGES_AHEAD; p++)
        next.at[next.n++] = past.cache.keys + past.item(past.pages[p]) * kept_bytes(past.heads.kept);
    return next;
}

static inline void prefetch_pages(const NextPages& next, const Heads& heads) {
    for (int p = 0; p < next.n; p++)
        for (size_t i = 0; i < PAGE * heads.width * kept_bytes(heads.kept); i += 64) prefetch(next.at[p] + i);
}

// --- scores: Q queries against P pages, [q][16 p]; the pages `next` are prefetched meanwhile ---

template <int KEPT, int Q, int P>
static inline void score_pages(
    int width, const PageOfHead* pages, const Query* queries, float* scores, const unsigned char* const* next
) {
    Lanes sums[P][Q];
    for (int p = 0; p < P; p++)
        for (int i = 0; i < Q; i++) sums[p][i] = lanes(0.0f);
    for (int c = 0; c < width; c++) {
        Lanes keys[P];
        for (int p = 0; p < P; p++) {
            keys[p] = kept_lanes<KEPT>(pages[p].keys, size_t(c) * PAGE);
            prefetch(next[p] + c * PAGE * kept_bytes(KEPT));
            if (KEPT == KEPT_Q8_0) keys[p] = mul(keys[p], from_f16(pages[p].key_scales + c / Q8_BLOCK * PAGE));
        }
        for (int i = 0; i < Q; i++) {
            const Lanes q = lanes(queries[i].q[c]);
            for (int p = 0; p < P; p++) sums[p][i] = fma(keys[p], q, sums[p][i]);
        }
    }
    for (int p = 0; p < P; p++)
        for (int i = 0; i < Q; i++) store(scores + i * BLOCK + p * PAGE, sums[p][i]);
}

// --- weights: from scores to e^(score - largest), 0 where the mask hides a position from a query ---

static inline void to_weights(float* scores, int begin, int end, int first, int last, float softcap, SoftmaxState& partial) {
    if (softcap > 0)
        for (int p = begin; p < end; p += LANES)
            store(scores + p, mul(tanh(div(load(scores + p), lanes(softcap))), lanes(softcap)));
    for (int p = begin; p < first; p++) scores[p] = MASKED;
    for (int p = last; p < end; p++) scores[p] = MASKED;
    Lanes tops = lanes(MASKED), sums = lanes(0.0f);
    for (int p = begin; p < end; p += LANES) tops = max(tops, load(scores + p));
    partial.top = largest(tops);
    const Lanes top = lanes(partial.top);
    for (int p = begin; p < end; p += LANES) store(scores + p, exp(sub(load(scores + p), top)));
    for (int p = begin; p < first; p++) scores[p] = 0.0f;
    for (int p = last; p < end; p++) scores[p] = 0.0f;
    for (int p = begin; p < end; p += LANES) sums = add(sums, load(scores + p));
    partial.sum = sum(sums);
}

// --- values: mixed[i] = sum of weight * value over positions [begin, end) of the block, V registers at a time; while
// a page is mixed, its page of `next` is prefetched ---

template <int KEPT, int Q, int V>
static inline void mix(
    int width, const PageOfHead* pages, const unsigned char* const* next, int begin, int end, const float* weights,
    int column, SoftmaxState* partials
) {
    Lanes sums[Q][V];
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) sums[i][v] = lanes(0.0f);
    for (int p = begin; p < end; p++) {
        const PageOfHead& page = pages[p / PAGE];
        const size_t item = size_t(p % PAGE) * width + column;
        Lanes values[V];
        for (int v = 0; v < V; v++) {
            prefetch(next[p / PAGE] + (item + v * LANES) * kept_bytes(KEPT));
            values[v] = kept_lanes<KEPT>(page.values, item + v * LANES);
            if (KEPT == KEPT_Q8_0)
                values[v] = mul(values[v], lanes(f16_to_float(page.value_scales[(item + v * LANES) / Q8_BLOCK])));
        }
        for (int i = 0; i < Q; i++) {
            const Lanes weight = lanes(weights[i * BLOCK + p]);
            for (int v = 0; v < V; v++) sums[i][v] = fma(weight, values[v], sums[i][v]);
        }
    }
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) store(partials[i].mixed + column + v * LANES, sums[i][v]);
}

// The same over keys whose numbers from `first` on are values: a key's numbers lie 16 positions side by side, so each
// lane sums over its own position of every page, and the lanes of a number are added up in the end.
template <int KEPT, int Q>
static inline void mix_keys(
    int first, int n, const PageOfHead* pages, int begin, int end, const float* weights, SoftmaxState* partials
) {
    for (int c = 0; c < n; c++) {
        Lanes sums[Q];
        for (int i = 0; i < Q; i++) sums[i] = lanes(0.0f);
        for (int p = begin; p < end; p++) {
            Lanes values = kept_lanes<KEPT>(pages[p].keys, size_t(first + c) * PAGE);
            if (KEPT == KEPT_Q8_0) values = mul(values, from_f16(pages[p].key_scales + (first + c) / Q8_BLOCK * PAGE));
            for (int i = 0; i < Q; i++) {
                const Lanes weight = load(weights + i * BLOCK + p * PAGE);
                // Where the mask hides a position, its cell may hold anything.
                sums[i] = fma(weight, where_less(lanes(0.0f), weight, values, lanes(0.0f)), sums[i]);
            }
        }
        for (int i = 0; i < Q; i++) partials[i].mixed[c] = sum(sums[i]);
    }
}

template <int KEPT, int Q>
static inline void mix_all(
    int width, const PageOfHead* pages, const unsigned char* const* next, int begin, int end, const float* weights,
    SoftmaxState* partials
) {
    int column = 0;
    for (; column + 4 * LANES <= width; column += 4 * LANES)
        mix<KEPT, Q, 4>(width, pages, next, begin, end, weights, column, partials);
    for (; column < width; column += LANES) mix<KEPT, Q, 1>(width, pages, next, begin, end, weights, column, partials);
}

// --- a block: Q queries, all of one key head, over what they see of positions [256 block, 256 block + 256) ---

template <int KEPT, int Q>
__attribute__((noinline)) static void attend_queries(
    const Past& past, int block, const Query* queries, SoftmaxState* partials, const NextPages& next
) {
    alignas(64) float scores[Q * BLOCK + PAGE];
    const int base = block * BLOCK, width = past.heads.width;
    int first = BLOCK, last = 0;
    for (int i = 0; i < Q; i++) {
        const int from = queries[i].first - base, to = queries[i].last - base;
        first = from < first ? (from < 0 ? 0 : from) : first;
        last = to > last ? (to > BLOCK ? BLOCK : to) : last;
    }
    if (first >= last) return;  // other rows of the chunk attend to this block, these do not
    const int begin = first / PAGE, end = (last + PAGE - 1) / PAGE;
    PageOfHead at[BLOCK / PAGE + 1];
    for (int p = begin; p < end; p++) at[p] = page_of<KEPT>(past, past.pages[base / PAGE + p]);
    // In the order of their use: keys, values, the next pages. Behind them comes what is in the cache already.
    const unsigned char* order[2 * (BLOCK / PAGE) + 2 * PAGES_AHEAD + 1];
    int n_order = 0;
    for (int p = begin; p < end; p++) order[n_order++] = at[p].keys;
    const bool in_keys = past.cache.values == nullptr;
    for (int p = begin; p < end; p++) order[n_order++] = in_keys ? at[p].keys : at[p].values;
    for (int p = 0; p < next.n; p++) order[n_order++] = next.at[p];
    for (int p = next.n; p <= PAGES_AHEAD; p++) order[n_order++] = at[begin].keys;
    constexpr int P = SCORED_PAGES;
    // If the number of pages is odd, the last is scored twice: the copy's scores go where they are not read.
    at[end] = at[end - 1];
    const unsigned char* const* ahead = order + PAGES_AHEAD - begin;
    for (int p = begin; p < end; p += P) score_pages<KEPT, Q, P>(width, at + p, queries, scores + p * PAGE, ahead + p);
    for (int i = 0; i < Q; i++) {
        int from = queries[i].first - base, to = queries[i].last - base;
        from = from < begin * PAGE ? begin * PAGE : from > end * PAGE ? end * PAGE : from;
        to = to < from ? from : to > end * PAGE ? end * PAGE : to;
        to_weights(scores + i * BLOCK, begin * PAGE, end * PAGE, from, to, past.heads.softcap, partials[i]);
    }
    if (in_keys) {
        const int n = past.heads.value_width;
        return mix_keys<KEPT, Q>(width - n, n, at, begin, end, scores, partials);
    }
    constexpr int R = Q > 4 ? 4 : Q;  // rows of four registers
    ahead += end - begin;
    mix_all<KEPT, R>(width, at, ahead, first, last, scores, partials);
    if constexpr (Q > R) mix_all<KEPT, Q - R>(width, at, ahead, first, last, scores + R * BLOCK, partials + R);
}

// Up to MOST_QUERIES queries: as many at once as there are bodies for.
template <int KEPT>
static void attend_any(
    const Past& past, int block, const Query* queries, int n, SoftmaxState* partials, const NextPages& next
) {
#if LANES_AVX512
    if (n == 8) return attend_queries<KEPT, 8>(past, block, queries, partials, next);
#endif
    for (; n >= 4; n -= 4, queries += 4, partials += 4) attend_queries<KEPT, 4>(past, block, queries, partials, next);
    if (n == 3) attend_queries<KEPT, 3>(past, block, queries, partials, next);
    if (n == 2) attend_queries<KEPT, 2>(past, block, queries, partials, next);
    if (n == 1) attend_queries<KEPT, 1>(past, block, queries, partials, next);
}

constexpr void (*ATTEND[])(const Past&, int, const Query*, int, SoftmaxState*, const NextPages&) = {
    attend_any<KEPT_F32>, attend_any<KEPT_F16>, attend_any<KEPT_BF16>, attend_any<KEPT_Q8_0>,
};
static inline void attend_typed(
    const Past& past, int block, const Query* queries, int n, SoftmaxState* partials, const NextPages& next
) {
    ATTEND[past.heads.kept](past, block, queries, n, partials, next);
}

// --- blocks joined in order ---

static inline bool sees(const Query& query, int block) {
    return query.first < (block + 1) * BLOCK && query.last > block * BLOCK;
}

// What was seen so far and one block more. Not to be called for a block of which the query sees nothing.
static inline void join(SoftmaxState& all, const SoftmaxState& block, int width, bool is_first) {
    if (is_first) {
        all.top = block.top;
        all.sum = block.sum;
        for (int c = 0; c < width; c += LANES) store(all.mixed + c, load(block.mixed + c));
        return;
    }
    const float top = all.top > block.top ? all.top : block.top;
    float both[LANES] = {all.top - top, block.top - top};
    store(both, exp(load(both)));
    const Lanes rescale = lanes(both[0]), gain = lanes(both[1]);
    all.sum = all.sum * both[0] + block.sum * both[1];
    all.top = top;
    for (int c = 0; c < width; c += LANES)
        store(all.mixed + c, fma(load(block.mixed + c), gain, mul(load(all.mixed + c), rescale)));
}

static inline void finish(const SoftmaxState& all, int width, const float* sink, float* out) {
    float weight = 1.0f, sum = all.sum;
    if (sink) {
        const float top = all.top > *sink ? all.top : *sink;
        float both[LANES] = {all.top - top, *sink - top};
        store(both, exp(load(both)));
        weight = both[0];
        sum = all.sum * both[0] + both[1];
    }
    const Lanes share = lanes(weight / sum);
    for (int c = 0; c < width; c += LANES) store(out + c, mul(load(all.mixed + c), share));
}

// The whole past of up to MOST_QUERIES queries of one key head; `scratch` has 2 * MOST_QUERIES * width floats.
static inline void attend(
    const Past& past, const Query* queries, int n, float* const* out, float* scratch, const NextPages& next
) {
    SoftmaxState all[MOST_QUERIES], part[MOST_QUERIES];
    const int width = past.heads.value_width;
    int begin = queries[0].first, end = queries[0].last;
    bool attended[MOST_QUERIES] = {};
    for (int i = 0; i < n; i++) {
        all[i].mixed = scratch + i * width;
        part[i].mixed = scratch + (MOST_QUERIES + i) * width;
        begin = queries[i].first < begin ? queries[i].first : begin;
        end = queries[i].last > end ? queries[i].last : end;
    }
    for (int block = begin / BLOCK; block * BLOCK < end; block++) {
        const int block_end = (block + 1) * BLOCK;
        attend_typed(past, block, queries, n, part, block_end < end ? first_keys(past, block_end, end) : next);
        for (int i = 0; i < n; i++) {
            if (!sees(queries[i], block)) continue;
            join(all[i], part[i], width, !attended[i]);
            attended[i] = true;
        }
    }
    for (int i = 0; i < n; i++) finish(all[i], width, queries[i].sink, out[i]);
}

// --- a new position's keys and values into its page ---

static inline void append_q8_0(const float* x, signed char* quants, size_t stride, unsigned short* scale) {
    Lanes tops = max(abs(load(x)), abs(load(x + LANES)));
    *scale = float_to_f16(largest(tops) / 127.0f);
    const float wide = f16_to_float(*scale), divisor = wide > 0 ? wide : 1.0f;
    for (int half = 0; half < Q8_BLOCK; half += LANES) {
        signed char bytes[LANES];
        Lanes scaled = div(load(x + half), lanes(divisor));
        store_int8(bytes, to_nearest(max(lanes(-127.0f), min(lanes(127.0f), scaled))));
        for (int i = 0; i < LANES; i++) quants[(half + i) * stride] = bytes[i];
    }
}

static inline void append(const Past& past, int position, const float* key, const float* value) {
    const Cache& cache = past.cache;
    const int width = past.heads.width, cell = position % PAGE;
    const size_t item = past.item(past.pages[position / PAGE]);
    const size_t key_at = item + cell, value_at = item + size_t(cell) * width;
    switch (past.heads.kept) {
        case KEPT_F32: {
            float *keys = reinterpret_cast<float*>(cache.keys), *values = reinterpret_cast<float*>(cache.values);
            for (int c = 0; c < width; c++) keys[key_at + size_t(c) * PAGE] = key[c];
            for (int c = 0; values && c < width; c++) values[value_at + c] = value[c];
            return;
        }
        case KEPT_F16:
        case KEPT_BF16: {
            auto* keys = reinterpret_cast<unsigned short*>(cache.keys);
            auto* values = reinterpret_cast<unsigned short*>(cache.values);
            void (*narrow)(void*, Lanes) = past.heads.kept == KEPT_F16 ? to_f16 : to_bf16;
            for (int c = 0; c < width; c += LANES) {
                unsigned short halves[LANES];
                narrow(halves, load(key + c));
                if (values) narrow(values + value_at + c, load(value + c));
                for (int i = 0; i < LANES; i++) keys[key_at + size_t(c + i) * PAGE] = halves[i];
            }
            return;
        }
        case KEPT_Q8_0: {
            auto* keys = reinterpret_cast<signed char*>(cache.keys);
            auto* values = reinterpret_cast<signed char*>(cache.values);
            unsigned short* key_scales = cache.key_scales + item / Q8_BLOCK + cell;
            unsigned short* value_scales = cache.value_scales + item / Q8_BLOCK + size_t(cell) * (width / Q8_BLOCK);
            for (int c = 0; c < width; c += Q8_BLOCK) {
                append_q8_0(key + c, keys + key_at + size_t(c) * PAGE, PAGE, key_scales + c / Q8_BLOCK * PAGE);
                if (values) append_q8_0(value + c, values + value_at + c, 1, value_scales + c / Q8_BLOCK);
            }
        }
    }
}

}  // namespace attention
