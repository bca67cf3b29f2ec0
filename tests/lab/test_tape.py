"""The timeline of a step: marks to spans, sums and a picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import HardwareCannot, InternalError
from ostinato.lab.tape import AT_THE_END, OF_A_LAYER, by_phase, recorded, spans, timeline
from tests.random_model import random_model


@given(st.integers(1, 6), st.data())
def test_spans_are_what_lies_between_two_marks(n_layers: int, data: st.DataObject) -> None:
    n = n_layers * len(OF_A_LAYER) + len(AT_THE_END)
    gaps = data.draw(st.lists(st.integers(0, 10**6), min_size=n, max_size=n))
    marks = [17]
    for gap in gaps:
        marks.append(marks[-1] + gap)
    found = spans(marks)
    assert [span.us for span in found] == [gap / 1e3 for gap in gaps]
    assert (found[-1].phase, found[-1].layer) == ("choose", None)
    assert sum(by_phase(found).values()) == pytest.approx(sum(gaps) / 1e3)
    drawn = ElementTree.fromstring(timeline(found, "a <model> & a card"))
    assert drawn.tag.endswith("svg")


def test_marks_that_are_no_whole_step_are_refused() -> None:
    with pytest.raises(InternalError, match="7 marks"):
        spans(list(range(7)))


def test_without_a_card_the_reason_is_told() -> None:
    with pytest.raises(HardwareCannot, match="the persistent kernel is CUDA's"):
        recorded(random_model("kv"), n_prompt=4, n_gen=2, kv_type="f32")
