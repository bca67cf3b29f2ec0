"""docs/names.md is what the code has: names, flags, fields of bodies and defaults."""

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command

from ostinato import LoadOptions, Sampling, Timings, cli, other_engines
from ostinato.files.store import DEFAULT
from ostinato.other_engines import OTHER_ENGINES, answer_flag
from ostinato.serve.errors import Refusal
from ostinato.serve.shapes import (
    ALIASES,
    FORMAT_ALIASES,
    NEUTRAL,
    NOTED,
    TURNED_OFF,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    ResponseFormat,
)
from tests.cli.conftest import RunCli

PAGE = Path(__file__).parents[2] / "docs" / "names.md"
OF_VERBS = {  # verbs that open a model, and whether it may be given without the option
    "run": False, "chat": True, "serve": True, "batch": False, "tokenize": False, "score": False, "embed": False,
    "inspect": True, "verify": True, "doctor": True,
}  # fmt: skip


def rows(heading: str) -> list[list[str]]:
    """The cells of a section's table, but for its head."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = (part for part in section if part.startswith(f"{heading}\n"))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def parameters(*path: str) -> list[Any]:
    command: Any = get_command(cli.app())
    for name in path:
        command = command.commands[name]
    return list(command.params)


@cache  # all verbs are built for each question
def flags(*path: str) -> frozenset[str]:
    return frozenset(name for one in parameters(*path) for name in one.opts if name.startswith("--"))


def defaults(kind: type[Any]) -> dict[str, str]:
    made = kind()
    return {field.name: f"`{getattr(made, field.name)!r}`" for field in dataclasses.fields(kind)}


def test_options_of_loading_are_those_of_the_code() -> None:
    found = rows("Loading a model")
    assert {name.strip("`"): default for name, *_, default in found} == {
        "model": f"`{DEFAULT!r}`",
        **defaults(LoadOptions),
    }
    for name, flag, http, _, _ in found:
        assert flag == f"`--{name.strip('`').replace('_', '-')}`"
        assert flag.strip("`") in flags("serve")
        assert flag.strip("`") in flags("batch") & flags("run") or name == "`queue`"
        assert http == ("`model`" if name == "`model`" else "-")


def test_options_of_sampling_are_those_of_the_code() -> None:
    found = rows("Sampling")
    assert {name.strip("`"): default for name, *_, default in found} == defaults(Sampling)
    formats = {get_args(one.model_fields["type"].annotation)[0] for one in get_args(get_args(ResponseFormat)[0])}
    listed, asked = set(), set()
    for name, flag, http, _, _ in found:
        plain = f"`--{name.strip('`').replace('_', '-')}`"
        assert flag in ("-", plain, plain.replace("ids", "id"))
        listed |= {flag.strip("`")} - {"-"}
        field, _, kind = http.partition(": ")
        asked.add(kind.strip("`"))
        assert field == ("`response_format`" if kind else name)
        assert field.strip("`") in ChatBody.model_fields.keys() & CompletionBody.model_fields.keys()
    assert asked - {""} == formats - {"text"}
    of_sampling = {f"--{one.name.replace('_', '-')}" for one in dataclasses.fields(Sampling)} | {"--stop-token-id"}
    assert listed == flags("run") & of_sampling


def test_aliases_are_those_of_the_code() -> None:
    found = {name.strip("`"): (ours, engine) for name, ours, engine in rows("Other names over HTTP")}
    assert found.keys() == {*ALIASES, *FORMAT_ALIASES, "structured_outputs"}
    for alias, (ours, _) in found.items():
        if alias in ALIASES:
            assert ours == f"`{ALIASES[alias]}`"
        elif alias in FORMAT_ALIASES:
            kind = FORMAT_ALIASES[alias].replace("schema", "json_schema")
            assert ours == f"`response_format`: `{kind}`"
            assert alias in ChatBody.model_fields.keys() & CompletionBody.model_fields.keys()


def test_timings_are_those_of_the_code() -> None:
    assert [name.strip("`") for name, _ in rows("Timings")] == [field.name for field in dataclasses.fields(Timings)]


@pytest.mark.slow
@pytest.mark.parametrize("verb", OF_VERBS)
def test_a_verb_takes_its_model_as_an_option_and_without_a_text_as_an_argument(verb: str) -> None:
    assert "--model" in flags(verb)
    assert any(one.name == "model_argument" for one in parameters(verb)) == OF_VERBS[verb]


def test_every_verb_that_opens_a_model_is_listed() -> None:
    command: Any = get_command(cli.app())
    assert set(OF_VERBS) == {name for name in command.commands if "--model" in flags(name)} - {"bench", "scale"}
    assert {"--model", "--shape"} <= flags("bench", "decode")


def test_no_answer_has_a_length_by_default() -> None:
    for verb in ("run", "chat"):
        (limit,) = (one for one in parameters(verb) if "--max-tokens" in one.opts)
        assert limit.default is None
    bodies: list[Any] = [ChatBody(messages=[{"role": "user", "content": "hi"}]), CompletionBody(prompt="hi")]  # type: ignore[list-item]
    assert [body.sampling().max_tokens for body in bodies] == [None, None]


def test_an_old_flag_works_with_a_line_on_standard_error(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes"]}')
    for flag, said in (("--json-schema", "warning: --json-schema is now called --schema\n"), ("--schema", "")):
        ran = ostinato("run", "--model", tiny, flag, schema, "hello")
        assert (ran.code, ran.out) == (0, '"yes"\n')
        assert ran.err.startswith(said or "[")
    assert "--json-schema" not in ostinato("run", "--help").out


def test_a_model_given_twice_is_refused(ostinato: RunCli, tiny: Path) -> None:
    for verb in ("chat", "serve", "verify"):
        ran = ostinato(verb, tiny, "--model", tiny)
        assert ran.code == 2
        assert "a model was given twice" in ran.err


def test_hints_for_words_of_other_engines_name_flags_that_there_are() -> None:
    known = flags("run") | flags("serve")
    for word in [*(f"--{word.replace('_', '-')}" for word in OTHER_ENGINES), *other_engines._OF_PROGRAMS]:
        answer = answer_flag(word, flags("run"))
        assert answer is not None
        assert set(re.findall(r"--[a-z-]+", answer)) <= known, answer
        assert "this command does not have it" not in answer  # the other verbs are told that `run` has it
        if "in Python" not in answer:
            assert not {"top_p", "kv_type", "max_tokens", "context,"} & set(answer.split()), answer


def test_a_verb_without_the_option_is_told_which_has_it(ostinato: RunCli) -> None:
    assert "it is called --temperature here" in ostinato("run", "--temp", "1", "hi").err
    told = ostinato("serve", "--temp", "1").err
    assert "it is called --temperature in `ostinato run`, and this command does not have it" in told


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_hints_for_words_of_other_engines_name_fields_that_there_are(kind: type[ChatBody | CompletionBody]) -> None:
    whole: Any = {"messages": [{"role": "user", "content": "hello"}]} if kind is ChatBody else {"prompt": "hello"}
    kinds = set()
    for word in OTHER_ENGINES.keys() - {*NEUTRAL, *NOTED, *TURNED_OFF, *ALIASES, *FORMAT_ALIASES}:
        with pytest.raises(Refusal, match=f"^{word} is not supported here: ") as told:
            kind.model_validate({**whole, word: "x"})
        hint = str(told.value)
        assert set(re.findall(r"--[a-z-]+", hint)) <= flags("serve"), hint
        called = re.search(r"it is called (\w+)(.*) here$", hint)
        if called is not None and called[2]:
            given = json.loads(called[2].replace("{...}", "{}"))
            kinds.add(kind.model_validate({**whole, called[1]: given}).sampling().rule)
        elif called is not None:
            assert called[1] in kind.model_fields
    assert len(kinds) == 1


def test_a_body_without_the_field_is_not_sent_to_it() -> None:
    with pytest.raises(Refusal, match="num_predict is not supported here; known: "):
        EmbeddingBody.model_validate({"input": "x", "num_predict": 5})
    with pytest.raises(Refusal, match="operator sets it with --context"):
        EmbeddingBody.model_validate({"input": "x", "num_ctx": 5})
