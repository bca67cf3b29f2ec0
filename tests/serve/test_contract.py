"""schemathesis over the OpenAPI description: whatever it says may be sent is answered, and nothing brings a 5xx."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counts import soak
from tests.serve.running import Running, serving

N_CASES = soak(1000, part=4)
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.slow
@pytest.mark.soak
def test_many_cases_bring_no_fault_and_no_hang(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, llm={"context": 64, "slots": 8}) as running:
        ran = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"),
                "run",
                f"{running.url}/openapi.json",
                f"--checks={CHECKS}",
                "--phases=fuzzing",
                f"--max-examples={N_CASES // n_with_input(running) + 10}",  # some are drawn twice, and sent once
                "--request-timeout=30",
                "--seed=1",
                "--no-color",
                "--generation-database=none",
                "--suppress-health-check=all",
            ],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=tmp_path,
        )
        log = list(running.log)
        assert running.llm.stats().live == 0
    assert ran.returncode == 0, ran.stdout[-6000:]
    found = re.search(r"(\d+) generated", ran.stdout)
    assert found is not None, ran.stdout[-3000:]
    assert int(found[1]) >= N_CASES
    assert [line for line in log if line["status"] >= 500] == []
    assert {line["status"] for line in log} >= {200, 400}


def n_with_input(running: Running) -> int:
    """Endpoints that take anything to vary."""
    document = running.get("/openapi.json").json()
    return sum(
        "requestBody" in one or "parameters" in one for each in document["paths"].values() for one in each.values()
    )


def test_the_description_names_every_endpoint_and_every_field(server: Running) -> None:
    document = server.get("/openapi.json").json()
    assert {
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/models/{id}", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/{id}", "/v1/responses/{id}/input_items",
        "/v1/responses/input_tokens", "/v1/rerank", "/tokenize", "/detokenize", "/apply-template", "/tokenizer_info",
        "/health", "/ready", "/live", "/slots", "/metrics", "/api/chat", "/api/generate", "/api/embed",
        "/api/embeddings", "/api/show", "/api/tags", "/api/ps", "/api/version",
    } == set(document["paths"])  # fmt: skip
    chat = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "response_format", "tools", "stream_options", "seed"} <= set(chat)
    for methods in document["paths"].values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
    json.dumps(document)
