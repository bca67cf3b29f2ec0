"""The store of responses against a slow one that keeps everything and counts anew each time."""

from __future__ import annotations

import random

from ostinato.serve.response_store import KeptResponse, ResponseStore
from ostinato.serve.responses_body import MessageItem

MOST, MOST_BYTES, AGE_S = 6, 400, 50.0


def response(id: str, n_bytes: int, previous: KeptResponse | None) -> KeptResponse:
    asked = MessageItem(role="user", content=f"to {id}")
    answer = MessageItem(role="assistant", content=f"from {id}", id=f"msg_{id}")
    return KeptResponse({"id": id}, [asked], [answer], previous, n_bytes)


def size_of(kept: dict[str, tuple[float, KeptResponse]]) -> int:
    """The bytes of all that the kept responses need, each counted once."""
    needed: dict[str, int] = {}
    for _, one in kept.values():
        turn: KeptResponse | None = one
        while turn is not None:
            needed[turn.id] = turn.n_bytes
            turn = turn.previous
    return sum(needed.values())


def test_what_is_kept_is_what_a_slow_store_keeps() -> None:
    draw = random.Random(7)
    now = 0.0
    store = ResponseStore(MOST, MOST_BYTES, AGE_S, clock=lambda: now)
    slow: dict[str, tuple[float, KeptResponse]] = {}
    made_before: list[KeptResponse | None] = [None]
    for number in range(3000):
        now += draw.choice([0.0, 1.0, 5.0, 30.0])
        slow = {id: one for id, one in slow.items() if one[0] > now - AGE_S}
        assert store.get("none") is None  # drops what is old
        match draw.choice(["add", "add", "delete"]):
            case "add":
                # Also one that is gone by now: it was there when the request came.
                made = response(str(number), draw.randrange(1, 120), draw.choice(made_before[-12:]))
                made_before += [made, None]
                kept = store.add(made)
                assert kept == (size_of({made.id: (now, made)}) <= MOST_BYTES)
                if kept:
                    slow[made.id] = (now, made)
                while slow and (len(slow) > MOST or size_of(slow) > MOST_BYTES):
                    del slow[next(iter(slow))]
            case _:
                id = draw.choice([*slow, "none"])
                assert store.delete(id) == (slow.pop(id, None) is not None)
        assert len(store) == len(slow)
        assert store.n_bytes == size_of(slow)
        for id in (str(n) for n in range(max(0, number - 20), number + 1)):
            found = store.get(id)
            assert (found is not None) == (id in slow)
            assert (store.item(f"msg_{id}") is not None) == (id in slow)


def test_a_conversation_has_every_turn_in_order_also_of_those_that_are_deleted() -> None:
    store = ResponseStore(10, 10**6, 60.0)
    last = None
    for number in range(4):
        last = response(str(number), 10, last)
        store.add(last)
    store.delete("1")
    assert last is not None
    texts = [item.content for item in last.conversation() if isinstance(item, MessageItem)]
    assert texts == [text for n in range(4) for text in (f"to {n}", f"from {n}")]


def test_a_response_that_is_too_large_is_not_kept() -> None:
    store = ResponseStore(10, 100, 60.0)
    small = response("small", 10, None)
    assert store.add(small)
    assert not store.add(response("large", 101, None))
    assert not store.add(response("long", 91, small))
    assert (len(store), store.n_bytes) == (1, 10)


def test_an_item_is_found_by_its_id_in_inputs_too_and_the_latest_of_an_id_stays() -> None:
    store = ResponseStore(10, 10**6, 60.0)
    for number in "01":
        made = response(number, 10, None)
        made.input = [
            MessageItem(role="user", content="without an id"),
            MessageItem(id="mine", role="user", content=number),
        ]
        store.add(made)
    without = store.item("0_0")
    assert isinstance(without, MessageItem)
    assert without.content == "without an id"
    store.delete("0")
    assert store.item("0_0") is None
    mine = store.item("mine")
    assert isinstance(mine, MessageItem)
    assert mine.content == "1"
