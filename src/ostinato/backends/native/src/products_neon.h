// The NEON body of products.cpp: a part is four rows of a tile. Products of bytes by dot product, by i8mm where several
// rows of activations are multiplied at once, or by widening multiplication; all of them are exact. Quants of 8 bits are
// made signed again: v is within int8 in all types.
#ifndef OSTINATO_PRODUCTS_NEON_H
#define OSTINATO_PRODUCTS_NEON_H

constexpr int PARTS = 4, MANY_ROWS = 8, MANY_FLOAT_ROWS = 4, ROWS_ABREAST = 4;
constexpr bool CORRECTED = false, SHORT_SUMS = false, TWO_ROWS = true;
struct Part { float32x4_t v; };
struct PartInts { int32x4_t v; };
struct PartBytes { int8x16_t v; };

static inline Part part_of(float x) { return {vdupq_n_f32(x)}; }
static inline Part add(Part a, Part b) { return {vaddq_f32(a.v, b.v)}; }
static inline Part mul(Part a, Part b) { return {vmulq_f32(a.v, b.v)}; }
static inline Part fma(Part a, Part b, Part c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
static inline PartInts part_ints(int x) { return {vdupq_n_s32(x)}; }
static inline PartInts add(PartInts a, PartInts b) { return {vaddq_s32(a.v, b.v)}; }
template <int N> static inline PartInts left(PartInts a) { return {vshlq_n_s32(a.v, N)}; }
static inline Part to_float(PartInts a) { return {vcvtq_f32_s32(a.v)}; }
static inline Part part_f32(const void* p, int part) { return {vld1q_f32(static_cast<const float*>(p) + 4 * part)}; }
static inline uint16x4_t four_halves(const void* p, int part) {
    return vreinterpret_u16_u8(vld1_u8(static_cast<const unsigned char*>(p) + 8 * part));
}
static inline Part part_f16(const void* p, int part) { return {of_f16(four_halves(p, part))}; }
static inline Part part_bf16(const void* p, int part) { return {of_bf16(four_halves(p, part))}; }
static inline uint8x8_t four_bytes(const unsigned char* p, int part) {
    uint32_t word;
    memcpy(&word, p + 4 * part, 4);
    return vreinterpret_u8_u32(vdup_n_u32(word));
}
static inline Part part_uint8(const unsigned char* p, int part) {
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p, part)))))};
}
static inline Part part_int8(const unsigned char* p, int part) {
    int16x8_t halves = vmovl_s8(vreinterpret_s8_u8(four_bytes(p, part)));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves)))};
}
static inline void store_part(float* p, Part x, int part, int n) {
    if (n >= LANES) return vst1q_f32(p + 4 * part, x.v);
    float four[4];
    vst1q_f32(four, x.v);
    for (int i = 0; i < 4 && 4 * part + i < n; i++) p[4 * part + i] = four[i];
}

static inline PartBytes part_bytes(const unsigned char* p, int part) {
    return {vreinterpretq_s8_u8(vld1q_u8(p + 16 * part))};
}
static inline PartBytes eight_bits(const unsigned char* p, int part) {
    return {veorq_s8(part_bytes(p, part).v, vdupq_n_s8(-128))};
}
static inline PartBytes low_nibbles(PartBytes x) { return {vandq_s8(x.v, vdupq_n_s8(15))}; }
static inline PartBytes high_nibbles(PartBytes x) {
    return {vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x.v), 4))};
}
static inline PartBytes float4(PartBytes x) {
    return {vreinterpretq_s8_u8(vqtbl1q_u8(vld1q_u8(FLOAT4), vreinterpretq_u8_s8(x.v)))};
}
template <int UP, int MASK> static inline PartBytes joined(PartBytes x, PartBytes more) {
    int8x16_t moved = vshlq_s8(more.v, vdupq_n_s8(UP));  // down with copies of the sign, which the mask removes
    return {vorrq_s8(x.v, vandq_s8(moved, vdupq_n_s8(MASK)))};
}

static inline int8x16_t four(const signed char* x) {
    int word;
    memcpy(&word, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
static inline int32x4_t dot(int32x4_t sum, int8x16_t v, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sum, v, x);
#else
    int16x8_t low = vmull_s8(vget_low_s8(v), vget_low_s8(x)), high = vmull_high_s8(v, x);  // 128 * 127 < 2^15
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

template <int TOP, int N, int G>
static inline void dots(PartInts* sums, const PartBytes* v, const signed char* const* x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (G % 2 == 0) {  // products of two rows of the tile, eight columns each, with two of the activations
#pragma GCC unroll 2
        for (int g = 0; g < G; g += 2) {
            int32x4_t first = vdupq_n_s32(0), last = first;  // rows 0 and 1, 2 and 3: of g, of g + 1, of g, of g + 1
#pragma GCC unroll 4
            for (int j = 0; j < N; j += 2) {
                const int32x4_t a = vreinterpretq_s32_s8(v[j].v), b = vreinterpretq_s32_s8(v[j + 1].v);
                const int8x16_t both = vcombine_s8(vld1_s8(x[g] + 4 * j), vld1_s8(x[g + 1] + 4 * j));
                first = vmmlaq_s32(first, vreinterpretq_s8_s32(vzip1q_s32(a, b)), both);
                last = vmmlaq_s32(last, vreinterpretq_s8_s32(vzip2q_s32(a, b)), both);
            }
            sums[g].v = vaddq_s32(sums[g].v, vuzp1q_s32(first, last));
            sums[g + 1].v = vaddq_s32(sums[g + 1].v, vuzp2q_s32(first, last));
        }
        return;
    }
#endif
#pragma GCC unroll 8
    for (int j = 0; j < N; j++)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) sums[g].v = dot(sums[g].v, v[j].v, four(x[g] + 4 * j));
}

#endif
