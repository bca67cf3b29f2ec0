"""Programs of the grammar compiler: expressions over bytes, calls and special tokens, as words that C++ reads.

A node is named by its number; equal nodes are one. What an expression means is told in docs/automata.md; nothing here
knows JSON. `automaton.py` hands a program to the compiler.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from ostinato.errors import BadOption, quoted

UNBOUNDED: Final = -1
TOOK_TOO_LONG: Final = "it takes longer than"  # as refusals begin that another time may not meet
MAX_BOUND: Final = 1_000_000_000


class TookTooLong(BadOption):
    """The time to read or compile a grammar is up; on a less busy machine it may suffice."""


class Unfollowable(BadOption):
    """Input that is wrong, or that llguidance does not follow either: there is no use in installing it."""


class Op(IntEnum):
    """The first word of a node; then how many words follow, and those. `automaton.cpp` has the same list."""

    NOTHING = 0
    LITERAL = 1  # offset and length in the texts
    PATTERN = 2  # offset, length, whether a part of the text may match
    CAT = 3
    OR = 4
    AND = 5
    NOT = 6
    REPEAT = 7  # node, least, most
    QUOTED = 8  # a JSON string whose value the node describes
    MULTIPLE = 9  # coefficient, decimals: digits of a multiple of it
    CALL = 10
    TOKEN = 11
    BODY = 12  # procedure, node
    ROOT = 13
    LEXEME = 14  # a text that ends only where it cannot go on


class Program:
    """A grammar under construction."""

    def __init__(self) -> None:
        self.words = array("i")
        self.texts = bytearray()
        self.n_procedures = 0
        self._nodes: dict[tuple[int, ...], int] = {}
        self._places: dict[bytes, int] = {}
        self._procedures: dict[int, int] = {}
        self._bodies: dict[int, int] = {}  # by the node that calls it
        self._n = 0
        self.patterns: dict[str, str] = {}  # as they are compiled, and as the caller wrote them
        self.nothing = self._node(Op.NOTHING)
        self.empty = self.literal("")

    def literal(self, text: str) -> int:
        return self._node(Op.LITERAL, *self._place(text.encode("utf-8", "surrogatepass")))

    def pattern(self, pattern: str, *, search: bool = False, written: str | None = None) -> int:
        """The texts that match; with `search`, those of which a part does. `written`: as the caller wrote it, where
        that differs, for messages."""
        self.patterns[pattern] = pattern if written is None else written
        return self._node(Op.PATTERN, *self._place(pattern.encode("utf-8", "surrogatepass")), int(search))

    def cat(self, *nodes: int) -> int:
        if self.nothing in nodes:
            return self.nothing
        left = [node for node in nodes if node != self.empty]
        return left[0] if len(left) == 1 else self._node(Op.CAT, *left) if left else self.empty

    def either(self, nodes: Sequence[int]) -> int:
        left = [node for node in dict.fromkeys(nodes) if node != self.nothing]
        return left[0] if len(left) == 1 else self._node(Op.OR, *left) if left else self.nothing

    def optional(self, node: int) -> int:
        return self.either([node, self.empty])

    def both(self, *nodes: int) -> int:
        return self._node(Op.AND, *nodes)

    def negated(self, node: int) -> int:
        return self._node(Op.NOT, node)

    def repeat(self, node: int, least: int, most: int = UNBOUNDED) -> int:
        """`most`: UNBOUNDED for no end."""
        if most == 0:
            return self.empty
        if node == self.nothing:
            return self.empty if least == 0 else self.nothing
        return self._node(Op.REPEAT, node, min(least, MAX_BOUND), min(most, MAX_BOUND))

    def quoted(self, node: int) -> int:
        return self._node(Op.QUOTED, node)

    def multiple(self, coefficient: int, decimals: int) -> int:
        if coefficient == 0:
            raise Unfollowable("it has a multipleOf that is 0")
        if coefficient >= 2**27 or decimals > 9:
            raise BadOption("it has a multipleOf that cannot be followed")
        return self._node(Op.MULTIPLE, coefficient, decimals)

    def lexeme(self, node: int) -> int:
        """A text that ends only where it cannot go on: `[0-9]+` before a digit takes that digit too."""
        return node if node in (self.nothing, self.empty) else self._node(Op.LEXEME, node)

    def token(self, id: int) -> int:
        if id >= 2**31:
            raise Unfollowable(f"it names the token {quoted(id)}, which no vocabulary has")
        return self._node(Op.TOKEN, id)

    def procedure(self, body: int) -> int:
        """A call of a procedure with this body; the same each time."""
        if body in (self.nothing, self.empty):
            return body
        if body not in self._procedures:
            self._procedures[body] = self.declare()
            self.define(self._procedures[body], body)
        return self.call(self._procedures[body])

    def declare(self) -> int:
        """The number of a procedure whose body comes later."""
        self.n_procedures += 1
        return self.n_procedures - 1

    def call(self, procedure: int) -> int:
        return self._node(Op.CALL, procedure)

    def define(self, procedure: int, body: int) -> None:
        self._bodies[self.call(procedure)] = body
        self._node(Op.BODY, procedure, body)

    def root(self, node: int) -> None:
        """The whole, once every procedure is defined; Unfollowable where one is only a call of itself."""
        for call, body in self._bodies.items():
            seen = {call}
            while body in self._bodies:
                if body in seen:
                    raise Unfollowable("its references go in circles")
                seen.add(body)
                body = self._bodies[body]
        self._node(Op.ROOT, node)

    def _place(self, text: bytes) -> tuple[int, int]:
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts += text
        return self._places[text], len(text)

    def _node(self, op: Op, *words: int) -> int:
        key = (op, *words)
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = self._n
            self._n += 1
            self.words.extend((op, len(words), *words))
        return found
