"""The bytes of a few streams, pinned: a change that alters one also changes a file here and the changelog.

What may differ from run to run (times, digests, ids of calls) is masked. To write them anew: OSTINATO_WRITE_GOLDEN=1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import Running, serving

GOLDEN = Path(__file__).parent / "golden"
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"enum": ["sea"]}}, "required": ["at"]},
    },
}
# A random model says anything; a bias makes it say this, whatever the machine's arithmetic.
ONLY_A: Any = {"temperature": 0, "seed": 1, "max_tokens": 3}
ONE_CALL: Any = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "seed": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, **ONLY_A}),
    "chat-usage": (
        "/v1/chat/completions",
        {"messages": HELLO, **ONLY_A, "stream_options": {"include_usage": True}, "n": 1},
    ),
    "chat-stop": ("/v1/chat/completions", {"messages": HELLO, **ONLY_A, "max_tokens": 9, "stop": ["aaaa"]}),
    "chat-call": (
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [TOOL], **ONE_CALL},
    ),
    "response": ("/v1/responses", {"input": "hello", "temperature": 0, "seed": 1, "max_output_tokens": 3}),
    "response-call": (
        "/v1/responses",
        {
            "input": "hello",
            "tools": [{"type": "function", **TOOL["function"]}],
            **ONE_CALL,
        },
    ),
    "message": ("/v1/messages", {"messages": HELLO, **ONLY_A}),
    "message-stop": ("/v1/messages", {"messages": HELLO, **ONLY_A, "max_tokens": 9, "stop_sequences": ["aaaa"]}),
    "message-call": (
        "/v1/messages",
        {
            "messages": HELLO,
            "tools": [{"name": "look", "input_schema": TOOL["function"]["parameters"]}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "temperature": 0,
            "seed": 1,
            "max_tokens": 150,
        },
    ),
    "ollama-chat": ("/api/chat", {"model": "tiny", "messages": HELLO, "options": {**ONLY_A, "num_ctx": 1024}}),
    "ollama-generate": ("/api/generate", {"model": "tiny:latest", "prompt": "hello", "options": ONLY_A}),
    "ollama-call": (
        "/api/chat",
        {"messages": HELLO, "tools": [TOOL], "options": ONE_CALL},
    ),
    "completion": ("/v1/completions", {"prompt": "hello", **ONLY_A}),
    "completion-echo": ("/v1/completions", {"prompt": "hello", **ONLY_A, "echo": True}),
}


@pytest.fixture(scope="module")
def fixed(tiny: Path) -> Iterator[Running]:
    """A server whose ids and clock stand still."""
    with serving(
        tiny, llm={"context": 1024, "slots": 1}, make_id=lambda: "0123456789ab", clock=lambda: 1_700_000_000.0
    ) as server:
        yield server


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_a_stream(fixed: Running, name: str) -> None:
    path, body = CASES[name]
    if "tools" not in body:
        bias = {"logit_bias": {str(fixed.llm.tokenize("a")[0]): 100}}
        body = {**body, "options": {**body["options"], **bias}} if "options" in body else {**body, **bias}
    reply = fixed.post(path, {**body, "stream": True})
    assert reply.status_code == 200, reply.text
    found = masked(reply.text)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("OSTINATO_WRITE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")


def masked(text: str) -> str:
    text = re.sub(r'"timings":\{[^}]*\}', '"timings":{}', text)
    text = re.sub(r'"digest":"[0-9a-f]{64}"', '"digest":""', text)
    text = re.sub(r'"fp_[0-9a-f]{12}"', '"fp_"', text)
    text = re.sub(r'"cached_tokens":\d+', '"cached_tokens":0', text)
    text = re.sub(r'"input_tokens":\d+,"cache_creation', '"input_tokens":0,"cache_creation', text)
    text = re.sub(r'"cache_read_input_tokens":\d+', '"cache_read_input_tokens":0', text)
    text = re.sub(r'"((?:total|prompt_eval|eval)_duration)":\d+', r'"\1":0', text)
    text = re.sub(r'"call_id":"call_[0-9a-f]{24}"', '"call_id":"call_"', text)
    return re.sub(r'"id":"call_[0-9a-f]{24}"', '"id":"call_"', text)
