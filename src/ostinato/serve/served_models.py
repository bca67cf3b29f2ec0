"""The models of a server as its front sees them: which are in memory, which load, and which make room for another.

Each model has a process of its own, which the supervisor starts and ends as it is told here. A model is loaded when a
request first needs it; of the idle ones, that whose last request is longest ago makes room. A model with a running
request is never unloaded. Nothing here knows about HTTP beyond the refusals it raises.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

from ostinato.engine.choose import Room, gib
from ostinato.errors import quoted
from ostinato.files.store import local_path
from ostinato.serve.errors import Refusal, without_folders
from ostinato.serve.process import ProcessEvent, Tell
from ostinato.serve.settings import ServeOptions, is_among

# `loading`: its process is started, and may still wait for memory. `failed`: it is not in memory, and `why` says why.
ModelState = Literal["unloaded", "loading", "ready", "unloading", "failed"]

RETRY_S: Final = 10.0  # after a first failure, a model is not tried again for so long; after each further one, twice
RETRY_MOST_S: Final = 600.0
LOOK_S: Final = 1.0  # files of a model that failed have not changed if the disk does not say so in this time
PATIENCE_S: Final = 10.0  # a model that waits for memory longer has a busy one take no further requests


class ServedModel:
    """One model."""

    def __init__(self, index: int, names: tuple[str, ...], socket: str) -> None:
        """`socket`: the path of the one that its process serves."""
        self.index, self.names, self.socket = index, names, socket
        self.state: ModelState = "unloaded"
        self.why: str | None = None
        self.facts: dict[str, Any] = {}  # what its process told when the model was loaded last
        self.room: Room | None = None
        self.may_load = False  # its process has been told that there is room
        self.asked_at: float | None = None  # when it asked for room that there is not yet
        self.draining = False  # it takes no further requests, because another model has waited long for its memory
        self.n_running = self.n_waiting = 0  # requests
        self.used_at = 0.0
        self.retry_at = 0.0  # when a model that failed may be tried again, unless its files change before
        self.retry_s = RETRY_S  # how long to wait after the next failure
        self.failed_files: asyncio.Future[object] | None = None  # the stamp of its files when it failed
        self.files: asyncio.Future[object] | None = None  # the last stamp that was asked for
        self.n_loads = self.n_unloads = self.n_failures = self.n_ends = 0
        self.unloaded_for: str | None = None  # why it made room last
        self.restarts: Counter[str] = Counter()
        self.in_flight: set[Callable[[Refusal], None]] = set()  # ends a request that its process answers
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.names[0]

    @property
    def is_idle(self) -> bool:
        # Requests that have waited for it begin in a moment, unless it takes no more.
        return self.state == "ready" and not self.n_running and (not self.n_waiting or self.draining)

    def change(self, state: ModelState, why: str | None = None) -> None:
        self.state, self.why = state, why
        self.wake()

    def wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def change_within(self, seconds: float) -> bool:
        """Wait for a change of the state; False if there is none in this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def report(self) -> dict[str, Any]:
        """The model in `/health` and `/slots`."""
        return {
            "id": self.id,
            "state": self.state,
            "why": self.why,
            "requests": self.n_running,
            "requests_waiting": self.n_waiting,
            "loads": self.n_loads,
            "unloads": self.n_unloads,
            "unloaded_for": self.unloaded_for,
            "restarts": dict(self.restarts),
            "bytes": None if self.room is None else self.room.need_bytes,
        }


class WaitingRequest:
    """A request that waits for a model: ask whether it is `taken`, and wait for a change of its state if not."""

    def __init__(self, models: ServedModels, model: ServedModel) -> None:
        self._models, self._model, self._n_failures = models, model, model.n_failures

    async def taken(self) -> bool:
        return await self._models.taken(self._model, self._n_failures)

    async def change_within(self, seconds: float) -> bool:
        return await self._model.change_within(seconds)


def stamp_of(model: str) -> object:
    """The times and sizes of a model's files; None if it has none here."""
    path = local_path(model)
    try:
        files = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
        return [(file.name, (found := file.stat()).st_mtime_ns, found.st_size) for file in files]
    except OSError:
        return None


class ServedModels:
    """All models. `tell` sends events to the supervisor."""

    def __init__(
        self,
        options: ServeOptions,
        sockets: list[str],
        tell: Tell,
        *,
        clock: Callable[[], float] = time.monotonic,
        stamp: Callable[[str], object] = stamp_of,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`stamp`: a value that changes with the files of a model."""
        self._options, self._tell, self._clock, self._patience_s = options, tell, clock, patience_s
        self._stamp = stamp
        self.all = [ServedModel(index, names, sockets[index]) for index, names in enumerate(options.names)]
        self._stopped: Refusal | None = None

    # Names

    @property
    def first(self) -> ServedModel:
        return self.all[0]

    def find(self, name: str | None) -> ServedModel:
        """The model that a request names; the first if it names none."""
        if name is None:
            return self.first
        for model in self.all:
            if is_among(name, model.names):
                return model
        if self._options.any_model:
            return self.first
        ids = [repr(model.id) for model in self.all]
        there = f"{', '.join(ids[:-1])} and {ids[-1]} are" if len(ids) > 1 else f"{ids[0]} is"
        message = f"the model {quoted(name)} is not served here; {there}"
        raise Refusal(404, message, param="model", code="model_not_found")

    @property
    def wait_for_requests(self) -> bool:
        """Whether none is in memory or on its way there, and one would be loaded for a request."""
        begun = any(model.n_loads or model.n_ends for model in self.all)  # the first one has been tried
        states = {model.state for model in self.all}
        return begun and states <= {"unloaded", "failed"} and "unloaded" in states

    @property
    def is_stopped(self) -> bool:
        """Whether all requests have been ended."""
        return self._stopped is not None

    # Requests

    @contextmanager
    def waiting(self, model: ServedModel) -> Iterator[WaitingRequest]:
        """A request that waits for a model, until the block ends."""
        model.n_waiting += 1
        try:
            yield WaitingRequest(self, model)
        finally:
            model.n_waiting -= 1
            if not model.n_waiting:
                self._abandon(model)

    async def taken(self, model: ServedModel, n_failures: int) -> bool:
        """Begin to use a model if it is in memory; the caller must `release` it. Else have it loaded; refused if that
        has failed more than `n_failures` times, or a short while ago with the same files."""
        may_retry = False
        if model.state == "failed" and model.n_failures == n_failures:
            may_retry = await self._may_retry(model)
        self.check_stopped()
        if model.state == "ready" and not model.draining:
            model.n_running += 1
            return True
        if model.n_failures > n_failures or (model.state == "failed" and not may_retry):
            message = f"{model.id} could not be loaded: {model.why}"
            wait_s = max(1, math.ceil(model.retry_at - self._clock()))
            raise Refusal(503, message, code="model_failed", retry_after_s=wait_s)
        if model.state in ("unloaded", "failed"):
            model.change("loading")
            self._tell({"event": "load", "model": model.index})
        return False

    def release(self, model: ServedModel) -> None:
        """End a use of a model."""
        model.n_running -= 1
        model.used_at = self._clock()
        self._make_room()

    async def _may_retry(self, model: ServedModel) -> bool:
        """Whether a model that failed to load may be tried again: a try may cost another model its memory."""
        if self._clock() >= model.retry_at:
            return True
        if model.files is None or model.files.done():
            model.files = self._stamped(model)
        files, failed_files = model.files, model.failed_files
        assert failed_files is not None, "it has failed"
        await asyncio.wait((files, failed_files), timeout=LOOK_S)
        return files.done() and failed_files.done() and files.result() != failed_files.result()

    def _stamped(self, model: ServedModel) -> asyncio.Future[object]:
        """The stamp of a model's files, which a thread takes: other requests must not wait for a slow disk."""
        return asyncio.ensure_future(asyncio.to_thread(self._stamp, self._options.models[model.index]))

    def _abandon(self, model: ServedModel) -> None:
        """No request needs a model any more: if it still waits for memory, give up."""
        if model.asked_at is None or model.state != "loading":
            return
        model.asked_at = None
        self._end(model)
        self._let_stay()

    def stop(self, refusal: Refusal) -> None:
        """End all requests, also those that wait for a model."""
        self._stopped = refusal
        for model in self.all:
            model.wake()
            self._end_requests(model, refusal)

    def check_stopped(self) -> None:
        """Refuse a request if all have been ended."""
        if self._stopped is not None:
            raise self._stopped

    @staticmethod
    def _end_requests(model: ServedModel, refusal: Refusal) -> None:
        for end in tuple(model.in_flight):
            end(refusal)

    # What the supervisor tells

    def heard(self, event: ProcessEvent) -> None:
        model = self.all[event["model"]]
        match event["event"]:
            case "starting":
                model.may_load, model.asked_at = False, None
                model.change("loading", event.get("why"))
            case "needs" | "loads" as told:  # `loads`: there was no other model, so it need not ask
                model.room = Room(*(event[name] for name in Room._fields))
                model.may_load = told == "loads"
                model.asked_at = None if model.may_load else self._clock()
                self._make_room()
            case "ready":
                model.facts, model.n_loads = event, model.n_loads + 1
                model.retry_s = RETRY_S
                model.used_at = self._clock()
                model.change("ready")
                self._make_room()
            case "fault":
                model.change("loading", without_folders(event["reason"], self._options.models))
            case "ended":
                self._ended(model, event)

    def _ended(self, model: ServedModel, event: ProcessEvent) -> None:
        why = None if event["why"] is None else without_folders(event["why"], self._options.models)
        model.n_ends += 1
        unloaded = event["unloaded"]
        model.may_load, model.asked_at, model.draining = False, None, False
        model.restarts = Counter(event["restarts"])
        told = "the engine has died" if why is None else f"the engine has died: {why}"
        self._end_requests(model, Refusal(503, f"{told}; ask again", code="engine_restarting"))
        if event["starting_another"]:
            model.change("loading", f"the engine is being restarted: {why}")
        elif unloaded:
            model.change("unloaded")
        else:
            model.n_failures += 1
            model.failed_files = self._stamped(model)
            model.retry_at = self._clock() + model.retry_s
            model.retry_s = min(RETRY_MOST_S, 2 * model.retry_s)
            model.change("failed", why)
        for other in self.all:
            if other.asked_at is not None:  # there may be more memory now
                other.asked_at = None
                self._tell({"event": "look", "model": other.index})
        self._make_room()

    # Memory

    def _make_room(self) -> None:
        """Have the model that asked first for memory load, if there is enough; else unload an idle one for it."""
        if any(one.state == "unloading" for one in self.all):
            return  # what is free is known when that is over
        asking = [model for model in self.all if model.asked_at is not None and model.state == "loading"]
        if not asking:
            if not any(one.state == "loading" and not one.may_load for one in self.all):
                self._let_stay()  # none waits for memory
            return
        model = min(asking, key=lambda one: one.asked_at or 0.0)
        why = self._why_no_room(model)
        others = self._others(model)
        if why is None or not others:  # if it is alone, its process refuses what does not fit, with the figures
            model.asked_at, model.may_load = None, True
            self._let_stay()
            self._tell({"event": "go", "model": model.index})
            return
        if any(other.state == "loading" for other in others):
            return  # it may fail
        if idle := [other for other in others if other.is_idle]:
            other = min(idle, key=lambda one: one.used_at)
            other.n_unloads += 1
            other.unloaded_for = why
            self._end(other, why)
            return
        if any(other.draining for other in others):
            return  # it is idle soon
        assert model.asked_at is not None
        waits_s = self._clock() - model.asked_at
        if waits_s >= self._patience_s:
            min(others, key=lambda one: one.used_at).draining = True
        else:
            asyncio.get_running_loop().call_later(self._patience_s - waits_s + 0.01, self._make_room)

    def _let_stay(self) -> None:
        """No model waits for the memory of one that takes no further requests: it takes them again."""
        for model in self.all:
            if model.draining:
                model.draining = False
                model.wake()

    def _others(self, model: ServedModel) -> list[ServedModel]:
        """The other models that are in memory, or will be."""
        return [
            other
            for other in self.all
            if other is not model and (other.state == "ready" or (other.state == "loading" and other.may_load))
        ]

    def _why_no_room(self, model: ServedModel) -> str | None:
        """Why a model cannot be loaded beside the others that are in memory; None if it can."""
        room, most, others = model.room, self._options.models_max, self._others(model)
        assert room is not None, "it has not asked for room"
        if most is not None and len(others) >= most:
            return f"{model.id} is needed, and {most} may be in memory at once (--models-max)"
        needs = [
            (other.room.need_bytes, other.state)
            for other in others
            if other.room is not None and other.room.device == room.device
        ]
        # What a model that loads has not taken yet counts as free, and is not.
        loading = sum(need for need, state in needs if state == "loading")
        free = min(room.usable_bytes - loading, room.whole_bytes - sum(need for need, _ in needs))
        if room.need_bytes <= free:
            return None
        return f"{model.id} needs {gib(room.need_bytes)}, and {gib(max(0, free))} are free on {room.device}"

    def _end(self, model: ServedModel, why: str | None = None) -> None:
        model.change("unloading", why)
        self._tell({"event": "unload", "model": model.index, "why": why})


def restored(models: ServedModels, events: Mapping[str, list[ProcessEvent]]) -> None:
    """Bring the models of a new front to the state that their processes, which have outlived the last one, told."""
    told = [event for some in events.values() for event in some]
    # Whether there is room for a model is known when all those in memory are.
    for event in sorted(told, key=lambda event: event["event"] == "needs"):
        models.heard(event)
