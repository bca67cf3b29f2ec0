"""What the server takes although OpenAI's API does not say so, and what it says of the rest: each line of the list in
docs/serving.md."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.running import Running

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
FEW: Any = {"max_tokens": 8, "seed": 3, "temperature": 1.0}
IGNORED = "x-ostinato-ignored"


def answered(server: Running, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


def refusal(server: Running, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


# Paths, methods and hosts


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/health", "/live", "/ready", "/metrics", "/slots"])
def test_head_is_answered_where_get_is_and_without_a_body(server: Running, path: str) -> None:
    with server.http() as http:
        head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


def test_head_is_refused_where_get_is(server: Running) -> None:
    with server.http() as http:
        assert http.head("/v1/models/tiny").status_code == 200
        assert (http.head("/nowhere").status_code, http.head(CHAT).status_code) == (404, 405)
    assert {line["method"] for line in server.log[-3:]} == {"HEAD"}


def test_chats_and_models_are_found_without_v1(server: Running) -> None:
    body = {"messages": HELLO, **FEW}
    assert answered(server, body, "/chat/completions")["digest"] == answered(server, body)["digest"]
    assert server.get("/models").json() == server.get("/v1/models").json()


@pytest.mark.parametrize("host", ["host.docker.internal:8000", "HOST.docker.internal", "host.containers.internal"])
def test_containers_reach_the_server_by_their_name_for_this_machine(server: Running, host: str) -> None:
    assert server.get("/v1/models", host=host).status_code == 200
    assert server.get("/v1/models", host=f"{host.partition(':')[0]}.example").status_code == 403


def test_a_preflight_is_told_the_flag(server: Running) -> None:
    asking = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    with server.http(headers=asking) as http:
        reply = http.options(CHAT)
    assert reply.status_code == 403
    assert "--cors https://chat.example" in reply.json()["error"]["message"]
    assert "access-control-allow-origin" not in reply.headers
