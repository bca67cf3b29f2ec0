"""The middleware before every endpoint: request id and log line, checks of host name, key and body.

Plain ASGI, so that streams pass through untouched. Any exception behind it is answered here in the shape of
the request's API, and no stack trace leaves the process.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.serve.body import ClientGone, check_counts, may_exceed, received
from ostinato.serve.errors import Refusal, error_response, refusal_of, uses_anthropic, uses_ollama
from ostinato.serve.log import Record
from ostinato.serve.service import Service
from ostinato.serve.settings import is_loopback

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/live"})
# The first paths that a browser opens: it asks for the key and sends it with all later requests.
_PAGES: Final = frozenset({"/", "/docs"})
# What containers call the machine that they run on; `.internal` is no domain that a web page could be served from.
_FROM_CONTAINERS: Final = frozenset({"host.docker.internal", "gateway.docker.internal", "host.containers.internal"})
# Public libraries of the page. A browser does not always send with a script the key that it was given for its page.
_LIBRARIES: Final = "/vendor/"
_JSON: Final = "application/json"
# What programs call a body that they were given no type for, and the headers by which browsers tell their requests.
_OF_CURL: Final = frozenset({"", "application/x-www-form-urlencoded"})
_FROM_PAGES: Final = frozenset({"origin", "sec-fetch-site"})


def holds_key(headers: Headers, sums: Sequence[bytes]) -> bool:
    """Whether the headers hold a key with one of these sums: in an `Authorization`, as a bearer token or as a password,
    or as `x-api-key`; in constant time."""
    keys = (_key_in(headers.get("authorization", "")), headers.get("x-api-key", "").encode())
    return any([hmac.compare_digest(_sum(key), known) for key in keys for known in sums])


def _sum(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key_in(authorization: str) -> bytes:
    scheme, _, rest = authorization.partition(" ")
    match scheme.lower():
        case "bearer":
            return rest.strip().encode()
        case "basic":
            try:
                return base64.b64decode(rest, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return b""
    return b""


def is_address_or_local(host: str) -> bool:
    """Whether a `Host` is an address or a local name; a web page of another site can only send its own name.

    >>> is_address_or_local("localhost:8000"), is_address_or_local("[::1]:80"), is_address_or_local("evil.example")
    (True, True, False)
    """
    name = host.rsplit("]", 1)[0].lstrip("[") if host.startswith("[") else host.partition(":")[0].lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost") or name in _FROM_CONTAINERS:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Gateway:
    """The middleware."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        options = service.options
        self._key_sums = [_sum(key.encode()) for key in options.keys]
        # Without a key, a web page whose domain name resolves to this machine could use it (DNS rebinding).
        self._checks_host = not options.keys and is_loopback(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        record = Record(self._service.make_id(), scope["method"], scope["path"], client[0] if client else None)
        state = scope.setdefault("state", {})
        record.told_elsewhere = state.get("told_elsewhere")
        state["record"] = record
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server that holds the connection sends no body to a HEAD

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
                if uses_anthropic(scope):
                    MutableHeaders(scope=message)["request-id"] = record.id
            await send(message)

        try:
            await self._pass(scope, receive, send_with_id, record)
        except Exception as error:
            await self._answer(error, scope, receive, send_with_id, record)
        finally:
            self._tell(scope, record)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        headers = Headers(scope=scope)
        self._check(scope, headers)
        if scope["method"] == "POST":
            if _is_of_curl(scope, headers):
                headers = _call_json(scope)
            receive = await self._with_body(headers, receive)
            self._service.begin()
            try:
                await self._app(scope, receive, send)
            finally:
                self._service.end()
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            # With --cors, preflights are answered before this.
            origin = headers.get("origin", "")[:200]
            message = f"pages of {origin!r} may not use this server; its operator allows them with --cors {origin}"
            raise Refusal(403, message, code="origin_not_allowed")
        if self._checks_host and not is_address_or_local(headers.get("host", "localhost")):
            raise Refusal(
                403,
                f"the host {headers['host']!r} is no name of this machine; open it by its address, or guard the server "
                "with --api-key",
            )
        path: str = scope["path"]
        guarded = self._key_sums and path not in OPEN_PATHS and not path.startswith(_LIBRARIES)
        if guarded and not holds_key(headers, self._key_sums):
            raise Refusal(401, "no valid API key was given; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")

    async def _with_body(self, headers: Headers, receive: Receive) -> Receive:
        """Read the whole body under its limits; later readers get the body, and then the client's disconnect.

        The refusal of a wrong type is for those who read it: a path that does not exist is told so first."""
        service = self._service
        body = await received(headers, receive, service.limits)
        if may_exceed(body, service.limits):
            await service.in_body_thread(check_counts, body, service.limits)
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            _check_type(headers)
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    async def _answer(self, error: Exception, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        """Answer an error that no handler caught; once the answer has begun, nothing can be sent."""
        if isinstance(error, ClientGone):
            record.outcome = "cancelled"
            return
        refusal = refusal_of(error)
        record.error = record.error or f"{type(error).__name__}: {error}"
        if refusal.status == 500:
            traceback.print_exception(error, file=sys.stderr)
        if record.status:
            record.outcome = record.outcome or "error"
            return
        headers = {}
        if refusal.status == 401:
            kind = "Basic" if scope["path"] in _PAGES else "Bearer"
            headers["www-authenticate"] = f'{kind} realm="ostinato"'
        if refusal.status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        await error_response(refusal, scope, headers)(scope, receive, send)

    def _tell(self, scope: Scope, record: Record) -> None:
        if record.told_elsewhere:
            return
        route = scope.get("route")
        path = getattr(route, "path", None) or "other"
        if getattr(route, "body_field", None) is not None:  # an endpoint that a model answers
            record.model = record.model or self._service.only_model
        metrics = self._service.metrics
        metrics.requests.labels(path, record.ended_as).inc()
        metrics.duration.observe(time.perf_counter() - record.started)
        if path not in OPEN_PATHS and path not in ("/metrics", "/slots"):  # polled every few seconds
            self._service.write(record.line())


def _kind_of(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_of_curl(scope: Scope, headers: Headers) -> bool:
    """Whether a body is one of Ollama's API as `curl -d` sends it: as a form. A browser, which sends the forms of any
    page, always says whose page it was."""
    return uses_ollama(scope) and _kind_of(headers) in _OF_CURL and not _FROM_PAGES & set(headers.keys())


def _call_json(scope: Scope) -> Headers:
    """The headers of a request, changed: they say that the body is JSON, to all who read them after this."""
    named = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    scope["headers"] = [*named, (b"content-type", _JSON.encode())]
    return Headers(scope=scope)


def _check_type(headers: Headers) -> None:
    """Refuse what is not sent as JSON: a page of another site can have a browser send a form here, and no JSON."""
    kind = _kind_of(headers)
    if kind != _JSON:
        raise Refusal(415, f"the body's type is {kind or 'not given'}; send Content-Type: {_JSON}")
    packed = headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        raise Refusal(415, f"the body is packed with {packed}; send it as it is, without Content-Encoding")
