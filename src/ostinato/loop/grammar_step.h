// What a step does with the grammar of a slot: advance it by the committed token, and find the tokens that may come next.
//
// The twin is in loop/grammars.py and loop/step_boundary.py. A grammar lies in the grammar memory of the view: an
// automaton, and behind it the masks that are kept of it (`grammar_masks.h`). The memory's first word says where the
// vocabulary lies. 0 in a slot's `grammar` means no grammar.
#pragma once
#include "grammar_masks.h"
#include "layout.h"

static_assert(GRAMMAR_POSITION_WORDS == grammar::POSITION_WORDS, "a slot's position in a grammar has another size");

static inline const int* automaton_of(const View& view, int slot) { return view.grammars + TABLE_grammar(view)[slot]; }
static inline const int* vocabulary_of(const View& view) { return view.grammars + view.grammars[0]; }
static inline int* position_in_grammar(const View& view, int slot) {
    return TABLE_grammar_position(view) + (long long)slot * GRAMMAR_POSITION_WORDS;
}

// False where the grammar does not allow the token, which then was not sampled under its mask.
static inline bool follow_grammar(const View& view, int slot, int token) {
    const int* vocabulary = vocabulary_of(view);
    if (token >= vocabulary[grammar::VOCABULARY_TOKENS]) return false;
    return grammar::advance(automaton_of(view, slot), vocabulary, position_in_grammar(view, slot), token);
}

static inline bool has_bit(const unsigned* bits, int n_words, int id) {
    return id >= 0 && id < 32 * n_words && bits[id >> 5] >> (id & 31) & 1;
}

static inline bool any_bit(const unsigned* bits, int n_words) {
    for (int word = 0; word < n_words; ++word) {
        if (bits[word]) return true;
    }
    return false;
}

// End tokens, which are the first of the slot's stop ids, are allowed where the text may end. While fewer than `ends_from`
// tokens were made, stop ids are banned; with `ends_ignored`, end tokens always are. A ban is lifted where it would leave
// no token.
static inline void apply_ends(const View& view, int slot, unsigned* bits, int n_words) {
    grammar::Walk walk;
    grammar::begin_at(walk, position_in_grammar(view, slot));
    const int* stops = TABLE_stop_ids(view) + slot * MAX_STOP_IDS;
    const int n_ends = TABLE_n_ends(view)[slot], n_stop = TABLE_n_stop(view)[slot];
    if (grammar::ends(automaton_of(view, slot), walk)) {
        for (int i = 0; i < n_ends; ++i) grammar::set_bit(bits, n_words, stops[i]);
    }
    const bool is_short = TABLE_made(view)[slot] < TABLE_ends_from(view)[slot];
    const int n_unwanted = is_short ? n_stop : TABLE_ends_ignored(view)[slot] ? n_ends : 0;
    bool was_allowed[MAX_STOP_IDS];
    for (int i = 0; i < n_unwanted; ++i) {
        was_allowed[i] = has_bit(bits, n_words, stops[i]);
        if (was_allowed[i]) bits[stops[i] >> 5] &= ~(1u << (stops[i] & 31));
    }
    if (n_unwanted == 0 || any_bit(bits, n_words)) return;
    for (int i = 0; i < n_unwanted; ++i) {
        if (was_allowed[i]) grammar::set_bit(bits, n_words, stops[i]);
    }
}

// A row whose grammar allows no token: the step boundary ends its slot.
static inline void choose_none(const View& view, int row) {
    TABLE_chosen(view)[row] = -1;
    TABLE_chosen_logprob(view)[row] = 0;
    for (int i = 0; i < MAX_TOP; ++i) {
        TABLE_top_ids(view)[row * MAX_TOP + i] = 0;
        TABLE_top_logprobs(view)[row * MAX_TOP + i] = 0;
    }
}

// Find the tokens that may come next in a slot, into its row of the table's masks; false where there is none. `lock` is
// held while kept masks are read or written, never during a walk; it may refuse, and then they are not used.
template <class Lock>
static inline bool find_allowed(const View& view, int slot, Lock& lock) {
    const int *automaton = automaton_of(view, slot), *vocabulary = vocabulary_of(view);
    const int* position = position_in_grammar(view, slot);
    int* kept = const_cast<int*>(automaton) + automaton[grammar::HEADER_WORDS];
    const int n_words = MASK_WORDS(view);
    unsigned* bits = (unsigned*)TABLE_mask_bits(view) + (long long)slot * n_words;
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
    apply_ends(view, slot, bits, n_words);
    return any_bit(bits, n_words);
}
