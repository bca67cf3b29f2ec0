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

enum Activation { SILU, GELU, GELU_TANH, RELU2, CLAMPED_SWIGLU, SIGMOID, SOFTPLUS };  // the last two of gates alone
constexpr float SWIGLU_ALPHA = 1.702f, SWIGLU_LIMIT = 7.0f;

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
    float eps;
};

// y = norm(x), or x where there is none; in place where y is x.
static inline void normed(const Norm& norm, const float* x, int n, float* y) {
    if (norm.bias) layer_norm(x, norm.weight, norm.bias, n, norm.eps, y);
    else if (norm.weight) rms_norm(x, norm.weight, n, norm.eps, y);
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
    if (activation == CLAMPED_SWIGLU) {
        const Lanes bounded = min(lanes(SWIGLU_LIMIT), x);
        return mul(bounded, sigmoid(mul(lanes(SWIGLU_ALPHA), bounded)));
    }
    if (activation == SIGMOID) return sigmoid(x);
    if (activation == SOFTPLUS) return softplus(x);
    return activation == SILU ? silu(x) : activation == GELU ? gelu_erf(x) : gelu_tanh(x);
}

// x = act(x).
static inline void activate(float* x, int n, int activation) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, activated(load(x + i), activation));
    if (i < n) store_some(x + i, activated(load_some(x + i, n - i), activation), n - i);
}

// What an activated gate is multiplied by.
static inline Lanes beside_gate(Lanes up, int activation) {
    if (activation != CLAMPED_SWIGLU) return up;
    return add(max(lanes(-SWIGLU_LIMIT), min(lanes(SWIGLU_LIMIT), up)), lanes(1.0f));
}

// gate = act(gate) * up.
static inline void gated(float* gate, const float* up, int n, int activation) {
    int i = 0;
    const auto both = [activation](Lanes g, Lanes u) { return mul(activated(g, activation), beside_gate(u, activation)); };
    for (; i + LANES <= n; i += LANES) store(gate + i, both(load(gate + i), load(up + i)));
    if (i == n) return;
    store_some(gate + i, both(load_some(gate + i, n - i), load_some(up + i, n - i)), n - i);
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

// How a row's experts are chosen; `models/shape.py` says what the words mean.
struct Router {
    int n_experts, n_scores, n_used, sigmoid, by_score, renormalise, n_groups, groups_used, n_best;
    float share_scale, sum_epsilon, least_sum;
};

constexpr float LEAST_CHOICE = -3e38f;

// The largest of n, the first among equals; what must not be taken is -infinity, and all else is above that.
static inline int first_largest(const float* x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) best = x[i] > x[best] ? i : best;
    return best;
}

// Scores of all experts become their probabilities, in place.
static inline void probabilities(float* scores, const Router& r) {
    const int n = r.n_experts;
    float top = scores[0];
    for (int e = 1; e < n; e++) top = scores[e] > top ? scores[e] : top;
    Lanes sums = lanes(0.0f);
    for (int e = 0; e < n; e += LANES) {
        const Lanes x = load_some(scores + e, n - e);
        const Lanes likely = r.sigmoid ? sigmoid(x) : keep_first(exp(sub(x, lanes(top))), n - e, 0.0f);
        store_some(scores + e, likely, n - e);
        sums = add(sums, likely);
    }
    if (r.sigmoid) return;
    const float total = sum(sums);
    for (int e = 0; e < n; e++) scores[e] = scores[e] / total;
}

// -infinity outside of the groups whose n_best highest together are highest.
static inline void keep_best_groups(float* choice, const Router& r, float* strength) {
    const int size = r.n_experts / r.n_groups;
    for (int g = 0; g < r.n_groups; g++) {
        const float* of = choice + g * size;
        const int best = first_largest(of, size);
        strength[g] = of[best];
        if (r.n_best < 2) continue;
        int next = best == 0 ? 1 : 0;
        for (int i = next + 1; i < size; i++) next = i != best && of[i] > of[next] ? i : next;
        strength[g] = strength[g] + of[next];
    }
    for (int k = 0; k < r.groups_used; k++) strength[first_largest(strength, r.n_groups)] = -INFINITY;
    for (int g = 0; g < r.n_groups; g++)
        for (int i = 0; i < size && strength[g] != -INFINITY; i++) choice[g * size + i] = -INFINITY;
}

// A row's scores to its experts and their shares; `scores` is used up, `choice` has room for two numbers of each expert.
// Of equals the lower id is chosen. Scores that are no numbers still choose n_used different experts.
static inline void route(
    float* scores, const float* bias, const float* scales, const Router& r, float* choice, int* chosen, float* shares
) {
    if (r.by_score) memcpy(choice, scores, r.n_experts * sizeof(float));
    probabilities(scores, r);
    for (int e = 0; e < r.n_experts; e++) {
        const float by = r.by_score ? choice[e] : bias ? scores[e] + bias[e] : scores[e];
        choice[e] = by > LEAST_CHOICE ? by : LEAST_CHOICE;
    }
    if (r.n_groups > 1) keep_best_groups(choice, r, choice + r.n_experts);
    float kept = 0;
    for (int k = 0; k < r.n_used; k++) {
        const int best = first_largest(choice, r.n_experts);
        chosen[k] = best;
        shares[k] = scores[best];
        kept = kept + shares[k];
        choice[best] = -INFINITY;
    }
    kept = kept + r.sum_epsilon;
    if (r.renormalise) kept = kept > r.least_sum ? kept : r.least_sum;
    for (int k = 0; k < r.n_used; k++) {
        shares[k] = (r.renormalise ? shares[k] / kept : shares[k]) * r.share_scale;
        if (scales) shares[k] = shares[k] * scales[chosen[k]];
    }
}

}  // namespace block
