// What attention can compute in a step before the queries arrive: the items of a block, their pages, RoPE cos and sin.
//
// All of it follows from the rows' positions and the layer's window. So a block computes it once a step, and again only
// if a layer has another window: in every layer, reading the page table and the angles would be on the critical path.
#pragma once
#include "parts.h"

constexpr int KEPT_BYTES = KEPT == TYPE_F32 ? 4 : 2;
constexpr int LINE_BYTES = HEAD_WIDTH * KEPT_BYTES;  // of one head at one position
constexpr int LINES = GROUP + 2;                     // of an item: queries, the row's own key, its own value
constexpr int MOST_ITEMS = (MAX_ROWS * QUERY_GROUPS * SPLITS + N_BLOCKS - 1) / N_BLOCKS;  // of a block
constexpr int ROOM_FOR_ITEMS = 32 * 1024 / (LINES * LINE_BYTES);
constexpr int FEW_ITEMS = ROOM_FOR_ITEMS < 8 ? ROOM_FOR_ITEMS : 8;
constexpr int ITEMS_AT_ONCE = MOST_ITEMS < FEW_ITEMS ? MOST_ITEMS : FEW_ITEMS;  // whose lines are fetched together
constexpr int LONGEST_SPLIT =
    (MAX_PAGES(0) * PAGE_TOKENS(0) + LEAST_SPLIT * SPLITS - 1) / (LEAST_SPLIT * SPLITS) * LEAST_SPLIT;
constexpr int PAGES_OF_SPLIT = LONGEST_SPLIT / PAGE_TOKENS(0) + 2;
constexpr int ROPE_PAIRS = ROPE_HALF > 0 ? ROPE_HALF : 1;

// One split of one group of query heads of one row.
struct Item {
    int row, group, split;
    int begin, end;  // the positions that it attends to
    int is_last;     // the row's own position is among them: end - 1
    u32 own_line;    // where the row's own key and value are kept, in chunks
    int padding;
};

struct AttentionPlan {
    Cache caches[N_LAYERS];
    float2 cos_sin[ROPE_KINDS * MAX_ROWS][ROPE_PAIRS];  // cosine and sine of each pair, by kind and row
    Item items[ITEMS_AT_ONCE];      // of this block: the first ones, or those at hand where there are more
    int pages[ITEMS_AT_ONCE][PAGES_OF_SPLIT];  // of each item, from that of `begin` on
    int n_splits[MAX_ROWS];
    int n_items;                    // in `items`
    int n_all;                      // of all blocks
    int until;                      // the next layer that needs another plan
};
static_assert(sizeof(AttentionPlan) <= ATTENTION_PLAN_BYTES, "backends/tape/sizes.py makes room for another plan");

// Which of the model's kinds of RoPE a layer has; -1: none.
#if ROPE_BY_LAYER
CONSTANT_TABLE signed char ROPE_OF[N_LAYERS] = {LAYER_ROPES};
DEVICE int rope_of(int layer) { return ROPE_OF[layer]; }
#else
DEVICE int rope_of(int) { return 0; }
#endif

// Made from shared_memory() on the spot, so that the compiler knows its address space.
DEVICE AttentionPlan& attention_plan_here() { return *(AttentionPlan*)((Shared*)shared_memory())->plan; }
