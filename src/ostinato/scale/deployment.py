"""The Ray Serve application: an ingress that checks and routes, and replicas that each hold one engine.

    client -> Serve's proxy -> Ingress (the server's own front: key, host, body) -> Engine (the server's application)

The ingress reads the whole request, because its content decides the replica; the answer is streamed back. If a client
disconnects, its request is cancelled. If a replica dies, its streams end with one error event; a request without any
byte of its answer is retried on another replica.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from typing import Any, Final

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from ostinato.errors import BadOption
from ostinato.llm import LLM
from ostinato.scale.local import Call, LocalServer
from ostinato.scale.prefix import keys_of_body
from ostinato.scale.settings import ScaleOptions
from ostinato.serve import merged as pages
from ostinato.serve.app import bare_app, guarded
from ostinato.serve.errors import OUR_FAULT, Refusal
from ostinato.serve.front import FrontService
from ostinato.serve.log import Record, write_line
from ostinato.serve.metrics import CONTENT_TYPE
from ostinato.serve.relay import Relay
from ostinato.serve.service import IN_PREPARATION
from ostinato.serve.settings import ServeOptions
from ostinato.serve.stream import json_response, while_connected

ENGINE: Final = "Engine"
INGRESS: Final = "Ingress"
_REPORT_S: Final = 5.0
_ATTEMPTS: Final = 3  # per request, if replicas die before the answer begins
_FORWARDED: Final = frozenset({b"host", b"content-type", b"accept", b"anthropic-version"})
# Of texts that are computed beside the answers no prefix stays in memory.
_WITHOUT_PREFIX: Final = frozenset(
    {"/v1/embeddings", "/api/embed", "/api/embeddings", "/v1/rerank", "/v2/rerank", "/rerank"}
)
_GONE: Final = "the replica that answered has died; ask again"


def application(options: ServeOptions, scaling: ScaleOptions) -> Any:
    """The application, bound and ready for `serve.run` or `serve deploy`."""
    if options.keep_responses:
        raise BadOption(
            f"keep_responses is {options.keep_responses}; replicas keep no responses, because another replica than "
            "the one that has it may be asked for it; leave it out"
        )
    options = replace(options, keep_responses=0)
    load = options.load
    capacity = load.slots + load.queue + IN_PREPARATION
    routers = {"prefix": "PrefixRouter", "round_robin": "RoundRobinRouter"}
    imbalance = scaling.imbalance if scaling.imbalance is not None else max(2, load.slots // 2)
    number: dict[str, Any] = {"num_replicas": scaling.replicas}
    if scaling.most > scaling.replicas:
        number = {
            "autoscaling_config": {
                "min_replicas": scaling.replicas,
                "max_replicas": scaling.most,
                # A request without a slot waits: with more than this per replica, at least one waits.
                "target_ongoing_requests": load.slots,
                "upscale_delay_s": 5.0,
                "downscale_delay_s": scaling.cool_down_s,
            }
        }
    engine = serve.deployment(
        EngineReplica,
        name=ENGINE,
        **number,
        max_ongoing_requests=capacity,
        max_queued_requests=capacity,
        max_constructor_retry_count=2,
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=scaling.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": scaling.cpus, "num_gpus": scaling.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=f"ostinato.scale.router.{routers[scaling.routing]}",
            request_router_kwargs={"imbalance": imbalance},
        ),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name=INGRESS,
        num_replicas=scaling.ingresses,
        max_ongoing_requests=2 * capacity * scaling.most,
        graceful_shutdown_timeout_s=scaling.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(options.to_json(), asdict(scaling), engine.bind(options.to_json(), scaling.gather_s))


class EngineReplica:
    """One replica: the server's application over one model, in a process of its own."""

    async def __init__(self, options: str, gather_s: float) -> None:  # type: ignore[misc]  # Serve awaits it
        given = ServeOptions.from_json(options)
        # Each part of an answer costs time in three processes.
        self._gather_s = gather_s
        self._server = LocalServer(given)
        self._name = serve.get_replica_context().replica_id.unique_id

        def load() -> LLM:
            return LLM(
                given.model, load=given.load, talk=lambda text: write_line({"replica": self._name, "note": text})
            )

        self._server.service.open(await asyncio.get_running_loop().run_in_executor(None, load))

    async def answer(self, call: Call) -> AsyncGenerator[Any, None]:
        """The status, the headers and this replica's name, then the parts of the body."""
        async with aclosing(self._server.messages(call, self._gather_s)) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"]), self._name
                elif body := message.get("body", b""):
                    yield body

    async def report(self, page: str) -> dict[str, Any]:
        """This replica's part of a page about all replicas."""
        service, name = self._server.service, self._name
        if page == "metrics":
            return {"replica": name, "page": service.metrics.page().decode()}
        if page == "health":
            return {"replica": name, "pid": os.getpid(), **service.health()}
        _, *body = [part async for part in self.answer(Call("GET", "/slots"))]
        return {"replica": name, **json.loads(b"".join(body))}

    async def check_health(self) -> None:
        """Called by Serve: a replica whose engine died is replaced."""
        service = self._server.service
        stats = service.stats()
        if stats is not None and stats.fault is not None:
            service.die(stats.fault)
        if service.state == "dead":
            raise RuntimeError(service.why)


def _write_refusals(line: dict[str, Any]) -> None:
    """A request that a replica answered is in that replica's log, under the same id."""
    if line["status"] >= 400:
        write_line({"replica": "ingress", **line})


class Ingress:
    """The deployment that Serve's proxy passes requests to."""

    def __init__(self, options: str, scaling: dict[str, Any], engine: DeploymentHandle) -> None:
        given, self._scaling = ServeOptions.from_json(options), ScaleOptions(**scaling)
        self._front = FrontService(given, self._scaling.most, write=_write_refusals)
        self._engine = engine

    def __serve_build_asgi_app__(self) -> Any:
        return guarded(Forwarder(self._front, self._engine), self._front)

    async def drain(self) -> int:
        """Accept no more requests; return how many are running."""
        self._front.drain()
        return self._front.n_running

    async def running(self) -> int:
        return self._front.n_running


class Forwarder:
    """The application behind the ingress's front: forwards to a replica, and answers the pages about all replicas."""

    def __init__(self, front: FrontService, engine: DeploymentHandle) -> None:
        self._front = front
        self._paths = bare_app(front)
        self._engine = engine
        self._stream = engine.options(stream=True).answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        page = await self._page_of_all(scope["path"]) if scope["method"] == "GET" else None
        if page is not None:
            await page(scope, receive, send)
            return
        if not any(route.matches(scope)[0] == Match.FULL for route in self._paths.routes):
            await self._paths(scope, receive, send)  # there is no such path, or it has another method
            return
        body = (await receive()).get("body", b"") if scope["method"] == "POST" else b""
        record: Record = scope["state"]["record"]
        headers = tuple((name, value) for name, value in scope["headers"] if name in _FORWARDED)
        call = Call(scope["method"], scope["path"], body, scope["query_string"], headers, record.client, record.id)
        if body and call.path not in _WITHOUT_PREFIX:
            call = replace(call, prefix=await self._front.in_thread(keys_of_body, body))
        if await while_connected(receive, self._pass(call, send, record)) is None:
            record.outcome = "cancelled"

    async def _pass(self, call: Call, send: Send, record: Record) -> bool:
        for left in reversed(range(_ATTEMPTS)):
            sending = _Sending(send, call.path)
            try:
                await self._answer(call, sending)
                return True
            except NoRoom as full:
                if not left or full.replica in call.full:
                    raise Refusal(429, str(full)) from None
                call = replace(call, full=(*call.full, full.replica))
            except (RayError, BackPressureError) as error:
                if sending.began:
                    await sending.fail(Refusal(503, _GONE, code="engine_restarting"))
                    record.outcome, record.error = "error", type(error).__name__
                    return True
                if isinstance(error, BackPressureError):
                    raise Refusal(429, "every replica's queue is full; try again later") from error
                if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
                    raise Refusal(500, OUR_FAULT) from error
                if not left:
                    raise Refusal(503, _GONE, code="engine_restarting") from error
                await asyncio.sleep(0.2)
        return True

    async def _answer(self, call: Call, sending: _Sending) -> None:
        answer = self._stream.remote(call)
        ended = False
        try:
            async for part in answer:
                await sending.part(part)
            ended = True
            await sending.end()
        finally:
            if not ended:
                with suppress(RayError, RequestCancelledError, TaskCancelledError):
                    answer.cancel()

    async def _page_of_all(self, path: str) -> Response | None:
        front = self._front
        match path:
            case "/live":
                return json_response({"live": True})
            case "/metrics":
                texts = {one["replica"]: one["page"] for one in await self._reports("metrics")}
                texts["ingress"] = front.metrics.page().decode()
                return Response(pages.merged_metrics(texts), media_type=CONTENT_TYPE)
            case "/slots":
                return json_response(pages.merged_slots(await self._reports("slots")))
            case "/health" | "/ready":
                facts = pages.merged_health(await self._reports("health"), draining=front.state == "draining")
                content = facts if path == "/health" else {"ready": facts["ready"]}
                return json_response(content, 200 if facts["ready"] else 503)
        return None

    async def _reports(self, page: str) -> list[dict[str, Any]]:
        """The pages of every replica that answers in time."""
        answers = self._engine.broadcast("report", page)
        try:
            found: list[Any] = await answers.results_async(timeout_s=_REPORT_S, return_exceptions=True)
        except (TimeoutError, RayError):
            return []
        good = [one for one in found if isinstance(one, dict)]
        return sorted(good, key=lambda one: str(one["replica"]))


class NoRoom(Exception):
    """A replica's queue is full; another's may not be."""

    def __init__(self, replica: str) -> None:
        super().__init__("too many requests wait already; try again later")
        self.replica = replica


class _Sending:
    """An answer that is forwarded to the client. Its head waits for the first part: until then a retry is possible."""

    def __init__(self, send: Send, path: str) -> None:
        self._relay = Relay(send, path)
        self._head: tuple[int, list[tuple[bytes, bytes]], str] | None = None

    @property
    def began(self) -> bool:
        return self._relay.began

    async def part(self, part: Any) -> None:
        if not isinstance(part, tuple):
            await self._begin()
            await self._relay.part(part)
            return
        if part[0] == 429:
            raise NoRoom(part[2])
        self._head = part

    async def end(self) -> None:
        await self._begin()
        await self._relay.end()

    async def fail(self, refusal: Refusal) -> None:
        await self._relay.fail(refusal)

    async def _begin(self) -> None:
        if not self.began:
            assert self._head is not None, "a replica sent a body without a head"
            await self._relay.begin(*self._head[:2])


async def _live(receive: Receive, send: Send) -> None:
    """The ingress needs no startup and no shutdown."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
