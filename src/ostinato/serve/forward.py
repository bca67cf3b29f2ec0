"""From the front to the process of a model: which one a request is for, waiting until it is loaded, and its answer.

A body is not parsed here: only its model and whether it streams are read, and its model's process does the rest. While
a model loads, a stream gets comments, or lines without text in Ollama's API; another request gets its answer late.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostinato.errors import OstinatoError
from ostinato.serve.conversation import IGNORED, ignored_header
from ostinato.serve.errors import Refusal, cause_of, without_folders
from ostinato.serve.log import Record
from ostinato.serve.ollama import AnswerHead, as_message, as_response
from ostinato.serve.ollama_models import shown_file
from ostinato.serve.relay import Relay, refusal_in
from ostinato.serve.response_keeper import KeptResponses
from ostinato.serve.served_models import ServedModel, ServedModels
from ostinato.serve.service import Service
from ostinato.serve.settings import is_among, name_in_answer
from ostinato.serve.stream import EVENTS, KEEP_ALIVE, LINES, json_response, while_connected
from ostinato.serve.upstream import CLIENT, ID, UpstreamGone, asked

_DIED: Final = "the engine that answered has died; ask again"
_TOLD_S: Final = 5.0  # from the end of a connection to the supervisor's word that its process has ended
# Of the engine's answer: what its own HTTP server adds, and the front adds again.
_NOT_PASSED: Final = frozenset(
    {b"connection", b"transfer-encoding", b"date", b"server", b"x-request-id", b"request-id", b"keep-alive"}
)
_PASSED: Final = frozenset({b"host", b"content-type", b"accept", b"anthropic-version"})
_SHOW: Final = "/api/show"
_OLLAMA: Final = {"/api/chat": as_message, "/api/generate": as_response}


class _Asked(msgspec.Struct):
    """What of a body decides where it goes, and how it waits. Values of other types are refused where it goes."""

    model: Any = None
    name: Any = None  # of `/api/show`
    stream: Any = None

    @property
    def model_name(self) -> str | None:
        named = self.model if self.model is not None else self.name
        return named if isinstance(named, str) else None


_decoder: Final = msgspec.json.Decoder(_Asked)


def read_asked(body: bytes) -> _Asked:
    """What a body asks for; nothing of one that is no JSON object, which its model's process refuses."""
    try:
        return _decoder.decode(body.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Asked()


class ModelForwarder:
    """Forwards requests to the models' processes."""

    def __init__(self, service: Service, models: ServedModels, kept: KeptResponses | None) -> None:
        self.service, self.models, self._kept = service, models, kept

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        given = read_asked(body) if body else _Asked(request.query_params.get("model"))
        name = given.model_name
        model = self.models.find(name)
        if request.url.path == _SHOW and model.state != "ready":
            return await self._shown(model)
        return ForwardedAnswer(self, request, body, given, model)

    async def _shown(self, model: ServedModel) -> Response:
        options = self.service.options
        given = model.id, options.models[model.index], options.load.context
        try:
            return json_response(await self.service.in_thread(shown_file, *given))
        except OstinatoError as error:
            why = without_folders(cause_of(str(error)), options.models)
            raise Refusal(503, f"{model.id} cannot be loaded: {why}", code="model_failed") from error

    def begun(self, record: Record) -> None:
        if self._kept is not None:
            self._kept.expect(record.id)

    def ended(self, record: Record) -> None:
        if self._kept is not None:
            self._kept.forget(record.id)


class ForwardedAnswer(Response):
    """The answer of a model's process to one request."""

    def __init__(self, to: ModelForwarder, request: Request, body: bytes, given: _Asked, model: ServedModel) -> None:
        super().__init__()
        self._to, self._request, self._content, self._given, self._model = to, request, body, given, model
        self._record: Record = request.state.record
        self._record.model = model.id
        self._path = request.url.path
        self._close: Callable[[], None] | None = None  # gives up what was asked of the model's process
        self._ended_by: Refusal | None = None
        self._answered = False  # the answer has begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relay = Relay(send, self._path, self._to.service.limits.write_s)
        self._to.begun(self._record)
        try:
            if await while_connected(receive, self._pass(relay)) is None:
                self._record.outcome = "cancelled"
        except TimeoutError:
            self._record.told_elsewhere = None  # the model's process may have logged a whole answer
            self._record.outcome, self._record.error = "cancelled", "the reader took nothing for too long"
        finally:
            relay.close()
            self._to.ended(self._record)

    async def _pass(self, relay: Relay) -> bool:
        try:
            n_ends = self._model.n_ends
            try:
                await self._pass_once(relay)
            except UpstreamGone:
                if self._answered:
                    raise
                # Its process died before the answer began. The next one is asked, and no third: it may be the request
                # that they die of.
                await self._until_ended(n_ends)
                await self._pass_once(relay)
        except (Refusal, UpstreamGone) as error:
            refusal = error if isinstance(error, Refusal) else self._ended_by or _died()
            if not relay.began:
                raise refusal from error
            self._record.outcome, self._record.error = "error", str(refusal)
            await relay.fail(refusal)
        return True

    async def _pass_once(self, relay: Relay) -> None:
        self._close = self._ended_by = None
        try:
            async with self._in_use(relay):
                await self._relay(relay)
        except UpstreamGone:
            if not self._to.models.is_stopped:  # else its process lives, and sees a client that has gone
                self._record.told_elsewhere = None
            raise

    async def _until_ended(self, n_ends: int) -> None:
        """Wait until the supervisor has told that the process has ended; refused if it is the server that stops."""
        while self._model.n_ends == n_ends:
            self._to.models.check_stopped()
            if not await self._model.change_within(_TOLD_S):
                return

    # Until the model is there

    @asynccontextmanager
    async def _in_use(self, relay: Relay) -> AsyncGenerator[None, None]:
        """Have the model in memory; meanwhile, keep the connection alive."""
        models, model = self._to.models, self._model
        with models.waiting(model) as waiting:
            while not await waiting.taken():
                if not await waiting.change_within(self._next_s()):
                    self._check_deadline()
                    await self._keep_alive(relay)
        model.in_flight.add(self._end)
        try:
            yield
        finally:
            model.in_flight.discard(self._end)
            models.release(model)

    def _next_s(self) -> float:
        limits = self._to.service.limits
        left = limits.request_s - (time.perf_counter() - self._record.started)
        return max(0.0, min(limits.keep_alive_s, left))

    def _check_deadline(self) -> None:
        most = self._to.service.limits.request_s
        if time.perf_counter() - self._record.started >= most:
            message = f"{self._model.id} was not loaded in time; no request may take longer than {most:.0f} s"
            raise Refusal(408, message)

    async def _keep_alive(self, relay: Relay) -> None:
        """A part that means nothing, for a stream. Its head goes first: an error is an event from then on."""
        comment, kind = KEEP_ALIVE, EVENTS
        if shape := _OLLAMA.get(self._path):
            name = name_in_answer(self._given.model_name, self._model.names)
            comment, kind = AnswerHead(name, shape, self._to.service.clock).lines([{}]), LINES
        streams = self._given.stream if shape is None else self._given.stream is not False
        if streams is not True:
            return
        if not relay.began:
            headers = {"content-type": kind, "cache-control": "no-cache", "x-accel-buffering": "no"}
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await relay.begin(200, raw)
        await relay.part(comment)

    # The answer

    def _end(self, refusal: Refusal) -> None:
        """End the request, because the engine has died or the server stops."""
        self._ended_by = refusal
        if self._close is not None:
            self._close()

    def _opened(self, close: Callable[[], None]) -> None:
        self._close = close
        if self._ended_by is not None:
            close()

    async def _relay(self, relay: Relay) -> None:
        url, record = self._request.url, self._record
        target = self._path.encode() + (b"?" + url.query.encode() if url.query else b"")
        headers = [pair for pair in self._request.headers.raw if pair[0] in _PASSED]
        headers.append((ID.encode(), record.id.encode()))
        if record.client is not None:
            headers.append((CLIENT.encode(), record.client.encode()))
        # From now on the model's process has the request in its log, whatever becomes of it.
        record.told_elsewhere = True
        async with asked(
            self._model.socket, self._request.method, target, headers, self._content, self._opened
        ) as answer:
            self._answered = True
            if relay.began and answer.status != 200:
                raise refusal_in(_plain_status(answer.status), await answer.body())
            if not relay.began:
                await relay.begin(answer.status, self._with_notes(answer.headers))
            async for part in answer.parts():
                await relay.part(part)
        await relay.end()

    def _with_notes(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The headers of the answer; with `--any-model`, a name that another model answers to is named as ignored."""
        passed = [pair for pair in headers if pair[0] not in _NOT_PASSED]
        name = self._given.model_name
        if name is None or is_among(name, self._model.names):
            return passed
        before = [value.decode() for key, value in passed if key == IGNORED.encode()]
        noted = ignored_header(["model", *(one for value in before for one in value.split(", "))])[IGNORED]
        others = [pair for pair in passed if pair[0] != IGNORED.encode()]
        return [*others, (IGNORED.encode(), noted.encode())]


def _died() -> Refusal:
    return Refusal(503, _DIED, code="engine_restarting")


def _plain_status(status: int) -> int:
    return 503 if status == 529 else status
