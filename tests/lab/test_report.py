"""The report: one file that needs nothing else."""

import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from ostinato.lab.experiment import FORMAT
from ostinato.lab.picture import decode_picture, speedup_picture, ticks
from ostinato.lab.report import report

START = {"us_per_step": 4.0, "tokens_s": 250_000.0, "predicted_us": 4.1, "launches": 500, "max_abs_err": 1e-6}


def found(kind: str = "gpu") -> dict[str, Any]:
    rows = [
        {
            "n": n, "steps": 500, "kernels": 1, "blocks": 132, "threads": 256, "a": 0.001, "body": "axpy",
            "body_us": n / 1e5, "overhead_predicted": 0.5, "overhead_measured": 0.45,
            "starts": {
                "baseline": {**START, "speedup": 1.0, "predicted_speedup": 1.0},
                "graph <b>": {**START, "speedup": 1.0 + 1e5 / n, "predicted_speedup": 1.1 + 1e5 / n},
            },
        }
        for n in (1 << 10, 1 << 16, 1 << 20)
    ]  # fmt: skip
    cost = {"kernel_us": 1.0, "step_us": 0.0, "submit_kernel_us": 4.0, "submit_step_us": 0.0}
    rates = {"first_token_ms": 1.0, "tokens_s": 9.0, "launches_per_token": 0.1, "host_us_per_token": 5.0}
    decode = {"model": "tiny", "mode": "loop", **rates}
    return {
        "format": FORMAT, "date": "2026-11-15", "machine": {"kind": kind, "name": "A <card>"}, "rows": rows,
        "why_not": {"while graph": "the driver is old"}, "costs": {"baseline": cost, "graph <b>": cost},
        "stops_paying_us": {"graph <b>": 3.0}, "decode": [decode],
        "acceptance": [{"asked": "a gain", "is_met": False, "says": "1.1 times, because a kernel is long"}],
    }  # fmt: skip


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href"), f"{tag} reaches out: {name}={value}"


def test_a_report_is_one_page_that_reaches_nowhere() -> None:
    page = report(found())
    tags = Tags()
    tags.feed(page)
    assert {"svg", "table", "style"} <= set(tags.seen)
    assert "script" not in tags.seen
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_words_of_a_machine_are_text_and_not_markup() -> None:
    page = report(found())
    assert "A <card>" not in page
    assert "A &lt;card&gt;" in page
    assert "graph <b>" not in page


def test_a_cpu_is_called_one() -> None:
    assert "This is a CPU" in report(found("cpu"))
    assert "This is a CPU" not in report(found("gpu"))


def test_the_picture_has_a_dot_for_every_figure_and_the_place_where_a_start_stops_paying() -> None:
    drawn = ElementTree.fromstring(speedup_picture(found()))
    circles = [e for e in drawn.iter() if e.tag.endswith("circle")]
    assert len(circles) == 6
    titles = [e.text or "" for e in drawn.iter() if e.tag.endswith("title")]
    assert any("stops paying at 3.0 us" in title for title in titles)
    for circle in circles:
        assert 0 < float(circle.attrib["cx"]) < 860
        assert 0 < float(circle.attrib["cy"]) < 440


def test_a_report_says_what_was_asked_and_why_it_is_not_met() -> None:
    page = report(found())
    assert "<td>a gain</td><td>NOT MET</td><td>1.1 times, because a kernel is long</td>" in page
    earlier = found()
    del earlier["acceptance"]
    assert "What was asked" not in report(earlier)


def test_the_modes_are_drawn_beside_each_other_in_proportion() -> None:
    rows = [
        {"mode": "eager", "tokens_s": 250.0, "launches_per_token": 86.0},
        {"mode": "persistent", "tokens_s": 1000.0},
    ]
    drawn = ElementTree.fromstring(decode_picture(rows, "a <title>"))
    one, two = (float(e.attrib["width"]) for e in drawn.iter() if e.tag.endswith("rect"))
    assert two == pytest.approx(4 * one, rel=0.01)
    texts = [e.text for e in drawn.iter() if e.tag.endswith("text")]
    assert texts == ["a <title>", "eager", "250, 86 launches a token", "persistent", "1,000"]


def test_a_picture_of_nothing_says_so() -> None:
    assert "nothing was measured" in speedup_picture({**found(), "rows": []})


@pytest.mark.parametrize(("low", "high"), [(0.01, 1000.0), (0.8, 3.0), (1e-3, 1e5)])
def test_axes_have_a_few_round_numbers(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 9
    assert all(low <= mark <= high for mark in marks)
