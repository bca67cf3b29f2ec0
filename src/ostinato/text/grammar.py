"""Grammars: which tokens may come next, one bit each, in an answer that must follow a schema, a regex or a grammar.

The parsing is llguidance's; here are its limits, so that no schema takes more than seconds or some hundred megabytes,
and what the end tokens may do. A `Matcher` follows one answer; nothing here samples a token; the device does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ostinato.errors import BadInput, BadOption, Unsupported
from ostinato.extras import check_llguidance, install_command, missing
from ostinato.options import Rule, Sampling
from ostinato.text.program import Unfollowable
from ostinato.text.schema import followable
from ostinato.text.schema_program import ascii_classes
from ostinato.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_NO_WAY_ON: Final = "the answer cannot go on: "
NO_TOKEN: Final = f"{_NO_WAY_ON}no token of this model may come next"
_TOO_COMPLEX: Final = "it is too complex"
_NO_TEXT: Final = "no text satisfies it"
# A compiled grammar holds up to tens of megabytes; a client that sends the same schema again finds it here.
KEPT: Final = 16
# Numbers that must be multiples of something become automata with as many states as their least common multiple.
LARGEST_MULTIPLE: Final = 20_000
SMALLEST_EXPONENT: Final = -6

# Compact JSON: an answer has no blanks that its schema does not ask for, so blanks cannot continue without end.
COMPACT: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
# A schema may stand inside a grammar, and that inside JSON: then its quotes are escaped.
_MULTIPLE_OF: Final = re.compile(r'"multipleOf\\*"\s*:\s*([^\s,}\\]+)')
_ESCAPED: Final = re.compile(r"\\+u([0-9a-fA-F]{4})")


class OthersReason(BadOption):
    """A refusal in llguidance's words, which may be about texts that the caller did not write."""

    def __init__(self, rule: Rule, reason: str) -> None:
        super().__init__(f"{rule.shown} cannot be followed: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _RefusedText:
    """Why a rule is refused, in our words or in llguidance's."""

    why: str
    words_are_ours: bool = True


class EndRule:
    """What `min_tokens` and `ignore_eos` make of the end tokens in a mask."""

    def __init__(self, ends: frozenset[int], sampling: Sampling, n_words: int) -> None:
        """`ends`: the ids that end an answer; `n_words`: the int32 words of a mask."""
        self.only_ends = _bits_of(ends, n_words)
        self._end_bits = _bits_of([*ends, *sampling.stop_token_ids], n_words)
        self._min_tokens, self._ignores_ends = sampling.min_tokens, sampling.ignore_eos

    def applied(self, bits: np.ndarray, n_made: int) -> np.ndarray:
        """The mask after `n_made` tokens, the caller's own: an end token is in it only if it is in `bits` and the
        answer has its minimum length, or if no other token is allowed."""
        unwanted = self._end_bits if n_made < self._min_tokens else self.only_ends if self._ignores_ends else None
        if unwanted is not None:
            others: np.ndarray = bits & ~unwanted
            if others.any():
                return others
        return bits.copy()


class Matcher:
    """Follows one answer, token by token; one thread at a time."""

    def __init__(self, inner: LLMatcher, first: np.ndarray, ends: frozenset[int], sampling: Sampling) -> None:
        """`first`: the bits of the first token, int32; `ends`: the ids that end an answer."""
        self.ends = ends
        self._inner = inner
        self._bits = first
        self._n_made = 0
        self._rule = EndRule(ends, sampling, len(first))

    def mask(self) -> np.ndarray:
        """The tokens that may come next, int32 words, the caller's own.

        An end token is among them only if the answer may end and has its minimum length, or if no other token is
        allowed.
        """
        return self._rule.applied(self._bits, self._n_made)

    def take(self, token: int) -> None:
        """Advance by a token of the mask; BadInput if the grammar turns out too complex to continue."""
        self._inner.consume_token(token)
        self._n_made += 1
        if token not in self.ends:
            self._bits = _next_bits(self._inner, len(self._bits))


class Grammars:
    """Makes matchers for one tokenizer; safe to use from many threads."""

    def __init__(self, tokenizer: Tokenizer, n_ids: int) -> None:
        """`n_ids`: how many ids the model has; a mask has a bit for each."""
        self._tokenizer = tokenizer
        self._n_ids = n_ids
        self._ends = frozenset(id for id in tokenizer.eog_ids if id < n_ids)
        self._compiled = lru_cache(KEPT)(self._compile)

    def matcher(self, sampling: Sampling) -> Matcher | None:
        """The matcher for the constraint of `sampling`; None if there is none. BadOption if it cannot be followed."""
        rule = sampling.rule
        if rule is None:
            return None
        compiled = self._compiled(rule)
        if isinstance(compiled, _RefusedText):
            if compiled.words_are_ours:
                raise BadOption(f"{rule.shown} cannot be followed: {compiled.why}")
            raise OthersReason(rule, compiled.why)
        inner, first = compiled
        return Matcher(inner.deep_copy(), first, self._ends, sampling)

    def _compile(self, rule: Rule) -> tuple[LLMatcher, np.ndarray] | _RefusedText:
        """A grammar before its first token, and the bits of that; or why it is refused."""
        known = self._known  # first: it says what to do if llguidance is not installed
        from llguidance import LLMatcher

        try:
            check_multiples(rule.text)
            inner = LLMatcher(known, _source(rule), log_level=0, limits=_limits())
            if inner.is_error():
                return _refused(_placed(_reason(inner.get_error()), rule))
        except BadInput as error:
            return _RefusedText(str(error))
        except ValueError as error:
            return _RefusedText(str(error), words_are_ours=False)
        try:
            return inner, _next_bits(inner, -(-self._n_ids // 32))
        except BadInput as error:
            why = str(error)
            return _refused(_NO_TEXT if why == NO_TOKEN else why.removeprefix(_NO_WAY_ON))

    @cached_property
    def _known(self) -> LLTokenizer:
        """The vocabulary as llguidance reads it; made when it is first needed, which takes tenths of a second."""
        check_llguidance("an answer under this constraint")
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self._ends:
            raise Unsupported("this model has no token that ends an answer, so none can follow a schema or a grammar")
        words = TokenTable(self._tokenizer, min(self._ends))
        return LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=sorted(self._ends))


class TokenTable:
    """A vocabulary by the names that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        hidden = tokenizer.hidden
        self.tokens = [
            tokenizer.texts[id].encode() if id in hidden else tokenizer.shown[id] for id in range(tokenizer.vocab_size)
        ]
        # A token without text would let an answer continue without progress.
        self.special_token_ids = [id for id, piece in enumerate(self.tokens) if id in hidden or not piece]
        self._before = tokenizer.encode(_BREAK, bos=False) if tokenizer.drops_first_space else []

    def __call__(self, text: str) -> list[int]:
        """The ids of a text inside of another: without the blank that some vocabularies put before the first word."""
        if isinstance(text, bytes):
            raise TypeError("texts only")
        if not self._before:
            return self._tokenizer.encode(text, bos=False)
        return self._tokenizer.encode(_BREAK + text, bos=False)[len(self._before) :]


_BREAK: Final = "\n"  # never part of a longer token in those vocabularies


def _source(rule: Rule) -> str:
    """A rule as llguidance reads it; a mask then names every token that may come next, as an automaton's does."""
    from llguidance import LLMatcher

    if rule.kind == "schema":
        return LLMatcher.grammar_from_lark(_unforced(f"start: %json {_followable_text(rule.text)}"))
    if rule.kind == "grammar" and rule.text.startswith('{"grammars":'):  # llguidance's own form, for several grammars
        first, *others = several_grammars(rule.text)
        return json.dumps({"grammars": [{**first, "lark_grammar": _unforced(first["lark_grammar"])}, *others]})
    return LLMatcher.grammar_from_lark(_unforced(as_lark(rule)))


# Where a grammar leaves one text, llguidance would allow the tokens alone that its tokenizer writes that text with.
_UNFORCED: Final = '%llguidance {"no_forcing": true}\n'


def _unforced(lark: str) -> str:
    return lark if re.search(r"^\s*%llguidance", lark, re.MULTILINE) else _UNFORCED + lark


def several_grammars(text: str) -> list[dict[str, Any]]:
    """Grammars that refer to one another by name, the first of which is the whole, in llguidance's form; BadOption
    where the text has another form."""
    try:
        found = json.loads(text)["grammars"]
    except (ValueError, RecursionError) as error:
        raise Unfollowable(f"it is not JSON: {error}") from None
    if not (isinstance(found, list) and found and all(map(_is_grammar, found)) and "lark_grammar" in found[0]):
        raise Unfollowable(
            "its list `grammars` must have entries with a `name` and either a `lark_grammar` or a `json_schema`, and "
            "the first must have a `lark_grammar`"
        )
    return found


def _is_grammar(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return False
    return isinstance(entry.get("lark_grammar"), str) or isinstance(entry.get("json_schema"), dict | bool)


def _followable_text(schema: str) -> str:
    try:
        return json.dumps({**followable(json.loads(schema)), "x-guidance": COMPACT})
    except RecursionError:
        raise BadOption("it is nested too deep") from None


def compact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema for a place inside of a grammar, without free blanks; BadOption if it cannot be followed."""
    try:
        return {**followable(schema), "x-guidance": COMPACT}
    except BadOption as error:
        raise BadOption(f"this schema cannot be followed: {error}") from None


def as_lark(rule: Rule) -> str:
    """A rule that is no schema as a grammar in Lark; BadOption where it cannot be read."""
    match rule.kind:
        case "regex":
            # Digits are 0 to 9: `\d` is not meant to match those of every script.
            return f"start: /{in_slashes(ascii_classes(rule.text, 'd'))}/"
        case "choice":
            return "start: " + " | ".join(map(literal, json.loads(rule.text)))
    return _from_gbnf(rule.text)


def in_slashes(pattern: str) -> str:
    r"""A pattern as Lark writes it between slashes, on one line.

    >>> in_slashes("a/b\\/c")
    'a\\/b\\/c'
    """
    written = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return re.sub(r"\\?([/\n\r\t])|\\.", lambda found: written.get(found[1], found[0]), pattern)


def _from_gbnf(grammar: str) -> str:
    if "::=" not in grammar:
        return grammar
    if missing("serve", ("llguidance",)):
        raise BadOption(
            "this grammar cannot be followed: it is in GBNF, which llguidance reads, and that is not installed; type: "
            f"{install_command('serve')}"
        )
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # any exception it raises is about the text
        raise Unfollowable(f"as GBNF the grammar cannot be read: {error}") from error


def literal(text: str) -> str:
    """A text as grammars in Lark write it.

    >>> literal('say "hi"')
    '"say \\\\"hi\\\\""'
    """
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() or ord(c) > 0xFFFF else f"\\u{ord(c):04x}" for c in quoted)


def with_control_tokens(text: str, ids: Mapping[str, int]) -> str:
    """A text as grammars in Lark write it, the control tokens in it by their ids.

    >>> with_control_tokens("<call>{}", {"<call>": 7})
    '<[7]> "{}"'
    """
    parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", text) if ids else [text]
    return " ".join(f"<[{ids[part]}]>" if part in ids else literal(part) for part in parts if part)


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=200_000,  # about 14 ms for a token
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,  # 1 to 2 kB each
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def check_multiples(text: str) -> None:
    """Refuse multiples that would take minutes and gigabytes to compile; BadOption.

    >>> check_multiples('{"multipleOf": 0.01}')
    >>> check_multiples('{"multipleOf": 999983}')
    Traceback (most recent call last):
    ostinato.text.program.Unfollowable: its numbers must be multiples of 999983 units; at most 20000 can be followed
    """
    found = _MULTIPLE_OF.findall(_ESCAPED.sub(lambda m: chr(int(m[1], 16)), text))
    try:
        numbers = [Decimal(number) for number in found]
    except DecimalException:
        return  # no number: refused where the schema is read
    numbers = [number for number in numbers if number.is_finite() and number]
    exponent = min((int(number.normalize().as_tuple().exponent) for number in numbers), default=0)
    if exponent < SMALLEST_EXPONENT or any(number > LARGEST_MULTIPLE for number in numbers):
        units = LARGEST_MULTIPLE + 1 if exponent < SMALLEST_EXPONENT else int(max(numbers))
    else:
        units = math.lcm(*(int(number.scaleb(-min(exponent, 0))) for number in numbers))
    if units > LARGEST_MULTIPLE:
        raise Unfollowable(
            f"its numbers must be multiples of {units} units; at most {LARGEST_MULTIPLE} can be followed"
        )


_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_OURS: Final = re.compile(r'^(failed to compile JSON schema: |invalid regex ".*" \(in regex\): (regex parse error: )?)')


def _placed(reason: str, rule: Rule) -> str:
    """A reason of llguidance with the place in the caller's text. The place that it names is in the Lark that it was
    given, which is the caller's only if the caller wrote Lark; there `_unforced` put a line before it.

    >>> _placed('at 3(4): unknown name: "B"', Rule("grammar", "start: A\\nA: B"))
    'line 2, column 4: unknown name: "B"'
    >>> _placed("at 2(8): failed to compile JSON schema: minItems must be a number", Rule("schema", "{}"))
    'minItems must be a number'
    """
    found = _PLACE.match(reason)
    if found is None:
        return reason
    reason = reason[found.end() :]
    if rule.kind != "grammar":
        return _OURS.sub("", reason)
    if "::=" in rule.text or rule.text.startswith('{"grammars":'):
        return reason
    return f"line {int(found[1]) - (_unforced(rule.text) != rule.text)}, column {found[2]}: {reason}"


def _next_bits(inner: LLMatcher, n_words: int) -> np.ndarray:
    """The bits of the next token; BadInput if no token is allowed."""
    bits = np.zeros(n_words, np.int32)
    if not inner.is_error():
        found = np.frombuffer(inner.compute_bitmask(), np.int32)[:n_words]
        bits[: len(found)] = found
    if inner.is_error():  # said after the bits were asked for too
        raise BadInput(f"{_NO_WAY_ON}{_reason(inner.get_error())}")
    if not bits.any():
        raise BadInput(NO_TOKEN)
    return bits


def _refused(reason: str) -> _RefusedText:
    return _RefusedText(reason, words_are_ours=reason in (_TOO_COMPLEX, _NO_TEXT))


def _bits_of(ids: Iterable[int], n_words: int) -> np.ndarray:
    flags = np.zeros(n_words * 32, np.uint8)
    flags[[id for id in ids if id < len(flags)]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


_LIMITS: Final = re.compile(r"limits\.|[Tt]oo many (expressions|items|states)")  # of llguidance; no caller can set them


def _reason(message: str) -> str:
    """A message of the library on one line: its first, and the reason that follows a picture of the place.

    >>> _reason("regex parse error:\\n    [0-9\\n    ^\\nerror: unclosed character class")
    'regex parse error: unclosed character class'
    """
    if _LIMITS.search(message):
        return _TOO_COMPLEX
    first, *others = message.replace("<non-verbose/>", "").strip().split("\n")
    return " ".join([first, *(line.removeprefix("error: ") for line in others if line.startswith("error: "))])
