"""llguidance as the oracle of automata: what it allows next, over a real vocabulary.

Its masks name one token where the grammar forces the bytes (the tokenizer's own choice among the tokens that spell
them); here that is off, since a mask of an automaton names every token that the grammar allows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ostinato.files.checkpoint import open_checkpoint
from ostinato.options import Rule
from ostinato.text.automaton import Automaton, GrammarMasks, Trie
from ostinato.text.grammar import COMPACT, TokenTable, _limits, as_lark
from ostinato.text.schema import followable
from ostinato.text.tokenizer import Tokenizer, tokenizer_from_gguf

UNFORCED = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary for both sides; `special` are tokens without bytes, of which `ends` end an answer."""

    tokens: list[bytes]
    special: list[int]
    ends: list[int]
    closing: np.ndarray  # by token: whether it ends a part of a text, or is special
    trie: Trie
    theirs: LLTokenizer

    def bits(self, masks: GrammarMasks, position: np.ndarray) -> np.ndarray:
        """What the automaton allows, the end tokens included."""
        found = masks.mask(position)
        if masks.ends(position):
            for id in self.ends:
                found.view(np.uint32)[id >> 5] |= np.uint32(1 << (id & 31))
        return found

    def masks(self, automaton: Automaton) -> GrammarMasks:
        return GrammarMasks(automaton, self.trie, len(self.tokens))

    def matcher(self, rule: Rule) -> LLMatcher:
        return LLMatcher(self.theirs, _unforced(rule), log_level=0, limits=_limits())


def vocabulary_of(file: Path, special: int = 0) -> Vocabulary:
    """The vocabulary of a GGUF file; the first `special` ids are special tokens instead of what they were."""
    checkpoint = open_checkpoint(file)
    try:
        return vocabulary(tokenizer_from_gguf(checkpoint.metadata, file), special)
    finally:
        checkpoint.close()


def vocabulary(tokenizer: Tokenizer, special: int = 0) -> Vocabulary:
    ends = sorted(tokenizer.eog_ids)
    table = TokenTable(tokenizer, ends[0])
    for id in range(special):
        table.tokens[id] = f"<special {id}>".encode()
        table.special_token_ids.append(id)
    theirs = LLTokenizer(TokenizerWrapper(table), n_vocab=len(table.tokens), eos_token=ends)
    trie = Trie(table.tokens, table.special_token_ids)
    closing = np.array([token[-1:] in (b'"', b"}", b"]", b",", b":") for token in table.tokens])
    closing[table.special_token_ids] = True
    return Vocabulary(table.tokens, table.special_token_ids, ends, closing, trie, theirs)


def schema_rule(schema: Any) -> Rule:
    return Rule("schema", json.dumps(schema))


def ids(bits: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return found


def _unforced(rule: Rule) -> str:
    if rule.kind == "schema":
        schema = {**followable(json.loads(rule.text)), "x-guidance": COMPACT}
        return LLMatcher.grammar_from_lark(f"{UNFORCED}start: %json {json.dumps(schema)}")
    if rule.kind == "grammar" and rule.text.startswith('{"grammars":'):
        whole = json.loads(rule.text)
        whole["grammars"][0]["lark_grammar"] = UNFORCED + whole["grammars"][0]["lark_grammar"]
        return json.dumps(whole)
    return LLMatcher.grammar_from_lark(UNFORCED + as_lark(rule))
