// The masks of a step's rows under grammars, by all blocks of a GPU together: after the step boundary, before sampling.
//
// The twin is `find_masks` of loop/grammars.py; on the CPU each member of the team finds the masks of its own rows
// (`find_allowed`). A warp takes 32 tokens at a time, a lane walks the bytes of one, and the warp's votes are a word of
// the mask. The block that is done last applies end tokens, says whether any token is allowed, and keeps the mask if it
// is long, for other steps and other slots of the same grammar. Blocks write different words, each word once, so a mask
// depends on no order; which masks are kept does, and decides only whether they are walked for again.
//
// Bound by latency: a lane makes some 8 dependent loads for each byte of its token, mostly from L1 and L2.
#pragma once
#include "step_boundary.h"

#if !defined(LONG_MASK)
#define LONG_MASK 1024  // tokens: masks that allow fewer are not kept, since few lanes walk far for them
#endif

#if defined(__CUDACC__)
#define VOTES(vote) __ballot_sync(0xFFFFFFFFu, vote)
#define POPULATION(word) __popc(word)
#define ADD_SHARED(place, value) atomicAdd(place, value)
#define LOWER(place, value) atomicMin(place, value)
// A thread that adds later sees everything that threads which added earlier, and the threads of their blocks before the
// last SYNC, had written.
BOUNDARY_FN int add_in_order(int* place, int value) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(place), "r"(value) : "memory");
    return before;
}
BOUNDARY_FN bool try_lock(int* lock) {
    int before;
    asm volatile("atom.acquire.gpu.global.exch.b32 %0, [%1], 1;" : "=r"(before) : "l"(lock) : "memory");
    return before == 0;
}
BOUNDARY_FN void unlock(int* lock) { asm volatile("st.release.gpu.global.b32 [%0], 0;" : : "l"(lock) : "memory"); }
#endif

// What the threads of a block tell each other, in its shared memory.
struct MaskWork {
    int is_last[MAX_SLOTS];  // by row: this block was the last one
    int n_allowed, place;
    int is_kept;  // another row has kept the same mask in this step
};

// Tokens 32 * word to 32 * word + 31, by the lanes of a warp together. `lowest` goes down to the depth to which this
// lane's walk looked at the stack.
GRAMMAR_CALL unsigned allowed_of_word(
    const int* automaton, const int* vocabulary, const int* position, int word, int& lowest
) {
    const int token = 32 * word + THREAD % 32;
    grammar::Entries own;
    grammar::Walk walk;
    grammar::begin_at(walk, position, own.words);
    bool allowed = token < vocabulary[grammar::VOCABULARY_TOKENS];
    if (allowed) allowed = grammar::take_token(automaton, vocabulary, walk, token);
    if (walk.low < lowest) lowest = walk.low;
    return VOTES(allowed);
}

// This block's words of a slot's mask: walked for, or copied from the mask that is kept.
BOUNDARY_FN void find_words(const View& view, int slot, int part, int n_parts) {
    const int *automaton = automaton_of(view, slot), *position = position_in_grammar(view, slot);
    const int n_words = MASK_WORDS(view), place = TABLE_kept_mask(view)[slot];
    unsigned* bits = mask_of(view, slot);
    if (place >= 0) {
        const int* found = grammar::kept_mask(kept_masks_of(automaton), place) + grammar::MASK_BITS;
        for (int word = part * N_THREADS + THREAD; word < n_words; word += n_parts * N_THREADS) bits[word] = found[word];
        return;
    }
    const int *vocabulary = vocabulary_of(view), depth = position[grammar::POSITION_DEPTH];
    int lowest = depth;
    for (int word = part + THREAD / 32 * n_parts; word < n_words; word += n_parts * (N_THREADS / 32)) {
        const unsigned found = allowed_of_word(automaton, vocabulary, position, word, lowest);
        if (THREAD % 32 == 0) bits[word] = found;
    }
    if (lowest < depth) LOWER(TABLE_mask_lowest(view) + slot, lowest);
}

// Rows at the same position have the same mask, which is kept once. A block that finds the lock taken keeps none.
BOUNDARY_FN void keep_mask(const View& view, int slot, MaskWork& work) {
    const int *automaton = automaton_of(view, slot), *vocabulary = vocabulary_of(view), n_words = MASK_WORDS(view);
    const int* position = position_in_grammar(view, slot);
    int* kept = kept_masks_of(automaton);
    ONE {
        work.place = try_lock(kept + grammar::KEPT_LOCK) ? 0 : -1;
        work.is_kept = 0;
    }
    SYNC();
    if (work.place < 0) return;
    FOR_EACH(i, kept[grammar::KEPT_N]) {
        if (grammar::is_mask_of(automaton, vocabulary, kept, i, position)) work.is_kept = 1;
    }
    SYNC();
    if (work.is_kept) {
        ONE unlock(kept + grammar::KEPT_LOCK);
        return;
    }
    ONE work.place = grammar::place_to_keep(kept);
    SYNC();
    int* mask = grammar::kept_mask(kept, work.place);
    const unsigned* bits = mask_of(view, slot);
    FOR_EACH(word, n_words) mask[grammar::MASK_BITS + word] = (int)bits[word];
    ONE {
        grammar::set_position(automaton, vocabulary, kept, work.place, position, TABLE_mask_lowest(view)[slot]);
        mask[grammar::MASK_USED] = kept[grammar::KEPT_CLOCK];
    }
    SYNC();
    ONE unlock(kept + grammar::KEPT_LOCK);
}

// By the last block: all words of the mask are there.
BOUNDARY_FN void finish_mask(const View& view, int slot, MaskWork& work) {
    const int n_words = MASK_WORDS(view);
    unsigned* bits = mask_of(view, slot);
    ONE work.n_allowed = 0;
    SYNC();
    int n_allowed = 0;
    FOR_EACH(word, n_words) n_allowed += POPULATION(bits[word]);
    if (n_allowed) ADD_SHARED(&work.n_allowed, n_allowed);
    SYNC();
    n_allowed = work.n_allowed;
    if (TABLE_kept_mask(view)[slot] < 0 && n_allowed >= LONG_MASK) keep_mask(view, slot, work);
    SYNC();
    ONE {
        TABLE_mask_parts(view)[slot] = 0;
        TABLE_mask_ready(view)[slot] = apply_ends(view, slot, bits, n_words, n_allowed) > 0;
    }
    SYNC();
}

// Part `part` of `n_parts`, by all threads of a block; every block calls this once a step. `done(row)` is called by one
// thread when the mask of a row is complete.
template <class Done>
BOUNDARY_FN void find_masks(const View& view, int part, int n_parts, MaskWork& work, Done done) {
    const int n_rows = *TABLE_n_rows(view);
    for (int row = 0; row < n_rows; ++row) {
        const int slot = TABLE_row_slot(view)[row];
        if (TABLE_grammar(view)[slot]) find_words(view, slot, part, n_parts);
    }
    SYNC();
    FOR_EACH(row, n_rows) {
        const int slot = TABLE_row_slot(view)[row];
        const bool follows = TABLE_grammar(view)[slot] != 0;
        work.is_last[row] = follows && add_in_order(TABLE_mask_parts(view) + slot, 1) == n_parts - 1;
    }
    SYNC();
    for (int row = 0; row < n_rows; ++row) {
        if (!work.is_last[row]) continue;
        finish_mask(view, TABLE_row_slot(view)[row], work);
        ONE done(row);
    }
    SYNC();
}
