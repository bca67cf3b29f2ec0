"""The lists of what ran on a card agree with the lab's data."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu_check import _checks
from bench.gpu_models import OTHERS, SMALL
from ostinato.backends.machine import SHARED_BYTES, Chip
from ostinato.backends.tape.from_header import tape_build
from ostinato.engine.known_cards import NOT_RUN, PERSISTENT_KINDS, kind_of_kernel
from ostinato.models.header import tensors_in
from ostinato.models.named_shapes import named_shape
from ostinato.models.registry import family_named
from ostinato.models.shape import Shape
from tests.backends.families import FamilyWeights, family_model
from tests.families import samples, why_no_loop
from tests.models.stated import read_tiny
from tests.models.tiny import TINY
from tests.ran import Ran, last_run, outcomes

CARDS = Path(__file__).parents[1] / "docs" / "cards.md"

# Kinds that ran under another name: the same blocks, compiled from the same source.
SAME_AS = {"qwen3vl": ("qwen3-vl", "qwen3"), "ernie4_5": ("ernie4.5", "llama"), "seed_oss": ("seed-oss", "qwen2")}


def models_of(outcome: str) -> set[str]:
    """The models with which a check passed, in any note."""
    passed = [one.facts for one in outcomes() if (one.name, one.verdict) == (outcome, "PASS")]
    return {name for facts in passed for name in facts.get("models", ())}


def shape_of(name: str) -> Shape:
    return read_tiny(TINY[name])[1] if name in OTHERS else family_model(name).shape


def test_the_page_of_cards_names_the_checks_that_have_not_run() -> None:
    page = CARDS.read_text(encoding="utf-8")
    not_run = [f"{check.part} {check.name}" for check in _checks() if last_run(f"{check.part} {check.name}") is None]
    if not_run:
        assert f"Not yet run on a card: {', '.join(f'`{name}`' for name in not_run)}." in page
    else:
        assert "Every check has run on a card." in page


def test_the_last_outcome_of_each_name_says_when_a_check_ran_and_whether_it_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        ("lab", "a", "PASS", "1", 1),
        ("lab", "a-b", "MISS", "2", 2),
        ("lab", "ab", "FAIL", "3", 3),
        ("lab", "ab", "PASS", "4", 4),
        ("lab", "c", "PASS", "5", 5),
        ("lab", "c", "FAIL", "6", 6),
        ("lab", "d", "SKIP", "7", 7),
        ("lab", "e", "FAIL", "8", 8),
        ("lab", "e", "PASS", "8", 8),  # another outcome of the same run
    ]
    ran = [Ran(part, name, verdict, date, {}, run) for part, name, verdict, date, run in found]
    monkeypatch.setattr("tests.ran.outcomes", lambda: ran)
    said = [last_run(f"lab {name}") for name in ("a", "ab", "b", "c", "d", "e")]
    assert said == ["2", "4", None, "failed 6", None, "failed 8"]
    assert last_run("tape a") is None
    assert last_run("lab session") == "2026-11-18"


@pytest.mark.slow
def test_a_family_that_ran_on_no_card_is_named_as_one() -> None:
    on_cuda = {family for family, own in samples().items() if any(why_no_loop(one) is None for one in own)}
    ran = {shape_of(name.rpartition(" ")[0]).family for name in models_of("families")}
    assert on_cuda - ran == NOT_RUN


@pytest.mark.slow
def test_gpu_check_runs_every_family_that_has_kernels() -> None:
    on_cuda = {family for family, own in samples().items() if any(why_no_loop(one) is None for one in own)}
    assert on_cuda - {shape_of(name).family for name in SMALL} == set()


def test_a_kind_of_the_persistent_kernel_ran_on_a_card_or_has_the_source_of_one_that_did() -> None:
    ran = set[str]()
    for name in models_of("tape-verify"):
        model, _, kv_type = name.partition(", keys and values ")
        first, *rest = model.split()
        ran.add(rest[0] if first == "small" else kind_of_kernel(named_shape(first), kv_type or "bf16"))
    assert ran <= PERSISTENT_KINDS
    assert PERSISTENT_KINDS - ran == SAME_AS.keys()


@pytest.mark.parametrize("family", SAME_AS)
def test_a_family_of_the_same_blocks_has_the_same_kernel(family: str) -> None:
    name, other = SAME_AS[family]
    own = shape_of(name)
    assert own.family == family
    (rope,) = own.rope_kinds
    alike = replace(own.with_attention(rope=replace(rope, sections=())), family=other)
    assert source(own) == source(alike)


def source(shape: Shape) -> str:
    model = FamilyWeights(0, torch.bfloat16).model(family_named(shape.family), shape)
    chip = Chip((9, 0), 132, SHARED_BYTES[9, 0])
    made = tape_build(model.shape, tensors_in(model), chip, n_slots=2, context=256, packed=False)
    return made.headers["shape.h"]
