// What recurrent blocks do between products: a causal convolution, the scans of mamba and mamba2, the gated delta rule.
//
// Every function takes consecutive rows of one sequence and the state before the first of them, and leaves the state
// after the last. Rows are taken one after the other, so the bits are the same however a sequence is cut. Lanes lie along
// channels: a state is kept with its channels last, and nothing is summed over lanes.
#pragma once

#include <cmath>
#include <cstring>

#include "lanes.h"

namespace mixer {

// The first n of sixteen lanes, n from 1 on: all where n is larger.
static inline Lanes load_up_to(const float* p, int n) { return n >= LANES ? load(p) : load_some(p, n); }
static inline void store_up_to(float* p, Lanes x, int n) {
    if (n >= LANES) store(p, x);
    else store_some(p, x, n);
}

// Rows of one sequence in a buffer with a stride, `first` the first of them.
struct Rows {
    float* first;
    long stride;
    int n;
    float* at(int row) const { return first + row * stride; }
};

// The input i rows before the first row of a run, i from 1: what the state has of it, [kernel - 1][channels].
static inline const float* before(const float* state, int kernel, int channels, int i) {
    return state + size_t(kernel - 1 - i) * channels;
}

// y = bias + weight[0] x[row - k + 1] + ... + weight[k - 1] x[row] of channels [from, to) of one row of a run, or silu of
// it; weight is [kernel][channels]. Inputs before the first row come from the state, or are 0 where there is none.
static inline void convolve(
    const Rows& x, int row, const float* state, const float* weight, const float* bias, int kernel, int channels, int from,
    int to, bool activated, float* y
) {
    for (int c = from; c < to; c += LANES) {
        const int n = to - c;
        Lanes sum = bias ? load_up_to(bias + c, n) : lanes(0.0f);
        for (int tap = 0; tap < kernel; tap++) {
            const int at = row - (kernel - 1) + tap;
            if (at < 0 && !state) continue;
            const float* input = at < 0 ? before(state, kernel, channels, -at) : x.at(at);
            sum = fma(load_up_to(input + c, n), load_up_to(weight + size_t(tap) * channels + c, n), sum);
        }
        store_up_to(y + c, activated ? silu(sum) : sum, n);
    }
}

// The last kernel - 1 inputs become the state; `fresh`: there were none before the run.
static inline void keep_inputs(const Rows& x, float* state, bool fresh, int kernel, int channels) {
    for (int i = kernel - 1; i > 0; i--) {  // the oldest first: it may be a younger one of the old state
        float* to = const_cast<float*>(before(state, kernel, channels, i));
        const int row = x.n - i;
        if (row >= 0) memcpy(to, x.at(row), channels * sizeof(float));
        else if (fresh) memset(to, 0, channels * sizeof(float));
        else memmove(to, before(state, kernel, channels, -row), channels * sizeof(float));
    }
}

// step = softplus(step + bias) within limits, and fade = exp(step * a) where there is one a for each step.
static inline void steps_of(
    float* step, const float* bias, const float* a, int n, float least, float most, float* fade
) {
    for (int c = 0; c < n; c += LANES) {
        Lanes s = softplus(add(load_up_to(step + c, n - c), load_up_to(bias + c, n - c)));
        s = min(lanes(most), max(lanes(least), s));
        store_up_to(step + c, s, n - c);
        if (fade) store_up_to(fade + c, exp(mul(s, load_up_to(a + c, n - c))), n - c);
    }
}

// Sixteens of a head's width that go together: enough sums that one need not wait for another, and no more than the
// registers hold.
#if LANES_AVX512
constexpr int SCANNED = 4, DELTA_SCANNED = 8;
#else
constexpr int SCANNED = 2, DELTA_SCANNED = 2;
#endif

// BLOCKS sixteens from a lane on; WHOLE: all their lanes are there, else those before the end of a head's width.
template <bool WHOLE>
struct Head {
    int width, at;
    Lanes get(const float* p, int block) const {
        p += at + block * LANES;
        return WHOLE ? load(p) : load_up_to(p, width - at - block * LANES);
    }
    void put(float* p, Lanes x, int block) const {
        p += at + block * LANES;
        if (WHOLE) store(p, x);
        else store_up_to(p, x, width - at - block * LANES);
    }
};

// mamba2, BLOCKS sixteens of one head: S[i] = fade[i] S[i-1] + step[i] x[i] b[i]^T; x[i] becomes S[i] c[i] + d x[i]. S is
// [state][width]; step and fade have a number for each row.
template <int BLOCKS, bool WHOLE>
static inline void scan_lanes(
    const Rows& x, const Rows& step, const Rows& fade, const Rows& b, const Rows& c, float d, float* s, int n_state,
    Head<WHOLE> head
) {
    Lanes drive[BLOCKS], y[BLOCKS];
    for (int row = 0; row < x.n; row++) {
        float* in = x.at(row);
        const float *of_b = b.at(row), *of_c = c.at(row);
        const Lanes stepping = lanes(*step.at(row)), fading = lanes(*fade.at(row));
#pragma GCC unroll 8
        for (int k = 0; k < BLOCKS; k++) {
            drive[k] = mul(stepping, head.get(in, k));
            y[k] = lanes(0.0f);
        }
        for (int n = 0; n < n_state; n++) {
            float* row_of_s = s + size_t(n) * head.width;
            const Lanes into = lanes(of_b[n]), out = lanes(of_c[n]);
#pragma GCC unroll 8
            for (int k = 0; k < BLOCKS; k++) {
                const Lanes now = fma(drive[k], into, mul(fading, head.get(row_of_s, k)));
                head.put(row_of_s, now, k);
                y[k] = fma(now, out, y[k]);
            }
        }
#pragma GCC unroll 8
        for (int k = 0; k < BLOCKS; k++) head.put(in, fma(head.get(in, k), lanes(d), y[k]), k);
    }
}

static inline void scan_head(
    const Rows& x, const Rows& step, const Rows& fade, const Rows& b, const Rows& c, float d, float* s, int n_state,
    int width
) {
    int at = 0;
    for (; at + SCANNED * LANES <= width; at += SCANNED * LANES)
        scan_lanes<SCANNED>(x, step, fade, b, c, d, s, n_state, Head<true>{width, at});
    for (; at + 2 * LANES <= width; at += 2 * LANES)
        scan_lanes<2>(x, step, fade, b, c, d, s, n_state, Head<true>{width, at});
    for (; at < width; at += LANES) scan_lanes<1>(x, step, fade, b, c, d, s, n_state, Head<false>{width, at});
}

// mamba, channels [from, to): s[i] = exp(step[i] a) s[i-1] + step[i] x[i] b[i]; x[i] becomes c[i] . s[i] + d x[i]. s and
// a are [state][channels].
static inline void scan_channels(
    const Rows& x, const Rows& step, const Rows& b, const Rows& c, const float* a, const float* d, float* s, int n_state,
    int channels, int from, int to
) {
    for (int at = from; at < to; at += LANES) {
        const int left = to - at;
        for (int row = 0; row < x.n; row++) {
            const float *of_b = b.at(row), *of_c = c.at(row);
            const Lanes wide = load_up_to(x.at(row) + at, left), stepping = load_up_to(step.at(row) + at, left);
            const Lanes drive = mul(stepping, wide);
            Lanes y = lanes(0.0f);
            for (int n = 0; n < n_state; n++) {
                float* of_s = s + size_t(n) * channels + at;
                const Lanes fading = exp(mul(stepping, load_up_to(a + size_t(n) * channels + at, left)));
                const Lanes now = fma(drive, lanes(of_b[n]), mul(fading, load_up_to(of_s, left)));
                store_up_to(of_s, now, left);
                y = fma(now, lanes(of_c[n]), y);
            }
            store_up_to(x.at(row) + at, fma(wide, load_up_to(d + at, left), y), left);
        }
    }
}

// x with length `wanted`. A squared length has this beside it, as in `delta_rule.py`.
constexpr float LENGTH_EPS = 1e-6f;
static inline void set_length(float* x, int n, float wanted) {
    Lanes squares = lanes(0.0f);
    for (int i = 0; i < n; i += LANES) {
        const Lanes some = load_up_to(x + i, n - i);
        squares = fma(some, some, squares);
    }
    const Lanes scale = lanes(wanted / std::sqrt(sum(squares) + LENGTH_EPS));
    for (int i = 0; i < n; i += LANES) store_up_to(x + i, mul(load_up_to(x + i, n - i), scale), n - i);
}

// The gated delta rule, BLOCKS sixteens of one value head: S' = fade[i] S[i-1]; S[i] = S' + share[i] (v[i] - S' k[i])
// k[i]^T; v[i] becomes S[i] q[i]. S is [key_width][value_width]; share and fade have a number for each row. A row's pass
// over S also takes what S then has under the next row's key, so that S is read and written once a row.
template <int BLOCKS, bool WHOLE>
static inline void delta_lanes(
    const Rows& v, const Rows& share, const Rows& fade, const Rows& q, const Rows& k, float* s, int key_width,
    Head<WHOLE> head
) {
    Lanes known[BLOCKS], y[BLOCKS], change[BLOCKS];
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) known[b] = lanes(0.0f);
    for (int n = 0; n < key_width; n++) {
        const float* row_of_s = s + size_t(n) * head.width;
        const Lanes key = lanes(k.at(0)[n]);
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++) known[b] = fma(head.get(row_of_s, b), key, known[b]);
    }
    for (int row = 0; row < v.n; row++) {
        float* in = v.at(row);
        const float *of_q = q.at(row), *of_k = k.at(row), *of_next = row + 1 < v.n ? k.at(row + 1) : of_k;
        const Lanes fading = lanes(*fade.at(row)), sharing = lanes(*share.at(row));
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++) {
            change[b] = mul(sharing, sub(head.get(in, b), mul(fading, known[b])));
            known[b] = y[b] = lanes(0.0f);
        }
        for (int n = 0; n < key_width; n++) {
            float* row_of_s = s + size_t(n) * head.width;
            const Lanes key = lanes(of_k[n]), query = lanes(of_q[n]), next = lanes(of_next[n]);
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; b++) {
                const Lanes now = fma(change[b], key, mul(fading, head.get(row_of_s, b)));
                head.put(row_of_s, now, b);
                y[b] = fma(now, query, y[b]);
                known[b] = fma(now, next, known[b]);
            }
        }
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++) head.put(in, y[b], b);
    }
}

static inline void delta_head(
    const Rows& v, const Rows& share, const Rows& fade, const Rows& q, const Rows& k, float* s, int key_width, int width
) {
    int at = 0;
    for (; at + DELTA_SCANNED * LANES <= width; at += DELTA_SCANNED * LANES)
        delta_lanes<DELTA_SCANNED>(v, share, fade, q, k, s, key_width, Head<true>{width, at});
    for (; at + 2 * LANES <= width; at += 2 * LANES)
        delta_lanes<2>(v, share, fade, q, k, s, key_width, Head<true>{width, at});
    for (; at < width; at += LANES) delta_lanes<1>(v, share, fade, q, k, s, key_width, Head<false>{width, at});
}

}  // namespace mixer
