// Compiles a grammar into an automaton, and a vocabulary into a trie; `grammar_walk.h` tells their layouts.
//
// A grammar comes as a program of words that build expressions (`text/automaton.py` writes it). Every expression that
// derivatives lead to is a state. Objects and arrays are procedures: a call pushes where the caller continues, so the
// states inside are stored once, wherever and however deep they occur. Where two readings of a text begin with the same
// byte and one of them is a call, that call is read in place instead, so that every byte has one successor.

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "expressions.h"
#include "grammar_masks.h"
#include "grammar_walk.h"
#include "patterns.h"

namespace grammar {
namespace {

// Bounds above `LARGE` count instead of being written out.
constexpr int LARGE = 12;

constexpr int NO_BOUND = INT_MAX / 2;  // more open calls than any walk has

enum ProgramOp {
  PROGRAM_NOTHING,
  PROGRAM_LITERAL,   // offset and length in the texts
  PROGRAM_PATTERN,   // offset, length, whether a part may match
  PROGRAM_CAT,       // operands
  PROGRAM_OR,        // operands
  PROGRAM_AND,       // operands
  PROGRAM_NOT,       // operand
  PROGRAM_REPEAT,    // operand, least, most or -1
  PROGRAM_QUOTED,    // operand
  PROGRAM_MULTIPLE,  // coefficient, decimals
  PROGRAM_CALL,      // procedure
  PROGRAM_TOKEN,     // token id
  PROGRAM_BODY,      // procedure, operand
  PROGRAM_ROOT,      // operand
  PROGRAM_LEXEME     // operand
};

struct Edge {
  int low, high, bits, target, back, back_bits;
  bool within;  // a lexeme goes on
};

struct State {
  bool explored = false;
  bool live = false;
  int needs = 0;  // calls that must be opened from here, one inside of the other, to complete this one
  std::vector<Edge> edges;
  std::vector<std::pair<int, int>> tokens;
  int limit = 0, reached = 0;
};

class Compiler {
 public:
  Compiler(const int* program, int words, const char* texts, const Limits& limits, int large, int tail,
           const std::vector<bool>& open, const std::vector<bool>& may_be_empty)
      : x_(large, tail, limits), limits_(limits) {
    x_.may_be_empty = may_be_empty;
    build(program, words, texts, open);
  }

  Expressions& expressions() { return x_; }

  bool knew_what_may_be_empty() const { return x_.may_be_empty == empty_after_all; }

  // The automaton; nothing of use where `to_open` has changed.
  std::vector<int> compile() {
    root_ = settled(root_).expression;
    explore(root_);
    find_users();
    mark_live();
    if (!state(root_).live) throw Malformed("no text satisfies it");
    number();
    check_returns();
    if (to_open != x_.open) return {};
    find_needs();
    if (!state(root_).live)
      throw Refused("its shortest texts nest deeper than " + std::to_string(limits_.depth) + " open calls");
    number();  // without the states that need more
    return written();
  }

  // Procedures that must be read in place after all, found by `compile`; then compile again.
  std::vector<bool> to_open;
  std::vector<bool> empty_after_all;

 private:
  Expressions x_;
  Limits limits_;
  int root_ = 0;
  std::vector<State> states_;       // by expression
  std::vector<int> order_;          // expressions that were explored
  std::vector<int> numbered_;       // expressions that are states of the automaton
  std::vector<int> number_;         // the inverse
  std::vector<Bytes> first_;        // by procedure
  std::vector<std::vector<int>> users_;  // by expression: the states with an edge to it
  int n_edges_ = 0;
  bool has_counters_ = false;

  void build(const int* program, int words, const char* texts, const std::vector<bool>& open) {
    std::vector<int> made;
    int procedures = 0;
    for (int at = 0; at < words; at += 2 + program[at + 1])
      if (program[at] == PROGRAM_BODY || program[at] == PROGRAM_CALL) procedures = std::max(procedures, program[at + 2] + 1);
    x_.bodies.assign(procedures, 0);
    x_.open.assign(procedures, false);
    for (int at = 0; at < words; at += 2 + program[at + 1]) {
      const int* arg = program + at + 2;
      int n = program[at + 1];
      auto operand = [&](int i) { return made.at(arg[i]); };
      std::vector<int> all;
      switch (program[at]) {
        case PROGRAM_CAT: {
          int whole = x_.empty();
          for (int i = n; i-- > 0;) whole = x_.cat(operand(i), whole);
          made.push_back(whole);
          break;
        }
        case PROGRAM_OR:
        case PROGRAM_AND:
          for (int i = 0; i < n; ++i) all.push_back(operand(i));
          made.push_back(program[at] == PROGRAM_OR ? x_.either(std::move(all)) : x_.both(std::move(all)));
          break;
        case PROGRAM_NOTHING: made.push_back(x_.nothing()); break;
        case PROGRAM_LITERAL: made.push_back(x_.literal(std::string(texts + arg[0], arg[1]))); break;
        case PROGRAM_PATTERN: made.push_back(Pattern(x_, std::string(texts + arg[0], arg[1])).read(arg[2])); break;
        case PROGRAM_NOT: made.push_back(x_.negated(operand(0))); break;
        case PROGRAM_REPEAT: made.push_back(x_.repeat(operand(0), arg[1], arg[2])); break;
        case PROGRAM_QUOTED: made.push_back(x_.cat(x_.byte('"'), x_.cat(x_.quoted(operand(0)), x_.byte('"')))); break;
        case PROGRAM_MULTIPLE: made.push_back(x_.multiple(arg[0], arg[0], arg[1], false)); break;
        case PROGRAM_LEXEME: made.push_back(x_.lexeme(operand(0))); break;
        case PROGRAM_CALL: made.push_back(x_.call(arg[0])); break;
        case PROGRAM_TOKEN: made.push_back(x_.token(arg[0])); break;
        case PROGRAM_BODY:
          x_.bodies.at(arg[0]) = operand(1);
          made.push_back(0);
          break;
        case PROGRAM_ROOT:
          root_ = operand(0);
          made.push_back(0);
          break;
        default: throw Refused("its program is damaged");
      }
      limits_.check_time();
    }
    // A procedure that begins with a call or a token, or may be empty, is read in place.
    for (int p = 0; p < procedures; ++p) {
      Expressions::Heads heads;
      x_.open[p] = x_[x_.bodies[p]].nullable;
      shallow_heads(x_.bodies[p], heads);
      if (!heads.calls.empty() || !heads.tokens.empty()) x_.open[p] = true;
      if (p < int(open.size()) && open[p]) x_.open[p] = true;
    }
    for (int p = 0; p < procedures; ++p) first_.push_back(x_.first_bytes(x_.bodies[p]));
    to_open = x_.open;
    for (int p = 0; p < procedures; ++p) empty_after_all.push_back(x_[x_.bodies[p]].nullable);
    x_.may_be_empty.resize(procedures);
  }

  void shallow_heads(int id, Expressions::Heads& into) {
    const Node& n = x_[id];
    if (!n.symbols) return;
    if (n.op == CALL) into.calls.push_back(n.a);
    else if (n.op == TOKEN) into.tokens.push_back(n.a);
    else if (n.op == CAT) {
      shallow_heads(n.a, into);
      if (x_[n.a].nullable) shallow_heads(n.b, into);
    } else if (n.op == OR) {
      for (int i = 0; i < n.b; ++i) shallow_heads(x_.list_of(id)[i], into);
    } else if (n.op == REPEAT) {
      shallow_heads(n.a, into);
    }
  }

  State& state(int id) {
    if (id >= int(states_.size())) states_.resize(std::max(x_.size(), id + 1));
    return states_[id];
  }

  Pair settled(int id) { return x_.settled(id); }

  void explore(int from) {
    std::vector<int> todo{from};
    while (!todo.empty()) {
      int id = todo.back();
      todo.pop_back();
      if (state(id).explored) continue;
      if (int(order_.size()) >= limits_.states) throw Refused("it needs more than " + std::to_string(limits_.states) + " states");
      if (order_.size() % 64 == 0) limits_.check_time();
      order_.push_back(id);
      State made = explored(id);
      for (const Edge& edge : made.edges) {
        todo.push_back(edge.target);
        if (edge.bits & EDGE_CALL) todo.push_back(edge.back);
      }
      for (auto& [token, target] : made.tokens) todo.push_back(target);
      if (made.limit) todo.push_back(made.reached);
      n_edges_ += int(made.edges.size());
      if (n_edges_ > limits_.words / EDGE_SIZE) throw Refused("it needs more than " + std::to_string(limits_.words) + " words");
      state(id) = std::move(made);
    }
  }

  // The edges of a state. Bytes that no part of the expression tells apart are tried once.
  State explored(int id) {
    State made;
    made.explored = true;
    Expressions::Heads heads;
    x_.heads(id, heads);
    uint64_t mark[256] = {};
    uint64_t seed = 0x9e3779b97f4a7c15ull;
    std::sort(heads.sets.begin(), heads.sets.end());
    heads.sets.erase(std::unique(heads.sets.begin(), heads.sets.end()), heads.sets.end());
    for (const Bytes* set : heads.sets) {
      seed = seed * 6364136223846793005ull + 1442695040888963407ull;
      uint64_t value = seed ^ seed >> 31;
      for (int word = 0; word < 4; ++word)
        for (uint64_t bits = (*set)[word]; bits; bits &= bits - 1) mark[word * 64 + __builtin_ctzll(bits)] ^= value;
    }
    for (int b : heads.bytes) mark[b] = seed * 31 + 0x1234567 + b * 0x100000001b3ull;
    std::sort(heads.calls.begin(), heads.calls.end());
    heads.calls.erase(std::unique(heads.calls.begin(), heads.calls.end()), heads.calls.end());
    std::sort(heads.tokens.begin(), heads.tokens.end());
    heads.tokens.erase(std::unique(heads.tokens.begin(), heads.tokens.end()), heads.tokens.end());

    std::vector<std::pair<uint64_t, Edge>> classes;
    for (int b = 0; b < 256; ++b) {
      const Edge* edge = nullptr;
      // Neighbours are mostly of one class; the few classes are searched from the newest.
      for (size_t i = classes.size(); i-- > 0 && !edge;)
        if (classes[i].first == mark[b]) edge = &classes[i].second;
      if (!edge) {
        classes.emplace_back(mark[b], edge_on(id, b, heads.calls));
        edge = &classes.back().second;
      }
      if (edge->target == 0) continue;
      Edge* last = made.edges.empty() ? nullptr : &made.edges.back();
      if (last && last->high == b - 1 && last->target == edge->target && last->bits == edge->bits &&
          last->back == edge->back && last->back_bits == edge->back_bits && last->within == edge->within) {
        last->high = b;
      } else {
        made.edges.push_back(*edge);
        made.edges.back().low = made.edges.back().high = b;
      }
    }
    for (int token : heads.tokens) {
      Pair to = settled(x_.derive_symbol(id, TOKEN, token));
      if (to.bits) throw CountersClash();
      if (to.expression) made.tokens.emplace_back(token, to.expression);
    }
    Pair reached = x_.reached(id);
    made.limit = reached.bits;
    made.reached = reached.expression;
    return made;
  }

  Edge edge_on(int id, int byte, const std::vector<int>& calls) {
    if (int within = x_.derive_within(id, byte)) {
      Pair to = settled(within);
      return {byte, byte, to.bits, to.expression, 0, 0, true};
    }
    int callee = -1, n = 0;
    for (int p : calls)
      if (has(first_[p], byte)) callee = p, ++n;
    int direct = x_.derive(id, byte, false);
    if (n == 0 || n > 1 || direct != 0) {
      if (n > 0) direct = x_.derive(id, byte, true);
      Pair to = settled(direct);
      return {byte, byte, to.bits, to.expression, 0, 0, false};
    }
    Pair to = settled(x_.derive(x_.bodies[callee], byte, false));
    Pair back = settled(x_.derive_symbol(id, CALL, callee));
    if (to.expression == 0 || back.expression == 0) return {byte, byte, 0, 0, 0, 0, false};
    return {byte, byte, to.bits | EDGE_CALL, to.expression, back.expression, back.bits, false};
  }

  void find_users() {
    users_.resize(states_.size());
    for (int id : order_) {
      const State& s = states_[id];
      for (const Edge& e : s.edges) {
        users_[e.target].push_back(id);
        if (e.bits & EDGE_CALL) users_[e.back].push_back(id);
      }
      for (auto& [token, target] : s.tokens) users_[target].push_back(id);
      if (s.limit) users_[s.reached].push_back(id);
    }
  }

  using Set = std::vector<bool>;  // by expression

  // A state is live if a text leads from it to the end. A call needs the callee and what follows.
  void mark_live() {
    Set all(states_.size());
    for (int id : order_) all[id] = true;
    Set live = spread(all, [&](int id) { return x_[id].nullable; }, nullptr, true);
    for (int id : order_) states_[id].live = live[id];
    check_counters(live);
  }

  // The states of `among` that hold, or that have an edge to one that does (or, with `at_limit`, whose state at the limit
  // does). An edge that calls needs where it returns, and its callee among `callees`, or if that is null among the found.
  template <class Holds>
  Set spread(const Set& among, Holds holds, const Set* callees, bool at_limit) {
    Set found(states_.size());
    std::vector<int> todo;
    for (int id : order_) {
      if (!among[id] || !holds(id)) continue;
      found[id] = true;
      todo.push_back(id);
    }
    auto leads = [&](int id) {
      const State& s = states_[id];
      if (at_limit && s.limit && found[s.reached]) return true;
      for (const Edge& e : s.edges)
        if (passes(e, found, callees ? *callees : found)) return true;
      for (auto& [token, target] : s.tokens)
        if (found[target]) return true;
      return false;
    };
    for (size_t i = 0; i < todo.size(); ++i) {
      for (int user : users_[todo[i]]) {
        if (found[user] || !among[user] || !leads(user)) continue;
        found[user] = true;
        todo.push_back(user);
      }
    }
    return found;
  }

  // Whether an edge leads to a state of a set within this call; its callee, if it calls, must be one of `callees`.
  static bool passes(const Edge& e, const Set& to, const Set& callees) {
    return e.bits & EDGE_CALL ? callees[e.target] && to[e.back] : to[e.target];
  }

  // The states of `among` from which edges lead to the end of the call, or to a state of `among` with a higher count.
  Set progressing(const Set& among, const Set* callees) {
    auto progresses = [&](int id) {
      if (x_[id].nullable) return true;
      for (const Edge& e : states_[id].edges) {
        bool counts = (e.bits & EDGE_CALL ? e.back_bits : e.bits) & COUNT_ADD;
        if (counts && passes(e, among, callees ? *callees : among)) return true;
      }
      return false;
    };
    return spread(among, progresses, callees, false);
  }

  // Whether a state is live must not depend on its counter: its state at the limit is live if it is, and from every live
  // state edges lead to the end, or to a live state with a higher count. Then every allowed byte can be completed.
  void check_counters(const Set& live) {
    for (int id : order_) {
      const State& s = states_[id];
      has_counters_ |= s.limit != 0;
      if (s.limit && s.live != states_[s.reached].live) throw CountersClash();
    }
    if (has_counters_ && progressing(live, nullptr) != live) throw CountersClash();
  }

  // The largest part of `among` whose states can complete their call within it, whatever their counter is, with calls of
  // `callees` alone.
  Set completed(Set among, const Set& callees) {
    for (;;) {
      limits_.check_time();
      Set found = progressing(among, &callees);
      if (!has_counters_) return found;
      for (int id : order_)
        if (found[id] && states_[id].limit && !found[states_[id].reached]) found[id] = false;
      if (found == among) return found;
      among = std::move(found);
    }
  }

  // How many calls must be opened inside of one another to complete the call of a state, whatever its counter is. States
  // that need more than there are on the stack are not live.
  void find_needs() {
    Set before(states_.size()), live(states_.size());
    for (int id : order_) live[id] = states_[id].live;
    for (int calls = 0; calls <= limits_.depth && before != live; ++calls) {
      Set found = completed(live, before);
      for (int id : order_)
        if (found[id] && !before[id]) states_[id].needs = calls;
      before = std::move(found);
    }
    for (int id : order_) {
      State& s = states_[id];
      s.live = before[id];
      s.edges.erase(std::remove_if(s.edges.begin(), s.edges.end(), [&](auto& e) { return deepest(e) < 0; }), s.edges.end());
    }
  }

  // With how many open calls an edge may be taken at most, so that the text can still be completed; negative if never.
  int deepest(const Edge& e) const {
    int room = limits_.depth - states_[e.target].needs;
    return e.bits & EDGE_CALL ? std::min(room - 1, limits_.depth - states_[e.back].needs) : room;
  }

  void number() {
    number_.assign(states_.size(), -1);
    number_[root_] = 0;
    numbered_.assign(1, root_);
    auto reach = [&](int id) {
      if (number_[id] >= 0) return;
      number_[id] = int(numbered_.size());
      numbered_.push_back(id);
    };
    for (size_t i = 0; i < numbered_.size(); ++i) {
      State& s = states_[numbered_[i]];
      auto dead = [&](const Edge& e) {
        return !states_[e.target].live || (e.bits & EDGE_CALL && !states_[e.back].live);
      };
      s.edges.erase(std::remove_if(s.edges.begin(), s.edges.end(), dead), s.edges.end());
      s.tokens.erase(std::remove_if(s.tokens.begin(), s.tokens.end(), [&](auto& t) { return !states_[t.second].live; }), s.tokens.end());
      for (const Edge& e : s.edges) {
        reach(e.target);
        if (e.bits & EDGE_CALL) reach(e.back);
      }
      for (auto& [token, target] : s.tokens) reach(target);
      if (s.limit) reach(s.reached);
    }
  }

  // The states of one call: those that edges lead to, over nested calls to where they return.
  std::vector<int> within(int from) {
    std::vector<bool> seen(numbered_.size());
    std::vector<int> found{from};
    seen[number_[from]] = true;
    for (size_t i = 0; i < found.size(); ++i) {
      const State& s = states_[found[i]];
      auto reach = [&](int id) {
        if (seen[number_[id]]) return;
        seen[number_[id]] = true;
        found.push_back(id);
      };
      for (const Edge& e : s.edges) reach(e.bits & EDGE_CALL ? e.back : e.target);
      for (auto& [token, target] : s.tokens) reach(target);
      if (s.limit) reach(s.reached);
    }
    return found;
  }

  struct Entry {
    std::vector<int> states;
    Bytes goes_on{};  // bytes that a state may take although the call may return there
  };

  // Where a call may return and may also go on with the same byte, the automaton could not tell: read it in place.
  void check_returns() {
    std::unordered_map<int, Entry> entries;  // by the callee's first state
    entries[root_].states = within(root_);
    for (int id : numbered_)
      for (const Edge& e : states_[id].edges)
        if (e.bits & EDGE_CALL && !entries.count(e.target)) {
          std::vector<int> found = within(e.target);
          entries[e.target].states = std::move(found);
          limits_.check_time();
        }
    auto bytes_of = [&](int id) {
      Bytes set{};
      for (const Edge& e : states_[id].edges)
        for (int b = e.low; b <= e.high; ++b) add(set, b);
      return set;
    };
    for (auto& [first, entry] : entries)
      for (int id : entry.states)
        if (x_[id].nullable)
          for (const Edge& e : states_[id].edges)
            if (!e.within) join(entry.goes_on, range_of(e.low, e.high));
    bool again = true;
    while (again) {
      again = false;
      for (auto& [first, entry] : entries) {
        for (int id : entry.states) {
          for (const Edge& e : states_[id].edges) {
            if (!(e.bits & EDGE_CALL)) continue;
            const Bytes& inner = entries[e.target].goes_on;
            if (none(inner)) continue;
            Bytes after = bytes_of(e.back);
            for (int i = 0; i < 4; ++i) after[i] &= inner[i];
            if (!none(after)) {
              reopen(e);
              return;
            }
            if (!x_[e.back].nullable) continue;
            Bytes before = entry.goes_on;
            join(entry.goes_on, inner);
            again |= before != entry.goes_on;
          }
        }
      }
    }
  }
  void reopen(const Edge& e) {
    bool opened = false;
    for (size_t p = 0; p < x_.bodies.size(); ++p) {
      if (x_.open[p] || !has(first_[p], e.low)) continue;
      if (settled(x_.derive(x_.bodies[p], e.low, false)).expression == e.target) to_open[p] = opened = true;
    }
    if (!opened) throw Refused("its parts cannot be told apart");
  }

  // How many calls can be open at once; -1 without a bound.
  int depth() {
    std::unordered_map<int, int> depths;  // by a call's first state; -2 while it is being found
    bool unbounded = false;
    auto of = [&](auto& self, int from, int deep) -> int {
      auto found = depths.find(from);
      if (found != depths.end()) {
        unbounded |= found->second == -2;
        return found->second == -2 ? 0 : found->second;
      }
      if (deep > 1000 || unbounded) {
        unbounded = true;
        return 0;
      }
      depths[from] = -2;
      int most = 0;
      std::vector<int> callees;
      for (int id : within(from))
        for (const Edge& e : states_[id].edges)
          if (e.bits & EDGE_CALL) callees.push_back(e.target);
      std::sort(callees.begin(), callees.end());
      callees.erase(std::unique(callees.begin(), callees.end()), callees.end());
      for (int callee : callees) most = std::max(most, 1 + self(self, callee, deep + 1));
      return depths[from] = most;
    };
    int most = of(of, root_, 0);
    return unbounded ? -1 : most;
  }

  std::vector<int> written() {
    int n = int(numbered_.size()), edges = 0, tokens = 0;
    for (int id : numbered_) edges += int(states_[id].edges.size()), tokens += int(states_[id].tokens.size());
    std::vector<int> a(HEADER_SIZE + n * STATE_SIZE + edges * EDGE_SIZE + tokens * TOKEN_EDGE_SIZE);
    if (int(a.size()) > limits_.words) throw Refused("it needs more than " + std::to_string(limits_.words) + " words");
    a[HEADER_MAGIC] = MAGIC;
    a[HEADER_WORDS] = int(a.size());
    a[HEADER_STATES] = n;
    a[HEADER_START] = 0;
    a[HEADER_STATES_AT] = HEADER_SIZE;
    a[HEADER_EDGES_AT] = HEADER_SIZE + n * STATE_SIZE;
    a[HEADER_TOKEN_EDGES_AT] = a[HEADER_EDGES_AT] + edges * EDGE_SIZE;
    a[HEADER_DEPTH] = depth();
    int edge_at = 0, token_at = 0, free = limits_.depth;
    for (int i = 0; i < n; ++i) {
      const State& s = states_[numbered_[i]];
      int* w = a.data() + HEADER_SIZE + i * STATE_SIZE;
      w[STATE_EDGES] = edge_at;
      w[STATE_N_EDGES] = int(s.edges.size());
      w[STATE_TOKEN_EDGES] = token_at;
      w[STATE_N_TOKEN_EDGES] = int(s.tokens.size());
      w[STATE_ACCEPTS] = !x_[numbered_[i]].nullable ? 0 : s.edges.empty() && s.tokens.empty() ? 2 : 1;
      w[STATE_LIMIT] = s.limit;
      w[STATE_REACHED] = s.limit ? number_[s.reached] : 0;
      for (const Edge& e : s.edges) {
        int* to = a.data() + a[HEADER_EDGES_AT] + edge_at++ * EDGE_SIZE;
        to[EDGE_BYTES] = e.low | e.high << 8 | e.bits << 16 | deepest(e) << EDGE_DEEPEST;
        free = std::min(free, deepest(e));
        to[EDGE_TARGET] = number_[e.target];
        to[EDGE_RETURN] = e.bits & EDGE_CALL ? number_[e.back] << 2 | e.back_bits : 0;
      }
      for (auto& [token, target] : s.tokens) {
        int* to = a.data() + a[HEADER_TOKEN_EDGES_AT] + token_at++ * TOKEN_EDGE_SIZE;
        to[TOKEN_ID] = token;
        to[TOKEN_TARGET] = number_[target];
        to[TOKEN_DEEPEST] = limits_.depth - states_[target].needs;
        free = std::min(free, to[TOKEN_DEEPEST]);
      }
    }
    bool is_never_full = a[HEADER_DEPTH] >= 0 && a[HEADER_DEPTH] <= limits_.depth;
    a[HEADER_FREE] = is_never_full ? NO_BOUND : free;
    return a;
  }
};

std::vector<int> compiled(const int* program, int words, const char* texts, const Limits& limits) {
  // Bounds that cannot count, or whose ends are too near for their patterns, are tried with longer tails, then without.
  static const int tries[][2] = {{LARGE, 1}, {48, 32}, {INT_MAX, 1}};
  for (int i = 0;; ++i) {
    try {
      std::vector<bool> open, may_be_empty;
      for (int round = 0; round < 32; ++round) {
        Compiler compiler(program, words, texts, limits, tries[i][0], tries[i][1], open, may_be_empty);
        if (!compiler.knew_what_may_be_empty()) {
          may_be_empty = compiler.empty_after_all;
          continue;
        }
        open = compiler.to_open;
        std::vector<int> made = compiler.compile();
        if (open == compiler.to_open) return made;
        open = compiler.to_open;
      }
      throw Refused("its parts cannot be told apart");
    } catch (const CountersClash&) {
      if (i == 2) throw;
    }
  }
}

// --- vocabularies ---

// Adds the nodes of the tokens `from` to `to`, sorted by their bytes, that agree in their first `level` bytes.
struct TrieMaker {
  const std::vector<std::string>& bytes;
  const std::vector<int>& sorted;
  std::vector<int> nodes, same;

  void add(size_t from, size_t to, int level) {
    while (from < to) {
      uint8_t byte = uint8_t(bytes[sorted[from]][level]);
      size_t end = from;
      while (end < to && uint8_t(bytes[sorted[end]][level]) == byte) ++end;
      size_t node = nodes.size();
      nodes.insert(nodes.end(), {byte | level << 8, 0, -1});
      for (; from < end && int(bytes[sorted[from]].size()) == level + 1; ++from) {
        same[sorted[from]] = nodes[node + NODE_TOKEN];
        nodes[node + NODE_TOKEN] = sorted[from];
      }
      add(from, end, level + 1);
      nodes[node + NODE_AFTER] = int(nodes.size() / NODE_SIZE);
      from = end;
    }
  }
};

std::vector<int> vocabulary(const char* text, const int* ends, const uint8_t* special, int tokens) {
  std::vector<std::string> bytes;
  std::vector<int> sorted, v(VOCABULARY_SIZE), flagged;
  for (int id = 0, from = 0; id < tokens; from = ends[id++]) {
    bytes.emplace_back(text + from, size_t(ends[id] - from));
    bool apart = special[id] || bytes[id].size() > size_t(MAX_TOKEN_BYTES);
    flagged.push_back(ends[id] << 1 | int(apart));
    if (apart || bytes[id].empty()) continue;
    sorted.push_back(id);
    v[VOCABULARY_LONGEST] = std::max(v[VOCABULARY_LONGEST], int(bytes[id].size()));
  }
  std::sort(sorted.begin(), sorted.end(), [&](int a, int b) { return bytes[a] < bytes[b]; });
  TrieMaker trie{bytes, sorted, {}, std::vector<int>(tokens, -1)};
  trie.add(0, sorted.size(), 0);
  v[VOCABULARY_MAGIC] = MAGIC;
  v[VOCABULARY_TOKENS] = tokens;
  v[VOCABULARY_NODES] = int(trie.nodes.size() / NODE_SIZE);
  for (auto [at, part] : {std::pair(VOCABULARY_NODES_AT, &trie.nodes), std::pair(VOCABULARY_SAME_AT, &trie.same),
                          std::pair(VOCABULARY_ENDS_AT, &flagged)}) {
    v[at] = int(v.size());
    v.insert(v.end(), part->begin(), part->end());
  }
  int n_bytes = tokens ? ends[tokens - 1] : 0;
  v[VOCABULARY_BYTES_AT] = int(v.size());
  v.resize(v.size() + size_t(n_bytes + 3) / 4);
  std::memcpy(v.data() + v[VOCABULARY_BYTES_AT], text, size_t(n_bytes));
  v[VOCABULARY_WORDS] = int(v.size());
  return v;
}

}  // namespace
}  // namespace grammar

using namespace grammar;

namespace {

// An array of the caller's, to be freed by `grammar_free`; null if there is no memory for it.
int* copied(const std::vector<int>& words) {
  int* made = static_cast<int*>(std::malloc(words.size() * sizeof(int)));
  if (made) std::memcpy(made, words.data(), words.size() * sizeof(int));
  return made;
}

int refused(const char* why, char* error, int room, int result = 1) {
  std::snprintf(error, size_t(room), "%s", why);
  return result;
}

}  // namespace

extern "C" {

// 0 and a new array of words, or a sentence in `error` and 1, or 2 where no other compiler can take it either.
int grammar_compile(const int* program, int words, const char* texts, int max_states, int max_words, int max_ms,
                    int max_depth, int** made, char* error, int room) {
  try {
    if (max_depth < 0 || max_depth > MAX_DEPTH) throw Refused("the stack has no room for so many calls");
    Limits limits{max_states, max_words, max_depth, Clock::now() + std::chrono::milliseconds(max_ms), max_ms};
    std::vector<int> a = compiled(program, words, texts, limits);
    *made = copied(a);
    return *made ? 0 : refused("there is not enough memory", error, room);
  } catch (const Malformed& why) {
    return refused(why.what(), error, room, 2);
  } catch (const std::exception& why) {
    return refused(why.what(), error, room);
  }
}

void grammar_free(int* made) { std::free(made); }

// Whether patterns, searched for as JSON schemas do, match a text (1 or 0); -1 if they cannot be read.
int grammar_matches(const char* pattern, int length, const char* text, int text_length) {
  try {
    Expressions x(INT_MAX, 1, Limits{0, 0, 0, Clock::now() + std::chrono::milliseconds(100), 100});
    int now = Pattern(x, std::string(pattern, length)).read(true);
    for (int i = 0; i < text_length && now; ++i) now = x.derive(now, uint8_t(text[i]), false);
    return x[now].nullable;
  } catch (const std::exception&) {
    return -1;
  }
}

// A vocabulary as a new array of words, or null if there is no memory for it. `ends`: where each token's bytes end.
int* grammar_vocabulary(const char* bytes, const int* ends, const uint8_t* special, int tokens) {
  try {
    return copied(vocabulary(bytes, ends, special, tokens));
  } catch (const std::exception&) {
    return nullptr;
  }
}

void grammar_begin(const int* a, int* position) {
  Walk w;
  begin(w, a[HEADER_START], 0, 0, nullptr, nullptr);
  settle(a, w);
  store(w, position);
}

int grammar_take(const int* a, const int* v, int* position, int token) { return advance(a, v, position, token); }

int grammar_take_byte(const int* a, int* position, int byte) {
  Entries own;
  Walk w;
  begin_at(w, position, own.words);
  if (!take_byte(a, w, byte)) return 0;
  store(w, position);
  return 1;
}

int grammar_ends(const int* a, const int* position) {
  Walk w;
  begin_at(w, position, nullptr);
  return ends(a, w);
}

// Words of memory for kept masks, and that memory before its first mask.
int grammar_kept_words(int n_words, int most) { return kept_words(n_words, most); }
void grammar_begin_kept(int* kept, int n_words, int most) { begin_kept(kept, n_words, most); }

// The mask of a position, from those that are kept, or by a walk.
void grammar_mask(const int* a, const int* v, int* kept, const int* position, unsigned* bits) {
  int n_words = kept[KEPT_BITS], visited = 0;
  if (const unsigned* found = find_kept(a, v, kept, position)) {
    std::memcpy(bits, found, size_t(n_words) * sizeof(unsigned));
    return;
  }
  int lowest = find_mask(a, v, position, bits, n_words, &visited);
  if (visited >= LONG_WALK) keep(a, v, kept, position, lowest, bits);
}

}  // extern "C"
