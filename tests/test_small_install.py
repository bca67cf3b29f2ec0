"""What `pip install ostinato` brings: an environment without torch, its size, and all that it does as users would.

The environment has the built wheel, what the wheel depends on, and pip. A second one adds the extra `serve`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato import LLM, HardwareCannot, Sampling
from ostinato.backends.native.cpu_levels import IN_WHEELS, architecture
from ostinato.build import cxx
from tests.models import tiny_encoders
from tests.test_wheel import built, needs_setuptools

pytestmark = pytest.mark.slow

LIMIT_BYTES = 160_000_000
# Our own variables, and those that would let an environment see this one's packages or hide its byte-code.
FOREIGN = re.compile(r"OSTINATO_|PYTHON|CXX$|LD_PRELOAD$|OMP_|VIRTUAL_ENV$")
NO_NETWORK = re.compile(r"Retrying \(|connection error|No route to host|Name or service not known", re.IGNORECASE)
PROGRAM = """
import json, sys
from importlib.util import find_spec
from ostinato import *
assert find_spec("torch") is None

def refused(call):
    try:
        call()
    except (BadOption, HardwareCannot) as error:
        return str(error)

model, ranker = sys.argv[1:]
with LLM(model, context=64) as llm:
    found = {
        "mode": llm.mode,
        "logits": llm.logits([5, 6, 7]).tolist(),
        "digest": llm.generate("hello", Sampling(max_tokens=5, temperature=0.0)).digest,
        "decoder": refused(llm.decoder),
        "schema": llm.generate("hello", Sampling(max_tokens=5, schema={"type": "object"})).timings.grammar,
        "gbnf": refused(lambda: llm.generate("hello", Sampling(max_tokens=5, grammar='root ::= "a"'))),
        "unicode": refused(lambda: llm.generate("hello", Sampling(max_tokens=5, regex="\\\\w+"))),
    }
with LLM(ranker) as llm:
    found["ranks"] = llm.rank("what is it about?", ["it is about time", "a"]).tolist()
found["eager"] = refused(lambda: LLM(model, mode="eager"))
found["dtype"] = refused(lambda: LLM(model, dtype="bfloat16"))
found["Decoder"] = refused(lambda: __import__("ostinato").Decoder)
print(json.dumps(found))
"""


class Environment:
    """A virtual environment without a compiler, in a folder of its own; `over`: with the packages of another too."""

    def __init__(self, folder: Path, requirement: str, over: Environment | None = None) -> None:
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.bin, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir()
        (folder / "nothing").mkdir()
        variables = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
        self.packages = Path(sysconfig.get_path("platlib", "venv", variables))
        if over is not None:
            (self.packages / "over.pth").write_text(f"{over.packages}\n")
        kept = {key: value for key, value in os.environ.items() if not FOREIGN.match(key)}
        self._variables = {**kept, "PATH": str(folder / "nothing"), "OSTINATO_HOME": str(folder / "home")}
        options = ["--no-compile", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", *options]
        own = [requirement] if over is not None else ["pip", requirement]
        ran = subprocess.run([*command, *own], env=kept, capture_output=True, text=True, timeout=300, check=False)
        if ran.returncode != 0 and NO_NETWORK.search(ran.stderr):
            pytest.skip(f"packages cannot be had here: {ran.stderr.strip().splitlines()[-1]}")
        assert ran.returncode == 0, ran.stderr

    def n_bytes(self) -> int:
        """Of all files but byte-code, which Python makes as it imports; links count as what they are."""
        files = (path for path in self.bin.parent.rglob("*") if path.is_file() and not path.is_symlink())
        return sum(path.stat().st_size for path in files if path.suffix != ".pyc")

    def start(self, *command: str | Path, **variables: str) -> subprocess.Popen[str]:
        program, *arguments = map(str, command)
        return subprocess.Popen(
            [str(self.bin / program), *arguments],
            env={**self._variables, **variables},
            cwd=self.work,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def call(self, *command: str | Path, given: str = "", **variables: str) -> tuple[int, str, str]:
        """The exit code and what was printed; a traceback is always our fault."""
        with self.start(*command, **variables) as process:
            out, err = process.communicate(given, timeout=120)
        assert "Traceback" not in err
        return process.returncode, out, err

    def ostinato(self, *words: str | Path, given: str = "") -> str:
        """What a verb prints that succeeds."""
        code, out, err = self.call("python", "-m", "ostinato", *words, given=given)
        assert code == 0, err
        return out


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_setuptools()
    try:
        cxx()
    except HardwareCannot as error:
        pytest.skip(f"no wheel with objects was built: {error}")
    return built(tmp_path_factory.mktemp("wheel"), objects=True)


@pytest.fixture(scope="module")
def small(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("small"), str(wheel))


@pytest.fixture(scope="module")
def serving(small: Environment, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("serving"), f"ostinato[serve] @ {wheel.as_uri()}", over=small)


def test_the_small_set_is_small_and_has_no_torch(small: Environment) -> None:
    n_bytes = small.n_bytes()
    assert n_bytes < LIMIT_BYTES, f"{n_bytes / 1e6:.0f} MB"
    names = {path.name.partition("-")[0].lower() for path in small.packages.glob("*.dist-info")}
    assert {"ostinato", "pip", "numpy", "tokenizers"} <= names
    assert not {"torch", "triton", "fastapi", "ray", "matplotlib"} & names


def test_it_runs_chats_and_continues_a_conversation(small: Environment, tiny_gguf: Path) -> None:
    words: list[str | Path] = ["--model", tiny_gguf, "--max-tokens", "5", "--temperature", "0"]
    answer = json.loads(small.ostinato("run", *words, "--json", "hello"))
    with LLM(tiny_gguf, device="cpu") as llm:
        expected = llm.chat("hello", Sampling(max_tokens=5, temperature=0.0))
    assert (answer["mode"], answer["digest"]) == ("loop", expected.digest)
    small.ostinato("chat", *words, given="hello\n")
    first = json.loads(small.ostinato("run", *words, "--state", "talk.state", "--json", "one"))
    second = json.loads(small.ostinato("run", *words, "--state", "talk.state", "--json", "two"))
    assert (small.work / "talk.state").stat().st_size > 0
    assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
    assert second["cached_tokens"] > 0


def test_it_runs_recurrent_and_hybrid_models(small: Environment, tiny_files: Path) -> None:
    from tests.models import tiny

    for name in ("mamba2", "falcon-h1"):
        path = tiny.gguf(name, tiny_files)
        words = ["--model", str(path), "--max-tokens", "5", "--temperature", "0", "--state", f"{name}.state"]
        answer = json.loads(small.ostinato("run", *words, "--json", "hello"))
        with LLM(path, device="cpu") as llm:
            expected = llm.chat("hello", Sampling(max_tokens=5, temperature=0.0))
        assert (answer["mode"], answer["digest"]) == ("loop", expected.digest)
        assert (small.work / f"{name}.state").stat().st_size > 0


def test_it_tokenizes_scores_embeds_and_ranks(small: Environment, tiny_gguf: Path, tiny_files: Path) -> None:
    model, text = ("--model", tiny_gguf), "hello there"
    ranker = tiny_encoders.gguf("bert-rank", tiny_files)
    assert small.ostinato("tokenize", *model, text).count("\n") > 1
    assert "perplexity" in small.ostinato("score", *model, text)
    found = json.loads(small.call("python", "-c", PROGRAM, str(tiny_gguf), str(ranker))[1])
    vector = np.array(small.ostinato("embed", *model, text).split(), np.float32)
    with LLM(tiny_gguf, device="cpu", context=64) as llm:
        assert np.array_equal(vector, llm.embed(text)[0])
        assert np.array_equal(np.array(found["logits"], np.float32), llm.logits([5, 6, 7]))
        assert found["digest"] == llm.generate("hello", Sampling(max_tokens=5, temperature=0.0)).digest
    with LLM(ranker, device="cpu") as llm:
        expected = llm.rank("what is it about?", ["it is about time", "a"])
        assert np.array_equal(np.array(found["ranks"], np.float32), expected)
    assert found["mode"] == "loop"
    for asked in ("decoder", "Decoder", "eager", "dtype"):
        assert re.search(
            r"needs torch, which is not installed; type: \S+ -m pip install 'ostinato\[torch\]'", found[asked]
        )
    assert found["schema"] == "device+stack"
    assert "it is in GBNF, which is not supported without llguidance" in found["gbnf"]
    assert re.search(r"llguidance, which is not installed, may follow it; type: \S+ -m pip install", found["unicode"])


def test_it_verifies_measures_inspects_and_diagnoses(small: Environment, tiny_gguf: Path) -> None:
    verified = small.ostinato("verify", tiny_gguf)
    assert "all agree" in verified
    for check in ("1 thread", "each sequence alone", "prompts cut at every", IN_WHEELS[architecture()][-1].words):
        assert check in verified
    words = ["--repeats", "1", "--n-prompt", "16", "--n-gen", "8", "--json"]
    measured = json.loads(small.ostinato("bench", "decode", "--model", tiny_gguf, *words))
    assert {figure["mode"] for figure in measured["figures"]} == {"loop"}
    assert "it fits" in small.ostinato("inspect", tiny_gguf)
    assert "of the wheel" in small.ostinato("doctor")


CASES = [
    (["run", "--model", "LLAMA", "--dtype", "bfloat16", "hi"], "torch"),
    (["run", "--model", "LLAMA", "--mode", "eager", "hi"], "torch"),
    (["bench", "decode", "--model", "LLAMA", "--plot", "x.svg"], "lab"),
    (["lab", "profile"], "torch"),
    (["serve"], "serve"),
    (["batch", "a", "b"], "serve"),
    (["serve", "--replicas", "2"], "scale"),
    (["batch", "a", "b", "--replicas", "2"], "scale"),
]


@pytest.mark.parametrize(("words", "extra"), CASES, ids=[" ".join(words) for words, _ in CASES])
def test_what_needs_an_extra_is_refused_with_the_command_to_type(
    small: Environment, tiny_gguf: Path, words: Sequence[str], extra: str
) -> None:
    # The default model is not here: a verb that would load it first would have to fetch it.
    code, out, err = small.call("ostinato", *(tiny_gguf if word == "LLAMA" else word for word in words))
    assert (code, out) == (4, ""), err
    (line,) = err.splitlines()
    assert re.match(
        rf"error: .* needs .*, which (is|are) not installed; type: \S+ -m pip install 'ostinato\[{extra}\]'", line
    )
    assert ("--torch-backend cpu" in line) == (extra == "torch" and not Path("/proc/driver/nvidia").exists())


@pytest.mark.parametrize("variable", ["OSTINATO_HOME", "HOME"])
def test_a_store_that_cannot_be_written_stops_a_fetch_and_nothing_else(
    small: Environment, tiny_gguf: Path, variable: str
) -> None:
    file = small.work / "a-file"  # a folder without rights would stop no superuser
    file.touch()
    variables = {"OSTINATO_HOME": "", "XDG_CACHE_HOME": "", variable: str(file)}
    code, out, err = small.call("ostinato", "run", "--model", tiny_gguf, "--max-tokens", "2", "hello", **variables)
    assert (code, bool(out)) == (0, True), err
    code, out, err = small.call("ostinato", "run", "hello", **variables)
    assert (code, out) == (4, "")
    (line,) = err.splitlines()
    assert re.match(rf"error: smollm2: cannot write to {file}.*; set OSTINATO_HOME to another folder", line)
    code, out, err = small.call("ostinato", "doctor", **variables)
    assert (code, "NOT WRITABLE" in out) == (0, True)


def test_with_the_extra_serve_it_serves_and_answers_files(serving: Environment, tiny_gguf: Path) -> None:
    _, found, _ = serving.call("python", "-c", "from importlib.util import find_spec; print(find_spec('torch'))")
    assert found == "None\n"
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    with serving.start("python", "-m", "ostinato", "serve", tiny_gguf, "--port", "0") as server:
        assert server.stderr is not None
        try:
            url = next(match[0] for line in server.stderr if (match := re.search(r"http://[\d.:]+", line)))
            answer = _posted(f"{url}/v1/chat/completions", body)
            with urllib.request.urlopen(f"{url}/metrics", timeout=30) as metrics:
                assert b"ostinato_" in metrics.read()
        finally:
            server.send_signal(signal.SIGTERM)
            _, err = server.communicate(timeout=60)
    assert (server.returncode, "Traceback" in err) == (0, False)
    assert answer["usage"]["completion_tokens"] == 4

    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (serving.work / "in.jsonl").write_text(json.dumps(line) + "\n")
    serving.ostinato("batch", "in.jsonl", "out.jsonl", "--model", tiny_gguf)
    (result,) = map(json.loads, (serving.work / "out.jsonl").read_text().splitlines())
    assert result["response"]["body"]["choices"][0]["message"]["content"] == answer["choices"][0]["message"]["content"]


def _posted(url: str, body: dict[str, object]) -> Any:
    """The answer to a request, tried while the model is loading."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
