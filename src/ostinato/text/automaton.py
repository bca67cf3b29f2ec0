"""Automata: a grammar compiled once, and the tokens that may come next at any position in it.

The compiler and the walk are C++ (`src/automaton.cpp`, `walk/grammar_walk.h`); here they are opened and given Python's
names. `BadOption` says what the compiler cannot take. The layout of an automaton is told in docs/automata.md.
"""

from __future__ import annotations

import ctypes
import json
from array import array
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np

from ostinato import build
from ostinato.errors import BadInput, BadOption, quoted
from ostinato.extras import missing
from ostinato.files.objects import prebuilt, sources, sum_of
from ostinato.options import MadeGrammar, Rule, Sampling
from ostinato.text.grammar import COMPACT, NO_TOKEN, EndRule, as_lark, several_grammars
from ostinato.text.lark import lark_node
from ostinato.text.program import TOOK_TOO_LONG, Program, TookTooLong, Unfollowable
from ostinato.text.schema import followable
from ostinato.text.schema_program import ascii_classes, schema_node
from ostinato.text.walk import FOLDER as WALK
from ostinato.text.walk import MAX_DEPTH, MOST_KEPT, POSITION_WORDS

SOURCES: Final = Path(__file__).parent / "src"
SOURCE: Final = "automaton.cpp"
BUILT: Final = Path(__file__).parent / "built"  # a wheel's object
MAX_STATES: Final = 32_768
MAX_WORDS: Final = 1 << 20  # four megabytes
MAX_MS: Final = 500

AUTOMATON_WORDS: Final = 1  # the word of an automaton that says how long it is
_HEADER_STATES, _HEADER_TOKEN_EDGES_AT, _HEADER_DEPTH = 2, 6, 7
_TOKEN_EDGE_WORDS = 3
_VOCABULARY_WORDS, _VOCABULARY_LONGEST = 1, 4
_KEPT_N = 1
_MALFORMED: Final = 2  # what `grammar_compile` returns for input that no other compiler can take either
_A_PATTERN: Final = "a pattern"  # as its reasons begin that are about one


@cache
def library() -> ctypes.CDLL:
    """The compiler and the walk, from the wheel or compiled once; HardwareCannot where neither can be had."""
    texts = sources(SOURCES, WALK)
    found, _ = prebuilt(BUILT / "automaton.so", sum_of(texts, ()))
    try:
        opened = None if found is None else ctypes.CDLL(str(found))
    except OSError:  # made for a newer system than this
        opened = None
    if opened is None:
        main = texts.pop(SOURCE)
        opened = ctypes.CDLL(str(build.shared_object(main, SOURCE, headers=texts)))
    opened.grammar_vocabulary.restype = ctypes.POINTER(ctypes.c_int)
    return opened


class Automaton:
    """A compiled grammar: its words, which may be copied anywhere."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = words

    @property
    def n_states(self) -> int:
        return int(self.words[_HEADER_STATES])

    @property
    def depth(self) -> int | None:
        """How many calls can be open at once; None without a bound."""
        found = int(self.words[_HEADER_DEPTH])
        return None if found < 0 else found

    @property
    def token_ids(self) -> list[int]:
        """The special tokens that it names."""
        return sorted({int(id) for id in self.words[self.words[_HEADER_TOKEN_EDGES_AT] :: _TOKEN_EDGE_WORDS]})


def compiled(
    program: Program,
    *,
    max_states: int = MAX_STATES,
    max_words: int = MAX_WORDS,
    max_ms: int = MAX_MS,
    max_depth: int = MAX_DEPTH,
) -> Automaton:
    """The automaton of a program; BadOption if it cannot be had within the limits."""
    made, error = ctypes.POINTER(ctypes.c_int)(), ctypes.create_string_buffer(256)
    failed = library().grammar_compile(
        _pointer(program.words),
        len(program.words),
        bytes(program.texts),
        max_states,
        max_words,
        max_ms,
        max_depth,
        ctypes.byref(made),
        error,
        len(error),
    )
    if failed:
        why = _in_the_callers_words(program, error.value.decode("utf-8", "replace"))
        kind = TookTooLong if why.startswith(TOOK_TOO_LONG) else Unfollowable if failed == _MALFORMED else BadOption
        raise kind(why)
    return Automaton(_taken(made, AUTOMATON_WORDS))


def _in_the_callers_words(program: Program, why: str) -> str:
    """A reason that is about a pattern, with that pattern as the caller wrote it."""
    if why.startswith(_A_PATTERN):
        for pattern, written in program.patterns.items():
            text = pattern.encode("utf-8", "surrogatepass")
            if library().grammar_matches(text, len(text), b"", 0) < 0:
                return f"the pattern {quoted(written)}{why.removeprefix(_A_PATTERN)}"
    return why


def _taken(made: Any, words_at: int) -> np.ndarray:
    """An array of the library's as one of numpy's; its word `words_at` is its length."""
    try:
        found: np.ndarray = np.ctypeslib.as_array(made, (made[words_at],)).copy()
        return found
    finally:
        library().grammar_free(made)


def of_rule(rule: Rule) -> Automaton:
    """The automaton of a request's constraint; BadOption if the compiler cannot take it."""
    program = Program()
    program.root(_rule_node(program, rule))
    return compiled(program)


def _rule_node(program: Program, rule: Rule) -> int:
    match rule.kind:
        case "schema":
            return _schema_node(program, followable(_json(rule.text)))
        case "regex":
            return program.pattern(ascii_classes(rule.text, "d"), written=rule.text)  # `\d` is 0 to 9
        case "choice":
            return program.either([program.lexeme(program.literal(choice)) for choice in _json(rule.text)])
    if rule.text.startswith('{"grammars":'):
        return _several_node(program, several_grammars(rule.text))
    if "::=" in rule.text:
        if missing("serve", ("llguidance",)):  # which rewrites it as Lark
            raise BadOption("it is in GBNF, which is not supported without llguidance")
        return lark_node(program, as_lark(rule), _schema_node, {}, written=False)
    return lark_node(program, rule.text, _schema_node, {}, written=not isinstance(rule.text, MadeGrammar))


def _several_node(program: Program, grammars: Sequence[Mapping[str, Any]]) -> int:
    """Grammars that refer to one another by name, in llguidance's form; the first is the whole."""

    def node(grammar: Mapping[str, Any]) -> int:
        if "json_schema" in grammar:
            return _schema_node(program, grammar["json_schema"])
        return lark_node(program, grammar["lark_grammar"], _schema_node, others)

    others = {grammar["name"]: partial(node, grammar) for grammar in grammars[1:]}
    return node(grammars[0])


def _schema_node(program: Program, schema: Any) -> int:
    """A schema whose JSON is compact: the only form that is written here."""
    if isinstance(schema, dict) and "x-guidance" in schema:
        if schema["x-guidance"] != COMPACT:
            raise BadOption("a schema in the grammar has options of its own")
        schema = {word: value for word, value in schema.items() if word != "x-guidance"}
    return schema_node(program, schema, matches, disjoint)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unfollowable(f"it is not JSON: {error}") from None


@lru_cache(4096)
def matches(pattern: str, text: str) -> bool:
    """Whether a part of a text matches a pattern of a schema."""
    one, other = (part.encode("utf-8", "surrogatepass") for part in (ascii_classes(pattern), text))
    found = library().grammar_matches(one, len(one), other, len(other))
    if found < 0:
        disjoint(pattern, pattern)  # says why
        raise BadOption(f"the pattern {quoted(pattern)} takes too long to read")
    return bool(found)


@lru_cache(1024)
def disjoint(one: str, other: str) -> bool:
    """Whether no text matches both patterns of a schema."""
    program = Program()
    nodes = [program.pattern(ascii_classes(pattern), search=True, written=pattern) for pattern in (one, other)]
    program.root(program.both(*nodes))
    try:
        compiled(program)
    except BadOption as error:
        if "no text satisfies it" in str(error):
            return True
        raise
    return False


class Trie:
    """A vocabulary's bytes as words, which may be copied anywhere; those of special tokens are not followed."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int]) -> None:
        ends = array("i", np.cumsum([len(token) for token in tokens], dtype=np.int32).tobytes())
        flags = bytearray(len(tokens))
        for id in special:
            flags[id] = 1
        made = library().grammar_vocabulary(b"".join(tokens), _pointer(ends), bytes(flags), len(tokens))
        if not made:
            raise MemoryError("there is not enough memory for a vocabulary of grammars")
        self.words = _taken(made, _VOCABULARY_WORDS)
        self.longest = int(self.words[_VOCABULARY_LONGEST])


# Over words, wherever they lie: `a` begins with an automaton, `v` with a vocabulary


def first_position(a: np.ndarray) -> np.ndarray:
    """The position before the first token: state, counter, depth, and two words for each open call."""
    position = np.zeros(POSITION_WORDS, np.int32)
    library().grammar_begin(_words(a), _words(position))
    return position


def take_token(a: np.ndarray, v: np.ndarray, position: np.ndarray, token: int) -> bool:
    """Advance a position by a token; False, and the position as it was, if it is not allowed."""
    return bool(library().grammar_take(_words(a), _words(v), _words(position), token))


def may_end(a: np.ndarray, position: np.ndarray) -> bool:
    """Whether the text may end here."""
    return bool(library().grammar_ends(_words(a), _words(position)))


def kept_words(n_words: int, most: int = MOST_KEPT) -> int:
    """Words of memory for so many kept masks of `n_words` words each."""
    return int(library().grammar_kept_words(n_words, most))


def begin_kept(kept: np.ndarray, n_words: int, most: int = MOST_KEPT) -> None:
    """Make memory of `kept_words` ready for its first mask."""
    library().grammar_begin_kept(_words(kept), n_words, most)


def find_mask(a: np.ndarray, v: np.ndarray, kept: np.ndarray, position: np.ndarray, bits: np.ndarray) -> None:
    """The tokens that may come next except end tokens, into `bits`; one thread at a time uses `kept`."""
    library().grammar_mask(_words(a), _words(v), _words(kept), _words(position), _words(bits))


class GrammarMasks:
    """The masks of one automaton over one vocabulary; those that take long to compute are kept. Safe to use from many
    threads."""

    def __init__(self, automaton: Automaton, trie: Trie, n_ids: int, *, most_kept: int = MOST_KEPT) -> None:
        self.automaton, self.trie = automaton, trie
        self.n_words = -(-n_ids // 32)
        self._lock = Lock()
        self._kept = np.zeros(kept_words(self.n_words, most_kept), np.int32)
        begin_kept(self._kept, self.n_words, most_kept)

    @property
    def n_kept(self) -> int:
        """How many masks are kept now."""
        return int(self._kept[_KEPT_N])

    def begin(self) -> np.ndarray:
        """The position before the first token."""
        return first_position(self.automaton.words)

    def take(self, position: np.ndarray, token: int) -> bool:
        """Advance a position by a token; False, and the position as it was, if it is not allowed."""
        return take_token(self.automaton.words, self.trie.words, position, token)

    def take_bytes(self, position: np.ndarray, text: bytes) -> bool:
        a = _words(self.automaton.words)
        return all(library().grammar_take_byte(a, _words(position), byte) for byte in text)

    def ends(self, position: np.ndarray) -> bool:
        """Whether the text may end here."""
        return may_end(self.automaton.words, position)

    def mask(self, position: np.ndarray) -> np.ndarray:
        """The tokens that may come next except end tokens, int32 words, the caller's own."""
        bits = np.zeros(self.n_words, np.int32)
        with self._lock:
            find_mask(self.automaton.words, self.trie.words, self._kept, position, bits)
        return bits


class AutomatonMatcher:
    """Follows one answer, token by token, as a `Matcher` does; one thread at a time. It is the twin of what a loop does
    with an automaton, and what the host does where the loop does not."""

    def __init__(self, masks: GrammarMasks, ends: frozenset[int], sampling: Sampling) -> None:
        """`ends`: the ids that end an answer. The masks are those of the rule of `sampling`."""
        self.ends, self.rule = ends, sampling.rule
        self.min_tokens, self.ignores_ends = sampling.min_tokens, sampling.ignore_eos
        self._masks = masks
        self._position = masks.begin()
        self._n_made = 0
        self._end_rule = EndRule(ends, sampling, masks.n_words)

    @property
    def automaton(self) -> Automaton:
        return self._masks.automaton

    @property
    def trie(self) -> Trie:
        return self._masks.trie

    def mask(self) -> np.ndarray:
        """The tokens that may come next, int32 words, the caller's own; BadInput if there is none."""
        bits = self._masks.mask(self._position)
        if self._masks.ends(self._position):
            bits |= self._end_rule.only_ends
        if not bits.any():
            raise BadInput(NO_TOKEN)
        return self._end_rule.applied(bits, self._n_made)

    def take(self, token: int) -> None:
        """Advance by a token of the mask."""
        if token not in self.ends and not self._masks.take(self._position, token):
            raise BadInput(f"the answer cannot go on: token {token} is not allowed by its grammar")
        self._n_made += 1


def _words(of: np.ndarray) -> Any:
    return of.ctypes.data_as(ctypes.c_void_p)


def _pointer(words: array[int]) -> Any:
    return ctypes.c_void_p(words.buffer_info()[0])
