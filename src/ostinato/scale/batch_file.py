"""Files of requests in OpenAI's batch format, and their results: which lines are open, and which are answered.

A result's `id` holds the number of its line and a checksum of the line's bytes. So the output alone says which lines
are answered, and whether it belongs to this input: no other file is kept, and a run that was killed at any moment
continues where the output ends. A truncated last line is removed, and its request is run again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self

from ostinato.errors import BadInput

URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MOST_LINE_BYTES: Final = 16 * 2**20
_ID: Final = re.compile(r"batch_req_(\d{1,15})_([0-9a-f]{16})")
_OPENING: Final = b'{"id": "batch_req_'


class BatchLine(NamedTuple):
    """Where a line of the input is; `number` counts from one, as editors do."""

    number: int
    offset: int
    n_bytes: int
    sum: str

    @property
    def id(self) -> str:
        return f"batch_req_{self.number}_{self.sum}"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line's request: the path and the body to post."""

    line: BatchLine
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """An invalid line, and why."""

    line: BatchLine
    custom_id: str | None
    message: str
    code: str


class Requests:
    """The input: scanned once, read again line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.exists():
                raise BadInput(f"{path}: there is no such file of requests")
            if not path.is_file() and str(path) != os.devnull:
                raise BadInput(f"{path} is not a regular file; requests are read twice, so write them to one")
            with path.open("rb") as file:
                self.lines = list(scan(file))
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror or error}") from error
        if not self.lines:
            raise BadInput(f"{path} holds no request; put one on each line, as docs/scale.md shows")

    def read(self, done: set[int]) -> Generator[BatchRequest | InvalidLine, None, None]:
        """The requests of all lines that are not done, in order."""
        first: dict[bytes, int] = {}
        with self.path.open("rb") as file:
            for line in self.lines:
                if line.n_bytes > MOST_LINE_BYTES:
                    if line.number not in done:
                        words = f"the line has {line.n_bytes} bytes; {MOST_LINE_BYTES} are the most"
                        yield InvalidLine(line, None, words, "line_too_long")
                    continue
                file.seek(line.offset)
                if _measured(file)[0] != line.sum:
                    raise BadInput(f"{self.path}: line {line.number} was changed while the file was being answered")
                file.seek(line.offset)
                found = parse(line, file.read(line.n_bytes))
                if found.custom_id is not None:
                    key = hashlib.sha256(found.custom_id.encode("utf-8", "surrogatepass")).digest()
                    before = first.setdefault(key, line.number)
                    if before != line.number:
                        words = f"custom_id {found.custom_id!r} is that of line {before} too; give each its own"
                        found = InvalidLine(line, found.custom_id, words, "duplicate_custom_id")
                if line.number not in done:
                    yield found


def scan(file: BinaryIO) -> Iterator[BatchLine]:
    """Every line that is not blank; a line of any length in bounded memory."""
    number, offset, n_bytes = 0, 0, -1
    while n_bytes:
        number += 1
        sum, n_bytes, blank = _measured(file)
        if not blank:
            yield BatchLine(number, offset, n_bytes, sum)
        offset += n_bytes


def _measured(file: BinaryIO) -> tuple[str, int, bool]:
    """The next line's checksum, its bytes with the newline (none at the end of the file), and whether it is blank."""
    sum, n_bytes, blank, ended = hashlib.sha256(), 0, True, False
    while not ended and (part := file.readline(2**20)):
        n_bytes += len(part)
        ended = part.endswith(b"\n")
        blank = blank and not part.strip()
        sum.update(part.rstrip(b"\r\n") if ended else part)
    return sum.hexdigest()[:16], n_bytes, blank


def parse(line: BatchLine, content: bytes) -> BatchRequest | InvalidLine:
    """The request of a line; an error names the field that is wrong."""
    custom_id: str | None = None

    def invalid(message: str, code: str = "invalid_request") -> InvalidLine:
        return InvalidLine(line, custom_id, message, code)

    try:
        given = json.loads(content)
    except (ValueError, RecursionError) as error:
        return invalid(f"the line is no JSON: {error}", "invalid_json_line")
    if not isinstance(given, dict):
        return invalid("the line is no JSON object", "invalid_json_line")
    if not isinstance(given.get("custom_id"), str) or not given["custom_id"]:
        return invalid("custom_id is missing, or is no text", "missing_custom_id")
    custom_id = given["custom_id"]
    if given.get("method", "POST") != "POST":
        return invalid(f"method is {given['method']!r}; it must be POST", "invalid_method")
    url, body = given.get("url"), given.get("body")
    if url not in URLS:
        return invalid(f"url is {url!r}; it must be one of {', '.join(URLS)}", "invalid_url")
    if not isinstance(body, dict):
        return invalid("body is missing, or is no JSON object")
    if body.get("stream"):
        return invalid("body.stream: a batch answers at the end of each line; leave it out")
    return BatchRequest(line, custom_id, url, json.dumps(body).encode())


def result_of(asked: BatchRequest, status: int, answer: bytes) -> bytes:
    """The output line of an answer with any status."""
    try:
        body: Any = json.loads(answer)
    except ValueError:
        body = {"error": {"message": "the answer is no JSON"}}
    request_id = body.get("id") if isinstance(body, dict) else None
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _written(asked.line, asked.custom_id, response, None)


def result_of_invalid(invalid: InvalidLine) -> bytes:
    """The output line of an invalid request."""
    return _written(invalid.line, invalid.custom_id, None, {"code": invalid.code, "message": invalid.message})


def _written(line: BatchLine, custom_id: str | None, response: Any, error: Any) -> bytes:
    result = {"id": line.id, "custom_id": custom_id, "line": line.number, "response": response, "error": error}
    return json.dumps(result).encode() + b"\n"


class Results:
    """The output, held by one run at a time. `done`: numbers of the lines that are answered in it.

    A file with any other content is refused and left unchanged.
    """

    def __init__(self, path: Path, requests: Requests, model: str) -> None:
        self.path = path
        try:
            if path.exists() and path.samefile(requests.path):
                raise BadInput(f"{path} is the input too; give the output another name")
            if path.exists() and not path.is_file():
                raise BadInput(f"{path} is no file; results must be read again when a run goes on, so name one")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror or error}") from error
        try:
            self._hold()
            self.done = self._read(requests, model)
        except BaseException:
            os.close(self._file)
            raise
        self.n_before = len(self.done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def write(self, number: int, line: bytes) -> bool:
        """Add a result. If the line has one already, write nothing and return False."""
        if number in self.done:
            return False
        left = memoryview(line)
        while left:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as error:
                raise BadInput(f"{self.path}: {error.strerror or error}; the same command goes on from here") from error
        self.done.add(number)
        return True

    def _hold(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BadInput(f"{self.path} is being written by another run; wait for it, or name another file") from error

    def _read(self, requests: Requests, model: str) -> set[int]:
        known = {line.number: line.sum for line in requests.lines}
        done: set[int] = set()
        end = 0
        with open(self._file, "rb", closefd=False) as file:
            for at, content in enumerate(file, 1):
                if not content.endswith(b"\n"):
                    if not (content.startswith(_OPENING) or _OPENING.startswith(content)):
                        raise self._foreign(at, "it is no result of a batch")
                    break
                number = self._check(at, content, known, requests, model)
                if number in done:
                    raise self._foreign(at, f"it answers line {number} a second time")
                done.add(number)
                end += len(content)
        os.ftruncate(self._file, end)
        return done

    def _check(self, at: int, content: bytes, known: dict[int, str], requests: Requests, model: str) -> int:
        try:
            result = json.loads(content)
            found = _ID.fullmatch(result["id"])
        except (ValueError, KeyError, TypeError, RecursionError):
            found = None
        if found is None:
            raise self._foreign(at, "it is no result of a batch")
        number = int(found[1])
        if known.get(number) != found[2]:
            raise self._foreign(at, f"it answers a line {number} that is not in {requests.path}")
        response = result.get("response")
        by = response["body"].get("model") if isinstance(response, dict) and "body" in response else None
        if by is not None and by != model:
            raise self._foreign(at, f"it was answered by {by!r}, and the model is {model!r} now")
        return number

    def _foreign(self, at: int, why: str) -> BadInput:
        return BadInput(f"{self.path} belongs to something else: its line {at}: {why}; name another file, or remove it")
