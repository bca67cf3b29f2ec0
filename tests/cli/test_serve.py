"""`ostinato serve` before it listens: which words become which options, where keys come from, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.cli import serve
from ostinato.serve import supervisor
from ostinato.serve.script import ScriptedAnswer
from ostinato.serve.settings import ServeOptions
from tests.cli.conftest import RunCli


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """What servers were started with; none is."""
    found: list[ServeOptions] = []

    class RecordingSupervisor:
        def __init__(self, options: ServeOptions, talk: object) -> None:
            found.append(options)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(supervisor, "Supervisor", RecordingSupervisor)
    monkeypatch.setattr(supervisor, "models_that_cannot_load", lambda options: [])
    monkeypatch.setattr(serve, "resolve", lambda model, talk: None)
    monkeypatch.delenv("OSTINATO_API_KEY", raising=False)
    return found


def test_words_become_options(ostinato: RunCli, started: list[ServeOptions]) -> None:
    assert ostinato("serve").code == 0
    assert started == [ServeOptions("smollm2")]
    ran = ostinato(
        "serve", "m.gguf", "--host", "::1", "--port", "0", "--alias", "mine", "--log-prompts",
        "--keep-responses", "7", "--keep-responses-s", "60",
        "--cors", "https://a.example", "--cors", "null",
        "--slots", "3", "--queue", "0", "--context", "64", "--kv-type", "q8_0", "--mode", "eager",
        "--device", "cpu", "--dtype", "float32", "--threads", "1",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    options = started[-1]
    assert (options.model, options.host, options.port, options.alias) == ("m.gguf", "::1", 0, ("mine",))
    assert (options.cors, options.log_prompts) == (("https://a.example", "null"), True)
    assert (options.keep_responses, options.keep_responses_s) == (7, 60.0)
    load = options.load
    assert (load.slots, load.queue, load.context, load.kv_type) == (3, 0, 64, "q8_0")
    assert (load.mode, load.device, load.dtype, load.threads) == ("eager", "cpu", "float32", 1)


def test_several_models_their_names_and_how_many_stay_in_memory(ostinato: RunCli, started: list[ServeOptions]) -> None:
    words = ("--alias", "x", "--alias", "y=b", "--any-model", "--models-max", "2")
    ran = ostinato("serve", "a.gguf", "b.gguf", "smollm2", *words)
    assert ran.code == 0, ran.err
    options = started[-1]
    assert options.models == ("a.gguf", "b.gguf", "smollm2")
    assert options.names == (("x", "a", "a.gguf"), ("y", "b", "b.gguf"), ("smollm2",))
    assert (options.any_model, options.models_max) == (True, 2)
    ran = ostinato("serve", "a.gguf", "b.gguf", "--model", "c.gguf")
    assert (ran.code, "a.gguf b.gguf and --model c.gguf" in ran.err) == (2, True)
    ran = ostinato("serve", "a.gguf", "b.gguf", "--replicas", "2")
    assert (ran.code, "--replicas serve one model" in ran.err) == (2, True)
    ran = ostinato("serve", "a/m.gguf", "b/m.gguf")
    assert (ran.code, "two models are called 'm'" in ran.err) == (2, True)


def test_a_script_is_read_before_the_start_and_announced(
    ostinato: RunCli, started: list[ServeOptions], tmp_path: Path
) -> None:
    file = tmp_path / "script.json"
    file.write_text('[{"prompt_has": "a", "text": "b"}]')
    ran = ostinato("serve", "--script", file)
    assert ran.code == 0, ran.err
    assert started[-1].script == (ScriptedAnswer("b", "a"),)
    assert "not the model's" in ran.err
    assert "--script" not in ostinato("serve", "--help").out
    file.write_text("[]")
    ran = ostinato("serve", "--script", file)
    assert (ran.code, len(started)) == (2, 1)
    assert "must be a list of answers" in ran.err


def test_keys_come_from_options_the_environment_and_a_file(
    ostinato: RunCli, started: list[ServeOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"# of friends\r\n  first-key-1 \r\n\n   # indented\nsecond-key\n")
    file.chmod(0o600)
    ran = ostinato("serve", "--api-key", "given-key", "--api-key", "another-key", "--api-key-file", file)
    assert ran.code == 0, ran.err
    assert list(started[-1].keys) == ["given-key", "another-key", "first-key-1", "second-key"]
    assert "others" not in ran.err
    file.chmod(0o644)
    assert "others on this machine can read" in ostinato("serve", "--api-key-file", file).err
    monkeypatch.setenv("OSTINATO_API_KEY", "from-the-environment")
    assert ostinato("serve", "--host", "0.0.0.0").code == 0
    assert list(started[-1].keys) == ["from-the-environment"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "no key"),
        (b"# nothing\n", "no key"),
        (b"\xff\xfe\n", "utf-8"),
        (b"short\n", "8 or"),
    ],
)
def test_a_file_without_a_good_key_is_refused(
    ostinato: RunCli, started: list[ServeOptions], tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    ran = ostinato("serve", "--api-key-file", file)
    assert ran.code == 2
    assert words in ran.err
    assert not started


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "0.0.0.0"), "--no-api-key"),
        (("--host", "0.0.0.0", "--no-api-key", "--api-key", "long-enough"), "one of them"),
        (("--port", "70000"), "65535"),
        (("--alias", ""), "--alias"),
        (("--cors", "example.org"), "https://example.org"),
        (("--queue", "-1"), "queue"),
        (("--slots", "0"), "slots"),
        (("--api-key", "with blank in it"), "API key"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(
    ostinato: RunCli, started: list[ServeOptions], words: tuple[str, ...], said: str
) -> None:
    ran = ostinato("serve", *words)
    assert ran.code == 2
    assert said in ran.err
    assert not started
