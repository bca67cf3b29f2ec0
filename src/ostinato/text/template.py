"""Chat templates: a conversation becomes the prompt that a model was trained on.

The template is rendered by `renderer.py` in a child process, because a template is an untrusted program and
jinja2's sandbox bounds neither its time nor its memory; this module asks that process, with a deadline, and replaces
it when it fails. What a template shows of reasoning and of a user's text after a result is found out by rendering short
conversations of ours. Nothing here knows about token ids.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ostinato.errors import BadFile, BadInput, BadTemplate
from ostinato.files.json_file import read_json_if_there, read_text
from ostinato.text.renderer_process import RendererProcess
from ostinato.text.tokenizer import Tokenizer

RENDER_SECONDS = 5.0
MEMORY_BYTES = 512 * 2**20
MAX_CHARACTERS = 8 * 2**20
_ENDED_BY_CPU_LIMIT = -signal.SIGXCPU if hasattr(signal, "SIGXCPU") else None

_PROBE: Final = "52d80eb6"  # a text that occurs in no template
_PRINTED: Final = re.compile(_PROBE + r"""\\*['"]\}""")  # as the text of a part that was printed as it is
_USER: Final[dict[str, Any]] = {"role": "user", "content": "hi"}
_REPLY: Final[dict[str, Any]] = {"role": "assistant", "content": "hello"}
_CALL: Final = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {}}}
_CALLING: Final[dict[str, Any]] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Final[dict[str, Any]] = {"role": "tool", "name": "look", "tool_call_id": _CALL["id"], "content": "seen"}
_PARAMETERS: Final = {"type": "object", "properties": {}}
_TOOL: Final = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": _PARAMETERS}}


class ChatTemplate:
    """One model's chat template; safe to use from many threads.

    Content may be text or a list of `{"type": "text", "text": ...}` parts. It reaches the template as it was given
    if the template shows that form; if not, parts are joined by newlines, or text becomes one part. Likewise an
    assistant's `reasoning_content` becomes a part of its content, `{"type": "thinking", "thinking": ...}`, and a user's
    text joins the result of a tool that it follows, for a template that shows them only so. A role that the template
    refuses or whose content it drops is refused, with the roles that it renders.

    >>> template = ChatTemplate("{{ messages[0]['content'] }}", bos_token="", eos_token="")
    >>> template.render([{"role": "user", "content": "hi"}])
    'hi'
    >>> template.close()
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        tool_source: str | None = None,
        name: str = "the chat template",
    ) -> None:
        self.source = source
        self.tool_source = tool_source
        self.name = name
        self._settings = {
            "sources": {"default": source, "tools": tool_source},
            "fixed": {"bos_token": bos_token, "eos_token": eos_token},
            "seconds": RENDER_SECONDS,
            "memory_bytes": MEMORY_BYTES,
            "max_characters": MAX_CHARACTERS,
        }
        self._lock = threading.Lock()
        self._child: RendererProcess | None = None
        self._reads: dict[str, frozenset[str]] = {}
        self._shown: dict[tuple[_Probed, bool], bool] = {}

    def reads(self, *, tools: bool = False) -> frozenset[str]:
        """The names of the variables that the template reads, or that its variant for tools does.

        >>> template = ChatTemplate("{{ messages }}{% if enable_thinking %}...{% endif %}", bos_token="", eos_token="")
        >>> sorted(template.reads())
        ['enable_thinking', 'messages']
        >>> template.close()
        """
        which = self._which(tools)
        with self._lock:
            if which not in self._reads:
                request = json.dumps({"template": which, "variables": None}).encode()
                self._reads[which] = frozenset(self._text(request).split())
            return self._reads[which]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The prompt for `messages`; `options` (such as `enable_thinking`) reach the template by their names.

        With `continue_final_message` it ends with the text of the last message, which must be the assistant's."""
        checked = check_messages(messages)
        mark, last = "", len(checked) - 1
        if continue_final_message:
            mark = secrets.token_hex(16)
            checked[-1:] = [_marked(last, checked[-1], mark)]
        variables = {
            **options,
            "messages": self._in_shown_form(checked, bool(tools)),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "tools": tools,
            "documents": documents,
        }
        request = self._request(variables)
        with self._lock:
            text = self._text(request)
        if not continue_final_message:
            return text
        head, found, _ = text.rpartition(mark)
        if not found:
            raise BadInput(f"messages[{last}] cannot be continued: {self.name} leaves its content out")
        return head

    def start(self) -> None:
        """Start the rendering process, so that the first render need not wait for it."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the rendering process; a later render would start another."""
        with self._lock:
            self._end_child()

    def _which(self, tools: bool) -> str:
        return "tools" if tools and self.tool_source is not None else "default"

    def _request(self, variables: Mapping[str, Any]) -> bytes:
        which = self._which(bool(variables["tools"]))
        try:
            return json.dumps({"template": which, "variables": variables}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"messages, tools and template options must be plain JSON values: {error}") from error

    def _in_shown_form(self, messages: list[dict[str, Any]], tools: bool) -> list[dict[str, Any]]:
        """The conversation with its reasoning, and the user's texts after results, where the template shows them."""
        messages = [self._with_shown_reasoning(message, tools) for message in messages]
        pairs = pairwise(messages)
        if not any(first["role"] == "tool" and second["role"] == "user" for first, second in pairs):
            return messages
        if self._shows("text after result", tools) or not self._shows("result", tools):
            return messages
        return _with_texts_in_results(messages)

    def _with_shown_reasoning(self, message: dict[str, Any], tools: bool) -> dict[str, Any]:
        """The reasoning of a message as a part of its content, for a template that shows it only there."""
        thought = message.get("reasoning_content")
        if message["role"] != "assistant" or not isinstance(thought, str) or not thought:
            return message
        if message.get("tool_calls"):
            only_there = not self._shows("reasoning of call", tools) and self._shows("part of call", tools)
        else:
            only_there = not self._shows("reasoning of reply", tools) and self._shows("part of reply", tools)
        return _with_thinking_part(message) if only_there else message

    def _shows(self, probed: _Probed, tools: bool) -> bool:
        """Whether the template shows the probe in a conversation of ours, found out by trying once."""
        key = probed, tools
        if key not in self._shown:
            # A tool of ours too: one of a request, which the template may refuse, must not decide for later requests.
            given = {"messages": _PROBES[probed], "tools": [_TOOL] if tools else None, "documents": None}
            request = self._request({**given, "add_generation_prompt": True})
            with self._lock:
                text = self._ask(request).get("text", "")  # none where the template refuses the conversation
            self._shown[key] = _PROBE in text and _PRINTED.search(text) is None
        return self._shown[key]

    def _running(self) -> RendererProcess:
        if self._child is None or not self._child.usable():
            self._end_child()
            self._child = RendererProcess(self, self._settings)
        return self._child

    def _text(self, request: bytes) -> str:
        reply = self._ask(request)
        if "role" in reply:
            raise BadInput(f"{reply['role']}; {self.name} renders {reply['renders']}")
        if "error" in reply:
            raise BadTemplate(f"{self.name} failed: {reply['error']}")
        return str(reply["text"])

    def _ask(self, request: bytes) -> dict[str, Any]:
        """The reply of the process: a text, or why there is none. A limit that was passed raises."""
        child = self._running()
        try:
            reply = child.ask(request, RENDER_SECONDS)
        except BaseException:  # an interrupt, say: the reply that is still to come must not answer the next request
            self._end_child()
            raise
        if reply is None:
            why = _why_silent(child)
            self._end_child()
            raise BadTemplate(f"{self.name} {why}")
        if "limit" in reply:
            self._end_child()
            raise BadTemplate(f"{self.name} {_LIMITS[reply['limit']]}")
        return reply

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


_MEMORY = f"used more than {MEMORY_BYTES // 2**20} MiB of memory, the limit for a template"
_LIMITS = {
    "memory": _MEMORY,
    "output": f"made more than {MAX_CHARACTERS} characters, the limit for a prompt's text",
}


def _why_silent(child: RendererProcess) -> str:
    code = child.exit_code()
    if child.expired or code == _ENDED_BY_CPU_LIMIT:
        return f"did not finish within {RENDER_SECONDS:g} seconds, the limit for a template"
    # Before its time is up, a process dies of an allocation that could not even be reported.
    return f"ended its process (exit code {code}); most likely it {_MEMORY}"


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as plain dictionaries; `BadInput` names the index of the first that is none."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise BadInput(f"messages is {type(messages).__name__}; it must be a list of messages with role and content")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadInput(f"messages[{index}] is {type(message).__name__}; it must have a role and a content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise BadInput(f"messages[{index}] has no role; it must be a string such as 'user'")
    if content is None and not message.get("tool_calls"):
        raise BadInput(f"messages[{index}] ({role}) has no content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        return {**message, "content": [_check_part(index, place, part) for place, part in enumerate(content)]}
    if content is not None and not isinstance(content, str):
        kind = type(content).__name__
        raise BadInput(f"messages[{index}] ({role}) has a content of type {kind}; it must be text or a list of parts")
    return dict(message)


def _marked(index: int, message: dict[str, Any], mark: str) -> dict[str, Any]:
    """A message with a mark at the end of its text, where its rendering is cut: templates put text of theirs behind."""
    if message["role"] != "assistant" or message.get("tool_calls"):
        what = f"the role {message['role']!r}" if message["role"] != "assistant" else "tool_calls"
        raise BadInput(f"messages[{index}] has {what}; only a text of the assistant can be continued")
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + mark}
    *before, last = content or [{"type": "text", "text": ""}]
    return {**message, "content": [*before, {**last, "text": last["text"] + mark}]}


def _check_part(index: int, place: int, part: object) -> dict[str, Any]:
    what = f"messages[{index}].content[{place}]"
    if not isinstance(part, Mapping):
        raise BadInput(f"{what} is {type(part).__name__}; it must be a part such as {{'type': 'text', 'text': ...}}")
    if part.get("type") != "text":
        why = "this model reads no images" if "image" in str(part.get("type")) else "only text parts are supported"
        raise BadInput(f"{what} has type {part.get('type')!r}; {why}")
    if not isinstance(part.get("text"), str):
        raise BadInput(f"{what} has no text")
    return dict(part)


def _with_thinking_part(message: Mapping[str, Any]) -> dict[str, Any]:
    """The reasoning of a message as the first part of its content.

    >>> _with_thinking_part({"content": "5", "reasoning_content": "2 + 3"})["content"]
    [{'type': 'thinking', 'thinking': '2 + 3'}, {'type': 'text', 'text': '5'}]
    """
    content = message.get("content") or []
    said = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [{"type": "thinking", "thinking": message["reasoning_content"]}, *said]}


def _with_texts_in_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The user's texts at the end of the results that they follow, after an empty line."""
    kept: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "user" and kept and kept[-1]["role"] == "tool":
            texts = (_text_of(one["content"]) for one in (kept[-1], message))
            kept[-1] = {**kept[-1], "content": "\n\n".join(filter(None, texts))}
        else:
            kept.append(message)
    return kept


def _text_of(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


# What a template may or may not show: each probe stands where its name says, in a conversation that is usual otherwise.
_Probed: TypeAlias = Literal[
    "result", "text after result", "reasoning of reply", "part of reply", "reasoning of call", "part of call"
]
_THOUGHT: Final = {"reasoning_content": _PROBE}
_PROBES: Final[Mapping[_Probed, Sequence[Mapping[str, Any]]]] = {
    "result": [_USER, _CALLING, {**_RESULT, "content": _PROBE}],
    "text after result": [_USER, _CALLING, _RESULT, {**_USER, "content": _PROBE}],
    "reasoning of reply": [_USER, {**_REPLY, **_THOUGHT}],
    "part of reply": [_USER, _with_thinking_part({**_REPLY, **_THOUGHT})],
    "reasoning of call": [_USER, {**_CALLING, **_THOUGHT}, _RESULT],
    "part of call": [_USER, _with_thinking_part({**_CALLING, **_THOUGHT}), _RESULT],
}


class Sources(NamedTuple):
    """The text of a model's template, and of its variant for tools where it has one."""

    default: str
    tools: str | None


def template_from(sources: Sources | None, tokenizer: Tokenizer, path: Path) -> ChatTemplate | None:
    """The chat template of the model at `path`, with its tool-using variant where it has one."""
    if sources is None:
        return None
    bos, eos = ("" if id is None else tokenizer.token_text(id) for id in (tokenizer.bos_id, tokenizer.eos_id))
    name = f"the chat template of {path.name}"
    return ChatTemplate(sources.default, bos_token=bos, eos_token=eos, tool_source=sources.tools, name=name)


def sources_in_gguf(metadata: Mapping[str, Any], path: Path) -> Sources | None:
    """The template of a GGUF file; None if it has none."""
    key = "tokenizer.chat_template"
    named = {name: metadata.get(f"{key}.{name}") for name in ("default", "tool_use")}
    return _chosen({**named, "default": metadata.get(key, named["default"])}, path)


def sources_in_folder(folder: Path) -> Sources | None:
    """The template of a folder's files; None if they have none.

    `chat_template.jinja` counts before `chat_template.json`, and that before tokenizer_config.json; variants are
    named there, or are files in `additional_chat_templates`.
    """
    named = _listed(read_json_if_there(folder / "tokenizer_config.json").get("chat_template"))
    named |= _listed(read_json_if_there(folder / "chat_template.json").get("chat_template"))
    files = {"default": folder / "chat_template.jinja", "tool_use": folder / "additional_chat_templates/tool_use.jinja"}
    named |= {name: read_text(file) for name, file in files.items() if file.is_file()}
    return _chosen(named, folder)


def _chosen(named: Mapping[str, object], path: Path) -> Sources | None:
    for name, source in named.items():
        if source is not None and not isinstance(source, str):
            raise BadFile(f"{path}: the chat template {name!r} is {type(source).__name__}, not text")
    texts = {name: source for name, source in named.items() if isinstance(source, str)}
    default, tools = texts.get("default"), texts.get("tool_use")
    if default is not None:
        return Sources(default, tools)
    return None if tools is None else Sources(tools, None)


def _listed(entry: object) -> dict[str, object]:
    """The templates of a JSON entry by name: one text, a list of records with name and template, or an object."""
    if isinstance(entry, list):
        records = [record for record in entry if isinstance(record, dict)]
        return {str(record.get("name")): record.get("template") for record in records}
    if isinstance(entry, dict):
        return dict(entry)
    return {} if entry is None else {"default": entry}
