// What a layer does to a row between products: norms, RoPE, activation functions with and without a gate, and routing to
// experts.
//
// Every function takes one row, and adds in one order. Rows may end inside sixteen lanes: what is beyond counts as 0.
#pragma once

#include <cmath>
#include <cstring>

#include "lanes.h"
#include "scalars.h"

namespace block {

enum Activation { SILU, GELU, GELU_TANH, RELU2 };

// y = x / sqrt(mean(x^2) + eps) * weight; in place where y is x.
static inline void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
    Lanes squares = lanes(0.0f);
    int i = 0;
    for (; i + LANES <= n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    if (i < n) squares = fma(load_some(x + i, n - i), load_some(x + i, n - i), squares);
    const Lanes scale = lanes(1.0f / std::sqrt(sum(squares) / float(n) + eps));
    for (i = 0; i + LANES <= n; i += LANES) store(y + i, mul(mul(load(x + i), scale), load(weight + i)));
    if (i < n) store_some(y + i, mul(mul(load_some(x + i, n - i), scale), load_some(weight + i, n - i)), n - i);
}

// y = (x - mean) / sqrt(variance + eps) * weight + bias; in place where y is x. The mean is taken off before squaring, as
// the twin has it: rows may lie far from 0.
static inline void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps, float* y) {
    const int whole = n / LANES * LANES, rest = n - whole;
    Lanes sums = lanes(0.0f), squares = lanes(0.0f);
    for (int i = 0; i < whole; i += LANES) sums = add(sums, load(x + i));
    if (rest) sums = add(sums, load_some(x + whole, rest));
    const Lanes mean = lanes(sum(sums) / float(n));
    for (int i = 0; i < whole; i += LANES) {
        const Lanes apart = sub(load(x + i), mean);
        squares = fma(apart, apart, squares);
    }
    if (rest) {
        const Lanes apart = keep_first(sub(load_some(x + whole, rest), mean), rest, 0.0f);
        squares = fma(apart, apart, squares);
    }
    const Lanes scale = lanes(1.0f / std::sqrt(sum(squares) / float(n) + eps));
    for (int i = 0; i < whole; i += LANES)
        store(y + i, fma(mul(sub(load(x + i), mean), scale), load(weight + i), load(bias + i)));
    if (rest == 0) return;
    const Lanes normed = mul(sub(load_some(x + whole, rest), mean), scale);
    store_some(y + whole, fma(normed, load_some(weight + whole, rest), load_some(bias + whole, rest)), rest);
}

// The weights of a norm: of a layer norm where there is a bias, else of an RMS norm; no norm where there is no weight.
struct Norm {
    const float *weight, *bias;
};

// y = norm(x), or x where there is none; in place where y is x.
static inline void normed(const Norm& norm, const float* x, int n, float eps, float* y) {
    if (norm.bias) layer_norm(x, norm.weight, norm.bias, n, eps, y);
    else if (norm.weight) rms_norm(x, norm.weight, n, eps, y);
    else if (y != x) memcpy(y, x, n * sizeof(float));
}

static inline void add_to(float* x, const float* more, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, add(load(x + i), load(more + i)));
    for (; i < n; i++) x[i] = x[i] + more[i];
}

static inline void multiply_by(float* x, const float* factors, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, mul(load(x + i), load(factors + i)));
    for (; i < n; i++) x[i] = x[i] * factors[i];
}

// x += share * more, in two roundings as the twin has it.
static inline void add_share(float* x, const float* more, float share, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, add(load(x + i), mul(load(more + i), lanes(share))));
    for (; i < n; i++) x[i] = x[i] + more[i] * share;
}

static inline void scale_by(float* x, float factor, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, mul(load(x + i), lanes(factor)));
    for (; i < n; i++) x[i] = x[i] * factor;
}

// Cosines and sines of a position, [half] each; the angle is a float, as the twin has it.
static inline void cos_sin_of(int position, const float* frequencies, int half, float amplitude, float* cos_sin) {
    for (int i = 0; i < half; i++) {
        const float angle = float(position) * frequencies[i];
        const CosSin of_angle = ::cos_sin(angle);
        cos_sin[i] = of_angle.cosine * amplitude;
        cos_sin[half + i] = of_angle.sine * amplitude;
    }
}

// RoPE: rotates the first 2 * half elements of a head, as pairs (i, i + half) or neighbours (2i, 2i + 1).
static inline void rotate(float* head, const float* cos_sin, int half, bool neighbours) {
    const float *cosines = cos_sin, *sines = cos_sin + half;
    const int step = neighbours ? 2 : 1, apart = neighbours ? 1 : half;
    int i = 0;
    for (; !neighbours && i + LANES <= half; i += LANES) {
        const Lanes a = load(head + i), b = load(head + half + i), c = load(cosines + i), s = load(sines + i);
        store(head + i, sub(mul(a, c), mul(b, s)));
        store(head + half + i, add(mul(b, c), mul(a, s)));
    }
    for (; i < half; i++) {
        const float a = head[step * i], b = head[step * i + apart];
        head[step * i] = a * cosines[i] - b * sines[i];
        head[step * i + apart] = b * cosines[i] + a * sines[i];
    }
}

static inline Lanes activated(Lanes x, int activation) {
    if (activation == RELU2) {
        const Lanes positive = max(lanes(0.0f), x);
        return mul(positive, positive);
    }
    return activation == SILU ? silu(x) : activation == GELU ? gelu_erf(x) : gelu_tanh(x);
}

// x = act(x).
static inline void activate(float* x, int n, int activation) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, activated(load(x + i), activation));
    if (i < n) store_some(x + i, activated(load_some(x + i, n - i), activation), n - i);
}

// gate = act(gate) * up.
static inline void gated(float* gate, const float* up, int n, int activation) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(gate + i, mul(activated(load(gate + i), activation), load(up + i)));
    if (i == n) return;
    store_some(gate + i, mul(activated(load_some(gate + i, n - i), activation), load_some(up + i, n - i)), n - i);
}

// x = act(gate) * x.
static inline void gate_by(float* x, const float* gate, int n, int activation) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, mul(activated(load(gate + i), activation), load(x + i)));
    if (i < n) store_some(x + i, mul(activated(load_some(gate + i, n - i), activation), load_some(x + i, n - i)), n - i);
}

static inline void soft_cap(float* x, float cap, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, mul(tanh(div(load(x + i), lanes(cap))), lanes(cap)));
    if (i < n) store_some(x + i, mul(tanh(div(load_some(x + i, n - i), lanes(cap))), lanes(cap)), n - i);
}

// Scores of all experts to the n_used likeliest and their shares; `scores` is used up. Of equals the lower id is first.
static inline void route(float* scores, int n, int n_used, bool renormalise, int* chosen, float* shares) {
    float top = scores[0];
    for (int e = 1; e < n; e++) top = scores[e] > top ? scores[e] : top;
    Lanes sums = lanes(0.0f);
    for (int e = 0; e < n; e += LANES) {
        const Lanes weight = keep_first(exp(sub(load_some(scores + e, n - e), lanes(top))), n - e, 0.0f);
        store_some(scores + e, weight, n - e);
        sums = add(sums, weight);
    }
    const float total = sum(sums);
    float kept = 0;
    for (int k = 0; k < n_used; k++) {
        int best = 0;
        for (int e = 1; e < n; e++) best = scores[e] > scores[best] ? e : best;
        chosen[k] = best;
        shares[k] = scores[best] / total;
        kept = kept + shares[k];
        scores[best] = -1.0f;
    }
    for (int k = 0; renormalise && k < n_used; k++) shares[k] = shares[k] / kept;
}

}  // namespace block
