"""How Ray Serve chooses a replica for a request: by the prefixes that a replica holds, or in turn."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ostinato.scale.local import Call
from ostinato.scale.prefix import PrefixKeys, PrefixTable


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """The replica with the longest prefix of the prompt, unless it is much busier than the least busy."""

    def initialize_state(self, **settings: Any) -> None:
        self._table = PrefixTable(settings["imbalance"])
        self._known: set[str] = set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if gone := self._known - by_name.keys():
            self._table.forget(sorted(gone))
        self._known = set(by_name)
        lengths = self.replica_queue_len_cache
        busy = {name: lengths.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        ordered = self._table.order(_keys(pending_request), busy)
        return [[by_name[name]] for name in full_last(ordered, pending_request)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.learn(_keys(pending_request), replica_id.unique_id)


class RoundRobinRouter(RequestRouter):  # type: ignore[misc]
    """Each replica in turn: the baseline for routing by prefix."""

    def initialize_state(self, **settings: Any) -> None:
        self._next = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {str(replica.replica_id.unique_id): replica for replica in candidate_replicas}
        ordered = sorted(by_name)
        self._next += 1
        at = self._next % max(1, len(ordered))
        return [[by_name[name]] for name in full_last(ordered[at:] + ordered[:at], pending_request)]


def full_last(names: list[str], pending: PendingRequest | None) -> list[str]:
    """The same order, but replicas whose queues were full for this request come last."""
    call = _call(pending)
    return names if call is None else sorted(names, key=lambda name: name in call.full)


def _keys(pending: PendingRequest | None) -> PrefixKeys:
    call = _call(pending)
    return () if call is None else call.prefix


def _call(pending: PendingRequest | None) -> Call | None:
    given = pending.args[0] if pending is not None and pending.args else None
    return given if isinstance(given, Call) else None
