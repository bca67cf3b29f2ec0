"""The program as a whole: help, exit codes, and how every kind of error is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from ostinato import cli
from ostinato.errors import BadInput, FetchFailed, HardwareCannot, NoNetwork, OstinatoError
from tests.cli.conftest import RunCli, start

VERBS = ("run", "chat", "tokenize", "score", "embed", "inspect", "pull", "models", "rm", "doctor", "serve")
HEAVY = ("torch", "numpy", "tokenizers", "huggingface_hub", "jinja2", "safetensors", "transformers")


def modules_after(*arguments: str) -> set[str]:
    """Which heavy libraries a call of the program has imported by its end."""
    program = (
        "import json, sys\n"
        "from ostinato.cli import call\n"
        "code = call(sys.argv[1:])\n"
        "print(json.dumps([code, sorted(sys.modules)]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    code, modules = json.loads(ran.stdout.splitlines()[-1])
    assert code == 0, ran.stderr
    return set(modules) & set(HEAVY)


def test_help_names_every_verb(ostinato: RunCli) -> None:
    ran = ostinato("--help")
    assert ran.code == 0
    assert [verb for verb in VERBS if verb not in ran.out] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(ostinato: RunCli, verb: str) -> None:
    ran = ostinato(verb, "--help")
    assert ran.code == 0
    assert "--verbose" in ran.out


@pytest.mark.parametrize("asked", [("help", "bench", "decode"), ("bench", "decode", "-h")])
def test_help_may_be_asked_for_in_other_ways(ostinato: RunCli, asked: tuple[str, ...]) -> None:
    assert ostinato(*asked) == ostinato("bench", "decode", "--help")
    assert ostinato(asked[0]).code == 0


def test_without_a_verb_the_help_is_shown(ostinato: RunCli) -> None:
    ran = ostinato()
    assert ran.code == 0
    assert "doctor" in ran.out


@pytest.mark.parametrize(("group", "verb"), [("bench", "decode"), ("scale", "plan")])
def test_a_group_without_a_verb_shows_its_help(ostinato: RunCli, group: str, verb: str) -> None:
    ran = ostinato(group)
    assert (ran.code, ran.err) == (0, "")
    assert f" {verb} " in ran.out


@pytest.mark.slow
def test_help_shows_words_and_no_types(ostinato: RunCli) -> None:
    """Python's types would stand there as `<bool>` or `<int range>`; a flag has no value."""
    pages = {" ".join(verb): ostinato(*verb, "--help").out for verb in verbs_of(get_command(cli.app()))}
    assert [verb for verb, page in pages.items() if re.search(r"<\w", page)] == []
    assert re.search(r"--raw +Pass the prompt", pages["run"])
    assert re.search(r"--kv-type +f32\|bf16", pages["run"])
    assert re.search(r"--repeats +N ", pages["bench decode"])


@pytest.mark.slow
def test_every_page_of_help_fits_80_columns_without_a_broken_word(
    ostinato: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    program = cast(TyperGroup, get_command(cli.app()))
    for path in ((), *verbs_of(program)):
        command: Any = program
        for name in path:
            command = command.commands[name]
        page = ostinato(*path, "--help").out
        assert max(map(len, page.splitlines())) <= 80, path
        shown = set(re.split(r"[\s│]+", page))
        for one in command.params:
            if getattr(one, "hidden", False):
                continue
            words = [*one.opts, *(getattr(one, "help", None) or "").split(), *(one.metavar or "").split()]
            assert [word for word in words if one.opts[0].startswith("-") and word not in shown] == [], path


def verbs_of(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, verb in getattr(command, "commands", {}).items():
        yield from verbs_of(verb, (*words, name))


def test_help_imports_nothing_heavy() -> None:
    assert modules_after("--help") == set()
    assert modules_after("run", "--help") == set()


def test_listing_models_imports_nothing_heavy(home: Path) -> None:
    assert modules_after("models") == set()


def test_tokenize_does_without_torch(tiny: Path, home: Path) -> None:
    assert "torch" not in modules_after("tokenize", "--model", str(tiny), "hello")


def test_help_answers_in_under_0_4_seconds() -> None:
    """Processor time, in one of a few trials: other work on the machine does not count."""

    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "ostinato", "--help"], capture_output=True, check=True)
        after = os.times()
        children = (after.children_user - before.children_user, after.children_system - before.children_system)
        return sum(children)

    assert any(seconds() < 0.4 for _ in range(8))


def test_the_version_is_the_packages(ostinato: RunCli) -> None:
    from ostinato import __version__

    ran = ostinato("--version")
    assert (ran.code, ran.out) == (0, f"ostinato {__version__}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bogus",), "error: no such command bogus\n"),
        (("rn",), "no such command rn: did you mean `ostinato run`?"),
        (("rankk",), "no such command rankk: `ostinato embed --pooling rank`"),
        (("version",), "no such command version: `ostinato --version` prints it"),
        (("decode",), "no such command decode: it is `ostinato bench decode`"),
        (("bench", "list"), "error: no such command list\n"),
        (("don't panic", "now"), 'a command comes before a text: `ostinato run "don\'t panic"`'),
        (("smollm2",), "smollm2 is a model, and a command comes before it"),
        (("run", "--temprature", "1", "hi"), "--temperature"),
        (("run", "--top-k", "many", "hi"), "Invalid value for '--top-k'"),
        (("run", "--dtype", "int4", "hi"), "'int4' is not one of"),
        (("run", "one", "two", "three"), 'quote it: `ostinato run "one two three"`'),
        (
            ("run", "smollm2", "hello"),
            'smollm2 is a model, which is an option here: `ostinato run --model smollm2 "hello"`',
        ),
        (("rm", "one", "two"), "unexpected extra argument"),
        (("pull",), "Missing argument 'NAME'"),
        (("run", "--lora", "x", "hi"), "--lora: LoRA adapters are not applied"),
        (("run", "--n-ctx=64", "hi"), "--n-ctx=64: it is called --context here"),
        (("run", "-ngl", "99", "hi"), "-ngl: a model runs whole on one device"),
        (("run", "-hf", "a/b", "hi"), "-hf: a model of the Hugging Face hub is --model hf:owner"),
        (("run", "--prompt", "hi"), "--prompt: the prompt is given without an option"),
        (("run", "- three words"), 'a text that begins with - comes after --: `ostinato run -- "- three words"`'),
        (("run", "--zzz", "hi"), "error: no such option --zzz\n"),
        (("chat", "--schema", "x"), "no such option --schema of `ostinato chat`; it belongs to `run`"),
        (("list",), "no such command list: `ostinato models` lists the models"),
        (("chat", "-m", "x.gguf"), "-m: it is called --model here"),
        (("serve", "--max-num-seqs", "4"), "--max-num-seqs: it is called --slots here"),
        (("serve", "--quantization", "awq"), "take a GGUF file"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_message(ostinato: RunCli, arguments: tuple[str, ...], message: str) -> None:
    ran = ostinato(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert message in ran.err
    assert "--help`" in ran.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("x is wrong"), 2),
        (FetchFailed("x is gone"), 2),
        (NoNetwork("x is far"), 4),
        (HardwareCannot("x is missing"), 4),
    ],
)
def test_a_refusal_is_one_line_and_its_own_exit_code(
    ostinato: RunCli, monkeypatch: pytest.MonkeyPatch, error: OstinatoError, code: int
) -> None:
    make_models_raise(monkeypatch, error)
    ran = ostinato("models")
    assert (ran.code, ran.out, ran.err) == (code, "", f"error: {error}\n")


@pytest.mark.parametrize("error", [KeyError("surprise"), OstinatoError("surprise"), AssertionError("surprise")])
def test_a_mistake_of_ours_is_told_as_such_without_a_traceback(
    ostinato: RunCli, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    make_models_raise(monkeypatch, error)
    ran = ostinato("models")
    assert ran.code == 3
    assert ran.err.startswith("error: this is our fault: ")
    assert "surprise" in ran.err
    assert "--verbose" in ran.err
    assert "Traceback" not in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("models", "--verbose"), ("--verbose", "models")])
def test_verbose_shows_the_traceback_wherever_it_stands(
    ostinato: RunCli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    make_models_raise(monkeypatch, KeyError("surprise"))
    ran = ostinato(*arguments)
    assert ran.code == 3
    assert "Traceback" in ran.err


def test_running_out_of_memory_is_the_machines_limit(ostinato: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    make_models_raise(monkeypatch, MemoryError())
    assert ostinato("models").code == 4


def test_an_interrupt_exits_with_130(ostinato: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    make_models_raise(monkeypatch, KeyboardInterrupt())
    assert ostinato("models").code == 130


def make_models_raise(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    from ostinato.files import store

    def installed() -> list[store.StoredModel]:
        raise error

    monkeypatch.setattr(store, "installed", installed)


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(tiny: Path) -> None:
    arguments = ("run", "--model", tiny, "--max-tokens", "20000", "--ignore-eos", "--seed", "1", "hi")
    with start(arguments) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdin.close()
        program.stdout.read(1)
        program.stdout.close()
        said = program.stderr.read().decode()
        assert program.wait(30) == 0
    assert said == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_an_output_that_is_full_is_told() -> None:
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "ostinato", "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ran.returncode == 2
    assert ran.stderr == "error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("arguments", ["--version", "models", "--help"])
def test_a_closed_output_is_told(arguments: str, home: Path) -> None:
    shell = f"{sys.executable} -m ostinato {arguments} >&-"
    ran = subprocess.run(shell, shell=True, stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stderr) == (2, "error: cannot write to standard output: it is closed\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--help",), ("run", "--help")])
def test_help_may_be_read_in_part(arguments: tuple[str, ...]) -> None:
    with start(arguments) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        assert (program.wait(30), program.stderr.read()) == (0, b"")


@pytest.mark.slow
def test_a_terminal_without_utf8_gets_question_marks_and_json_gets_escapes(vocabulary: Path) -> None:
    command = [sys.executable, "-m", "ostinato", "tokenize", "--model", str(vocabulary), "é"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    plain = subprocess.run(command, env=environment, capture_output=True)
    assert plain.returncode == 0
    as_json = subprocess.run([*command, "--json"], env=environment, capture_output=True, check=True)
    assert as_json.stdout.isascii()
    assert len(json.loads(as_json.stdout)["ids"]) == 2


@pytest.mark.slow
def test_a_shell_can_complete_verbs_and_model_names(home: Path) -> None:
    def completions(words: str, index: int) -> str:
        settings = {"_OSTINATO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        ran = subprocess.run(
            [sys.executable, "-m", "ostinato"], env={**os.environ, **settings}, capture_output=True, text=True
        )
        return ran.stdout

    assert completions("ostinato to", 1).split() == ["tokenize"]
    assert completions("ostinato run --model smo", 3).split() == ["smollm2"]


@pytest.mark.parametrize(
    ("verb", "option", "begun", "offered"),
    [
        ("run", "--mode", "", ["auto", "eager", "graph", "loop", "persistent"]),
        ("run", "--device", "c", ["cpu", "cuda"]),
        ("run", "--dtype", "b", ["bfloat16"]),
        ("run", "--kv-type", "", ["f32", "bf16", "f16", "q8_0"]),
        ("verify", "--mode", "l", ["loop"]),
        ("lab", "--body", "", ["axpy", "tail"]),
    ],
)
def test_a_shell_can_complete_the_values_of_a_choice(verb: str, option: str, begun: str, offered: list[str]) -> None:
    command = cast(TyperGroup, get_command(cli.app())).commands[verb]
    context = command.make_context(verb, [], resilient_parsing=True)
    (parameter,) = (one for one in command.params if option in one.opts)
    assert [item.value for item in parameter.shell_complete(context, begun)] == offered


def test_the_entry_point_leaves_with_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "prepare", lambda: None)
    with pytest.raises(SystemExit) as left:
        cli.main(["rm", "no-such-model"])
    assert left.value.code == 2


def test_a_list_of_verbs_says_what_each_says_of_itself() -> None:
    """The list loads none of them, so it has their first sentences written down."""
    loaded = cast(TyperGroup, get_command(cli.app())).commands
    listed = cast(TyperGroup, get_command(cli.app(()))).commands
    assert list(listed) == list(loaded)
    for name, verb in loaded.items():
        first = (verb.help or "").split("\n\n")[0].replace("\n", " ")
        assert listed[name].help == first


def test_the_verb_that_is_named_is_loaded_alone() -> None:
    code = (
        "import sys; from ostinato.cli import call; call(['tokenize', '--help']); print(*sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in ran.stderr.split() if name.startswith("ostinato.cli.")}
    assert "ostinato.cli.texts" in loaded
    assert not loaded & {"ostinato.cli.run", "ostinato.cli.bench", "ostinato.cli.lab"}
