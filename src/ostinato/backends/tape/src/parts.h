// What the phases of the tape share: the kernel's argument, a block's shared memory, and the state of a compute thread.
//
// Sizes come as constants from `shape.h`, which backends/tape/program.py emits for one model and one card; places in
// the slot table come from `layout.h`. The words: a *block* is one multiprocessor's; *compute warps* are its warps
// that multiply; the *loader* is the one warp that streams the tape. A *tile* is 16 rows of a weight matrix, a
// *chunk* some of its columns.
#pragma once
#include "machine.h"
#include "shape.h"

#define N_COMPUTE_THREADS (N_COMPUTE_WARPS * 32)
#define QUERY_COLUMNS (N_HEADS * HEAD_WIDTH)
#define QKV_COLUMNS ((N_HEADS + 2 * N_KV_HEADS) * HEAD_WIDTH)
#define QUERY_GROUPS (N_HEADS / GROUP)  // of GROUP query heads each: those of a KV head, or an equal part of them
#define GROUPS_A_KV_HEAD (QUERY_GROUPS / N_KV_HEADS)
#define ROW_PADDING 8  // elements between two rows of activations, so that they begin in different banks
#define SUMMARY_WORDS 8

// How a matrix's weights are kept; the numbers are those of backends/tape/pack.py.
#define WEIGHT_HALF 0   // bfloat16 or float16, as activations are
#define WEIGHT_FOUR 1   // 4 bits, scale and minimum for each 32 columns
#define WEIGHT_FIVE 2   // 4 and 1 bits, the same
#define WEIGHT_SIX 3    // 4 and 2 bits, less 32, a scale for each 16 columns
#define WEIGHT_EIGHT 4  // 8 bits, signed, a scale for each 32 columns

// What plain numbers are kept as: KEPT (keys and values, or with KEPT_Q8 what they are multiplied as) and EMBEDDING_TYPE.
#define TYPE_F32 0
#define TYPE_F16 1
#define TYPE_BF16 2

// A matrix on the tape. Its tiles are assigned to the blocks round-robin, tile 0 to block `first`.
struct Segment {
    int weight_type, n_tiles, first, columns;  // columns with padding: a whole number for each compute warp
};

// The segments of a layer, in the order of the tape; after all layers comes the head.
enum { SEGMENT_Q, SEGMENT_K, SEGMENT_V, SEGMENT_OUT, SEGMENT_GATE_UP, SEGMENT_DOWN, SEGMENTS_A_LAYER };
#define SEGMENT_HEAD SEGMENTS_A_LAYER
#define N_SEGMENTS (SEGMENTS_A_LAYER * N_LAYERS + 1)

// What outlasts a launch, in device memory.
struct State {
    u32 tag;     // the last tag that was used; every launch goes on from there
    u32 abort;    // not 0: some wait has outlasted its deadline, and no thread waits any more
};

struct Cache {
    char *keys, *values;  // [cells, N_KV_HEADS, HEAD_WIDTH]
#if KEPT_Q8  // they are bytes, with a float16 scale for each 32
    u16 *key_scales, *value_scales;  // [cells, N_KV_HEADS, HEAD_WIDTH / 32]
#endif
};

// The kernel's one argument. A u64 of a hop holds a value below and its tag above: the tag announces the value.
struct Tape {
    View view;
    u64 plan_hash, epoch;
    const char* tape;
    const u64* tape_at;         // where each block's run begins, [N_BLOCKS + 1]
    const Segment* segments;    // [N_SEGMENTS]
    const float* norms;         // [2 * N_LAYERS + 1][HIDDEN]: before attention, before the MLP; at the end
    const float* qkv_bias;      // [N_LAYERS][QKV_COLUMNS], or null
    const float* qk_norms;      // [N_LAYERS][2][HEAD_WIDTH], or null
    const float* frequencies;   // [ROPE_KINDS][ROPE_SETS][ROPE_HALF]
    const char* embedding;      // [vocab, HIDDEN] of EMBEDDING_TYPE
    const Cache* caches;        // [N_LAYERS]
    const int* windows;         // [N_LAYERS]; 0: all that came before
    const int* groups;          // [N_LAYERS]: which of a slot's page tables; the same where windows are
    u64* x;                     // [4][MAX_ROWS][HIDDEN] float32: the residual stream, before attention (0, 1) and the MLP (2, 3)
    u64* qkv;                   // [2][MAX_ROWS][QKV_COLUMNS] float32
    u64* parts;                 // [2][MAX_ROWS][N_HEADS][SPLITS][HEAD_WIDTH + 2] float32: sums, the largest, the total
    u64* attended;                  // [2][MAX_ROWS][QUERY_COLUMNS / 2] pairs
    u64* inside;                // [2][MAX_ROWS][FF / 2] pairs
    u64* summaries;             // [MAX_ROWS][N_BLOCKS][SUMMARY_WORDS]: of a block's logits; see sampling.h
    u64* marks;                 // [N_BLOCKS] whose writes lie in memory, [MAX_ROWS] rows that are chosen, [1] the step boundary,
                                // [MAX_ROWS] rows whose masks are found
    float* logits;              // [MAX_ROWS][vocab]
    float* scaled;              // [MAX_ROWS][vocab]: the logits that sampling reads, after penalties and temperature
    State* state;
    const float* after_norms;   // [N_LAYERS][2][HIDDEN]: after attention, after the MLP; or null
    u64* squares;               // [4][MAX_ROWS][HIDDEN / 16] float32: of the tiles of y, as x; or null. See after_norm.h
    u64* clock;                 // [N_BLOCKS][N_CLOCKED] ns: when a block began each phase of its last step; or null
    int single;                 // not 0: one step and its step boundary, as the host paces them; for comparisons
};

// A block's shared memory; the ring's stages and then the activations follow it.
#define RESIDUAL_TILES ((HIDDEN / 16 + N_BLOCKS - 1) / N_BLOCKS)  // of x, that a block makes
#define RESIDUALS (2 + HAS_AFTER_NORMS)
#define SUM_ROWS (MAX_ROWS <= 4 ? 4 : 8)
#define RING_AT ((int)(sizeof(Shared) + 127) / 128 * 128)
struct Shared {
    Gate full[STAGES], empty[STAGES];
    u64 plan[ATTENTION_PLAN_BYTES / 8];                              // of attention; see attention_plan.h
    u32 over;                                                  // the compute warps set it for the loader: no more steps
    u32 goes;                                                  // what this block has read from the step boundary
    Segment segments[N_SEGMENTS];
    float sums[N_COMPUTE_WARPS * TILES_AT_ONCE * 16 * SUM_ROWS];     // of a product, by compute warp; see tiles.h
    float small[N_COMPUTE_WARPS * MAX_ROWS * 4];                     // reductions over the block
    float scale[MAX_ROWS];                                     // of each row's norm
    float residual[RESIDUALS][RESIDUAL_TILES * 16 * MAX_ROWS]; // what `output` and `down` add to, [tile][r][row]
    int slot[MAX_ROWS], position[MAX_ROWS];                    // of the step's rows; receive_normed of layer 0 sets them
    u32 masked_at;                                             // the tag at which the step's masks were found
};

// The state of a compute thread.
struct ComputeThread {
    int thread, warp, lane;  // of the compute warps
    int stage, phase;        // where in the ring it reads
    int parity;                // which half of the sums the next product takes
    u32 tag;                // the tag of the current layer
    char* ring;
    u16* activations;        // [rows][columns + ROW_PADDING], or int8 of the same bytes
    Shared* shared;
};

DEVICE u64* mask_mark(const Tape& tape, int row) { return tape.marks + N_BLOCKS + MAX_ROWS + 1 + row; }
DEVICE void await_mark(const Tape& tape, const u64* mark, u32 tag) {
    for (BoundedWait waiting(tape.state); (u32)(load_acquire(mark) >> 32) != tag && waiting.keep_waiting();) {
    }
}

// At the beginning of everything that is long: see thread_anew.
DEVICE void renew(ComputeThread& p) {
    p.thread = thread_anew();
    p.warp = p.thread / 32;
    p.lane = p.thread % 32;
}
