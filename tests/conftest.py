"""What every test may lean on: the default model, where it can be had, and the shared vocabularies."""

from pathlib import Path

import pytest

from ostinato.errors import FetchFailed

VOCABULARIES = Path(__file__).parents[2] / "shared" / "data" / "vocab"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file; a test that needs it is skipped, and says so, where it cannot be fetched."""
    from ostinato.files import store

    try:
        return store.resolve("smollm2", talk=lambda _: None)
    except FetchFailed as error:
        pytest.skip(f"the default model cannot be fetched: {error}")


@pytest.fixture(scope="session")
def vocab_data() -> Path:
    """The folder of vocabularies with ids made by another implementation; skipped where it is not there."""
    if not VOCABULARIES.is_dir():
        pytest.skip(f"no vocabularies at {VOCABULARIES}: ids of other implementations were not compared")
    return VOCABULARIES
