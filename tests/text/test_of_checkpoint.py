"""The tokenizer and the template of a model, whichever kind of files it is in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import BadFile
from ostinato.files.checkpoint import open_checkpoint
from ostinato.text.of_checkpoint import open_tokenizer, template_of, template_sources, tokenizer_of
from tests.cli import tiny_model

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(params=["gguf", "folder"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_model.write(tmp_path / "m.gguf") if request.param == "gguf" else tiny_model.write_folder(tmp_path / "m")


def test_both_kinds_of_files_give_a_tokenizer_and_a_template(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    tokenizer = tokenizer_of(checkpoint)
    assert open_tokenizer(model).encode("hello there") == tokenizer.encode("hello there")
    template = template_of(checkpoint, tokenizer)
    assert template is not None
    assert template.render(HELLO) == tiny_model.prompt_of("hello")
    template.close()
    assert template_sources(checkpoint) is not None
    checkpoint.close()


@pytest.mark.parametrize("key", ["tokenizer.chat_template.default", "tokenizer.chat_template.tool_use"])
def test_a_template_by_another_name_counts_as_one(tmp_path: Path, key: str) -> None:
    def rename(metadata: dict[str, Any]) -> None:
        metadata[key] = metadata.pop("tokenizer.chat_template")

    checkpoint = open_checkpoint(tiny_model.write(tmp_path / "named.gguf", change=rename))
    template = template_of(checkpoint, tokenizer_of(checkpoint))
    assert template is not None
    assert template_sources(checkpoint) is not None


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model.write(tmp_path / "base.gguf", change=tiny_model.without_template))
    assert template_of(checkpoint, tokenizer_of(checkpoint)) is None
    assert template_sources(checkpoint) is None


def test_a_folder_needs_no_weights_for_its_tokenizer(tmp_path: Path) -> None:
    folder = tiny_model.write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert open_tokenizer(folder).encode("a")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.json"])
def test_a_pipe_in_a_folder_does_not_block(tmp_path: Path, name: str) -> None:
    folder = tiny_model.write_folder(tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(BadFile, match=f"{name}: is not a regular file"):
        template_of(checkpoint, tokenizer_of(checkpoint))


def test_a_template_file_of_any_size_is_not_read(tmp_path: Path) -> None:
    folder = tiny_model.write_folder(tmp_path / "m")
    with (folder / "chat_template.jinja").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadFile, match=r"chat_template\.jinja: has 1099511627776 bytes"):
        template_sources(open_checkpoint(folder))
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(BadFile, match="'default' is int"):
        template_sources(open_checkpoint(folder))
