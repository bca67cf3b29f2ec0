// Sixteen floats side by side, and sixteen ints: what all arithmetic of the CPU loop is written over.
//
// One type with four bodies, chosen by the compiler's target: AVX-512 (one register), AVX2 (two), NEON (four) and plain
// C++ (an array). Each operation is the same IEEE operation lane by lane in all of them, multiplications and additions
// are joined only where `fma` says so (compile with -ffp-contract=off), sums over lanes go through one tree, and exp,
// tanh and erf are polynomials over these operations. So all bodies give the same bits.
#ifndef OSTINATO_LANES_H
#define OSTINATO_LANES_H

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define LANES_AVX512 1
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC's own header leaves registers undefined, on purpose
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON) && !defined(OSTINATO_PLAIN)
#define LANES_NEON 1
#else
#define LANES_PLAIN 1
#if defined(__SSSE3__) && defined(__SSE4_1__)
#include <immintrin.h>
#endif
#endif

constexpr int LANES = 16;

// Prefetch a cache line into the second cache: the first has so few miss buffers that prefetches into it read at half
// the memory's bandwidth, and loads wait for them.
static inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// --- halves, one at a time ---

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline float f16_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, rest = uint32_t(half & 0x7fff) << 13;
    if (rest < (0x1fu << 23)) {                              // finite: shift the exponent's bias, exactly, by 2^112
        if (rest < 0x0f800000u) return float_of(sign | bits_of(float_of(rest) * 0x1p112f));
    }
    return float_of(sign | 0x7f800000u | (rest & 0x7fffff) | ((rest & 0x7fffff) ? 0x400000u : 0u));
}

static inline uint16_t float_to_f16(float x) {               // to the nearest, ties to even
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x47800000u) return uint16_t(sign | 0x7c00);
    if (rest < 0x38800000u) return uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
    return uint16_t(sign | ((rest - 0x38000000u + 0xfff + (rest >> 13 & 1)) >> 13));
}

static inline float bf16_to_float(uint16_t half) { return float_of(uint32_t(half) << 16); }

static inline uint16_t float_to_bf16(float x) {              // to the nearest, ties to even
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// --- the bodies ---

#if LANES_AVX512

struct Lanes { __m512 v; };
struct Ints { __m512i v; };

static inline Lanes lanes(float x) { return {_mm512_set1_ps(x)}; }
static inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, Lanes x) { _mm512_storeu_ps(p, x.v); }
static inline __mmask16 first_lanes(int n) { return __mmask16(n >= LANES ? 0xffff : n > 0 ? (1u << n) - 1 : 0); }
static inline Lanes load_some(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
static inline void store_some(float* p, Lanes x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
static inline Lanes keep_first(Lanes x, int n, float other) {
    return {_mm512_mask_blend_ps(first_lanes(n), _mm512_set1_ps(other), x.v)};
}
static inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Lanes abs(Lanes a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))};
}
static inline Lanes with_sign(Lanes a, Lanes sign) {
    return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(0x7fffffff), _mm512_castps_si512(a.v),
                                                          _mm512_castps_si512(sign.v), 0xca))};
}
static inline Lanes where_less(Lanes a, Lanes b, Lanes yes, Lanes no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
static inline Ints bits_of(Lanes x) { return {_mm512_castps_si512(x.v)}; }
static inline Lanes float_of(Ints bits) { return {_mm512_castsi512_ps(bits.v)}; }

static inline Ints ints(int x) { return {_mm512_set1_epi32(x)}; }
static inline Ints load(const int* p) { return {_mm512_loadu_si512(p)}; }
static inline void store(int* p, Ints x) { _mm512_storeu_si512(p, x.v); }
static inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline Ints sub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
static inline Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int N> static inline Ints left(Ints a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> static inline Ints right(Ints a) { return {_mm512_srai_epi32(a.v, N)}; }
static inline Lanes to_float(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline Ints to_nearest(Lanes a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline void store_int8(signed char* p, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
static inline Ints from_uint8(const unsigned char* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
static inline Ints from_int8(const unsigned char* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

static inline Lanes from_f16(const void* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
static inline void to_f16(void* p, Lanes x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline Lanes from_bf16(const void* p) {
    return {_mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))), 16))};
}
static inline void to_bf16(void* p, Lanes x) {
    __m512i bits = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 no_number = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    near = _mm512_mask_or_epi32(near, no_number, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16)));
}

static inline __m256 upper_half(__m512 v) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}
static inline __m256 added_halves(Lanes x) { return _mm256_add_ps(_mm512_castps512_ps256(x.v), upper_half(x.v)); }
static inline __m256 larger_halves(Lanes x) { return _mm256_max_ps(_mm512_castps512_ps256(x.v), upper_half(x.v)); }
static inline __m256i added_halves(Ints x) {
    return _mm256_add_epi32(_mm512_castsi512_si256(x.v), _mm512_extracti64x4_epi64(x.v, 1));
}
static inline __m256i larger_halves(Ints x) {
    return _mm256_max_epi32(_mm512_castsi512_si256(x.v), _mm512_extracti64x4_epi64(x.v, 1));
}

#elif LANES_AVX2

struct Lanes { __m256 a, b; };
struct Ints { __m256i a, b; };

static inline Lanes lanes(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, Lanes x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline __m256i first_lanes(int n, int from) {
    __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(from));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
}
static inline Lanes load_some(const float* p, int n) {
    return {_mm256_maskload_ps(p, first_lanes(n, 0)), _mm256_maskload_ps(p + 8, first_lanes(n, 8))};
}
static inline void store_some(float* p, Lanes x, int n) {
    _mm256_maskstore_ps(p, first_lanes(n, 0), x.a);
    _mm256_maskstore_ps(p + 8, first_lanes(n, 8), x.b);
}
static inline Lanes keep_first(Lanes x, int n, float other) {
    __m256 o = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(o, x.a, _mm256_castsi256_ps(first_lanes(n, 0))),
            _mm256_blendv_ps(o, x.b, _mm256_castsi256_ps(first_lanes(n, 8)))};
}
static inline Lanes add(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline Lanes sub(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline Lanes mul(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline Lanes div(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline Lanes fma(Lanes x, Lanes y, Lanes z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline Lanes max(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline Lanes min(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline Lanes abs(Lanes x) {
    __m256 rest = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, rest), _mm256_and_ps(x.b, rest)};
}
static inline Lanes with_sign(Lanes x, Lanes sign) {
    __m256 rest = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_or_ps(_mm256_and_ps(rest, x.a), _mm256_andnot_ps(rest, sign.a)),
            _mm256_or_ps(_mm256_and_ps(rest, x.b), _mm256_andnot_ps(rest, sign.b))};
}
static inline Lanes where_less(Lanes x, Lanes y, Lanes yes, Lanes no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
static inline Ints bits_of(Lanes x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
static inline Lanes float_of(Ints x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

static inline Ints ints(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline Ints load(const int* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
static inline void store(int* p, Ints x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
static inline Ints add(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline Ints sub(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
static inline Ints max(Ints x, Ints y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int N> static inline Ints left(Ints x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> static inline Ints right(Ints x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }
static inline Lanes to_float(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline Ints to_nearest(Lanes x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline void store_int8(signed char* p, Ints x) {
    const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                          0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i a = _mm256_shuffle_epi8(x.a, pick), b = _mm256_shuffle_epi8(x.b, pick);
    __m128i low = _mm_unpacklo_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    __m128i high = _mm_unpacklo_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi64(low, high));
}
static inline Ints from_uint8(const unsigned char* p) {
    __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}
static inline Ints from_int8(const unsigned char* p) {
    __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
}

static inline Lanes from_f16(const void* p) {
    const __m128i* halves = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
static inline void to_f16(void* p, Lanes x) {
    __m128i* halves = static_cast<__m128i*>(p);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline Lanes from_bf16(const void* p) {
    const __m128i* halves = static_cast<const __m128i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1)), 16))};
}
static inline __m256i near_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i no_number = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, no_number), 16);
}
static inline void to_bf16(void* p, Lanes x) {
    __m256i both = _mm256_packus_epi32(near_bf16(x.a), near_bf16(x.b));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}

static inline __m256 added_halves(Lanes x) { return _mm256_add_ps(x.a, x.b); }
static inline __m256 larger_halves(Lanes x) { return _mm256_max_ps(x.a, x.b); }
static inline __m256i added_halves(Ints x) { return _mm256_add_epi32(x.a, x.b); }
static inline __m256i larger_halves(Ints x) { return _mm256_max_epi32(x.a, x.b); }

#elif LANES_NEON
#include "lanes_neon.h"
#else

struct Lanes { float v[LANES]; };
struct Ints { int v[LANES]; };

// a * b + c, rounded once. Where the processor cannot fuse them: the product is exact in a double, the sum is rounded to
// odd there (towards the neighbour with a last bit of 1, unless it is exact), and so rounding it to a float is right.
static inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return std::fma(a, b, c);
#else
    const double product = double(a) * double(b), sum = product + c;
    const double of_c = sum - product, error = (product - (sum - of_c)) + (c - of_c);  // exactly what the sum lost
    int64_t bits;
    memcpy(&bits, &sum, 8);
    const bool is_odd = bits & 1, is_lost = error < 0 || error > 0, outwards = (error > 0) == (sum > 0);
    bits += is_lost && !is_odd ? (outwards ? 1 : -1) : 0;
    double odd;
    memcpy(&odd, &bits, 8);
    return float(odd);
#endif
}

#define EACH(type, expression)                    \
    type out;                                     \
    for (int i = 0; i < LANES; i++) out.v[i] = (expression); \
    return out

static inline Lanes lanes(float x) { EACH(Lanes, x); }
static inline Lanes load(const float* p) { EACH(Lanes, p[i]); }
static inline void store(float* p, Lanes x) { memcpy(p, x.v, sizeof x.v); }
static inline Lanes load_some(const float* p, int n) { EACH(Lanes, i < n ? p[i] : 0.0f); }
static inline void store_some(float* p, Lanes x, int n) {
    for (int i = 0; i < LANES && i < n; i++) p[i] = x.v[i];
}
static inline Lanes keep_first(Lanes x, int n, float other) { EACH(Lanes, i < n ? x.v[i] : other); }
static inline Lanes add(Lanes a, Lanes b) { EACH(Lanes, a.v[i] + b.v[i]); }
static inline Lanes sub(Lanes a, Lanes b) { EACH(Lanes, a.v[i] - b.v[i]); }
static inline Lanes mul(Lanes a, Lanes b) { EACH(Lanes, a.v[i] * b.v[i]); }
static inline Lanes div(Lanes a, Lanes b) { EACH(Lanes, a.v[i] / b.v[i]); }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { EACH(Lanes, fused(a.v[i], b.v[i], c.v[i])); }
static inline Lanes max(Lanes a, Lanes b) { EACH(Lanes, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline Lanes min(Lanes a, Lanes b) { EACH(Lanes, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline Lanes abs(Lanes a) { EACH(Lanes, std::fabs(a.v[i])); }
static inline Lanes with_sign(Lanes a, Lanes sign) { EACH(Lanes, std::copysign(a.v[i], sign.v[i])); }
static inline Lanes where_less(Lanes a, Lanes b, Lanes yes, Lanes no) {
    EACH(Lanes, a.v[i] < b.v[i] ? yes.v[i] : no.v[i]);
}
static inline Ints bits_of(Lanes x) { EACH(Ints, int(bits_of(x.v[i]))); }
static inline Lanes float_of(Ints x) { EACH(Lanes, float_of(uint32_t(x.v[i]))); }

static inline Ints ints(int x) { EACH(Ints, x); }
static inline Ints load(const int* p) { EACH(Ints, p[i]); }
static inline void store(int* p, Ints x) { memcpy(p, x.v, sizeof x.v); }
static inline Ints add(Ints a, Ints b) { EACH(Ints, int(uint32_t(a.v[i]) + uint32_t(b.v[i]))); }
static inline Ints sub(Ints a, Ints b) { EACH(Ints, int(uint32_t(a.v[i]) - uint32_t(b.v[i]))); }
static inline Ints max(Ints a, Ints b) { EACH(Ints, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
template <int N> static inline Ints left(Ints a) { EACH(Ints, int(uint32_t(a.v[i]) << N)); }
template <int N> static inline Ints right(Ints a) { EACH(Ints, a.v[i] >> N); }
static inline Lanes to_float(Ints a) { EACH(Lanes, float(a.v[i])); }
static inline Ints to_nearest(Lanes a) {  // what cannot be an int becomes the smallest, as the processors have it
    EACH(Ints, std::fabs(a.v[i]) < 0x1p31f ? int(std::nearbyint(a.v[i])) : INT32_MIN);
}
static inline void store_int8(signed char* p, Ints a) {
    for (int i = 0; i < LANES; i++) p[i] = static_cast<signed char>(static_cast<unsigned char>(a.v[i]));
}
static inline Ints from_uint8(const unsigned char* p) { EACH(Ints, p[i]); }
static inline Ints from_int8(const unsigned char* p) { EACH(Ints, static_cast<signed char>(p[i])); }

static inline uint16_t half_at(const void* p, int i) {
    uint16_t half;
    memcpy(&half, static_cast<const char*>(p) + 2 * i, 2);
    return half;
}
static inline Lanes from_f16(const void* p) { EACH(Lanes, f16_to_float(half_at(p, i))); }
static inline Lanes from_bf16(const void* p) { EACH(Lanes, bf16_to_float(half_at(p, i))); }
static inline void to_f16(void* p, Lanes x) {
    uint16_t halves[LANES];
    for (int i = 0; i < LANES; i++) halves[i] = float_to_f16(x.v[i]);
    memcpy(p, halves, sizeof halves);
}
static inline void to_bf16(void* p, Lanes x) {
    uint16_t halves[LANES];
    for (int i = 0; i < LANES; i++) halves[i] = float_to_bf16(x.v[i]);
    memcpy(p, halves, sizeof halves);
}
#undef EACH

#endif

// --- over lanes: lane i with i + 8, then i + 4, i + 2, i + 1 ---

#if LANES_PLAIN
template <class V, class F>
static inline auto over_lanes(V x, F join) {
    for (int w = LANES / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x.v[i] = join(x.v[i], x.v[i + w]);
    return x.v[0];
}
static inline float sum(Lanes x) { return over_lanes(x, [](float a, float b) { return a + b; }); }
static inline float largest(Lanes x) { return over_lanes(x, [](float a, float b) { return a > b ? a : b; }); }
static inline int sum(Ints x) { return over_lanes(x, [](int a, int b) { return int(uint32_t(a) + uint32_t(b)); }); }
static inline int largest(Ints x) { return over_lanes(x, [](int a, int b) { return a > b ? a : b; }); }
#elif LANES_AVX512 || LANES_AVX2
template <class F>
static inline float over_lanes(__m256 y, F join) {
    __m128 z = join(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = join(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(join(z, _mm_movehdup_ps(z)));
}
template <class F>
static inline int over_lanes(__m256i y, F join) {
    __m128i z = join(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    z = join(z, _mm_shuffle_epi32(z, 0x4e));
    return _mm_cvtsi128_si32(join(z, _mm_shuffle_epi32(z, 0xb1)));
}
static inline float sum(Lanes x) {
    return over_lanes(added_halves(x), [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
static inline float largest(Lanes x) {
    return over_lanes(larger_halves(x), [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
static inline int sum(Ints x) {
    return over_lanes(added_halves(x), [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); });
}
static inline int largest(Ints x) {
    return over_lanes(larger_halves(x), [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
}
#endif

// --- functions: relative error of exp 1.2e-7, of tanh 1.4e-7; erf is right to 2e-7 of 1 ---

// first x^n + ... + the last, by Horner's rule.
template <class... Rest>
static inline Lanes polynomial(Lanes x, float first, Rest... rest) {
    Lanes p = lanes(first);
    ((p = fma(p, x, lanes(rest))), ...);
    return p;
}

// e^x; 0 below -87, where float32 leaves its normal numbers, and e^88 above 88. NaN stays NaN.
static inline Lanes exp(Lanes x) {
    const Lanes low = lanes(-87.0f), shift = lanes(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Lanes y = min(lanes(88.0f), max(low, x));
    Lanes t = fma(y, lanes(1.44269504f), shift);
    Lanes n = sub(t, shift);
    Lanes r = fma(n, lanes(-0.693359375f), y);
    r = fma(n, lanes(2.12194440e-4f), r);
    Lanes p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                         5.0000001201e-1f);
    p = fma(p, mul(r, r), add(r, lanes(1.0f)));
    Lanes power = float_of(left<23>(add(bits_of(t), ints(127))));  // 2^n: the low bits of t count n
    return where_less(x, low, lanes(0.0f), mul(p, power));
}

// log(1 + e^x), without loss where it is near 0: log(1 + z) = 2 (t + t^3 / 3 + t^5 / 5 + ...) of t = z / (2 + z).
static inline Lanes softplus(Lanes x) {
    const Lanes z = exp(sub(lanes(0.0f), abs(x))), t = div(z, add(z, lanes(2.0f))), s = mul(t, t);
    const Lanes p = polynomial(s, 2.0f / 17, 2.0f / 15, 2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3);
    return add(max(x, lanes(0.0f)), fma(mul(p, s), t, add(t, t)));
}

static inline Lanes sigmoid(Lanes x) { return div(lanes(1.0f), add(lanes(1.0f), exp(sub(lanes(0.0f), x)))); }
static inline Lanes silu(Lanes x) { return div(x, add(lanes(1.0f), exp(sub(lanes(0.0f), x)))); }

static inline Lanes tanh(Lanes x) {
    Lanes a = abs(x), s = mul(x, x);
    Lanes far = sub(lanes(1.0f), div(lanes(2.0f), add(exp(add(a, a)), lanes(1.0f))));
    Lanes p = polynomial(s, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                         -3.33332819422e-1f);
    Lanes near = fma(mul(p, s), x, x);
    return where_less(a, lanes(0.625f), near, with_sign(far, x));
}

static inline Lanes erf(Lanes x) {
    Lanes a = abs(x), s = mul(x, x);
    Lanes t = div(lanes(1.0f), fma(a, lanes(0.3275911f), lanes(1.0f)));  // Abramowitz and Stegun, 7.1.26
    Lanes p = polynomial(t, 1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f);
    Lanes far = sub(lanes(1.0f), mul(mul(p, t), exp(sub(lanes(0.0f), s))));
    Lanes q = polynomial(s, 7.853861353e-5f, -8.010193625e-4f, 5.188327685e-3f, -2.685381193e-2f, 1.128358514e-1f,
                         -3.761262582e-1f, 1.128379165f);
    return where_less(a, lanes(1.0f), mul(q, x), with_sign(far, x));
}

static inline Lanes gelu_tanh(Lanes x) {
    Lanes inner = mul(lanes(0.7978845608f), fma(mul(mul(lanes(0.044715f), x), x), x, x));
    return mul(mul(lanes(0.5f), x), add(lanes(1.0f), tanh(inner)));
}

static inline Lanes gelu_erf(Lanes x) {
    return mul(mul(lanes(0.5f), x), add(lanes(1.0f), erf(mul(x, lanes(0.7071067812f)))));
}

#endif
