// Walks a compiled grammar: one byte or one special token at a time, from a state with a counter and a stack.
//
// This header is C++ and CUDA C without any library, so that the host, the native loop and a kernel run one definition.
// The automaton is an array of 32-bit words that holds indices and no addresses: it may be copied anywhere. Its layout
// is told below and in docs/structured.md; `automaton.cpp` writes it.
#ifndef OSTINATO_GRAMMAR_WALK_H
#define OSTINATO_GRAMMAR_WALK_H

#ifdef __CUDACC__
#define GRAMMAR_FUNCTION __device__ __forceinline__
#else
#define GRAMMAR_FUNCTION inline
#endif

namespace grammar {

constexpr int MAGIC = 0x4f53474d;
constexpr int MAX_DEPTH = 64;  // open calls: levels of nested objects and arrays

// The first words of an automaton.
enum HeaderWord {
  HEADER_MAGIC,
  HEADER_WORDS,   // of the whole array
  HEADER_STATES,  // how many states there are
  HEADER_START,
  HEADER_STATES_AT,  // where the states begin, in words; then the edges, then the token edges
  HEADER_EDGES_AT,
  HEADER_TOKEN_EDGES_AT,
  HEADER_DEPTH,  // calls that can be open at once, or -1 without a bound
  HEADER_FREE,   // while at most so many calls are open, no edge is refused because of them
  HEADER_SIZE
};

// A state. Its edges are sorted by byte and do not overlap.
enum StateWord {
  STATE_EDGES,        // its first edge, as an index
  STATE_N_EDGES,
  STATE_TOKEN_EDGES,  // its first token edge, as an index
  STATE_N_TOKEN_EDGES,
  STATE_ACCEPTS,  // 1: a text may end here, or the call may return; 2: and nothing can follow within this call
  STATE_LIMIT,    // when the counter comes to it, the state is `STATE_REACHED` and the counter 0; 0: no counter
  STATE_REACHED,
  STATE_SIZE
};

// An edge on the bytes `low` to `high`. One with EDGE_CALL opens a call: its target is the callee's state after the
// byte, and EDGE_RETURN is where the caller continues, with what it does to the caller's counter in the two low bits.
// An edge may be taken while at most `deepest` calls are open: from there on the text can be completed within the stack.
enum EdgeWord { EDGE_BYTES, EDGE_TARGET, EDGE_RETURN, EDGE_SIZE };
enum EdgeBits { COUNT_ADD = 1, COUNT_ONE = 2, EDGE_CALL = 4 };  // above low and high in EDGE_BYTES, from bit 16
constexpr int EDGE_DEEPEST = 19;                                // the bit of EDGE_BYTES where `deepest` begins

// An edge on a special token.
enum TokenEdgeWord { TOKEN_ID, TOKEN_TARGET, TOKEN_DEEPEST, TOKEN_EDGE_SIZE };

// A position: state, counter, and the open calls (two words each: return word, and the caller's counter). Entries of
// the stack below `low` are those of `base`, which is only read; others are in `own`, which a walk that takes bytes
// writes, and which may be null for one that does not.
struct Walk {
  int state;
  int counter;
  int depth;
  int low;
  const int* base;
  int* own;
  int pushed, old_return, old_counter;  // what the last byte overwrote in `own`, so that it can be undone; or -1
};

// What `own` points to, unless a walk writes to a position itself.
struct Entries {
  int words[2 * MAX_DEPTH];
};

GRAMMAR_FUNCTION const int* state_at(const int* a, int state) {
  return a + a[HEADER_STATES_AT] + state * STATE_SIZE;
}

GRAMMAR_FUNCTION void begin(Walk& w, int state, int counter, int depth, const int* stack, int* own) {
  w.state = state;
  w.counter = counter;
  w.depth = w.low = depth;
  w.base = stack;
  w.own = own;
}

GRAMMAR_FUNCTION int stack_word(const Walk& w, int word) { return word >= 2 * w.low ? w.own[word] : w.base[word]; }

// Enter a state, and count as the bits of the edge say.
GRAMMAR_FUNCTION void enter(const int* a, Walk& w, int target, int bits) {
  const int* s = state_at(a, target);
  int limit = s[STATE_LIMIT];
  int counter = bits & COUNT_ONE ? 1 : w.counter + (bits & COUNT_ADD);
  if (limit != 0 && counter >= limit) {
    target = s[STATE_REACHED];
    counter = 0;
  }
  w.state = target;
  w.counter = limit != 0 ? counter : 0;
}

// Close the innermost call.
GRAMMAR_FUNCTION void leave(const int* a, Walk& w) {
  int at = 2 * --w.depth;
  int back = stack_word(w, at);
  w.counter = stack_word(w, at + 1);
  if (w.depth < w.low) w.low = w.depth;
  enter(a, w, back >> 2, back & 3);
}

// Close the calls whose state allows nothing else, so that one text has one position.
GRAMMAR_FUNCTION void settle(const int* a, Walk& w) {
  while (w.depth > 0 && state_at(a, w.state)[STATE_ACCEPTS] == 2) leave(a, w);
}

// One byte; false if it is not allowed, and then the walk is of no further use.
GRAMMAR_FUNCTION bool take_byte(const int* a, Walk& w, int byte) {
  w.pushed = -1;
  for (;;) {
    const int* s = state_at(a, w.state);
    const int* edges = a + a[HEADER_EDGES_AT] + s[STATE_EDGES] * EDGE_SIZE;
    int first = 0, last = s[STATE_N_EDGES];
    while (first < last) {  // the first edge whose high byte is not below this one
      int middle = (first + last) >> 1;
      if (((edges[middle * EDGE_SIZE] >> 8) & 255) < byte) first = middle + 1;
      else last = middle;
    }
    const int* edge = edges + first * EDGE_SIZE;
    if (first < s[STATE_N_EDGES] && (edge[EDGE_BYTES] & 255) <= byte) {
      if (w.depth > edge[EDGE_BYTES] >> EDGE_DEEPEST) return false;
      int bits = edge[EDGE_BYTES] >> 16;
      if (bits & EDGE_CALL) {
        w.pushed = w.depth;
        w.old_return = w.own[2 * w.depth];
        w.old_counter = w.own[2 * w.depth + 1];
        w.own[2 * w.depth] = edge[EDGE_RETURN];
        w.own[2 * w.depth + 1] = w.counter;
        ++w.depth;
        w.counter = 0;
      }
      enter(a, w, edge[EDGE_TARGET], bits);
      settle(a, w);
      return true;
    }
    if (w.depth == 0 || s[STATE_ACCEPTS] == 0) return false;
    leave(a, w);
  }
}

// One special token; false if it is not allowed.
GRAMMAR_FUNCTION bool take_special(const int* a, Walk& w, int token) {
  for (;;) {
    const int* s = state_at(a, w.state);
    const int* edges = a + a[HEADER_TOKEN_EDGES_AT] + s[STATE_TOKEN_EDGES] * TOKEN_EDGE_SIZE;
    for (int i = 0; i < s[STATE_N_TOKEN_EDGES]; ++i) {
      if (edges[i * TOKEN_EDGE_SIZE + TOKEN_ID] != token) continue;
      if (w.depth > edges[i * TOKEN_EDGE_SIZE + TOKEN_DEEPEST]) return false;
      enter(a, w, edges[i * TOKEN_EDGE_SIZE + TOKEN_TARGET], 0);
      settle(a, w);
      return true;
    }
    if (w.depth == 0 || s[STATE_ACCEPTS] == 0) return false;
    leave(a, w);
  }
}

// Whether the text may end here. Moves the walk: it returns from all open calls.
GRAMMAR_FUNCTION bool ends(const int* a, Walk& w) {
  while (state_at(a, w.state)[STATE_ACCEPTS] != 0) {
    if (w.depth == 0) return true;
    leave(a, w);
  }
  return false;
}

// --- vocabularies ---

// The first words of a vocabulary: the bytes of all tokens, and the same as a trie.
enum VocabularyWord {
  VOCABULARY_MAGIC,
  VOCABULARY_WORDS,
  VOCABULARY_TOKENS,
  VOCABULARY_NODES,
  VOCABULARY_LONGEST,   // bytes of the longest token in the trie
  VOCABULARY_NODES_AT,  // where they begin, in words; a node is followed by its subtree
  VOCABULARY_SAME_AT,   // by token: the next one with the same bytes, or -1
  VOCABULARY_ENDS_AT,   // by token: where its bytes end, times two, plus one for a special token
  VOCABULARY_BYTES_AT,
  VOCABULARY_SIZE
};

// A node of the trie: its byte with its place in the token above it, the first node behind its subtree, its token or -1.
enum NodeWord { NODE_BYTE, NODE_AFTER, NODE_TOKEN, NODE_SIZE };

constexpr int MAX_TOKEN_BYTES = 255;

// A position in memory: state, counter, depth, and two words for each open call.
enum PositionWord { POSITION_STATE, POSITION_COUNTER, POSITION_DEPTH, POSITION_STACK };
constexpr int POSITION_WORDS = POSITION_STACK + 2 * MAX_DEPTH;

GRAMMAR_FUNCTION void begin_at(Walk& w, const int* position, int* own) {
  const int* stack = position + POSITION_STACK;
  begin(w, position[POSITION_STATE], position[POSITION_COUNTER], position[POSITION_DEPTH], stack, own);
}

GRAMMAR_FUNCTION void store(const Walk& w, int* position) {
  position[POSITION_STATE] = w.state;
  position[POSITION_COUNTER] = w.counter;
  position[POSITION_DEPTH] = w.depth;
  for (int word = 2 * w.low; word < 2 * w.depth; ++word) position[POSITION_STACK + word] = w.own[word];
}

// All bytes of a token, or the special token; false if it is not allowed, or has no bytes.
GRAMMAR_FUNCTION bool take_token(const int* a, const int* v, Walk& w, int token) {
  const int* ends_of = v + v[VOCABULARY_ENDS_AT];
  if (ends_of[token] & 1) return take_special(a, w, token);
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(v + v[VOCABULARY_BYTES_AT]);
  int at = token > 0 ? ends_of[token - 1] >> 1 : 0, end = ends_of[token] >> 1;
  if (at == end) return false;
  for (; at < end; ++at)
    if (!take_byte(a, w, bytes[at])) return false;
  return true;
}

// Advance a position by a token; false, and the position as it was, if it is not allowed.
GRAMMAR_FUNCTION bool advance(const int* a, const int* v, int* position, int token) {
  Entries own;
  Walk w;
  begin_at(w, position, own.words);
  if (!take_token(a, v, w, token)) return false;
  store(w, position);
  return true;
}

// The same without entries of its own; false, and the position of no further use, if the token is not allowed.
GRAMMAR_FUNCTION bool advance_in_place(const int* a, const int* v, int* position, int token) {
  Walk w;
  begin_at(w, position, position + POSITION_STACK);
  w.low = 0;
  if (!take_token(a, v, w, token)) return false;
  position[POSITION_STATE] = w.state;
  position[POSITION_COUNTER] = w.counter;
  position[POSITION_DEPTH] = w.depth;
  return true;
}

// Where a walk stood before a byte, so that another byte can be tried from there.
struct Before {
  int state, counter, depth, low, pushed, old_return, old_counter;
};

GRAMMAR_FUNCTION void undo(Walk& w, const Before& b) {
  if (b.pushed >= 0) {
    w.own[2 * b.pushed] = b.old_return;
    w.own[2 * b.pushed + 1] = b.old_counter;
  }
  w.state = b.state;
  w.counter = b.counter;
  w.depth = b.depth;
  w.low = b.low;
}

GRAMMAR_FUNCTION void set_bit(unsigned* bits, int n_words, int token) {
  if (token >= 0 && token < 32 * n_words) bits[token >> 5] |= 1u << (token & 31);
}

// Set the bits of all tokens that may come next, except end tokens, by one walk of the trie. The result says to which
// depth the stack was looked at: a position that agrees above it has the same mask. `visited`: nodes of the trie.
GRAMMAR_FUNCTION int find_mask(const int* a, const int* v, const int* position, unsigned* bits, int n_words,
                               int* visited) {
  for (int word = 0; word < n_words; ++word) bits[word] = 0;
  const int* nodes = v + v[VOCABULARY_NODES_AT];
  const int* same = v + v[VOCABULARY_SAME_AT];
  Entries own;
  Walk w;
  begin_at(w, position, own.words);
  Before before[MAX_TOKEN_BYTES + 1];
  int level = 0, lowest = w.depth, n = v[VOCABULARY_NODES];
  *visited = 0;
  for (int at = 0; at < n; ++*visited) {
    const int* node = nodes + at * NODE_SIZE;
    while (level > node[NODE_BYTE] >> 8) undo(w, before[--level]);
    Before& b = before[level];
    b = {w.state, w.counter, w.depth, w.low, -1, 0, 0};
    bool allowed = take_byte(a, w, node[NODE_BYTE] & 255);
    b.pushed = w.pushed;
    b.old_return = w.old_return;
    b.old_counter = w.old_counter;
    if (w.low < lowest) lowest = w.low;
    if (!allowed) {
      undo(w, b);
      at = node[NODE_AFTER];
      continue;
    }
    ++level;
    for (int token = node[NODE_TOKEN]; token >= 0; token = same[token]) set_bit(bits, n_words, token);
    ++at;
  }
  begin_at(w, position, own.words);  // special tokens, here and behind every call that may return here
  for (;;) {
    const int* s = state_at(a, w.state);
    const int* edges = a + a[HEADER_TOKEN_EDGES_AT] + s[STATE_TOKEN_EDGES] * TOKEN_EDGE_SIZE;
    for (int i = 0; i < s[STATE_N_TOKEN_EDGES]; ++i, edges += TOKEN_EDGE_SIZE)
      if (w.depth <= edges[TOKEN_DEEPEST]) set_bit(bits, n_words, edges[TOKEN_ID]);
    if (w.depth == 0 || s[STATE_ACCEPTS] == 0) return lowest;
    leave(a, w);
    if (w.low < lowest) lowest = w.low;
  }
}

}  // namespace grammar

#endif
