// Weight matrices packed into tiles of 16 rows, and their products with rows of activations.
//
// One layout serves a single row, a batch and a prompt, on every CPU. Within a tile, columns form blocks of 32, and the
// 16 rows of a block are contiguous. R is the row within the tile:
//
//   quants  4, 5 and 6 bits: [tile][block][4][16 R][4]   byte k of word j: column 4 j + k low, column 16 + 4 j + k high
//           8 bits:          [tile][block][8][16 R][4]   byte k of word j: column 4 j + k, plus 128
//           floats:          [tile][column][16 R]        the file's own numbers, columns up to a multiple of 4
//   more    5 bits:          [tile][block][16 R][4]      bit j of byte k: the fifth bit of column 4 j + k
//           6 bits:          [tile][block][2][16 R][4]   bits 2 j, 2 j + 1 of byte k of word g: column 16 g + 4 j + k
//   scales  Q4_0 Q5_0 Q8_0:  [tile][block][16 R] float16
//           MXFP4:           [tile][block][16 R] bfloat16, which has the file's powers of two exactly, halved: its
//                            nibbles stand for twice their values, which are integers within +-12
//           Q4_1 Q5_1:       [tile][block][2][16 R] float16, scale and minimum
//           Q4_K Q5_K:       [tile][256 columns]: float16 [2][16 R], scale and minimum of all; uint8 [2][8][16 R],
//                            those of each block, six bits in the file: a matrix has 1.03 times the file's size
//           Q6_K:            [tile][256 columns]: float16 [16 R], then int8 [16][16 R], one for each 16 columns
//
// So one AND and one shift give the columns in the order of `vpdpbusd`: four of each row, multiplied with four
// broadcast activations.
//
// Activations of quantised matrices are integers n with one step for each 32 columns: 8 bits, |n| <= 127, or `wide`,
// |n| <= 16256 = 127 * 128, written as 128 coarse + fine, two planes of int8 (|fine| <= 64). A block's products are
// summed in integers, which is exact in any order; then blocks are added in float32, from first to last, each by
//     sum += (products * scale) * step;    sum += minimum * (step * sum of n)
// with those two roundings, in every batch, thread and CPU: a row's bits depend on the row alone.
//
// No integer sum can leave 32 bits: 32 columns of u8 times |n| <= 16256 are below 32 * 255 * 16256 = 1.33e8, twice that
// with the correction for what was added to the bytes; 4, 5 and 6 bits stay below 2^24 (6 bits are summed over 16
// columns), so that float32 has them exactly. 8 bits may be rounded once there, by 2^-24 of them. In the AVX2 body sums
// of bytes go through 16 bits: see `dots`.
#ifndef OSTINATO_TILES_H
#define OSTINATO_TILES_H

#include <cstddef>

#include "lanes.h"

// Long functions that are called from many places: not inlined, which keeps the time of compilation short.
#if defined(__clang__)
#define ONE_BODY __attribute__((noinline, unused))
#else
#define ONE_BODY __attribute__((noinline, noclone, unused))
#endif

enum TileType {
    TILE_F32, TILE_F16, TILE_BF16,
    TILE_Q4_0, TILE_Q4_1, TILE_Q5_0, TILE_Q5_1, TILE_Q8_0, TILE_MXFP4,
    TILE_Q4_K, TILE_Q5_K, TILE_Q6_K
};
constexpr int N_TILE_TYPES = TILE_Q6_K + 1;

struct Matrix {
    int type, rows, cols, reserved;
    const unsigned char *quants, *scales, *more;
};

// Rows of activations, prepared for any matrix of `cols` columns.
struct Inputs {
    int cols, n_rows, n_blocks;
    bool wide;
    long value_stride, plane_stride;  // of a row, in entries
    float* values;                    // [row][column], zeros up to a multiple of 32: for float matrices
    signed char* planes;              // [row][block][32 coarse, 32 fine], or [row][block][32]
    float* steps;                     // [row][block][2]: the step; the step times the sum of n
    int* sums;                        // [row][block][3]: minus the sum of n over 32 columns, the first 16, the last 16
};

// --- what a type is made of ---

constexpr int BLOCK = 32, SUPER = 8;  // columns of a block; blocks of a K type's 256 columns

constexpr bool is_float(int type) { return type <= TILE_BF16; }
constexpr bool is_k(int type) { return type >= TILE_Q4_K; }
constexpr bool has_minimum(int type) {
    return type == TILE_Q4_1 || type == TILE_Q5_1 || type == TILE_Q4_K || type == TILE_Q5_K;
}
// Of the integers that are multiplied: the 4 bits of MXFP4 choose one of 15, which with the offset take 5.
constexpr int N_BITS[] = {32, 16, 16, 4, 4, 5, 5, 8, 5, 4, 5, 6};
static_assert(sizeof(N_BITS) == N_TILE_TYPES * sizeof(int), "every type has its bits");
constexpr int n_bits(int type) { return N_BITS[type]; }
// The offset that makes quants unsigned, as a power of two; types with a minimum have none.
constexpr int offset_bits(int type) { return n_bits(type) - 1; }
constexpr bool has_fifth_bits(int type) { return n_bits(type) == 5 && type != TILE_MXFP4; }
// Twice the value of each nibble of MXFP4 (sign, two bits of exponent, one of mantissa), plus the offset.
constexpr unsigned char FLOAT4[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
constexpr int quant_bytes(int type) { return n_bits(type) == 8 ? 512 : 256; }  // of a block of a tile
constexpr int more_bytes(int type) { return has_fifth_bits(type) ? 64 : n_bits(type) == 6 ? 128 : 0; }
constexpr int scale_bytes(int type) {  // of a block of a tile, or of 256 columns of it
    return type == TILE_Q6_K ? 32 + 256 : is_k(type) ? 64 + 256 : has_minimum(type) ? 64 : 32;
}
constexpr int float_bytes(int type) { return type == TILE_F32 ? 4 : 2; }

static inline int tiles_in(int rows) { return (rows + LANES - 1) / LANES; }
static inline int blocks_in(int cols) { return (cols + BLOCK - 1) / BLOCK; }
static inline long padded_columns(int cols) { return (cols + 3) / 4 * 4; }

// Bytes of one tile in quants, scales and more.
static inline void tile_bytes(int type, int cols, size_t out[3]) {
    size_t n = blocks_in(cols);
    out[0] = is_float(type) ? size_t(padded_columns(cols)) * LANES * float_bytes(type) : n * quant_bytes(type);
    out[1] = is_float(type) ? 0 : (is_k(type) ? n / SUPER : n) * scale_bytes(type);
    out[2] = is_float(type) ? 0 : n * more_bytes(type);
}

// --- activations ---

static inline size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }
// Rows are an odd number of cache lines apart: rows of 4096 columns would otherwise share a few sets of the cache.
static inline size_t odd_lines(size_t bytes) { return lines(bytes) / 64 % 2 ? lines(bytes) : lines(bytes) + 64; }

static inline size_t inputs_bytes(int cols, int n_rows) {
    size_t n = blocks_in(cols), rows = size_t(n_rows);
    size_t of_rows = rows * (odd_lines(n * BLOCK * 4) + odd_lines(n * BLOCK * 2));
    return 64 + of_rows + lines(rows * n * 8) + lines(rows * n * 12);
}

static inline Inputs inputs_over(void* scratch, int cols, int n_rows, bool wide) {
    size_t n = blocks_in(cols), rows = size_t(n_rows);
    char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t(63));
    Inputs in;
    in.cols = cols;
    in.n_rows = n_rows;
    in.n_blocks = int(n);
    in.wide = wide;
    in.value_stride = long(odd_lines(n * BLOCK * 4) / 4);
    in.plane_stride = long(odd_lines(n * BLOCK * (wide ? 2 : 1)));
    in.values = reinterpret_cast<float*>(at);
    at += rows * in.value_stride * 4;
    in.planes = reinterpret_cast<signed char*>(at);
    at += rows * odd_lines(n * BLOCK * 2);
    in.steps = reinterpret_cast<float*>(at);
    at += lines(rows * n * 8);
    in.sums = reinterpret_cast<int*>(at);
    return in;
}

template <bool WIDE>
static inline void prepare_block(Lanes u, Lanes v, signed char* plane, float* steps, int* sums) {
    constexpr float most = WIDE ? 16256.0f : 127.0f;
    // Compared as integers, NaN is the largest of all: then the step is NaN, and so are the products.
    float top = float_of(uint32_t(largest(max(bits_of(abs(u)), bits_of(abs(v))))));
    float step = top / most, per = top >= 1e-30f ? most / top : 0.0f;
    Ints a = to_nearest(mul(u, lanes(per))), b = to_nearest(mul(v, lanes(per)));
    int first = sum(a), second = sum(b), both = int(uint32_t(first) + uint32_t(second));
    if (WIDE) {
        Ints x = right<7>(add(a, ints(64))), y = right<7>(add(b, ints(64)));
        store_int8(plane, x);
        store_int8(plane + 16, y);
        store_int8(plane + 32, sub(a, left<7>(x)));
        store_int8(plane + 48, sub(b, left<7>(y)));
    } else {
        store_int8(plane, a);
        store_int8(plane + 16, b);
    }
    steps[0] = step;
    steps[1] = step * float(both);
    sums[0] = int(0u - uint32_t(both));
    sums[1] = int(0u - uint32_t(first));
    sums[2] = int(0u - uint32_t(second));
}

// Rows [first, last) of x, `stride` floats apart, into the same rows of the inputs.
ONE_BODY static void prepare(const Inputs& in, const float* x, long stride, int first, int last) {
    for (int row = first; row < last; row++) {
        const float* from = x + row * stride;
        float* values = in.values + row * in.value_stride;
        signed char* plane = in.planes + row * in.plane_stride;
        float* steps = in.steps + size_t(row) * in.n_blocks * 2;
        int* sums = in.sums + size_t(row) * in.n_blocks * 3;
        for (int b = 0; b < in.n_blocks; b++) {
            int left = in.cols - b * BLOCK;
            Lanes u = left >= BLOCK ? load(from + b * BLOCK) : load_some(from + b * BLOCK, left);
            Lanes v = left >= BLOCK ? load(from + b * BLOCK + 16)
                      : left > 16   ? load_some(from + b * BLOCK + 16, left - 16)
                                    : lanes(0.0f);
            store(values + b * BLOCK, u);
            store(values + b * BLOCK + 16, v);
            if (in.wide)
                prepare_block<true>(u, v, plane + b * 2 * BLOCK, steps + 2 * b, sums + 3 * b);
            else
                prepare_block<false>(u, v, plane + b * BLOCK, steps + 2 * b, sums + 3 * b);
        }
    }
}

// --- products (products.cpp) ---

constexpr int TILES_AHEAD = 8192;  // bytes of a stream between a prefetch and its use

// Tiles [tile_first, tile_last) of w times the first n_rows inputs: out[row * out_stride + 16 * tile + lane], for rows
// that w has.
__attribute__((visibility("hidden"))) void multiply(const Matrix& w, const Inputs& in, int n_rows, float* out,
                                                    long out_stride, int tile_first, int tile_last);

// --- one row dequantised ---

static inline uint16_t half_in(const unsigned char* p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return half;
}

// The quants of one row's block, as the file means them before its scale and minimum: 32 small integers.
static inline void quants_of(int type, const unsigned char* quants, const unsigned char* more, int lane, int* out) {
    int below = has_minimum(type) ? 0 : 1 << offset_bits(type);
    for (int c = 0; c < BLOCK; c++) {
        int j = c % 16 / 4, k = c % 4, at = lane * 4 + k;
        int q;
        if (n_bits(type) == 8)
            q = quants[c / 4 * 64 + at];
        else
            q = quants[j * 64 + at] >> (c / 16 * 4) & 15;
        if (type == TILE_MXFP4) q = FLOAT4[q];
        if (has_fifth_bits(type)) q |= (more[at] >> (c / 4) & 1) << 4;
        if (n_bits(type) == 6) q |= (more[c / 16 * 64 + at] >> (2 * j) & 3) << 4;
        out[c] = q - below;
    }
}

// Row `row` of w dequantised, `cols` floats: to the bit what `files/quants.py` reads from the file.
ONE_BODY static void row_of(const Matrix& w, int row, float* out) {
    size_t bytes[3];
    tile_bytes(w.type, w.cols, bytes);
    int tile = row / LANES, lane = row % LANES;
    const unsigned char* quants = w.quants + tile * bytes[0];
    const unsigned char* scales = w.scales + tile * bytes[1];
    const unsigned char* more = w.more + tile * bytes[2];
    if (is_float(w.type)) {
        for (int c = 0; c < w.cols; c++) {
            const unsigned char* at = quants + (size_t(c) * LANES + lane) * float_bytes(w.type);
            if (w.type == TILE_F32)
                memcpy(out + c, at, 4);
            else
                out[c] = w.type == TILE_F16 ? f16_to_float(half_in(at)) : bf16_to_float(half_in(at));
        }
        return;
    }
    for (int b = 0; b < blocks_in(w.cols); b++, out += BLOCK) {
        int q[BLOCK];
        quants_of(w.type, quants + size_t(b) * quant_bytes(w.type), more + size_t(b) * more_bytes(w.type), lane, q);
        const unsigned char* here = scales + size_t(is_k(w.type) ? b / SUPER : b) * scale_bytes(w.type);
        int k = b % SUPER;
        const uint16_t stored = half_in(here + 2 * lane);
        float scale = w.type == TILE_MXFP4 ? bf16_to_float(stored) : f16_to_float(stored), second = 0.0f;
        if (w.type == TILE_Q6_K) {
            second = scale * float(static_cast<signed char>(here[32 + 32 * k + 16 + lane]));
            scale = scale * float(static_cast<signed char>(here[32 + 32 * k + lane]));
        } else if (is_k(w.type)) {
            second = f16_to_float(half_in(here + 32 + 2 * lane)) * float(here[192 + 16 * k + lane]);
            scale = scale * float(here[64 + 16 * k + lane]);
        } else if (has_minimum(w.type)) {
            second = f16_to_float(half_in(here + 32 + 2 * lane));
        }
        for (int c = 0; c < BLOCK; c++) {
            if (w.type == TILE_Q6_K)
                out[c] = float(q[c]) * (c < 16 ? scale : second);
            else if (is_k(w.type))
                out[c] = float(q[c]) * scale - second;
            else if (has_minimum(w.type))
                out[c] = float(q[c]) * scale + second;
            else
                out[c] = float(q[c]) * scale;
        }
    }
}

#endif
