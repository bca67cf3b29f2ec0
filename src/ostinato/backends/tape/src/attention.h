// Attention of one layer: each row's queries over its own pages, softmax(scale q k^T) v; its key and value appended.
//
// What a row sees is cut into at most SPLITS splits of one length, a multiple of LEAST_SPLIT that follows from the
// row's own position and the window. A split of one *group* is an *item*; items are partitioned among the blocks. A
// group is the query heads of one KV head or, where those are more than eight, the largest equal share of at most
// eight; each group reads the head's keys and values. Within an item each warp takes 16 positions at a time, its
// *tile*, and the warps' sums are added in warp order to a *part*, which goes to the warps that *merge* the parts of a
// head, in order too. So a row's bits do not depend on the other rows, nor on which block computes it. Twin:
// attend_torch of backends/torch/ops/attend.py.
//
// Tensor cores do both products, for all queries of a group at once: a lane's share of a key or a value is 16 bytes
// as they lie in memory, since the summed dimension may have any order as long as both operands have the same. The
// first product leaves scores in the layout that the second needs, and softmax weights enter it with twice the bits of
// a cached number, so that only keys, values and queries are rounded to that type.
//
// Bound by latency at short contexts, hence few instructions between the arrival of a query and the store of the part:
// everything that does not depend on this layer's product is in the step's attention plan, and keys and values of old
// positions are loaded before the queries arrive. Bound by reading keys and values at long ones: each warp has DEPTH
// tiles in flight, across items too.
#pragma once
#include "activation.h"
#include "attention_plan.h"
#include "handoff.h"

// --- how a warp holds a tile of keys and values ---

constexpr int CHUNKS = LINE_BYTES / 16;              // of a line as it is multiplied
constexpr int IN_CHUNK = 16 / KEPT_BYTES;
constexpr int TILE = 16;                             // positions
constexpr int STRIDE = TILE * N_COMPUTE_WARPS;             // positions that a block takes at once
constexpr int KEY_CHUNKS = CHUNKS / 4;               // of a lane, of each of its two positions
constexpr int VALUE_CHUNKS = (CHUNKS + 7) / 8;       // of a lane, of each of its four positions; of width 96 some idle
constexpr int SUM_TILES = VALUE_CHUNKS * IN_CHUNK / 2;
constexpr int HOLDS = CHUNKS <= 16 ? 1 : 0;          // 0: too large for registers, loaded when it is used
constexpr int DEPTH = CHUNKS <= 8 ? 2 : 1;           // tiles of a warp in flight: as many as registers hold
static_assert(CHUNKS % 4 == 0, "four lanes share a key");
static_assert(GROUP <= 8, "the queries of a group are the columns of one product");
static_assert(N_HEADS % GROUP == 0 && QUERY_GROUPS % N_KV_HEADS == 0, "a group has queries of one KV head");

// A chunk of a key or a value as it is kept, and where it is: numbers that are multiplied as they are, or with KEPT_Q8
// eight bytes and the scale that they share with three other chunks, widened when they are used.
#if KEPT_Q8
struct Kept {
    uint2 quants;
    u16 scale;
};
struct KeptStore {
    const char* quants;
    const u16* scales;
};
struct KeptPlace {
    KeptStore store;
    u32 chunk;
    MEMBER KeptPlace operator+(int n) const { return {store, chunk + n}; }
    MEMBER KeptPlace operator-(int n) const { return {store, chunk - n}; }
};
DEVICE KeptStore keys_in(const Cache& cache) { return {cache.keys, cache.key_scales}; }
DEVICE KeptStore values_in(const Cache& cache) { return {cache.values, cache.value_scales}; }
DEVICE KeptPlace chunk_at(KeptStore store, u32 chunk) { return {store, chunk}; }
DEVICE Kept load_kept(const KeptPlace& at) {
    return {load_fresh((const uint2*)at.store.quants + at.chunk), load_fresh(at.store.scales + at.chunk / 4)};
}
DEVICE uint4 widened(const Kept& kept) {
    const float scale = from_f16(kept.scale);
    u32 pairs[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        const u32 two = (i < 2 ? kept.quants.x : kept.quants.y) >> 16 * (i % 2);
        pairs[i] = pair_bf16((float)(signed char)two * scale, (float)(signed char)(two >> 8) * scale);
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
}
#else
using Kept = uint4;
using KeptStore = const char*;
using KeptPlace = const uint4*;
DEVICE KeptStore keys_in(const Cache& cache) { return cache.keys; }
DEVICE KeptStore values_in(const Cache& cache) { return cache.values; }
DEVICE KeptPlace chunk_at(KeptStore store, u32 chunk) { return (const uint4*)store + (u64)chunk; }
DEVICE Kept load_kept(KeptPlace at) { return load_fresh(at); }
DEVICE uint4& widened(Kept& kept) { return kept; }
#endif

struct Held {
    u32 line;  // of position lane % 16 of the tile: where it begins, in chunks
    Kept keys[2][HOLDS ? KEY_CHUNKS : 1];
    Kept values[4][HOLDS ? VALUE_CHUNKS : 1];
};

// --- shared memory of attention: the memory of the activations ---

constexpr int PART_WORDS = HEAD_WIDTH + 2;     // of a head in tape.parts: sums, the largest score, the total
constexpr int PART_STRIDE = HEAD_WIDTH + 8;    // of its sums in shared memory, so that lanes write to different banks
constexpr int PART_BYTES = N_COMPUTE_WARPS * GROUP * (PART_STRIDE + 2) * 4;
constexpr int PART_BUFFERS = ITEMS_AT_ONCE > 1 && PART_BYTES <= 20 * 1024 ? 2 : 1;
constexpr int PARTS_AT = ITEMS_AT_ONCE * LINES * LINE_BYTES;

#define ATTENTION_BYTES (PARTS_AT + PART_BUFFERS * PART_BYTES)
static_assert(ACTIVATION_BYTES >= ATTENTION_BYTES, "attention works where activations lie");

#define MASKED (-1e30f)

DEVICE char* room_here() { return shared_memory() + RING_AT + STAGES * STAGE_BYTES; }
DEVICE char* line_place(int i, int part) { return room_here() + (i * LINES + part) * LINE_BYTES; }

// The warps' parts of one item: sums [warp][member][PART_STRIDE], tops and totals [member][warp].
struct WarpParts {
    float *sums, *tops, *totals;
};
DEVICE WarpParts parts_here(int i) {
    float* const sums = (float*)(room_here() + PARTS_AT + i % PART_BUFFERS * PART_BYTES);
    float* const tops = sums + N_COMPUTE_WARPS * GROUP * PART_STRIDE;
    return {sums, tops, tops + N_COMPUTE_WARPS * GROUP};
}

// --- the attention plan of a step ---

struct Cut {
    int first, length, n_splits;
};
DEVICE Cut cut_of(int position, int window) {
    const int first = window ? max(position - (window - 1), 0) : 0, n_visible = position + 1 - first;
    const int length = (n_visible + LEAST_SPLIT * SPLITS - 1) / (LEAST_SPLIT * SPLITS) * LEAST_SPLIT;
    return {first, length, (n_visible + length - 1) / length};
}

DEVICE int kv_head_of(int group) { return group / GROUPS_A_KV_HEAD; }

// In chunks, which are few enough for 32 bits.
DEVICE u32 line_at(int page, int position, int head) {
    const u32 cell = (u32)page * PAGE_TOKENS(0) + position % PAGE_TOKENS(0);
    return (cell * N_KV_HEADS + head) * CHUNKS;
}

DEVICE void note_cos_sin(const ComputeThread& p, const Tape& tape, int n_rows, AttentionPlan& plan) {
    for (int i = p.thread; i < ROPE_KINDS * n_rows * ROPE_HALF; i += N_COMPUTE_THREADS) {
        const int kind = ROPE_KINDS > 1 ? i / ROPE_PAIRS / n_rows : 0;
        const int row = i / ROPE_PAIRS - kind * n_rows, pair = i % ROPE_PAIRS;
        const int slot_set = ROPE_SETS > 1 ? load_fresh(TABLE_rope_set(tape.view) + p.shared->slot[row]) : 0;
        const int set = kind * ROPE_SETS + slot_set;
        float sine, cosine;
        sincos_exact((float)p.shared->position[row] * tape.frequencies[set * ROPE_HALF + pair], sine, cosine);
        plan.cos_sin[kind * MAX_ROWS + row][pair] = float2{cosine * ROPE_AMPLITUDE, sine * ROPE_AMPLITUDE};
    }
    for (int i = p.thread; i < N_LAYERS; i += N_COMPUTE_THREADS) plan.caches[i] = tape.caches[i];
}

// The item of this number, and its pages, by a warp. Neighbouring blocks take the groups of the same positions, whose
// keys are the same or lie side by side in memory.
DEVICE void note_item(const ComputeThread& p, const Tape& tape, int number, int layer, AttentionPlan& plan, int i) {
    const int window = tape.windows[layer];
    int row = 0, within = number;
    Cut cut = cut_of(p.shared->position[0], window);
    while (within >= cut.n_splits * QUERY_GROUPS) {
        within -= cut.n_splits * QUERY_GROUPS;
        cut = cut_of(p.shared->position[++row], window);
    }
    const int position = p.shared->position[row], split = within / QUERY_GROUPS;
    const int begin = cut.first + split * cut.length, end = min(begin + cut.length, position + 1);
    const int* const table = PAGE_TABLE(tape.view, p.shared->slot[row], tape.groups[layer]);
    const int first_page = begin / PAGE_TOKENS(0), n_pages = (end - 1) / PAGE_TOKENS(0) + 1 - first_page;
    for (int k = p.lane; k < n_pages; k += 32) plan.pages[i][k] = load_fresh(table + first_page + k);
    if (p.lane > 0) return;
    const int group = within % QUERY_GROUPS, page = load_fresh(table + position / PAGE_TOKENS(0));
    const int is_last = split == cut.n_splits - 1;
    plan.items[i] = {row, group, split, begin, end, is_last, line_at(page, position, kv_head_of(group)), 0};
}

// The first layer after this one with another window.
DEVICE int next_window(const ComputeThread& p, const Tape& tape, int layer, int window) {
    for (int begin = layer + 1; begin < N_LAYERS; begin += 32) {
        const int at = begin + p.lane;
        const u32 differ = votes(at < N_LAYERS && tape.windows[at] != window);
        if (differ) return begin + lowest_bit(differ);
    }
    return N_LAYERS;
}

// Items number `first`, first + N_BLOCKS ... to the attention plan.
APART void make_attention_plan(ComputeThread p, const Tape& tape, int layer, int n_rows, int first) {
    AttentionPlan& plan = attention_plan_here();
    sync_compute_warps();  // all compute warps have read the previous plan
    const int window = tape.windows[layer];
    if (layer == 0) note_cos_sin(p, tape, n_rows, plan);
    int n_all = 0;
    for (int row = 0; row < n_rows; row++) {
        const int n_splits = cut_of(p.shared->position[row], window).n_splits;
        if (p.thread == row) plan.n_splits[row] = n_splits;
        n_all += n_splits * QUERY_GROUPS;
    }
    const int n_items = first < n_all ? min(ITEMS_AT_ONCE, (n_all - first + N_BLOCKS - 1) / N_BLOCKS) : 0;
    for (int i = p.warp; i < n_items; i += N_COMPUTE_WARPS) note_item(p, tape, first + i * N_BLOCKS, layer, plan, i);
    // Items that do not fit take the places of those before them.
    const int until = n_all > ITEMS_AT_ONCE * N_BLOCKS ? layer + 1 : next_window(p, tape, layer, window);
    if (p.thread == 0) {
        plan.n_items = n_items;
        plan.n_all = n_all;
        plan.until = until;
    }
    sync_compute_warps();
}

// --- a thread's arguments in a layer ---

// Passed by value, with no pointer to shared memory nor to the kernel's argument, so that attending and merging are
// separate functions with their own register allocation.
struct AttentionArgs {
    int layer;
    u32 tag;
    State* state;
    const float* norms;  // of queries, then of keys; or null
    const u64* qkv;      // this and the others: of row 0, in the layer's own buffer
    u64 *parts, *attended;
};
DEVICE AttentionArgs attention_args(const ComputeThread& p, const Tape& tape, int layer) {
    const u64 first = (u64)(layer & 1) * MAX_ROWS;
    return {
        layer,
        p.tag,
        tape.state,
        HAS_QK_NORM ? tape.qk_norms + layer * 2 * HEAD_WIDTH : nullptr,
        tape.qkv + first * QKV_COLUMNS,
        tape.parts + first * N_HEADS * SPLITS * PART_WORDS,
        tape.attended + first * (QUERY_COLUMNS / 2),
    };
}

// Read from special registers and not passed as arguments, so that the compiler knows their range.
DEVICE int lane() { return (u32)thread() % 32; }
DEVICE int warp() { return (u32)thread() / 32; }

// --- old keys and values ---

// A tile of the walk through a block's items.
struct TileCursor {
    int i, base;  // item, and where the block's stride begins
    MEMBER bool is_one(const AttentionPlan& plan) const { return i < plan.n_items; }
    MEMBER void go_on(const AttentionPlan& plan) {
        if (!is_one(plan)) return;
        base += STRIDE;
        if (base < plan.items[i].end) return;
        i++;
        if (is_one(plan)) base = plan.items[i].begin;
    }
};

// Which position of a tile a lane's keys are of (t < 2), and its values (u < 4), as the products want them; and which
// chunks. Beyond the end of a line, those of its last chunk: their sums are not read.
DEVICE int key_position(int t) { return 8 * t + lane() / 4; }
DEVICE int value_position(int u) { return u / 2 * 8 + lane() % 4 * 2 + u % 2; }
DEVICE int key_chunk(int e) { return lane() % 4 + 4 * e; }
DEVICE int value_chunk(int j) { return CHUNKS % 8 == 0 ? lane() / 4 + 8 * j : min(lane() / 4 + 8 * j, CHUNKS - 1); }

// Where position lane % 16 of a tile lies. Beyond the item's end, the last position again: its weight is 0, and it must
// not be NaN. (The row's own key and value are not read from there: they arrive with the queries, and a block may be
// storing them meanwhile.)
DEVICE u32 find_line(const AttentionPlan& plan, const TileCursor& cursor) {
    const Item& item = plan.items[cursor.i];
    const int position = min(cursor.base + warp() * TILE + lane() % TILE, item.end - 1);
    const int page = plan.pages[cursor.i][(u32)position / PAGE_TOKENS(0) - (u32)item.begin / PAGE_TOKENS(0)];
    return line_at(page, position, kv_head_of(item.group));
}
DEVICE KeptPlace place_of(KeptStore store, u32 line, int position, int chunk) {
    return chunk_at(store, shuffle(line, position) + chunk);
}

// If no tile follows, nothing is loaded; but the registers are overwritten, since otherwise the compiler would keep the
// old values live.
DEVICE void ask_keys(KeptStore store, bool is_one, Held& held) {
    UNROLL
    for (int n = 0; n < 2 * KEY_CHUNKS && HOLDS; n++) held.keys[n / KEY_CHUNKS][n % KEY_CHUNKS] = Kept{};
    if (!HOLDS || !is_one) return;
    UNROLL
    for (int t = 0; t < 2; t++) {
        const KeptPlace from = place_of(store, held.line, key_position(t), key_chunk(0));
        UNROLL
        for (int e = 0; e < KEY_CHUNKS; e++) held.keys[t][HOLDS ? e : 0] = load_kept(from + 4 * e);
    }
}
DEVICE void ask_values(KeptStore store, bool is_one, Held& held) {
    UNROLL
    for (int n = 0; n < 4 * VALUE_CHUNKS && HOLDS; n++) {
        held.values[n / VALUE_CHUNKS][n % VALUE_CHUNKS] = Kept{};
    }
    if (!HOLDS || !is_one) return;
    UNROLL
    for (int u = 0; u < 4; u++) {
        const KeptPlace from = place_of(store, held.line, value_position(u), value_chunk(0));
        UNROLL
        for (int j = 0; j < VALUE_CHUNKS; j++) {
            held.values[u][HOLDS ? j : 0] = load_kept(from + value_chunk(j) - value_chunk(0));
        }
    }
}

// --- queries, and the row's own key and value: QK norm, RoPE, rounded to the cache's type ---
//
// Every group of a KV head computes that head's new key and value for itself, so that no block waits for another's; all
// store the same bits.

constexpr int PAIRS_EACH = (HEAD_WIDTH / 2 + 31) / 32;  // of a lane
constexpr int LINES_AT_ONCE = PAIRS_EACH <= 2 ? 2 : 1;  // of a warp

// The two columns that RoPE rotates as a pair, or that it leaves unrotated.
DEVICE int low_column(int pair) { return pair < ROPE_HALF && !ROPE_NEIGHBOURS ? pair : 2 * pair; }
DEVICE int high_column(int pair) { return pair < ROPE_HALF && !ROPE_NEIGHBOURS ? pair + ROPE_HALF : 2 * pair + 1; }

// A line, and a lane's pairs of it.
struct Line {
    int i, part;         // item; below GROUP: a query; then the key, the value
    const u64* from;     // null: not needed
    u64 words[PAIRS_EACH][2];
    float2 cos_sin[PAIRS_EACH];
    float norm[PAIRS_EACH][2];
};

DEVICE bool is_there(int k) { return lane() + 32 * k < HEAD_WIDTH / 2; }

// Everything of a line that does not depend on its values.
DEVICE void prepare_line(const AttentionArgs& p, const AttentionPlan& plan, int number, Line& line) {
    line.i = number / LINES;
    line.part = number % LINES;
    line.from = nullptr;
    const Item& item = plan.items[line.i < plan.n_items ? line.i : 0];
    const bool is_query = line.part < GROUP, is_value = line.part > GROUP;
    const int head = is_query ? item.group * GROUP + line.part
                              : N_HEADS + (line.part - GROUP) * N_KV_HEADS + kv_head_of(item.group);
    const int rope = rope_of(p.layer);
    if (line.i < plan.n_items && (is_query || item.is_last)) {
        line.from = p.qkv + item.row * QKV_COLUMNS + head * HEAD_WIDTH;
    }
    UNROLL
    for (int k = 0; k < PAIRS_EACH; k++) {
        const int pair = lane() + 32 * k;
        line.words[k][0] = line.words[k][1] = 0;
        line.cos_sin[k] = float2{1.0f, 0.0f};
        if (!is_value && rope >= 0 && pair < ROPE_HALF) line.cos_sin[k] = plan.cos_sin[rope * MAX_ROWS + item.row][pair];
        if (!HAS_QK_NORM || !is_there(k)) continue;
        const float* const weights = p.norms + (is_query ? 0 : HEAD_WIDTH);
        line.norm[k][0] = weights[low_column(pair)];
        line.norm[k][1] = weights[high_column(pair)];
    }
}

// Loads the words that have not arrived yet; returns whether some are still missing.
DEVICE bool load_line(const AttentionArgs& p, Line& line) {
    bool misses = false;
    UNROLL
    for (int k = 0; k < PAIRS_EACH; k++) {
        const int pair = lane() + 32 * k;
        if (line.from == nullptr || !is_there(k) || have_arrived(line.words[k], p.tag)) continue;
        line.words[k][0] = load_relaxed(line.from + low_column(pair));
        line.words[k][1] = load_relaxed(line.from + high_column(pair));
    }
    UNROLL
    for (int k = 0; k < PAIRS_EACH; k++) {
        misses |= line.from != nullptr && is_there(k) && !have_arrived(line.words[k], p.tag);
    }
    return misses;
}

DEVICE bool load_lines(const AttentionArgs& p, Line lines[LINES_AT_ONCE]) {
    bool misses = false;
    UNROLL
    for (int n = 0; n < LINES_AT_ONCE; n++) misses |= load_line(p, lines[n]);
    return misses;
}

DEVICE float norm_of(const float values[PAIRS_EACH][2]) {
    float sum = 0.0f;
    UNROLL
    for (int k = 0; k < PAIRS_EACH; k++) sum += values[k][0] * values[k][0] + values[k][1] * values[k][1];
    UNROLL
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    return rsqrt_fast(sum * (1.0f / HEAD_WIDTH) + QK_NORM_EPS);
}
DEVICE void keep(char* line, int column, float value) {
    if (KEPT == TYPE_F32) ((float*)line)[column] = value;
    else ((u16*)line)[column] = KEPT == TYPE_BF16 ? to_bf16(value) : to_f16(value);
}

// A key or a value with KEPT_Q8: to its cell as bytes with a scale for each 32 columns, and to `line` as what these are
// worth, since a row attends to its own as it is kept. Twin: quantize_q8_0_torch.
#if KEPT_Q8
DEVICE void keep_quantised(const float values[PAIRS_EACH][2], const KeptPlace& cell, char* line) {
    UNROLL
    for (int group = 0; group < HEAD_WIDTH / 32; group++) {
        const auto is_member = [&](int k, int column) { return is_there(k) && column / 32 == group; };
        float largest = 0.0f;
        UNROLL
        for (int k = 0; k < PAIRS_EACH; k++) {
            const int pair = lane() + 32 * k;
            if (is_member(k, low_column(pair))) largest = larger(largest, size_of(values[k][0]));
            if (is_member(k, high_column(pair))) largest = larger(largest, size_of(values[k][1]));
        }
        UNROLL
        for (int mask = 16; mask > 0; mask /= 2) largest = larger(largest, shuffle_xor(largest, mask));
        const u16 scale = to_f16(rounded_quotient(largest, 127.0f));
        const float step = from_f16(scale);
        UNROLL
        for (int n = 0; n < 2 * PAIRS_EACH; n++) {
            const int pair = lane() + 32 * (n / 2), column = n % 2 == 0 ? low_column(pair) : high_column(pair);
            if (!is_member(n / 2, column)) continue;
            const int quant = round_to_int(rounded_quotient(values[n / 2][n % 2], step > 0.0f ? step : 1.0f));
            const int bounded = min(max(quant, -127), 127);
            ((signed char*)cell.store.quants)[(u64)cell.chunk * 8 + column] = (signed char)bounded;
            keep(line, column, (float)bounded * step);
        }
        if (lane() == 0) ((u16*)cell.store.scales)[cell.chunk / 4 + group] = scale;
    }
}
#endif

// Queries are stored in the layout of the product: of the four words of a chunk, the middle two are swapped.
DEVICE int query_column(int column) {
    if (KEPT == TYPE_F32) return column;
    const int word = column / 2 % 4;
    return word == 1 ? column + 2 : word == 2 ? column - 2 : column;
}

// What a row's queries are multiplied by: in some models it grows with the position.
DEVICE float query_scale(int row) {
    if (QUERY_TEMPERATURE == 0.0f) return QUERY_SCALE;
    const int position = ((const Shared*)shared_memory())->position[row];
    return QUERY_SCALE * (1.0f + QUERY_TEMPERATURE * log_float((float)(1 + position / QUERY_SPAN)));
}

DEVICE void lay_line(const AttentionArgs& p, const AttentionPlan& plan, const Line& line) {
    float values[PAIRS_EACH][2];
    UNROLL
    for (int k = 0; k < PAIRS_EACH; k++) {
        values[k][0] = float_of((u32)line.words[k][0]);
        values[k][1] = float_of((u32)line.words[k][1]);
    }
    const bool is_query = line.part < GROUP, is_value = line.part > GROUP;
    const float norm = HAS_QK_NORM && !is_value ? norm_of(values) : 1.0f;
    const Cache& cache = plan.caches[p.layer];
    char* const cell = (is_value ? cache.values : cache.keys) + (u64)plan.items[line.i].own_line * 16;
    char* const to = line_place(line.i, line.part);
    const float size = is_query ? query_scale(plan.items[line.i].row) : 1.0f;
    UNROLL
    for (int k = 0; k < PAIRS_EACH; k++) {
        if (!is_there(k)) continue;
        if (HAS_QK_NORM && !is_value) {
            values[k][0] *= norm * line.norm[k][0];
            values[k][1] *= norm * line.norm[k][1];
        }
        const float2 cos_sin = line.cos_sin[k];
        const float low = (values[k][0] * cos_sin.x - values[k][1] * cos_sin.y) * size;
        const float high = (values[k][1] * cos_sin.x + values[k][0] * cos_sin.y) * size;
        if (KEPT_Q8 && !is_query) {
            values[k][0] = low;
            values[k][1] = high;
            continue;
        }
        const int pair = lane() + 32 * k;
        keep(to, is_query ? query_column(low_column(pair)) : low_column(pair), low);
        keep(to, is_query ? query_column(high_column(pair)) : high_column(pair), high);
        if (is_query) continue;
        keep(cell, low_column(pair), low);
        keep(cell, high_column(pair), high);
    }
#if KEPT_Q8
    const KeptStore store = is_value ? values_in(cache) : keys_in(cache);
    if (!is_query) keep_quantised(values, chunk_at(store, plan.items[line.i].own_line), to);
#endif
}

// All lines of the current items, a warp for each line, several lines of each warp in flight.
DEVICE void receive_lines(const AttentionArgs& p, const AttentionPlan& plan) {
    NOT_UNROLLED
    for (int first = warp(); first < plan.n_items * LINES; first += LINES_AT_ONCE * N_COMPUTE_WARPS) {
        Line lines[LINES_AT_ONCE];
        UNROLL
        for (int n = 0; n < LINES_AT_ONCE; n++) prepare_line(p, plan, first + n * N_COMPUTE_WARPS, lines[n]);
        for (BoundedWait waiting(p.state); load_lines(p, lines) && waiting.keep_waiting();) {
        }
        UNROLL
        for (int n = 0; n < LINES_AT_ONCE; n++) {
            if (lines[n].from != nullptr) lay_line(p, plan, lines[n]);
        }
    }
}

// --- an item: scores, weights, mixed values ---

// A warp's softmax state of an item so far. A lane has one query's largest score and its share of that query's total,
// and for two other queries some columns of the weighted sum of values.
struct SoftmaxState {
    float sums[SUM_TILES][4];
    float top, total;
};
DEVICE void begin_softmax(SoftmaxState& softmax) {
    softmax.top = MASKED;
    softmax.total = 0.0f;
    UNROLL
    for (int n = 0; n < SUM_TILES; n++) {
        UNROLL
        for (int k = 0; k < 4; k++) softmax.sums[n][k] = 0.0f;
    }
}

// Whether products take bfloat16: float32 is split into two parts of it.
#define KEPT_BF16 (KEPT != TYPE_F16)
DEVICE void multiply_kept(float c[4], const uint4& a, u32 b0, u32 b1) { multiply_as<KEPT_BF16>(c, a, b0, b1); }
// Two numbers rounded to that type, and the remainders: together twice the bits.
struct Split {
    u32 coarse, fine;
};
DEVICE Split split_of(float low, float high) {
    float x, y;
    const u32 coarse = pair_as<KEPT_BF16>(low, high);
    split_as<KEPT_BF16>(coarse, x, y);
    return {coarse, pair_as<KEPT_BF16>(low - x, high - y)};
}

// Queries of one chunk times keys of it. The product has more rows than there are queries. Of 16-bit numbers the other
// half of the chunk stands in the lower ones: the first product is good in its upper rows, c[0] and c[1], the second
// in its lower ones, d[2] and d[3], and the other rows are not used. With float32 the lower rows are the low-order bits
// of the queries, and all of c is used.
DEVICE void multiply_keys(float c[4], float d[4], const uint4& query, const uint4& key) {
    if (KEPT != TYPE_F32) {
        multiply_kept(c, query, key.x, key.y);
        multiply_kept(d, query, key.z, key.w);
        return;
    }
    const Split q0 = split_of(float_of(query.x), float_of(query.y));
    const Split q1 = split_of(float_of(query.z), float_of(query.w));
    const Split k0 = split_of(float_of(key.x), float_of(key.y)), k1 = split_of(float_of(key.z), float_of(key.w));
    const uint4 a = {q0.coarse, q0.fine, q1.coarse, q1.fine};
    multiply_kept(c, a, k0.coarse, k1.coarse);
    multiply_kept(c, a, k0.fine, k1.fine);
}

// Of query lane / 4 (the last ones again where there are fewer): the scores of the lane's value_position(0 to 3).
// `own`: where the row's own position is in the tile.
DEVICE void score(KeptStore store, int i, int own, u32 line, Held& held, float scores[4]) {
    const uint4* const queries = (const uint4*)line_place(i, min(lane() / 4, GROUP - 1));
    const uint4* const own_key = (const uint4*)line_place(i, GROUP);
    float c[2][4] = {}, d[2][4] = {};
    UNROLL
    for (int e = 0; e < KEY_CHUNKS; e++) {
        const int chunk = key_chunk(e);
        const uint4 query = queries[chunk];
        UNROLL
        for (int t = 0; t < 2; t++) {
            Kept& kept = held.keys[t][HOLDS ? e : 0];
            if (!HOLDS) kept = load_kept(place_of(store, line, key_position(t), chunk));
            auto&& key = widened(kept);
            if (key_position(t) == own) key = own_key[chunk];
            multiply_keys(c[t], d[t], query, key);
        }
    }
    UNROLL
    for (int u = 0; u < 4; u++) {
        const float* const lower = KEPT == TYPE_F32 ? c[u / 2] : d[u / 2];
        scores[u] = c[u / 2][u % 2] + lower[u % 2 + 2];
    }
}

// The factor by which each of a lane's sums is rescaled when the largest score of query lane / 4 has risen.
DEVICE void rescale_softmax(float rescale, SoftmaxState& softmax) {
    const float rescales[2] = {shuffle(rescale, lane() % 4 * 8), shuffle(rescale, lane() % 4 * 8 + 4)};
    softmax.total *= rescale;
    UNROLL
    for (int n = 0; n < SUM_TILES; n++) {
        UNROLL
        for (int k = 0; k < 4; k++) softmax.sums[n][k] *= rescales[k % 2];
    }
}

// Scores become weights, and earlier sums are rescaled to the new largest score. `n_visible`: unmasked positions of the
// tile.
DEVICE void to_weights(int n_visible, bool is_first, float scores[4], SoftmaxState& softmax) {
    if (is_first) begin_softmax(softmax);
    float top = softmax.top;
    UNROLL
    for (int u = 0; u < 4; u++) {
        const float score = SCORE_CAP > 0.0f ? soft_capped(scores[u], SCORE_CAP) : scores[u];
        scores[u] = value_position(u) < n_visible ? score * LOG2_E : MASKED;
        top = larger(top, scores[u]);
    }
    UNROLL
    for (int mask = 1; mask < 4; mask *= 2) top = larger(top, shuffle_xor(top, mask));
    if (!is_first) rescale_softmax(exp2_fast(softmax.top - top), softmax);
    softmax.top = top;
    UNROLL
    for (int u = 0; u < 4; u++) scores[u] = scores[u] > MASKED ? exp2_fast(scores[u] - top) : 0.0f;
    softmax.total += scores[0] + scores[1] + (scores[2] + scores[3]);
}

// sums[t] += two columns of four positions' values (of every lane) times weights; the columns that stand side by side
// in memory are the product's upper and lower rows.
DEVICE void multiply_values(
    float sums[IN_CHUNK / 2][4], const u32 v[4][4], const Split& early, const Split& late
) {
    UNROLL
    for (int t = 0; t < IN_CHUNK / 2; t++) {
        uint4 a, rest = {0, 0, 0, 0};
        if (KEPT == TYPE_F32) {
            Split s[4];
            UNROLL
            for (int k = 0; k < 4; k++) {
                s[k] = split_of(float_of(v[k / 2 * 2][2 * t + k % 2]), float_of(v[k / 2 * 2 + 1][2 * t + k % 2]));
            }
            a = {s[0].coarse, s[1].coarse, s[2].coarse, s[3].coarse};
            rest = {s[0].fine, s[1].fine, s[2].fine, s[3].fine};
        } else {
            a.x = permute_bytes(v[0][t], v[1][t], 0x5410);
            a.y = permute_bytes(v[0][t], v[1][t], 0x7632);
            a.z = permute_bytes(v[2][t], v[3][t], 0x5410);
            a.w = permute_bytes(v[2][t], v[3][t], 0x7632);
        }
        multiply_kept(sums[t], a, early.coarse, late.coarse);
        multiply_kept(sums[t], a, early.fine, late.fine);
        if (KEPT == TYPE_F32) multiply_kept(sums[t], rest, early.coarse, late.coarse);
    }
}

DEVICE void mix(
    KeptStore store, int i, int own, u32 line, Held& held, const float weights[4], SoftmaxState& softmax
) {
    const uint4* const own_value = (const uint4*)line_place(i, GROUP + 1);
    const Split early = split_of(weights[0], weights[1]), late = split_of(weights[2], weights[3]);
    UNROLL
    for (int j = 0; j < VALUE_CHUNKS; j++) {
        const int chunk = value_chunk(j);
        u32 words[4][4];
        UNROLL
        for (int u = 0; u < 4; u++) {
            Kept& kept = held.values[u][HOLDS ? j : 0];
            if (!HOLDS) kept = load_kept(place_of(store, line, value_position(u), chunk));
            auto&& value = widened(kept);
            if (value_position(u) >= own) value = own_value[chunk];
            words_of(value, words[u]);
        }
        multiply_values(softmax.sums + j * (IN_CHUNK / 2), words, early, late);
    }
}

// A warp's part of an item, to shared memory.
DEVICE void store_part(int i, SoftmaxState& softmax) {
    const WarpParts parts = parts_here(i);
    UNROLL
    for (int h = 0; h < 2; h++) {
        const int member = lane() % 4 * 2 + h;
        if (member >= GROUP) continue;
        float* const sums = parts.sums + (warp() * GROUP + member) * PART_STRIDE;
        UNROLL
        for (int n = 0; n < SUM_TILES; n += 2) {
            const int chunk = lane() / 4 + n / (IN_CHUNK / 2) * 8;
            if (chunk >= CHUNKS) continue;
            const float *const here = softmax.sums[n], *const next = softmax.sums[n + 1];
            float* const to = sums + chunk * IN_CHUNK + n % (IN_CHUNK / 2) * 2;
            *(float4*)to = float4{here[h], here[h + 2], next[h], next[h + 2]};
        }
    }
    UNROLL
    for (int mask = 1; mask < 4; mask *= 2) softmax.total += shuffle_xor(softmax.total, mask);
    const int member = lane() / 4;
    if (lane() % 4 != 0 || member >= GROUP) return;
    parts.tops[member * N_COMPUTE_WARPS + warp()] = softmax.top;
    parts.totals[member * N_COMPUTE_WARPS + warp()] = softmax.total;
}

// Adds the warps' parts of an item in warp order and sends the sum to the warps that merge.
DEVICE void hand_on_part(const AttentionArgs& p, const Item& item, int i) {
    const WarpParts parts = parts_here(i);
    NOT_UNROLLED
    for (int at = thread(); at < GROUP * HEAD_WIDTH; at += N_COMPUTE_THREADS) {
        const int member = at / HEAD_WIDTH, column = at % HEAD_WIDTH;
        const float* const sums = parts.sums + member * PART_STRIDE + column;
        float shares[N_COMPUTE_WARPS], top = MASKED, sum = 0.0f, total = 0.0f;
        UNROLL
        for (int warp = 0; warp < N_COMPUTE_WARPS; warp++) {
            shares[warp] = parts.tops[member * N_COMPUTE_WARPS + warp];
            top = larger(top, shares[warp]);
        }
        UNROLL
        for (int warp = 0; warp < N_COMPUTE_WARPS; warp++) {
            shares[warp] = exp2_fast(shares[warp] - top);
            sum += sums[warp * GROUP * PART_STRIDE] * shares[warp];
        }
        const int head = item.row * N_HEADS + item.group * GROUP + member;
        u64* const to = p.parts + (head * SPLITS + item.split) * PART_WORDS;
        put(to + column, bits_of(sum), p.tag);
        if (column > 0) continue;
        UNROLL
        for (int warp = 0; warp < N_COMPUTE_WARPS; warp++) total += parts.totals[member * N_COMPUTE_WARPS + warp] * shares[warp];
        put(to + HEAD_WIDTH, bits_of(top), p.tag);
        put(to + HEAD_WIDTH + 1, bits_of(total), p.tag);
    }
}

// One tile; the next one is loaded as soon as its registers are free. After an item's last tile, its part is stored.
DEVICE void attend_tile(const AttentionArgs& p, const AttentionPlan& plan, TileCursor& here, TileCursor& coming, Held& held, SoftmaxState& softmax) {
    const Cache& cache = plan.caches[p.layer];
    const Item& item = plan.items[here.i];
    const int i = here.i, n_visible = item.end - (here.base + warp() * TILE);  // of the tile, or less than none
    const int own = item.is_last ? n_visible - 1 : TILE;
    const u32 line = held.line;
    const bool follows = coming.is_one(plan);
    float scores[4];
    score(keys_in(cache), i, own, line, held, scores);
    if (follows) held.line = find_line(plan, coming);
    ask_keys(keys_in(cache), follows, held);
    to_weights(n_visible, here.base == item.begin, scores, softmax);
    mix(values_in(cache), i, own, line, held, scores, softmax);
    ask_values(values_in(cache), follows, held);
    coming.go_on(plan);
    here.go_on(plan);
    if (here.i == i) return;
    store_part(i, softmax);
    sync_compute_warps();
    hand_on_part(p, item, i);
    if (PART_BUFFERS == 1 && ITEMS_AT_ONCE > 1) sync_compute_warps();  // before the next item's parts
}

// The items of the attention plan, tile by tile.
APART void attend_items(AttentionArgs p) {
    const AttentionPlan& plan = attention_plan_here();
    TileCursor here = {0, plan.items[0].begin}, coming = here;
    Held held[DEPTH];
    UNROLL
    for (int d = 0; d < DEPTH; d++) {
        const bool is_one = d == 0 || coming.is_one(plan);
        held[d].line = is_one ? find_line(plan, coming) : 0;
        ask_keys(keys_in(plan.caches[p.layer]), is_one, held[d]);
        ask_values(values_in(plan.caches[p.layer]), is_one, held[d]);
        coming.go_on(plan);
    }
    receive_lines(p, plan);
    sync_compute_warps();
    SoftmaxState softmax;
    begin_softmax(softmax);
    NOT_UNROLLED
    for (;;) {
        UNROLL
        for (int d = 0; d < DEPTH; d++) {
            attend_tile(p, plan, here, coming, held[d], softmax);
            if (!here.is_one(plan)) return;
        }
    }
}

// --- merging the splits of a head, 32 pairs of columns a warp ---

constexpr int MERGES = (HEAD_WIDTH / 2 + 31) / 32;  // of a head
constexpr int SPLITS_AT_ONCE = SPLITS < 8 ? SPLITS : 8;
static_assert(SPLITS <= 32, "a lane has the top and the total of a split");

// The weight of each split, in the lane of its number. `words`: its largest score and its total.
DEVICE float share_of_split(int n_splits, const u64 words[2]) {
    const bool is_one = lane() < n_splits;
    const float own = is_one ? float_of((u32)words[0]) : MASKED;
    float top = own;
    UNROLL
    for (int mask = 1; mask < SPLITS; mask *= 2) top = larger(top, shuffle_xor(top, mask));
    const float share = exp2_fast(own - top);
    float total = is_one ? float_of((u32)words[1]) * share : 0.0f;
    UNROLL
    for (int mask = 1; mask < SPLITS; mask *= 2) total += shuffle_xor(total, mask);
    return is_one ? share / total : 0.0f;
}

// What a lane loads of a head: of some splits its two columns; of the split of its own number, largest score and total.
struct Merging {
    const u64 *columns, *ends;
    int n_splits, n_wanted;
    u64 words[SPLITS_AT_ONCE][2], end[2];
};

// Loads the words of the splits from `first` on that have not arrived yet; returns whether some are still missing.
DEVICE bool load_parts(const AttentionArgs& p, int first, Merging& m) {
    if (lane() < m.n_splits && !have_arrived(m.end, p.tag)) load_two_relaxed(m.ends, m.end);
    UNROLL
    for (int k = 0; k < SPLITS_AT_ONCE; k++) {
        if (first + k >= m.n_wanted || have_arrived(m.words[k], p.tag)) continue;
        load_two_relaxed(m.columns + (first + k) * PART_WORDS, m.words[k]);
    }
    bool misses = lane() < m.n_splits && !have_arrived(m.end, p.tag);
    UNROLL
    for (int k = 0; k < SPLITS_AT_ONCE; k++) misses |= first + k < m.n_wanted && !have_arrived(m.words[k], p.tag);
    return misses;
}

DEVICE void merge(const AttentionArgs& p, int number, int n_splits) {
    const int head = number / MERGES, pair = number % MERGES * 32 + lane();  // of all rows
    const u64* const parts = p.parts + (u64)head * SPLITS * PART_WORDS;
    Merging m = {parts + 2 * pair, parts + lane() * PART_WORDS + HEAD_WIDTH, n_splits, 0, {}, {}};
    if (pair < HEAD_WIDTH / 2) m.n_wanted = n_splits;
    float share = 0.0f, low = 0.0f, high = 0.0f;
    NOT_UNROLLED
    for (int first = 0; first < n_splits; first += SPLITS_AT_ONCE) {
        UNROLL
        for (int k = 0; k < SPLITS_AT_ONCE; k++) m.words[k][0] = m.words[k][1] = 0;
        for (BoundedWait waiting(p.state); load_parts(p, first, m) && waiting.keep_waiting();) {
        }
        if (first == 0) share = share_of_split(n_splits, m.end);
        UNROLL
        for (int k = 0; k < SPLITS_AT_ONCE; k++) {  // splits that were not loaded are 0, and so is their weight
            const float its = shuffle(share, first + k);
            low += float_of((u32)m.words[k][0]) * its;
            high += float_of((u32)m.words[k][1]) * its;
        }
    }
    if (m.n_wanted > 0) put(p.attended + head * (HEAD_WIDTH / 2) + pair, pair_of(low, high), p.tag);
}

APART void merge_heads(AttentionArgs p, int n_rows) {
    constexpr int A_ROW = N_HEADS * MERGES;
    NOT_UNROLLED
    for (int i = block() + warp() * N_BLOCKS; i < n_rows * A_ROW; i += N_COMPUTE_WARPS * N_BLOCKS) {
        merge(p, i, attention_plan_here().n_splits[i / A_ROW]);
    }
}

// From tape.qkv to tape.attended, for all rows of the step. No compute warp may be reading activations; after it all may
// write.
DEVICE void attention(ComputeThread& p, const Tape& tape, int layer, int n_rows) {
    const AttentionPlan& plan = attention_plan_here();
    const AttentionArgs args = attention_args(p, tape, layer);
    bool is_old = layer == 0 || layer == plan.until;
    NOT_UNROLLED
    for (int first = block(); n_rows > 0 && (is_old || first < plan.n_all); first += ITEMS_AT_ONCE * N_BLOCKS) {
        if (is_old) make_attention_plan(p, tape, layer, n_rows, first);
        if (plan.n_items > 0) attend_items(args);
        is_old = first + ITEMS_AT_ONCE * N_BLOCKS < plan.n_all;
    }
    merge_heads(args, n_rows);
    sync_compute_warps();
}
