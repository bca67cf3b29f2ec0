// The masks of one automaton over one vocabulary, on a CPU: computed where they are cheap, kept where they are not.
//
// A mask depends on the state, on a counter that a token can bring to its limit, and on the entries of the stack that
// the walk looked at. Most states allow few tokens, and their walk is shorter than a search of many kept masks; inside
// of strings nearly every token is allowed, and such masks are few. One thread at a time uses an object of this class.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "grammar_walk.h"

namespace grammar {

constexpr int LONG_WALK = 1024;  // nodes of the trie; some 20 microseconds

class MaskCache {
 public:
  // The arrays must outlive it. `most`: how many masks of `n_words` words are kept at once.
  MaskCache(const int* automaton, const int* vocabulary, int n_words, int most)
      : a_(automaton), v_(vocabulary), n_words_(n_words), most_(most), now_(n_words) {}

  // The tokens that may come next, except end tokens; to be read before the next call.
  const unsigned* find(const int* position) {
    std::vector<int>& places = by_state_[position[POSITION_STATE]];
    for (int place : places) {
      Kept& kept = kept_[place];
      if (!same(kept, position)) continue;
      kept.used = ++clock_;
      return kept.bits.data();
    }
    int visited = 0, lowest = find_mask(a_, v_, position, now_.data(), n_words_, &visited);
    if (visited < LONG_WALK || most_ == 0) return now_.data();
    Kept made{position[POSITION_STATE], position[POSITION_DEPTH] - lowest, {}, now_, ++clock_};
    made.key = key_of(position, made.below);
    int place = room();
    if (place == int(kept_.size())) kept_.push_back(std::move(made));
    else kept_[place] = std::move(made);
    by_state_[kept_[place].state].push_back(place);
    return kept_[place].bits.data();
  }

  int size() const { return int(kept_.size()); }

 private:
  struct Kept {
    int state, below;  // `below`: how many entries of the stack it depends on
    std::vector<int> key;
    std::vector<unsigned> bits;
    uint64_t used;
  };

  const int* a_;
  const int* v_;
  int n_words_, most_;
  std::vector<unsigned> now_;
  std::vector<Kept> kept_;
  std::unordered_map<int, std::vector<int>> by_state_;
  uint64_t clock_ = 0;

  // A counter, or -1 where no token can bring it to its limit.
  int near(int state, int counter) const {
    int limit = state_at(a_, state)[STATE_LIMIT];
    return limit && limit - counter <= v_[VOCABULARY_LONGEST] ? counter : -1;
  }

  std::vector<int> key_of(const int* position, int below) const {
    int depth = position[POSITION_DEPTH];
    std::vector<int> key{near(position[POSITION_STATE], position[POSITION_COUNTER]), full(depth)};
    for (int i = depth - below; i < depth; ++i) {
      int back = position[POSITION_STACK + 2 * i];
      key.push_back(back);
      key.push_back(near(back >> 2, position[POSITION_STACK + 2 * i + 1]));
    }
    return key;
  }
  // The depth, where a token can fill the stack.
  int full(int depth) const { return depth + v_[VOCABULARY_LONGEST] > MAX_DEPTH ? depth : -1; }

  bool same(const Kept& kept, const int* position) const {
    int depth = position[POSITION_DEPTH];
    if (kept.below > depth || kept.key[0] != near(position[POSITION_STATE], position[POSITION_COUNTER])) return false;
    if (kept.key[1] != full(depth)) return false;
    const int* key = kept.key.data() + 2;
    for (int i = depth - kept.below; i < depth; ++i, key += 2) {
      int back = position[POSITION_STACK + 2 * i];
      if (key[0] != back || key[1] != near(back >> 2, position[POSITION_STACK + 2 * i + 1])) return false;
    }
    return true;
  }

  // The place of a new mask: a free one, or that of the mask that was used least recently.
  int room() {
    if (int(kept_.size()) < most_) return int(kept_.size());
    int oldest = 0;
    for (int i = 1; i < int(kept_.size()); ++i)
      if (kept_[i].used < kept_[oldest].used) oldest = i;
    std::vector<int>& places = by_state_[kept_[oldest].state];
    for (size_t i = 0; i < places.size(); ++i)
      if (places[i] == oldest) places.erase(places.begin() + long(i));
    return oldest;
  }
};

}  // namespace grammar
