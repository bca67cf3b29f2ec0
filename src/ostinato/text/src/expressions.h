// Regular expressions over bytes, calls and special tokens, and their derivatives.
//
// Equal expressions are one node, so an expression's number is a state of the automaton. A repeat whose bounds are
// large is not unrolled: once begun it is *counting*, all counting repeats of a state share one counter, and their
// bounds are those at the counter's 0. Nothing here knows JSON or tokens' bytes; `automaton.cpp` explores the states.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace grammar {

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// What no other compiler can take either.
struct Malformed : Refused {
  using Refused::Refused;
};
// Counting repeats that cannot share a counter: compiled again without counters.
struct CountersClash : Refused {
  CountersClash() : Refused("its bounded repeats overlap and are too large to be written out") {}
};

using Clock = std::chrono::steady_clock;

// What a compilation may take; a grammar that needs more is refused.
struct Limits {
  int states;
  int words;
  int depth;  // open calls
  Clock::time_point until;
  int milliseconds;

  void check_time() const {
    if (Clock::now() > until) throw Refused("it takes longer than " + std::to_string(milliseconds) + " ms to compile");
  }
};
constexpr int MAX_NODES = 1 << 20;    // 40 bytes each
constexpr int MAX_MEMORY = 1 << 21;   // derivatives that are remembered, 32 bytes each at most
constexpr int MAX_RECURSION = 2000;   // some hundred bytes of the thread's stack each

using Bytes = std::array<uint64_t, 4>;

inline bool has(const Bytes& set, int byte) { return set[byte >> 6] >> (byte & 63) & 1; }
inline void add(Bytes& set, int byte) { set[byte >> 6] |= uint64_t(1) << (byte & 63); }
inline void drop(Bytes& set, int byte) { set[byte >> 6] &= ~(uint64_t(1) << (byte & 63)); }
inline void join(Bytes& set, const Bytes& other) {
  for (int i = 0; i < 4; ++i) set[i] |= other[i];
}
inline bool none(const Bytes& set) { return !(set[0] | set[1] | set[2] | set[3]); }
inline Bytes range_of(int low, int high) {
  Bytes set{};
  for (int b = low; b <= high; ++b) add(set, b);
  return set;
}

enum Op : uint8_t { NOTHING, EMPTY, SET, LITERAL, CAT, OR, AND, NOT, REPEAT, MULTIPLE, LEXEME, CALL, TOKEN };

constexpr int UNBOUNDED = -1;

// Flags of a REPEAT: which bounds count, whether this derivative took one off, whether this derivative began it.
enum RepeatFlags { MIN_COUNTS = 1, MAX_COUNTS = 2, TAKEN = 4, BEGUN = 8 };

struct Node {
  Op op;
  bool nullable;
  bool counting;  // has a counting repeat in it
  bool symbols;   // has a call or a token in it
  bool lexing;    // begins within a lexeme
  int a, b, c, d, e;
};

struct Pair {
  int expression;
  int bits;  // COUNT_ADD, COUNT_ONE or 0
};

class Expressions {
 public:
  Expressions(int large, int tail, const Limits& limits) : large_(large), tail_(tail), limits_(limits) {
    table_.assign(1 << 12, -1);
    memo_.assign(1 << 12, {0, -1});
    make(NOTHING);
    make(EMPTY, 0, 0, 0, 0, 0);
  }

  const Node& operator[](int id) const { return nodes_[id]; }
  const Bytes& set_of(int id) const { return sets_[nodes_[id].a]; }
  const int* list_of(int id) const { return pool_.data() + nodes_[id].a; }
  int size() const { return int(nodes_.size()); }

  // --- making ---

  int nothing() const { return 0; }
  int empty() const { return 1; }
  int everything() { return negated(0); }

  int set(const Bytes& bytes) {
    if (none(bytes)) return nothing();
    std::string key(reinterpret_cast<const char*>(bytes.data()), sizeof(Bytes));
    auto found = set_ids_.find(key);
    int id;
    if (found != set_ids_.end()) id = found->second;
    else {
      id = int(sets_.size());
      sets_.push_back(bytes);
      set_ids_.emplace(std::move(key), id);
    }
    return make(SET, id);
  }
  int byte(int b) {
    Bytes one{};
    add(one, b);
    return set(one);
  }
  int literal(const std::string& text) {
    if (text.empty()) return empty();
    if (text.size() == 1) return byte(uint8_t(text[0]));
    auto found = string_ids_.find(text);
    int id;
    if (found != string_ids_.end()) id = found->second;
    else {
      id = int(strings_.size());
      strings_.push_back(text);
      string_ids_.emplace(text, id);
    }
    return make(LITERAL, id, 0);
  }
  int call(int procedure) { return make(CALL, procedure); }
  int token(int id) { return make(TOKEN, id); }

  int cat(int a, int b) {
    if (a == 0 || b == 0) return 0;
    if (a == 1) return b;
    if (b == 1) return a;
    if (nodes_[a].op == CAT) {  // to the right, without recursion through long chains
      std::vector<int> heads;
      while (nodes_[a].op == CAT) {
        heads.push_back(nodes_[a].a);
        a = nodes_[a].b;
      }
      int made = make(CAT, a, b);
      for (size_t i = heads.size(); i-- > 0;) made = make(CAT, heads[i], made);
      return made;
    }
    return make(CAT, a, b);
  }

  int either(std::vector<int> of) { return listed(OR, std::move(of)); }
  int both(std::vector<int> of) { return listed(AND, std::move(of)); }
  int either(int a, int b) {
    if (a == b || b == 0) return a;
    if (a == 0) return b;
    return listed(OR, {a, b});
  }
  int negated(int a) {
    if (nodes_[a].op == NOT) return nodes_[a].a;
    if (nodes_[a].symbols) throw Refused("it negates something that is not a text");
    return make(NOT, a);
  }
  int repeat(int a, int low, int high, int flags = 0) {
    if (high == 0 && !(flags & MAX_COUNTS)) return empty();
    if (a == 1) return empty();
    if (a == 0) return low == 0 && !(flags & MIN_COUNTS) ? 1 : 0;
    if (low == 1 && high == 1 && flags == 0) return a;
    if (nodes_[a].nullable && !(flags & MIN_COUNTS)) low = 0;
    if (flags == 0 && nodes_[a].op == REPEAT && nodes_[a].e == 0 && nodes_[a].c == 0 && nodes_[a].d == UNBOUNDED)
      return a;
    return make(REPEAT, a, 0, low, high, flags);
  }
  // A text that ends only where it cannot go on. `begun`: its first byte was taken.
  int lexeme(int a, bool begun = false) { return a <= 1 ? a : make(LEXEME, a, begun); }
  // Digits whose number is a multiple of `divisor` * 10^-scale; `remainder` is of those taken so far.
  int multiple(int divisor, int remainder, int scale, bool in_fraction) {
    if (in_fraction) {
      if (scale == 0 && remainder == 0) return empty();
      int64_t step = 1;
      for (int i = 0; i < scale; ++i) step *= 10;
      int64_t left = (divisor - remainder) % divisor;
      if (left >= step) return nothing();
      if (step <= divisor) {
        std::string digits = std::to_string(left);
        if (scale == 0) digits.clear();
        else digits.insert(0, scale - std::min<size_t>(scale, digits.size()), '0');
        return literal(digits);
      }
    }
    return make(MULTIPLE, divisor, remainder, scale, in_fraction);
  }

  // What JSON writes between the quotes for the texts of an expression.
  int quoted(int id) {
    Level level(deep_);
    auto found = quoted_.find(id);
    if (found != quoted_.end()) return found->second;
    Node n = nodes_[id];
    int made = id;
    switch (n.op) {
      case SET: made = quoted_set(sets_[n.a]); break;
      case LITERAL: {
        made = empty();
        std::string text = strings_[n.a].substr(n.b);
        for (size_t i = text.size(); i-- > 0;) {
          Bytes one{};
          add(one, uint8_t(text[i]));
          bool plain = uint8_t(text[i]) >= 0x20 && text[i] != '"' && text[i] != '\\' && text[i] != 0x7f;
          size_t first = i;
          if (plain) {
            auto is_plain = [&](uint8_t c) { return c >= 0x20 && c != '"' && c != '\\' && c != 0x7f; };
            while (first > 0 && is_plain(uint8_t(text[first - 1]))) --first;
            made = cat(literal(text.substr(first, i - first + 1)), made);
            i = first;
          } else {
            made = cat(quoted_set(one), made);
          }
        }
        break;
      }
      case CAT: {
        int a = quoted(n.a);
        made = cat(a, quoted(n.b));
        break;
      }
      case OR:
      case AND: {
        std::vector<int> kids(pool_.begin() + n.a, pool_.begin() + n.a + n.b);
        for (int& kid : kids) kid = quoted(kid);
        made = listed(n.op, std::move(kids));
        break;
      }
      case NOT: made = negated(quoted(n.a)); break;
      case REPEAT: made = repeat(quoted(n.a), n.c, n.d, n.e); break;
      default: break;
    }
    quoted_[id] = made;
    return made;
  }

  // --- derivatives ---

  // Procedures by number: `bodies[p]`; those that are `open[p]` are read in place, others are called.
  std::vector<int> bodies;
  std::vector<bool> open;
  std::vector<bool> may_be_empty;  // known before the first call is made

  // What may follow `byte`; with `in_place` the bodies of all procedures are read in place of calls.
  int derive(int id, int byte, bool in_place, int deep = 0) {
    Level level(deep_);
    const Node n = nodes_[id];
    switch (n.op) {
      case NOTHING:
      case EMPTY:
      case TOKEN: return 0;
      case SET: return has(sets_[n.a], byte) ? 1 : 0;
      case LITERAL: return uint8_t(strings_[n.a][n.b]) == byte ? rest_of_literal(n) : 0;
      case MULTIPLE: return derive_multiple(n, byte);
      case LEXEME: return lexeme(derive(n.a, byte, in_place, deep), true);
      case CALL:
        if (!in_place && !open[n.a]) return 0;
        if (deep > 100) throw Refused("its references go in circles");
        return derive(bodies[n.a], byte, in_place, deep + 1);
      default: break;
    }
    uint64_t key = (uint64_t(uint32_t(id)) << 9 | uint64_t(byte) << 1 | uint64_t(in_place)) + 1;
    if (int* found = remembered(key)) return *found;
    int made = 0;
    switch (n.op) {
      case CAT: {
        int left = derive(n.a, byte, in_place, deep);
        made = left ? cat(left, n.b) : 0;
        if (nodes_[n.a].nullable) made = either(made, derive(n.b, byte, in_place, deep));
        break;
      }
      case OR: {
        std::vector<int> kids;
        for (int i = 0; i < n.b; ++i)
          if (int kid = derive(pool_[n.a + i], byte, in_place, deep)) kids.push_back(kid);
        made = kids.empty() ? 0 : kids.size() == 1 ? kids[0] : listed(OR, std::move(kids));
        break;
      }
      case AND: {
        std::vector<int> kids;
        bool dead = false;
        for (int i = 0; i < n.b && !dead; ++i) {
          kids.push_back(derive(pool_[n.a + i], byte, in_place, deep));
          dead = kids.back() == 0;
        }
        made = dead ? 0 : listed(AND, std::move(kids));
        break;
      }
      case NOT: made = negated(derive(n.a, byte, in_place, deep)); break;
      case REPEAT: {
        int one = derive(n.a, byte, in_place, deep);
        made = one ? cat(one, one_less(n)) : 0;
        break;
      }
      default: break;
    }
    remember(key, made);
    return made;
  }

  // The same, if the byte belongs to a lexeme that has begun; else nothing.
  int derive_within(int id, int byte) {
    Level level(deep_);
    const Node n = nodes_[id];
    if (!n.lexing) return 0;
    if (n.op == LEXEME) return lexeme(derive(n.a, byte, false), true);
    if (n.op == CAT) {
      int left = derive_within(n.a, byte);
      return left ? cat(left, n.b) : 0;
    }
    std::vector<int> kids;
    for (int i = 0; i < n.b; ++i) kids.push_back(derive_within(pool_[n.a + i], byte));
    return either(std::move(kids));
  }

  // What may follow a call of procedure `p` (or a special token, with op TOKEN).
  int derive_symbol(int id, Op op, int p, int deep = 0) {
    Level level(deep_);
    const Node n = nodes_[id];
    if (!n.symbols) return 0;
    switch (n.op) {
      case CALL:
        if (op == CALL && n.a == p) return 1;
        if (!open[n.a]) return 0;
        if (deep > 100) throw Refused("its references go in circles");
        return derive_symbol(bodies[n.a], op, p, deep + 1);
      case TOKEN: return op == TOKEN && n.a == p ? 1 : 0;
      case CAT: {
        int left = derive_symbol(n.a, op, p, deep);
        int made = left ? cat(left, n.b) : 0;
        return nodes_[n.a].nullable ? either(made, derive_symbol(n.b, op, p, deep)) : made;
      }
      case OR: {
        std::vector<int> kids;
        for (int i = 0; i < n.b; ++i) kids.push_back(derive_symbol(pool_[n.a + i], op, p, deep));
        return either(std::move(kids));
      }
      case REPEAT: {
        int one = derive_symbol(n.a, op, p, deep);
        return one ? cat(one, one_less(n)) : 0;
      }
      default: throw Refused("it intersects something that is not a text");
    }
  }

  // What an expression may begin with: sets of bytes whose members it may tell apart, called procedures, tokens.
  struct Heads {
    std::vector<const Bytes*> sets;
    std::vector<int> bytes;
    std::vector<int> calls;
    std::vector<int> tokens;
    std::vector<Bytes> own;
  };
  void heads(int id, Heads& into, int deep = 0) {
    Level level(deep_);
    const Node& n = nodes_[id];
    switch (n.op) {
      case SET: into.sets.push_back(&sets_[n.a]); break;
      case LITERAL: into.bytes.push_back(uint8_t(strings_[n.a][n.b])); break;
      case MULTIPLE:
        for (int b = '0'; b <= '9'; ++b) into.bytes.push_back(b);
        into.bytes.push_back('.');
        break;
      case CAT: {
        int a = n.a, b = n.b;
        heads(a, into, deep);
        if (nodes_[a].nullable) heads(b, into, deep);
        break;
      }
      case OR:
      case AND:
        for (int i = 0, from = n.a, count = n.b; i < count; ++i) heads(pool_[from + i], into, deep);
        break;
      case NOT:
      case LEXEME:
      case REPEAT: heads(n.a, into, deep); break;
      case CALL:
        if (deep > 100) throw Refused("its references go in circles");
        if (!open[n.a]) into.calls.push_back(n.a);
        heads(bodies[n.a], into, deep + 1);
        break;
      case TOKEN: into.tokens.push_back(n.a); break;
      default: break;
    }
  }

  // The bytes that a text of the expression may begin with, or more.
  Bytes first_bytes(int id, int deep = 0) {
    Level level(deep_);
    const Node n = nodes_[id];
    Bytes found{};
    switch (n.op) {
      case SET: return sets_[n.a];
      case LITERAL: add(found, uint8_t(strings_[n.a][n.b])); break;
      case MULTIPLE:
        found = range_of('0', '9');
        add(found, '.');
        break;
      case CAT:
        found = first_bytes(n.a, deep);
        if (nodes_[n.a].nullable) join(found, first_bytes(n.b, deep));
        break;
      case OR:
        for (int i = 0; i < n.b; ++i) join(found, first_bytes(pool_[n.a + i], deep));
        break;
      case AND:
        found = range_of(0, 255);
        for (int i = 0; i < n.b; ++i) {
          Bytes one = first_bytes(pool_[n.a + i], deep);
          for (int j = 0; j < 4; ++j) found[j] &= one[j];
        }
        break;
      case NOT: return range_of(0, 255);
      case LEXEME:
      case REPEAT: return first_bytes(n.a, deep);
      case CALL:
        if (deep > 100) throw Refused("its references go in circles");
        return first_bytes(bodies[n.a], deep + 1);
      default: break;
    }
    return found;
  }

  // --- counters ---

  // A derivative as a state: what its edge does to the counter, and its repeats without marks.
  Pair settled(int id) {
    if (!nodes_[id].counting) return {id, 0};
    int kinds = 0;  // 1: begun, 2: one taken, 4: untouched
    marks(id, kinds);
    if (kinds != 1 && kinds != 2 && kinds != 4) throw CountersClash();
    return {kinds == 4 ? id : shifted(id, 0), kinds == 1 ? 2 : kinds == 2 ? 1 : 0};
  }
  // The count at which the first of a state's bounds comes near, and the state from there on; limit 0: none.
  Pair reached(int id) {
    if (!nodes_[id].counting) return {0, 0};
    int least = INT32_MAX;
    smallest(id, least);
    int limit = least - tail_;
    return {shifted(id, limit), limit};
  }

 private:
  // One level of a recursion over expressions.
  struct Level {
    explicit Level(int& deep) : deep_(deep) {
      if (++deep_ > MAX_RECURSION) {
        deep_ = 0;
        throw Refused("it is nested too deep");
      }
    }
    ~Level() { deep_ -= deep_ > 0; }
    int& deep_;
  };

  int large_, tail_;
  Limits limits_;
  int deep_ = 0;
  size_t work_ = 0;  // since the time was last looked at
  std::vector<Node> nodes_;
  std::vector<int> pool_;
  std::vector<int> table_;
  std::vector<Bytes> sets_;
  std::vector<std::string> strings_;
  std::unordered_map<std::string, int> set_ids_, string_ids_;
  std::unordered_map<int, int> quoted_;
  std::vector<std::pair<uint64_t, int>> memo_;
  size_t memo_used_ = 0;

  static uint64_t mixed(uint64_t h) {
    h ^= h >> 32;
    h *= 0x9e3779b97f4a7c15ull;
    return h ^ h >> 29;
  }
  int* remembered(uint64_t key) {
    size_t mask = memo_.size() - 1;
    for (size_t at = mixed(key) & mask; memo_[at].first; at = (at + 1) & mask)
      if (memo_[at].first == key) return &memo_[at].second;
    return nullptr;
  }
  void remember(uint64_t key, int value) {
    if (memo_used_ > size_t(MAX_MEMORY)) throw Refused("it is too large to compile");
    if (++memo_used_ * 2 > memo_.size()) {
      std::vector<std::pair<uint64_t, int>> old(memo_.size() * 2, {0, -1});
      old.swap(memo_);
      for (auto& entry : old)
        if (entry.first) put(entry.first, entry.second);
    }
    put(key, value);
  }
  void put(uint64_t key, int value) {
    size_t mask = memo_.size() - 1, at = mixed(key) & mask;
    while (memo_[at].first && memo_[at].first != key) at = (at + 1) & mask;
    memo_[at] = {key, value};
  }

  static uint64_t hash_of(const Node& n, const int* kids) {
    uint64_t h = n.op;
    if (n.op == OR || n.op == AND) {
      for (int i = 0; i < n.b; ++i) h = mixed(h * 31 + uint32_t(kids[i]) + 1);
    } else {
      for (int value : {n.a, n.b, n.c, n.d, n.e}) h = mixed(h * 31 + uint32_t(value) + 1);
    }
    return h;
  }
  bool same(const Node& n, const int* kids, const Node& other) const {
    if (n.op != other.op) return false;
    if (n.op == OR || n.op == AND)
      return n.b == other.b && std::equal(kids, kids + n.b, pool_.begin() + other.a);
    return n.a == other.a && n.b == other.b && n.c == other.c && n.d == other.d && n.e == other.e;
  }
  int make(Op op, int a = 0, int b = 0, int c = 0, int d = 0, int e = 0, const int* kids = nullptr) {
    Node n{op, false, false, false, false, a, b, c, d, e};
    size_t mask = table_.size() - 1, at = hash_of(n, kids) & mask;
    for (; table_[at] >= 0; at = (at + 1) & mask)
      if (same(n, kids, nodes_[table_[at]])) return table_[at];
    if (int(nodes_.size()) >= MAX_NODES) throw Refused("it is too large to compile");
    if (nodes_.size() % 1024 == 0) limits_.check_time();
    if (kids) {
      n.a = int(pool_.size());
      pool_.insert(pool_.end(), kids, kids + b);
    }
    flags(n);
    int id = int(nodes_.size());
    nodes_.push_back(n);
    table_[at] = id;
    if (nodes_.size() * 2 > table_.size()) {
      table_.assign(table_.size() * 2, -1);
      mask = table_.size() - 1;
      for (int i = 0; i < int(nodes_.size()); ++i) {
        const Node& old = nodes_[i];
        const int* list = old.op == OR || old.op == AND ? pool_.data() + old.a : nullptr;
        size_t to = hash_of(old, list) & mask;
        while (table_[to] >= 0) to = (to + 1) & mask;
        table_[to] = i;
      }
    }
    return id;
  }
  void flags(Node& n) {
    switch (n.op) {
      case EMPTY: n.nullable = true; break;
      case CAT:
        n.nullable = nodes_[n.a].nullable && nodes_[n.b].nullable;
        n.counting = nodes_[n.a].counting || nodes_[n.b].counting;
        n.symbols = nodes_[n.a].symbols || nodes_[n.b].symbols;
        n.lexing = nodes_[n.a].lexing;
        break;
      case OR:
      case AND:
        n.nullable = n.op == AND;
        for (int i = 0; i < n.b; ++i) {
          const Node& kid = nodes_[pool_[n.a + i]];
          n.nullable = n.op == OR ? n.nullable || kid.nullable : n.nullable && kid.nullable;
          n.counting |= kid.counting;
          n.symbols |= kid.symbols;
          n.lexing |= kid.lexing;
        }
        break;
      case NOT:
        n.nullable = !nodes_[n.a].nullable;
        n.counting = nodes_[n.a].counting;
        break;
      case REPEAT:
        n.nullable = n.c == 0 && !(n.e & MIN_COUNTS);
        n.counting = n.e != 0 || nodes_[n.a].counting;
        n.symbols = nodes_[n.a].symbols;
        break;
      case MULTIPLE: n.nullable = n.b == 0; break;
      case LEXEME:
        n.nullable = nodes_[n.a].nullable;
        n.counting = nodes_[n.a].counting;
        n.lexing = n.b;
        break;
      case CALL:
        n.symbols = true;
        n.nullable = n.a < int(may_be_empty.size()) && may_be_empty[n.a];
        break;
      case TOKEN: n.symbols = true; break;
      default: break;
    }
  }
  int listed(Op op, std::vector<int> of) {
    if ((work_ += of.size() + 1) > 100000) {
      work_ = 0;
      limits_.check_time();
    }
    bool flat = true;
    for (int id : of) flat &= nodes_[id].op != op;
    if (!flat) {
      std::vector<int> all;
      for (int id : of) {
        if (nodes_[id].op == op) all.insert(all.end(), pool_.begin() + nodes_[id].a, pool_.begin() + nodes_[id].a + nodes_[id].b);
        else all.push_back(id);
      }
      of.swap(all);
    }
    std::sort(of.begin(), of.end());
    of.erase(std::unique(of.begin(), of.end()), of.end());
    int all = everything_or_none();
    if (op == OR) {
      if (!of.empty() && of[0] == 0) of.erase(of.begin());
      int sets = 0;
      for (int id : of) {
        if (id == all) return all;
        sets += nodes_[id].op == SET;
      }
      if (sets > 1) {
        Bytes together{};
        std::vector<int> others;
        for (int id : of) {
          if (nodes_[id].op == SET) join(together, sets_[nodes_[id].a]);
          else others.push_back(id);
        }
        others.push_back(set(together));
        std::sort(others.begin(), others.end());
        of.swap(others);
      }
      if (of.empty()) return 0;
    } else {
      if (!of.empty() && of[0] == 0) return 0;
      of.erase(std::remove(of.begin(), of.end(), all), of.end());
      if (of.empty()) return everything();
      bool nullable = true;
      for (int id : of) {
        if (nodes_[id].symbols) throw Refused("it intersects something that is not a text");
        nullable &= nodes_[id].nullable;
      }
      if (std::find(of.begin(), of.end(), 1) != of.end()) return nullable ? 1 : 0;
      for (int id : of)
        if (nodes_[id].op == NOT && excludes(nodes_[id].a, of)) return 0;
    }
    if (of.size() == 1) return of[0];
    return make(op, 0, int(of.size()), 0, 0, 0, of.data());
  }
  // Whether an expression, or one of its alternatives, is among those that are sorted in `of`.
  bool excludes(int id, const std::vector<int>& of) const {
    const Node& n = nodes_[id];
    if (n.op != OR) return std::binary_search(of.begin(), of.end(), id);
    for (int i = n.a; i < n.a + n.b; ++i)
      if (std::binary_search(of.begin(), of.end(), pool_[i])) return true;
    return false;
  }
  int all_ = -1;
  int everything_or_none() {
    if (all_ < 0) all_ = make(NOT, 0);
    return all_;
  }

  int rest_of_literal(const Node& n) {
    size_t left = strings_[n.a].size() - n.b - 1;
    if (left == 1) return byte(uint8_t(strings_[n.a].back()));
    return make(LITERAL, n.a, n.b + 1);
  }
  int derive_multiple(const Node& n, int byte) {
    if (byte >= '0' && byte <= '9') {
      int64_t remainder = n.b, scale = n.c;
      if (!n.d) remainder *= 10;
      else if (scale == 0) return 0;
      else --scale;
      int64_t step = 1;
      for (int64_t i = 0; i < scale; ++i) step *= 10;
      return multiple(n.a, int((remainder + (byte - '0') * step) % n.a), int(scale), n.d);
    }
    if (byte == '.' && !n.d && n.c > 0) return multiple(n.a, n.b, n.c, true);
    return 0;
  }
  int one_less(const Node& n) {
    int low = n.c, high = n.d, flags = n.e;
    if (flags == 0) {
      bool low_counts = low > large_, high_counts = high > large_;
      if (low_counts || high_counts) flags = BEGUN | TAKEN | (low_counts ? MIN_COUNTS : 0) | (high_counts ? MAX_COUNTS : 0);
    } else {
      if (flags & TAKEN) throw CountersClash();
      flags |= TAKEN;
    }
    if (!(flags & MIN_COUNTS) && low > 0) --low;
    if (!(flags & MAX_COUNTS) && high != UNBOUNDED) --high;
    return repeat(n.a, low, high, flags);
  }
  void marks(int id, int& kinds) {
    Level level(deep_);
    const Node& n = nodes_[id];
    if (!n.counting) return;
    switch (n.op) {
      case CAT:
        marks(n.a, kinds);
        marks(n.b, kinds);
        break;
      case OR:
      case AND:
        for (int i = 0; i < n.b; ++i) marks(pool_[n.a + i], kinds);
        break;
      case NOT:
      case LEXEME: marks(n.a, kinds); break;
      case REPEAT:
        if (n.e) kinds |= n.e & BEGUN ? 1 : n.e & TAKEN ? 2 : 4;
        marks(n.a, kinds);
        break;
      default: break;
    }
  }
  void smallest(int id, int& least) {
    Level level(deep_);
    const Node& n = nodes_[id];
    if (!n.counting) return;
    switch (n.op) {
      case CAT:
        smallest(n.a, least);
        smallest(n.b, least);
        break;
      case OR:
      case AND:
        for (int i = 0; i < n.b; ++i) smallest(pool_[n.a + i], least);
        break;
      case NOT:
      case LEXEME: smallest(n.a, least); break;
      case REPEAT:
        if (n.e & MIN_COUNTS) least = std::min(least, n.c);
        if (n.e & MAX_COUNTS) least = std::min(least, n.d);
        smallest(n.a, least);
        break;
      default: break;
    }
  }
  // The counting repeats without marks, their bounds lowered by `by`; a bound that comes to the tail counts no more.
  int shifted(int id, int by) {
    Level level(deep_);
    const Node n = nodes_[id];
    if (!n.counting) return id;
    switch (n.op) {
      case CAT: {
        int a = shifted(n.a, by);
        return cat(a, shifted(n.b, by));
      }
      case OR:
      case AND: {
        std::vector<int> kids(pool_.begin() + n.a, pool_.begin() + n.a + n.b);
        for (int& kid : kids) kid = shifted(kid, by);
        return listed(n.op, std::move(kids));
      }
      case NOT: return negated(shifted(n.a, by));
      case LEXEME: return lexeme(shifted(n.a, by), n.b);
      case REPEAT: {
        if (nodes_[n.a].counting) throw CountersClash();
        int low = n.c, high = n.d, flags = n.e & (MIN_COUNTS | MAX_COUNTS);
        if (flags & MIN_COUNTS && (low -= by) <= tail_) flags &= ~MIN_COUNTS;
        if (flags & MAX_COUNTS && (high -= by) <= tail_) flags &= ~MAX_COUNTS;
        return repeat(n.a, low, high, flags);
      }
      default: return id;
    }
  }

  int quoted_set(const Bytes& set_given) {
    const Bytes& bytes = set_given;
    Bytes plain = bytes;
    plain[0] &= ~uint64_t(0xffffffff);
    bool has_low = (bytes[0] & 0xffffffff) != 0;
    if (!has_low && !has(bytes, '"') && !has(bytes, '\\') && !has(bytes, 0x7f)) return set(bytes);
    Bytes letters{}, digits[8]{};  // after a backslash; after \u00 and the digit that is the index
    uint32_t low = uint32_t(bytes[0]);
    if (low == 0xffffffffu || low == ~(1u << '\n')) {
      // As the oracle has it: with all control characters, a quote and a backslash may be escaped too.
      for (char c : {'"', '\\', 'b', 'f', 'r', 't'}) add(letters, c);
      if (low == 0xffffffffu) add(letters, 'n');
    }
    static const char* const names = "\b" "b\f" "f\n" "n\r" "r\t" "t";
    for (int b = 0; b < 32; ++b) {
      if (!(low >> b & 1)) continue;
      for (const char* p = names; *p; p += 2)
        if (p[0] == b) add(letters, p[1]);
      add(digits[b >> 4], "0123456789abcdef"[b & 15]);
      add(digits[b >> 4], "0123456789ABCDEF"[b & 15]);
    }
    if (has(bytes, '\\')) add(letters, '\\');
    if (has(bytes, '"')) add(letters, '"');
    if (has(bytes, 0x7f)) {
      add(digits[7], 'f');
      add(digits[7], 'F');
    }
    std::vector<int> numbers;
    for (int i = 0; i < 8; ++i) numbers.push_back(cat(byte('0' + i), set(digits[i])));
    int by_number = cat(literal("u00"), either(std::move(numbers)));
    int escaped = cat(byte('\\'), either(by_number, set(letters)));
    drop(plain, '\\');
    drop(plain, '"');
    drop(plain, 0x7f);
    return either(escaped, set(plain));
  }
};

}  // namespace grammar
