// What a step does with the grammar of a slot: advance it by the committed token, and find the tokens that may come next.
//
// The twin is in loop/grammars.py and loop/step_boundary.py. A grammar lies in the grammar memory of the view: an
// automaton, and behind it the masks that are kept of it (`grammar_masks.h`). The memory's first word says where the
// vocabulary lies. 0 in a slot's `grammar` means no grammar. Blocks of a GPU find masks together (`step_masks.h`).
#pragma once
#include "grammar_masks.h"
#include "layout.h"

#if defined(__CUDACC__)
#define GRAMMAR_CALL static __device__ __noinline__  // one copy of the code
#else
#define GRAMMAR_CALL static inline
#endif

static_assert(GRAMMAR_POSITION_WORDS == grammar::POSITION_WORDS, "a slot's position in a grammar has another size");

GRAMMAR_FUNCTION const int* automaton_of(const View& view, int slot) { return view.grammars + TABLE_grammar(view)[slot]; }
GRAMMAR_FUNCTION const int* vocabulary_of(const View& view) { return view.grammars + view.grammars[0]; }
GRAMMAR_FUNCTION int* kept_masks_of(const int* automaton) {
    return const_cast<int*>(automaton) + automaton[grammar::HEADER_WORDS];
}
GRAMMAR_FUNCTION int* position_in_grammar(const View& view, int slot) {
    return TABLE_grammar_position(view) + (long long)slot * GRAMMAR_POSITION_WORDS;
}
GRAMMAR_FUNCTION unsigned* mask_of(const View& view, int slot) {
    return (unsigned*)TABLE_mask_bits(view) + (long long)slot * MASK_WORDS(view);
}

// Whether the slot has a grammar that allows no token: its step has chosen none.
GRAMMAR_FUNCTION bool allows_none(const View& view, int slot) {
    return (TABLE_grammar(view)[slot] != 0) & !TABLE_mask_ready(view)[slot];
}

// False where the grammar does not allow the token, which then was not sampled under its mask: the slot must end.
GRAMMAR_CALL bool follow_grammar(const View& view, int slot, int token) {
    const int* vocabulary = vocabulary_of(view);
    if (token >= vocabulary[grammar::VOCABULARY_TOKENS]) return false;
    return grammar::advance_in_place(automaton_of(view, slot), vocabulary, position_in_grammar(view, slot), token);
}

GRAMMAR_FUNCTION bool has_token(const unsigned* bits, int n_words, int id) {
    return id >= 0 && id < 32 * n_words && bits[id >> 5] >> (id & 31) & 1;
}

// End tokens, which are the first of the slot's stop ids, are allowed where the text may end. While fewer than `ends_from`
// tokens were made, stop ids are banned; with `ends_ignored`, end tokens always are. A ban is lifted where it would leave
// no token. `n_allowed` tokens are allowed before; returns how many are then.
GRAMMAR_CALL int apply_ends(const View& view, int slot, unsigned* bits, int n_words, int n_allowed) {
    grammar::Walk walk;
    grammar::begin_at(walk, position_in_grammar(view, slot), nullptr);
    const int* stops = TABLE_stop_ids(view) + slot * MAX_STOP_IDS;
    const int n_ends = TABLE_n_ends(view)[slot], n_stop = TABLE_n_stop(view)[slot];
    if (grammar::ends(automaton_of(view, slot), walk)) {
        for (int i = 0; i < n_ends; ++i) {
            const int before = has_token(bits, n_words, stops[i]);
            grammar::set_bit(bits, n_words, stops[i]);
            n_allowed += has_token(bits, n_words, stops[i]) - before;
        }
    }
    const bool is_short = TABLE_made(view)[slot] < TABLE_ends_from(view)[slot];
    const int n_unwanted = is_short ? n_stop : TABLE_ends_ignored(view)[slot] ? n_ends : 0;
    unsigned banned = 0;  // bit i: stops[i] was taken out
    for (int i = 0; i < n_unwanted; ++i) {
        if (!has_token(bits, n_words, stops[i])) continue;
        bits[stops[i] >> 5] &= ~(1u << (stops[i] & 31));
        banned |= 1u << i;
        --n_allowed;
    }
    if (n_allowed > 0) return n_allowed;
    for (int i = 0; i < n_unwanted; ++i) {
        if (!(banned >> i & 1)) continue;
        grammar::set_bit(bits, n_words, stops[i]);
        ++n_allowed;
    }
    return n_allowed;
}

#if !defined(__CUDACC__)
// Find the tokens that may come next in a slot, into its row of the table's masks; false where there is none. `lock` is
// held while kept masks are read or written, never during a walk; it may refuse, and then they are not used.
template <class Lock>
static inline bool find_allowed(const View& view, int slot, Lock& lock) {
    const int *automaton = automaton_of(view, slot), *vocabulary = vocabulary_of(view);
    const int* position = position_in_grammar(view, slot);
    int* kept = kept_masks_of(automaton);
    const int n_words = MASK_WORDS(view);
    unsigned* bits = mask_of(view, slot);
    bool is_kept = false;
    if (lock.lock()) {
        const unsigned* found = grammar::find_kept(automaton, vocabulary, kept, position);
        for (int word = 0; found && word < n_words; ++word) bits[word] = found[word];
        is_kept = found != nullptr;
        lock.unlock();
    }
    if (!is_kept) {
        int visited;
        const int lowest = grammar::find_mask(automaton, vocabulary, position, bits, n_words, &visited);
        if (visited >= grammar::LONG_WALK && lock.lock()) {
            grammar::keep(automaton, vocabulary, kept, position, lowest, bits);
            lock.unlock();
        }
    }
    int n_allowed = 0;
    for (int word = 0; word < n_words; ++word) n_allowed += __builtin_popcount(bits[word]);
    return apply_ends(view, slot, bits, n_words, n_allowed) > 0;
}
#endif
