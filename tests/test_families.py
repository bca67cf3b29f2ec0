"""docs/families.md says what the tests and the backends say."""

import pytest

from ostinato.backends.native.library import why_no_native
from ostinato.models.registry import FAMILIES
from tests.families import PAGE, page, samples


@pytest.mark.slow
def test_every_family_has_a_tiny_model_that_is_compared_with_transformers() -> None:
    assert {family.name for family in FAMILIES} - samples().keys() == set()


@pytest.mark.slow
def test_the_page_of_families_is_current() -> None:
    if why_no_native() is not None:
        pytest.skip("the page says what the native loop runs, and there is no compiler for it here")
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.families --write writes it"
