"""Errors in OpenAI's shape: one JSON object with a message, a type, a field and a code; and in those of Anthropic and
Ollama, for those who use their APIs.

Every error of ours has its HTTP status (`ostinato.errors`); any other exception becomes an internal error without
details: no stack trace leaves the process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from ostinato.errors import BadInput, OstinatoError, PromptTooLong
from ostinato.files.store import home, is_name

RETRY_AFTER_S: Final = 1
TOO_LONG: Final = "context_length_exceeded"  # the code of a prompt that the context cannot hold
OUR_FAULT: Final = "this is the server's fault; the operator's log has the details"

# The type and the code of a status.
_KINDS: Final = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "host_not_allowed"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "timeout"),
    413: ("invalid_request_error", "too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "queue_full"),
    500: ("server_error", "internal_error"),
    503: ("service_unavailable_error", "not_ready"),
}
# The type of a status in Anthropic's shape.
_ANTHROPIC: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
NO_THREADS: Final = "thread_unsupported_request"  # Anthropic's code; its clients then send whole conversations
_OVERLOADED: Final = 529  # Anthropic's status for "not now"
# What the packages above call a value, and the field that held it.
_FIELDS: Final = {
    **{name: name for name in ("messages", "prompt", "tools", "tool_choice")},
    **{name: name for name in ("logit_bias", "stop", "stop_token_ids", "min_tokens", "seed")},
    **dict.fromkeys(("schema", "json_mode", "regex", "choice", "grammar"), "response_format"),
}


class Refusal(Exception):
    """A request that is answered with an error: its HTTP status, and the fields of OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        """`retry_after_s`: when a client may try again, if the status says that it may."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        other = ("invalid_request_error" if self.status < 500 else "server_error", None)
        kind, code = _KINDS.get(self.status, other)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or code}}


def shown(value: Any) -> str:
    """A value of a client in a sentence.

    >>> shown("a"), shown(True), shown([None])
    ("'a'", 'true', '[null]')
    """
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else text[:100] + "..."


def refusal_of(error: Exception) -> Refusal:
    """An error as a client gets it."""
    if isinstance(error, Refusal):
        return error
    if not isinstance(error, OstinatoError):
        return Refusal(500, OUR_FAULT)
    status = error.http_status
    if status == 500 and not isinstance(error, BadInput):
        return Refusal(500, OUR_FAULT)
    param = _field_named_in(str(error)) if isinstance(error, BadInput) else None
    code = "engine_restarting" if status == 503 else None
    if isinstance(error, PromptTooLong):
        code = TOO_LONG
    return Refusal(status, told(error), param=param, code=code)


@contextmanager
def renamed(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors of what all APIs share, with the names that these fields have in the request."""
    try:
        yield
    except (Refusal, OstinatoError) as error:
        refusal = refusal_of(error)
        name = fields.get(re.split(r"[.\[]", refusal.param or "")[0])
        if refusal.status >= 500 or name is None:
            raise
        raise Refusal(refusal.status, refusal.message, param=name, code=refusal.code) from error


def told(error: OstinatoError) -> str:
    """An error's message in words for a client, who did not start this server."""
    if isinstance(error, PromptTooLong):
        return error.told("ask the server's operator for a larger context")
    return str(error) if isinstance(error, BadInput) else without_folders(str(error))


def cause_of(message: str) -> str:
    """What was wrong, of a message for the operator: what follows a semicolon is advice, in the words of the command
    line, and what follows a first line is a list for a terminal.

    >>> cause_of("the weights need 12 GiB and cpu has 10 GiB to give; take a smaller model")
    'the weights need 12 GiB and cpu has 10 GiB to give'
    """
    return re.split("; |\n", message, maxsplit=1)[0]


def without_folders(message: str, models: Iterable[str] = ()) -> str:
    """A message about files, with their names and without the folders that are known: those of the served models, of
    the store and of the operator. Not for a message that quotes a client, whose text may look like them.

    >>> without_folders("/models/q4/a.gguf: it is damaged", ["/models/q4/a.gguf"])
    'a.gguf: it is damaged'
    """
    models = tuple(models)
    beside = [Path(os.path.expanduser(model)).parent for model in models if not is_name(model)]
    folders = {str(folder) for one in beside for folder in (one, one.absolute()) if folder.name}
    if any(map(is_name, models)):
        folders.add(str(home()))
    for folder in sorted(folders, key=len, reverse=True):
        message = re.sub(rf"(?<![\w./~-]){re.escape(folder)}/", "", message)
    if any(map(is_name, models)):
        message = message.replace(str(home()), "the store")
    own = os.path.expanduser("~")
    return message.replace(f"{own}/", "~/") if Path(own).name else message


def _field_named_in(message: str) -> str | None:
    """An error about a caller's value begins with the value's name, which is the field's name or maps to it."""
    found = re.match(r"(?:this |the )?([a-z_]+)((?:\[\d+\]|\.[a-z_]+)*)", message)
    if found is None or found[1] not in _FIELDS:
        return None
    return _FIELDS[found[1]] + found[2]


def error_response(refusal: Refusal, scope: Scope, headers: Mapping[str, str] | None = None) -> Response:
    """The error as an HTTP response in the shape of the request's API; `Retry-After` if the client may try again."""
    more = dict(headers or {})
    if refusal.status in (429, 503):
        more.setdefault("retry-after", str(refusal.retry_after_s))
    status, body = refusal.status, refusal.body()
    if uses_anthropic(scope):
        status, body = anthropic_status(refusal), anthropic_error(refusal, scope["state"]["record"].id)
    elif uses_ollama(scope):
        body = ollama_error(refusal)
    # The standard library's JSON can encode any field name that a client sent, even a lone surrogate.
    return Response(json.dumps(body).encode(), status, more, media_type="application/json")


# Anthropic's shape


def uses_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API: by its path, or by the version that its clients send with each."""
    path: str = scope["path"]
    return path == "/v1/messages" or path.startswith("/v1/messages/") or "anthropic-version" in Headers(scope=scope)


def anthropic_status(refusal: Refusal) -> int:
    return _OVERLOADED if refusal.status == 503 else refusal.status


def anthropic_error(refusal: Refusal, id: str | None = None) -> dict[str, Any]:
    """An error in Anthropic's shape. `id`: of the request."""
    status = anthropic_status(refusal)
    kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": {"error_code": NO_THREADS}} if refusal.code == NO_THREADS else {}
    # There is no code for it in this shape: clients look for these words.
    message = f"prompt is too long: {refusal.message}" if refusal.code == TOO_LONG else refusal.message
    return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": id}


# Ollama's shape


def uses_ollama(scope: Scope) -> bool:
    """Whether a request is one of Ollama's API: by its path."""
    path: str = scope["path"]
    return path.startswith("/api/")


def ollama_error(refusal: Refusal) -> dict[str, Any]:
    """An error in Ollama's shape."""
    return {"error": refusal.message}
