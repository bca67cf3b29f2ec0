"""The docstrings of the public API: they name every parameter and field, give an example, and render as pages."""

import dataclasses
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import ostinato
from ostinato import errors
from ostinato.serve.settings import ServeOptions

RECORDS = (ostinato.Batch, ostinato.Completion, ostinato.LoadOptions, ostinato.Piece, ostinato.Sampling,
           ostinato.Score, ostinato.Timings, ServeOptions)  # fmt: skip
METHODS = {name: method for name, method in inspect.getmembers(ostinato.LLM, inspect.isfunction) if name[0] != "_"}
CALLS: dict[str, Any] = {**METHODS, "LLM": ostinato.LLM, "Decoder": ostinato.Decoder}


def described(thing: object) -> set[str]:
    """The names that the lists of a docstring describe."""
    return set(re.findall(r"^ {4,}(\w+): ", inspect.getdoc(thing) or "", re.MULTILINE))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_of_a_record_is_described(record: Any) -> None:
    fields = {f.name for f in dataclasses.fields(record)} if dataclasses.is_dataclass(record) else set(record._fields)
    assert {name for name in fields if name[0] != "_"} <= described(record)


@pytest.mark.parametrize("name", CALLS)
def test_every_parameter_of_a_call_is_described(name: str) -> None:
    parameters = inspect.signature(CALLS[name]).parameters.keys() - {"self"}
    if name in ("generate", "stream"):
        parameters -= {"words"}  # which are refused
    if name == "LLM":
        parameters -= inspect.signature(ostinato.LoadOptions).parameters.keys()  # described there
    assert parameters <= described(CALLS[name])


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"close", "fingerprint", "slots", "submit"}))
def test_a_method_has_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(METHODS[name]) or "")


def test_what_a_docstring_raises_is_an_error_of_ours() -> None:
    for thing in (*CALLS.values(), *RECORDS):
        _, _, raised = (inspect.getdoc(thing) or "").partition("Raises:\n")
        for name in re.findall(r"^ {4}(\w+): ", raised, re.MULTILINE):
            assert issubclass(getattr(errors, name), ostinato.OstinatoError)


@pytest.mark.slow
def test_the_reference_has_every_public_name(tmp_path: Path) -> None:
    reference = pytest.importorskip("tests.reference", reason="pdoc is not installed", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference.write(tmp_path)
    page = (tmp_path / "ostinato.html").read_text(encoding="utf-8")
    for name in (*ostinato.__all__, *(f"LLM.{method}" for method in METHODS)):
        assert f'id="{name}"' in page
    assert 'id="BadOption"' in (tmp_path / "ostinato" / "errors.html").read_text(encoding="utf-8")
