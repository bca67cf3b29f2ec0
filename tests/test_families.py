"""docs/families.md says what the tests and the backends say."""

import pytest

from ostinato.backends.native.library import why_no_native
from ostinato.errors import Unsupported
from ostinato.models.registry import FAMILIES
from ostinato.text.pretokenizers import PRE_TOKENIZERS
from tests.families import PAGE, REFUSED, TEXTS, page, samples
from tests.models.stated import read
from tests.models.tiny import TINY
from tests.models.tiny_encoders import ENCODERS
from tests.text.llama_cpp_source import TEMPLATES
from tests.text.test_vocabularies import NAMES, SOURCE_NAMES, WITHOUT_TEXTS


@pytest.mark.slow
def test_every_family_has_a_tiny_model_that_is_compared_with_transformers() -> None:
    assert {family.name for family in FAMILIES} - samples().keys() == set()


def test_every_class_and_text_part_that_a_family_claims_has_a_tiny_model() -> None:
    kinds = {model.kind for model in TINY.values()} | {model.kind for model in ENCODERS.values()}
    parts = {model.config.get("text_config", {}).get("model_type") for model in TINY.values()}
    claimed = {name for family in FAMILIES for name in (*family.hf, *family.text_types)}
    # Classes whose blocks a class with a tiny model has, under another head or none.
    heads = {"Qwen3Model", "Qwen3ForSequenceClassification", "NomicBertForMaskedLM", "XLMRobertaForMaskedLM"}
    assert claimed - kinds - parts == heads


@pytest.mark.parametrize("family", REFUSED)
def test_a_setting_that_the_page_calls_refused_is_refused_by_name(family: str) -> None:
    kind, config = next((one.kind, one.config) for one in TINY.values() if one.architecture == family)
    with pytest.raises(Unsupported, match=f"{REFUSED[family]} is true"):
        read(kind, {**config, REFUSED[family]: True})


@pytest.mark.parametrize(("family", "texts"), TEXTS.items(), ids=lambda one: one if isinstance(one, str) else "")
def test_the_texts_of_a_family_are_compared_as_the_page_says(family: str, texts: tuple[str, str, str]) -> None:
    how, vocabulary, template = texts
    compared = {"ids": [*NAMES, *SOURCE_NAMES, *WITHOUT_TEXTS], "splits": PRE_TOKENIZERS, "kind": ["llama-spm"]}
    assert vocabulary in compared[how]
    assert template in ("", *TEMPLATES)


@pytest.mark.slow
def test_the_page_of_families_is_current() -> None:
    if why_no_native() is not None:
        pytest.skip("the page says what the native loop runs, and there is no compiler for it here")
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.families --write writes it"
