"""A file of requests through Ray Data, and a YAML file through `serve deploy`: on this machine and on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from ostinato import LLM, Sampling
from ostinato.scale.settings import from_yaml
from tests.cli.conftest import RunCli, home, ostinato  # noqa: F401  fixtures
from tests.scale.conftest import line, read_lines, write_lines
from tests.scale.running import DEADLINE_S, Cluster, free_ports, killed_at, until

pytest.importorskip("ray", reason="the extra `scale` is not installed: batches on Ray were not tested")
pytestmark = pytest.mark.slow

N = 120
YAML = Path(__file__).parents[2] / "docs" / "scale" / "serve.yaml"


def ran(*words: object, environment: Mapping[str, str] = os.environ, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=DEADLINE_S, env=dict(environment)
    )
    assert done.returncode == code, done.stderr
    return done


def test_a_batch_killed_on_a_cluster_is_finished_on_this_machine_with_the_answers_of_one_process(
    ostinato: RunCli,  # noqa: F811
    tiny: Path,
    tmp_path: Path,
    cluster: Cluster,
) -> None:
    requests = write_lines(tmp_path / "in", [line(n, max_tokens=16) if n % 40 else "{damaged" for n in range(1, N + 1)])
    out, alone = tmp_path / "out", tmp_path / "alone"
    words: list[Any] = ["--model", tiny, "--device", "cpu", "--context", 256, "--slots", 2, "--json"]
    words += ["--mode", "eager"]  # slow enough to be killed half way
    command = [sys.executable, "-m", "ostinato", "batch", requests, out, *words, "--replicas", 2]
    command += ["--ray-address", cluster.address]
    assert killed_at(20, out, command, cluster.environment) < N
    on_progress = json.loads(ran("ostinato", "batch", requests, out, *words, "--replicas", 2).stdout)
    assert on_progress["already_done"] + on_progress["answered"] + on_progress["invalid"] == N
    assert ostinato("batch", requests, alone, *words).code == 0
    assert Counter(one["line"] for one in read_lines(out)) == Counter(range(1, N + 1))
    found, wanted = ({one["line"]: one for one in read_lines(path)} for path in (out, alone))
    for number, one in wanted.items():
        mine = found[number]
        if one["response"] is None:
            assert mine == one
        else:
            assert mine["response"]["body"]["digest"] == one["response"]["body"]["digest"]


def test_the_words_of_both_documented_yaml_files_are_known() -> None:
    yaml = pytest.importorskip("yaml")
    served = yaml.safe_load(YAML.read_text())
    kubernetes = yaml.safe_load(YAML.with_name("kuberay.yaml").read_text())
    for on_progress in (served, yaml.safe_load(kubernetes["spec"]["serveConfigV2"])):
        (application,) = on_progress["applications"]
        assert application["import_path"] == "ostinato.scale:app"
        assert from_yaml(application["args"])[1].replicas == 2


def test_the_documented_yaml_file_is_deployed_and_serves(tiny: Path, tmp_path: Path, cluster: Cluster) -> None:
    port = free_ports(1)[0]
    on_progress = YAML.read_text().replace("model: smollm2", f"model: {tiny}").replace("port: 8000", f"port: {port}")
    (tmp_path / "serve.yaml").write_text(on_progress)
    serve = ("ray.serve.scripts",)
    at = ("--address", cluster.dashboard)
    ran(*serve, "deploy", tmp_path / "serve.yaml", *at, environment=cluster.environment)
    try:

        def running() -> bool:
            with suppress(httpx2.TransportError):
                return httpx2.get(f"http://127.0.0.1:{port}/ready", timeout=DEADLINE_S).status_code == 200
            return False

        until(running)
        asked: Any = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "seed": 3, "temperature": 0.7}
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=DEADLINE_S) as client:
            parts = list(client.completions.create(**asked, stream=True))
        with LLM(tiny, device="cpu") as llm:
            wanted = llm.generate("hello", Sampling(max_tokens=12, seed=3, temperature=0.7))
        assert (parts[-1].model_extra or {})["digest"] == wanted.digest
        assert len(parts) > 2
    finally:
        ran(*serve, "shutdown", "--yes", *at, environment=cluster.environment)
