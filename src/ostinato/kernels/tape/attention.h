// Attention of one layer: each row's queries over its own pages, softmax(scale q k^T) v; its key and value appended.
//
// What a row sees is cut into at most SPLITS splits of one length, a multiple of LEAST_SPLIT that follows from the
// row's own position and the window. A split of one key head is an *item*, two where more than four queries share the
// head: more do not fit into registers, and neighbouring blocks find the same keys in L2. Items are dealt to the
// blocks, which leave their sums in tape.parts; then the heads of all rows are dealt to be *merged*, splits in order.
// So a row's bits do not depend on who is beside it, nor on who computes it. Twin: attend_torch of kernels/attend.py.
//
// Bound by latency at short contexts: keys and values of old positions are asked for before the queries have come.
// Bound by reading keys and values at long ones: 16 bytes a lane and load, AHEAD positions of keys and of values under
// way for each group of lanes, the next ones asked for as soon as those before are used, across items too.
#pragma once
#include "handoff.h"

// --- how a block holds keys and values ---

constexpr int KEPT_BYTES = KEPT == TYPE_F32 ? 4 : 2;
constexpr int LINE_BYTES = HEAD_WIDTH * KEPT_BYTES;  // of one head at one position
constexpr int CHUNKS = LINE_BYTES / 16;
constexpr int LANES_EACH = CHUNKS <= 8 ? 8 : CHUNKS <= 16 ? 16 : 32;  // that share a position; of width 96 some idle
constexpr int CHUNKS_EACH = (CHUNKS + LANES_EACH - 1) / LANES_EACH;   // of a lane
constexpr int IN_CHUNK = 16 / KEPT_BYTES;
constexpr int ELEMENTS = CHUNKS_EACH * IN_CHUNK;                      // of a head, that a lane holds
constexpr int SIDE_BY_SIDE = 32 / LANES_EACH;                         // positions in a warp
constexpr int ACROSS = N_PLAYERS * SIDE_BY_SIDE;                      // positions in a block
constexpr int AHEAD = CHUNKS_EACH == 1 ? 3 : 2;                   // times that, under way at once
constexpr int STRIDE = AHEAD * ACROSS;                                // positions that a block takes in one step
static_assert(LINE_BYTES % 16 == 0, "heads are read in pieces of 16 bytes");

constexpr int HALVES = GROUP > 4 ? 2 : 1;  // of the queries that share a key head
constexpr int MEMBERS = (GROUP + HALVES - 1) / HALVES;
constexpr int ITEM_HEADS = N_KV_HEADS * HALVES;

struct Held {
    uint4 of[AHEAD][CHUNKS_EACH];
};

// --- what lies in shared memory meanwhile, where activations lie otherwise ---

constexpr int MOST_ITEMS = (MAX_ROWS * ITEM_HEADS * SPLITS + N_BLOCKS - 1) / N_BLOCKS;
constexpr int ITEMS_AT_ONCE = MOST_ITEMS < 8 ? MOST_ITEMS : 8;  // whose queries are fetched together
constexpr int LINES = MEMBERS + 2;                              // of an item: queries, its own key, its own value
constexpr int LONGEST_SPLIT =
    (MAX_PAGES(0) * PAGE_TOKENS(0) + LEAST_SPLIT * SPLITS - 1) / (LEAST_SPLIT * SPLITS) * LEAST_SPLIT;
constexpr int PAGES_OF_SPLIT = LONGEST_SPLIT / PAGE_TOKENS(0) + 2;
constexpr int PART_WORDS = HEAD_WIDTH + 2;    // of a head in tape.parts: sums, the largest score, the total
constexpr int PART_STRIDE = HEAD_WIDTH + 4;   // the same in shared memory, by warp
constexpr int PART_BYTES = N_PLAYERS * MEMBERS * PART_STRIDE * 4;
constexpr int PART_BUFFERS = PART_BYTES <= 32 * 1024 ? 2 : 1;  // one: a further sync for each item

// One split of one key head of one row, for some of its queries.
struct Item {
    int row, head, split, is_last;
    int first_query, n_queries;  // of all heads
    int first, begin, end;       // sees positions from `first` on; this split is [begin, end)
    int position, slot, padding;
};

constexpr int LINES_AT = ITEMS_AT_ONCE * (int)sizeof(Item);
constexpr int PARTS_AT = LINES_AT + ITEMS_AT_ONCE * LINES * LINE_BYTES;
constexpr int PAGES_AT = PARTS_AT + PART_BUFFERS * PART_BYTES;
constexpr int LOOK_BYTES = PAGES_AT + ITEMS_AT_ONCE * PAGES_OF_SPLIT * 4;

constexpr int LOOKS_OF_MERGE = SPLITS * PART_WORDS / 2;
constexpr int MOST_MERGES = (MAX_ROWS * N_HEADS + N_BLOCKS - 1) / N_BLOCKS;
constexpr int MERGES_AT_ONCE = MOST_MERGES < 4 ? MOST_MERGES : 4;
constexpr int MERGE_BYTES = MERGES_AT_ONCE * SPLITS * PART_WORDS * 4;

#define ATTENTION_BYTES (LOOK_BYTES > MERGE_BYTES ? LOOK_BYTES : MERGE_BYTES)
static_assert(ACTIVATION_BYTES >= ATTENTION_BYTES, "attention works where activations lie");

#define UNSEEN (-1e30f)
#define LOG2_E 1.4426950408889634f

DEVICE Item* item_place(const Player& p, int i) { return (Item*)p.activations + i; }
DEVICE char* line_place(const Player& p, int i) { return (char*)p.activations + LINES_AT + i * LINE_BYTES; }
DEVICE float* part_place(const Player& p, int i, int warp, int member) {
    float* const parts = (float*)((char*)p.activations + PARTS_AT + i % PART_BUFFERS * PART_BYTES);
    return parts + (warp * MEMBERS + member) * PART_STRIDE;
}
DEVICE int* page_place(const Player& p, int i) {
    return (int*)((char*)p.activations + PAGES_AT) + i * PAGES_OF_SPLIT;
}
DEVICE u64* part_of(const Tape& tape, int layer, int row, int head, int split) {
    return tape.parts + ((((u64)(layer & 1) * MAX_ROWS + row) * N_HEADS + head) * SPLITS + split) * PART_WORDS;
}

// --- numbers as they are kept ---

DEVICE void widen(const uint4& chunk, float* out) {
    const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    UNROLL
    for (int i = 0; i < 4; i++) {
        if (KEPT == TYPE_F32) out[i] = float_of(words[i]);
        else if (KEPT == TYPE_BF16) split_bf16(words[i], out[2 * i], out[2 * i + 1]);
        else split_f16(words[i], out[2 * i], out[2 * i + 1]);
    }
}
DEVICE void keep(char* line, int column, float value) {
    if (KEPT == TYPE_F32) ((float*)line)[column] = value;
    else ((u16*)line)[column] = KEPT == TYPE_BF16 ? to_bf16(value) : to_f16(value);
}

// --- who looks at what ---

struct Cut {
    int first, length, n_splits;
};
DEVICE Cut cut_of(int position, int window) {
    const int first = window ? max(position - (window - 1), 0) : 0;
    const int n_seen = position + 1 - first / LEAST_SPLIT * LEAST_SPLIT;
    const int length = (n_seen + LEAST_SPLIT * SPLITS - 1) / (LEAST_SPLIT * SPLITS) * LEAST_SPLIT;
    return {first, length, (n_seen + length - 1) / length};
}

// Where each row's items end, in the lane of that number; all items of the step.
struct Deal {
    int end, n;
};
DEVICE Deal deal_items(const Player& p, int n_rows, int window) {
    int end = p.lane < n_rows ? cut_of(p.shared->position[p.lane], window).n_splits * ITEM_HEADS : 0;
    for (int by = 1; by < MAX_ROWS; by *= 2) {
        const int before = shuffle(end, p.lane >= by ? p.lane - by : p.lane);
        if (p.lane >= by) end += before;
    }
    return {end, shuffle(end, MAX_ROWS - 1)};
}

// Neighbouring blocks take the heads of the same positions, which lie side by side in memory.
DEVICE Item item_of(const Player& p, const Deal& deal, int number, int window) {
    int row = 0, before = 0;
    for (int r = 0; r < MAX_ROWS - 1; r++) {
        const int end = shuffle(deal.end, r);
        if (end > number) continue;
        row = r + 1;
        before = end;
    }
    const int within = number - before;
    const int position = p.shared->position[row];
    const Cut cut = cut_of(position, window);
    Item item;
    item.row = row;
    const int half = within % HALVES;
    item.head = within / HALVES % N_KV_HEADS;
    item.split = within / ITEM_HEADS;
    item.first_query = item.head * GROUP + half * MEMBERS;
    item.n_queries = min(MEMBERS, GROUP - half * MEMBERS);
    item.is_last = item.split == cut.n_splits - 1;
    item.first = cut.first;
    item.begin = cut.first / LEAST_SPLIT * LEAST_SPLIT + item.split * cut.length;
    item.end = min(item.begin + cut.length, position + 1);
    item.position = position;
    item.slot = p.shared->slot[row];
    item.padding = 0;
    return item;
}

// --- old keys and values ---

// The position that these lanes hold at place `u` of the step that begins at `base`.
DEVICE int position_of(const Player& p, int base, int u) {
    return base + u * ACROSS + p.warp * SIDE_BY_SIDE + p.lane / LANES_EACH;
}
// Its own position a row does not find in memory: it comes with the queries.
DEVICE bool is_old(const Item& item, int position) {
    return position >= item.first && position < item.end && position != item.position;
}
DEVICE const int* table_of(const Tape& tape, int slot) {
    return TABLE_pages(tape.view) + (u64)slot * MAX_PAGES(tape.view);
}
// In pieces of 16 bytes, which are few enough for 32 bits.
DEVICE u32 line_at(int page, int position, int head) {
    const u32 cell = (u32)page * PAGE_TOKENS(0) + position % PAGE_TOKENS(0);
    return (cell * N_KV_HEADS + head) * CHUNKS;
}

DEVICE void fetch_line(const Player& p, const uint4* line, uint4 chunks[CHUNKS_EACH]) {
    UNROLL
    for (int e = 0; e < CHUNKS_EACH; e++) {
        const int chunk = p.lane % LANES_EACH + e * LANES_EACH;
        if (chunk < CHUNKS) chunks[e] = load_fresh(line + chunk);
    }
}

// Where the lines of a step lie: asked in shared memory, or of the table itself before all pages are there.
struct Places {
    u32 of[AHEAD];
};
DEVICE void find_lines(const Player& p, const int* pages, bool in_table, const Item& item, int base, Places& places) {
    UNROLL
    for (int u = 0; u < AHEAD; u++) {
        const int position = position_of(p, base, u);
        places.of[u] = 0;
        if (!is_old(item, position)) continue;
        const int page = position / PAGE_TOKENS(0);
        const int there = in_table ? load_fresh(pages + page) : pages[page - item.begin / PAGE_TOKENS(0)];
        places.of[u] = line_at(there, position, item.head);
    }
}
DEVICE void fetch(const Player& p, const char* store, const Item& item, int base, const Places& places, Held& held) {
    UNROLL
    for (int u = 0; u < AHEAD; u++) {
        UNROLL
        for (int e = 0; e < CHUNKS_EACH; e++) held.of[u][e] = uint4{0, 0, 0, 0};
        if (is_old(item, position_of(p, base, u))) fetch_line(p, (const uint4*)store + places.of[u], held.of[u]);
    }
}

// --- queries, and the row's own key and value: normed, turned, and rounded as they are kept ---

constexpr int PAIRS_EACH = (HEAD_WIDTH / 2 + 31) / 32;     // of a lane
constexpr int LINES_AT_ONCE = PAIRS_EACH <= 2 ? 4 : 2;     // of a warp

struct Line {
    bool wanted;
    int part;         // below MEMBERS: a query; then the key, the value
    const Item* item;
    const u64* words;
};

DEVICE Line line_of(const Player& p, const Tape& tape, int layer, int n_items, int number) {
    Line line;
    const int i = number / LINES;
    line.part = number % LINES;
    line.item = item_place(p, i);
    line.words = nullptr;
    line.wanted = i < n_items && (line.part < MEMBERS ? line.part < line.item->n_queries : line.item->is_last);
    if (!line.wanted) return line;
    const int head = line.part < MEMBERS ? line.item->first_query + line.part
                                         : N_HEADS + (line.part - MEMBERS) * N_KV_HEADS + line.item->head;
    line.words = tape.qkv + ((u64)(layer & 1) * MAX_ROWS + line.item->row) * QKV_COLUMNS + head * HEAD_WIDTH;
    return line;
}

// The two columns that turn together, or stay together.
DEVICE int low_column(int pair) { return pair < ROPE_HALF && !ROPE_NEIGHBOURS ? pair : 2 * pair; }
DEVICE int high_column(int pair) { return pair < ROPE_HALF && !ROPE_NEIGHBOURS ? pair + ROPE_HALF : 2 * pair + 1; }

struct LinePairs {
    u64 words[PAIRS_EACH][2];
    float sine[PAIRS_EACH], cosine[PAIRS_EACH];
};

DEVICE void look_at_line(const Player& p, const Line& line, LinePairs& pairs) {
    UNROLL
    for (int i = 0; i < PAIRS_EACH; i++) {
        const int pair = p.lane + 32 * i;
        pairs.words[i][0] = pairs.words[i][1] = 0;
        if (!line.wanted || pair >= HEAD_WIDTH / 2) continue;
        pairs.words[i][0] = look(line.words + low_column(pair));
        pairs.words[i][1] = look(line.words + high_column(pair));
    }
}
DEVICE void await_line(const Player& p, const Tape& tape, const Line& line, LinePairs& pairs) {
    UNROLL
    for (int i = 0; i < PAIRS_EACH; i++) {
        const int pair = p.lane + 32 * i;
        if (!line.wanted || pair >= HEAD_WIDTH / 2) continue;
        u64* const words = pairs.words[i];
        for (Waiting waiting(tape.state); !have_come(words, p.beat) && waiting.goes_on();) {
            words[0] = look(line.words + low_column(pair));
            words[1] = look(line.words + high_column(pair));
        }
    }
}

// By how much each pair turns: known before the queries are.
DEVICE void find_turns(const Player& p, const Tape& tape, const Line& line, LinePairs& pairs) {
    UNROLL
    for (int i = 0; i < PAIRS_EACH; i++) {
        const int pair = p.lane + 32 * i;
        pairs.sine[i] = 0.0f;
        pairs.cosine[i] = 1.0f;
        if (!line.wanted || line.part > MEMBERS || pair >= ROPE_HALF) continue;
        sincos_exact((float)line.item->position * tape.frequencies[pair], pairs.sine[i], pairs.cosine[i]);
        pairs.sine[i] *= ROPE_AMPLITUDE;
        pairs.cosine[i] *= ROPE_AMPLITUDE;
    }
}

DEVICE void norm_line(const Player& p, const float* weights, float values[PAIRS_EACH][2]) {
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < PAIRS_EACH; i++) sum += values[i][0] * values[i][0] + values[i][1] * values[i][1];
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    const float scale = rsqrt_fast(sum * (1.0f / HEAD_WIDTH) + QK_NORM_EPS);
    UNROLL
    for (int i = 0; i < PAIRS_EACH; i++) {
        const int pair = p.lane + 32 * i;
        if (pair >= HEAD_WIDTH / 2) continue;
        values[i][0] *= scale * weights[low_column(pair)];
        values[i][1] *= scale * weights[high_column(pair)];
    }
}

DEVICE void lay_line(
    const Player& p, const Tape& tape, int layer, int number, const Line& line, const LinePairs& pairs
) {
    float values[PAIRS_EACH][2];
    UNROLL
    for (int i = 0; i < PAIRS_EACH; i++) {
        values[i][0] = float_of((u32)pairs.words[i][0]);
        values[i][1] = float_of((u32)pairs.words[i][1]);
    }
    const bool is_query = line.part < MEMBERS, is_key = line.part == MEMBERS;
    if (HAS_QK_NORM && (is_query || is_key)) {
        norm_line(p, tape.qk_norms + (layer * 2 + (is_key ? 1 : 0)) * HEAD_WIDTH, values);
    }
    const bool is_first_half = line.item->first_query % GROUP == 0;  // which writes for both
    char* cell = nullptr;  // where the row's own key or value is kept
    if (!is_query) {
        const int position = line.item->position;
        const int page = load_fresh(table_of(tape, line.item->slot) + position / PAGE_TOKENS(0));
        const Cache& cache = tape.caches[layer];
        cell = (is_key ? cache.keys : cache.values) + (u64)line_at(page, position, line.item->head) * 16;
    }
    char* const to = line_place(p, number);
    UNROLL
    for (int i = 0; i < PAIRS_EACH; i++) {
        const int pair = p.lane + 32 * i;
        if (pair >= HEAD_WIDTH / 2) continue;
        float low = values[i][0] * pairs.cosine[i] - values[i][1] * pairs.sine[i];
        float high = values[i][1] * pairs.cosine[i] + values[i][0] * pairs.sine[i];
        if (is_query) {
            low *= QUERY_SCALE;
            high *= QUERY_SCALE;
        } else if (is_first_half) {
            keep(cell, low_column(pair), low);
            keep(cell, high_column(pair), high);
        }
        keep(to, low_column(pair), low);
        keep(to, high_column(pair), high);
    }
}

// All lines of the items at hand, a warp a line; each warp has some under way at once.
DEVICE void receive_lines(const Player& p, const Tape& tape, int layer, int n_items) {
    NOT_UNROLLED
    for (int first = p.warp; first < n_items * LINES; first += LINES_AT_ONCE * N_PLAYERS) {
        Line lines[LINES_AT_ONCE];
        LinePairs pairs[LINES_AT_ONCE];
        UNROLL
        for (int k = 0; k < LINES_AT_ONCE; k++) {
            lines[k] = line_of(p, tape, layer, n_items, first + k * N_PLAYERS);
            find_turns(p, tape, lines[k], pairs[k]);
        }
        look_at_line(p, lines[0], pairs[0]);
        await_line(p, tape, lines[0], pairs[0]);
        UNROLL
        for (int k = 1; k < LINES_AT_ONCE; k++) look_at_line(p, lines[k], pairs[k]);
        UNROLL
        for (int k = 0; k < LINES_AT_ONCE; k++) {
            await_line(p, tape, lines[k], pairs[k]);
            if (lines[k].wanted) lay_line(p, tape, layer, first + k * N_PLAYERS, lines[k], pairs[k]);
        }
    }
}

// --- an item: scores, weights, mixed values ---

// Of a lane: what its elements of every query have seen so far.
struct Sight {
    float sum[MEMBERS][ELEMENTS];
    float top[MEMBERS], total[MEMBERS];  // the same top in all lanes; a total for each position side by side
};

DEVICE void begin_sight(Sight& sight) {
    UNROLL
    for (int g = 0; g < MEMBERS; g++) {
        sight.top[g] = UNSEEN;
        sight.total[g] = 0.0f;
        UNROLL
        for (int e = 0; e < ELEMENTS; e++) sight.sum[g][e] = 0.0f;
    }
}

// A lane's elements of a line in shared memory. Queries are read again in every step: kept, they would be more
// registers than a thread has.
DEVICE void read_line(const Player& p, const char* line, float out[ELEMENTS]) {
    UNROLL
    for (int e = 0; e < CHUNKS_EACH; e++) {
        const int chunk = p.lane % LANES_EACH + e * LANES_EACH;
        uint4 bits = {0, 0, 0, 0};
        if (chunk < CHUNKS) bits = ((const uint4*)line)[chunk];
        widen(bits, out + e * IN_CHUNK);
    }
}

// Where the row's own position is in this step, it is taken from its line.
DEVICE void take_own(const Player& p, const Item& item, int base, const char* line, Held& held) {
    if (!item.is_last || base + STRIDE <= item.position) return;
    UNROLL
    for (int u = 0; u < AHEAD; u++) {
        if (position_of(p, base, u) != item.position) continue;
        UNROLL
        for (int e = 0; e < CHUNKS_EACH; e++) {
            const int chunk = p.lane % LANES_EACH + e * LANES_EACH;
            if (chunk < CHUNKS) held.of[u][e] = ((const uint4*)line)[chunk];
        }
    }
}

struct Scores {
    float of[AHEAD][MEMBERS];
};

DEVICE void score(const Player& p, const Item& item, int base, int i, const Held& keys, Scores& scores) {
    float key[AHEAD][ELEMENTS];
    UNROLL
    for (int u = 0; u < AHEAD; u++) {
        UNROLL
        for (int e = 0; e < CHUNKS_EACH; e++) widen(keys.of[u][e], key[u] + e * IN_CHUNK);
    }
    UNROLL
    for (int g = 0; g < MEMBERS; g++) {
        float query[ELEMENTS];
        read_line(p, line_place(p, i * LINES + g), query);
        UNROLL
        for (int u = 0; u < AHEAD; u++) {
            float sum = 0.0f;
            UNROLL
            for (int e = 0; e < ELEMENTS; e++) sum += query[e] * key[u][e];
            scores.of[u][g] = sum;
        }
    }
    UNROLL
    for (int u = 0; u < AHEAD; u++) {
        const int position = position_of(p, base, u);
        const bool seen = position >= item.first && position < item.end;
        if (base + u * ACROSS < item.end) {  // for the whole block, or for none of it
            UNROLL
            for (int mask = LANES_EACH / 2; mask > 0; mask /= 2) {
                UNROLL
                for (int g = 0; g < MEMBERS; g++) scores.of[u][g] += shuffle_xor(scores.of[u][g], mask);
            }
        }
        UNROLL
        for (int g = 0; g < MEMBERS; g++) scores.of[u][g] = seen ? scores.of[u][g] * LOG2_E : UNSEEN;
    }
}

// Scores become weights, and what was seen before fades to the new top.
DEVICE void weigh(Scores& scores, Sight& sight) {
    UNROLL
    for (int g = 0; g < MEMBERS; g++) {
        float top = sight.top[g];
        UNROLL
        for (int u = 0; u < AHEAD; u++) top = larger(top, scores.of[u][g]);
        UNROLL
        for (int mask = LANES_EACH; mask < 32; mask *= 2) top = larger(top, shuffle_xor(top, mask));
        const float fade = exp2_fast(sight.top[g] - top);
        sight.top[g] = top;
        sight.total[g] *= fade;
        UNROLL
        for (int e = 0; e < ELEMENTS; e++) sight.sum[g][e] *= fade;
        UNROLL
        for (int u = 0; u < AHEAD; u++) {
            const float weight = scores.of[u][g] > UNSEEN ? exp2_fast(scores.of[u][g] - top) : 0.0f;
            scores.of[u][g] = weight;
            sight.total[g] += weight;
        }
    }
}

DEVICE void mix(const Item& item, int base, const Held& values, const Scores& weights, Sight& sight) {
    UNROLL
    for (int u = 0; u < AHEAD; u++) {
        if (base + u * ACROSS >= item.end) continue;
        float value[ELEMENTS];
        UNROLL
        for (int e = 0; e < CHUNKS_EACH; e++) widen(values.of[u][e], value + e * IN_CHUNK);
        UNROLL
        for (int g = 0; g < MEMBERS; g++) {
            UNROLL
            for (int e = 0; e < ELEMENTS; e++) sight.sum[g][e] += weights.of[u][g] * value[e];
        }
    }
}

// What a warp has seen of an item goes to shared memory: lanes side by side are added first, and then write in turn.
DEVICE void leave_part(const Player& p, int i, Sight& sight) {
    UNROLL
    for (int mask = LANES_EACH; mask < 32; mask *= 2) {
        UNROLL
        for (int g = 0; g < MEMBERS; g++) {
            sight.total[g] += shuffle_xor(sight.total[g], mask);
            UNROLL
            for (int e = 0; e < ELEMENTS; e++) sight.sum[g][e] += shuffle_xor(sight.sum[g][e], mask);
        }
    }
    UNROLL
    for (int g = 0; g < MEMBERS; g++) {
        if (p.lane / LANES_EACH != g % SIDE_BY_SIDE) continue;
        float* const part = part_place(p, i, p.warp, g);
        UNROLL
        for (int e = 0; e < CHUNKS_EACH; e++) {
            const int chunk = p.lane % LANES_EACH + e * LANES_EACH;
            if (chunk >= CHUNKS) continue;
            const float* const from = sight.sum[g] + e * IN_CHUNK;
            UNROLL
            for (int at = 0; at < IN_CHUNK; at += 4) {
                *(float4*)(part + chunk * IN_CHUNK + at) = float4{from[at], from[at + 1], from[at + 2], from[at + 3]};
            }
        }
        if (p.lane % LANES_EACH == 0) {
            part[HEAD_WIDTH] = sight.top[g];
            part[HEAD_WIDTH + 1] = sight.total[g];
        }
    }
}

// The warps' parts of an item, in their order, to whoever merges.
DEVICE void hand_on_part(const Player& p, const Tape& tape, int layer, int i, const Item& item) {
    NOT_UNROLLED
    for (int at = p.thread; at < item.n_queries * HEAD_WIDTH; at += N_PLAYER_THREADS) {
        const int member = at / HEAD_WIDTH, column = at % HEAD_WIDTH;
        float tops[N_PLAYERS], top = UNSEEN, sum = 0.0f, total = 0.0f;
        UNROLL
        for (int warp = 0; warp < N_PLAYERS; warp++) {
            tops[warp] = part_place(p, i, warp, member)[HEAD_WIDTH];
            top = larger(top, tops[warp]);
        }
        UNROLL
        for (int warp = 0; warp < N_PLAYERS; warp++) {
            const float* const part = part_place(p, i, warp, member);
            const float share = exp2_fast(tops[warp] - top);
            sum += part[column] * share;
            total += part[HEAD_WIDTH + 1] * share;
        }
        u64* const to = part_of(tape, layer, item.row, item.first_query + member, item.split);
        put(to + column, bits_of(sum), p.beat);
        if (column < 2) put(to + HEAD_WIDTH + column, bits_of(column == 0 ? top : total), p.beat);
    }
}

// --- a block's items ---

DEVICE void look_at_items(const Player& p, const Tape& tape, int layer, int n_items) {
    const Cache& cache = tape.caches[layer];
    const char *const keys_at = cache.keys, *const values_at = cache.values;
    Places places;
    Held keys, values;
    const Item& opening = *item_place(p, 0);
    find_lines(p, table_of(tape, opening.slot), true, opening, opening.begin, places);
    fetch(p, keys_at, opening, opening.begin, places, keys);
    fetch(p, values_at, opening, opening.begin, places, values);
    for (int i = p.warp; i < n_items; i += N_PLAYERS) {
        const Item& its = *item_place(p, i);
        const int page = its.begin / PAGE_TOKENS(0), n = (its.end - 1) / PAGE_TOKENS(0) + 1 - page;
        const int* const table = table_of(tape, its.slot) + page;
        for (int k = p.lane; k < n; k += 32) page_place(p, i)[k] = load_fresh(table + k);
    }
    receive_lines(p, tape, layer, n_items);
    sync_players();
    NOT_UNROLLED
    for (int i = 0; i < n_items; i++) {
        Sight sight;
        begin_sight(sight);
        const Item& item = *item_place(p, i);
        NOT_UNROLLED
        for (int base = item.begin; base < item.end; base += STRIDE) {
            // What follows: more of this item, or the next one's beginning; after the last, nothing that anybody sees.
            const bool stays = base + STRIDE < item.end;
            const int follows = stays ? i : min(i + 1, n_items - 1);
            const Item& next = *item_place(p, follows);
            const int then = stays ? base + STRIDE : i + 1 < n_items ? next.begin : next.end;
            const int* const pages = page_place(p, follows);
            find_lines(p, pages, false, next, then, places);
            Scores scores;
            take_own(p, item, base, line_place(p, i * LINES + MEMBERS), keys);
            score(p, item, base, i, keys, scores);
            fetch(p, keys_at, next, then, places, keys);
            weigh(scores, sight);
            take_own(p, item, base, line_place(p, i * LINES + MEMBERS + 1), values);
            mix(item, base, values, scores, sight);
            fetch(p, values_at, next, then, places, values);
        }
        leave_part(p, i, sight);
        sync_players();
        hand_on_part(p, tape, layer, i, item);
        if (PART_BUFFERS == 1) sync_players();
    }
    sync_players();
}

// --- merging the splits of a head ---

DEVICE int splits_of(const Player& p, int number, int n_rows, int window) {
    return number < n_rows * N_HEADS ? cut_of(p.shared->position[number / N_HEADS], window).n_splits : 0;
}

// Parts of the heads first, first + N_BLOCKS ... to shared memory, [head][split][PART_WORDS].
DEVICE void receive_parts(const Player& p, const Tape& tape, int layer, int first, const int* n_splits) {
    constexpr int AT_ONCE = 8, ALL = MERGES_AT_ONCE * LOOKS_OF_MERGE;
    NOT_UNROLLED
    for (int begin = p.thread; begin < ALL; begin += AT_ONCE * N_PLAYER_THREADS) {
        const u64* places[AT_ONCE];
        u64 words[AT_ONCE][2] = {};
        UNROLL
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = begin + k * N_PLAYER_THREADS, merge = i / LOOKS_OF_MERGE, at = i % LOOKS_OF_MERGE * 2;
            int n = 0;
            UNROLL
            for (int m = 0; m < MERGES_AT_ONCE; m++) n = merge == m ? n_splits[m] : n;
            places[k] = nullptr;
            if (i >= ALL || at / PART_WORDS >= n) continue;
            const int number = first + merge * N_BLOCKS;
            places[k] = part_of(tape, layer, number / N_HEADS, number % N_HEADS, 0) + at;
            look_two(places[k], words[k]);
        }
        UNROLL
        for (int k = 0; k < AT_ONCE; k++) {
            if (places[k] == nullptr) continue;
            await_two(tape, places[k], p.beat, words[k]);
            const uint2 pair = {(u32)words[k][0], (u32)words[k][1]};
            ((uint2*)p.activations)[begin + k * N_PLAYER_THREADS] = pair;
        }
    }
}

// Two columns of a head, from its splits in order.
DEVICE u32 merged(const float* parts, int n_splits, int column) {
    float top = UNSEEN, total = 0.0f, low = 0.0f, high = 0.0f;
    for (int split = 0; split < n_splits; split++) top = larger(top, parts[split * PART_WORDS + HEAD_WIDTH]);
    for (int split = 0; split < n_splits; split++) {
        const float* const part = parts + split * PART_WORDS;
        const float share = exp2_fast(part[HEAD_WIDTH] - top);
        total += part[HEAD_WIDTH + 1] * share;
        low += part[column] * share;
        high += part[column + 1] * share;
    }
    const float each = 1.0f / total;
    return pair_of(low * each, high * each);
}

DEVICE void merge_heads(const Player& p, const Tape& tape, int layer, int n_rows, int window) {
    NOT_UNROLLED
    for (int first = block(); first < n_rows * N_HEADS; first += MERGES_AT_ONCE * N_BLOCKS) {
        int n_splits[MERGES_AT_ONCE];
        UNROLL
        for (int m = 0; m < MERGES_AT_ONCE; m++) n_splits[m] = splits_of(p, first + m * N_BLOCKS, n_rows, window);
        receive_parts(p, tape, layer, first, n_splits);
        sync_players();
        UNROLL
        for (int m = 0; m < MERGES_AT_ONCE; m++) {
            const int number = first + m * N_BLOCKS;  // row * N_HEADS + head
            u64* const to = tape.seen + ((u64)(layer & 1) * MAX_ROWS * N_HEADS + number) * (HEAD_WIDTH / 2);
            // Another head's columns fall to other threads.
            const int mine = (p.thread + m * (N_PLAYER_THREADS / MERGES_AT_ONCE)) % N_PLAYER_THREADS;
            for (int i = mine; n_splits[m] > 0 && i < HEAD_WIDTH / 2; i += N_PLAYER_THREADS) {
                const float* const parts = (const float*)p.activations + m * SPLITS * PART_WORDS;
                put(to + i, merged(parts, n_splits[m], 2 * i), p.beat);
            }
        }
        sync_players();
    }
}

// From tape.qkv to tape.seen, for all rows of the step. No player may be reading activations; after it all may write.
DEVICE void attention(Player& p, const Tape& tape, int layer, int n_rows) {
    const int window = tape.windows[layer];
    const Deal deal = deal_items(p, n_rows, window);
    NOT_UNROLLED
    for (int first = block(); first < deal.n; first += ITEMS_AT_ONCE * N_BLOCKS) {
        const int n_items = min(ITEMS_AT_ONCE, (deal.n - first + N_BLOCKS - 1) / N_BLOCKS);
        for (int i = p.warp; i < n_items; i += N_PLAYERS) {
            const Item item = item_of(p, deal, first + i * N_BLOCKS, window);
            if (p.lane == 0) *item_place(p, i) = item;
        }
        sync_players();
        look_at_items(p, tape, layer, n_items);
    }
    merge_heads(p, tape, layer, n_rows, window);
}
