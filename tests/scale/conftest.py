"""A tiny model, and files of requests for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import tiny_model
from tests.scale.running import Cluster, ray_head


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with random weights, a vocabulary of 300 tokens and a chat template."""
    return tiny_model.write(tmp_path_factory.mktemp("scaled") / "tiny.gguf", context=4096)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A Ray cluster of one machine, started by itself, with a dashboard and a token; its programs never rest."""
    with ray_head() as started:
        yield started


def line(number: int, **more: Any) -> dict[str, Any]:
    """A request of a batch; each its own prompt and seed."""
    body = {"prompt": f"word {number} and more", "max_tokens": 4, "seed": number, "temperature": 0.8}
    return {"custom_id": f"ask-{number}", "method": "POST", "url": "/v1/completions", "body": {**body, **more}}


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()]
