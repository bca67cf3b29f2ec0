"""Which replica holds which prefixes of prompts: a bounded table from prefixes to replicas, and the routing by it.

A prompt is cut into blocks of characters; each block's key is a hash of all text up to its end, so that two prompts
share keys exactly as far as they share text. Nothing here knows Ray: the simulation uses it too.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ostinato.serve.messages_body import is_billing

BLOCK: Final = 64  # characters
MOST_BLOCKS: Final = 512  # beyond these, prompts count as the same
MOST_KEYS: Final = 200_000

PrefixKeys = tuple[bytes, ...]


def keys_of_text(text: str) -> PrefixKeys:
    """One key for each whole block.

    >>> one, other = keys_of_text("a" * 128 + "b" * 64), keys_of_text("a" * 128 + "c" * 64)
    >>> [a == b for a, b in zip(one, other)]
    [True, True, False]
    """
    made = []
    sum = hashlib.blake2b(digest_size=8)
    content = text[: BLOCK * MOST_BLOCKS]
    for start in range(0, len(content) - BLOCK + 1, BLOCK):
        sum.update(content[start : start + BLOCK].encode("utf-8", "surrogatepass"))
        made.append(sum.digest())
    return tuple(made)


def keys_of_body(body: bytes) -> PrefixKeys:
    """The keys of a request's prompt; none if the prompt cannot be found, and then any replica will do."""
    try:
        asked = json.loads(body)
        text = _text(asked) if isinstance(asked, dict) else ""
    except (ValueError, RecursionError):
        return ()
    return keys_of_text(text)


def _text(asked: Mapping[str, Any]) -> str:
    messages, items, prompt = asked.get("messages"), asked.get("input"), asked.get("prompt")
    if isinstance(items, str) and prompt is None:
        items = [{"role": "user", "content": items}]  # what a later request sends back as an item
    if isinstance(items, list) and items and isinstance(items[0], dict):
        messages = items  # of `/v1/responses`
    if isinstance(messages, list):
        # Tools come first in most templates. A message ends with a separator, so that a longer one has another key.
        parts: Iterable[Any] = (asked.get("tools"), asked.get("instructions"), asked.get("system"), *messages)
        return "\x1e".join(json.dumps(_lasting(part), sort_keys=True) for part in parts)
    if isinstance(prompt, str):
        return prompt
    return json.dumps(prompt)[1:-1] if isinstance(prompt, list) else ""


def _lasting(part: Any) -> Any:
    """A part of a conversation without what changes from turn to turn and is not in the prompt."""
    if isinstance(part, dict):
        return {name: _lasting(value) for name, value in part.items() if name != "cache_control"}
    if isinstance(part, list):
        return [_lasting(one) for one in part if not is_billing(one)]
    return part


class PrefixTable:
    """Replicas by the prefixes they have seen; the oldest entries are dropped first."""

    def __init__(self, imbalance: int) -> None:
        """A replica that is busier than the least busy by more than `imbalance` requests is not preferred."""
        self._imbalance = imbalance
        self._replicas: OrderedDict[bytes, set[str]] = OrderedDict()

    def order(self, keys: PrefixKeys, busy: Mapping[str, int]) -> list[str]:
        """All replicas, the best first: that with the longest prefix unless it is much busier, then the least busy."""
        idle_first = sorted(busy, key=lambda name: (busy[name], name))
        if not idle_first:
            return []
        most = busy[idle_first[0]] + self._imbalance
        for key in reversed(keys):
            have = [name for name in idle_first if name in self._replicas.get(key, ()) and busy[name] <= most]
            if have:
                return [*have, *(name for name in idle_first if name not in have)]
        return idle_first

    def learn(self, keys: PrefixKeys, replica: str) -> None:
        """Record that a replica received this prompt, and will hold its prefixes."""
        for key in reversed(keys):  # the shortest prefix becomes the most recent, and is dropped last
            self._replicas.setdefault(key, set()).add(replica)
            self._replicas.move_to_end(key)
        while len(self._replicas) > MOST_KEYS:
            self._replicas.popitem(last=False)

    def forget(self, gone: Sequence[str]) -> None:
        """Drop replicas that no longer exist."""
        for key in list(self._replicas):
            self._replicas[key].difference_update(gone)
            if not self._replicas[key]:
                del self._replicas[key]
