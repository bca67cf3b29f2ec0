// Masks that are kept: of one automaton over one vocabulary, in plain memory.
//
// A mask depends on the state, on a counter that a token can bring to its limit, and on the entries of the stack that
// the walk looked at. Most states allow few tokens, and their walk is shorter than a search of many kept masks; inside
// of strings nearly every token is allowed, and such masks are few. The memory holds indices and no addresses, so that
// it may lie beside its automaton wherever that is. One thread at a time may call `find_kept` or `keep`; how the blocks
// of a GPU share them is in loop/step_masks.h.
#ifndef OSTINATO_GRAMMAR_MASKS_H
#define OSTINATO_GRAMMAR_MASKS_H

#include "grammar_walk.h"

namespace grammar {

constexpr int LONG_WALK = 1024;  // nodes of the trie; some 20 microseconds: masks of shorter walks are not kept

// The first words of the memory; the masks follow.
enum KeptWord {
  KEPT_MOST,   // how many masks there is room for
  KEPT_N,      // how many there are
  KEPT_BITS,   // words of one mask
  KEPT_CLOCK,  // counts uses; on a GPU, steps
  KEPT_LOCK,   // 1 while a block of a GPU writes a mask
  KEPT_SIZE
};

// A kept mask: its state, how many entries of the stack it depends on, when it was last used, what else it depends on,
// and then its bits. The key is the counter near its limit, the depth near its limit, and two words for each entry.
enum MaskWord { MASK_STATE, MASK_BELOW, MASK_USED, MASK_KEY, MASK_BITS = MASK_KEY + 2 + 2 * MAX_DEPTH };

GRAMMAR_FUNCTION int* kept_mask(int* kept, int place) {
  return kept + KEPT_SIZE + place * (MASK_BITS + kept[KEPT_BITS]);
}

// Words of memory for so many masks of `n_words` words.
GRAMMAR_FUNCTION int kept_words(int n_words, int most) { return KEPT_SIZE + most * (MASK_BITS + n_words); }

GRAMMAR_FUNCTION void begin_kept(int* kept, int n_words, int most) {
  kept[KEPT_MOST] = most;
  kept[KEPT_N] = 0;
  kept[KEPT_BITS] = n_words;
  kept[KEPT_CLOCK] = 0;
  kept[KEPT_LOCK] = 0;
}

// A counter, or -1 where no token can bring it to its limit.
GRAMMAR_FUNCTION int near_limit(const int* a, const int* v, int state, int counter) {
  int limit = state_at(a, state)[STATE_LIMIT];
  return limit && limit - counter <= v[VOCABULARY_LONGEST] ? counter : -1;
}

// The depth, or -1 where no edge of any token can be refused because of it.
GRAMMAR_FUNCTION int near_full(const int* a, const int* v, int depth) {
  return depth + v[VOCABULARY_LONGEST] > a[HEADER_FREE] ? depth : -1;
}

// Whether a mask is that of a position; where it is not yet (`set`), write its key so.
GRAMMAR_FUNCTION bool match_key(const int* a, const int* v, int* mask, const int* position, bool set) {
  int depth = position[POSITION_DEPTH], below = mask[MASK_BELOW];
  if (below > depth) return false;
  int* key = mask + MASK_KEY;
  for (int i = -1; i < below; ++i, key += 2) {
    int at = POSITION_STACK + 2 * (depth - below + i), back, count;
    if (i < 0) {
      back = near_limit(a, v, position[POSITION_STATE], position[POSITION_COUNTER]);
      count = near_full(a, v, depth);
    } else {
      back = position[at];
      count = near_limit(a, v, back >> 2, position[at + 1]);
    }
    if (set) {
      key[0] = back;
      key[1] = count;
    } else if (key[0] != back || key[1] != count) {
      return false;
    }
  }
  return true;
}

// Uses are counted without a sign: the count may pass its end.
GRAMMAR_FUNCTION int tick(int* kept) { return kept[KEPT_CLOCK] = int(unsigned(kept[KEPT_CLOCK]) + 1u); }
GRAMMAR_FUNCTION unsigned age_of(int* kept, int place) {
  return unsigned(kept[KEPT_CLOCK]) - unsigned(kept_mask(kept, place)[MASK_USED]);
}

// Whether the mask at a place is that of a position.
GRAMMAR_FUNCTION bool is_mask_of(const int* a, const int* v, int* kept, int place, const int* position) {
  int* mask = kept_mask(kept, place);
  return mask[MASK_STATE] == position[POSITION_STATE] && match_key(a, v, mask, position, false);
}

// The kept mask of a position, or null.
GRAMMAR_FUNCTION const unsigned* find_kept(const int* a, const int* v, int* kept, const int* position) {
  for (int place = 0; place < kept[KEPT_N]; ++place) {
    if (!is_mask_of(a, v, kept, place, position)) continue;
    int* mask = kept_mask(kept, place);
    mask[MASK_USED] = tick(kept);
    return reinterpret_cast<const unsigned*>(mask + MASK_BITS);
  }
  return nullptr;
}

// Where a further mask is kept: a free place, or that of the mask that was used least recently.
GRAMMAR_FUNCTION int place_to_keep(int* kept) {
  if (kept[KEPT_N] < kept[KEPT_MOST]) return kept[KEPT_N]++;
  int place = 0;
  for (int i = 1; i < kept[KEPT_N]; ++i) {
    if (age_of(kept, i) > age_of(kept, place)) place = i;
  }
  return place;
}

// Say of which position the mask at a place is. `lowest`: to which depth its walk looked at the stack.
GRAMMAR_FUNCTION void set_position(const int* a, const int* v, int* kept, int place, const int* position, int lowest) {
  int* mask = kept_mask(kept, place);
  mask[MASK_STATE] = position[POSITION_STATE];
  mask[MASK_BELOW] = position[POSITION_DEPTH] - lowest;
  match_key(a, v, mask, position, true);
}

// Keep a mask that `find_mask` found, in place of the one that was used least recently where there is no more room.
// `lowest`: what `find_mask` returned.
GRAMMAR_FUNCTION void keep(const int* a, const int* v, int* kept, const int* position, int lowest, const unsigned* bits) {
  if (kept[KEPT_MOST] == 0 || find_kept(a, v, kept, position)) return;  // another thread may have kept it
  int place = place_to_keep(kept);
  int* mask = kept_mask(kept, place);
  set_position(a, v, kept, place, position, lowest);
  mask[MASK_USED] = tick(kept);
  for (int word = 0; word < kept[KEPT_BITS]; ++word) mask[MASK_BITS + word] = int(bits[word]);
}

}  // namespace grammar

#endif
