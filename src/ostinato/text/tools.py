"""Tools: writes definitions into a prompt, and parses calls in an answer.

A model writes calls in the format it was trained on; its chat template shows which. `ToolFormat` knows the formats of
the supported families: the template's input, the parser of the answer's text (`call_parser.py`), and a grammar for
answers that must be calls. For a template without tools, the system message describes them.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ostinato.errors import BadInput, BadOption, HardwareCannot, quoted
from ostinato.options import Rule
from ostinato.text import block_calls, call_grammar, channels
from ostinato.text.answer import Parser
from ostinato.text.bare_calls import END, SPACE, BareForm, begin_rules
from ostinato.text.block_calls import GEMMA_MARKERS, PYTHON_MARKERS, BlockCalls, BlockForm
from ostinato.text.call_parser import JsonCalls
from ostinato.text.grammar import compact, literal, with_control_tokens
from ostinato.text.literals import GEMMA_QUOTE, as_json
from ostinato.text.program import Unfollowable
from ostinato.text.template import ChatTemplate
from ostinato.text.tokenizer import Tokenizer

MAX_TOOLS: Final = 128
MAX_NAME: Final = 128  # OpenAI takes 64, Anthropic 128

TemplateMessage: TypeAlias = dict[str, Any]
# fmt: off
FormatName = Literal[
    "hermes", "tags", "seed", "atem", "key-tags", "llama", "mistral", "mistral-named", "phi", "granite", "nemotron",
    "cohere", "deepseek", "deepseek-fenced", "harmony", "python", "gemma", "plain",
]
# fmt: on

_NAME: Final = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")
_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_LETTERS: Final = string.ascii_letters + string.digits


class ToolPlace(NamedTuple):
    """Where a tool stands in a request, for errors."""

    tool: str
    function: str
    parameters: str

    @staticmethod
    def of(index: int) -> ToolPlace:
        """In OpenAI's `tools`."""
        function = f"tools[{index}].function"
        return ToolPlace(f"tools[{index}]", function, f"{function}.parameters")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call; `parameters` is a JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    place: str = field(default="parameters", compare=False)  # of `parameters` in the request, for errors

    @property
    def definition(self) -> dict[str, Any]:
        """As templates are given it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | Tool


def read_tools(definitions: Any, places: Sequence[ToolPlace] | None = None) -> tuple[Tool, ...]:
    """OpenAI's `tools` checked; BadInput names the first that is none, by its place where the request has another form.

    >>> [tool.name for tool in read_tools([{"type": "function", "function": {"name": "look"}}])]
    ['look']
    """
    if definitions is None:
        return ()
    if not isinstance(definitions, Sequence) or isinstance(definitions, (str, bytes)):
        raise BadInput(f"tools is {type(definitions).__name__}; it must be a list of functions")
    if len(definitions) > MAX_TOOLS:
        raise BadInput(f"tools has {len(definitions)} entries; at most {MAX_TOOLS} can be given")
    places = [ToolPlace.of(index) for index in range(len(definitions))] if places is None else places
    tools = tuple(_read_tool(place, definition) for place, definition in zip(places, definitions, strict=True))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise BadInput(f"{places[index].tool} is a second function of the name {name!r}; each needs its own")
    return tools


def _read_tool(where: ToolPlace, definition: Any) -> Tool:
    if not isinstance(definition, Mapping) or definition.get("type", "function") != "function":
        raise BadInput(f"{where.tool} must be of the form {{'type': 'function', 'function': {{'name': ...}}}}")
    function = definition.get("function")
    if not isinstance(function, Mapping):
        raise BadInput(f"{where.function} is missing; it must have a name")
    name, text, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        allowed = f"1 to {MAX_NAME} letters, digits, '_', '.' or '-'"
        raise BadInput(f"{where.function}.name is {quoted(name)}; it must be {allowed}")
    if not isinstance(text, str | None):
        raise BadInput(f"{where.function}.description is {type(text).__name__}; it must be text")
    if not isinstance(parameters, Mapping | None):
        raise BadInput(f"{where.parameters} is {type(parameters).__name__}; it must be a JSON schema")
    kinds = (parameters or {}).get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise BadInput(f"{where.parameters} of {name!r} must describe an object; its type is {quoted(kinds)}")
    return Tool(name, text or "", parameters or {"type": "object", "properties": {}}, where.parameters)


def allowed(tools: Sequence[Tool], names: Sequence[Any]) -> tuple[Tool, ...]:
    """Of the tools, those that `tool_choice` allows by name; BadInput names one that is not there."""
    known = [tool.name for tool in tools]
    for name in names:
        if name not in known:
            raise BadInput(f"tool_choice allows the function {quoted(name)}, which is not among the tools")
    return tuple(tool for tool in tools if tool.name in names)


def read_allowed(choice: Any, tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, and OpenAI's `tool_choice` checked, which may be `{"type": "allowed_tools",
    "allowed_tools": {"mode": ..., "tools": [...]}}` here."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tuple(tools), read_choice(choice, tools)
    given = choice.get("allowed_tools")
    given = given if isinstance(given, Mapping) else {}
    mode, listed = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise BadInput("tool_choice.allowed_tools must have a mode, auto or required, and a list of tools")
    functions = [entry.get("function") if isinstance(entry, Mapping) else None for entry in listed]
    names = [function.get("name") if isinstance(function, Mapping) else None for function in functions]
    tools = allowed(tools, names)
    return tools, read_choice(mode, tools)


def read_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """OpenAI's `tool_choice` checked: a word, or `{"type": "function", "function": {"name": ...}}`."""
    if choice is None or choice == "auto":
        return "auto" if tools else "none"
    if choice == "none":
        return "none"
    if choice == "required":
        if not tools:
            raise BadInput("tool_choice is 'required', and there are no tools")
        return "required"
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.name == name:
            return tool
    if isinstance(name, str):
        known = ", ".join(tool.name for tool in tools) or "none"
        raise BadInput(f"tool_choice names the function {quoted(name)}; the tools are: {known}")
    raise BadInput(f"tool_choice is {quoted(choice)}; it must be none, auto, required, or name a function")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one model writes calls. `markers` are texts that an answer's text must show, control tokens or not."""

    name: FormatName
    markers: tuple[str, ...]
    special: Mapping[str, int]  # the ids of markers that are control tokens
    system: bool = True  # whether the template takes a system message,
    lists_tools: bool = True  # writes definitions of tools,
    writes_calls: bool = True  # and calls made before
    joins_arguments: bool = False  # whether it joins their arguments to other text, and so takes JSON text
    other_control: tuple[int, ...] = ()  # ids of control tokens that are no markers and end no answer

    @staticmethod
    def for_template(template: ChatTemplate | None, tokenizer: Tokenizer) -> ToolFormat:
        """The format of a template; if it has none, our own, which the system message describes to the model."""
        source = "" if template is None else template.tool_source or template.source
        name = _format_of(source)
        markers = _SHAPES[name].markers
        special = tokenizer.control_ids(markers)
        no_system = bool(re.search(r"[Ss]ystem role not supported", source))
        no_system |= "must alternate" in source and "system" not in source  # Mistral 7B
        lists_tools = name not in ("phi", "plain") and _LISTS_TOOLS.search(source) is not None
        other = tuple(sorted(tokenizer.hidden - tokenizer.eog_ids - set(special.values())))
        writes_calls, joins_arguments = "tool_calls" in source, _JOINS_ARGUMENTS.search(source) is not None
        return ToolFormat(
            name, markers, special, not no_system, lists_tools, writes_calls, joins_arguments, other_control=other
        )

    # Into the prompt

    def prompt_tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        """The template's `tools`; None if the template does not use them."""
        return [tool.definition for tool in tools] if tools and self.lists_tools else None

    def prompt_messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[TemplateMessage]:
        """The conversation as the template wants it: calls made before and their results, and tools where need be."""
        asked = [_with_objects(message) for message in messages]
        if tools and not self.lists_tools and self.name not in ("phi", "plain"):
            asked = _with_preface(asked, self._preface(tools), system=self.system)
        match self.name:
            case "llama":
                return [one for message in asked for one in _one_call_each(message)]
            case "mistral" | "mistral-named":
                return [_with_short_ids(message) for message in asked]
            case "phi":
                return _for_phi(asked, tools)
            case "harmony":
                return _for_channels(asked)
            case "python":
                thoughts = [_with_thinking(message) for message in asked]
                return thoughts if self.writes_calls else [_in_python(message) for message in thoughts]
            case "granite":
                return [_in_json_list(message) for message in asked]
            case "deepseek" | "deepseek-fenced":
                called = [_with_null_content(message) for message in asked]
                return [_with_text_arguments(message) for message in called] if self.joins_arguments else called
            case "plain":
                plain = _in_plain_texts(asked)
                return _with_preface(plain, self._preface(tools), system=self.system) if tools else plain
        return asked

    def with_answer_begun(self, prompt: str) -> str:
        """A rendered prompt with the beginning of the answer, which Gemma 4's template leaves out behind the result of
        a call that has text beside it."""
        return f"{prompt}<|turn>model\n" if self.name == "gemma" and prompt.endswith("<turn|>\n") else prompt

    def _preface(self, tools: Sequence[Tool]) -> str:
        functions = "\n".join(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools)
        shape = _SHAPES[self.name]
        call = shape.begin.replace("NAME", "function name").replace('"function name"', "function name")
        form = f"{shape.first}{call}object of its arguments{shape.end}{shape.last}"
        what = "JSON of the form" if self.name == "plain" else "a text of the form"
        return (
            "You can call these functions, given as JSON with schemas of their parameters:\n"
            f"{functions}\n"
            f"To call one, answer with nothing but {what} {form}. Its result will be given to you."
        )

    # Out of the answer

    def parser(self, tools: Sequence[Tool], form: BareForm | None = None) -> Parser:
        """The parser of calls in an answer's text; `AnswerReader` combines it with the parser of reasoning. `form`: how
        a call without a marker begins under the grammar that tells optional calls from text; None without that."""
        told = form is not None
        if self.name in _BLOCKS:
            return BlockCalls(_BLOCKS[self.name], _call_id, {tool.name: tool.parameters for tool in tools})
        match self.name:
            case "hermes":
                openers = ["<tool_call>"] if told else ["<tool_call>", "<tool_calls>"]
                return JsonCalls(openers, ["</tool_call>", "</tool_calls>"], _call_id, told=told)
            case "mistral" | "mistral-named":
                return JsonCalls(["[TOOL_CALLS]"], [], _short_id, named=_MISTRAL_NAME, told=told)
            case "phi" | "granite":
                openers = ["<|tool_call|>"] if told else ["<|tool_call|>", "functools["]
                return JsonCalls(openers, ["<|/tool_call|>"], _call_id, told=told)
            case "cohere":
                return JsonCalls(["<|START_ACTION|>"], ["<|END_ACTION|>"], _call_id, told=told)
            case "nemotron":
                return JsonCalls(["<TOOLCALL>"], ["</TOOLCALL>"], _call_id, told=told)
            case "deepseek" | "deepseek-fenced":
                outer = (_DEEPSEEK[0], _DEEPSEEK[4]) if told else None
                ends = (*_DEEPSEEK[3:], "```")
                return JsonCalls(_DEEPSEEK[:2], ends, _call_id, named=_DEEPSEEK_NAME, told=told, outer=outer)
            case "harmony":
                return JsonCalls([channels.CALL_BEGIN], ["<|call|>"], _call_id, named=_CHANNEL_NAME)
        behind = [] if form is None else ["}"]  # of the object around the arguments, where those alone are read
        return JsonCalls(self.markers, behind, _call_id, bare=True, known={tool.name for tool in tools}, form=form)

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = True, schema: str | None = None
    ) -> str | None:
        """For `Sampling(grammar=...)`: forces calls as `choice` says; None without a constraint.

        With a `schema` (of `response_format`), an answer that is not a call follows it.
        """
        if choice == "none" or (choice == "auto" and schema is None):
            return None
        callable_now = [choice] if isinstance(choice, Tool) else list(tools)
        for tool in callable_now:
            refused = _refused(json.dumps(_closed(tool.parameters)))
            if isinstance(refused, Unfollowable):
                raise BadOption(f"{tool.place} of {tool.name!r} cannot be followed: {refused}")
        several = parallel and not isinstance(choice, Tool) and not _SHAPES[self.name].single
        lines = self._call_rules(_SHAPES[self.name], callable_now, several=several)
        if choice == "auto":
            lines.append("start: calls | answer")
            lines.append(f"answer: {self._text(_SHAPES[self.name].answer)} %json {_json(json.loads(schema or '{}'))}")
        else:
            lines.append("start: calls")
        return "\n".join(lines)

    @property
    def writes_messages(self) -> bool:
        """Whether an answer is messages with headers, of which reasoning is one."""
        return _SHAPES[self.name].single

    def triggered_grammar(self, tools: Sequence[Tool], *, parallel: bool = True, loose: bool = False) -> str | None:
        """For `Sampling(grammar=...)` where the model may call: any text, and from what begins a call on, that call
        with arguments that follow its function's schema, or with `loose` any arguments. None where the format's
        messages cannot be told from text."""
        shape = _SHAPES[self.name]
        if self.name in _BLOCKS or shape.single:
            functions = {tool.name: _closed(tool.parameters) for tool in tools}
            tokens = call_grammar.Tokens(self.special, self.other_control)
            return call_grammar.triggered(self.name, functions, tokens, parallel=parallel, loose=loose)
        opening = shape.first or shape.begin
        marker = next((marker for marker in shape.markers if opening.startswith(marker)), None)
        if marker is None:
            return self._bare_grammar(shape, tools, parallel=parallel, loose=loose)
        again = "*" if parallel else "?"
        # Control tokens that are no markers stay allowed in text, as without a grammar.
        control = f"<[{','.join(map(str, self.other_control))}]>" if self.other_control else None
        lines = [r"ANY: /(.|\n)*/"]
        if marker in self.special:
            # The parser reads text: a marker that other tokens spell is one to it.
            more = f"({control} TEXT)*" if control else ""
            lines += [f"start: text (calls text){again}", f"text: TEXT {more}"]
            lines.append(f"TEXT: ANY & ~(ANY {literal(marker)} ANY)")
        else:
            shape, before = shape.after(marker), f"(OTHER {control})*" if control else ""
            lines += [f"start: ({before} begin calls){again} {before} OTHER", f"begin[suffix={literal(marker)}]: ANY"]
            lines.append(f"OTHER: ANY & ~(ANY {literal(marker)} ANY)")
        several = parallel and bool(shape.first)
        return "\n".join([*lines, *self._call_rules(shape, tools, several=several, any_object=True, loose=loose)])

    def _bare_grammar(self, shape: _Shape, tools: Sequence[Tool], *, parallel: bool, loose: bool) -> str:
        """Calls without a marker are told from text by their whole beginning, in any form that the parser reads."""
        tags = "".join(f"{self._text(tag)}? " for tag in shape.markers)
        held = " | ".join(map(literal, shape.markers))
        names = " | ".join(literal(tool.name) for tool in tools)
        lines = [
            r"ANY: /(.|\n)*/",
            f"TEXT: ANY & ~(ANY ({held}) ANY)" if held else "TEXT: ANY",
            *begin_rules(),
            f"OTHER: TEXT & ~(BEFORE_NAME ({names}) BEHIND_NAME ANY)",
            *(f"BEGIN_{number}: BEFORE_NAME {literal(tool.name)} BEHIND_NAME" for number, tool in enumerate(tools)),
        ]
        if self.other_control:
            # The text of these is hidden from the parser: behind blanks and one of them a call may still begin, and
            # text that may be the first part of a call has none.
            control = f"<[{','.join(map(str, self.other_control))}]>"
            lines += [f"SPACES: /{SPACE}*/", rf"PLAIN: TEXT & /{SPACE}*[^{{{SPACE[1:]}(.|\n)*/"]
            lines.append(f"start: (SPACES {control})* ({tags}calls | OTHER | PLAIN ({control} TEXT)+)")
        else:
            lines.append(f"start: {tags}calls | OTHER")
        calls = self._call_rules(shape, tools, several=parallel, any_object=True, loose=loose, any_form=True)
        return "\n".join([*lines, *calls])

    def _call_rules(
        self,
        shape: _Shape,
        tools: Sequence[Tool],
        *,
        several: bool,
        any_object: bool = False,
        loose: bool = False,
        any_form: bool = False,
    ) -> list[str]:
        """Rules named `calls` and `call`, in Lark as llguidance reads it. A schema that cannot be followed is refused,
        or with `any_object` replaced by any object, as with `loose` every schema is. `any_form`: calls begin with
        terminals named `BEGIN_0` and so on, and have blanks as the parser takes them."""
        rules = []
        for number, tool in enumerate(tools):
            begin = f"BEGIN_{number}" if any_form else self._text(shape.begin.replace("NAME", tool.name))
            end = f"/{END}/" if any_form else self._text(shape.end)
            rules.append(f"call_{number}: {begin} args_{number} {end}".rstrip())
            if loose or (any_object and _refused(json.dumps(_closed(tool.parameters))) is not None):
                schema = _json({"type": "object"})
            else:
                schema = _json(_closed(tool.parameters))
            rules.append(f"args_{number}: %json {schema}")
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        between = "/; ?/" if any_form else self._text(shape.between)
        more = f"({between} call)*" if several else ""
        rules.append(f"calls: {self._text(shape.first)} call {more} {self._text(shape.last)}")
        return rules

    def _text(self, text: str) -> str:
        """A literal of the grammar; markers that are control tokens by their ids."""
        return with_control_tokens(text, self.special)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The markers of a format, the text around the arguments of a call, and around and between calls."""

    markers: tuple[str, ...]
    begin: str
    end: str
    first: str = ""
    between: str = ""
    last: str = ""
    answer: str = ""  # before an answer that is not a call
    single: bool = False  # an answer ends with its first call

    def after(self, marker: str) -> _Shape:
        """The same behind the marker that its first call begins with."""
        if self.first:
            return replace(self, first=self.first.removeprefix(marker))
        return replace(self, begin=self.begin.removeprefix(marker))


def _tagged(outer: tuple[str, str], before: str = "") -> _Shape:
    """A JSON object between two tags. Formats whose values are no JSON are also read so."""
    return _Shape(outer, before + outer[0] + '\n{"name": "NAME", "arguments": ', "}\n" + outer[1], between="\n")


def _listed(first: str, last: str, *markers: str) -> _Shape:
    return _Shape(markers or (first[:-1], last[1:]), '{"name": "NAME", "arguments": ', "}", first, ", ", last)


_TAGS: Final = ("<tool_call>", "</tool_call>")
_NAMED: Final = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_DEEPSEEK: Final = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
_FENCE: Final = "```"
_LISTS_TOOLS: Final = re.compile(r"\btools\b")
_JOINS_ARGUMENTS: Final = re.compile(r"""\barguments(['"]\])? *\+""")
_NAME_PATTERN: Final = r"([\w.-]{1,256})"
_MISTRAL_NAME: Final = rf"{_NAME_PATTERN}(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?"
_DEEPSEEK_NAME: Final = rf"(?:function{_DEEPSEEK[2]})?{_NAME_PATTERN}(?:{_DEEPSEEK[2]})?(?:\s*```(?:json)?)?"
_CHANNEL_NAME: Final = _NAME_PATTERN + re.escape(channels.CALL_HEADER)
_BLOCKS: Final[Mapping[str, BlockForm]] = {
    "tags": block_calls.TAGS,
    "seed": block_calls.SEED_TAGS,
    "atem": block_calls.ATEM_TAGS,
    "key-tags": block_calls.KEY_TAGS,
    "python": block_calls.PYTHON,
    "gemma": block_calls.GEMMA,
}
_SHAPES: Final[Mapping[FormatName, _Shape]] = {
    "hermes": _tagged(_TAGS),
    "tags": _tagged(_TAGS),
    "seed": _tagged(("<seed:tool_call>", "</seed:tool_call>")),
    "key-tags": _tagged(_TAGS),
    "atem": replace(
        _tagged(("<atem:function_calls>", "</atem:function_calls>"), " to=NAME<|message|>"),
        markers=channels.MARKERS,
        answer=" to=user<|message|>",
        single=True,
    ),
    # Between bare objects, Llama 3 writes a semicolon. After a newline, small models repeat their call.
    "llama": _Shape(("<|python_tag|>",), '{"name": "NAME", "parameters": ', "}", between="; "),
    "plain": _Shape((), '{"name": "NAME", "parameters": ', "}", between="; "),
    "mistral": _listed("[TOOL_CALLS][", "]", _NAMED[0]),
    "mistral-named": _Shape(_NAMED, "[TOOL_CALLS]NAME[ARGS]", ""),
    "phi": _listed("<|tool_call|>[", "]<|/tool_call|>"),
    "granite": _listed("<|tool_call|>[", "]", "<|tool_call|>"),
    "cohere": _Shape(
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        '{"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
        "}",
        "<|START_ACTION|>[",
        ", ",
        "]<|END_ACTION|>",
    ),
    "nemotron": _listed("<TOOLCALL>[", "]</TOOLCALL>"),
    "deepseek": _Shape(
        _DEEPSEEK, f"{_DEEPSEEK[1]}NAME{_DEEPSEEK[2]}", _DEEPSEEK[3], first=_DEEPSEEK[0], last=_DEEPSEEK[4]
    ),
    "deepseek-fenced": _Shape(
        _DEEPSEEK,
        f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}NAME\n{_FENCE}json\n",
        f"\n{_FENCE}{_DEEPSEEK[3]}",
        first=_DEEPSEEK[0],
        last=_DEEPSEEK[4],
    ),
    "harmony": _Shape(
        channels.MARKERS,
        f" to=functions.NAME{channels.CALL_HEADER}",
        "",
        answer="<|channel|>final<|message|>",
        single=True,
    ),
    "python": _listed(f"{PYTHON_MARKERS[0]}[", f"]{PYTHON_MARKERS[1]}"),
    "gemma": _Shape((*GEMMA_MARKERS, GEMMA_QUOTE), f"{GEMMA_MARKERS[0]}call:NAME", GEMMA_MARKERS[1]),
}
# The first text that a template shows, in this order, tells its format.
_SIGNS: Final[Sequence[tuple[str, FormatName]]] = (
    ("<|channel|>commentary", "harmony"),
    ("<atem:invoke", "atem"),
    ("<seed:tool_call>", "seed"),
    ("<|tool_call>call:", "gemma"),
    ("<|tool_call_start|>", "python"),
    ("<|tool_list_start|>", "python"),
    ("List of tools: [", "python"),
    ("<|START_ACTION|>", "cohere"),
    ("<TOOLCALL>", "nemotron"),
    ("<arg_key>", "key-tags"),
)


def _format_of(source: str) -> FormatName:
    if "<|tool|>" in source and "'tools' in message" in source:
        return "phi"
    if _DEEPSEEK[1] in source:  # most of them write calls, and no definitions
        return "deepseek-fenced" if "```json" in source else "deepseek"
    if _LISTS_TOOLS.search(source) is None:
        return "plain"
    for sign, name in _SIGNS:
        if sign in source:
            return name
    if "[TOOL_CALLS]" in source:
        return "mistral-named" if "[ARGS]" in source else "mistral"
    if "<tool_call>" in source:
        return "tags" if "<function=" in source else "hermes"
    if "<|tool_call|>" in source and "<|start_of_role|>" in source:
        return "granite"
    return "llama" if "<|python_tag|>" in source or '"parameters"' in source else "plain"


# Conversations


def _with_objects(message: Mapping[str, Any]) -> TemplateMessage:
    """Arguments of earlier calls as objects, which templates write as JSON themselves, and text beside the calls, which
    may be empty: many templates join it to other text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return dict(message)
    objects = [_with_object(call) for call in calls if isinstance(call, Mapping)]
    content = {"content": message.get("content") or ""} if objects else {}
    return {**message, **content, "tool_calls": objects}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_null_content(message: TemplateMessage) -> TemplateMessage:
    """DeepSeek's templates write calls without text beside them only where the content is null."""
    return {**message, "content": message.get("content") or None} if message.get("tool_calls") else message


def _with_text_arguments(message: TemplateMessage) -> TemplateMessage:
    """Arguments as JSON text again, for a template that joins them to other text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_text(call) for call in calls]} if calls else message


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return dict(call)
    return {**call, "function": {**function, "arguments": as_json(function.get("arguments", {}))}}


def _one_call_each(message: TemplateMessage) -> list[TemplateMessage]:
    """Llama's templates take one call in a message."""
    calls = message.get("tool_calls") or []
    return [message] if len(calls) < 2 else [{**message, "tool_calls": [call]} for call in calls]


def _with_short_ids(message: TemplateMessage) -> TemplateMessage:
    """Mistral's templates take ids of nine letters and digits, and no others."""
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _shortened(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _shortened(str(call.get("id")))} for call in message["tool_calls"]]
    return changed


def _shortened(id: str) -> str:
    if _SHORT_ID.fullmatch(id):
        return id
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in hashlib.sha256(id.encode()).digest()[:9])


def _for_phi(messages: Sequence[TemplateMessage], tools: Sequence[Tool]) -> list[TemplateMessage]:
    changed = []
    for message in messages:
        if message.get("tool_calls"):
            calls = json.dumps([_named(call, "arguments") for call in message["tool_calls"]], ensure_ascii=False)
            message = {
                "role": "assistant",
                "content": f"{_as_text(message.get('content'))}<|tool_call|>{calls}<|/tool_call|>",
            }
        elif message.get("role") == "tool":
            message = {**message, "role": "tool_response"}
        changed.append(message)
    if not tools:
        return changed
    if not changed or changed[0].get("role") != "system":
        changed.insert(0, {"role": "system", "content": ""})
    functions = [tool.definition["function"] for tool in tools]
    return [{**changed[0], "tools": json.dumps(functions, ensure_ascii=False)}, *changed[1:]]


def _with_thinking(message: TemplateMessage) -> TemplateMessage:
    """Some templates read what was thought by another name."""
    thought = message.get("reasoning_content")
    return {"thinking": thought, **message} if thought else message


def _for_channels(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """gpt-oss's template takes one call in a message, tells whose result follows by it, and no content beside what was
    thought."""
    changed: list[TemplateMessage] = []
    left = deque(map(_with_thinking, messages))
    while left:
        message = left.popleft()
        calls = message.get("tool_calls") or []
        content = _as_text(message.get("content"))
        results = list(takewhile(lambda one: one.get("role") == "tool", left)) if calls else []
        for _ in results:
            left.popleft()
        for place, call in enumerate(calls):
            thought = "\n\n".join(filter(None, [message.get("thinking"), content])) if place == 0 else ""
            changed.append({"role": "assistant", "content": "", "thinking": thought, "tool_calls": [call]})
            # Of this turn alone: some clients count their calls anew in each.
            result = next((one for one in results if one.get("tool_call_id") == call.get("id")), None)
            if result is not None:
                results.remove(result)
                changed.append(result)
        changed += results if calls else [message]
    return changed


def _in_python(message: TemplateMessage) -> TemplateMessage:
    """A call in the content, as LFM2 writes it, for a template that leaves calls out."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = []
    for call in calls:
        arguments = _named(call, "arguments")["arguments"]
        pairs = arguments.items() if isinstance(arguments, Mapping) else ()
        inner = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in pairs)
        texts.append(f"{_named(call, 'arguments')['name']}({inner})")
    text = f"{PYTHON_MARKERS[0]}[{', '.join(texts)}]{PYTHON_MARKERS[1]}"
    return {"role": "assistant", "content": _as_text(message.get("content")) + text}


def _in_json_list(message: TemplateMessage) -> TemplateMessage:
    """A call in the content, as Granite 3 writes it."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = json.dumps([_named(call, "arguments") for call in calls], ensure_ascii=False)
    return {"role": "assistant", "content": f"{_as_text(message.get('content'))}<|tool_call|>{texts}"}


def _in_plain_texts(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Calls and results as text. A result and what the user says next to it are one message: many templates want the
    user and the assistant in turn."""
    changed: list[TemplateMessage] = []
    after_result = False
    for message in messages:
        plain, is_result = _in_plain_text(message), message.get("role") == "tool"
        if after_result and plain.get("role") == "user":
            texts = (_as_text(one.get("content")) for one in (changed[-1], plain))
            changed[-1] = {"role": "user", "content": "\n\n".join(texts)}
        else:
            changed.append(plain)
            after_result = is_result
    return changed


def _in_plain_text(message: TemplateMessage) -> TemplateMessage:
    """A call, or its result, for a template that has no form for it."""
    calls = message.get("tool_calls")
    if calls:
        texts = [json.dumps(_named(call, "parameters"), ensure_ascii=False) for call in calls]
        return {"role": "assistant", "content": "\n".join([*filter(None, [_as_text(message.get("content"))]), *texts])}
    if message.get("role") == "tool":
        return {"role": "user", "content": f"Result of the function call: {_as_text(message.get('content'))}"}
    return message


def _named(call: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    return {"name": function.get("name"), arguments: function.get("arguments", {})}


def _with_preface(messages: Sequence[TemplateMessage], preface: str, *, system: bool) -> list[TemplateMessage]:
    """A text before everything: in the system message, or in the first of the user where the template takes none."""
    role = "system" if system else "user"
    if messages and messages[0].get("role") == role:
        first = {**messages[0], "content": f"{preface}\n\n{_as_text(messages[0].get('content'))}"}
        return [first, *messages[1:]]
    return [{"role": role, "content": preface}, *messages]


def _as_text(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


# Grammars


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A function takes the arguments it names, unless its schema says otherwise."""
    schema = {"type": "object", **parameters} | {"type": "object"}  # arguments are an object, whatever else it allows
    if not {"$ref", "anyOf", "oneOf", "allOf", "patternProperties"} & schema.keys():
        schema.setdefault("additionalProperties", False)
    return schema


@lru_cache(MAX_TOOLS * 4)
def _refused(schema: str) -> BadOption | HardwareCannot | None:
    """Why our compiler does not take a schema; clients send the same tools with every turn of a conversation."""
    from ostinato.text.automaton import of_rule

    try:
        of_rule(Rule("schema", schema))
    except (BadOption, HardwareCannot) as error:
        return error.with_traceback(None)
    return None


def _json(schema: Mapping[str, Any]) -> str:
    return json.dumps(compact(schema), ensure_ascii=False)


# Ids


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
