// Reads regular expressions as the crate regex-syntax does, as far as texts can be told by bytes alone.
#pragma once

#include <memory>

#include "expressions.h"

namespace grammar {

struct Span {
  int low, high;
};
using Spans = std::vector<Span>;  // of code points

inline Spans normal(Spans spans) {
  std::sort(spans.begin(), spans.end(), [](Span a, Span b) { return a.low < b.low; });
  Spans made;
  for (Span s : spans) {
    if (!made.empty() && s.low <= made.back().high + 1) made.back().high = std::max(made.back().high, s.high);
    else made.push_back(s);
  }
  return made;
}
inline Spans inverse(const Spans& given) {
  Spans made;
  int next = 0;
  for (Span s : normal(given)) {
    if (s.low > next) made.push_back({next, s.low - 1});
    next = s.high + 1;
  }
  if (next <= 0x10ffff) made.push_back({next, 0x10ffff});
  return made;
}
inline Spans common(const Spans& a, const Spans& b) {
  Spans left = inverse(a);
  Spans right = inverse(b);
  left.insert(left.end(), right.begin(), right.end());
  return inverse(left);
}

inline int spans_of_length(Expressions& x, int low, int high, int n) {
  // The encodings of low..high, all of n bytes: the first byte, then the rest, split where the rest is not full.
  static const int lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
  if (n == 1) return x.set(range_of(low, high));
  struct Inner {
    static int tail(Expressions& x, int low, int high, int n) {  // of n continuation bytes
      if (n == 0) return x.empty();
      int unit = 1 << (6 * (n - 1)), first = low / unit, last = high / unit;
      std::vector<int> made;
      int from = first, to = last;
      if (low % unit != 0 && first != last) {
        made.push_back(x.cat(x.byte(0x80 + first), tail(x, low % unit, unit - 1, n - 1)));
        ++from;
      }
      if (high % unit != unit - 1 && first != last) {
        made.push_back(x.cat(x.byte(0x80 + last), tail(x, 0, high % unit, n - 1)));
        --to;
      }
      if (first == last) made.push_back(x.cat(x.byte(0x80 + first), tail(x, low % unit, high % unit, n - 1)));
      else if (from <= to) made.push_back(x.cat(x.set(range_of(0x80 + from, 0x80 + to)), tail(x, 0, unit - 1, n - 1)));
      return x.either(std::move(made));
    }
  };
  int unit = 1 << (6 * (n - 1)), first = low / unit, last = high / unit;
  std::vector<int> made;
  int from = first, to = last;
  if (first == last) return x.cat(x.byte(lead[n] + first), Inner::tail(x, low % unit, high % unit, n - 1));
  if (low % unit != 0) {
    made.push_back(x.cat(x.byte(lead[n] + first), Inner::tail(x, low % unit, unit - 1, n - 1)));
    ++from;
  }
  if (high % unit != unit - 1) {
    made.push_back(x.cat(x.byte(lead[n] + last), Inner::tail(x, 0, high % unit, n - 1)));
    --to;
  }
  if (from <= to) made.push_back(x.cat(x.set(range_of(lead[n] + from, lead[n] + to)), Inner::tail(x, 0, unit - 1, n - 1)));
  return x.either(std::move(made));
}

// One character of these, in UTF-8.
inline int character(Expressions& x, const Spans& spans) {
  static const Span lengths[] = {{0, 0x7f}, {0x80, 0x7ff}, {0x800, 0xd7ff}, {0xe000, 0xffff}, {0x10000, 0x10ffff}};
  static const int bytes[] = {1, 2, 3, 3, 4};
  std::vector<int> made;
  for (Span s : normal(spans)) {
    for (int i = 0; i < 5; ++i) {
      int low = std::max(s.low, lengths[i].low), high = std::min(s.high, lengths[i].high);
      if (low <= high) made.push_back(spans_of_length(x, low, high, bytes[i]));
    }
  }
  return x.either(std::move(made));
}

inline Spans any_character() { return {{0, 0x10ffff}}; }

class Pattern {
 public:
  Pattern(Expressions& x, const std::string& text) : x_(x) {
    for (size_t i = 0; i < text.size();) {
      uint8_t c = uint8_t(text[i]);
      int n = c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
      int code = n == 1 ? c : c & (0xff >> (n + 1));
      for (int j = 1; j < n && i + j < text.size(); ++j) code = code << 6 | (text[i + j] & 63);
      text_.push_back(code);
      i += n;
    }
  }

  // The whole text must match; with `search`, a part of it.
  int read(bool search) {
    Tree tree = alternation(0);
    if (at_ < text_.size()) throw Malformed("a pattern has a parenthesis too many");
    bool start = false, end = false;
    int made = build(tree, true, true, search, start, end);
    if (search) {
      int any = x_.repeat(character(x_, any_character()), 0, UNBOUNDED);
      if (!end) made = x_.cat(made, any);
      if (!start) made = x_.cat(any, made);
    }
    return made;
  }

 private:
  enum Kind { EMPTY_TREE, CHARACTERS, START, END, CONCAT, ALTERNATION, REPETITION, CAPTURE };
  struct Tree {
    Kind kind = EMPTY_TREE;
    Spans spans;
    std::vector<Tree> kids;
    int low = 0, high = 0;
  };

  Expressions& x_;
  std::vector<int> text_;
  size_t at_ = 0;
  bool dot_all_ = false;
  bool any_case_ = false;

  int peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : -1; }
  int next() {
    if (at_ >= text_.size()) throw Malformed("a pattern ends too early");
    return text_[at_++];
  }
  bool eat(int c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  Tree alternation(int deep) {
    if (deep > 100) throw Refused("a pattern is nested too deep");
    bool outer = dot_all_, outer_case = any_case_;
    std::vector<Tree> kids{concatenation(deep)};
    while (eat('|')) kids.push_back(concatenation(deep));
    dot_all_ = outer;
    any_case_ = outer_case;
    if (kids.size() == 1) return std::move(kids[0]);
    Tree made;
    made.kind = ALTERNATION;
    made.kids = std::move(kids);
    return made;
  }
  Tree concatenation(int deep) {
    std::vector<Tree> kids;
    while (at_ < text_.size() && peek() != '|' && peek() != ')') {
      Tree one = atom(deep);
      while (quantified(one)) {
      }
      if (one.kind == CONCAT) {
        for (Tree& kid : one.kids) kids.push_back(std::move(kid));
      } else if (one.kind != EMPTY_TREE) {
        kids.push_back(std::move(one));
      }
    }
    if (kids.empty()) return Tree();
    if (kids.size() == 1) return std::move(kids[0]);
    Tree made;
    made.kind = CONCAT;
    made.kids = std::move(kids);
    return made;
  }
  bool quantified(Tree& one) {
    int low, high, c = peek();
    if (c == '*') low = 0, high = UNBOUNDED;
    else if (c == '+') low = 1, high = UNBOUNDED;
    else if (c == '?') low = 0, high = 1;
    else if (c == '{') {
      ++at_;
      low = number();
      high = low;
      if (eat(',')) high = peek() == '}' ? UNBOUNDED : number();
      if (!eat('}')) throw Malformed("a pattern has an open brace");
      --at_;
      if (high != UNBOUNDED && high < low) throw Malformed("a pattern has a repeat whose bounds are reversed");
    } else {
      return false;
    }
    ++at_;
    eat('?');
    Tree made;
    made.kind = REPETITION;
    made.low = low;
    made.high = high;
    made.kids.push_back(std::move(one));
    one = std::move(made);
    return true;
  }
  int number() {
    int64_t value = 0;
    if (!(peek() >= '0' && peek() <= '9')) throw Malformed("a pattern has a brace without a number");
    while (peek() >= '0' && peek() <= '9') {
      value = value * 10 + (next() - '0');
      if (value > 1000000) throw Refused("a pattern has a repeat that is too large");
    }
    return int(value);
  }
  static Tree characters(Spans spans) {
    Tree made;
    made.kind = CHARACTERS;
    made.spans = std::move(spans);
    return made;
  }
  static Tree of_kind(Kind kind) {
    Tree made;
    made.kind = kind;
    return made;
  }
  Tree atom(int deep) {
    int c = next();
    switch (c) {
      case '(': return group(deep);
      case '[': return characters(set_in_brackets(deep));
      case '.': return characters(dot_all_ ? any_character() : Spans{{0, 9}, {11, 0x10ffff}});
      case '^': return of_kind(START);
      case '$': return of_kind(END);
      case '\\': {
        if (peek() == 'A' || peek() == 'z') return of_kind(next() == 'A' ? START : END);
        return characters(in_any_case(escape()));
      }
      case '*':
      case '+':
      case '?':
      case '{': throw Malformed("a pattern repeats nothing");
      default: return characters(in_any_case({{c, c}}));
    }
  }
  Tree group(int deep) {
    bool capture = true;
    bool outer = dot_all_, outer_case = any_case_;
    if (eat('?')) {
      if (peek() == '<' || (peek() == 'P' && peek(1) == '<')) {
        if (next() == 'P') next();
        if (peek() == '=' || peek() == '!') throw Malformed("a pattern looks ahead or behind, which cannot be followed");
        std::string name;
        while (peek() != '>') name += char(next());
        next();
        if (name == "stop") throw Refused("a pattern has a group named stop");
      } else {
        capture = false;
        bool on = true;
        while (peek() != ':' && peek() != ')') {
          int flag = next();
          if (flag == '-') on = false;
          else if (flag == 's') dot_all_ = on;
          else if (flag == 'i') any_case_ = on;
          else if (flag == '=' || flag == '!') throw Malformed("a pattern looks ahead or behind, which cannot be followed");
          else if (flag == 'm' || flag == 'x' || flag == 'U' || flag == 'R') throw Refused("a pattern has a flag that is not supported");
          else if (flag != 'u') throw Malformed("a pattern has a flag that is not known");
        }
        if (next() == ')') return Tree();  // holds to the end of the group around it
      }
    }
    Tree inner = alternation(deep + 1);
    dot_all_ = outer;
    any_case_ = outer_case;
    if (!eat(')')) throw Malformed("a pattern has an open parenthesis");
    if (!capture) return inner;
    Tree made;
    made.kind = CAPTURE;
    made.kids.push_back(std::move(inner));
    return made;
  }
  // Letters of ASCII in both cases, with the two signs beyond it that Unicode takes for k and s.
  Spans in_any_case(Spans spans) const {
    if (!any_case_) return spans;
    Spans made = spans;
    for (Span s : spans) {
      if (s.high > 127) throw Refused("a pattern that ignores case has a character beyond ASCII");
      for (int c = s.low; c <= s.high; ++c) {
        bool lower = c >= 'a' && c <= 'z', upper = c >= 'A' && c <= 'Z';
        if (lower || upper) made.push_back({c ^ 32, c ^ 32});
        if (c == 'k' || c == 'K') made.push_back({0x212a, 0x212a});
        if (c == 's' || c == 'S') made.push_back({0x17f, 0x17f});
      }
    }
    return normal(made);
  }
  static Spans blanks() {
    return {{9, 13}, {' ', ' '}, {0x85, 0x85}, {0xa0, 0xa0}, {0x1680, 0x1680}, {0x2000, 0x200a},
            {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}};
  }
  int hex(int digits) {
    int value = 0;
    for (int i = 0; i < digits; ++i) {
      int c = next();
      int d = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
      if (d < 0) throw Malformed("a pattern has an escape that is not hexadecimal");
      value = value * 16 + d;
    }
    return value;
  }
  Spans escape() {
    int c = next();
    switch (c) {
      case 's': return blanks();
      case 'S': return inverse(blanks());
      case 'n': return {{'\n', '\n'}};
      case 'r': return {{'\r', '\r'}};
      case 't': return {{'\t', '\t'}};
      case 'f': return {{'\f', '\f'}};
      case 'v': return {{'\v', '\v'}};
      case 'a': return {{'\a', '\a'}};
      case 'x':
      case 'u':
      case 'U': {
        int value = 0;
        if (eat('{')) {
          while (!eat('}')) {
            value = value * 16 + hex(1);
            if (value > 0x10ffff) throw Malformed("a pattern has an escape beyond Unicode");
          }
        } else {
          value = hex(c == 'x' ? 2 : c == 'u' ? 4 : 8);
        }
        if (value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) throw Malformed("a pattern has an escape beyond Unicode");
        return {{value, value}};
      }
      default: break;
    }
    if (c == 'w' || c == 'W' || c == 'd' || c == 'D' || c == 'p' || c == 'P') throw Refused("a pattern has a class of Unicode, which is not supported");
    if (c >= '0' && c <= '9') throw Malformed("a pattern refers back to a group, which cannot be followed");
    if (c == 'b' || c == 'B' || c == '<' || c == '>') throw Malformed("a pattern has a word boundary, which cannot be followed");
    bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c > 127;
    if (letter) throw Malformed("a pattern has an escape that is not known");
    return {{c, c}};
  }
  Spans set_in_brackets(int deep) {
    if (deep > 100) throw Refused("a pattern is nested too deep");
    bool inverted = eat('^');
    Spans whole;  // left of an operator
    int op = 0;
    Spans now;
    bool first = true;
    for (;; first = false) {
      if (at_ >= text_.size()) throw Malformed("a pattern has an open bracket");
      int c = next();
      if (c == ']' && !first) break;
      if ((c == '&' || c == '-' || c == '~') && peek() == c && !(c == '-' && first)) {
        ++at_;
        whole = combined(whole, op, now);
        op = c;
        now.clear();
        continue;
      }
      Spans item;
      if (c == '[') {
        if (peek() == ':') throw Refused("a pattern has a named class");
        item = set_in_brackets(deep + 1);
        now.insert(now.end(), item.begin(), item.end());
        continue;
      }
      item = c == '\\' ? escape() : Spans{{c, c}};
      bool single = item.size() == 1 && item[0].low == item[0].high;
      if (single && peek() == '-' && peek(1) != ']' && peek(1) != '-') {
        ++at_;
        int last = next();
        if (last == '[') throw Refused("a pattern has a range that ends in a class");
        Spans to = last == '\\' ? escape() : Spans{{last, last}};
        if (to.size() != 1 || to[0].low != to[0].high || to[0].low < item[0].low) throw Malformed("a pattern has a range that is reversed");
        item[0].high = to[0].low;
      }
      now.insert(now.end(), item.begin(), item.end());
    }
    whole = combined(whole, op, now);
    whole = in_any_case(normal(whole));
    return inverted ? inverse(whole) : normal(whole);
  }
  static Spans combined(const Spans& left, int op, const Spans& right) {
    if (op == 0) return right;
    if (op == '&') return common(left, right);
    if (op == '-') return common(left, inverse(right));
    Spans both = left;
    both.insert(both.end(), right.begin(), right.end());
    return common(both, inverse(common(left, right)));
  }

  // As derivre has it: ^ and $ stand at the start and the end of a branch, and a branch without one may begin anywhere.
  int build(const Tree& t, bool at_start, bool at_end, bool search, bool& start, bool& end) {
    start = end = false;
    switch (t.kind) {
      case EMPTY_TREE: return x_.empty();
      case CHARACTERS: return character(x_, t.spans);
      case START:
        if (!at_start) throw Refused("a pattern has ^ in the middle");
        start = true;
        return x_.empty();
      case END:
        if (!at_end) throw Refused("a pattern has $ in the middle");
        end = true;
        return x_.empty();
      case CAPTURE: return build(t.kids[0], at_start, at_end, search, start, end);
      case REPETITION: {
        bool s, e;
        return x_.repeat(build(t.kids[0], false, false, search, s, e), t.low, t.high);
      }
      case CONCAT: {
        std::vector<int> made;
        size_t last = t.kids.size() - 1;
        for (size_t i = 0; i <= last; ++i) {
          bool s, e;
          made.push_back(build(t.kids[i], at_start && i == 0, at_end && i == last, search, s, e));
          if (i == 0) start = s;
          if (i == last) end = e;
        }
        int all = x_.empty();
        // Runs of single characters become literals, which are cheap to follow.
        for (size_t i = made.size(); i-- > 0;) {
          std::string run;
          size_t from = i + 1;
          while (from > 0 && single(made[from - 1])) --from;
          if (i + 1 - from >= 2) {
            for (size_t j = from; j <= i; ++j) run += char(the_byte(made[j]));
            all = x_.cat(x_.literal(run), all);
            i = from;
          } else {
            all = x_.cat(made[i], all);
          }
        }
        return all;
      }
      case ALTERNATION: {
        std::vector<int> made;
        std::vector<std::pair<bool, bool>> anchored;
        bool all_start = true, all_end = true;
        for (const Tree& kid : t.kids) {
          bool s, e;
          made.push_back(build(kid, at_start, at_end, search, s, e));
          anchored.emplace_back(s, e);
          start |= s;
          end |= e;
          all_start &= s;
          all_end &= e;
        }
        if (search && (start || end) && (!all_start || !all_end)) {
          int any = x_.repeat(character(x_, any_character()), 0, UNBOUNDED);
          for (size_t i = 0; i < made.size(); ++i) {
            if (end && !anchored[i].second) made[i] = x_.cat(made[i], any);
            if (start && !anchored[i].first) made[i] = x_.cat(any, made[i]);
          }
        }
        return x_.either(std::move(made));
      }
    }
    return 0;
  }
  bool single(int id) const {
    if (x_[id].op != SET) return false;
    const Bytes& set = x_.set_of(id);
    int n = 0;
    for (uint64_t word : set) n += __builtin_popcountll(word);
    return n == 1;
  }
  int the_byte(int id) const {
    for (int b = 0; b < 256; ++b)
      if (has(x_.set_of(id), b)) return b;
    return 0;
  }
};

}  // namespace grammar
