"""The child process that renders chat templates: JSON lines in, JSON lines out, under limits on memory and time.

A template from a model file is an untrusted program; jinja2's sandbox keeps it from our objects, and this process
keeps it from our memory. It is run as a script and imports jinja2 and the standard library only, so that it starts
quickly. `template.py` is the other end.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from difflib import get_close_matches
from functools import partial
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

PROBE = "7f3a9c51"  # a text that occurs in no template
PRINTED = re.compile(PROBE + r"""\\*['"]\}""")  # as the text of a part that was printed as it is
MAX_MESSAGE = 2_000  # characters of a template's own error message
FILE_NAME = "<template>"  # what jinja2 calls a template made from a string
ROLES = ("system", "user", "assistant", "tool")
# Phi's results of tools; its template prints this role as it does every other.
PHI_RESULT = "tool_response"
_CALL = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {}}}
_RESULT_OF = {"name": "look", "tool_call_id": _CALL["id"]}
_USER: dict[str, Any] = {"role": "user", "content": "hi"}
_REPLY: dict[str, Any] = {"role": "assistant", "content": "hello"}
_CALLING: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


class OutputTooLong(Exception):
    """The rendered text passed its limit."""


class RoleNotRendered(Exception):
    """A message whose role the template does not render: which message and why, and the roles that it renders."""

    def __init__(self, why: str, renders: str) -> None:
        super().__init__(why)
        self.why, self.renders = why, renders


class GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: no HTML or ASCII escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """How a template refuses a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """The time of rendering, as a template wants it written."""
    return datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox with the functions that chat templates use."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


class Template:
    """One compiled template, and which forms of message content it can show."""

    def __init__(self, source: str, fixed: Mapping[str, Any], max_characters: int) -> None:
        self._template = environment().from_string(source)
        self._source = source
        self._fixed = fixed
        self._max_characters = max_characters
        self._shows: dict[tuple[str, bool, bool], bool] = {}
        self._why_not: dict[tuple[str, bool], str | None] = {}
        self._later: dict[bool, bool] = {}

    def reads(self) -> str:
        """The names of the variables that it reads."""
        return " ".join(sorted(meta.find_undeclared_variables(environment().parse(self._source))))

    def render(self, variables: Mapping[str, Any]) -> str:
        self._check_roles(variables)
        given, tools = variables["messages"], variables.get("tools")
        if any(message["role"] == "system" for message in given[1:]) and not self._shows_later(tools):
            given = with_first_system_only(given)
        messages = [self._in_a_form_it_shows(message, tools) for message in given]
        return self._render({**variables, "messages": messages})

    def _render(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate({**variables, **self._fixed}):
            length += len(piece)
            if length > self._max_characters:
                raise OutputTooLong
            pieces.append(piece)
        return "".join(pieces)

    def _in_a_form_it_shows(self, message: dict[str, Any], tools: Any) -> dict[str, Any]:
        """Content as given where the template shows that form; else as the other form, where it shows that one. If it
        shows neither for this role, what it shows for users counts."""
        content = message.get("content")
        if not isinstance(content, (str, list)):
            return message
        parts = isinstance(content, list)
        for role in (message["role"], "user"):
            if self._can_show(role, parts, tools):
                return message
            if self._can_show(role, not parts, tools):
                return {**message, "content": other_form(content)}
        return message

    def _can_show(self, role: str, parts: bool, tools: Any) -> bool:
        """Whether words of this role given in this form come out as words, found out by trying once."""
        key = role, parts, bool(tools)
        if key not in self._shows:
            content = [{"type": "text", "text": PROBE}] if parts else PROBE
            text = self._tried(self._place_of({"role": role, "content": content}, tools), tools)[0]
            # A list that was merely printed shows its brackets too.
            self._shows[key] = PROBE in text and not (parts and PRINTED.search(text))
        return self._shows[key]

    def _place_of(self, message: dict[str, Any], tools: Any) -> list[dict[str, Any]]:
        """A conversation in which a message of this role may stand."""
        role = message["role"]
        if role == "user":
            return [message]
        user = self._in_a_form_it_shows(_USER, tools)
        if role == "system":
            return [message, user]
        if role == "tool":
            return [user, self._in_a_form_it_shows(_CALLING, tools), {**message, **_RESULT_OF}]
        return [user, message]

    def _tried(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[str, str]:
        """The rendered text of a conversation of ours, or why there is none."""
        given = {"messages": messages, "add_generation_prompt": True, "tools": tools, "documents": None}
        try:
            return self._render(given), ""
        except (OutputTooLong, MemoryError):
            raise
        except Exception as error:  # an untrusted program may fail in any way; then it cannot render this
            return "", str(error)[:MAX_MESSAGE]

    # Roles

    def _check_roles(self, variables: Mapping[str, Any]) -> None:
        """Refuse a message whose role the template refuses or drops, or does not know."""
        tools = variables.get("tools")
        if self._why_no("user", tools) is not None:
            return  # a template that shows no user's message tells nothing about roles
        for index, message in enumerate(variables["messages"]):
            role = message["role"]
            why = self._why_no(role, tools) if self._is_named(role) else "which is not known"
            if not self._is_named(role) and (meant := get_close_matches(role, ROLES, 1)):
                why = f"which looks like {meant[0]!r} misspelt"
            if why is not None:
                known = ", ".join(one for one in ROLES if self._why_no(one, tools) is None)
                raise RoleNotRendered(f"messages[{index}] has the role {role!r}, {why}", known)

    def _shows_later(self, tools: Any) -> bool:
        """Whether a system message shows that is not the first message, found out by trying once."""
        key = bool(tools)
        if key not in self._later:
            system, probe = {"role": "system", "content": "hi"}, {"role": "system", "content": PROBE}
            tried = [self._in_a_form_it_shows(message, tools) for message in (system, _USER, probe)]
            self._later[key] = PROBE in self._tried(tried, tools)[0]
        return self._later[key]

    def _is_named(self, role: str) -> bool:
        """Whether a role is one of all models or of this template, which may print any other without knowing it."""
        return role in ROLES or role == PHI_RESULT or f"'{role}'" in self._source or f'"{role}"' in self._source

    def _why_no(self, role: str, tools: Any) -> str | None:
        """Why the template does not render a role, found out by trying once; None if it does."""
        key = role, bool(tools)
        if key not in self._why_not:
            why = "whose content is left out"
            for messages in self._conversations(role, tools):
                text, error = self._tried(messages, tools)
                if PROBE in text:
                    self._why_not[key] = None
                    return None
                why = f"which is refused: {error}" if error else why
            self._why_not[key] = why
        return self._why_not[key]

    def _conversations(self, role: str, tools: Any) -> Iterator[list[dict[str, Any]]]:
        """Places where a message of this role may stand; many templates want users and assistants in turn."""
        others = ({"role": role, "content": PROBE}, _USER, _REPLY, _CALLING)
        probe, user, reply, calling = (self._in_a_form_it_shows(message, tools) for message in others)
        if role not in ROLES[:3]:
            probe |= _RESULT_OF
        yield [probe]
        yield [probe, user]
        if role != "system":  # it stands first; further on, some templates print what they refuse there
            yield [user, probe]
            yield [user, calling, probe]
            yield [user, reply, probe]
        if role == "assistant":  # some templates want to be given what it thought
            yield [user, {**probe, "reasoning_content": "hm"}]


def with_first_system_only(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The text of each system message after the first, at the end of the message before it; after an answer, as the
    user's own or at the beginning of it.

    >>> with_first_system_only([_USER, {"role": "system", "content": "Be brief."}])
    [{'role': 'user', 'content': 'hi\\n\\nBe brief.'}]
    """
    kept: list[dict[str, Any]] = []
    opened = False  # the last message is the user's only by what a system message said
    for message in messages:
        last, is_system = kept[-1] if kept else None, message["role"] == "system"
        if last is None or not (is_system or (opened and message["role"] == "user")):
            kept.append(message)
            opened = False
        elif last["role"] == "assistant":
            kept.append({**message, "role": "user"})
            opened = True
        else:
            kept[-1] = {**last, "content": joined(last["content"], message["content"])}
            opened = opened and is_system
    return kept


def joined(first: str | list[Any], second: str | list[Any]) -> str | list[Any]:
    """Two contents as one: a paragraph each, or the parts of both."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [other_form(content) if isinstance(content, str) else content for content in (first, second)]
    return [*parts[0], *parts[1]]


def other_form(content: str | list[Any]) -> str | list[Any]:
    """Typed text parts as one string, a line each; a string as one part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return "\n".join(part["text"] for part in content)


def limit(kind: str, most: int, hard: int | None = None) -> None:
    """Bound a resource of this process, where the platform can; without `hard` the bound may be raised again."""
    try:
        import resource

        resource.setrlimit(getattr(resource, kind), (most, resource.RLIM_INFINITY if hard is None else hard))
    except (ImportError, ValueError, OSError):
        return


def where(error: BaseException) -> str:
    """`, line 12` when the error arose in a line of the template; of several, the innermost."""
    line: int | None = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE_NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}" if line is not None else ""


def answer(work: Callable[[], str]) -> dict[str, str]:
    """The reply to one request: the text, or what went wrong and of which kind it was."""
    try:
        return {"text": work()}
    except MemoryError:
        return {"limit": "memory"}
    except OutputTooLong:
        return {"limit": "output"}
    except RoleNotRendered as error:
        return {"role": error.why, "renders": error.renders}
    except RecursionError as error:
        return {"error": f"it nests or calls itself too deeply{where(error)}"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"it is not a valid template{where(error)}: {error.message}"}
    except Exception as error:  # any exception of an untrusted program becomes a reply, never a dead process
        kind = "" if type(error) is jinja2.TemplateError else f"{type(error).__name__}: "
        return {"error": f"{kind}{str(error)[:MAX_MESSAGE]}{where(error)}"}


def main() -> None:
    """Read the settings, report ready, then answer one request per line until the parent closes the pipe."""
    lines, replies = sys.stdin.buffer, sys.stdout.buffer
    if not (first := lines.readline()):
        return  # started early, and not needed
    settings = json.loads(first)
    limit("RLIMIT_AS", settings["memory_bytes"], hard=settings["memory_bytes"])
    templates: dict[str, Template] = {}

    def render(line: bytes) -> str:
        request = json.loads(line)
        name = request["template"]
        if name not in templates:
            templates[name] = Template(settings["sources"][name], settings["fixed"], settings["max_characters"])
        template = templates[name]
        return template.reads() if request["variables"] is None else template.render(request["variables"])

    def send(reply: Mapping[str, Any]) -> None:
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()

    send({"ready": True})
    while line := lines.readline():
        # The processor time of this render, so that a loop ends even if its caller has stopped waiting.
        limit("RLIMIT_CPU", math.ceil(time.process_time() + settings["seconds"]) + 1)
        reply = answer(partial(render, line))
        try:
            send(reply)
        except MemoryError:
            send({"limit": "memory"})
            return
        if "limit" in reply:
            return  # the parent starts a fresh process, so that nothing of this one lingers


if __name__ == "__main__":
    main()
