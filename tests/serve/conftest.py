"""A server over a tiny random model, started once for a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made
