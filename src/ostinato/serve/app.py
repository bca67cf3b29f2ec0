"""The HTTP application: every path with its handler, and the error responses.

Bodies are defined in `shapes.py`; the modules named after the endpoints handle them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ostinato import __version__
from ostinato.errors import OstinatoError
from ostinato.serve.body import ForwardRequest, forwarding_route, route_with
from ostinato.serve.chat import chat
from ostinato.serve.completions import complete
from ostinato.serve.conversation import IGNORED
from ostinato.serve.embeddings import embed
from ostinato.serve.errors import RETRY_AFTER_S, Refusal, error_response, refusal_of, uses_anthropic
from ostinato.serve.gateway import Gateway
from ostinato.serve.invalid import invalid_body
from ostinato.serve.log import Record
from ostinato.serve.messages import anthropic_model, count_tokens, create_message
from ostinato.serve.messages_body import CountBody, MessagesBody
from ostinato.serve.metrics import CONTENT_TYPE
from ostinato.serve.ollama import chat as ollama_chat
from ostinato.serve.ollama import embed as ollama_embed
from ostinato.serve.ollama import generate, old_embed
from ostinato.serve.ollama_body import EmbedBody, GenerateBody, OldEmbedBody, OllamaChatBody, ShowBody
from ostinato.serve.ollama_models import NOT_HERE, show, version
from ostinato.serve.rerank import rerank
from ostinato.serve.responses import delete, input_items, input_tokens, respond, retrieve
from ostinato.serve.responses_body import ResponsesBody
from ostinato.serve.service import Service
from ostinato.serve.shapes import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    TemplateBody,
    TokenizeBody,
)
from ostinato.serve.status import EngineStatus, ModelCard, ServerStatus
from ostinato.serve.stream import EVENTS, LINES, json_response
from ostinato.serve.texts import apply_template, detokenize, tokenize, tokenizer_info

_HERE: Final = Path(__file__).parent
_VENDOR: Final = _HERE / "vendor"  # libraries of the page
_ICON: Final = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><path fill="none" stroke="#2f7d6b" '
    b'stroke-width="3" stroke-linecap="round" d="M4 20c4-12 8-12 12 0s8 12 12 0"/></svg>'
)


_NOT_READY: Final = "Loading, draining or restarting; try again after `Retry-After` seconds."


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error has this shape, except those of Anthropic's and Ollama's APIs."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """Every error of Anthropic's API has this shape."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class OllamaErrorBody(BaseModel):
    """Every error of Ollama's API has this shape."""

    error: str


def _responses(
    *statuses: int, streams: str | None = None, model: type[BaseModel] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    words = {
        400: "The request cannot be done; `param` names the field.",
        401: "No valid API key.",
        403: "Opened by a name that is not this machine's.",
        404: "No such model, or no such response.",
        408: "The body came too slowly.",
        413: "The body is too large.",
        415: "The body is no JSON.",
        429: "The queue is full; try again after `Retry-After` seconds.",
        500: "The server's fault.",
        503: _NOT_READY,
        529: _NOT_READY,
    }
    made: dict[int | str, dict[str, Any]] = {
        status: {"model": model, "description": words[status]} for status in (401, 403, 500, *statuses)
    }
    if streams is not None:
        made[200] = {"content": {streams: {"schema": {"type": "string"}}}}
    return made


_GET: Final = _responses()
_POST: Final = _responses(400, 404, 408, 413, 415, 429, 503)
_STREAMED: Final = _responses(400, 404, 408, 413, 415, 429, 503, streams=EVENTS)
_ANTHROPIC: Final = _responses(400, 404, 408, 413, 415, 429, 529, model=AnthropicErrorBody)
_ANTHROPIC_STREAMED: Final = _responses(400, 404, 408, 413, 415, 429, 529, streams=EVENTS, model=AnthropicErrorBody)
_OLLAMA_GET: Final = _responses(model=OllamaErrorBody)
_OLLAMA: Final = _responses(400, 404, 408, 413, 415, 429, 503, model=OllamaErrorBody)
_OLLAMA_STREAMED: Final = _responses(400, 404, 408, 413, 415, 429, 503, streams=LINES, model=OllamaErrorBody)


class Endpoint(NamedTuple):
    """A path whose body a model answers. `also`: further paths that mean the same."""

    path: str
    body: type[BaseModel]
    answer: Callable[[Service, Any, Request], Coroutine[Any, Any, Response]]
    summary: str
    responses: dict[int | str, dict[str, Any]]
    also: tuple[str, ...] = ()


# By their tags.
ENDPOINTS: Final = {
    "answers": (
        Endpoint("/v1/chat/completions", ChatBody, chat, "Answer a conversation", _STREAMED, ("/chat/completions",)),
        Endpoint("/v1/responses", ResponsesBody, respond, "Answer with a response", _STREAMED),
        Endpoint("/v1/responses/input_tokens", ResponsesBody, input_tokens, "The size of a response's prompt", _POST),
        Endpoint("/v1/messages", MessagesBody, create_message, "Answer with a message", _ANTHROPIC_STREAMED),
        Endpoint("/v1/messages/count_tokens", CountBody, count_tokens, "The size of a message's prompt", _ANTHROPIC),
        Endpoint("/v1/completions", CompletionBody, complete, "Go on from a prompt", _STREAMED),
        Endpoint("/v1/embeddings", EmbeddingBody, embed, "A vector for each text", _POST),
        Endpoint(
            "/v1/rerank",
            RerankBody,
            rerank,
            "Documents by how well they answer a query",
            _POST,
            ("/rerank", "/v2/rerank"),  # the second is Cohere's
        ),
    ),
    "ollama": (
        Endpoint("/api/chat", OllamaChatBody, ollama_chat, "Answer a conversation", _OLLAMA_STREAMED),
        Endpoint("/api/generate", GenerateBody, generate, "Answer a prompt", _OLLAMA_STREAMED),
        Endpoint("/api/embed", EmbedBody, ollama_embed, "A vector for each text", _OLLAMA),
        Endpoint("/api/embeddings", OldEmbedBody, old_embed, "A vector for one text", _OLLAMA),
        Endpoint("/api/show", ShowBody, show, "The model's sizes and template", _OLLAMA),
    ),
    "text": (
        Endpoint("/tokenize", TokenizeBody, tokenize, "Token ids of a text", _POST),
        Endpoint("/detokenize", DetokenizeBody, detokenize, "The text of token ids", _POST),
        Endpoint("/apply-template", TemplateBody, apply_template, "The prompt of a conversation", _POST),
    ),
}
TOKENIZER_INFO: Final = "/tokenizer_info"


def create_app(
    service: Service, *, status: ServerStatus | None = None, forward: ForwardRequest | None = None
) -> ASGIApp:
    """Everything that a client can reach. `forward`: answers the requests that a model must answer, in place of the
    endpoints here; `status`: says which models there are, and how they are."""
    return guarded(bare_app(service, status=status, forward=forward), service)


def bare_app(service: Service, *, status: ServerStatus | None = None, forward: ForwardRequest | None = None) -> FastAPI:
    """The application without what stands before every endpoint: keys, hosts, bodies and ids."""
    app = FastAPI(
        title="Ostinato",
        version=__version__,
        summary="OpenAI-compatible answers from a loop that the device owns.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    told = status or EngineStatus(service)
    in_thread = service.in_body_thread
    app.router.route_class = (
        route_with(parsed, in_thread) if forward is None else forwarding_route(forward, {TOKENIZER_INFO})
    )
    for tag, endpoints in ENDPOINTS.items():
        for endpoint in endpoints:
            _add_endpoint(app, service, endpoint, tag)
    _add_kept_responses(app, service)
    _add_tokenizer_info(app, service)
    _add_ollama(app, told)
    _add_status(app, told)
    _add_pages(app)
    _add_errors(app)
    _describe(app)
    return app


def guarded(app: ASGIApp, service: Service) -> ASGIApp:
    """The application behind the front (keys, hosts, bodies, ids), with CORS for the allowed origins."""
    front: ASGIApp = Gateway(app, service)
    if service.options.cors:
        front = CORSMiddleware(
            front,
            allow_origins=service.options.cors,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # clients in browsers add headers of their own
            expose_headers=("x-request-id", "request-id", "retry-after", IGNORED),
        )
    return front


def _add_endpoint(app: FastAPI, service: Service, one: Endpoint, tag: str) -> None:
    async def endpoint(body: BaseModel, request: Request) -> Response:
        return await one.answer(service, body, request)

    # FastAPI takes the type of the body and the name of the operation from here.
    endpoint.__annotations__["body"] = one.body
    endpoint.__name__ = one.answer.__name__
    words: dict[str, Any] = {"tags": [tag], "summary": one.summary, "responses": one.responses}
    app.post(one.path, **words)(endpoint)
    for path in one.also:
        app.post(path, include_in_schema=False)(endpoint)


def _add_tokenizer_info(app: FastAPI, service: Service) -> None:
    @app.get(TOKENIZER_INFO, tags=["text"], summary="Special tokens and chat template", responses=_responses(404, 503))
    async def info(request: Request, model: str | None = None) -> Response:
        return tokenizer_info(service, model, request)


def _add_kept_responses(app: FastAPI, service: Service) -> None:
    @app.get("/v1/responses/{id}/input_items", tags=["answers"], summary="Its input", responses=_responses(400, 404))
    async def list_input_items(
        id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        return input_items(service, id, limit, order, after)

    @app.get("/v1/responses/{id}", tags=["answers"], summary="A kept response", responses=_responses(400, 404))
    async def response(id: str, stream: bool = False) -> Response:
        return retrieve(service, id, stream)

    @app.delete("/v1/responses/{id}", tags=["answers"], summary="Forget a kept response", responses=_responses(404))
    async def forget(id: str) -> Response:
        return delete(service, id)


def _add_ollama(app: FastAPI, status: ServerStatus) -> None:
    @app.get("/api/tags", tags=["ollama"], summary="What is served", responses=_OLLAMA_GET)
    async def api_tags() -> Response:
        return json_response({"models": await status.tags()})

    @app.get("/api/ps", tags=["ollama"], summary="What is in memory", responses=_OLLAMA_GET)
    async def api_ps() -> Response:
        return json_response({"models": await status.loaded()})

    @app.get("/api/version", tags=["ollama"], summary="The version of Ollama's API", responses=_OLLAMA_GET)
    async def api_version() -> Response:
        return json_response(version())

    for name in NOT_HERE:
        _refuse_path(app, f"/api/{name}", "DELETE" if name == "delete" else "POST", NOT_HERE[name])
    _refuse_path(app, "/api/blobs/{digest}", "POST", NOT_HERE["create"])


def _refuse_path(app: FastAPI, path: str, method: str, why: str) -> None:
    @app.api_route(path, methods=[method], include_in_schema=False)
    async def refused() -> Response:
        raise Refusal(400, why)


def _add_status(app: FastAPI, status: ServerStatus) -> None:
    def entry(card: ModelCard, request: Request) -> dict[str, Any]:
        if uses_anthropic(request.scope):
            return anthropic_model(card.id, card.created, card.context)
        known = {} if card.context is None else {"max_model_len": card.context}
        named = {"aliases": card.aliases} if card.aliases else {}
        return {"id": card.id, "object": "model", "created": card.created, "owned_by": "ostinato", **known, **named}

    @app.get("/models", include_in_schema=False)
    @app.get("/v1/models", tags=["status"], summary="What is served", responses=_GET)
    async def models(request: Request) -> Response:
        cards = status.cards()
        entries = [entry(card, request) for card in cards]
        if uses_anthropic(request.scope):
            ends = {"first_id": cards[0].id, "last_id": cards[-1].id}
            return json_response({"data": entries, **ends, "has_more": False})
        return json_response({"object": "list", "data": entries})

    @app.get("/v1/models/{id:path}", tags=["status"], summary="One model", responses=_responses(404))
    async def model(id: str, request: Request) -> Response:
        return json_response(entry(status.card(id), request))

    not_ready: dict[int | str, dict[str, Any]] = {503: {"description": _NOT_READY}}

    def told(facts: dict[str, Any], ready: bool) -> Response:
        reply = json_response(facts, 200 if ready else 503)
        if not ready:
            reply.headers["retry-after"] = str(RETRY_AFTER_S)
        return reply

    @app.get("/health", tags=["status"], summary="What runs, and whether it is ready", responses={**_GET, **not_ready})
    async def health() -> Response:
        facts = await status.health()
        return told(facts, facts["ready"])

    @app.get("/ready", tags=["status"], summary="Whether requests are taken", responses={**_GET, **not_ready})
    async def ready() -> Response:
        ready = (await status.health())["ready"]
        return told({"ready": ready}, ready)

    @app.get("/live", tags=["status"], summary="Whether the process answers", responses=_GET)
    async def live() -> Response:
        return json_response({"live": True})

    @app.get("/slots", tags=["status"], summary="The requests in slots, KV pages, gaps between tokens", responses=_GET)
    async def slots() -> Response:
        return json_response(await status.slots())

    page: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", tags=["status"], summary="For Prometheus", responses={**_GET, **page})
    async def metrics() -> Response:
        return Response(await status.metrics(), media_type=CONTENT_TYPE)


# Pages


def _add_pages(app: FastAPI) -> None:
    page, docs = _page("page.html"), _page("docs.html")

    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        """The page for browsers, which ask for HTML; Ollama's clients look whether these words are here."""
        wants_page = "text/html" in request.headers.get("accept", "")
        return page() if wants_page else Response("Ollama is running", media_type="text/plain", headers=_BY_ACCEPT)

    @app.get("/docs", include_in_schema=False)
    async def description() -> Response:
        return docs()

    scripts = {path.relative_to(_VENDOR).as_posix(): path.read_bytes() for path in _VENDOR.rglob("*.js")}

    @app.get("/vendor/{path:path}", include_in_schema=False)
    async def script(path: str) -> Response:
        if path not in scripts:
            raise HTTPException(404)
        return Response(scripts[path], media_type="text/javascript", headers=_SCRIPT_HEADERS)

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(_ICON, media_type="image/svg+xml", headers={"cache-control": "max-age=86400"})


def _page(name: str) -> Callable[[], Response]:
    """What makes responses with a page."""
    content = (_HERE / name).read_bytes()
    headers = {"content-security-policy": policy_for(content.decode()), **_PAGE_HEADERS}
    return lambda: Response(content, media_type="text/html", headers=headers)


_BY_ACCEPT: Final[Mapping[str, str]] = {"vary": "accept", "cache-control": "no-cache"}
_PAGE_HEADERS: Final[Mapping[str, str]] = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    **_BY_ACCEPT,
}
# The folders of `vendor` are named after versions, so a file never changes.
_SCRIPT_HEADERS: Final[Mapping[str, str]] = {
    "x-content-type-options": "nosniff",
    "cache-control": "max-age=31536000, immutable",
}


def policy_for(page: str) -> str:
    """What a page may load: its own script and style, identified by their hashes, and this server's scripts and
    answers."""

    def sums(tag: str) -> str:
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        made = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{each}'" for each in made)

    return (
        f"default-src 'none'; script-src 'self' {sums('script')}; style-src {sums('style')}; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


# Errors


def _add_errors(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        refusal = _refusal(request, error)
        if refusal.status >= 500 and isinstance(error, OstinatoError):
            raise error  # the front answers and logs it
        record: Record = request.state.record
        record.error = str(refusal)[:500]
        return error_response(refusal, request.scope, getattr(error, "headers", None))

    async def ours(request: Request, error: Exception) -> Response:
        """Starlette sends this and raises the error again: the front logs it."""
        return error_response(refusal_of(error), request.scope)

    app.add_exception_handler(Exception, ours)
    for kind in (Refusal, OstinatoError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, refused)


def _refusal(request: Request, error: Exception) -> Refusal:
    if isinstance(error, RequestValidationError):
        # Of an empty body, or of the parameters in the URL: their places begin with the name of where they stand.
        return invalid_body([{**one, "loc": one["loc"][1:]} for one in error.errors()])
    if not isinstance(error, HTTPException):
        return refusal_of(error)
    if isinstance(error.__cause__, Refusal):
        return error.__cause__  # of the body, when the endpoint came to read it
    words = {
        404: f"there is no {request.url.path} here; /docs lists what there is",
        405: f"{request.method} is not for {request.url.path}",
    }
    return Refusal(error.status_code, words.get(error.status_code, str(error.detail)))


def parsed(kind: type[BaseModel], body: bytes) -> BaseModel:
    """A body as the record of its endpoint."""
    try:
        # Decoded here: the counts of the body hold for UTF-8, and `json` would take other encodings too.
        given = json.loads(body.decode("utf-8-sig"))
        if _ESCAPED_HALF.search(body):  # an answer may repeat what was sent, and half a character has no UTF-8
            json.dumps(given, ensure_ascii=False).encode()
        return kind.model_validate(given)
    except json.JSONDecodeError as error:
        raise Refusal(400, f"the body is no JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise Refusal(400, "the body cannot be read: it is no UTF-8") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        raise Refusal(400, f"the body has half a character: {half} without its other half") from error
    except RecursionError as error:
        raise Refusal(400, "the body cannot be read: it is nested too deep") from error
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None
    except ValueError as error:
        raise Refusal(400, "the body cannot be read: a number in it is too long") from error


_ESCAPED_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def _describe(app: FastAPI) -> None:
    """The OpenAPI document without FastAPI's own error, which is never sent: 400 is."""
    made = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                document.get("components", {}).get("schemas", {}).pop(name, None)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]  # FastAPI's own way to change it
