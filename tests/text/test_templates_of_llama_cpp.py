"""Chat templates of llama.cpp's source: rendered as transformers renders them, or refused with a sentence; and the
calls that they write are read again."""

from __future__ import annotations

import json
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from ostinato.text.answer import AnswerReader
from ostinato.text.reasoning import Reasoning
from ostinato.text.renderer import Template, answer
from ostinato.text.template import ChatTemplate
from ostinato.text.tools import FormatName, ToolFormat, read_tools
from tests.counts import soaking
from tests.text.llama_cpp_source import TEMPLATES
from tests.text.test_tools import tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "tokenizers.md"

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


@pytest.mark.soak
@pytest.mark.skipif(not soaking(), reason="seconds, most of them for the import of transformers")
def test_templates_render_as_transformers_renders_them(llama_cpp_models: Path) -> None:
    files = sorted((llama_cpp_models / "templates").glob("*.jinja"))
    assert {file.stem for file in files} == TEMPLATES
    assert {file.name: why for file in files if (why := difference(file))} == {}


def test_the_page_counts_the_templates() -> None:
    assert f"Every chat template of llama.cpp's source ({len(TEMPLATES)} files)" in PAGE.read_text(encoding="utf-8")


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


FORMATS: dict[str, FormatName] = {
    "ByteDance-Seed-OSS": "seed",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere",
    "GLM-4.6": "key-tags",
    "GLM-4.7-Flash": "key-tags",
    "LFM2-8B-A1B": "python",
    "LFM2.5-8B-A1B": "python",
    "LFM2.5-Instruct": "python",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral-named",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "tags",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3.5-4B": "tags",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "google-gemma-4-31B-it": "gemma",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.0": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral-named",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "muse-glimmer": "atem",
    "openai-gpt-oss-120b": "harmony",
    "poolside-Laguna-XS-2.1": "key-tags",
    "unsloth-Apriel-1.5": "hermes",
}


@pytest.mark.slow
def test_a_call_that_a_template_wrote_is_read_again(llama_cpp_models: Path) -> None:
    """What a template writes for a call is what the model was trained to write."""
    known = read_tools(TOOLS)
    for name, expected in FORMATS.items():
        source = (llama_cpp_models / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
        template, renderer = ChatTemplate(source, bos_token="", eos_token=""), Template(source, FIXED, 1 << 20)
        how, thinks = ToolFormat.for_template(template, tokenizer()), Reasoning.for_template(template, tokenizer())
        assert how.name == expected, name

        def rendered(
            messages: list[dict[str, Any]], add: bool, how: ToolFormat = how, renderer: Template = renderer
        ) -> str:
            given = {"messages": how.prompt_messages(messages, known), "tools": how.prompt_tools(known)}
            return renderer.render({**given, "documents": None, "add_generation_prompt": add})

        prompt, whole = rendered([USER], True), rendered([USER, CALLS], False)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
        begun = "".join(character for character, _ in same)
        begun = begun if begun == prompt else begun[: begun.rfind("<")]
        for size in (1, 1000):
            reader = AnswerReader(None if thinks is None else thinks.parser(begun), how.parser(known))
            pieces = [whole[at : at + size] for at in range(len(begun), len(whole), size)]
            deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
            calls = [delta.call for delta in deltas if delta.call is not None]
            assert [call.name for call in calls if call.name] == ["weather"], name
            assert json.loads("".join(call.arguments for call in calls)) == FUNCTION["arguments"], name
