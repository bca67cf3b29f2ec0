"""A server with a script answers with its texts in every API, through the parsers and streams of the model's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import BadOption
from ostinato.serve.script import ScriptedAnswer, read_script
from ostinato.serve.settings import ServeOptions
from tests.serve.running import Running, serving

SAID = 'It says "öl\tand\\water" – \N{CAT}.'
CALL = '{"name": "look", "parameters": {"far": true}}'
SCRIPT = (
    ScriptedAnswer(SAID, "four oranges"),
    ScriptedAnswer(CALL, "look around"),
    ScriptedAnswer("One, two, three.", "count"),
)
PARAMETERS: Any = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
FUNCTION: Any = {"name": "look", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def scripted(tiny: Path) -> Iterator[Running]:
    with serving(tiny, llm={"context": 1024, "slots": 2}, script=SCRIPT) as running:
        yield running


def asked(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    whole: dict[str, Any] = reply.json()
    return whole


def chat(server: Running, text: str, **more: Any) -> dict[str, Any]:
    choices: list[dict[str, Any]] = asked(server, "/v1/chat/completions", {"messages": _user(text), **more})["choices"]
    return choices[0]


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_every_api_says_the_text_for_the_prompt(scripted: Running) -> None:
    prompt = "buy four oranges"
    assert chat(scripted, prompt)["message"]["content"] == SAID
    completion = asked(scripted, "/v1/completions", {"prompt": prompt})
    assert completion["choices"][0]["text"] == SAID
    response = asked(scripted, "/v1/responses", {"input": prompt})
    assert response["output"][0]["content"][0]["text"] == SAID
    message = asked(scripted, "/v1/messages", {"messages": _user(prompt), "max_tokens": 500})
    assert (message["content"][0]["text"], message["stop_reason"]) == (SAID, "end_turn")


def test_a_streamed_script_is_the_same_text_in_pieces(scripted: Running) -> None:
    with scripted.openai() as client:
        stream = client.chat.completions.create(
            model=scripted.service.model_id, messages=[{"role": "user", "content": "four oranges"}], stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == SAID
    assert len([piece for piece in pieces if piece]) > 10


def test_a_call_in_a_script_is_parsed_as_the_models_own(scripted: Running) -> None:
    prompt = "look around"
    answer = chat(scripted, prompt, tools=[{"type": "function", "function": FUNCTION}])
    call = answer["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"far": True})
    assert answer["finish_reason"] == "tool_calls"
    response = asked(scripted, "/v1/responses", {"input": prompt, "tools": [{"type": "function", **FUNCTION}]})
    item = response["output"][0]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "look", {"far": True})
    tool = {"name": "look", "input_schema": PARAMETERS}
    message = asked(scripted, "/v1/messages", {"messages": _user(prompt), "max_tokens": 500, "tools": [tool]})
    assert (message["content"][0]["name"], message["content"][0]["input"]) == ("look", {"far": True})
    assert message["stop_reason"] == "tool_use"


def test_the_limits_of_a_request_hold_for_a_script(scripted: Running) -> None:
    assert chat(scripted, "count", stop=" three")["message"]["content"] == "One, two,"
    cut = chat(scripted, "count", max_tokens=3)
    assert cut["finish_reason"] == "length"
    assert "One, two, three.".startswith(cut["message"]["content"])
    # What else the answer should follow gives way to the script.
    followed = chat(scripted, "count", response_format={"type": "json_object"})
    assert followed["message"]["content"] == "One, two, three."


def test_a_prompt_without_an_entry_is_refused(scripted: Running) -> None:
    reply = scripted.post("/v1/chat/completions", {"messages": _user("something else")})
    assert reply.status_code == 400
    assert "no entry of the script" in reply.json()["error"]["message"]
    assert chat(scripted, "count")["message"]["content"]  # and the server goes on


def test_health_says_that_a_server_is_scripted(scripted: Running, server: Running) -> None:
    assert scripted.get("/health").json()["scripted"] is True
    assert "scripted" not in server.get("/health").json()


def test_no_request_brings_a_script(server: Running) -> None:
    reply = server.post("/v1/chat/completions", {"messages": _user("count"), "script": [{"text": "One."}]})
    assert reply.status_code == 400 or reply.json()["choices"][0]["message"]["content"] != "One."


def test_a_script_reaches_the_worker_and_stays_on_this_machine() -> None:
    options = ServeOptions("m", script=SCRIPT)
    assert ServeOptions.from_json(options.to_json()) == options
    with pytest.raises(BadOption, match=r"--script is for tests on this machine"):
        ServeOptions("m", script=SCRIPT, host="0.0.0.0", no_key=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "is no JSON"),
        ("[]", "must be a list of answers"),
        ('{"text": "a"}', "must be a list of answers"),
        ('["a"]', "entry 0 must be an object"),
        ('[{"text": "a"}, {"say": "b"}]', "entry 1 must be an object"),
        ('[{"text": ""}]', "entry 0: text must be"),
        ('[{"text": "a", "prompt_has": 3}]', "entry 0: text must be"),
    ],
)
def test_a_bad_script_is_refused_with_its_entry(text: str, words: str) -> None:
    with pytest.raises(BadOption, match=words):
        read_script(text, "s.json")
