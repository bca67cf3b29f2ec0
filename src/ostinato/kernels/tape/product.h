// Products: the block's tiles of a matrix, as they come through the ring, times the rows of activations.
//
// Tiles are multiplied TILES_AT_ONCE together: of a chunk's columns a player keeps the activations in registers while
// the same columns of each of those tiles pass. Every player has its own columns; their sums meet in shared memory, and
// are added in the order of the players, spread over all threads. Two sets of sums take turns, so that one sync is
// enough for a group of tiles; meanwhile the ring fills.
//
// Packed weights have a scale for each group of 32 (or 16) columns, by which every sum of a group must be multiplied:
// with eight rows of activations that is as much work as the rest. With one or two rows (`FEW`), three quarters of the
// tensor core's columns are free: there the groups of a *unit* of four lie side by side, each with its own activations
// and zeros for the others', and one multiplication serves four groups. Either way the sum of a row is the same to the
// bit: four partial sums, of every fourth group each, and adding zeros changes nothing.
//
// Twin: linear_torch over what pack.py says the weights are. The order in which a row's products are added follows from
// the shape alone: player by player, in each four sums (HALF: two), chunk by chunk, and slab by slab, where a slab is
// what activations hold at MAX_ROWS rows, however many there are. Bound by memory, packed weights with few bits by
// the instructions that unpack them.
#pragma once
#include "fragments.h"
#include "handoff.h"

#define FEW_ROWS 2

// Columns of pairs that are multiplied between two additions to the sums: whole chunks of every kind.
#define SLAB_UNIT (256 * N_PLAYERS)
#define SLAB_COLUMNS ((ACTIVATION_BYTES / (2 * MAX_ROWS) - ROW_PADDING) / SLAB_UNIT * SLAB_UNIT)
static_assert(SLAB_COLUMNS > 0, "MAX_ROWS rows of one chunk's activations must fit");
static_assert(MAX_ROWS * 2 * (NORMED_COLUMNS + ROW_PADDING) <= ACTIVATION_BYTES, "MAX_ROWS normed rows must fit");

// What a warp multiplies between two looks at anything else. It has no pointers to shared memory: those that are made
// from shared_memory() at hand are known to lie there, and cost half as much.
struct Work {
    State* state;
    Place place;
    int warp, lane;
    int width, begin, n_rows;         // activations: [rows][width + ROW_PADDING], from the matrix's column `begin` on
    int of_matrix, chunk, end_chunk;  // column tiles of each player; which chunks
    int n_tiles;                      // at most TILES_AT_ONCE
    int first_sum, pitch;             // where its sums begin, and how many rows they have: 2, 4 or 8
    bool adds;                        // to sums that are there already
};

DEVICE Shared& shared_here() { return *(Shared*)shared_memory(); }
DEVICE const char* stage_at(const Place& place) { return shared_memory() + RING_AT + place.stage * STAGE_BYTES; }
DEVICE const u16* activations_here() { return (const u16*)(shared_memory() + RING_AT + STAGES * STAGE_BYTES); }

DEVICE int first_column(const Work& work, int kind, int chunk, int n) {
    return (chunk * tiles_a_chunk(kind) * N_PLAYERS + work.warp * n) * 16 - work.begin;
}
DEVICE const u16* row_of(const Work& work, int row) {
    return activations_here() + (row < work.n_rows ? row : 0) * (work.width + ROW_PADDING);
}

// Whether some matrix of this model has a last chunk that is not whole.
DEVICE constexpr bool leaves_rest(int kind, int columns) {
    const int unit = (kind == KIND_HALF ? 16 : 32) * N_PLAYERS;
    return (columns + unit - 1) / unit * unit / (16 * N_PLAYERS) % tiles_a_chunk(kind) != 0;
}
DEVICE constexpr bool has_rest(int kind) {
    return leaves_rest(kind, HIDDEN) || leaves_rest(kind, FF) || leaves_rest(kind, QUERY_COLUMNS);
}

// --- sums of one lane: rows g (c[0], c[1]) and g + 8 (c[2], c[3]) of a tile, two rows of activations each ---

DEVICE void leave_two(const Work& work, float* place, float first, float second) {
    float2* const both = (float2*)place;
    const float2 before = work.adds ? *both : float2{0.0f, 0.0f};
    *both = work.adds ? float2{before.x + first, before.y + second} : float2{first, second};
}
// Rows 2 q and 2 q + 1.
DEVICE void leave_sums(const Work& work, int tile, const float c[4]) {
    const int g = work.lane / 4, row = work.lane % 4 * 2;
    if (row >= work.pitch) return;
    const int r = (work.warp * TILES_AT_ONCE + tile) * 16 + g;
    float* const place = shared_here().sums + work.first_sum + r * work.pitch + row;
    leave_two(work, place, c[0], c[1]);
    leave_two(work, place + 8 * work.pitch, c[2], c[3]);
}
// Rows 0 and 1, of which every lane has one of four partial sums; afterwards each lane has one of the four results.
DEVICE void leave_few_sums(const Work& work, int tile, float c[4]) {
    UNROLL
    for (int k = 0; k < 4; k++) {
        c[k] += shuffle_xor(c[k], 1);
        c[k] += shuffle_xor(c[k], 2);
    }
    const int g = work.lane / 4, q = work.lane % 4;
    const float mine = q < 2 ? (q == 0 ? c[0] : c[1]) : (q == 2 ? c[2] : c[3]);
    const int r = (work.warp * TILES_AT_ONCE + tile) * 16 + g + q / 2 * 8;
    float* const place = shared_here().sums + work.first_sum + r * 2 + q % 2;
    *place = work.adds ? *place + mine : mine;
}

// --- HALF: weights as they are ---

struct HalfActivations {
    u32 b[tiles_a_chunk(KIND_HALF)][2];
    float step[tiles_a_chunk(KIND_HALF)][2];  // int8: what a step is worth, for the rows of c[0] and c[1]
};

template <bool WHOLE>
DEVICE void prepare_half(const Work& work, int chunk, int n, HalfActivations& out) {
    const int g = work.lane / 4, q = work.lane % 4, column = first_column(work, KIND_HALF, chunk, n);
    const u16* const row = row_of(work, g);
    UNROLL
    for (int t = 0; t < tiles_a_chunk(KIND_HALF); t++) {
        if (!WHOLE && t >= n) continue;
        const int at = column + 16 * t + 2 * q;
        UNROLL
        for (int h = 0; h < 2; h++) {
            if (WIDE) {
                out.b[t][h] = *(const u32*)(row + at + 8 * h);
                continue;
            }
            const u16 two = *(const u16*)((const u8*)row + at + 8 * h);
            out.b[t][h] = pair_of((float)(signed char)two, (float)(signed char)(two >> 8));
            const u8* const scaled = (const u8*)row_of(work, 2 * q + h);
            out.step[t][h] = *(const float*)(scaled + work.width + (column + 16 * t) / 32 * 4);
        }
    }
}

template <bool WHOLE>
DEVICE void multiply_half(const Work& work, const char* chunk, int n, const HalfActivations& x, float c[2][4]) {
    const uint4* const quants = (const uint4*)(chunk + work.warp * quant_bytes(KIND_HALF, n)) + work.lane;
    UNROLL
    for (int t = 0; t < tiles_a_chunk(KIND_HALF); t++) {
        if (!WHOLE && t >= n) continue;
        const uint4 a = quants[t * 32];
        if (WIDE) {
            multiply_wide(c[t % 2], a, x.b[t][0], x.b[t][1]);
            continue;
        }
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_wide(sum, a, x.b[t][0], x.b[t][1]);
        UNROLL
        for (int k = 0; k < 4; k++) c[t % 2][k] = fmaf(sum[k], x.step[t][k % 2], c[t % 2][k]);
    }
}

template <bool WHOLE>
DEVICE void half_chunk(const Work& work, Place& place, int chunk, int n, float c[TILES_AT_ONCE][2][4]) {
    HalfActivations x;
    prepare_half<WHOLE>(work, chunk, n, x);
    UNROLL
    for (int tile = 0; tile < TILES_AT_ONCE; tile++) {
        if (tile >= work.n_tiles) continue;
        await_chunk(shared_here(), work.state, place);
        multiply_half<WHOLE>(work, stage_at(place), n, x, c[tile]);
        free_chunk(shared_here(), work.lane, place);
    }
}

APART Place half_chunks(Work work) {
    float c[TILES_AT_ONCE][2][4] = {};
    Place place = work.place;
    NOT_UNROLLED
    for (int chunk = work.chunk; chunk < work.end_chunk; chunk++) {
        const int n = tiles_in_chunk(KIND_HALF, work.of_matrix, chunk);
        if (!has_rest(KIND_HALF) || n == tiles_a_chunk(KIND_HALF)) {
            half_chunk<true>(work, place, chunk, tiles_a_chunk(KIND_HALF), c);
        } else half_chunk<false>(work, place, chunk, n, c);
    }
    UNROLL
    for (int tile = 0; tile < TILES_AT_ONCE; tile++) {
        if (tile >= work.n_tiles) continue;
        UNROLL
        for (int k = 0; k < 4; k++) c[tile][0][k] += c[tile][1][k];
        leave_sums(work, tile, c[tile][0]);
    }
    return place;
}

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

// Kinds that the model has not are not compiled.
DEVICE Place multiply_chunks(int kind, const Work& work) {
    if constexpr (HAS_KIND_HALF) {
        if (kind == KIND_HALF) return half_chunks(work);
    }
    if constexpr (HAS_KIND_FOUR) {
        if (kind == KIND_FOUR) return packed_chunks_of<KIND_FOUR>(work);
    }
    if constexpr (HAS_KIND_FIVE) {
        if (kind == KIND_FIVE) return packed_chunks_of<KIND_FIVE>(work);
    }
    if constexpr (HAS_KIND_SIX) {
        if (kind == KIND_SIX) return packed_chunks_of<KIND_SIX>(work);
    }
    if constexpr (HAS_KIND_EIGHT) {
        if (kind == KIND_EIGHT) return packed_chunks_of<KIND_EIGHT>(work);
    }
    return work.place;
}

// --- a block's part of a product ---

// The sums of a group of tiles.
struct Sums {
    const float* of_players;
    int pitch;
    MEMBER float at(int tile, int r, int row) const {
        const float* const place = of_players + (tile * 16 + r) * pitch + row;
        float sum = 0.0f;
        UNROLL
        for (int player = 0; player < N_PLAYERS; player++) sum += place[player * TILES_AT_ONCE * 16 * pitch];
        return sum;
    }
};

// A step without a row still takes its weights off the ring.
DEVICE void pass_chunks(Player& p, const Tape& tape, const Segment& segment, int n_here) {
    const int of_matrix = column_tiles(segment), per = tiles_a_chunk(segment.kind);
    Place place = {p.stage, p.phase};
    for (int i = 0; i < (of_matrix + per - 1) / per * n_here; i++) {
        await_chunk(*p.shared, tape.state, place);
        free_chunk(*p.shared, p.lane, place);
    }
    p.stage = place.stage;
    p.phase = place.phase;
}

// fetch(work, is the first group, begin, columns): sees to it that these columns lie in activations, and tells the work
// how wide they lie and which comes first. finish(first tile, number of tiles, sums): by all players, after a sync.
template <class Fetch, class Finish>
DEVICE void multiply_here(
    Player& p, const Tape& tape, const Segment& segment, int n_rows, int slab_columns, Fetch fetch, Finish finish
) {
    const int n_here = tiles_here(segment);
    if (n_rows == 0) pass_chunks(p, tape, segment, n_here);
    if (n_here == 0 || n_rows == 0) return;
    const int pitch = n_rows <= 2 ? 2 : n_rows <= 4 ? 4 : 8;
    const bool takes_turns = 2 * pitch <= SUM_ROWS;
    const int chunk_columns = tiles_a_chunk(segment.kind) * 16 * N_PLAYERS;
    Work work;
    work.state = tape.state;
    work.warp = p.warp;
    work.lane = p.lane;
    work.n_rows = n_rows;
    work.of_matrix = column_tiles(segment);
    work.pitch = pitch;
    work.place = {p.stage, p.phase};
    NOT_UNROLLED
    for (int first = 0; first < n_here; first += TILES_AT_ONCE) {
        work.n_tiles = min(TILES_AT_ONCE, n_here - first);
        work.first_sum = takes_turns ? p.turn * N_PLAYERS * TILES_AT_ONCE * 16 * pitch : 0;
        NOT_UNROLLED
        for (int begin = 0; begin < segment.columns; begin += slab_columns) {
            const int columns = min(slab_columns, segment.columns - begin);
            fetch(work, first == 0, begin, columns);
            work.chunk = begin / chunk_columns;
            work.end_chunk = (begin + columns + chunk_columns - 1) / chunk_columns;
            work.adds = begin > 0;
            work.place = multiply_chunks(segment.kind, work);
        }
        sync_players();
        finish(first, work.n_tiles, Sums{p.shared->sums + work.first_sum, pitch});
        if (takes_turns) p.turn ^= 1;
        else sync_players();
    }
    p.stage = work.place.stage;
    p.phase = work.place.phase;
}

// Each value of a tile to done(tile, r, row, value), by a thread of its own.
template <class Done>
DEVICE void hand_on(const Player& p, const Segment& segment, int n_rows, int first, int n_tiles, Sums sums, Done done) {
    for (int i = p.thread; i < n_tiles * 16 * sums.pitch; i += N_PLAYER_THREADS) {
        const int row = i % sums.pitch, r = i / sums.pitch % 16, tile = i / sums.pitch / 16;
        if (row < n_rows) done(first_tile(segment) + (first + tile) * N_BLOCKS, r, row, sums.at(tile, r, row));
    }
}

// Activations that lie there whole, as receive_normed leaves them.
struct Whole {
    MEMBER void operator()(Work& work, bool, int, int) const {
        work.width = NORMED_COLUMNS;
        work.begin = 0;
    }
};

// y = W x for the block's tiles of W: done(tile, r, row, value) for each row r < 16 of a tile and each row of x.
template <class Done>
DEVICE void product(Player& p, const Tape& tape, const Segment& segment, int n_rows, Done done) {
    multiply_here(p, tape, segment, n_rows, segment.columns, Whole(), [&](int first, int n_tiles, Sums sums) {
        hand_on(p, segment, n_rows, first, n_tiles, sums, done);
    });
}

// Gate and up, whose rows stand eight and eight in a tile: done(unit, row, gate, up, gate, up) for each even unit and
// the next, since the two are handed on as a pair.
template <class Done>
DEVICE void product_of_units(Player& p, const Tape& tape, const Segment& segment, int n_rows, Done done) {
    multiply_here(p, tape, segment, n_rows, segment.columns, Whole(), [&](int first, int n_tiles, Sums sums) {
        const int n = n_tiles * 8 * sums.pitch;
        for (int i = p.thread; i - p.lane < n; i += N_PLAYER_THREADS) {  // by whole warps: neighbours meet
            const int row = i % sums.pitch, r = i / sums.pitch % 8, tile = i / sums.pitch / 8;
            const float gate = i < n ? sums.at(tile, r, row) : 0.0f, up = i < n ? sums.at(tile, r + 8, row) : 0.0f;
            const float next_gate = shuffle_xor(gate, sums.pitch), next_up = shuffle_xor(up, sums.pitch);
            if (i >= n || row >= n_rows || r % 2 != 0) continue;
            done((first_tile(segment) + (first + tile) * N_BLOCKS) * 8 + r, row, gate, up, next_gate, next_up);
        }
    });
}

// The same for activations that come as pairs: `hop` is that of row 0, n_pairs words a row. They are fetched at once
// where all rows have room, else slab by slab, again for each group of tiles.
template <class Done>
DEVICE void product_of_pairs(
    Player& p, const Tape& tape, const Segment& segment, const u64* hop, int n_pairs, int n_rows, Done done
) {
    const bool at_once = n_rows * 2 * (segment.columns + ROW_PADDING) <= ACTIVATION_BYTES;
    const int width = (segment.columns + 31) / 32 * 32;
    const auto fetch = [&](Work& work, bool is_first, int begin, int columns) {
        work.width = at_once ? width : (columns + 31) / 32 * 32;
        work.begin = at_once ? 0 : begin;
        if (at_once && (begin > 0 || !is_first)) return;
        if (begin > 0) sync_players();  // nobody reads the slab before any more
        receive_pairs(p, tape, hop, n_pairs, n_rows, work.begin, work.width);
    };
    multiply_here(p, tape, segment, n_rows, SLAB_COLUMNS, fetch, [&](int first, int n_tiles, Sums sums) {
        hand_on(p, segment, n_rows, first, n_tiles, sums, done);
    });
}
