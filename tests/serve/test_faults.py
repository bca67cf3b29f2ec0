"""What a stranger may try: each is refused or answered in bounded time, and the next client notices nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.text import template
from tests.cli import tiny_model
from tests.serve.hostile import NOISE, SCHEMAS
from tests.serve.running import Running, serving

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
LOOPING = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.fixture(autouse=True)
def _the_next_client_is_answered(server: Running) -> Iterator[None]:
    yield
    assert server.post(CHAT, {"messages": HELLO, "max_tokens": 2}).status_code == 200


@pytest.mark.slow
def test_a_template_that_loops_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "RENDER_SECONDS", 1.0)

    def looping(metadata: dict[str, Any]) -> None:
        source = "{% if messages[0]['content'] == 'loop' %}" + LOOPING + "{% endif %}ok"
        metadata["tokenizer.chat_template"].value = source

    model = tiny_model.write(tmp_path / "looping.gguf", context=256, change=looping)
    with serving(model, llm={"context": 128, "slots": 1}) as server:
        began = time.monotonic()
        reply = server.post(CHAT, {"messages": [{"role": "user", "content": "loop"}]})
        assert reply.status_code == 400
        assert "seconds" in reply.json()["error"]["message"]
        assert time.monotonic() - began < 30
        assert server.post(CHAT, {"messages": HELLO, "max_tokens": 2}).status_code == 200
        # What needs no template is not held up by one that loops.
        thread = threading.Thread(target=server.post, args=(CHAT, {"messages": [{"role": "user", "content": "loop"}]}))
        thread.start()
        time.sleep(0.2)
        began = time.monotonic()
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        assert time.monotonic() - began < 3
        thread.join()


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_schema_that_explodes_is_refused_or_followed_in_bounded_time(server: Running, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    began = time.monotonic()
    reply = server.post(CHAT, {"messages": HELLO, "response_format": wanted, "max_tokens": 10})
    assert time.monotonic() - began < 20
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("rule", [{"type": "regex", "regex": "("}, {"type": "grammar", "grammar": "start: x"}])
def test_a_rule_that_is_none_is_refused_by_its_field(server: Running, rule: dict[str, Any]) -> None:
    reply = server.post(CHAT, {"messages": HELLO, "response_format": rule})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "response_format"


def test_a_prompt_of_the_longest_body_is_refused_without_holding_others_up(server: Running) -> None:
    began = time.monotonic()
    reply = server.post(CHAT, {"messages": [{"role": "user", "content": "word " * 1_600_000}]})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - began < 30


def test_noise_on_the_socket_is_answered_as_http_says(server: Running) -> None:
    import socket

    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    for noise in NOISE:
        with socket.create_connection(address, timeout=20) as client:
            client.sendall(noise + b"\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            heard = client.recv(4096)
            assert heard == b"" or heard.startswith(b"HTTP/1.1 4")
