// What Python asks of tiles: their size, packing from the file's blocks, products and rows (backends/native/tiles.py).
#ifndef OSTINATO_TILES_C_H
#define OSTINATO_TILES_C_H

#include <cstdlib>
#include <system_error>
#include <thread>
#include <vector>

#include "tiles.h"

// --- packing ---
//
// Quants are moved four bytes at a time: a word of the file's row becomes a word of the tile, with its nibbles paired
// anew where the file pairs other columns.

constexpr int FILE_BLOCK_BYTES[N_TILE_TYPES] = {4, 2, 2, 18, 20, 22, 24, 34, 17, 144, 176, 210};

static inline uint32_t word_at(const unsigned char* p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}
static inline void set_word(unsigned char* p, uint32_t word) { memcpy(p, &word, 4); }

// 32 bytes with 64 columns, 32 of them low and 32 high, as K types have them: the block of low (or high) nibbles alone.
static inline void pack_nibbles(unsigned char* to, const unsigned char* from, bool high) {
    for (int j = 0; j < 4; j++) {
        uint32_t a = word_at(from + 4 * j), b = word_at(from + 16 + 4 * j);
        uint32_t upper = (a >> 4 & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u), lower = (a & 0x0f0f0f0fu) | (b & 0x0f0f0f0fu) << 4;
        set_word(to + 64 * j, high ? upper : lower);
    }
}

// Half the power of two that a byte of the file stands for, 2^(e - 128), as a bfloat16.
static inline uint16_t half_power(unsigned char e) { return uint16_t(e > 1 ? (e - 1) << 7 : e ? 0x40 : 0x20); }

// One row's block, row `lane` of the tile: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 have scale (and minimum), fifth bits,
// quants; MXFP4 has an exponent and quants.
template <int TYPE>
static inline void pack_block(unsigned char* quants, unsigned char* scales, unsigned char* more,
                              const unsigned char* from, int lane) {
    const uint16_t power = half_power(*from);
    memcpy(scales + 2 * lane, TYPE == TILE_MXFP4 ? static_cast<const void*>(&power) : from, 2);
    if (has_minimum(TYPE)) memcpy(scales + 32 + 2 * lane, from + 2, 2);
    from += has_minimum(TYPE) ? 4 : TYPE == TILE_MXFP4 ? 1 : 2;
    if (has_fifth_bits(TYPE)) {
        uint32_t bits = word_at(from), sorted = 0;  // bit c of the file is column c
        for (int j = 0; j < 8; j++) sorted |= ((bits >> 4 * j & 15) * 0x00204081u & 0x01010101u) << j;
        set_word(more + 4 * lane, sorted);
        from += 4;
    }
    if (n_bits(TYPE) == 8)
        for (int j = 0; j < 8; j++) set_word(quants + 64 * j + 4 * lane, word_at(from + 4 * j) ^ 0x80808080u);
    else
        for (int j = 0; j < 4; j++) set_word(quants + 64 * j + 4 * lane, word_at(from + 4 * j));
}

// Q4_K and Q5_K, 256 columns: scale and minimum, twelve bytes with six bits for each block's, fifth bits, quants.
template <int TYPE>
static inline void pack_k(unsigned char* quants, unsigned char* scales, unsigned char* more, const unsigned char* from,
                          int lane) {
    memcpy(scales + 2 * lane, from, 2);
    memcpy(scales + 32 + 2 * lane, from + 2, 2);
    uint32_t first = word_at(from + 4), second = word_at(from + 8), third = word_at(from + 12);
    uint32_t bytes[4] = {first & 0x3f3f3f3fu, (third & 0x0f0f0f0fu) | (first >> 6 & 0x03030303u) << 4,
                         second & 0x3f3f3f3fu, (third >> 4 & 0x0f0f0f0fu) | (second >> 6 & 0x03030303u) << 4};
    for (int i = 0; i < 16; i++) scales[64 + 16 * i + lane] = static_cast<unsigned char>(bytes[i / 4] >> 8 * (i % 4));
    from += 16;
    if (has_fifth_bits(TYPE)) {
        for (int b = 0; b < SUPER; b++) {  // bit b of byte c of the file is column c of block b
            uint32_t sorted = 0;
            for (int j = 0; j < 8; j++) sorted |= (word_at(from + 4 * j) >> b & 0x01010101u) << j;
            set_word(more + b * more_bytes(TYPE) + 4 * lane, sorted);
        }
        from += 32;
    }
    for (int b = 0; b < SUPER; b++) pack_nibbles(quants + b * quant_bytes(TYPE) + 4 * lane, from + b / 2 * 32, b % 2);
}

// Q6_K, 256 columns: quants, fifth and sixth bits, sixteen scales, the scale of all.
static inline void pack_q6_k(unsigned char* quants, unsigned char* scales, unsigned char* more,
                             const unsigned char* from, int lane) {
    for (int b = 0; b < SUPER; b++) {
        pack_nibbles(quants + b * 256 + 4 * lane, from + b / 4 * 64 + b % 2 * 32, b % 4 >= 2);
        const unsigned char* high = from + 128 + b / 4 * 32;
        for (int g = 0; g < 2; g++) {
            uint32_t sorted = 0;
            for (int j = 0; j < 4; j++)
                sorted |= (word_at(high + 16 * g + 4 * j) >> 2 * (b % 4) & 0x03030303u) << 2 * j;
            set_word(more + b * 128 + g * 64 + 4 * lane, sorted);
        }
    }
    for (int i = 0; i < 16; i++) scales[32 + 16 * i + lane] = from[192 + i];
    memcpy(scales + 2 * lane, from + 208, 2);
}

template <int TYPE> static void pack_tile(const Matrix& w, const unsigned char* blocks, int tile) {
    static const unsigned char nothing[256] = {};  // padding rows of the last tile: their products are not read
    size_t bytes[3];
    tile_bytes(TYPE, w.cols, bytes);
    unsigned char* quants = const_cast<unsigned char*>(w.quants) + tile * bytes[0];
    unsigned char* scales = const_cast<unsigned char*>(w.scales) + tile * bytes[1];
    unsigned char* more = const_cast<unsigned char*>(w.more) + tile * bytes[2];
    constexpr int per = is_k(TYPE) ? SUPER : 1;  // blocks of ours in one of the file's
    const int n = blocks_in(w.cols) / per;
    for (int b = 0; b < n; b++) {
        for (int lane = 0; lane < LANES; lane++) {
            bool there = tile * LANES + lane < w.rows;
            const unsigned char* from = there ? blocks + (size_t(lane) * n + b) * FILE_BLOCK_BYTES[TYPE] : nothing;
            if constexpr (TYPE == TILE_Q6_K)
                pack_q6_k(quants, scales, more, from, lane);
            else if constexpr (is_k(TYPE))
                pack_k<TYPE>(quants, scales, more, from, lane);
            else
                pack_block<TYPE>(quants, scales, more, from, lane);
        }
        quants += per * quant_bytes(TYPE);
        more += per * more_bytes(TYPE);
        scales += scale_bytes(TYPE);
    }
}

template <typename T> static void pack_floats(const Matrix& w, const unsigned char* blocks, int tile) {
    T* to = reinterpret_cast<T*>(const_cast<unsigned char*>(w.quants)) + size_t(tile) * padded_columns(w.cols) * LANES;
    int rows = w.rows - tile * LANES < LANES ? w.rows - tile * LANES : LANES;
    size_t row_bytes = size_t(w.cols) * sizeof(T);
    memset(to, 0, rows < LANES ? size_t(padded_columns(w.cols)) * LANES * sizeof(T) : 0);
    memset(to + size_t(w.cols) * LANES, 0, size_t(padded_columns(w.cols) - w.cols) * LANES * sizeof(T));
    constexpr int at_once = 64 / sizeof(T);  // columns: what a cache line of the file's row has
    for (int c = 0; c < w.cols; c += at_once) {
        int last = w.cols - c < at_once ? w.cols : c + at_once;
        for (int r = 0; r < rows; r++)
            for (int i = c; i < last; i++)
                memcpy(to + size_t(i) * LANES + r, blocks + r * row_bytes + i * sizeof(T), sizeof(T));
    }
}

constexpr void (*PACK[])(const Matrix&, const unsigned char*, int) = {
    pack_floats<uint32_t>, pack_floats<uint16_t>, pack_floats<uint16_t>, pack_tile<TILE_Q4_0>,
    pack_tile<TILE_Q4_1>,  pack_tile<TILE_Q5_0>,  pack_tile<TILE_Q5_1>,  pack_tile<TILE_Q8_0>,
    pack_tile<TILE_MXFP4>,
    pack_tile<TILE_Q4_K>,  pack_tile<TILE_Q5_K>,  pack_tile<TILE_Q6_K>,
};
static_assert(sizeof(PACK) == N_TILE_TYPES * sizeof(*PACK), "every type is packed");

static inline void pack_tiles(const Matrix& w, const unsigned char* blocks, int tile_first, int tile_last) {
    const int columns = is_float(w.type) ? 1 : is_k(w.type) ? SUPER * BLOCK : BLOCK;
    const size_t tile_file_bytes = size_t(w.cols / columns) * FILE_BLOCK_BYTES[w.type] * LANES;
    for (int tile = tile_first; tile < tile_last; tile++, blocks += tile_file_bytes) PACK[w.type](w, blocks, tile);
}

// --- threads of one call: the loop has a team of its own, and these products are not its ---

// work(first, last) over [0, n), shared out over n_threads; fewer, where the system has none left to give.
template <typename Work> static void share_out(int n, int n_threads, const Work& work) {
    std::vector<std::thread> others;
    int n_shares = n_threads < n ? n_threads : n, given = 0;
    auto upto = [&](int share) { return int(int64_t(n) * share / n_shares); };
    try {
        for (int share = 1; share < n_shares; share++, given++)
            others.emplace_back([&work, &upto, share] { work(upto(share), upto(share + 1)); });
    } catch (const std::system_error&) {
        work(upto(given + 1), n);
    }
    if (n > 0) work(0, n_shares > 1 ? upto(1) : n);
    for (std::thread& other : others) other.join();
}

extern "C" {

int ostinato_matrix_bytes() { return int(sizeof(Matrix)); }

// Tiles [tile_first, tile_last) of w, whose planes are there to be written, from the file's blocks of these rows. Calls
// may run side by side.
void ostinato_pack(const Matrix* w, const void* blocks, int tile_first, int tile_last) {
    pack_tiles(*w, static_cast<const unsigned char*>(blocks), tile_first, tile_last);
}

// out [n, rows] = x [n, cols] times w, transposed. Returns 0, or 1 where there is no memory.
int ostinato_product(const Matrix* w, const float* x, int n, float* out, int wide, int n_threads) {
    constexpr int at_once = 256;
    int most = n < at_once ? n : at_once;
    void* scratch = malloc(inputs_bytes(w->cols, most));
    if (!scratch) return 1;
    Inputs in = inputs_over(scratch, w->cols, most, wide != 0);
    for (int row = 0; row < n; row += at_once) {
        int rows = n - row < at_once ? n - row : at_once;
        const float* from = x + size_t(row) * w->cols;
        float* to = out + size_t(row) * w->rows;
        // A thread costs about as much as a million products do.
        double million = double(rows) * w->rows * w->cols / 1e6;
        int threads = million < n_threads ? 1 + int(million) : n_threads;
        if (threads > n_threads) threads = n_threads;
        share_out(rows, rows < 32 ? 1 : threads, [&](int a, int b) { prepare(in, from, w->cols, a, b); });
        share_out(tiles_in(w->rows), threads, [&](int a, int b) { multiply(*w, in, rows, to, w->rows, a, b); });
    }
    free(scratch);
    return 0;
}

// Rows `ids` of w, dequantised: out [n, cols].
void ostinato_rows(const Matrix* w, const int* ids, int n, float* out) {
    for (int i = 0; i < n; i++) row_of(*w, ids[i], out + size_t(i) * w->cols);
}
}

#endif
