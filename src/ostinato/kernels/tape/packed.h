// What a warp multiplies where weights are packed.
//
// They have a scale for each group of 32 (or 16) columns, by which every sum of a group must be multiplied: with eight
// rows of activations that is as much work as the rest. With one or two rows (`FEW`), three quarters of the tensor
// core's columns are free: there the groups of a *unit* of four lie side by side, each with its own activations and
// zeros for the others', and one multiplication serves four groups. Either way the sum of a row is the same to the bit:
// four partial sums, of every fourth group each, and adding zeros changes nothing. Bound by the instructions that
// unpack, where the bits are few.
#pragma once
#include "tiles.h"

#define FEW_ROWS 2

// --- packed weights: what all of them share ---

// Groups of a whole chunk, in units of four. FEW: lane (g, q) has activations of group g / 2 of every unit, row g % 2,
// and sums of group q. Else it has activations of row g, and sums of every group.
template <int KIND, bool FEW>
struct Packing {
    static constexpr int PER = tiles_a_chunk(KIND), TILES = tiles_a_group(KIND), N_GROUPS = PER / TILES;
    static constexpr int N_UNITS = N_GROUPS / 4;
    static constexpr int N_STARTS = FEW ? 2 * N_UNITS : N_GROUPS;  // accumulators: FEW: one for each two groups
    static constexpr int N_SLOTS = FEW ? 1 : 4;                    // partial sums that a lane has
    static constexpr int N_SCALED = FEW ? N_UNITS : N_GROUPS;      // groups whose sums a lane has
};

template <int KIND, bool FEW>
struct PartialSums {
    float of[TILES_AT_ONCE][Packing<KIND, FEW>::N_SLOTS][4];
};

DEVICE const u16* row_of_lane(const Work& work, bool few) {
    const int g = work.lane / 4;
    return row_of(work, few ? g % 2 : g);
}

// --- packed weights, wide activations ---

template <int KIND, bool FEW>
struct WideActivations {
    using P = Packing<KIND, FEW>;
    u32 b[P::PER][2];
    float start[P::N_STARTS][4];  // what the offset takes away; of kinds with a minimum: what that is multiplied by
};

// Less the offset for all 16 rows and all columns of a tile, as weights lie; or less one.
template <int KIND>
DEVICE uint4 less_fragment() {
    constexpr u32 least = has_minimum(KIND) ? 1 : offset_of(KIND);
    constexpr u32 most = has_minimum(KIND) ? 1 : offset_of(KIND) * upper_rows(KIND);
    constexpr u32 lower = 0x80008000u | least << 16 | least, upper = 0x80008000u | most << 16 | most;
    return weights_as_taken(uint4{lower, upper, lower, upper});
}

template <int KIND, bool FEW, bool WHOLE>
DEVICE void prepare_wide(const Work& work, int chunk, int n, WideActivations<KIND, FEW>& out) {
    using P = Packing<KIND, FEW>;
    const u16* const x = row_of_lane(work, FEW) + first_column(work, KIND, chunk, n) + work.lane % 4 * 2;
    const int own = work.lane / 8;
    UNROLL
    for (int i = 0; i < (FEW ? P::N_UNITS : P::N_GROUPS); i++) {
        const int group = FEW ? 4 * i + own : i;
        const bool there = WHOLE || group * P::TILES < n;
        UNROLL
        for (int t = 0; t < P::TILES; t++) {
            UNROLL
            for (int h = 0; h < 2; h++) {
                const u32 pair = there ? *(const u32*)(x + (group * P::TILES + t) * 16 + 8 * h) : 0;
                if (!FEW) out.b[i * P::TILES + t][h] = lifted(pair, true);
                UNROLL
                for (int slot = 0; slot < 4 && FEW; slot++) {
                    out.b[(4 * i + slot) * P::TILES + t][h] = lifted(pair, slot == own);
                }
            }
        }
    }
    const uint4 less = less_fragment<KIND>();
    UNROLL
    for (int s = 0; s < P::N_STARTS; s++) {
        UNROLL
        for (int k = 0; k < 4; k++) out.start[s][k] = 0.0f;
        constexpr int tiles = P::PER / P::N_STARTS;
        UNROLL
        for (int t = s * tiles; t < (s + 1) * tiles; t++) {
            if (WHOLE || t < n) multiply_wide(out.start[s], less, out.b[t][0], out.b[t][1]);
        }
    }
    UNROLL
    for (int i = 0; i < P::N_UNITS && FEW && has_minimum(KIND); i++) {  // one of the two is zero
        UNROLL
        for (int k = 0; k < 2; k++) out.start[2 * i][k] += out.start[(2 * i + 1) % P::N_STARTS][k];
    }
}

template <int KIND, bool FEW, bool WHOLE>
DEVICE void multiply_packed(
    const Work& work, const char* chunk, int n, const WideActivations<KIND, FEW>& x,
    float y[Packing<KIND, FEW>::N_SLOTS][4]
) {
    using P = Packing<KIND, FEW>;
    const int g = work.lane / 4, q = work.lane % 4;
    Quants<KIND> quants;
    read_quants<KIND, WHOLE>(chunk, work.warp, work.lane, n, quants);
    UNROLL
    for (int i = 0; i < P::N_SCALED; i++) {
        if (!WHOLE && (FEW ? 4 * i : i) * P::TILES >= n) continue;
        constexpr int sums = P::N_STARTS / P::N_SCALED, tiles = P::PER / P::N_STARTS;
        float c[2][4];
        UNROLL
        for (int s = 0; s < sums; s++) {
            UNROLL
            for (int k = 0; k < 4; k++) c[s][k] = has_minimum(KIND) ? 0.0f : x.start[i * sums + s][k];
            UNROLL
            for (int t = (i * sums + s) * tiles; t < (i * sums + s + 1) * tiles; t++) {
                if (!WHOLE && t >= n) continue;
                multiply_wide(c[s], weights_as_taken(wide_fragment(quants, t)), x.b[t][0], x.b[t][1]);
            }
        }
        const int group = FEW ? 4 * i + q : i;
        const Scales scales = read_scales<KIND>(chunk, work.warp, g, n, group, WHOLE || group * P::TILES < n);
        UNROLL
        for (int k = 0; k < 4; k++) {
            float& to = y[FEW ? 0 : i % 4][k];
            to = fmaf(scales.scale[k / 2], FEW ? c[0][k] + c[1][k] : c[0][k], to);  // one of the two is zero
            if (!has_minimum(KIND)) continue;
            to = fmaf(scales.minimum[k / 2] * (k < 2 ? 1 : upper_rows(KIND)), x.start[i * sums][k % 2], to);
        }
    }
}

// --- packed weights, int8 activations ---

template <int KIND, bool FEW>
struct NarrowActivations {
    using P = Packing<KIND, FEW>;
    u32 b[P::PER];                // four bytes of a column tile, in the order of the weights' bytes
    int start[P::N_STARTS][4];    // SIX: what the offset takes away
    float step[P::N_SCALED][2];   // what a step is worth, for the rows of c[0] and c[1]
    float less[P::N_SCALED][2];   // what a minimum is multiplied by
};

template <int KIND, bool FEW, bool WHOLE>
DEVICE void prepare_narrow(const Work& work, int chunk, int n, NarrowActivations<KIND, FEW>& out) {
    using P = Packing<KIND, FEW>;
    const int q = work.lane % 4, own = work.lane / 8, column = first_column(work, KIND, chunk, n);
    const u8* const x = (const u8*)row_of_lane(work, FEW) + column + 2 * q;
    UNROLL
    for (int i = 0; i < (FEW ? P::N_UNITS : P::N_GROUPS); i++) {
        const int group = FEW ? 4 * i + own : i;
        const bool there = WHOLE || group * P::TILES < n;
        UNROLL
        for (int t = 0; t < P::TILES; t++) {
            const u8* const two = x + (group * P::TILES + t) * 16;
            const u32 bytes = there ? permute_bytes(*(const u16*)two, *(const u16*)(two + 8), 0x5140) : 0;
            if (!FEW) out.b[i * P::TILES + t] = bytes;
            UNROLL
            for (int slot = 0; slot < 4 && FEW; slot++) {
                out.b[(4 * i + slot) * P::TILES + t] = slot == own ? bytes : 0;
            }
        }
    }
    const u32 least = KIND == KIND_SIX ? 0xE0E0E0E0u : 0xFFFFFFFFu;  // less 32, less 1
    const uint4 all_less = {least, least, least, least};
    constexpr int tiles = P::PER / P::N_STARTS;
    UNROLL
    for (int s = 0; s < P::N_STARTS; s++) {
        UNROLL
        for (int k = 0; k < 4; k++) out.start[s][k] = 0;
        UNROLL
        for (int t = s * tiles; t < (s + 1) * tiles && KIND != KIND_EIGHT; t += tiles == 1 ? 1 : 2) {
            if (!WHOLE && t >= n) continue;
            multiply_s8(out.start[s], all_less, out.b[t], tiles == 1 ? 0 : out.b[t + 1]);
        }
    }
    UNROLL
    for (int i = 0; i < P::N_SCALED; i++) {
        const int group = FEW ? 4 * i + q : i;
        UNROLL
        for (int k = 0; k < 2; k++) {
            const u8* const row = (const u8*)row_of(work, FEW ? k : 2 * q + k);
            const int at = (column + group * P::TILES * 16) / 32;
            out.step[i][k] = WHOLE || group * P::TILES < n ? *(const float*)(row + work.width + at * 4) : 0.0f;
            const int sum = FEW ? out.start[2 * i][k] + out.start[2 * i + 1][k] : out.start[i][k];
            out.less[i][k] = (float)sum * out.step[i][k];
        }
    }
}

template <int KIND, bool FEW, bool WHOLE>
DEVICE void multiply_packed(
    const Work& work, const char* chunk, int n, const NarrowActivations<KIND, FEW>& x,
    float y[Packing<KIND, FEW>::N_SLOTS][4]
) {
    using P = Packing<KIND, FEW>;
    const int g = work.lane / 4, q = work.lane % 4;
    Quants<KIND> quants;
    read_quants<KIND, WHOLE>(chunk, work.warp, work.lane, n, quants);
    UNROLL
    for (int i = 0; i < P::N_SCALED; i++) {
        if (!WHOLE && (FEW ? 4 * i : i) * P::TILES >= n) continue;
        constexpr int sums = P::N_STARTS / P::N_SCALED, tiles = P::PER / P::N_STARTS;
        int c[2][4];
        UNROLL
        for (int s = 0; s < sums; s++) {
            const int first = (i * sums + s) * tiles;
            UNROLL
            for (int k = 0; k < 4; k++) c[s][k] = KIND == KIND_SIX ? x.start[i * sums + s][k] : 0;
            if constexpr (tiles == 1) {  // half of what the instruction takes: the other tile counts for nothing
                const bool even = first % 2 == 0;
                multiply_s8(c[s], narrow_fragment(quants, first / 2 * 2), even ? x.b[first] : 0, even ? 0 : x.b[first]);
            } else {
                UNROLL
                for (int t = first; t < first + tiles; t += 2) {
                    if (WHOLE || t < n) multiply_s8(c[s], narrow_fragment(quants, t), x.b[t], x.b[t + 1]);
                }
            }
        }
        const int group = FEW ? 4 * i + q : i;
        const Scales scales = read_scales<KIND>(chunk, work.warp, g, n, group, WHOLE || group * P::TILES < n);
        UNROLL
        for (int k = 0; k < 4; k++) {
            float& to = y[FEW ? 0 : i % 4][k];
            const int sum = FEW ? c[0][k] + c[1][k] : c[0][k];
            to = fmaf(scales.scale[k / 2], (float)sum * x.step[i][k % 2], to);
            if (has_minimum(KIND)) to = fmaf(scales.minimum[k / 2], x.less[i][k % 2], to);
        }
    }
}

// --- packed weights: a group of tiles, chunk by chunk ---

template <int KIND, bool FEW, bool WHOLE>
DEVICE void packed_chunk(const Work& work, Place& place, int chunk, int n, PartialSums<KIND, FEW>& y) {
#if WIDE
    WideActivations<KIND, FEW> x;
    prepare_wide<KIND, FEW, WHOLE>(work, chunk, n, x);
#else
    NarrowActivations<KIND, FEW> x;
    prepare_narrow<KIND, FEW, WHOLE>(work, chunk, n, x);
#endif
    UNROLL
    for (int tile = 0; tile < TILES_AT_ONCE; tile++) {
        if (tile >= work.n_tiles) continue;
        await_chunk(shared_here(), work.state, place);
        multiply_packed<KIND, FEW, WHOLE>(work, stage_at(place), n, x, y.of[tile]);
        free_chunk(shared_here(), work.lane, place);
    }
}

template <int KIND, bool FEW>
APART Place packed_chunks(Work work) {
    using P = Packing<KIND, FEW>;
    PartialSums<KIND, FEW> y = {};
    Place place = work.place;
    NOT_UNROLLED
    for (int chunk = work.chunk; chunk < work.end_chunk; chunk++) {
        const int n = tiles_in_chunk(KIND, work.of_matrix, chunk);
        if (!has_rest(KIND) || n == P::PER) packed_chunk<KIND, FEW, true>(work, place, chunk, P::PER, y);
        else packed_chunk<KIND, FEW, false>(work, place, chunk, n, y);
    }
    UNROLL
    for (int tile = 0; tile < TILES_AT_ONCE; tile++) {
        if (tile >= work.n_tiles) continue;
        float c[4];
        UNROLL
        for (int k = 0; k < 4; k++) {
            c[k] = y.of[tile][0][k];
            if constexpr (!FEW) c[k] = (c[k] + y.of[tile][1][k]) + (y.of[tile][2][k] + y.of[tile][3][k]);
            if (WIDE) c[k] *= k < 2 ? unit() : unit() / upper_rows(KIND);  // powers of two: nothing is rounded
        }
        if (FEW) leave_few_sums(work, tile, c);
        else leave_sums(work, tile, c);
    }
    return place;
}

template <int KIND>
DEVICE Place packed_chunks_of(const Work& work) {
    if (MAX_ROWS <= FEW_ROWS || work.n_rows <= FEW_ROWS) return packed_chunks<KIND, true>(work);
    if constexpr (MAX_ROWS > FEW_ROWS) return packed_chunks<KIND, false>(work);
    else return work.place;
}
