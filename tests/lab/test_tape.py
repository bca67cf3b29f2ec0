"""The timeline of a step: marks to spans, sums and a picture."""

from __future__ import annotations

import math
from contextlib import closing
from itertools import pairwise
from statistics import median
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import HardwareCannot, InternalError
from ostinato.lab.tape import AT_THE_END, OF_A_LAYER, by_phase, recorded, spans, step_us, timeline
from tests.backends.tape.loop import EmulatedLoop, tape_driver
from tests.backends.tape.models import shape_of, small
from tests.random_model import random_model


def n_gaps(n_layers: int) -> int:
    return n_layers * len(OF_A_LAYER) + len(AT_THE_END)


@given(st.integers(1, 6), st.data())
def test_spans_of_one_block_are_what_lies_between_its_marks(n_layers: int, data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(0, 10**6), min_size=n_gaps(n_layers), max_size=n_gaps(n_layers)))
    marks = [17]
    for gap in gaps:
        marks.append(marks[-1] + gap)
    found = spans([marks])
    assert [span.us for span in found] == pytest.approx([gap / 1e3 for gap in gaps])
    assert all(span.spread_us == 0 for span in found)
    assert (found[-1].phase, found[-1].layer) == ("choose", None)
    assert sum(share.us for share in by_phase(found).values()) == pytest.approx(sum(gaps) / 1e3)
    assert step_us(found) == pytest.approx(sum(gaps) / 1e3)
    drawn = ElementTree.fromstring(timeline(found, "a <model> & a card"))
    assert drawn.tag.endswith("svg")


@given(st.integers(1, 3), st.integers(1, 7), st.data())
def test_spans_of_many_blocks_are_their_medians_and_how_far_they_begin_apart(
    n_layers: int, n_blocks: int, data: st.DataObject
) -> None:
    n = n_gaps(n_layers) + 1
    marks = [sorted(data.draw(st.lists(st.integers(10**6, 10**7), min_size=n, max_size=n))) for _ in range(n_blocks)]
    zero = min(own[0] for own in marks)
    found = spans(marks)
    assert len(found) == n - 1
    for number, span in enumerate(found):
        begins = [(own[number] - zero) / 1e3 for own in marks]
        assert (span.earliest_us, span.begin_us, span.latest_us) == (min(begins), median(begins), max(begins))
        assert span.us == pytest.approx(median((own[number + 1] - own[number]) / 1e3 for own in marks))
    assert all(one.end_us == next.begin_us for one, next in pairwise(found))
    spread = median(max(own[i] for own in marks) - min(own[i] for own in marks) for i in range(0, n - 3, 5)) / 1e3
    assert by_phase(found)["norm, q k v"].spread_us == pytest.approx(spread)
    drawn = ElementTree.fromstring(timeline(found, "a card"))
    boxes = [
        float(box.attrib[side]) for box in drawn.iter("{http://www.w3.org/2000/svg}rect") for side in ("x", "width")
    ]
    assert all(math.isfinite(number) and number >= 0 for number in boxes)


@pytest.mark.parametrize("marks", [[list(range(7))], [], [list(range(8)), list(range(13))]])
def test_marks_that_are_no_whole_step_are_refused(marks: list[list[int]]) -> None:
    with pytest.raises(InternalError, match="marks of a block are not those of whole layers"):
        spans(marks)


def test_without_a_card_the_reason_is_told() -> None:
    with pytest.raises(HardwareCannot, match="the persistent kernel is CUDA's"):
        recorded(random_model("kv"), n_prompt=4, n_gen=2, kv_type="f32")


@pytest.mark.slow
def test_every_block_leaves_its_marks_in_order_where_it_was_asked_to() -> None:
    """The kernel's own source, in the emulator."""
    with closing(tape_driver(small(shape_of()))) as driver:
        assert isinstance(driver.runner, EmulatedLoop)
        clock = driver.runner.plan.buffer("clock").tensor
        driver.admit(0, [5, 9, 33], most=2)
        driver.run()
        assert not clock.any()
        driver.runner.step.note_times()
        driver.admit(1, [5, 9, 33], most=3)
        driver.run()
        found = spans(clock.tolist())
    assert len(clock) == driver.runner.step.sizes.grid.n_blocks
    assert clock.min() > 0
    assert all(span.us >= 0 for span in found)
    assert step_us(found) > 0
