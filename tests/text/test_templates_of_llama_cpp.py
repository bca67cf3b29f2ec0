"""Every chat template of llama.cpp's source renders as transformers renders it, or is refused with a sentence."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ostinato.text.renderer import Template, answer
from tests.counts import soaking

USER: dict[str, Any] = {"role": "user", "content": "How is the sky in Orléans?"}
SYSTEM = {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "Blue."}
THOUGHT = {**REPLY, "reasoning_content": "It is day."}
FUNCTION = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdef123", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdef123", "content": "sunny"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The sky.", "parameters": SCHEMA}}]
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[Any] | None]] = [
    ([USER], None),
    ([SYSTEM, USER], None),
    ([SYSTEM, USER, REPLY, USER], None),
    ([USER, THOUGHT, USER], None),
    ([SYSTEM, USER], TOOLS),
    ([USER, CALLS, RESULT], TOOLS),
    ([USER, CALLS, RESULT, REPLY, USER], TOOLS),
]
FIXED = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.slow
@pytest.mark.soak
def test_templates_render_as_transformers_renders_them(llama_cpp_models: Path) -> None:
    files = sorted((llama_cpp_models / "templates").glob("*.jinja"))
    assert len(files) > 60
    some = files if soaking() else files[::4]
    assert {file.name: why for file in some if (why := difference(file))} == {}


def difference(file: Path) -> str:
    """What differs first; empty where nothing does."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = file.read_text(encoding="utf-8")
    theirs = utils._compile_jinja_template(source)
    ours = Template(source, FIXED, 1 << 20)
    for messages, tools in CONVERSATIONS:
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        expected = answer(partial(theirs.render, **given, **FIXED))
        made = answer(partial(ours.render, given))
        if "role" in made:  # refused by name where transformers fails, or leaves a message out
            if "text" in expected and all(str(message["content"]) in expected["text"] for message in messages):
                return f"refused: {made['role']}"
        elif made != expected:
            return f"{expected} became {made}"
    return ""
