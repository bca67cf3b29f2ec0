"""`pull`, `models` and `rm`: the store as a shell sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.errors import NoNetwork
from ostinato.files import store
from ostinato.files.fetch import FetchedFile, HubSource, Source
from ostinato.options import Talk
from tests.cli.conftest import RunCli

NAME = "hf:owner/repo/m.gguf"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fetch brings eight bytes."""

    def fetch(source: Source, folder: Path, talk: Talk) -> tuple[FetchedFile, ...]:
        assert source == HubSource("owner/repo", "m.gguf")
        talk("fetching")
        (folder / "m.gguf").write_bytes(b"GGUF1234")
        return (FetchedFile("m.gguf", 8, None),)

    monkeypatch.setattr(store, "fetch", fetch)


@pytest.mark.usefixtures("hub")
def test_pull_prints_the_path_and_talks_beside(ostinato: RunCli) -> None:
    ran = ostinato("pull", NAME)
    assert ran.code == 0
    assert Path(ran.out.strip()).read_bytes() == b"GGUF1234"
    assert "fetching" in ran.err
    again = json.loads(ostinato("pull", "--json", NAME).out)
    assert again == {"name": NAME, "path": ran.out.strip(), "bytes": 8}


@pytest.mark.usefixtures("hub")
def test_models_lists_what_is_here_and_what_can_be_pulled(ostinato: RunCli, home: Path) -> None:
    ostinato("pull", NAME)
    ran = ostinato("models")
    assert NAME in ran.out
    assert "`ostinato pull smollm2` fetches it" in ran.out
    record = json.loads(ostinato("models", "--json").out)
    assert record["home"] == str(home)
    assert [model["name"] for model in record["installed"]] == [NAME]
    assert record["available"] == ["smollm2"]


@pytest.mark.usefixtures("hub")
def test_rm_removes_and_says_so(ostinato: RunCli) -> None:
    path = Path(ostinato("pull", NAME).out.strip())
    ran = ostinato("rm", NAME)
    assert (ran.code, ran.out) == (0, "")
    assert f"{NAME} is removed" in ran.err
    assert not path.exists()
    gone = ostinato("rm", NAME)
    assert gone.code == 2
    assert "is not installed" in gone.err


def test_pull_of_an_unknown_name_lists_the_known_ones(ostinato: RunCli, home: Path) -> None:
    ran = ostinato("pull", "smolm2")
    assert ran.code == 2
    assert "smollm2 (the nearest)" in ran.err
    assert not home.exists()


def test_a_pull_without_network_exits_with_4_and_the_way_out(ostinato: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(source: Source, folder: Path, talk: Talk) -> tuple[FetchedFile, ...]:
        raise NoNetwork("no route")

    monkeypatch.setattr(store, "fetch", fetch)
    ran = ostinato("run", "hi")
    assert ran.code == 4
    assert ran.err.startswith("error: smollm2: no route; without network, give the path of a model's file")
