"""A server over a tiny random model, started once for a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cli import tiny_model
from tests.serve.running import Running, serving

CONTEXT = 1024


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with random weights, a vocabulary of 300 tokens and a chat template."""
    return tiny_model.write(tmp_path_factory.mktemp("served") / "tiny.gguf", context=4096)


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Running]:
    with serving(tiny, llm={"context": CONTEXT, "slots": 4}) as running:
        yield running


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over a model whose template begins the reasoning, and can be told not to."""

    def change(metadata: dict[str, Any]) -> None:
        template = metadata["tokenizer.chat_template"]
        begin = "{% if enable_thinking is not false %}<think>\n{% endif %}"
        kept = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
        source = template.value.replace("assistant\n", "assistant\n" + begin)
        source = source.replace("{{ message", kept + "{{ message", 1).replace("{{message", kept + "{{message", 1)
        template.value = source + "{# </think> #}"

    model = tiny_model.write(tmp_path_factory.mktemp("thinking") / "thinking.gguf", context=256, change=change)
    with serving(model, llm={"context": 256, "slots": 1}) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made
