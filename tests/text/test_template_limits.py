"""A template is a stranger's program: it is kept from our objects, our time and our memory."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ostinato.errors import BadTemplate
from ostinato.text import template as room
from ostinato.text.template import ChatTemplate

pytestmark = pytest.mark.slow  # together they take seconds

LINUX = sys.platform.startswith("linux")
USER = [{"role": "user", "content": "hi"}]


def failure(source: str) -> str:
    made = ChatTemplate(source, bos_token="", eos_token="")
    try:
        with pytest.raises(BadTemplate) as raised:
            made.render(USER)
        return str(raised.value)
    finally:
        made.close()


@pytest.mark.skipif(not LINUX, reason="not every platform can bound a process's memory")
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**10 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 'x'.center(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'ab'.replace('', 'x' * 10**6) * 10**6 }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
)
def test_a_template_that_eats_memory_is_stopped_and_the_limit_named(source: str) -> None:
    assert "512 MiB of memory, the limit for a template" in failure(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(n=2) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{{ lipsum(n=100000000) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    ],
)
def test_a_template_that_loops_is_stopped_and_the_limit_named(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RENDER_SECONDS", 0.5)
    start = time.monotonic()
    message = failure(source)
    assert "within 0.5 seconds, the limit for a template" in message or "512 MiB" in message
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "source", ["{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "{{ 'a' * 9000000 }}", "{{ 'é' * 9000000 }}"]
)
def test_a_template_that_writes_too_much_is_stopped_and_the_limit_named(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "RENDER_SECONDS", 60.0)  # a busy machine is no fault
    assert "more than 8388608 characters" in failure(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].x }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'x': 1}) }}",
        "{{ ('' | attr('__class__')).x }}",
        "{% include 'renderer.py' %}",
        "{% import 'os' as os %}",
        "{{ range(1000000) }}",
    ],
)
def test_a_template_cannot_reach_what_is_not_its_own(source: str) -> None:
    assert "failed" in failure(source)


def test_an_attribute_that_is_not_its_own_shows_nothing() -> None:
    made = ChatTemplate(
        "[{{ ''.__class__ }}{{ messages.__init__ }}{{ '{0.__class__}'.format('') }}{{ raise_exception.__globals__ }}]",
        bos_token="",
        eos_token="",
    )
    assert made.render(USER) == "[]"
    made.close()


def test_a_template_that_calls_itself_forever_is_told_so() -> None:
    assert "calls itself too deeply" in failure("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}")
    assert "nests" in failure("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}")


def test_after_a_failure_the_next_render_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RENDER_SECONDS", 0.5)
    loop = "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = (
        "{% if trouble == 'big' %}{{ 'a' * 10**10 }}{% elif trouble == 'long' %}" + loop + "{% else %}ok{% endif %}"
    )
    made = ChatTemplate(source, bos_token="", eos_token="")
    assert made.render(USER) == "ok"
    for trouble in ("big", "long", "big"):
        with pytest.raises(BadTemplate):
            made.render(USER, trouble=trouble)
        assert made.render(USER) == "ok"
    made.close()


def test_closing_leaves_no_process_and_a_later_render_starts_another() -> None:
    made = ChatTemplate("ok", bos_token="", eos_token="")
    made.close()
    made.render(USER)
    first = process_of(made)
    made.close()
    assert first.returncode is not None
    assert made.render(USER) == "ok"
    second = process_of(made)
    del made
    assert second.returncode is not None


def test_a_process_that_was_killed_is_replaced() -> None:
    made = ChatTemplate("ok", bos_token="", eos_token="")
    made.render(USER)
    process_of(made).kill()
    process_of(made).wait()
    assert made.render(USER) == "ok"
    made.close()


def test_an_interrupted_render_leaves_no_reply_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ChatTemplate("{{ messages[0].content }}", bos_token="", eos_token="")
    made.render(USER)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ostinato.text.template.json.loads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.render(USER)
    assert made.render([{"role": "user", "content": "another"}]) == "another"
    made.close()


def process_of(made: ChatTemplate) -> "subprocess.Popen[bytes]":
    assert made._child is not None
    return made._child._process


def gone(pid: int) -> bool:
    """Whether a process has ended; one whose parent has not waited for it yet counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not LINUX, reason="reads /proc")
@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_renderer_ends_when_its_parent_goes_away(busy: bool) -> None:
    code = """
import sys, threading
from ostinato.text import template
template.RENDER_SECONDS = 1.0
source = "{% if busy %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
made = template.ChatTemplate(source, bos_token="", eos_token="")
made.render([{"role": "user", "content": "hi"}])
print(made._child._process.pid, flush=True)
if sys.argv[1] == "True":
    made.render([{"role": "user", "content": "hi"}], busy=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", code, str(busy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    time.sleep(0.3 if busy else 0)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    deadline = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)
