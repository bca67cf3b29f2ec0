"""Responses that are kept for later requests: in memory, up to a number, a size and an age.

A response refers to the one that it continues, which stays in memory as long as any kept response needs it, also
after its own id is dropped or deleted. Nothing here knows about HTTP.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.serve.responses_body import Item, input_id


@dataclass(slots=True, eq=False)
class KeptResponse:
    """A response as it was sent, its own items, and the one that it continues. The store counts its users."""

    response: dict[str, Any]
    input: Sequence[Item]
    output: Sequence[Item]
    previous: KeptResponse | None
    n_bytes: int  # of its own: the body and the response
    n_users: int = 0  # the store, and each response in memory that continues it

    @property
    def id(self) -> str:
        id: str = self.response["id"]
        return id

    @property
    def items(self) -> dict[str, Item]:
        """Its own items by their ids; those of the input have the ids by which a client can list them."""
        own = {item.id: item for item in self.output if item.id is not None}
        return {item.id or input_id(self.id, index): item for index, item in enumerate(self.input)} | own

    @property
    def n_bytes_of_all(self) -> int:
        """Bytes of the whole conversation."""
        return sum(turn.n_bytes for turn in self._turns())

    def conversation(self) -> list[Item]:
        """The items of the whole conversation: inputs and outputs, the oldest first."""
        return [item for turn in reversed(self._turns()) for item in (*turn.input, *turn.output)]

    def _turns(self) -> list[KeptResponse]:
        """This response and those before it, the latest first."""
        turns: list[KeptResponse] = []
        turn: KeptResponse | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns


class ResponseStore:
    """Kept responses by id; the oldest is dropped first."""

    def __init__(
        self, most: int, most_bytes: int, age_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._most_bytes, self._age_s, self._clock = most, most_bytes, age_s, clock
        self._kept: OrderedDict[str, tuple[float, KeptResponse]] = OrderedDict()
        self._items: dict[str, Item] = {}  # of inputs and outputs, by id
        self.n_bytes = 0  # of all that is in memory

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, kept: KeptResponse) -> bool:
        """Keep a response; older ones make room. One that would not fit even alone is not kept: False."""
        self._drop_old()
        if kept.n_bytes_of_all > self._most_bytes:
            return False
        self._kept[kept.id] = (self._clock(), kept)
        self._items |= kept.items
        used: KeptResponse | None = kept
        while used is not None:
            used.n_users += 1
            if used.n_users > 1:
                break
            self.n_bytes += used.n_bytes  # one that it continues may have been dropped while it was made
            used = used.previous
        while self._kept and (len(self._kept) > self._most or self.n_bytes > self._most_bytes):
            self.delete(next(iter(self._kept)))
        return True

    def get(self, id: str) -> KeptResponse | None:
        self._drop_old()
        found = self._kept.get(id)
        return None if found is None else found[1]

    def item(self, id: str) -> Item | None:
        """An item of a kept response: of its output, or of its input."""
        self._drop_old()
        return self._items.get(id)

    def delete(self, id: str) -> bool:
        """Drop a response; False if there is none of this id."""
        found = self._kept.pop(id, None)
        if found is None:
            return False
        unused: KeptResponse | None = found[1]
        for name, item in found[1].items.items():
            if self._items.get(name) is item:  # a later response may have an item of the same id
                del self._items[name]
        while unused is not None:
            unused.n_users -= 1
            if unused.n_users:
                break
            self.n_bytes -= unused.n_bytes
            unused = unused.previous
        return True

    def _drop_old(self) -> None:
        oldest = self._clock() - self._age_s
        while self._kept:
            id, (kept_at, _) = next(iter(self._kept.items()))
            if kept_at > oldest:
                return
            self.delete(id)
