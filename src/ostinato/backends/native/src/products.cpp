// Products of tiles with rows of activations; tiles.h says how both lie in memory. A separate translation unit:
// it is half of the code, and is compiled in parallel with the other half.
#include "tiles.h"

// --- the machine: what a register holds of a tile, and integer products ---
//
// A part is what one register holds of the 16 rows: all of them, half with AVX2, four with NEON. `dots<TOP, N, G>` adds
// to each of G sums, for every row, the products of 4 N columns: v[0..N) of u8 up to TOP, times one of G runs of int8
// within +-127. Quants of TOP 255 have 128 added; CORRECTED: the caller subtracts it again. SHORT_SUMS: long chains of
// additions are latency-bound here. TWO_ROWS: there is a body for two rows at once.

#if !LANES_AVX2 && !LANES_NEON  // a part is all 16 rows
using Part = Lanes;
using PartInts = Ints;

static inline Part part_of(float x) { return lanes(x); }
static inline PartInts part_ints(int x) { return ints(x); }
static inline Part part_f32(const void* p, int) { return load(static_cast<const float*>(p)); }
static inline Part part_f16(const void* p, int) { return from_f16(p); }
static inline Part part_bf16(const void* p, int) { return from_bf16(p); }
static inline Part part_uint8(const unsigned char* p, int) { return to_float(from_uint8(p)); }
static inline Part part_int8(const unsigned char* p, int) { return to_float(from_int8(p)); }
static inline void store_part(float* p, Part x, int, int n) {
    if (n >= LANES)
        store(p, x);
    else
        store_some(p, x, n);
}
#endif

#if LANES_AVX512

constexpr int PARTS = 1, MANY_ROWS = 8, MANY_FLOAT_ROWS = 4, ROWS_ABREAST = 4;
constexpr bool CORRECTED = true, SHORT_SUMS = true, TWO_ROWS = true;
struct PartBytes { __m512i v; };

static inline PartBytes part_bytes(const unsigned char* p, int) { return {_mm512_load_si512(p)}; }
static inline PartBytes eight_bits(const unsigned char* p, int part) { return part_bytes(p, part); }
static inline PartBytes low_nibbles(PartBytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
static inline PartBytes high_nibbles(PartBytes x) {
    return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))};
}
static inline PartBytes float4(PartBytes x) {  // nibbles to the integers of MXFP4
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(FLOAT4));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), x.v)};
}
// The bits of `more` that `mask` has in each byte, moved up by UP bits (down, where it is negative), joined to x.
template <int UP, int MASK> static inline PartBytes joined(PartBytes x, PartBytes more) {
    __m512i moved = UP >= 0 ? _mm512_slli_epi32(more.v, UP >= 0 ? UP : 0) : _mm512_srli_epi32(more.v, UP < 0 ? -UP : 0);
    return {_mm512_ternarylogic_epi32(x.v, moved, _mm512_set1_epi8(char(MASK)), 0xf8)};  // x | (moved & mask)
}
static inline __m512i four(const signed char* x) {
    int word;
    memcpy(&word, x, 4);
    return _mm512_set1_epi32(word);
}
// G sums side by side: each `vpdpbusd` takes five cycles, and only the next of its own sum has to wait for it.
template <int TOP, int N, int G>
static inline void dots(PartInts* sums, const PartBytes* v, const signed char* const* x) {
#pragma GCC unroll 8
    for (int j = 0; j < N; j++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) sums[g].v = _mm512_dpbusd_epi32(sums[g].v, v[j].v, four(x[g] + 4 * j));
}

#elif LANES_AVX2

constexpr int PARTS = 2, MANY_ROWS = 4, MANY_FLOAT_ROWS = 2, ROWS_ABREAST = 1;
constexpr bool CORRECTED = false, SHORT_SUMS = false, TWO_ROWS = false;
struct Part { __m256 v; };
struct PartInts { __m256i v; };
struct PartBytes { __m256i v; };

static inline Part part_of(float x) { return {_mm256_set1_ps(x)}; }
static inline Part add(Part a, Part b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline Part mul(Part a, Part b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline Part fma(Part a, Part b, Part c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
static inline PartInts part_ints(int x) { return {_mm256_set1_epi32(x)}; }
static inline PartInts add(PartInts a, PartInts b) { return {_mm256_add_epi32(a.v, b.v)}; }
template <int N> static inline PartInts left(PartInts a) { return {_mm256_slli_epi32(a.v, N)}; }
static inline Part to_float(PartInts a) { return {_mm256_cvtepi32_ps(a.v)}; }
static inline Part part_f32(const void* p, int part) {
    return {_mm256_loadu_ps(static_cast<const float*>(p) + 8 * part)};
}
static inline __m128i eight_halves(const void* p, int part) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p) + part);
}
static inline Part part_f16(const void* p, int part) { return {_mm256_cvtph_ps(eight_halves(p, part))}; }
static inline Part part_bf16(const void* p, int part) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight_halves(p, part)), 16))};
}
static inline __m128i eight_bytes(const unsigned char* p, int part) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * part));
}
static inline Part part_uint8(const unsigned char* p, int part) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_bytes(p, part)))};
}
static inline Part part_int8(const unsigned char* p, int part) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(p, part)))};
}
static inline void store_part(float* p, Part x, int part, int n) {
    if (n >= LANES)
        _mm256_storeu_ps(p + 8 * part, x.v);
    else
        _mm256_maskstore_ps(p + 8 * part, first_lanes(n, 8 * part), x.v);
}

static inline PartBytes part_bytes(const unsigned char* p, int part) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32 * part))};
}
static inline PartBytes eight_bits(const unsigned char* p, int part) {  // signed again
    return {_mm256_xor_si256(part_bytes(p, part).v, _mm256_set1_epi8(char(0x80)))};
}
static inline PartBytes low_nibbles(PartBytes x) { return {_mm256_and_si256(x.v, _mm256_set1_epi8(15))}; }
static inline PartBytes high_nibbles(PartBytes x) {
    return {_mm256_and_si256(_mm256_srli_epi16(x.v, 4), _mm256_set1_epi8(15))};
}
static inline PartBytes float4(PartBytes x) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(FLOAT4));
    return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), x.v)};
}
template <int UP, int MASK> static inline PartBytes joined(PartBytes x, PartBytes more) {
    __m256i moved = UP >= 0 ? _mm256_slli_epi32(more.v, UP >= 0 ? UP : 0) : _mm256_srli_epi32(more.v, UP < 0 ? -UP : 0);
    return {_mm256_or_si256(x.v, _mm256_and_si256(moved, _mm256_set1_epi8(char(MASK))))};
}
static inline __m256i four(const signed char* x) {
    int word;
    memcpy(&word, x, 4);
    return _mm256_set1_epi32(word);
}
// `maddubs` adds two products in 16 bits, where as many of these sums are added as cannot overflow: 8 of 4 bits (8 * 2
// * 15 * 127 = 30480), 4 of 5 bits (31496), 2 of 6 bits (32004), 1 of 8 bits, which go as |v| <= 128 times x with v's
// sign (32512).
template <int TOP, int N, int G>
static inline void dots(PartInts* sums, const PartBytes* v, const signed char* const* x) {
    constexpr int together = TOP == 255 ? 1 : 32767 / (2 * TOP * 127) < N ? 32767 / (2 * TOP * 127) : N;
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
#pragma GCC unroll 8
        for (int j = 0; j < N; j += together) {
            __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int i = j; i < j + together; i++) {
                __m256i word = four(x[g] + 4 * i);
                __m256i bytes = TOP == 255 ? _mm256_abs_epi8(v[i].v) : v[i].v;
                __m256i product = _mm256_maddubs_epi16(bytes, TOP == 255 ? _mm256_sign_epi8(word, v[i].v) : word);
                pairs = i == j ? product : _mm256_add_epi16(pairs, product);
            }
            sums[g].v = _mm256_add_epi32(sums[g].v, _mm256_madd_epi16(pairs, ones));
        }
    }
}

#elif LANES_NEON
#include "products_neon.h"
#else

constexpr int PARTS = 1, MANY_ROWS = 1, MANY_FLOAT_ROWS = 1, ROWS_ABREAST = 1;
constexpr bool CORRECTED = true, SHORT_SUMS = false, TWO_ROWS = false;
struct PartBytes { unsigned char v[64]; };

static inline PartBytes part_bytes(const unsigned char* p, int) {
    PartBytes out;
    memcpy(out.v, p, 64);
    return out;
}
static inline PartBytes eight_bits(const unsigned char* p, int part) { return part_bytes(p, part); }
static inline PartBytes low_nibbles(PartBytes x) {
    for (int i = 0; i < 64; i++) x.v[i] &= 15;
    return x;
}
static inline PartBytes high_nibbles(PartBytes x) {
    for (int i = 0; i < 64; i++) x.v[i] >>= 4;
    return x;
}
static inline PartBytes float4(PartBytes x) {
    for (int i = 0; i < 64; i++) x.v[i] = FLOAT4[x.v[i]];
    return x;
}
template <int UP, int MASK> static inline PartBytes joined(PartBytes x, PartBytes more) {
    for (int i = 0; i < 64; i++) x.v[i] |= (more.v[i] << (UP >= 0 ? UP : 0) >> (UP < 0 ? -UP : 0)) & MASK;
    return x;
}
#if defined(__SSSE3__) && defined(__SSE4_1__) && !defined(OSTINATO_PLAIN)
// Products of four rows' 16 bytes: by pairs in 16 bits, or for 8 bits, where those do not suffice, widened first.
template <int TOP> static inline __m128i dots_of_four_rows(__m128i v, __m128i x) {
    if (TOP < 128) return _mm_madd_epi16(_mm_maddubs_epi16(v, x), _mm_set1_epi16(1));  // 2 * 63 * 127 < 2^15
    const __m128i zero = _mm_setzero_si128(), wide = _mm_cvtepi8_epi16(x);
    return _mm_hadd_epi32(_mm_madd_epi16(_mm_unpacklo_epi8(v, zero), wide),
                          _mm_madd_epi16(_mm_unpackhi_epi8(v, zero), wide));
}
template <int TOP, int N, int G>
ONE_BODY static void dots(PartInts* sums, const PartBytes* v, const signed char* const* x) {
    for (int g = 0; g < G; g++)
        for (int i = 0; i < LANES; i += 4) {
            __m128i* to = reinterpret_cast<__m128i*>(sums[g].v + i);
            __m128i sum = _mm_loadu_si128(to);
            for (int j = 0; j < N; j++) {
                int word;
                memcpy(&word, x[g] + 4 * j, 4);
                const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(v[j].v + 4 * i));
                sum = _mm_add_epi32(sum, dots_of_four_rows<TOP>(bytes, _mm_set1_epi32(word)));
            }
            _mm_storeu_si128(to, sum);
        }
}
#else
template <int TOP, int N, int G>
ONE_BODY static void dots(PartInts* sums, const PartBytes* v, const signed char* const* x) {
    for (int g = 0; g < G; g++)
        for (int j = 0; j < N; j++)
            for (int i = 0; i < LANES; i++)
                for (int k = 0; k < 4; k++) sums[g].v[i] += v[j].v[4 * i + k] * x[g][4 * j + k];
}
#endif

#endif

// --- products ---

// The 32 columns of a block as bytes: eight registers, the first four of columns 0 to 15.
template <int TYPE>
static inline void unpack(PartBytes v[8], const unsigned char* quants, const unsigned char* more, int part) {
    if constexpr (n_bits(TYPE) == 8) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) v[j] = eight_bits(quants + 64 * j, part);
    } else {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            PartBytes both = part_bytes(quants + 64 * j, part);
            v[j] = low_nibbles(both);
            v[j + 4] = high_nibbles(both);
        }
    }
    if constexpr (TYPE == TILE_MXFP4) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) v[j] = float4(v[j]);
    }
    if constexpr (has_fifth_bits(TYPE)) {
        PartBytes high = part_bytes(more, part);
        v[0] = joined<4, 16>(v[0], high);
        v[1] = joined<3, 16>(v[1], high);
        v[2] = joined<2, 16>(v[2], high);
        v[3] = joined<1, 16>(v[3], high);
        v[4] = joined<0, 16>(v[4], high);
        v[5] = joined<-1, 16>(v[5], high);
        v[6] = joined<-2, 16>(v[6], high);
        v[7] = joined<-3, 16>(v[7], high);
    }
    if constexpr (n_bits(TYPE) == 6) {
        PartBytes first = part_bytes(more, part), second = part_bytes(more + 64, part);
        v[0] = joined<4, 48>(v[0], first);
        v[1] = joined<2, 48>(v[1], first);
        v[2] = joined<0, 48>(v[2], first);
        v[3] = joined<-2, 48>(v[3], first);
        v[4] = joined<4, 48>(v[4], second);
        v[5] = joined<2, 48>(v[5], second);
        v[6] = joined<0, 48>(v[6], second);
        v[7] = joined<-2, 48>(v[7], second);
    }
}

// Integer products of N registers of columns with G rows of activations, without the offset that the quants have.
// `minus`: of each row, minus the sum of n over these columns.
template <int TYPE, bool WIDE, int N, int G>
static inline void products(PartInts* out, const PartBytes* v, const signed char* x, long stride, const int* minus,
                            long minus_stride) {
    constexpr int top = (1 << n_bits(TYPE)) - 1, bits = offset_bits(TYPE);
    constexpr bool offset = !has_minimum(TYPE) && (n_bits(TYPE) != 8 || CORRECTED);
    const signed char* rows[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
        rows[g] = x + g * stride;
        if constexpr (!offset)
            out[g] = part_ints(0);
        else if constexpr (!WIDE)
            out[g] = left<bits>(part_ints(minus[g * minus_stride]));
        else if constexpr (bits == 7)
            out[g] = part_ints(minus[g * minus_stride]);  // to be multiplied by 128 with the coarse products
        else
            out[g] = part_ints(0);
    }
    if constexpr (SHORT_SUMS && G <= 2 && N == 8) {  // few rows: two shorter chains of additions for each sum
        PartInts more[G], fine[2][G];
#pragma GCC unroll 2
        for (int g = 0; g < G; g++) more[g] = fine[0][g] = fine[1][g] = part_ints(0);
        dots<top, 4, G>(out, v, rows);
        for (int g = 0; g < G; g++) rows[g] += 16;
        dots<top, 4, G>(more, v + 4, rows);
        if constexpr (WIDE) {
            for (int g = 0; g < G; g++) rows[g] += 16;
            dots<top, 4, G>(fine[0], v, rows);
            for (int g = 0; g < G; g++) rows[g] += 16;
            dots<top, 4, G>(fine[1], v + 4, rows);
        }
#pragma GCC unroll 2
        for (int g = 0; g < G; g++) {
            out[g] = add(out[g], more[g]);
            if constexpr (WIDE) out[g] = add(left<7>(out[g]), add(fine[0][g], fine[1][g]));
        }
    } else if constexpr (SHORT_SUMS && WIDE) {  // both planes side by side
        PartInts both[2 * G];
        const signed char* planes[2 * G];
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            both[g] = out[g];
            both[G + g] = part_ints(0);
            planes[g] = rows[g];
            planes[G + g] = rows[g] + BLOCK;
        }
        dots<top, N, 2 * G>(both, v, planes);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) out[g] = add(left<7>(both[g]), both[G + g]);
    } else {
        dots<top, N, G>(out, v, rows);
        if constexpr (WIDE) {
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                out[g] = left<7>(out[g]);
                rows[g] += BLOCK;
            }
            dots<top, N, G>(out, v, rows);
        }
    }
    if constexpr (offset && WIDE && bits < 7) {
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) out[g] = add(out[g], left<bits>(part_ints(minus[g * minus_stride])));
    }
}

// What a block of 16 rows, or a part of them, is multiplied by.
struct BlockScales {
    Part scale, second;  // second: of the last 16 columns (Q6_K), or the minimum
};

// `type` is the matrix's own: the body of Q4_1 serves Q4_K, and that of Q5_1 serves Q5_K, since their blocks are alike,
// and only scales and minima are stored differently.
template <int TYPE>
static inline BlockScales block_scales(const unsigned char* scales, int type, int block, int part) {
    BlockScales out;
    const int k = block % SUPER;
    if constexpr (TYPE == TILE_Q6_K) {
        const unsigned char* here = scales + block / SUPER * scale_bytes(TILE_Q6_K);
        Part all = part_f16(here, part);
        out.scale = mul(all, part_int8(here + 32 + 32 * k, part));
        out.second = mul(all, part_int8(here + 32 + 32 * k + 16, part));
    } else if (has_minimum(TYPE) && is_k(type)) {  // the file's minima are subtracted
        const unsigned char* here = scales + block / SUPER * scale_bytes(TILE_Q4_K);
        Part all = part_f16(here, part), minimum = mul(part_f16(here + 32, part), part_of(-1.0f));
        out.scale = mul(all, part_uint8(here + 64 + 16 * k, part));
        out.second = mul(minimum, part_uint8(here + 192 + 16 * k, part));
    } else {
        const unsigned char* here = scales + block * scale_bytes(TYPE);
        out.scale = TYPE == TILE_MXFP4 ? part_bf16(here, part) : part_f16(here, part);
        if constexpr (has_minimum(TYPE)) out.second = part_f16(here + 32, part);
    }
    return out;
}

// A block's integer sums, `last` of its last 16 columns (Q6_K), added to a row's total with the roundings of tiles.h.
// `step`: the row's step of this block; the step times the sum of n.
template <int TYPE>
static inline void add_block(Part& to, PartInts whole, PartInts last, const BlockScales& of, const float* step) {
    const Part by = part_of(step[0]);
    to = fma(mul(to_float(whole), of.scale), by, to);
    if constexpr (TYPE == TILE_Q6_K) to = fma(mul(to_float(last), of.second), by, to);
    if constexpr (has_minimum(TYPE)) to = fma(of.second, part_of(step[1]), to);
}

// N parts of a tile, from part `part` on, times M rows of a quantised matrix's activations, from row `row` on.
template <int TYPE, bool WIDE, int M, int N>
ONE_BODY static void quantised_tile(const Matrix& w, const Inputs& in, int tile, int part, int row, float* out,
                                    long stride) {
    size_t bytes[3];
    tile_bytes(w.type, w.cols, bytes);
    const unsigned char* quants = w.quants + tile * bytes[0];
    const unsigned char* scales = w.scales + tile * bytes[1];
    const unsigned char* more = w.more + tile * bytes[2];
    const signed char* planes = in.planes + row * in.plane_stride;
    const float* steps = in.steps + size_t(row) * in.n_blocks * 2;
    const int* sums = in.sums + size_t(row) * in.n_blocks * 3;
    constexpr int abreast = M < ROWS_ABREAST ? M : ROWS_ABREAST;
    const long step_stride = 2L * in.n_blocks, minus_stride = 3L * in.n_blocks;
    Part total[N][M];
    for (int p = 0; p < N; p++)
        for (int t = 0; t < M; t++) total[p][t] = part_of(0.0f);

    for (int b = 0; b < in.n_blocks; b++) {
        for (int i = 0; i < quant_bytes(TYPE); i += 64) prefetch(quants + TILES_AHEAD + i);
#pragma GCC unroll 2
        for (int p = 0; p < N; p++) {
            PartBytes v[8];
            unpack<TYPE>(v, quants, more, part + p);
            const BlockScales by = block_scales<TYPE>(scales, w.type, b, part + p);
#pragma GCC unroll 8
            for (int t = 0; t < M; t += abreast) {
                const signed char* x = planes + t * in.plane_stride + b * (WIDE ? 2 : 1) * BLOCK;
                const float* step = steps + (size_t(t) * in.n_blocks + b) * 2;
                const int* minus = sums + (size_t(t) * in.n_blocks + b) * 3;
                PartInts whole[abreast], last[abreast];
                if constexpr (TYPE == TILE_Q6_K) {
                    products<TYPE, WIDE, 4, abreast>(whole, v, x, in.plane_stride, minus + 1, minus_stride);
                    products<TYPE, WIDE, 4, abreast>(last, v + 4, x + 16, in.plane_stride, minus + 2, minus_stride);
                } else {
                    products<TYPE, WIDE, 8, abreast>(whole, v, x, in.plane_stride, minus, minus_stride);
                }
#pragma GCC unroll 4
                for (int g = 0; g < abreast; g++)
                    add_block<TYPE>(total[p][t + g], whole[g], last[g], by, step + g * step_stride);
            }
        }
        quants += quant_bytes(TYPE);
        more += more_bytes(TYPE);
    }
    for (int t = 0; t < M; t++)
        for (int p = 0; p < N; p++) store_part(out + t * stride, total[p][t], part + p, w.rows - tile * LANES);
}

#if LANES_AVX512 && OSTINATO_AMX
#include "products_amx.h"
#endif

// `quantised_tile` for a float matrix: four sums, of every fourth column each, since one would be bound by latency.
template <int TYPE, int M, int N>
ONE_BODY static void float_tile(const Matrix& w, const Inputs& in, int tile, int part, int row, float* out,
                                long stride) {
    constexpr int size = float_bytes(TYPE) * LANES;
    const long cols = padded_columns(w.cols);
    const unsigned char* at = w.quants + size_t(tile) * cols * size;
    const float* x = in.values + row * in.value_stride;
    Part total[N][M][4];
    for (int p = 0; p < N; p++)
        for (int t = 0; t < M; t++)
            for (int i = 0; i < 4; i++) total[p][t][i] = part_of(0.0f);
    for (long c = 0; c < cols; c += 4, at += 4 * size) {
        for (int i = 0; i < 4 * size; i += 64) prefetch(at + TILES_AHEAD + i);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
            for (int p = 0; p < N; p++) {
                const void* from = at + i * size;
                Part v = TYPE == TILE_F32   ? part_f32(from, part + p)
                         : TYPE == TILE_F16 ? part_f16(from, part + p)
                                            : part_bf16(from, part + p);
#pragma GCC unroll 4
                for (int t = 0; t < M; t++)
                    total[p][t][i] = fma(v, part_of(x[t * in.value_stride + c + i]), total[p][t][i]);
            }
    }
    for (int t = 0; t < M; t++)
        for (int p = 0; p < N; p++) {
            Part all = add(add(total[p][t][0], total[p][t][1]), add(total[p][t][2], total[p][t][3]));
            store_part(out + t * stride, all, part + p, w.rows - tile * LANES);
        }
}

// M rows of a tile. For one row both parts go in one sweep over the weights, which come from memory; for more rows a
// part's columns stay in registers for all of them.
template <int TYPE, bool WIDE, int M>
static inline void whole_tile(const Matrix& w, const Inputs& in, int tile, int row, float* out, long stride) {
    float* to = out + row * stride + long(tile) * LANES;
    constexpr int at_once = M == 1 ? PARTS : 1;
    for (int part = 0; part < PARTS; part += at_once) {
        if constexpr (is_float(TYPE))
            float_tile<TYPE, M, at_once>(w, in, tile, part, row, to, stride);
        else
            quantised_tile<TYPE, WIDE, M, at_once>(w, in, tile, part, row, to, stride);
    }
}

// Rows of activations go through some tiles, then the next rows through the same tiles, then all rows through the next
// tiles: the rows that are multiplied at once stay in the nearest cache, the tiles and all rows in the second.
template <int TYPE, bool WIDE>
ONE_BODY static void multiply_as(const Matrix& w, const Inputs& in, int n_rows, float* out, long stride, int tile_first,
                                 int tile_last) {
    constexpr int many = is_float(TYPE) ? MANY_FLOAT_ROWS : MANY_ROWS;
    size_t bytes[3];
    tile_bytes(w.type, w.cols, bytes);
    const long row_bytes = is_float(TYPE) ? in.value_stride * 4 : in.plane_stride;
    const long all_bytes = long(bytes[0] + bytes[1] + bytes[2]);
    const int rows_near = int((384 << 10) / row_bytes / many + 1) * many;
    const int tiles_near = n_rows <= many ? tile_last - tile_first : int((256 << 10) / all_bytes + 1);
    int from = 0;
#if LANES_AVX512 && OSTINATO_AMX
    // Scales for each 16 columns would halve each product: there AVX-512 is faster.
    if constexpr (!is_float(TYPE) && TYPE != TILE_Q6_K)
        from = unit_multiply<TYPE, WIDE>(w, in, n_rows, out, stride, tile_first, tile_last);
#endif
    for (; from < n_rows; from += rows_near) {
        const int to = n_rows - from < rows_near ? n_rows : from + rows_near;
        for (int tile0 = tile_first; tile0 < tile_last; tile0 += tiles_near) {
            const int tile1 = tile_last - tile0 < tiles_near ? tile_last : tile0 + tiles_near;
            for (int row0 = from; row0 < to; row0 += many) {
                const int row1 = to - row0 < many ? to : row0 + many;
                for (int tile = tile0; tile < tile1; tile++) {
                    int row = row0;
                    if (row + many <= row1) {
                        whole_tile<TYPE, WIDE, many>(w, in, tile, row, out, stride);
                        continue;
                    }
                    if constexpr (many > 4)
                        for (; row + 4 <= row1; row += 4) whole_tile<TYPE, WIDE, 4>(w, in, tile, row, out, stride);
                    if constexpr (TWO_ROWS && !has_fifth_bits(TYPE))  // 5 bits are rare: one body less to compile
                        for (; row + 2 <= row1; row += 2) whole_tile<TYPE, WIDE, 2>(w, in, tile, row, out, stride);
                    for (; row < row1; row++) whole_tile<TYPE, WIDE, 1>(w, in, tile, row, out, stride);
                }
            }
        }
    }
}

// By type, for activations of 8 bits and wide ones: floats are multiplied as they are.
#define BY_WIDTH(type) {multiply_as<type, false>, multiply_as<type, !is_float(type)>}
constexpr void (*MULTIPLY[][2])(const Matrix&, const Inputs&, int, float*, long, int, int) = {
    BY_WIDTH(TILE_F32),  BY_WIDTH(TILE_F16),  BY_WIDTH(TILE_BF16), BY_WIDTH(TILE_Q4_0),
    BY_WIDTH(TILE_Q4_1), BY_WIDTH(TILE_Q5_0), BY_WIDTH(TILE_Q5_1), BY_WIDTH(TILE_Q8_0),
    BY_WIDTH(TILE_MXFP4),
    BY_WIDTH(TILE_Q4_1), BY_WIDTH(TILE_Q5_1), BY_WIDTH(TILE_Q6_K),  // Q4_K and Q5_K: see quantised_tile
};
static_assert(sizeof(MULTIPLY) == N_TILE_TYPES * sizeof(*MULTIPLY), "every type is multiplied");

void multiply(const Matrix& w, const Inputs& in, int n_rows, float* out, long out_stride, int tile_first,
              int tile_last) {
    MULTIPLY[w.type][in.wide](w, in, n_rows, out, out_stride, tile_first, tile_last);
}
