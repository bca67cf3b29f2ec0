// The weights of a chunk in the tensor cores' register layout; their bytes are defined in backends/tape/pack.py.
//
// A lane is (g, q) = (lane / 4, lane % 4). Of a column tile it holds four registers r of two weights each: rows
// g + 8 (r % 2), columns 2 q, 2 q + 1 (+ 8 for r / 2). Packed weights are multiplied as integers, at the bits where
// they are stored: an integer up to 255 in the low byte of a bfloat16 is that integer times 2^-133 (of a float16:
// 2^-24). Below 128 it is a subnormal number, above it has the smallest exponent, and both have the same scale. So
// unpacking needs only masks, no conversion and no offset. A word has two rows in its bytes: the even registers'
// weights in the lower bits, the odd registers' in the upper bits, which are larger by a power of two (`upper_rows`).
//
// Every product of such an integer is exact, and powers of two rescale the sum at the end. Activations of bfloat16 are
// multiplied by 2^96 before ("lifted"), so that no sum comes near the subnormal numbers.
#pragma once
#include "ring.h"

// LIFT_WEIGHTS is for a chip whose tensor cores may flush subnormal numbers to zero: the weights are lifted, not the
// activations, at the cost of four more instructions a column tile. Every product is the same; their sum may end in
// other bits, since a tensor core aligns products by the exponents of their operands (docs/tape.md).
#define LIFT_BF16 0x6F806F80u  // two of 2^96
#define ONE_BF16 0x3F803F80u
#define LESS_BF16 0xAD00u      // -2^-37: minus a lifted one, 2^96 / 2^133
#define UNIT_BF16 0x1p37f      // the factor of a product of a one and a lifted one: 2^133 / 2^96
#define UNIT_F16 0x1p24f

DEVICE constexpr float unit() { return ACTIVATION_BF16 ? UNIT_BF16 : UNIT_F16; }

// How many times larger the weights of rows 8 to 15 are, as they lie in their bytes.
DEVICE constexpr int upper_rows(int weight_type) {
    return weight_type == WEIGHT_FOUR ? 16 : weight_type == WEIGHT_FIVE ? 8 : weight_type == WEIGHT_SIX ? 4 : 1;
}

// Column tiles that share a scale; the offset of a quant; whether a group has a minimum.
DEVICE constexpr int tiles_a_group(int weight_type) { return weight_type == WEIGHT_SIX ? 1 : 2; }
DEVICE constexpr int offset_of(int weight_type) { return weight_type == WEIGHT_SIX ? 32 : weight_type == WEIGHT_EIGHT ? 128 : 0; }
DEVICE constexpr bool has_minimum(int weight_type) { return weight_type == WEIGHT_FOUR || weight_type == WEIGHT_FIVE; }
// Groups of a *slot* in a whole chunk: every fourth. Each slot has a partial sum.
DEVICE constexpr int groups_a_slot(int weight_type) { return tiles_a_chunk(weight_type) / tiles_a_group(weight_type) / 4; }

// Two activations, ready to be multiplied by such weights; zeros unless they are the lane's `own`.
DEVICE u32 lifted(u32 pair, bool own) {
    if (ACTIVATION_BF16) return multiply_pair_bf16(pair, own ? (LIFT_WEIGHTS ? ONE_BF16 : LIFT_BF16) : 0);
    return own ? pair : 0;
}
DEVICE uint4 weights_as_taken(const uint4& a) {
    if (!ACTIVATION_BF16 || !LIFT_WEIGHTS) return a;
    return uint4{
        multiply_pair_bf16(a.x, LIFT_BF16), multiply_pair_bf16(a.y, LIFT_BF16),
        multiply_pair_bf16(a.z, LIFT_BF16), multiply_pair_bf16(a.w, LIFT_BF16)
    };
}

// Two of minus a power of two, as weights of activations that are not lifted.
DEVICE constexpr u32 less_pair(u32 power) {
    u32 bits = ACTIVATION_BF16 ? LESS_BF16 : 0x8000u | power;
    for (u32 rest = power; ACTIVATION_BF16 && rest > 1; rest /= 2) bits += 128;  // the exponent's lowest bit
    return bits << 16 | bits;
}

// --- a compute warp's part of a chunk, read into registers ---

template <int WEIGHT_TYPE>
struct Quants {
    static constexpr int PER = tiles_a_chunk(WEIGHT_TYPE);
    u32 words[WEIGHT_TYPE == WEIGHT_EIGHT ? 2 * PER : PER];  // of each column tile one; EIGHT: of rows 0 to 7, of 8 to 15
    u32 high[PER];                                  // FIVE: of each four tiles one; SIX: of each two
};

template <int WEIGHT_TYPE, bool WHOLE>
DEVICE void read_quants(const char* chunk, int warp, int lane, int n, Quants<WEIGHT_TYPE>& out) {
    constexpr int PER = Quants<WEIGHT_TYPE>::PER;
    const char* const quants = chunk + warp * quant_bytes(WEIGHT_TYPE, n);
    constexpr int tiles = WEIGHT_TYPE == WEIGHT_EIGHT ? 2 : 4;  // that 16 bytes of a lane hold
    if (WEIGHT_TYPE == WEIGHT_EIGHT || WHOLE) {
        UNROLL
        for (int t = 0; t < PER; t += tiles) {
            if (!WHOLE && t >= n) continue;
            const uint4 four = *(const uint4*)(quants + t / tiles * 512 + lane * 16);
            words_of(four, out.words + t * 4 / tiles);
        }
    } else {
        UNROLL
        for (int t = 0; t < PER; t += 2) {
            if (t >= n) continue;
            const uint2 two = *(const uint2*)(quants + t * 128 + lane * 8);
            out.words[t] = two.x;
            out.words[t + 1] = two.y;
        }
    }
    if (WEIGHT_TYPE != WEIGHT_FIVE && WEIGHT_TYPE != WEIGHT_SIX) return;
    constexpr int each = WEIGHT_TYPE == WEIGHT_FIVE ? 4 : 2;
    const char* const high = chunk + N_COMPUTE_WARPS * quant_bytes(WEIGHT_TYPE, n) + warp * high_bytes(WEIGHT_TYPE, n);
    if (!WHOLE) {
        UNROLL
        for (int t = 0; t < PER; t += each) {
            if (t < n) out.high[t / each] = *(const u32*)(high + t / each * 128 + lane * 4);
        }
    } else if (WEIGHT_TYPE == WEIGHT_FIVE) {
        const uint2 two = *(const uint2*)(high + lane * 8);
        out.high[0] = two.x;
        out.high[1] = two.y;
    } else {
        words_of(*(const uint4*)(high + lane * 16), out.high);
    }
}

// Scale and minimum of one group, for rows g and g + 8.
struct Scales {
    float scale[2], minimum[2];
};

// The words of all groups of a slot as they lie in the chunk; zero for groups that the chunk lacks.
template <int WEIGHT_TYPE, bool WHOLE>
DEVICE void read_scales(const char* chunk, int warp, int g, int n, int slot, uint2 out[groups_a_slot(WEIGHT_TYPE)]) {
    constexpr int N = groups_a_slot(WEIGHT_TYPE);
    const char* const scales =
        chunk + N_COMPUTE_WARPS * (quant_bytes(WEIGHT_TYPE, n) + high_bytes(WEIGHT_TYPE, n)) + warp * scale_bytes(WEIGHT_TYPE, n);
    if constexpr (WHOLE && N == 2 && has_minimum(WEIGHT_TYPE)) {  // both together
        const uint4 both = *(const uint4*)(scales + (slot * 8 + g) * 16);
        out[0] = uint2{both.x, both.y};
        out[1] = uint2{both.z, both.w};
    } else if constexpr (WHOLE && N == 2) {
        const uint2 both = *(const uint2*)(scales + (slot * 8 + g) * 8);
        out[0] = uint2{both.x, 0};
        out[1] = uint2{both.y, 0};
    } else {
        UNROLL
        for (int i = 0; i < N; i++) {
            const int row = (4 * i + slot) * 8 + g;
            if (!WHOLE && (4 * i + slot) * tiles_a_group(WEIGHT_TYPE) >= n) out[i] = uint2{0, 0};
            else if (has_minimum(WEIGHT_TYPE)) out[i] = *(const uint2*)(scales + row * 8);
            else out[i] = uint2{*(const u32*)(scales + row * 4), 0};
        }
    }
}
template <int WEIGHT_TYPE>
DEVICE Scales scales_from(const uint2& words) {
    Scales out;
    if (has_minimum(WEIGHT_TYPE)) {
        split_as<false>(words.x, out.scale[0], out.minimum[0]);
        split_as<false>(words.y, out.scale[1], out.minimum[1]);
    } else {
        split_as<false>(words.x, out.scale[0], out.scale[1]);
        out.minimum[0] = out.minimum[1] = 0.0f;
    }
    return out;
}

// --- registers of a column tile ---

// Loops over tiles are unrolled, so that `tile` and what follows from it are constants.
DEVICE u32 moved(u32 word, int right) { return right >= 0 ? word >> right : word << -right; }

// Four weights of rows 0 to 7 in the bytes of `lower`, four of rows 8 to 15 in those of `upper`: all bits of both.
template <int WEIGHT_TYPE>
DEVICE void both_rows(const Quants<WEIGHT_TYPE>& quants, int tile, u32& lower, u32& upper) {
    const u32 word = quants.words[tile];
    if constexpr (WEIGHT_TYPE == WEIGHT_FIVE) {
        const u32 high = moved(quants.high[tile / 4], 4 * (tile / 2 % 2) + 2 * (tile % 2) - 3);
        lower = (word & 0x0F0F0F0Fu) | (high & 0x10101010u);
        upper = (word & 0xF0F0F0F0u) | (high & 0x08080808u);
    } else if constexpr (WEIGHT_TYPE == WEIGHT_SIX) {
        const u32 high = moved(quants.high[tile / 2], 4 * (tile % 2) - 2);
        lower = (word & 0x0F0F0F0Fu) | (high & 0x30303030u);
        upper = (word & 0xF0F0F0F0u) | (high & 0x0C0C0C0Cu);
    } else {
        lower = word & 0x0F0F0F0Fu;
        upper = word & 0xF0F0F0F0u;
    }
}

// As two-byte numbers: a register has bytes 0 and 2 of a word, or 1 and 3.
template <int WEIGHT_TYPE>
DEVICE uint4 wide_fragment(const Quants<WEIGHT_TYPE>& quants, int tile) {
    if constexpr (WEIGHT_TYPE == WEIGHT_FOUR) {
        const u32 word = quants.words[tile], next = word >> 8;
        return uint4{word & 0x000F000Fu, word & 0x00F000F0u, next & 0x000F000Fu, next & 0x00F000F0u};
    } else {
        u32 lower, upper;
        if constexpr (WEIGHT_TYPE == WEIGHT_EIGHT) {  // signed: 128 more than it is
            lower = quants.words[2 * tile] ^ 0x80808080u;
            upper = quants.words[2 * tile + 1] ^ 0x80808080u;
        } else both_rows(quants, tile, lower, upper);
        return uint4{
            lower & 0x00FF00FFu, upper & 0x00FF00FFu, permute_bytes(lower, 0, 0x4341), permute_bytes(upper, 0, 0x4341)
        };
    }
}

// Two column tiles, `tile` and the next, as bytes: four columns of a row in a register.
template <int WEIGHT_TYPE>
DEVICE uint4 narrow_fragment(const Quants<WEIGHT_TYPE>& quants, int tile) {
    if constexpr (WEIGHT_TYPE == WEIGHT_EIGHT) {
        const u32* const words = quants.words + 2 * tile;
        return uint4{words[0], words[1], words[2], words[3]};
    } else {
        constexpr int down = WEIGHT_TYPE == WEIGHT_FOUR ? 4 : WEIGHT_TYPE == WEIGHT_FIVE ? 3 : 2;  // no bit crosses into a neighbour
        uint4 out;
        both_rows(quants, tile, out.x, out.y);
        both_rows(quants, tile + 1, out.z, out.w);
        out.y >>= down;
        out.w >>= down;
        return out;
    }
}
