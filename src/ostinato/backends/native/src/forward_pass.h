// The forward through the layers: of a step's rows or a chunk's, side by side, each with its own position and pages.
//
// Every product is shared out over the members of the team by tiles of its output, everything between products by rows.
// Where rows are few, each member prepares all of them for itself, which costs less than one more barrier: a step of one
// row has five barriers a layer. All memory is handed in when the loop is opened, and stays where it is.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "attention.h"
#include "block.h"
#include "lanes.h"
#include "mixer.h"
#include "plan.h"
#include "sampler.h"
#include "team.h"
#include "tiles.h"

namespace loop {

constexpr int FEW_ROWS = 2;             // so few rows are prepared by every member for itself
constexpr int ROWS_TOGETHER = 16;       // of a chunk, whose heads a member takes at once
constexpr int CHANNELS_TOGETHER = 256;  // of a recurrent block, that a member takes at once

static inline int padded(int n) { return (n + LANES - 1) / LANES * LANES; }

// Pieces of one memory, each on a line of its own; without memory it only counts.
struct Pieces {
    unsigned char* at;
    size_t used = 0;

    template <class T>
    T* take(size_t n) {
        T* piece = at ? reinterpret_cast<T*>(at + used) : nullptr;
        used = (used + n * sizeof(T) + 127) / 128 * 128;
        return piece;
    }
};

// What one member keeps for itself.
struct ThreadScratch {
    float *x, *row;          // [few rows][hidden]; [few rows][widest]
    float* parts;            // a row of the second embedding
    float *queries, *partial;  // of a key head's group, or of a chunk's rows; what attention has seen
    unsigned char *inputs, *head_inputs, *sampler;  // head_inputs: of a head of latent attention, all rows
};

// The forward through the layers: the rows, and the memory that members share. Independent of team and step boundary.
struct ForwardPass {
    Plan plan;

    // The rows that are going through.
    int n_rows = 0;
    bool is_chunk = false;  // rows of parts, one after the other; else each of its own slot
    const int *tokens = nullptr, *segments = nullptr;  // which of two texts a token is of; null: the first
    const Part* parts = nullptr;
    const Outputs* outputs = nullptr;
    int n_runs = 0, n_parts = 0, first_slot = 0;

    // Memory that members share.
    int hidden_stride, attended_stride, qkv_stride, inside_stride, n_blocks, most_units, widest;
    int into_stride, convolved_stride, selected_stride, steps_stride;  // of recurrent blocks
    float *into, *convolved, *selected, *steps, *mixed;
    int compressed_stride, expanded_stride;  // of latent attention
    float *compressed, *expanded;
    float *x, *normed, *qkv, *attended, *out, *inside, *cos_sin, *block_partials, *block_mixed, *scores, *choices, *shares;
    float *expert_out, *latent, *shared_out;
    float* parts_of_rows;  // [rows][layers][part_width]: of the second embedding
    int parts_stride;
    float* first_logits;
    // Of experts: the expert of each (row, choice); the (row, choice) of each routed row; the inverse; the first routed
    // row of each expert.
    int *chosen, *taker, *place, *first_of;
    // Of a chunk: by row its part and position; the first row of each run of rows that attention takes together.
    int *part_of, *chunk_position, *run_begins;
    unsigned char *inputs, *expert_inputs;
    std::vector<ThreadScratch> own;

    explicit ForwardPass(const Plan& p) : plan(p) { n_bytes = lay_out(p.scratch); }
    size_t n_bytes;

    // --- memory ---

    static int cos_sin_width(const Plan& p) {
        int width = 0;
        for (int i = 0; i < p.n_ropes; i++) width += 2 * p.ropes[i].half;
        return width;
    }

    // The largest of a size over the layers with attention.
    template <class F>
    static int widest_of(const Plan& p, F size) {
        int found = 0;
        for (int i = 0; i < p.n_layers; i++) {
            const int own = p.layers[i].attends() ? size(p.layers[i]) : 0;
            if (own > found) found = own;
        }
        return found;
    }

    size_t lay_out(unsigned char* memory) {
        const Plan& p = plan;
        const int rows = p.most_rows > p.n_slots ? p.most_rows : p.n_slots;
        const int group = widest_of(p, [](const Layer& of) { return of.queries(); });
        const int head_width = widest_of(p, [](const Layer& of) { return of.head_width; });
        const int experts_rows = p.router.n_experts ? rows * p.router.n_used : 0;
        hidden_stride = padded(p.hidden);
        attended_stride = widest_of(p, [](const Layer& of) { return of.attended_width(); });
        qkv_stride = widest_of(p, [](const Layer& of) { return of.qkv_width(); });
        inside_stride = 2 * padded(p.widest_ff);
        n_blocks = (p.max_pages * attention::PAGE + attention::BLOCK - 1) / attention::BLOCK;
        most_units = 2 * p.n_threads;
        widest = hidden_stride > attended_stride ? hidden_stride : attended_stride;
        widest = at_least(widest, p.part_width);
        inside_stride = at_least(inside_stride, p.part_width);
        parts_stride = padded(p.n_layers * p.part_width);
        bool beside = false;  // whether a layer has both attention and a recurrent block
        into_stride = convolved_stride = selected_stride = steps_stride = 0;
        for (int i = 0; i < p.n_layers; i++)
            if (const Mixer* mixer = p.layers[i].mixer) {
                beside = beside || p.layers[i].attends();
                widest = at_least(widest, mixer->inner);
                into_stride = at_least(into_stride, mixer->into.rows);
                convolved_stride = at_least(convolved_stride, channels_of(*mixer));
                selected_stride = at_least(selected_stride, mixer->select.rows);
                steps_stride = at_least(steps_stride, mixer->kind == MAMBA ? mixer->inner : 2 * mixer->n_heads);
            }
        compressed_stride = expanded_stride = 0;
        for (int i = 0; i < p.n_layers; i++)
            if (const Latent* own_latent = p.layers[i].latent) {
                const int n_heads = p.layers[i].n_heads, row = own_latent->kv_rank + own_latent->rotated;
                compressed_stride = at_least(compressed_stride, row + own_latent->q_rank);
                expanded_stride = at_least(expanded_stride, n_heads * own_latent->query_width());
                expanded_stride = at_least(expanded_stride, n_heads * own_latent->expanded);
                widest = at_least(widest, own_latent->q_rank);
                widest = at_least(widest, expanded_stride);
            }
        const int most_cols = widest > inside_stride / 2 ? widest : inside_stride / 2;
        const int queries = group > ROWS_TOGETHER ? group : ROWS_TOGETHER;

        Pieces pieces{memory};
        x = pieces.take<float>(size_t(rows) * hidden_stride);
        normed = pieces.take<float>(size_t(rows) * widest);
        qkv = pieces.take<float>(size_t(rows) * qkv_stride);
        attended = pieces.take<float>(size_t(rows) * attended_stride);
        out = pieces.take<float>(size_t(rows) * hidden_stride);
        inside = pieces.take<float>(size_t(experts_rows > rows ? experts_rows : rows) * inside_stride);
        cos_sin = pieces.take<float>(size_t(rows) * cos_sin_width(p));
        block_partials = pieces.take<float>(size_t(2) * most_units * group * n_blocks);
        block_mixed = pieces.take<float>(size_t(most_units) * group * n_blocks * head_width);
        inputs = pieces.take<unsigned char>(inputs_bytes(most_cols, rows));
        scores = pieces.take<float>(size_t(rows) * padded(p.router.n_scores));
        choices = pieces.take<float>(size_t(2) * rows * p.router.n_experts);
        latent = pieces.take<float>(size_t(rows) * padded(p.latent_width));
        shared_out = pieces.take<float>(p.shared_width ? size_t(rows) * hidden_stride : 0);
        shares = pieces.take<float>(experts_rows);
        chosen = pieces.take<int>(experts_rows);
        taker = pieces.take<int>(experts_rows);
        place = pieces.take<int>(experts_rows);
        first_of = pieces.take<int>(p.router.n_experts + 1);
        expert_out = pieces.take<float>(size_t(experts_rows) * hidden_stride);
        expert_inputs = pieces.take<unsigned char>(experts_rows * expert_row_bytes());
        into = pieces.take<float>(size_t(rows) * into_stride);
        convolved = pieces.take<float>(size_t(rows) * convolved_stride);
        selected = pieces.take<float>(size_t(rows) * selected_stride);
        steps = pieces.take<float>(size_t(rows) * steps_stride);
        mixed = pieces.take<float>(beside ? size_t(rows) * hidden_stride : 0);
        compressed = pieces.take<float>(size_t(rows) * compressed_stride);
        expanded = pieces.take<float>(size_t(rows) * expanded_stride);
        parts_of_rows = pieces.take<float>(size_t(rows) * parts_stride);
        first_logits = pieces.take<float>(p.head.rows);
        part_of = pieces.take<int>(rows);
        chunk_position = pieces.take<int>(rows);
        run_begins = pieces.take<int>(rows + 1);
        own.clear();
        for (int i = 0; i < p.n_threads; i++) {
            ThreadScratch mine;
            mine.x = pieces.take<float>(size_t(FEW_ROWS) * hidden_stride);
            mine.row = pieces.take<float>(size_t(FEW_ROWS) * widest);
            mine.parts = pieces.take<float>(parts_stride);
            mine.queries = pieces.take<float>(size_t(queries) * head_width);
            mine.partial = pieces.take<float>(size_t(2) * attention::MOST_QUERIES * head_width);
            mine.inputs = pieces.take<unsigned char>(inputs_bytes(most_cols, FEW_ROWS));
            mine.head_inputs = pieces.take<unsigned char>(
                compressed_stride ? inputs_bytes(at_least(head_width, compressed_stride), rows) : 0
            );
            mine.sampler = pieces.take<unsigned char>(sampler_bytes(plan.head.rows));
            own.push_back(mine);
        }
        return pieces.used;
    }

    static int at_least(int n, int wanted) { return padded(wanted) > n ? padded(wanted) : n; }

    // Channels of a recurrent block's convolution: mamba2's b and c and a delta net's queries and keys go through it too.
    static int channels_of(const Mixer& w) {
        return w.inner + (w.kind == MAMBA2 || w.kind == DELTA ? 2 * w.n_groups * w.state : 0);
    }

    size_t expert_row_bytes() const {
        const int cols = plan.hidden > plan.widest_ff ? plan.hidden : plan.widest_ff;
        return (inputs_bytes(cols, 1) + 127) / 128 * 128;
    }

    // --- rows ---

    bool few() const { return n_rows <= FEW_ROWS; }
    int slot_of(int row) const { return TABLE_row_slot(plan.view)[row]; }
    int token_of(int row) const { return is_chunk ? tokens[row] : TABLE_token(plan.view)[slot_of(row)]; }
    int position_of(int row) const { return is_chunk ? chunk_position[row] : TABLE_position(plan.view)[slot_of(row)]; }
    int segment_of(int row) const { return is_chunk && segments ? segments[row] : 0; }
    int rope_set_of(int row) const {
        return is_chunk ? parts[part_of[row]].rope_set : TABLE_rope_set(plan.view)[slot_of(row)];
    }
    const int* pages_of(const Layer& layer, int row) const {
        if (!is_chunk) return PAGE_TABLE(plan.view, slot_of(row), layer.group);
        const Part& part = parts[part_of[row]];
        return part.pages + size_t(layer.group) * part.table_pages;
    }
    const float* cos_sin_of(int row, int rope) const {
        const float* at = cos_sin + size_t(row) * cos_sin_width(plan);
        for (int i = 0; i < rope; i++) at += 2 * plan.ropes[i].half;
        return at;
    }
    float* residual(const team::Member& m, int row) {
        return (few() ? own[m.me].x : x) + size_t(row) * hidden_stride;
    }

    // work(row) for each row: by every member for itself where rows are few, else each by one member.
    template <class F>
    void each_row(const team::Member& m, F work) const {
        if (!few()) return m.each(n_rows, work);
        for (int row = 0; row < n_rows; row++) work(row);
    }

    // Prepare what `row_of_input` makes of each row as the input of a product, with a barrier where rows are many.
    template <class F>
    Inputs prepared(team::Member& m, int cols, F row_of_input) {
        const Inputs in = inputs_over(few() ? own[m.me].inputs : inputs, cols, n_rows, plan.wide != 0);
        each_row(m, [&](int row) { prepare(in, row_of_input(row), 0, row, row + 1); });
        if (!few()) m.barrier();
        return in;
    }

    float* normed_row(const team::Member& m, int row) {
        return (few() ? own[m.me].row : normed) + size_t(row) * widest;
    }

    // What a block has made of rows, and the norms on its way into the residual; `beside`: what another has made of the
    // same input, or null. `scale`: of the residual in the end; 0: none.
    struct Gain {
        const float* rows;
        const block::Norm *after, *sum;
        const float* beside;
        float scale;
    };

    // The residual gains what the last block made of it, and is normed for the next one.
    Inputs next_block(team::Member& m, const Gain& gained, const block::Norm& norm, float scale = 0) {
        return prepared(m, plan.hidden, [&](int row) {
            float *at = residual(m, row), *to = normed_row(m, row);
            gain(at, gained, row, to);
            block::normed(norm, at, plan.hidden, to);
            if (scale != 0) block::scale_by(to, scale, plan.hidden);
            return to;
        });
    }

    // The same for a block that takes in what the last one did: the residual is normed before it gains.
    Inputs parallel_block(team::Member& m, const Gain& gained, const block::Norm& norm) {
        return prepared(m, plan.hidden, [&](int row) {
            float *at = residual(m, row), *to = normed_row(m, row);
            block::normed(norm, at, plan.hidden, to);
            block::add_to(at, gained.rows + size_t(row) * hidden_stride, plan.hidden);
            return to;
        });
    }

    void gain(float* at, const Gain& gained, int row, float* room) const {
        if (!gained.rows) return;
        const float* more = gained.rows + size_t(row) * hidden_stride;
        if (gained.beside) {
            memcpy(room, more, plan.hidden * sizeof(float));
            block::add_to(room, gained.beside + size_t(row) * hidden_stride, plan.hidden);
            more = room;
        }
        if (gained.after->weight) {
            block::normed(*gained.after, more, plan.hidden, room);
            more = room;
        }
        block::add_to(at, more, plan.hidden);
        block::normed(*gained.sum, at, plan.hidden, at);
        if (gained.scale != 0) block::scale_by(at, gained.scale, plan.hidden);
    }

    // --- products ---

    // Tiles [first, last) of a product of so many rows, its parts one after the other in each row of `to`.
    __attribute__((noinline)) static void tiles_of(
        const Product& w, const Inputs& in, int n, float* to, long stride, int first, int last
    ) {
        int tile = 0, column = 0;
        for (int part = 0; part < w.n_parts; part++) {
            const Matrix& matrix = w.parts[part];
            const int n_tiles = (matrix.rows + LANES - 1) / LANES;
            const int from = first > tile ? first - tile : 0, end = last < tile + n_tiles ? last - tile : n_tiles;
            if (from < end) {
                multiply(matrix, in, n, to + column, stride, from, end);
                const int begin = column + from * LANES;
                const int n_columns = (end * LANES < matrix.rows ? end * LANES : matrix.rows) - from * LANES;
                for (int row = 0; w.bias && row < n; row++)
                    block::add_to(to + row * stride + begin, w.bias + begin, n_columns);
                for (int row = 0; w.scale && row < n; row++)
                    block::multiply_by(to + row * stride + begin, w.scale + begin, n_columns);
            }
            tile += n_tiles;
            column += matrix.rows;
        }
    }

    static int n_tiles(const Product& w) {
        int n = 0;
        for (int part = 0; part < w.n_parts; part++) n += (w.parts[part].rows + LANES - 1) / LANES;
        return n;
    }

    void product(team::Member& m, const Product& w, const Inputs& in, float* to, long stride) {
        int first, last;
        m.share(n_tiles(w), first, last);
        tiles_of(w, in, n_rows, to, stride, first, last);
    }

    // Gate and up of the same columns, and act(gate) * up in gate's place: [rows][gate, up].
    void inner_tiles(const Product& w, int ff, const Inputs& in, int n, float* to, int first, int last) const {
        const int begin = first * LANES, stop = last * LANES < ff ? last * LANES : ff;
        const int up = (ff + LANES - 1) / LANES;  // gate's tiles come first
        tiles_of(w, in, n, to, inside_stride, first, last);
        tiles_of(w, in, n, to, inside_stride, up + first, up + last);
        for (int row = 0; row < n; row++) {
            float* at = to + size_t(row) * inside_stride;
            block::gated(at + begin, at + ff + begin, stop - begin, plan.activation);
        }
    }

    // The same without a gate: act(up), [rows][up].
    void plain_tiles(const Product& w, int ff, const Inputs& in, int n, float* to, int first, int last) const {
        const int begin = first * LANES, stop = last * LANES < ff ? last * LANES : ff;
        tiles_of(w, in, n, to, inside_stride, first, last);
        for (int row = 0; row < n; row++)
            block::activate(to + size_t(row) * inside_stride + begin, stop - begin, plan.activation);
    }

    // --- the way through ---

    // A row of an embedding beside the tokens', where there is one.
    void add_embedding(float* at, const float* embedding, int which) const {
        if (embedding) block::add_to(at, embedding + size_t(which) * plan.hidden, plan.hidden);
    }

    void embed(team::Member& m) {
        each_row(m, [&](int row) {
            float* at = residual(m, row);
            row_of(plan.embedding, token_of(row), at);
            if (plan.embedding_scale != 0) block::scale_by(at, plan.embedding_scale, plan.hidden);
            add_embedding(at, plan.segment_embedding, segment_of(row));
            add_embedding(at, plan.position_embedding, position_of(row));
            block::normed(plan.embedding_norm, at, plan.hidden, at);
        });
        m.each(n_rows, [&](int row) {
            for (int i = 0; i < plan.n_ropes; i++) {
                const Rope& rope = plan.ropes[i];
                float* to = const_cast<float*>(cos_sin_of(row, i));
                const float* frequencies = rope.frequencies + size_t(rope_set_of(row)) * rope.half;
                block::cos_sin_of(position_of(row), frequencies, rope.half, rope.amplitude, to);
            }
        });
        m.barrier();
        if (plan.part_width) embed_parts(m);
    }

    // The parts of the second embedding, beside what a product makes of the first one.
    void embed_parts(team::Member& m) {
        const Inputs in = prepared(m, plan.hidden, [&](int row) { return residual(m, row); });
        product(m, plan.part_project, in, parts_of_rows, parts_stride);
        m.barrier();
        const int width = plan.part_width, n = plan.n_layers * width;
        m.each(n_rows, [&](int row) {
            float *to = parts_of_rows + size_t(row) * parts_stride, *own_row = own[m.me].parts;
            for (int at = 0; at < n; at += width) block::normed(plan.part_norm, to + at, width, to + at);
            row_of(plan.part_embedding, token_of(row), own_row);
            block::scale_by(own_row, plan.part_scale, n);
            block::add_to(to, own_row, n);
            block::scale_by(to, 0.70710678f, n);
        });
        m.barrier();
    }

    void through(team::Member& m) {
        embed(m);
        Gain gained{};
        for (int i = 0; i < plan.n_layers; i++) {
            const Layer& layer = plan.layers[i];
            if (layer.attends() || layer.mixer) gained = mix_rows(m, layer, gained);
            if (layer.ff_width) {
                const block::Norm& norm = layer.has_own_norms() ? layer.router_norm : layer.mlp_norm;
                const Inputs in = layer.parallel ? parallel_block(m, gained, norm) : next_block(m, gained, norm);
                if (layer.experts) mlp_experts(m, layer, in);
                else mlp(m, layer, in);
                gained = {out, &layer.after_mlp, &layer.mlp_post_norm, nullptr, 0};
            }
            if (plan.part_width) gained = through_part(m, layer, i, gained);
            gained.scale = layer.out_scale;
        }
        finish_rows(m, gained);
    }

    // Attention, a recurrent block, or both on the same normed rows.
    Gain mix_rows(team::Member& m, const Layer& layer, const Gain& gained) {
        const Mixer* mixer = layer.mixer;
        const float scale = layer.attends() ? layer.attention_scale : mixer->input_scale;
        const Inputs in = next_block(m, gained, layer.attention_norm, scale);
        const float* beside = layer.attends() && mixer ? mixed : nullptr;
        const Gain made{out, &layer.after_attention, &layer.attention_post_norm, beside, 0};
        if (!layer.attends()) {
            recur(m, *mixer, in, out);
            return made;
        }
        if (layer.latent) return latent_rows(m, layer, *layer.latent, in, made);
        product(m, layer.qkv, in, qkv, qkv_stride);
        m.barrier();
        if (layer.qk_norm == OF_ROWS) {
            m.each(n_rows, [&](int row) { norm_rows(layer, row); });
            m.barrier();
        }
        if (mixer) recur(m, *mixer, next_block(m, {}, layer.attention_norm, mixer->input_scale), mixed);
        if (is_chunk) attend_chunk(m, layer);
        else attend_rows(m, layer);
        m.barrier();
        const Inputs seen = prepared(m, layer.attended_width(), [&](int row) { return gated_heads(m, layer, row); });
        product(m, layer.out, seen, out, hidden_stride);
        m.barrier();
        return made;
    }

    // --- latent attention ---

    Gain latent_rows(team::Member& m, const Layer& layer, const Latent& w, const Inputs& in, const Gain& made) {
        compress(m, w, in);
        absorb(m, layer, w);
        if (is_chunk) attend_chunk(m, layer);
        else attend_rows(m, layer);
        m.barrier();
        each_row(m, [&](int row) { attended_row(m, layer, row); });
        if (!few()) m.barrier();
        for (int head = m.me; head < layer.n_heads; head += m.n)
            product_of_head(m, w.heads[2 * head + 1], w.kv_rank, expanded + head * w.expanded, expanded_stride,
                         [&](int row) { return seen_row(m, layer, row) + head * layer.value_width; });
        m.barrier();
        const Inputs seen = prepared(m, layer.n_heads * w.expanded, [&](int row) {
            return expanded + size_t(row) * expanded_stride;
        });
        product(m, layer.out, seen, out, hidden_stride);
        m.barrier();
        return made;
    }

    // Rows to compressed ones, [compressed row, what is rotated of its key, compressed query], and to queries of all heads.
    void compress(team::Member& m, const Latent& w, const Inputs& in) {
        const int queries_at = w.kv_rank + w.rotated;
        product(m, w.kv_a, in, compressed, compressed_stride);
        product(m, w.q_rank ? w.q_a : w.q_b, in, w.q_rank ? compressed + queries_at : expanded,
                w.q_rank ? compressed_stride : expanded_stride);
        m.barrier();
        if (!w.q_rank) return;
        const Inputs own_queries = prepared(m, w.q_rank, [&](int row) {
            float* to = normed_row(m, row);
            block::normed(w.q_a_norm, compressed + size_t(row) * compressed_stride + queries_at, w.q_rank, to);
            return to;
        });
        product(m, w.q_b, own_queries, expanded, expanded_stride);
        m.barrier();
    }

    // To queries and the one key that attention takes: first what is rotated, then the compressed row, or a query there.
    void absorb(team::Member& m, const Layer& layer, const Latent& w) {
        const size_t rotated_bytes = w.rotated * sizeof(float);
        m.each(n_rows, [&](int row) {
            float *to = qkv + size_t(row) * qkv_stride, *key = to + size_t(layer.n_heads) * layer.head_width;
            const float *from = compressed + size_t(row) * compressed_stride, *queries = expanded + size_t(row) * expanded_stride;
            memcpy(key, from + w.kv_rank, rotated_bytes);
            block::normed(w.kv_a_norm, from, w.kv_rank, key + w.rotated);
            for (int head = 0; head < layer.n_heads; head++)
                memcpy(to + size_t(head) * layer.head_width, queries + size_t(head) * w.query_width() + w.plain, rotated_bytes);
        });
        for (int head = m.me; head < layer.n_heads; head += m.n)
            product_of_head(m, w.heads[2 * head], w.plain, qkv + size_t(head) * layer.head_width + w.rotated, qkv_stride,
                         [&](int row) { return expanded + size_t(row) * expanded_stride + size_t(head) * w.query_width(); });
        m.barrier();
    }

    // The product of one head for all rows, by one member.
    template <class F>
    void product_of_head(team::Member& m, const Product& w, int cols, float* to, long stride, F row_of_input) {
        const Inputs in = inputs_over(own[m.me].head_inputs, cols, n_rows, plan.wide != 0);
        for (int row = 0; row < n_rows; row++) prepare(in, row_of_input(row), 0, row, row + 1);
        tiles_of(w, in, n_rows, to, stride, 0, n_tiles(w));
    }

    // What a layer makes of its part of the second embedding.
    Gain through_part(team::Member& m, const Layer& layer, int number, const Gain& gained) {
        static constexpr block::Norm none{};
        const int width = plan.part_width;
        product(m, layer.part_gate, next_block(m, gained, none), inside, inside_stride);
        m.barrier();
        const Inputs in = prepared(m, width, [&](int row) {
            float* to = normed_row(m, row);
            memcpy(to, inside + size_t(row) * inside_stride, width * sizeof(float));
            block::activate(to, width, plan.activation);
            block::multiply_by(to, parts_of_rows + size_t(row) * parts_stride + size_t(number) * width, width);
            return to;
        });
        product(m, layer.part_out, in, out, hidden_stride);
        m.barrier();
        return {out, &layer.after_part, &none, nullptr, 0};
    }

    void mlp(team::Member& m, const Layer& layer, const Inputs& in) {
        feed_forward(m, layer, layer.gate_up, layer.down, layer.ff_width, in, out);
    }

    void feed_forward(
        team::Member& m, const Layer& layer, const Product& into, const Product& down, int ff, const Inputs& in, float* to
    ) {
        int first, last;
        m.share((ff + LANES - 1) / LANES, first, last);
        if (layer.gated) inner_tiles(into, ff, in, n_rows, inside, first, last);
        else plain_tiles(into, ff, in, n_rows, inside, first, last);
        m.barrier();
        const Inputs inner = prepared(m, ff, [&](int row) { return inside + size_t(row) * inside_stride; });
        product(m, down, inner, to, hidden_stride);
        m.barrier();
    }

    // After the last layer: a step's rows stay with the member that holds them; the last row of a part is written to
    // `last`, where `first` reads it.
    void finish_rows(team::Member& m, const Gain& gained) {
        each_row(m, [&](int row) {
            gain(residual(m, row), gained, row, normed_row(m, row));
            if (!is_chunk || (few() && m.me != 0)) return;
            const int slot = parts[part_of[row]].slot;
            if (slot < 0 || (row + 1 < n_rows && part_of[row + 1] == part_of[row])) return;
            memcpy(plan.last + size_t(slot) * plan.hidden, residual(m, row), plan.hidden * sizeof(float));
        });
    }

    void head(team::Member& m, float* logits) {
        head_product(m, next_block(m, {}, plan.norm), n_rows, logits);
    }

    void head_product(team::Member& m, const Inputs& in, int n, float* logits) {
        const int vocab = plan.head.rows;
        int first, last;
        m.share(n_tiles(plan.head), first, last);
        tiles_of(plan.head, in, n, logits, vocab, first, last);
        if (plan.logit_softcap > 0) {
            const int begin = first * LANES, stop = last * LANES < vocab ? last * LANES : vocab;
            for (int row = 0; row < n; row++)
                block::soft_cap(logits + size_t(row) * vocab + begin, plan.logit_softcap, stop - begin);
        }
        m.barrier();
    }

    // --- a chunk's outputs ---

    void give_outputs(team::Member& m) {
        const Outputs& o = *outputs;
        m.barrier();  // every row is there
        for (int begin = 0; begin < o.n; begin += o.slice) {
            const int n = o.n - begin < o.slice ? o.n - begin : o.slice;
            const Inputs in = inputs_over(inputs, plan.hidden, n, plan.wide != 0);
            int first, last;
            m.share(n, first, last);
            for (int i = first; i < last; i++) {
                float* to = o.hidden ? o.hidden + size_t(begin + i) * plan.hidden : normed + size_t(i) * hidden_stride;
                block::normed(plan.norm, residual(m, o.rows[begin + i]), plan.hidden, to);
                if (o.logits) prepare(in, to, 0, i, i + 1);
            }
            if (!o.logits) continue;
            m.barrier();
            float* logits = o.logits + (o.logprobs ? 0 : size_t(begin) * plan.head.rows);
            head_product(m, in, n, logits);
            if (!o.logprobs) continue;
            for (int i = first; i < last; i++) logprobs_of(m, logits + size_t(i) * plan.head.rows, begin + i);
            m.barrier();  // before the next slice's logits
        }
    }

    // The log-probabilities of a row of logits, by one member: the sampler's own sums.
    void logprobs_of(const team::Member& m, const float* logits, int row) {
        const Outputs& o = *outputs;
        const int vocab = plan.head.rows;
        const double most = largest_of(logits, vocab), log_total = log_of(sum_of_exp(logits, vocab, float(most)));
        o.logprobs[row] = float(double(logits[o.targets[row]]) - most - log_total);
        if (o.n_top == 0) return;
        Ranked* top = workspace_over(own[m.me].sampler, vocab).ranked;
        ranked_top(logits, o.n_tokens, o.n_top, top);
        for (int i = 0; i < o.n_top; i++) {
            o.top_ids[size_t(row) * o.n_top + i] = top[i].id;
            o.top_logprobs[size_t(row) * o.n_top + i] = float(double(top[i].value) - most - log_total);
        }
    }

    // --- attention ---

    static int first_visible(const Layer& layer, int position) {
        return layer.window > 0 && position + 1 > layer.window ? position + 1 - layer.window : 0;
    }

    // The end of what a row of a chunk sees: itself, or in an encoder the last row of its text or of its window.
    int visible_end(const Layer& layer, int row) const {
        const int position = position_of(row);
        if (plan.causal) return position + 1;
        const Part& part = parts[part_of[row]];
        const int end = part.start + part.n_rows;
        return layer.window > 0 ? std::min(end, position + layer.window) : end;
    }

    attention::Past past_of(const Layer& layer, int row, int kv) const {
        const attention::Heads heads{plan.kept, layer.n_kv_heads, layer.queries(), layer.head_width,
                                     layer.value_width, layer.softcap};
        return {heads, layer.cache, pages_of(layer, row), kv};
    }

    // All query heads of a row as one, and all its key heads.
    void norm_rows(const Layer& layer, int row) {
        const int n_queries = layer.attended_width();
        float *queries = qkv + size_t(row) * qkv_stride, *keys = queries + n_queries;
        block::normed(layer.q_norm, queries, n_queries, queries);
        block::normed(layer.k_norm, keys, layer.n_kv_heads * layer.head_width, keys);
    }

    // A query head of a row, after QK norm, RoPE and scaling.
    void query_of(const Layer& layer, int row, int head, float* q) const {
        const int width = layer.head_width;
        memcpy(q, qkv + size_t(row) * qkv_stride + size_t(head) * layer.query_step(), width * sizeof(float));
        turn(layer, row, layer.q_norm, q);
        if (layer.temperature_span) block::scale_by(q, query_factor(layer, position_of(row)), width);
        block::scale_by(q, layer.query_scale, width);
    }

    static float query_factor(const Layer& layer, int position) {
        const double steps = position / layer.temperature_span;
        return float(1.0 + layer.temperature * log_of(1.0 + steps));
    }

    // A head normed and rotated, in the layer's order.
    void turn(const Layer& layer, int row, const block::Norm& norm, float* head) const {
        if (layer.qk_norm == OF_HEADS) block::normed(norm, head, layer.head_width, head);
        rotate(layer, row, head);
        if (layer.qk_norm == AFTER_ROPE) block::normed(norm, head, layer.head_width, head);
    }

    void rotate(const Layer& layer, int row, float* head) const {
        if (layer.rope < 0) return;
        const Rope& rope = plan.ropes[layer.rope];
        block::rotate(head, cos_sin_of(row, layer.rope), rope.half, rope.neighbours != 0);
    }

    // A row's key and value of one head into its page.
    void keep(const Layer& layer, int row, const attention::Past& past) const {
        if (layer.reads_kv) return;
        const int width = layer.head_width;
        float* key = qkv + size_t(row) * qkv_stride + layer.keys_at() + size_t(past.kv) * width;
        float* value = key + size_t(layer.n_kv_heads) * width;
        turn(layer, row, layer.k_norm, key);
        block::normed(layer.v_norm, value, width, value);
        attention::append(past, position_of(row), key, value);
    }

    // Rows of different sequences. The member that has the last block of a row and key head first stores the row's own
    // key and value there: no other member reads that block.
    void attend_rows(team::Member& m, const Layer& layer) {
        AttentionUnit now{};
        int n_before = 0, n_mine = 0;
        const auto take = [&](const AttentionUnit& unit) {
            if (n_before++ % m.n != m.me) return;
            const attention::NextPages keys = first_keys(layer, unit);
            if (n_mine++ > 0) attend_unit(m, layer, now, keys);
            else attention::prefetch_pages(keys, past_of(layer, unit.row, unit.kv).heads);
            now = unit;
        };
        for (int row = 0; row < n_rows; row++) {
            const int last = position_of(row) + 1, first = first_visible(layer, last - 1);
            const int n_parts = shared_by_block(layer) ? (last - 1) / attention::BLOCK - first / attention::BLOCK + 1 : 1;
            for (int kv = 0; kv < layer.n_kv_heads; kv++)
                for (int part = 0; part < n_parts; part++)
                    take({row, kv, first / attention::BLOCK + part, first, last});
        }
        if (n_mine > 0) attend_unit(m, layer, now, {});
    }

    bool shared_by_block(const Layer& layer) const { return n_rows * layer.n_kv_heads <= most_units; }

    // What one member does alone: a row and key head, all blocks of it or the block `at`.
    struct AttentionUnit {
        int row, kv, at, first, last;  // positions [first, last)
    };

    attention::NextPages first_keys(const Layer& layer, const AttentionUnit& unit) const {
        const int begin = unit.at * attention::BLOCK;
        return attention::first_keys(past_of(layer, unit.row, unit.kv), unit.first > begin ? unit.first : begin, unit.last);
    }

    // `next`: the keys of the unit after this one.
    void attend_unit(
        team::Member& m, const Layer& layer, const AttentionUnit& unit, const attention::NextPages& next
    ) {
        if (shared_by_block(layer)) return attend_block(m, layer, unit, next);
        const attention::Past past = past_of(layer, unit.row, unit.kv);
        keep(layer, unit.row, past);
        attend_run(m, layer, unit.row, unit.row + 1, past, next);
    }

    size_t block_place(const Layer& layer, int row, int head, int at) const {
        return (size_t(row) * layer.n_heads + head) * n_blocks + at;
    }

    void attend_block(
        team::Member& m, const Layer& layer, const AttentionUnit& unit, const attention::NextPages& next
    ) {
        const auto [row, kv, at, first, last] = unit;
        const attention::Past past = past_of(layer, row, kv);
        const attention::Heads& of = past.heads;
        ThreadScratch& mine = own[m.me];
        if ((last - 1) / attention::BLOCK == at) keep(layer, row, past);
        for (int begin = 0; begin < of.group; begin += attention::MOST_QUERIES) {
            attention::Query queries[attention::MOST_QUERIES];
            attention::SoftmaxState partials[attention::MOST_QUERIES];
            const int n = of.group - begin < attention::MOST_QUERIES ? of.group - begin : attention::MOST_QUERIES;
            for (int i = 0; i < n; i++) {
                const int head = kv * of.group + begin + i;
                float* q = mine.queries + size_t(i) * of.width;
                query_of(layer, row, head, q);
                queries[i] = {q, first, last, nullptr};  // its blocks are joined elsewhere
                partials[i].mixed = block_mixed + block_place(layer, row, head, at) * of.width;
            }
            attention::attend_typed(past, at, queries, n, partials, next);
            for (int i = 0; i < n; i++) {
                float* to = block_partials + 2 * block_place(layer, row, kv * of.group + begin + i, at);
                to[0] = partials[i].top;
                to[1] = partials[i].sum;
            }
        }
    }

    // What a row's heads have seen, each by its gate where there are gates.
    const float* gated_heads(team::Member& m, const Layer& layer, int row) {
        const float* seen = attended_row(m, layer, row);
        if (!layer.gates) return seen;
        float* to = normed_row(m, row);
        const float* gate = qkv + size_t(row) * qkv_stride + layer.gates_at();
        if (to != seen) memcpy(to, seen, layer.attended_width() * sizeof(float));
        for (int head = 0; head < layer.n_heads; head++) {
            float* of = to + size_t(head) * layer.head_width;
            const float* by = gate + size_t(head) * layer.gate_step();
            if (layer.gate_width > 1) {
                block::gate_by(of, by, layer.head_width, layer.gate_activation);
                continue;
            }
            float one = *by;
            block::activate(&one, 1, layer.gate_activation);
            block::scale_by(of, one, layer.head_width);
        }
        return to;
    }

    // Where what a row's heads have seen is, once it is joined.
    float* seen_row(team::Member& m, const Layer& layer, int row) {
        const bool is_joined_alone = few() && !is_chunk && shared_by_block(layer);
        return is_joined_alone ? normed_row(m, row) : attended + size_t(row) * attended_stride;
    }

    // What all heads of a row have seen: there already, or joined of the blocks.
    const float* attended_row(team::Member& m, const Layer& layer, int row) {
        float* to = seen_row(m, layer, row);
        if (is_chunk || !shared_by_block(layer)) return to;
        const int width = layer.value_width, position = position_of(row), first = first_visible(layer, position);
        attention::SoftmaxState all{0, 0, own[m.me].partial};
        for (int head = 0; head < layer.n_heads; head++) {
            for (int at = first / attention::BLOCK; at * attention::BLOCK <= position; at++) {
                const size_t place_of = block_place(layer, row, head, at);
                const float* partial = block_partials + 2 * place_of;
                const attention::SoftmaxState part{partial[0], partial[1], block_mixed + place_of * layer.head_width};
                attention::join(all, part, width, at == first / attention::BLOCK);
            }
            attention::finish(all, width, layer.sink_of(head), to + size_t(head) * width);
        }
        return to;
    }

    // Where the rows of a chunk are, and which of them attention takes together: up to so many of one part.
    void place_rows() {
        n_rows = n_runs = 0;
        for (int part = 0; part < n_parts; part++)
            for (int i = 0; i < parts[part].n_rows; i++, n_rows++) {
                if (i % ROWS_TOGETHER == 0) run_begins[n_runs++] = n_rows;
                part_of[n_rows] = part;
                chunk_position[n_rows] = parts[part].start + i;
            }
        run_begins[n_runs] = n_rows;
    }

    // All keys and values first, then rows of one sequence together, key head by key head.
    void attend_chunk(team::Member& m, const Layer& layer) {
        m.each(n_rows, [&](int row) {
            for (int kv = 0; kv < layer.n_kv_heads; kv++) keep(layer, row, past_of(layer, row, kv));
        });
        m.barrier();
        for (int unit = m.me; unit < n_runs * layer.n_kv_heads; unit += m.n) {
            const int run = unit / layer.n_kv_heads;
            const attention::Past past = past_of(layer, run_begins[run], unit % layer.n_kv_heads);
            attend_run(m, layer, run_begins[run], run_begins[run + 1], past, {});
        }
    }

    // The heads of `past` of rows [begin, end), which are of one sequence; `next` is read after it.
    void attend_run(
        team::Member& m, const Layer& layer, int begin, int end, const attention::Past& past,
        const attention::NextPages& next
    ) {
        const attention::Heads& of = past.heads;
        ThreadScratch& mine = own[m.me];
        const int total = (end - begin) * of.group;
        for (int done = 0; done < total; done += attention::MOST_QUERIES) {
            attention::Query queries[attention::MOST_QUERIES];
            float* to[attention::MOST_QUERIES];
            const int n = total - done < attention::MOST_QUERIES ? total - done : attention::MOST_QUERIES;
            for (int i = 0; i < n; i++) {
                const int row = begin + (done + i) / of.group, head = past.kv * of.group + (done + i) % of.group;
                float* q = mine.queries + size_t(i) * of.width;
                query_of(layer, row, head, q);
                queries[i] = {q, first_visible(layer, position_of(row)), visible_end(layer, row), layer.sink_of(head)};
                to[i] = attended + size_t(row) * attended_stride + size_t(head) * of.value_width;
            }
            attention::attend(past, queries, n, to, mine.partial, next);
        }
    }

    // --- recurrent blocks ---

    // Rows of one sequence that a recurrent block takes one after the other: a row of a step, or a part of a chunk.
    struct Run {
        int first_row, n_rows, slot;
        bool fresh;  // it begins the sequence: there is no state before it
    };

    int n_sequences() const { return is_chunk ? n_parts : n_rows; }

    Run run_of(int sequence) const {
        if (!is_chunk) return {sequence, 1, slot_of(sequence), position_of(sequence) == 0};
        int first = 0;
        for (int part = 0; part < sequence; part++) first += parts[part].n_rows;
        return {first, parts[sequence].n_rows, parts[sequence].slot, parts[sequence].start == 0};
    }

    // The sequence of a row, and the first row of it.
    Run run_at(int row) const { return run_of(is_chunk ? part_of[row] : row); }

    static mixer::Rows rows_of(float* buffer, long stride, const Run& run, int column) {
        return {buffer + run.first_row * stride + column, stride, run.n_rows};
    }

    // A recurrent block over its inputs, [rows][hidden]; the states of the sequences advance by their rows.
    void recur(team::Member& m, const Mixer& w, const Inputs& in, float* to) {
        product(m, w.into, in, into, into_stride);
        m.barrier();
        if (w.kind == SHORT_CONV) gate_inputs(m, w);
        convolve(m, w);
        m.barrier();
        if (w.kind == MAMBA) select(m, w);
        if (w.kind == DELTA) set_lengths(m, w);
        scan(m, w);
        m.barrier();
        const Inputs gated = prepared(m, w.inner, [&](int row) { return gated_row(m, w, row); });
        product(m, w.out, gated, to, hidden_stride);
        m.barrier();
    }

    // Column of `into`.
    static int first_convolved(const Mixer& w) {
        return w.kind == MAMBA2 ? w.inner : w.kind == SHORT_CONV ? 2 * w.inner : 0;
    }
    static int n_pieces(int channels) { return (channels + CHANNELS_TOGETHER - 1) / CHANNELS_TOGETHER; }
    float* inputs_of(const Mixer& w, const Run& run) const {
        return w.inputs + size_t(run.slot) * (w.kernel - 1) * channels_of(w);
    }

    void convolve(team::Member& m, const Mixer& w) {
        const int channels = channels_of(w), pieces = n_pieces(channels);
        m.each(n_rows * pieces, [&](int unit) {
            const int row = unit / pieces, from = unit % pieces * CHANNELS_TOGETHER;
            const int end = from + CHANNELS_TOGETHER < channels ? from + CHANNELS_TOGETHER : channels;
            const Run run = run_at(row);
            const float* state = run.fresh ? nullptr : inputs_of(w, run);
            mixer::convolve(rows_of(into, into_stride, run, first_convolved(w)), row - run.first_row, state, w.conv_weight,
                            w.conv_bias, w.kernel, channels, from, end, w.kind != SHORT_CONV,
                            convolved + size_t(row) * convolved_stride);
        });
        if (w.kind != MAMBA2 && w.kind != DELTA) return;
        m.each(n_rows, [&](int row) {
            const float* given = into + size_t(row) * into_stride + w.inner + channels;
            const float* beta = given;
            if (w.kind == DELTA) given += w.n_heads;
            float* step = steps + size_t(row) * steps_stride;
            memcpy(step, given, w.n_heads * sizeof(float));
            mixer::steps_of(step, w.dt_bias, w.a, w.n_heads, w.least_step, w.most_step, step + w.n_heads);
            if (w.kind != DELTA) return;
            memcpy(step, beta, w.n_heads * sizeof(float));
            block::activate(step, w.n_heads, block::SIGMOID);
        });
    }

    // What a short convolution takes in, by its first gate.
    void gate_inputs(team::Member& m, const Mixer& w) {
        m.each(n_rows, [&](int row) {
            float* at = into + size_t(row) * into_stride;
            block::multiply_by(at + 2 * w.inner, at, w.inner);
        });
        m.barrier();
    }

    // A delta net's keys have length 1, its queries that of a scaled one.
    void set_lengths(team::Member& m, const Mixer& w) {
        const int heads = 2 * w.n_groups;
        m.each(n_rows * heads, [&](int unit) {
            float* head = convolved + size_t(unit / heads) * convolved_stride + size_t(unit % heads) * w.state;
            mixer::set_length(head, w.state, unit % heads < w.n_groups ? 1.0f / std::sqrt(float(w.state)) : 1.0f);
        });
        m.barrier();
    }

    // mamba's steps, b and c: products of the convolved rows.
    void select(team::Member& m, const Mixer& w) {
        const Inputs of_rows =
            prepared(m, w.inner, [&](int row) { return convolved + size_t(row) * convolved_stride; });
        product(m, w.select, of_rows, selected, selected_stride);
        m.barrier();
        m.each(n_rows, [&](int row) {
            float* at = selected + size_t(row) * selected_stride;
            for (int part = 0; part < 3; part++) {
                const int width = part ? w.state : w.dt_rank;
                block::normed(w.norms[part], at, width, at);
                at += width;
            }
        });
        m.barrier();
        const Inputs of_steps =
            prepared(m, w.dt_rank, [&](int row) { return selected + size_t(row) * selected_stride; });
        product(m, w.step, of_steps, steps, steps_stride);
        m.barrier();
        m.each(n_rows, [&](int row) {
            float* step = steps + size_t(row) * steps_stride;
            mixer::steps_of(step, w.dt_bias, nullptr, w.inner, w.least_step, w.most_step, nullptr);
        });
        m.barrier();
    }

    // Every sequence's heads, or pieces of its channels, each by one member; and the inputs that its next rows will need.
    void scan(team::Member& m, const Mixer& w) {
        const int of_each = w.kind == MAMBA ? n_pieces(w.inner) : w.n_heads, units = of_each + 1;
        m.each(n_sequences() * units, [&](int unit) {
            const Run run = run_of(unit / units);
            const int which = unit % units;
            if (which == of_each) {
                const mixer::Rows inputs = rows_of(into, into_stride, run, first_convolved(w));
                mixer::keep_inputs(inputs, inputs_of(w, run), run.fresh, w.kernel, channels_of(w));
            } else if (w.kind == MAMBA2) scan_head(w, run, which);
            else if (w.kind == DELTA) delta_head(w, run, which);
            else scan_channels(w, run, which * CHANNELS_TOGETHER);
        });
    }

    void scan_head(const Mixer& w, const Run& run, int head) {
        const int width = w.inner / w.n_heads, group = head / (w.n_heads / w.n_groups);
        float* s = w.scanned + (size_t(run.slot) * w.n_heads + head) * w.state * width;
        if (run.fresh) memset(s, 0, size_t(w.state) * width * sizeof(float));
        const int b = w.inner + group * w.state, c = b + w.n_groups * w.state;
        mixer::scan_head(rows_of(convolved, convolved_stride, run, head * width), rows_of(steps, steps_stride, run, head),
                         rows_of(steps, steps_stride, run, w.n_heads + head), rows_of(convolved, convolved_stride, run, b),
                         rows_of(convolved, convolved_stride, run, c), w.d[head], s, w.state, width);
    }

    void delta_head(const Mixer& w, const Run& run, int head) {
        const int width = w.inner / w.n_heads, shared = w.tiled ? head % w.n_groups : head / (w.n_heads / w.n_groups);
        float* s = w.scanned + (size_t(run.slot) * w.n_heads + head) * w.state * width;
        if (run.fresh) memset(s, 0, size_t(w.state) * width * sizeof(float));
        const int q = shared * w.state, k = q + w.n_groups * w.state, v = first_value(w) + head * width;
        mixer::delta_head(rows_of(convolved, convolved_stride, run, v), rows_of(steps, steps_stride, run, head),
                          rows_of(steps, steps_stride, run, w.n_heads + head), rows_of(convolved, convolved_stride, run, q),
                          rows_of(convolved, convolved_stride, run, k), s, w.state, width);
    }

    // Column of `convolved`: a delta net's values stand behind its queries and keys.
    static int first_value(const Mixer& w) { return w.kind == DELTA ? 2 * w.n_groups * w.state : 0; }

    void scan_channels(const Mixer& w, const Run& run, int from) {
        const int end = from + CHANNELS_TOGETHER < w.inner ? from + CHANNELS_TOGETHER : w.inner;
        float* s = w.scanned + size_t(run.slot) * w.state * w.inner;
        for (int n = 0; run.fresh && n < w.state; n++)
            memset(s + size_t(n) * w.inner + from, 0, (end - from) * sizeof(float));
        mixer::scan_channels(rows_of(convolved, convolved_stride, run, 0), rows_of(steps, steps_stride, run, 0),
                             rows_of(selected, selected_stride, run, w.dt_rank),
                             rows_of(selected, selected_stride, run, w.dt_rank + w.state), w.a, w.d, s, w.state, w.inner,
                             from, end);
    }

    // What was scanned, by its gate; normed by groups before or after, where the block has that norm.
    const float* gated_row(team::Member& m, const Mixer& w, int row) {
        float* to = normed_row(m, row);
        const int column = w.kind == MAMBA2 ? 0 : w.kind == DELTA ? channels_of(w) : w.inner;
        const float* gate = into + size_t(row) * into_stride + column;
        memcpy(to, convolved + size_t(row) * convolved_stride + first_value(w), w.inner * sizeof(float));
        if (w.kind == SHORT_CONV) {
            block::multiply_by(to, gate, w.inner);
            return to;
        }
        if (!w.norm || !w.norm_first) block::gate_by(to, gate, w.inner, block::SILU);
        const int width = w.inner / (w.kind == DELTA ? w.n_heads : w.n_groups);
        for (int at = 0; w.norm && at < w.inner; at += width)
            block::rms_norm(to + at, w.norm + (w.kind == DELTA ? 0 : at), width, w.norm_eps, to + at);
        if (w.norm && w.norm_first) block::gate_by(to, gate, w.inner, block::SILU);
        return to;
    }

    // --- experts: rows are sorted by expert, and each expert's products have only its own rows ---

    Inputs inputs_of_expert(int expert, int cols) const {
        const int n = first_of[expert + 1] - first_of[expert];
        return inputs_over(expert_inputs + first_of[expert] * expert_row_bytes(), cols, n, plan.wide != 0);
    }

    // In the latent space, or where there is none in the space of the rows.
    int expert_cols() const { return plan.latent_width ? plan.latent_width : plan.hidden; }

    void mlp_experts(team::Member& m, const Layer& layer, const Inputs& in) {
        const int n_used = plan.router.n_used, n_takers = n_rows * n_used, scores_stride = padded(plan.router.n_scores);
        const int cols = expert_cols(), latent_stride = padded(plan.latent_width);
        product(m, layer.router, in, scores, scores_stride);
        if (plan.latent_width) product(m, layer.into_latent, in, latent, latent_stride);
        m.barrier();
        m.each(n_rows, [&](int row) {
            block::route(scores + size_t(row) * scores_stride, layer.choice_bias, layer.share_scales, plan.router,
                         choices + size_t(2) * row * plan.router.n_experts, chosen + row * n_used, shares + row * n_used);
        });
        // Last of all that reads `in`: its rows are prepared in the same memory.
        if (plan.shared_width) {
            const Inputs beside = layer.has_own_norms() ? next_block(m, {}, layer.mlp_norm) : in;
            feed_forward(m, layer, layer.shared_gate_up, layer.shared_down, plan.shared_width, beside, shared_out);
        } else m.barrier();
        if (layer.has_own_norms())
            each_row(m, [&](int row) {
                block::normed(layer.experts_norm, residual(m, row), plan.hidden, normed_row(m, row));
            });
        if (m.me == 0) sort_by_expert();
        m.barrier();
        by_taker(m, n_takers, cols, [&](int i) {
            const int row = taker[i] / n_used;
            return plan.latent_width ? latent + size_t(row) * latent_stride : normed_row(m, row);
        });
        by_expert_tile(m, (layer.ff_width + LANES - 1) / LANES, [&](int expert, int n, int from, int to) {
            float* place_of = inside + size_t(first_of[expert]) * inside_stride;
            const Inputs own_rows = inputs_of_expert(expert, cols);
            const Product& into = layer.experts[2 * expert];
            if (layer.gated) inner_tiles(into, layer.ff_width, own_rows, n, place_of, from, to);
            else plain_tiles(into, layer.ff_width, own_rows, n, place_of, from, to);
        });
        m.barrier();
        by_taker(m, n_takers, layer.ff_width, [&](int i) { return inside + size_t(i) * inside_stride; });
        by_expert_tile(m, n_tiles(layer.experts[1]), [&](int expert, int n, int from, int to) {
            float* place_of = expert_out + size_t(first_of[expert]) * hidden_stride;
            const Inputs inner = inputs_of_expert(expert, layer.ff_width);
            tiles_of(layer.experts[2 * expert + 1], inner, n, place_of, hidden_stride, from, to);
        });
        m.barrier();
        m.each(n_rows, [&](int row) {
            if (plan.latent_width) return sum_experts(row, latent + size_t(row) * latent_stride);
            float *to = out + size_t(row) * hidden_stride, *beside = shared_out + size_t(row) * hidden_stride;
            sum_experts(row, to);
            block::normed(layer.after_experts, to, plan.hidden, to);
            if (plan.shared_width) block::normed(layer.after_shared, beside, plan.hidden, beside);
            add_shared(row);
        });
        m.barrier();
        if (!plan.latent_width) return;
        const Inputs sums = prepared(m, cols, [&](int row) { return latent + size_t(row) * latent_stride; });
        product(m, layer.out_of_latent, sums, out, hidden_stride);
        m.barrier();
        if (!plan.shared_width) return;
        m.each(n_rows, [&](int row) { add_shared(row); });
        m.barrier();
    }

    // What a row takes of the shared block, which has a gate or has none.
    void add_shared(int row) {
        if (!plan.shared_width) return;
        float* to = out + size_t(row) * hidden_stride;
        const float* more = shared_out + size_t(row) * hidden_stride;
        if (!plan.shared_gate) return block::add_to(to, more, plan.hidden);
        const float score = scores[size_t(row) * padded(plan.router.n_scores) + plan.router.n_experts];
        float share[LANES];
        store(share, sigmoid(lanes(score)));
        block::add_share(to, more, share[0], plan.hidden);
    }

    void sort_by_expert() {
        const int n = n_rows * plan.router.n_used;
        for (int e = 0; e <= plan.router.n_experts; e++) first_of[e] = 0;
        for (int i = 0; i < n; i++) first_of[chosen[i] + 1]++;
        for (int e = 0; e < plan.router.n_experts; e++) first_of[e + 1] += first_of[e];
        for (int i = 0; i < n; i++) {
            const int at = first_of[chosen[i]]++;
            taker[at] = i;
            place[i] = at;
        }
        for (int e = plan.router.n_experts; e > 0; e--) first_of[e] = first_of[e - 1];
        first_of[0] = 0;
    }

    // Prepare each routed row's input in the place of its expert.
    template <class F>
    void by_taker(team::Member& m, int n_takers, int cols, F row_of_input) {
        m.each(n_takers, [&](int i) {
            const int expert = chosen[taker[i]], row = i - first_of[expert];
            prepare(inputs_of_expert(expert, cols), row_of_input(i), 0, row, row + 1);
        });
        m.barrier();
    }

    // Share out the tiles of all experts that some row is routed to, as if they were one matrix.
    template <class F>
    void by_expert_tile(team::Member& m, int tiles_each, F work) {
        int n_taken = 0, first, last;
        for (int e = 0; e < plan.router.n_experts; e++) n_taken += first_of[e + 1] > first_of[e];
        m.share(int64_t(n_taken) * tiles_each, first, last);
        for (int e = 0, tile = 0; e < plan.router.n_experts; e++) {
            const int n = first_of[e + 1] - first_of[e];
            if (n == 0) continue;
            const int from = first > tile ? first - tile : 0, to = last < tile + tiles_each ? last - tile : tiles_each;
            if (from < to) work(e, n, from, to);
            tile += tiles_each;
        }
    }

    // In the order of experts, so that a row's sum does not depend on its neighbours.
    void sum_experts(int row, float* to) const {
        const int cols = expert_cols();
        for (int c = 0; c < padded(cols); c++) to[c] = 0.0f;
        for (int done = 0, below = -1; done < plan.router.n_used; done++) {
            int next = -1;
            for (int k = 0; k < plan.router.n_used; k++) {
                const int i = row * plan.router.n_used + k;
                if (chosen[i] > below && (next < 0 || chosen[i] < chosen[next])) next = i;
            }
            below = chosen[next];
            block::add_share(to, expert_out + size_t(place[next]) * hidden_stride, shares[next], cols);
        }
    }
};

static inline size_t scratch_bytes(Plan plan) {
    plan.scratch = nullptr;
    return ForwardPass(plan).n_bytes;
}

}  // namespace loop
