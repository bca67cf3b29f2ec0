// Products of packed weights, by one warp.
//
// Each group of 32 (or 16) columns has its own scale, so the sum of each group is scaled separately: with eight rows of
// activations that takes as many instructions as the rest. With one or two rows (`FEW`), three quarters of the tensor
// core's columns are free: the groups of a *unit* of four then lie side by side, each with its own activations and
// zeros for those of the others, and one multiplication serves four groups.
//
// A *piece* is a chunk of one tile. Its sum consists of four partial sums, of every fourth group each, and is added to
// the sums of the chunks before it, in shared memory. So a row's bits follow from the shape alone: adding zeros changes
// nothing, nor does the number of chunks of one call. With few bits a weight, bound by the instructions that unpack; so
// the code of a piece exists once, and is short.
#pragma once
#include "tiles.h"

#define FEW_ROWS 2

// --- the layout of a warp's work ---

// Groups of a whole chunk, in units of four. FEW: lane (g, q) has activations of group g / 2 of every unit, row g % 2,
// and sums of group q. Else it has activations of row g, and sums of every group.
template <int WEIGHT_TYPE, bool FEW>
struct Packing {
    static constexpr int PER = tiles_a_chunk(WEIGHT_TYPE), TILES = tiles_a_group(WEIGHT_TYPE), N_GROUPS = PER / TILES;
    static constexpr int N_SLOTS = FEW ? 1 : 4;                   // partial sums that a lane has
    static constexpr int N_SUMS = FEW ? N_GROUPS / 4 : N_GROUPS;  // sums that a lane scales
    static constexpr int AT_ONCE = FEW ? N_SUMS : 4;              // of those, whose products are interleaved
    static constexpr int TILES_A_SUM = PER / N_SUMS;
    // Column tiles whose products wait for each other. FEW: four groups may be two chains, a lane's own is in one.
    static constexpr int CHAIN = TILES_A_SUM < 4 ? TILES_A_SUM : 4, N_CHAINS = TILES_A_SUM / CHAIN;
};

struct Lane {
    int g, q;
};
DEVICE Lane lane_of(const Work& work) { return {(int)((u32)work.lane / 4), (int)((u32)work.lane % 4)}; }

// The group of which a lane has activations, or sums, by number i.
template <bool FEW>
DEVICE int group_at(int i, int own) {
    return FEW ? 4 * i + own : i;
}
template <bool FEW>
DEVICE const u16* row_of_lane(const Work& work) {
    const int g = lane_of(work).g;
    return row_of(work, FEW ? g % 2 : g);
}

// A compute warp's part of a piece, out of the ring.
template <int WEIGHT_TYPE, bool FEW>
struct Piece {
    Quants<WEIGHT_TYPE> quants;
    uint2 scales[Packing<WEIGHT_TYPE, FEW>::N_SUMS];
};

template <bool WHOLE, int WEIGHT_TYPE, bool FEW>
DEVICE void take_piece(const Work& work, Place& place, int n, Piece<WEIGHT_TYPE, FEW>& out) {
    using P = Packing<WEIGHT_TYPE, FEW>;
    const Lane lane = lane_of(work);
    await_chunk(shared_here(), work.state, place);
    const char* const chunk = stage_at(place);
    read_quants<WEIGHT_TYPE, WHOLE>(chunk, work.warp, work.lane, n, out.quants);
    UNROLL
    for (int slot = 0; slot < P::N_SLOTS; slot++) {
        uint2 scales[groups_a_slot(WEIGHT_TYPE)];
        read_scales<WEIGHT_TYPE, WHOLE>(chunk, work.warp, lane.g, n, FEW ? lane.q : slot, scales);
        UNROLL
        for (int i = 0; i < groups_a_slot(WEIGHT_TYPE); i++) out.scales[i * P::N_SLOTS + slot] = scales[i];
    }
    free_chunk(shared_here(), work.lane, place);
}

// --- wide activations ---

template <int WEIGHT_TYPE, bool FEW>
struct WideActivations {
    using P = Packing<WEIGHT_TYPE, FEW>;
    u32 b[P::PER][2];
    float start[P::N_SUMS][4];  // what the offset subtracts; of types with a minimum: its factor
};

// Less the offset for all 16 rows and all columns of a tile; or less one.
template <int WEIGHT_TYPE>
DEVICE uint4 less_fragment() {
    constexpr u32 least = has_minimum(WEIGHT_TYPE) ? 1 : offset_of(WEIGHT_TYPE);
    constexpr u32 lower = less_pair(least), upper = less_pair(least * upper_rows(WEIGHT_TYPE));
    return uint4{lower, upper, lower, upper};
}

template <bool WHOLE, int WEIGHT_TYPE, bool FEW>
DEVICE void prepare_activations(const Work& work, int chunk, int n, WideActivations<WEIGHT_TYPE, FEW>& out) {
    using P = Packing<WEIGHT_TYPE, FEW>;
    const Lane lane = lane_of(work);
    const int own = lane.g / 2;
    const u16* const x = row_of_lane<FEW>(work) + first_column(work, WEIGHT_TYPE, chunk, n) + lane.q * 2;
    const uint4 less = less_fragment<WEIGHT_TYPE>();
    UNROLL
    for (int i = 0; i < P::N_SUMS; i++) {
        const int group = group_at<FEW>(i, own);
        const bool there = WHOLE || group * P::TILES < n;
        UNROLL
        for (int k = 0; k < 4; k++) out.start[i][k] = 0.0f;
        UNROLL
        for (int t = 0; t < P::TILES; t++) {
            u32 pairs[2];
            UNROLL
            for (int h = 0; h < 2; h++) {
                pairs[h] = there ? *(const u32*)(x + (group * P::TILES + t) * 16 + 8 * h) : 0;
                UNROLL
                for (int slot = 0; slot < (FEW ? 4 : 1); slot++) {
                    out.b[(i * (FEW ? 4 : 1) + slot) * P::TILES + t][h] = lifted(pairs[h], !FEW || slot == own);
                }
            }
            multiply_as<ACTIVATION_BF16>(out.start[i], less, pairs[0], pairs[1]);  // all slots at once
        }
    }
}

// The sum of a lane's own group. Of two chains the other holds only its start value.
template <int WEIGHT_TYPE>
DEVICE float own_sum(const float (&c)[1][4], int k, bool) {
    return c[0][k];
}
template <int WEIGHT_TYPE>
DEVICE float own_sum(const float (&c)[2][4], int k, bool is_second) {
    if (has_minimum(WEIGHT_TYPE)) return c[0][k] + c[1][k];  // the other is zero, and an addition is cheaper than a selection
    return is_second ? c[1][k] : c[0][k];
}

template <bool WHOLE, int WEIGHT_TYPE, bool FEW>
DEVICE void multiply_piece(
    const Work& work, int n, const Piece<WEIGHT_TYPE, FEW>& piece, const WideActivations<WEIGHT_TYPE, FEW>& x,
    float (&y)[Packing<WEIGHT_TYPE, FEW>::N_SLOTS][4]
) {
    using P = Packing<WEIGHT_TYPE, FEW>;
    const bool is_second = lane_of(work).q >= 2;
    UNROLL
    for (int first = 0; first < P::N_SUMS; first += P::AT_ONCE) {
        float c[P::AT_ONCE][P::N_CHAINS][4];
        UNROLL
        for (int i = 0; i < P::AT_ONCE * P::N_CHAINS * 4; i++) {
            const int sum = i / 4 / P::N_CHAINS;
            c[sum][i / 4 % P::N_CHAINS][i % 4] = has_minimum(WEIGHT_TYPE) ? 0.0f : x.start[first + sum][i % 4];
        }
        UNROLL
        for (int i = 0; i < P::AT_ONCE * P::TILES_A_SUM; i++) {
            const int chain = i % P::N_CHAINS, sum = i / P::N_CHAINS % P::AT_ONCE, at = i / P::N_CHAINS / P::AT_ONCE;
            const int t = (first + sum) * P::TILES_A_SUM + chain * P::CHAIN + at;
            if (!WHOLE && t >= n) continue;
            multiply_as<ACTIVATION_BF16>(c[sum][chain], weights_as_taken(wide_fragment(piece.quants, t)), x.b[t][0], x.b[t][1]);
        }
        UNROLL
        for (int i = 0; i < P::AT_ONCE * 4; i++) {
            const int sum = first + i / 4, k = i % 4;
            const Scales scales = scales_from<WEIGHT_TYPE>(piece.scales[sum]);
            float& to = y[FEW ? 0 : sum % 4][k];
            to = fmaf(scales.scale[k / 2], own_sum<WEIGHT_TYPE>(c[i / 4], k, is_second), to);
            if (has_minimum(WEIGHT_TYPE)) to = fmaf(scales.minimum[k / 2], x.start[sum][k], to);
        }
    }
}

// --- int8 activations ---

template <int WEIGHT_TYPE, bool FEW>
struct NarrowActivations {
    using P = Packing<WEIGHT_TYPE, FEW>;
    u32 b[P::PER];              // four bytes of a column tile, in the order of the weights' bytes
    int start[P::N_SUMS][4];    // SIX: what the offset subtracts
    float step[P::N_SUMS][2];   // the step of the activations, for the rows of c[0] and c[1]
    float less[P::N_SUMS][2];   // the factor of the minimum
};

template <bool WHOLE, int WEIGHT_TYPE, bool FEW>
DEVICE void prepare_activations(const Work& work, int chunk, int n, NarrowActivations<WEIGHT_TYPE, FEW>& out) {
    using P = Packing<WEIGHT_TYPE, FEW>;
    const Lane lane = lane_of(work);
    const int own = lane.g / 2, column = first_column(work, WEIGHT_TYPE, chunk, n);
    const u8* const x = (const u8*)row_of_lane<FEW>(work) + column + 2 * lane.q;
    const u32 least = WEIGHT_TYPE == WEIGHT_SIX ? 0xE0E0E0E0u : 0xFFFFFFFFu;  // less 32, less 1
    const uint4 less = {least, least, least, least};
    UNROLL
    for (int i = 0; i < P::N_SUMS; i++) {
        const int group = group_at<FEW>(i, own);
        const bool there = WHOLE || group * P::TILES < n;
        u32 bytes[2] = {0, 0};
        UNROLL
        for (int t = 0; t < P::TILES; t++) {
            const u8* const two = x + (group * P::TILES + t) * 16;
            bytes[t] = there ? permute_bytes(*(const u16*)two, *(const u16*)(two + 8), 0x5140) : 0;
            UNROLL
            for (int slot = 0; slot < (FEW ? 4 : 1); slot++) {
                out.b[(i * (FEW ? 4 : 1) + slot) * P::TILES + t] = !FEW || slot == own ? bytes[t] : 0;
            }
        }
        UNROLL
        for (int k = 0; k < 4; k++) out.start[i][k] = 0;
        if (WEIGHT_TYPE != WEIGHT_EIGHT) multiply_s8(out.start[i], less, bytes[0], bytes[1]);  // all slots at once
    }
    UNROLL
    for (int i = 0; i < P::N_SUMS; i++) {
        const int group = group_at<FEW>(i, lane.q);
        UNROLL
        for (int k = 0; k < 2; k++) {
            const u8* const row = (const u8*)row_of(work, FEW ? k : 2 * lane.q + k);
            const int at = (column + group * P::TILES * 16) / 32;
            out.step[i][k] = WHOLE || group * P::TILES < n ? *(const float*)(row + work.width + at * 4) : 0.0f;
            out.less[i][k] = (float)out.start[i][k] * out.step[i][k];
        }
    }
}

template <bool WHOLE, int WEIGHT_TYPE, bool FEW>
DEVICE void multiply_piece(
    const Work&, int n, const Piece<WEIGHT_TYPE, FEW>& piece, const NarrowActivations<WEIGHT_TYPE, FEW>& x,
    float (&y)[Packing<WEIGHT_TYPE, FEW>::N_SLOTS][4]
) {
    using P = Packing<WEIGHT_TYPE, FEW>;
    constexpr int PRODUCTS = (P::TILES_A_SUM + 1) / 2;  // of a sum: an instruction takes two tiles
    UNROLL
    for (int first = 0; first < P::N_SUMS; first += P::AT_ONCE) {
        int c[P::AT_ONCE][4];
        UNROLL
        for (int i = 0; i < P::AT_ONCE * 4; i++) c[i / 4][i % 4] = WEIGHT_TYPE == WEIGHT_SIX ? x.start[first + i / 4][i % 4] : 0;
        UNROLL
        for (int i = 0; i < P::AT_ONCE * PRODUCTS; i++) {
            const int sum = i % P::AT_ONCE, own = (first + sum) * P::TILES_A_SUM + i / P::AT_ONCE * 2, t = own / 2 * 2;
            if (!WHOLE && t >= n) continue;
            const bool both = P::TILES_A_SUM > 1;  // else one of the two tiles is another sum's: zero
            const u32 b0 = both || t == own ? x.b[t] : 0, b1 = both || t < own ? x.b[t + 1] : 0;
            multiply_s8(c[sum], narrow_fragment(piece.quants, t), b0, b1);
        }
        UNROLL
        for (int i = 0; i < P::AT_ONCE * 4; i++) {
            const int sum = first + i / 4, k = i % 4;
            const Scales scales = scales_from<WEIGHT_TYPE>(piece.scales[sum]);
            float& to = y[FEW ? 0 : sum % 4][k];
            to = fmaf(scales.scale[k / 2], (float)c[i / 4][k] * x.step[sum][k % 2], to);
            if (has_minimum(WEIGHT_TYPE)) to = fmaf(scales.minimum[k / 2], x.less[sum][k % 2], to);
        }
    }
}

// --- the sum of a piece, to those of the chunks before it ---

// The factor of a sum: a power of two, so nothing is rounded.
template <int WEIGHT_TYPE>
DEVICE constexpr float unit_of(bool is_upper) {
    return !WIDE ? 1.0f : is_upper ? unit() / upper_rows(WEIGHT_TYPE) : unit();
}

template <int WEIGHT_TYPE, bool FEW>
DEVICE float* own_sums(const Work& work, Piece<WEIGHT_TYPE, FEW>&) {
    const Lane lane = lane_of(work);
    float* const sums = shared_here().sums + work.first_sum + work.warp * TILES_AT_ONCE * 16 * work.pitch;
    return sums + (FEW ? (lane.g + lane.q / 2 * 8) * 2 + lane.q % 2 : lane.g * work.pitch + lane.q * 2);
}

// Every lane has a quarter of four sums: rows g and g + 8 of the tile, rows 0 and 1 of the activations. It completes one
// of them. With one row, the values of row 1 are not computed.
template <int WEIGHT_TYPE, int ROWS>
DEVICE void add_sums(const Work& work, float* place, bool adds, const float (&y)[1][4]) {
    const int q = lane_of(work).q;
    const bool is_upper = q >= 2, is_odd = ROWS == 2 && q % 2 != 0;
    float half[2];
    UNROLL
    for (int k = 0; k < 2; k++) {
        if (k < ROWS) half[k] = (is_upper ? y[0][2 + k] : y[0][k]) + shuffle_xor(is_upper ? y[0][k] : y[0][2 + k], 2);
        else half[k] = half[0];
    }
    const float sum = (is_odd ? half[1] : half[0]) + shuffle_xor(is_odd ? half[0] : half[1], 1);
    *place = fmaf(sum, unit_of<WEIGHT_TYPE>(is_upper), adds ? *place : 0.0f);
}

// A lane has all of four sums: rows g and g + 8 of the tile, rows 2 q and 2 q + 1 of the activations.
template <int WEIGHT_TYPE, int ROWS>
DEVICE void add_sums(const Work& work, float* place, bool adds, const float (&y)[4][4]) {
    if (lane_of(work).q * 2 >= work.pitch) return;
    UNROLL
    for (int h = 0; h < 2; h++) {
        float2* const two = (float2*)(place + 8 * h * work.pitch);
        const float2 before = adds ? *two : float2{0.0f, 0.0f};
        float sum[2];
        UNROLL
        for (int k = 0; k < 2; k++) {
            sum[k] = (y[0][2 * h + k] + y[2][2 * h + k]) + (y[1][2 * h + k] + y[3][2 * h + k]);
        }
        *two = float2{fmaf(sum[0], unit_of<WEIGHT_TYPE>(h == 1), before.x), fmaf(sum[1], unit_of<WEIGHT_TYPE>(h == 1), before.y)};
    }
}

// --- a group of tiles, piece by piece ---

// What a weight type is multiplied with, the weights of a piece, and the partial sums of it that a lane has.
template <int WEIGHT_TYPE, bool FEW>
struct Operands {
#if WIDE
    using Activations = WideActivations<WEIGHT_TYPE, FEW>;
#else
    using Activations = NarrowActivations<WEIGHT_TYPE, FEW>;
#endif
    using Weights = Piece<WEIGHT_TYPE, FEW>;
    using Sums = float[Packing<WEIGHT_TYPE, FEW>::N_SLOTS][4];
};
template <>
struct Operands<WEIGHT_HALF, false> {
    using Activations = HalfActivations;
    using Weights = HalfPiece;
    using Sums = float[2][4];
};

// Chunks [chunk, end), of n column tiles each. The next piece comes out of the ring while the sum of one is added.
template <int WEIGHT_TYPE, int ROWS, bool WHOLE>
DEVICE void multiply_pieces(const Work& work, Place& place, int chunk, int end, int n) {
    constexpr bool FEW = WEIGHT_TYPE != WEIGHT_HALF && ROWS <= FEW_ROWS;
    using Of = Operands<WEIGHT_TYPE, FEW>;
    int n_left = (end - chunk) * work.n_tiles;
    if (n_left <= 0) return;
    typename Of::Activations x;
    typename Of::Weights piece;
    float* const sums = own_sums(work, piece);
    take_piece<WHOLE>(work, place, n, piece);
    NOT_UNROLLED
    for (; chunk < end; chunk++) {
        prepare_activations<WHOLE>(work, chunk, n, x);
        NOT_UNROLLED
        for (int tile = 0; tile < work.n_tiles; tile++) {
            typename Of::Sums y = {};
            multiply_piece<WHOLE>(work, n, piece, x, y);
            if (--n_left > 0) take_piece<WHOLE>(work, place, n, piece);
            add_sums<WEIGHT_TYPE, ROWS>(work, sums + tile * 16 * (FEW ? 2 : work.pitch), work.adds || chunk > work.chunk, y);
        }
    }
}

// ROWS: one, FEW_ROWS, or as many as there may be.
template <int WEIGHT_TYPE, int ROWS>
DEVICE Place chunks_of(const Work& work) {
    constexpr int PER = tiles_a_chunk(WEIGHT_TYPE);
    Place place = work.place;
    const int end_whole = has_rest(WEIGHT_TYPE) ? min(work.end_chunk, work.of_matrix / PER) : work.end_chunk;
    multiply_pieces<WEIGHT_TYPE, ROWS, true>(work, place, work.chunk, end_whole, PER);
    if constexpr (has_rest(WEIGHT_TYPE)) {
        const int first = end_whole > work.chunk ? end_whole : work.chunk;
        multiply_pieces<WEIGHT_TYPE, ROWS, false>(work, place, first, work.end_chunk, work.of_matrix % PER);
    }
    return place;
}

template <int WEIGHT_TYPE>
DEVICE Place packed_chunks_of(const Work& work) {
    if (MAX_ROWS == 1 || work.n_rows == 1) return chunks_of<WEIGHT_TYPE, 1>(work);
    if (MAX_ROWS <= FEW_ROWS || work.n_rows <= FEW_ROWS) return chunks_of<WEIGHT_TYPE, FEW_ROWS>(work);
    if constexpr (MAX_ROWS > FEW_ROWS) return chunks_of<WEIGHT_TYPE, MAX_ROWS>(work);
    else return work.place;
}
