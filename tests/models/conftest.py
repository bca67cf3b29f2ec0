"""One folder for the files of the tiny models, shared by the tests of this room."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are written, each once a session."""
    return tmp_path_factory.mktemp("tiny")
