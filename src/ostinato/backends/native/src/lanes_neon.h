// The NEON body of lanes.h: four registers. Where NEON's own operation differs from the other bodies', it is not used:
// vmaxq takes NaN from either side, and vcvtnq saturates.
#ifndef OSTINATO_LANES_NEON_H
#define OSTINATO_LANES_NEON_H

#include <arm_neon.h>

struct Lanes { float32x4_t a, b, c, d; };
struct Ints { int32x4_t a, b, c, d; };

#define EACH(type, one) return type{one(x.a), one(x.b), one(x.c), one(x.d)}
#define PAIRS(type, one) return type{one(x.a, y.a), one(x.b, y.b), one(x.c, y.c), one(x.d, y.d)}

static inline Lanes lanes(float x) {
    float32x4_t v = vdupq_n_f32(x);
    return {v, v, v, v};
}
static inline Lanes load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
static inline void store(float* p, Lanes x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
static inline Lanes load_some(const float* p, int n) {
    float some[LANES] = {};
    for (int i = 0; i < LANES && i < n; i++) some[i] = p[i];
    return load(some);
}
static inline void store_some(float* p, Lanes x, int n) {
    float all[LANES];
    store(all, x);
    for (int i = 0; i < LANES && i < n; i++) p[i] = all[i];
}
static inline uint32x4_t first_lanes(int n, int from) {
    const int32_t lane[4] = {0, 1, 2, 3};
    return vcgtq_s32(vdupq_n_s32(n - from), vld1q_s32(lane));
}
static inline Lanes keep_first(Lanes x, int n, float other) {
    float32x4_t o = vdupq_n_f32(other);
    return {vbslq_f32(first_lanes(n, 0), x.a, o), vbslq_f32(first_lanes(n, 4), x.b, o),
            vbslq_f32(first_lanes(n, 8), x.c, o), vbslq_f32(first_lanes(n, 12), x.d, o)};
}
static inline Lanes add(Lanes x, Lanes y) { PAIRS(Lanes, vaddq_f32); }
static inline Lanes sub(Lanes x, Lanes y) { PAIRS(Lanes, vsubq_f32); }
static inline Lanes mul(Lanes x, Lanes y) { PAIRS(Lanes, vmulq_f32); }
static inline Lanes div(Lanes x, Lanes y) { PAIRS(Lanes, vdivq_f32); }
static inline Lanes fma(Lanes x, Lanes y, Lanes z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
static inline float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
static inline float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
static inline Lanes max(Lanes x, Lanes y) { PAIRS(Lanes, larger); }
static inline Lanes min(Lanes x, Lanes y) { PAIRS(Lanes, smaller); }
static inline Lanes abs(Lanes x) { EACH(Lanes, vabsq_f32); }
static inline float32x4_t signed_as(float32x4_t x, float32x4_t sign) {
    return vbslq_f32(vdupq_n_u32(0x7fffffff), x, sign);
}
static inline Lanes with_sign(Lanes x, Lanes y) { PAIRS(Lanes, signed_as); }
static inline Lanes where_less(Lanes x, Lanes y, Lanes yes, Lanes no) {
    return {vbslq_f32(vcltq_f32(x.a, y.a), yes.a, no.a), vbslq_f32(vcltq_f32(x.b, y.b), yes.b, no.b),
            vbslq_f32(vcltq_f32(x.c, y.c), yes.c, no.c), vbslq_f32(vcltq_f32(x.d, y.d), yes.d, no.d)};
}
static inline Ints bits_of(Lanes x) { EACH(Ints, vreinterpretq_s32_f32); }
static inline Lanes float_of(Ints x) { EACH(Lanes, vreinterpretq_f32_s32); }

static inline Ints ints(int x) {
    int32x4_t v = vdupq_n_s32(x);
    return {v, v, v, v};
}
static inline Ints load(const int* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
static inline void store(int* p, Ints x) {
    vst1q_s32(p, x.a);
    vst1q_s32(p + 4, x.b);
    vst1q_s32(p + 8, x.c);
    vst1q_s32(p + 12, x.d);
}
static inline Ints add(Ints x, Ints y) { PAIRS(Ints, vaddq_s32); }
static inline Ints sub(Ints x, Ints y) { PAIRS(Ints, vsubq_s32); }
static inline Ints max(Ints x, Ints y) { PAIRS(Ints, vmaxq_s32); }
template <int N> static inline Ints left(Ints x) {
    return {vshlq_n_s32(x.a, N), vshlq_n_s32(x.b, N), vshlq_n_s32(x.c, N), vshlq_n_s32(x.d, N)};
}
template <int N> static inline Ints right(Ints x) {
    return {vshrq_n_s32(x.a, N), vshrq_n_s32(x.b, N), vshrq_n_s32(x.c, N), vshrq_n_s32(x.d, N)};
}
static inline Lanes to_float(Ints x) { EACH(Lanes, vcvtq_f32_s32); }
static inline int32x4_t nearest(float32x4_t x) {
    return vbslq_s32(vcltq_f32(vabsq_f32(x), vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}
static inline Ints to_nearest(Lanes x) { EACH(Ints, nearest); }
static inline void store_int8(signed char* p, Ints x) {
    int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b)), high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
static inline Ints from_uint8(const unsigned char* p) {
    uint8x16_t v = vld1q_u8(p);
    uint16x8_t low = vmovl_u8(vget_low_u8(v)), high = vmovl_u8(vget_high_u8(v));
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
            vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))};
}
static inline Ints from_int8(const unsigned char* p) {
    int8x16_t v = vreinterpretq_s8_u8(vld1q_u8(p));
    int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_s8(vget_high_s8(v));
    return {vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
            vmovl_s16(vget_high_s16(high))};
}

static inline uint16x8_t eight_halves(const void* p, int at) {
    return vreinterpretq_u16_u8(vld1q_u8(static_cast<const unsigned char*>(p) + 2 * at));
}
static inline float32x4_t of_f16(uint16x4_t halves) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); }
static inline float32x4_t of_bf16(uint16x4_t halves) { return vreinterpretq_f32_u32(vshll_n_u16(halves, 16)); }
static inline Lanes from_f16(const void* p) {
    uint16x8_t low = eight_halves(p, 0), high = eight_halves(p, 8);
    return {of_f16(vget_low_u16(low)), of_f16(vget_high_u16(low)), of_f16(vget_low_u16(high)),
            of_f16(vget_high_u16(high))};
}
static inline Lanes from_bf16(const void* p) {
    uint16x8_t low = eight_halves(p, 0), high = eight_halves(p, 8);
    return {of_bf16(vget_low_u16(low)), of_bf16(vget_high_u16(low)), of_bf16(vget_low_u16(high)),
            of_bf16(vget_high_u16(high))};
}
static inline uint16x4_t near_f16(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
static inline uint16x4_t near_bf16(float32x4_t x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t near = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), near, vorrq_u32(bits, vdupq_n_u32(0x400000))), 16);
}
static inline void store_halves(void* p, uint16x4_t a, uint16x4_t b, uint16x4_t c, uint16x4_t d) {
    unsigned char* to = static_cast<unsigned char*>(p);
    vst1q_u8(to, vreinterpretq_u8_u16(vcombine_u16(a, b)));
    vst1q_u8(to + 16, vreinterpretq_u8_u16(vcombine_u16(c, d)));
}
static inline void to_f16(void* p, Lanes x) {
    store_halves(p, near_f16(x.a), near_f16(x.b), near_f16(x.c), near_f16(x.d));
}
static inline void to_bf16(void* p, Lanes x) {
    store_halves(p, near_bf16(x.a), near_bf16(x.b), near_bf16(x.c), near_bf16(x.d));
}

// Over lanes: lane i with i + 8, then i + 4, i + 2, i + 1.
static inline float sum(Lanes x) {
    float32x4_t y = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    float32x2_t z = vadd_f32(vget_low_f32(y), vget_high_f32(y));
    return vget_lane_f32(z, 0) + vget_lane_f32(z, 1);
}
static inline float largest(Lanes x) {
    float32x4_t y = larger(larger(x.a, x.c), larger(x.b, x.d));
    float32x2_t low = vget_low_f32(y), high = vget_high_f32(y), z = vbsl_f32(vcgt_f32(low, high), low, high);
    float a = vget_lane_f32(z, 0), b = vget_lane_f32(z, 1);
    return a > b ? a : b;
}
static inline int sum(Ints x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.c), vaddq_s32(x.b, x.d))); }
static inline int largest(Ints x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.c), vmaxq_s32(x.b, x.d))); }

#undef EACH
#undef PAIRS

#endif
