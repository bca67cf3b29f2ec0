"""docs/families.md says what the tests and the backends say."""

import pytest

from ostinato.backends.native.library import why_no_native
from ostinato.errors import Unsupported
from ostinato.models.registry import FAMILIES
from tests.families import PAGE, REFUSED, page, read, samples
from tests.models.tiny import TINY


@pytest.mark.slow
def test_every_family_has_a_tiny_model_that_is_compared_with_transformers() -> None:
    assert {family.name for family in FAMILIES} - samples().keys() == set()


@pytest.mark.parametrize("family", REFUSED)
def test_a_setting_that_the_page_calls_refused_is_refused_by_name(family: str) -> None:
    kind, config = next((one.kind, one.config) for one in TINY.values() if one.architecture == family)
    with pytest.raises(Unsupported, match=f"{REFUSED[family]} is true"):
        read(kind, {**config, REFUSED[family]: True})


@pytest.mark.slow
def test_the_page_of_families_is_current() -> None:
    if why_no_native() is not None:
        pytest.skip("the page says what the native loop runs, and there is no compiler for it here")
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.families --write writes it"
