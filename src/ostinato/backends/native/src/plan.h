// What the loop is opened over and what a chunk asks for: structs of C, field by field the same in
// backends/native/plan.py.
#pragma once

#include "attention.h"
#include "block.h"
#include "step_boundary.h"
#include "tiles.h"

namespace loop {

constexpr int MOST_PARTS = 4;  // matrices above one another that are one product: q, k and v; gate and up

struct Product {
    int n_parts, rows;
    Matrix parts[MOST_PARTS];
    const float *bias, *scale;  // [rows], or null; the scale is of what comes out, its bias too
};

// A recurrent block. Its states lie one slot after the other, channels last (mixer.h).
struct Mixer {
    // mamba2: gate, what is scanned, b and c, the steps; mamba: what is scanned, and its gate; a short convolution: the
    // gate before it, the one after it, what is convolved; a delta net: query, key, value, gate, beta, alpha
    Product into;
    Product select, step;  // mamba's steps, b and c of the convolved input
    Product out;
    const float *conv_weight, *conv_bias;  // [kernel][channels]; [channels], or null
    const float *a, *d, *dt_bias;          // a: [heads], or mamba's [state][inner]
    const float* norm;                     // of the gated output, [inner], a delta net's [value_width], or null
    block::Norm norms[3];                  // of mamba's step, b and c
    float *inputs, *scanned;               // states: the last inputs of the convolution, and of the scan
    // of a delta net: `state` is the width of a key, `n_groups` counts key heads, which value heads share side by side, or
    // `tiled`: n_groups apart
    int kind, inner, state, kernel, n_heads, n_groups, dt_rank, norm_first, tiled;
    float input_scale;  // of what goes in; 0: none
    float norm_eps, least_step, most_step;
};

// Latent attention: all heads attend to one key, a part that is rotated and the compressed row behind it, which is the
// value too; the matrices of each head stand beside its queries and its output.
struct Latent {
    Product q_a, q_b, kv_a;     // q_a: none where q_rank is 0; kv_a: the compressed row, then what is rotated
    block::Norm q_a_norm, kv_a_norm;
    const Product* heads;       // of each head in turn: its queries' to the compressed row's space, and out of it
    int q_rank, kv_rank, plain, rotated, expanded;  // plain: of a query, before its rotated part; expanded: of a value

    int query_width() const { return plain + rotated; }
};

enum MixerKind { MAMBA, MAMBA2, SHORT_CONV, DELTA };
// Where the gates on what query heads have seen stand: nowhere, each behind its query, all behind all queries.
enum Gates { NO_GATES, BEHIND_QUERY, BEHIND_QUERIES };

// What q_norm and k_norm are of: each head before its rotation, all heads of a row, each head after its rotation.
enum QkNorm { OF_HEADS, OF_ROWS, AFTER_ROPE };

// Attention is absent where `n_heads` is 0, the feed-forward block where `ff_width` is 0.
// A block normalises the residual for its input, normalises its output by `after` and adds it to the residual;
// post-norm layers (encoders) normalise the residual after the addition.
struct Layer {
    block::Norm attention_norm, after_attention, attention_post_norm;
    block::Norm mlp_norm, after_mlp, mlp_post_norm, q_norm, k_norm, v_norm;
    // Of experts beside a dense block: of what router and experts take in, where mlp_norm is the dense block's alone;
    // and of what each side gives.
    block::Norm router_norm, experts_norm, after_experts, after_shared;
    block::Norm after_part;  // of what a layer makes of its part of the second embedding
    Product qkv, out, gate_up, down, router;  // gate_up: up alone where there is no gate
    // Of experts: the block that every row goes through besides, and what leads into their latent space and out of it.
    Product shared_gate_up, shared_down, into_latent, out_of_latent;
    Product part_gate, part_out;  // of a layer's part of the second embedding
    const Product* experts;     // gate_up and down of each in turn, or null
    const float* choice_bias;   // [experts], or null
    const float* share_scales;  // [experts], or null
    const float* sinks;         // [heads], or null
    const Latent* latent;       // what leads into attention and out of it, in place of qkv; or null
    const Mixer* mixer;         // alone, or beside attention on the same input; or null
    attention::Cache cache;
    int window;  // positions that it sees; 0: all
    int rope;    // which of the plan's; -1: none
    int ff_width;
    int group;   // which of a sequence's page tables
    int gated;
    int qk_norm;   // of `QkNorm`
    int parallel;  // the MLP takes in what attention did, before the residual gains
    int n_heads, n_kv_heads, head_width, value_width;
    int gates;  // of `Gates`
    int gate_width, gate_activation;  // of a head: as wide as the head, or 1
    int reads_kv;  // its keys and values are an earlier layer's: it has queries only
    int temperature_span;        // positions after which queries grow; 0: never
    float query_scale, softcap;  // 0: no cap
    float temperature;
    float attention_scale;       // of what goes into attention; 0: none
    float out_scale;             // of what the layer gives; 0: none

    bool attends() const { return n_heads > 0; }
    const float* sink_of(int head) const { return sinks ? sinks + head : nullptr; }
    int queries() const { return n_heads / n_kv_heads; }  // that share a key head
    int attended_width() const { return n_heads * value_width; }
    int query_step() const { return gates == BEHIND_QUERY ? 2 * head_width : head_width; }
    int keys_at() const { return n_heads * (head_width + gate_width); }
    int gate_step() const { return gates == BEHIND_QUERY ? 2 * head_width : gate_width; }
    int gates_at() const { return gates == BEHIND_QUERY ? head_width : attended_width(); }
    int qkv_width() const { return keys_at() + (reads_kv ? 0 : latent ? 1 : 2) * n_kv_heads * head_width; }
    bool has_own_norms() const { return router_norm.weight != nullptr; }
};

struct Rope {
    const float* frequencies;  // [sets][half]; a row says which set it has
    int half, neighbours;
    float amplitude;
};

struct Plan {
    View view;
    unsigned long long hash, epoch;
    const Layer* layers;
    const Rope* ropes;
    block::Norm norm, embedding_norm;
    const float *position_embedding, *segment_embedding;  // [context][hidden] and [segments][hidden], or null
    Matrix embedding;
    // The second embedding, of which every layer takes a part of `part_width`, and its product of the first one, each
    // part of which is normed.
    Matrix part_embedding;
    Product part_project;
    block::Norm part_norm;
    Product head;             // an encoder has none
    float* logits;            // [slots][vocab]
    float* last;              // [slots][hidden]: of each slot's prompt, the last row after the last layer
    unsigned char* scratch;   // as long as `scratch_bytes` says
    int n_layers, n_ropes, hidden, widest_ff, part_width;  // 0: there is no second embedding
    // Of experts: no shared block and no latent space where its width is 0.
    int shared_width, shared_gate, latent_width;
    int activation, kept, wide, n_threads, n_slots, max_pages, most_rows, n_tokens, wake;
    block::Router router;  // without experts where it has none
    int causal;  // else a row sees all rows of its part, which is a whole text
    float logit_softcap, embedding_scale, part_scale;  // 0: no cap, no scale
};

// --- a chunk ---

// Consecutive positions of one sequence, from `start` on.
struct Part {
    const int* pages;         // [groups][table_pages]
    int n_rows, start, slot;  // the slot whose `last` row gets the last of these; -1: none
    int table_pages, rope_set;
};

// The requested outputs of some rows of a chunk; null where one is not requested. Rows are computed in slices, so that
// the logits behind log-probabilities need little memory.
struct Outputs {
    const int* rows;      // [n], of the chunk
    float* hidden;        // [n][hidden], after the last norm
    float* logits;        // [n][vocab]; with log-probabilities [slice][vocab], scratch that the caller does not read
    const int* targets;   // [n], and the log-probability of each
    float* logprobs;      // [n]
    int* top_ids;         // [n][n_top], of the first n_tokens ids, the most likely first
    float* top_logprobs;  // [n][n_top]
    int n, slice, n_top, n_tokens;
};

}  // namespace loop
