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
enum EdgeWord { EDGE_BYTES, EDGE_TARGET, EDGE_RETURN, EDGE_SIZE };
enum EdgeBits { COUNT_ADD = 1, COUNT_ONE = 2, EDGE_CALL = 4 };  // above low and high in EDGE_BYTES, from bit 16

// An edge on a special token.
enum TokenEdgeWord { TOKEN_ID, TOKEN_TARGET, TOKEN_EDGE_SIZE };

// A position: state, counter, and the open calls (two words each: return word, and the caller's counter). Entries of
// the stack below `low` are those of `base`, which is only read; a walk writes its own.
struct Walk {
  int state;
  int counter;
  int depth;
  int low;
  const int* base;
  int pushed, old_return, old_counter;  // what the last byte overwrote in `own`, so that it can be undone; or -1
  int own[2 * MAX_DEPTH];
};

GRAMMAR_FUNCTION const int* state_at(const int* a, int state) {
  return a + a[HEADER_STATES_AT] + state * STATE_SIZE;
}

GRAMMAR_FUNCTION void begin(Walk& w, int state, int counter, int depth, const int* stack) {
  w.state = state;
  w.counter = counter;
  w.depth = w.low = depth;
  w.base = stack;
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
      int bits = edge[EDGE_BYTES] >> 16;
      if (bits & EDGE_CALL) {
        if (w.depth == MAX_DEPTH) return false;
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

}  // namespace grammar

#endif
