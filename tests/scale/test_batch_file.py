"""Files of requests and results: what is asked, what has been answered, and whose an output is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import BadInput
from ostinato.scale.batch_file import (
    MOST_LINE_BYTES,
    BatchRequest,
    InvalidLine,
    Requests,
    Results,
    result_of,
    result_of_invalid,
)
from tests.scale.conftest import line, read_lines, write_lines

ANSWER = json.dumps({"id": "cmpl-1", "model": "m", "choices": []}).encode()


def answer(requests: Requests, results: Results, n: int | None = None) -> None:
    """Answer the next n lines that have no result, or all."""
    for one in list(requests.read(set(results.done)))[:n]:
        result = result_of(one, 200, ANSWER) if isinstance(one, BatchRequest) else result_of_invalid(one)
        results.write(one.line.number, result)


def test_each_line_says_its_request_and_blank_lines_say_nothing(tmp_path: Path) -> None:
    requests = Requests(write_lines(tmp_path / "in", [line(1), "", "   ", line(2)]))
    found = list(requests.read(set()))
    assert [one.line.number for one in found] == [1, 4]
    assert [one.custom_id for one in found] == ["ask-1", "ask-2"]
    assert all(isinstance(one, BatchRequest) and one.url == "/v1/completions" for one in found)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/dev/null", "/dev/null holds no request"),
        ("/dev", "/dev is not a regular file"),
        ("/there/is/none", "/there/is/none: there is no such file"),
    ],
)
def test_a_path_without_requests_is_refused(path: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        Requests(Path(path))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{", "invalid_json_line"),
        ("[1]", "invalid_json_line"),
        ("[" * 100_000, "invalid_json_line"),
        ("\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), "invalid_json_line"),
        (json.dumps({**line(1), "custom_id": 7}), "missing_custom_id"),
        (json.dumps({**line(1), "method": "GET"}), "invalid_method"),
        (json.dumps({**line(1), "url": "/v1/images"}), "invalid_url"),
        (json.dumps({**line(1), "url": ["/v1/completions"]}), "invalid_url"),
        (json.dumps({**line(1), "body": "text"}), "invalid_request"),
        (json.dumps(line(1, stream=True)), "invalid_request"),
    ],
)
def test_an_invalid_line_is_told_by_name_and_spoils_no_other(tmp_path: Path, content: str, code: str) -> None:
    found = list(Requests(write_lines(tmp_path / "in", [content, line(2)])).read(set()))
    assert isinstance(found[0], InvalidLine)
    assert found[0].code == code
    assert isinstance(found[1], BatchRequest)


def test_a_custom_id_given_twice_is_answered_once_and_refused_once(tmp_path: Path) -> None:
    requests = Requests(write_lines(tmp_path / "in", [line(1), line(2), line(1)]))
    found = list(requests.read(set()))
    assert [type(one) for one in found] == [BatchRequest, BatchRequest, InvalidLine]
    assert [type(one) for one in requests.read({1, 2})] == [InvalidLine]  # the same after a restart


def test_a_line_too_long_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * (MOST_LINE_BYTES + 1) + b"\n" + json.dumps(line(2)).encode())
    found = list(Requests(path).read(set()))
    assert [type(one) for one in found] == [InvalidLine, BatchRequest]


@settings(max_examples=60, deadline=None)
@given(cut=st.floats(0, 1), n_before=st.integers(0, 6))
def test_a_run_that_was_cut_at_any_byte_is_finished_with_nothing_lost_or_doubled(
    tmp_path_factory: pytest.TempPathFactory, cut: float, n_before: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    requests = Requests(write_lines(folder / "in", [line(1), "{damaged", line(3), line(4), line(3), line(6)]))
    out = folder / "out"
    with Results(out, requests, "m") as results:
        answer(requests, results, n_before)
    written = out.read_bytes()
    out.write_bytes(written[: round(cut * len(written))])
    with Results(out, requests, "m") as results:
        answer(requests, results)
    assert sorted(one["line"] for one in read_lines(out)) == [1, 2, 3, 4, 5, 6]
    assert out.read_bytes().startswith(written[: written[: round(cut * len(written))].rfind(b"\n") + 1])


def test_lines_added_to_the_input_are_answered_by_the_next_run(tmp_path: Path) -> None:
    requests = Requests(write_lines(tmp_path / "in", [line(1)]))
    with Results(tmp_path / "out", requests, "m") as results:
        answer(requests, results)
    longer = Requests(write_lines(tmp_path / "in", [line(1), line(2)]))
    with Results(tmp_path / "out", longer, "m") as results:
        assert results.done == {1}
        answer(longer, results)
    assert [one["custom_id"] for one in read_lines(tmp_path / "out")] == ["ask-1", "ask-2"]


def test_an_input_that_changes_while_it_is_answered_ends_the_run(tmp_path: Path) -> None:
    requests = Requests(write_lines(tmp_path / "in", [line(1), line(2)]))
    write_lines(tmp_path / "in", [line(1), line(3)])
    left = requests.read(set())
    assert next(left).custom_id == "ask-1"
    with pytest.raises(BadInput, match="line 2 was changed"):
        next(left)


@pytest.mark.parametrize(
    "content",
    [
        "a diary\n",
        "a diary, unfinished",
        '{"id": "batch_req_x"}\n',
        '{"id": "batch_req_1_0123456789abcdef"}\n',
        '{"id": 7}\n',
        "[]\n",
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    requests = Requests(write_lines(tmp_path / "in", [line(1)]))
    out = tmp_path / "out"
    out.write_text(content)
    with pytest.raises(BadInput, match="belongs to something else"):
        Results(out, requests, "m")
    assert out.read_text() == content


def test_an_output_of_another_input_or_another_model_is_refused(tmp_path: Path) -> None:
    requests = Requests(write_lines(tmp_path / "in", [line(1), line(2)]))
    with Results(tmp_path / "out", requests, "m") as results:
        answer(requests, results)
    other = Requests(write_lines(tmp_path / "other", [line(1), line(2, max_tokens=5)]))
    with pytest.raises(BadInput, match="its line 2: it answers a line 2 that is not in"):
        Results(tmp_path / "out", other, "m")
    with pytest.raises(BadInput, match="answered by 'm', and the model is 'another' now"):
        Results(tmp_path / "out", requests, "another")
    with pytest.raises(BadInput, match="is the input too"):
        Results(tmp_path / "in", requests, "m")
    for other_thing in (tmp_path, Path("/dev/null")):
        with pytest.raises(BadInput, match="is no file"):
            Results(other_thing, requests, "m")
    with pytest.raises(BadInput, match="No such file"):
        Results(tmp_path / "no" / "folder", requests, "m")
    with pytest.raises(BadInput, match="name too long"):
        Results(tmp_path / ("x" * 300), requests, "m")


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    requests = Requests(write_lines(tmp_path / "in", [line(1)]))
    with Results(tmp_path / "out", requests, "m"), pytest.raises(BadInput, match="another run"):
        Results(tmp_path / "out", requests, "m")
    with Results(tmp_path / "out", requests, "m") as again:
        assert again.done == set()


def test_a_line_is_written_once(tmp_path: Path) -> None:
    requests = Requests(write_lines(tmp_path / "in", [line(1)]))
    with Results(tmp_path / "out", requests, "m") as results:
        answer(requests, results)
        assert not results.write(1, b"again\n")
    assert len(read_lines(tmp_path / "out")) == 1


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_input_without_requests_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "in").write_text(content)
    with pytest.raises(BadInput, match="holds no request"):
        Requests(tmp_path / "in")
    with pytest.raises(BadInput, match="no such file"):
        Requests(tmp_path / "nowhere")
