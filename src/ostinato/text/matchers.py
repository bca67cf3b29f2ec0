"""What follows one answer under a constraint: an automaton of our own compiler, or llguidance where that refuses.

A constraint is compiled when a request is made, and the last ones are kept. What neither can follow is refused with
the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Final

from ostinato.errors import BadOption, HardwareCannot, Unsupported
from ostinato.extras import install_command, missing
from ostinato.options import Rule, Sampling
from ostinato.text.automaton import AutomatonMatcher, GrammarMasks, Trie, of_rule
from ostinato.text.grammar import Grammars, Matcher, OthersReason, TokenTable, check_multiples
from ostinato.text.program import TookTooLong, Unfollowable
from ostinato.text.tokenizer import Tokenizer

# Of our reasons, in those that name what llguidance follows: then something else may be wrong, which only that knows.
_READ_BY_OTHERS: Final = "not supported"
KEPT: Final = 16  # automata with their masks, some hundred kilobytes each


@dataclass(frozen=True, slots=True)
class _RefusedRule:
    """Why our compiler refuses a rule, and whether llguidance is known to refuse it too."""

    why: str
    by_all: bool


class Matchers:
    """Makes matchers for one tokenizer; safe to use from many threads."""

    def __init__(self, tokenizer: Tokenizer, n_ids: int) -> None:
        """`n_ids`: how many ids the model has; a mask has a bit for each."""
        self._tokenizer, self._n_ids = tokenizer, n_ids
        self._ends = frozenset(id for id in tokenizer.eog_ids if id < n_ids)
        self._compiled = lru_cache(KEPT)(self._compile)
        self._fallback = Grammars(tokenizer, n_ids)
        self._lock = Lock()
        self._made_trie: Trie | None = None

    def matcher(self, sampling: Sampling) -> AutomatonMatcher | Matcher | None:
        """The matcher for the constraint of `sampling`; None if there is none. BadOption if it cannot be followed."""
        rule = sampling.rule
        if rule is None:
            return None
        if not self._ends:
            raise Unsupported("this model has no token that ends an answer, so none can follow a schema or a grammar")
        try:
            compiled: GrammarMasks | _RefusedRule = self._compiled(rule)
        except TookTooLong as error:  # not kept: it may be soon enough the next time
            compiled = _RefusedRule(str(error), by_all=False)
        if isinstance(compiled, GrammarMasks):
            return AutomatonMatcher(compiled, self._ends, sampling)
        why = f"{rule.shown} cannot be followed: {compiled.why}"
        if compiled.by_all:
            raise BadOption(why)
        if missing("serve", ("llguidance",)):
            raise BadOption(
                f"{why}; llguidance, which is not installed, may follow it; type: {install_command('serve')}"
            )
        try:
            return self._fallback.matcher(sampling)
        except OthersReason as error:
            raise BadOption(f"{why}; llguidance says: {error.reason}" if _READ_BY_OTHERS in why else why) from None

    def _compile(self, rule: Rule) -> GrammarMasks | _RefusedRule:
        """The masks of a rule, or why our compiler cannot take it."""
        try:
            check_multiples(rule.text)
            automaton = of_rule(rule)
            self._check_tokens(automaton.token_ids)
            return GrammarMasks(automaton, self._trie, self._n_ids)
        except TookTooLong:
            raise
        except BadOption as error:
            return _RefusedRule(str(error), by_all=isinstance(error, Unfollowable))
        except HardwareCannot as error:  # no object and no compiler
            if missing("serve", ("llguidance",)):
                raise
            return _RefusedRule(str(error), by_all=False)

    def _check_tokens(self, ids: Sequence[int]) -> None:
        """Refuse ids that the vocabulary does not have, or whose tokens are text: an automaton follows their bytes."""
        n = self._tokenizer.vocab_size
        for id in ids:
            if id >= n:
                raise Unfollowable(f"it names the token {id}, but the vocabulary has {n} tokens, 0 to {n - 1}")
            if id not in self._tokenizer.hidden:
                raise BadOption(f"it names the token {id} by its id, which is no special token; write its text")

    @property
    def _trie(self) -> Trie:
        """Made when it is first needed, which takes tenths of a second."""
        with self._lock:
            if self._made_trie is None:
                table = TokenTable(self._tokenizer, min(self._ends))
                self._made_trie = Trie(table.tokens, table.special_token_ids)
            return self._made_trie
