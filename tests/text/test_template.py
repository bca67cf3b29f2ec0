"""Chat templates: what reaches them, what they may use, and what a conversation must look like."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import BadFile, BadInput, BadTemplate
from ostinato.files.checkpoint import open_checkpoint
from ostinato.text import renderer_process
from ostinato.text.renderer_process import early_renderer
from ostinato.text.template import ChatTemplate, sources_in_folder, sources_in_gguf, template_from
from ostinato.text.tokenizer import tokenizer_from_gguf
from tests.text.templates import CHATML, GENERATION, HEADERS, ONLY_PARTS, PARTS, TOOLS, TURNS
from tests.text.vocabularies import NOWHERE, byte_level, tokenizer_of

USER = {"role": "user", "content": "hi"}
TALK = [{"role": "system", "content": " Be kind. "}, USER, {"role": "assistant", "content": "Hello <b>é</b>"}, USER]
ANY_ROLE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "Köln & <Bonn>"}}}


@contextmanager
def template(source: str, **more: Any) -> Iterator[ChatTemplate]:
    made = ChatTemplate(source, bos_token="<s>", eos_token="</s>", **more)
    try:
        yield made
    finally:
        made.close()


def render(source: str, messages: Any = (USER,), **options: Any) -> str:
    with template(source) as made:
        return made.render(messages, **options)


def test_a_conversation_becomes_a_prompt() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_bos_and_eos_blocks_and_loop_controls_are_there() -> None:
    loop = "{% for i in range(9) %}\n  {% if i == 2 %}\n    {% break %}\n  {% endif %}\n{{ i }}\n{% endfor %}\n"
    assert render("{{ bos_token }}" + loop + "{{ eos_token }}") == "<s>0\n1\n</s>"


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(BadInput, match=r"messages\[0\].*System role not supported.* renders user, assistant"):
        render(TURNS, TALK)
    with pytest.raises(BadTemplate, match="roles must alternate"):
        render(TURNS, [USER, USER])
    assert render(TURNS) == "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_roles_that_a_template_renders_pass(role: str) -> None:
    for source in (CHATML, HEADERS):
        assert "the content" in render(source, [USER, {"role": role, "content": "the content"}])


@pytest.mark.parametrize(("role", "meant"), [("usr", "user"), ("User", "user"), ("assistent", "assistant")])
def test_a_misspelt_role_is_refused_even_by_a_template_that_prints_any(role: str, meant: str) -> None:
    with pytest.raises(
        BadInput, match=rf"messages\[1\] has the role '{role}', .* '{meant}' misspelt; .* renders system"
    ):
        render(CHATML, [USER, {"role": role, "content": "hi"}])
    assert f"{role}: hi" in render(f"{{% if '{role}' %}}{{% endif %}}" + ANY_ROLE, [{"role": role, "content": "hi"}])


def test_a_role_that_a_template_prints_and_does_not_name_is_refused() -> None:
    told = r"messages\[0\] has the role 'narrator', which is not known; .* renders system, user, assistant, tool"
    with pytest.raises(BadInput, match=told):
        render(CHATML, [{"role": "narrator", "content": "hi"}, USER])


def test_a_role_whose_content_a_template_drops_is_refused_with_those_that_it_renders() -> None:
    source = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }};{% endif %}{% endfor %}"
    for role in ("system", "tool"):
        with pytest.raises(
            BadInput, match=rf"messages\[0\] has the role '{role}', .*left out.* renders user, assistant"
        ):
            render(source, [{"role": role, "content": "once"}, USER])
    assert render(source, [USER, {"role": "assistant", "content": "once"}]) == "hi;once;"


ONLY_FIRST_SYSTEM = """\
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}
    {{- '<' + m.role + '>' + (m.content if m.content is string else m.content | map(attribute='text') | join('+')) }}
{%- endfor %}
"""


@pytest.mark.slow
def test_a_later_system_message_joins_its_neighbours_where_the_template_takes_none() -> None:
    first, later, reply, tool = (
        {"role": role, "content": text}
        for role, text in [("system", "A"), ("system", "L"), ("assistant", "R"), ("tool", "T")]
    )
    expected = [
        ([first, USER, later], "<system>A<user>hi\n\nL"),
        ([USER, later, later], "<user>hi\n\nL\n\nL"),
        ([first, later, USER], "<system>A\n\nL<user>hi"),
        ([USER, reply, later], "<user>hi<assistant>R<user>L"),
        ([USER, reply, later, later, USER, USER], "<user>hi<assistant>R<user>L\n\nL\n\nhi<user>hi"),
        ([USER, reply, tool, later, reply], "<user>hi<assistant>R<tool>T\n\nL<assistant>R"),
        ([first, {"role": "user", "content": [{"type": "text", "text": "p"}]}, later], "<system>A<user>p+L"),
        ([first, USER], "<system>A<user>hi"),
    ]
    for messages, text in expected:
        assert render(ONLY_FIRST_SYSTEM, messages) == text
    dropping = ONLY_FIRST_SYSTEM.replace("{{ raise_exception('system must be first') }}", "{% continue %}")
    assert render(dropping, [first, USER, later]) == "<system>A<user>hi\n\nL"


def test_a_later_system_message_stays_where_the_template_shows_it() -> None:
    later = {"role": "system", "content": "L"}
    assert render(CHATML, [USER, later]).startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>system\nL<|im_end|>")


def test_tools_documents_and_options_reach_the_template() -> None:
    text = render(TOOLS, tools=[WEATHER], documents=[{"title": "T", "text": "D"}], enable_thinking=False)
    assert json.dumps(WEATHER, ensure_ascii=False, indent=2) in text
    assert "[T: D]" in text
    assert text.endswith("<assistant><think></think>")
    assert render(TOOLS) == "<user>hi<assistant>"


def test_json_is_written_as_templates_expect_it() -> None:
    value = {"b": "<é&'>", "a": [1, None, True]}
    assert render("{{ value | tojson }}", value=value) == '{"b": "<é&\'>", "a": [1, null, true]}'
    assert render("{{ value | tojson(indent=4) }}", value=value) == json.dumps(value, ensure_ascii=False, indent=4)
    source = "{{ value | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"
    assert render(source, value=value) == '{"a":[1,null,true],"b":"<\\u00e9&\'>"}'


def test_the_time_can_be_written() -> None:
    assert render("{{ strftime_now('%Y') }}") in (str(datetime.now().year), str(datetime.now().year - 1))


def test_generation_blocks_show_their_body() -> None:
    assert render(GENERATION, TALK[1:]) == "[hi]Hello <b>é</b></s>[hi]"


def test_the_tool_using_variant_is_taken_when_there_are_tools() -> None:
    with template("plain", tool_source="tools: {{ tools | length }}") as made:
        assert made.render([USER]) == "plain"
        assert made.render([USER], tools=[]) == "plain"
        assert made.render([USER], tools=[WEATHER]) == "tools: 1"


def test_typed_parts_reach_a_template_that_shows_them_and_are_joined_for_one_that_does_not() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(PARTS, parts) == "<user>a;b;"
    assert render(PARTS) == "<user>hi"
    assert "user\na\nb<|im_end|>" in render(CHATML, parts)
    assert render("{{ messages[0].content }}", parts) == "a\nb"
    assert render("{{ messages[0]['content'] | trim }}", parts) == "a\nb"


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_parts_are_joined_for_a_role_whose_parts_a_template_prints_as_they_are(role: str) -> None:
    source = PARTS.replace("message.content is string", f"message.content is string or message.role == '{role}'")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": "c", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    places: dict[str, list[dict[str, Any]]] = {"system": [], "assistant": [USER], "tool": [USER, call]}
    before = places[role]
    text = render(source, [*before, {"role": role, "content": parts}, {"role": "user", "content": parts}])
    assert text.endswith(f"<{role}>a\nb<user>a;b;")
    quoted = source.replace("{{ message.content }}", "{{ message.content | tojson | tojson }}")
    assert "a\\\\nb" in render(quoted, [*before, {"role": role, "content": parts}])


def test_parts_are_joined_where_a_template_renders_only_with_tools() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    source = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ 'says ' + messages[0].content }}"
    assert render(source, parts, tools=[WEATHER]) == "weather says a"


def test_parts_are_joined_even_where_the_template_speaks_of_text_itself() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert render('{"text": "{{ messages[0].content }}"}', parts) == '{"text": "a"}'


def test_text_becomes_a_part_for_a_template_that_shows_only_parts() -> None:
    assert render(ONLY_PARTS) == "<hi>"


def test_a_tool_call_needs_no_content() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    text = render(HEADERS, messages)
    assert '<|python_tag|>f({"x": 1})<|eom_id|>' in text
    assert "<|start_header_id|>tool<|end_header_id|>\n\n2<|eot_id|>" in text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages is str"),
        ({"role": "user", "content": "x"}, "messages is dict"),
        (None, "messages is NoneType"),
        ([USER, "hi"], r"messages\[1\] is str"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": 1, "content": "x"}], r"messages\[0\] has no role"),
        ([USER, USER, {"role": "user"}], r"messages\[2\] \(user\) has no content"),
        ([{"role": "user", "content": 7}], r"messages\[0\] \(user\) has a content of type int"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] is str"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"\[0\] has type 'image_url'; this model reads no images",
        ),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\] has type 'audio'; only text parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\] has no text"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(messages: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        render(CHATML, messages)


def test_values_that_are_not_plain_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), loop, {1, 2}):
        with pytest.raises(BadInput, match="must be plain JSON values"):
            render(CHATML, option=value)


def test_a_syntax_error_is_told_with_its_line() -> None:
    with pytest.raises(BadTemplate, match=r"line 3.*nosuchtag"):
        render("a\nb\n{% nosuchtag %}")


def test_an_error_inside_is_told_with_its_line_and_the_next_render_works() -> None:
    with template("\n{% if fail %}{{ nothing.at.all }}{% endif %}ok") as made:
        with pytest.raises(BadTemplate, match="'nothing' is undefined, line 2"):
            made.render([USER], fail=True)
        assert made.render([USER]) == "\nok"


def test_strange_characters_come_through() -> None:
    text = "é👍\u2028\x00\ud800\n\r\t\"'\\"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_a_typical_render_takes_little_time() -> None:
    with template(HEADERS) as made:
        made.render(TALK)
        times = []
        for _ in range(50):
            start = time.perf_counter()
            made.render(TALK)
            times.append(time.perf_counter() - start)
    assert min(times) < 2e-3


def test_many_threads_share_one_template() -> None:
    wrong: list[bool] = []
    with template("{{ messages[0].content }}") as made:

        def work(number: int) -> None:
            message = {"role": "user", "content": f"number {number} " * 1_000}
            wrong.extend(made.render([message]) != message["content"] for _ in range(20))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not any(wrong)
    assert len(wrong) == 160


def test_a_gguf_files_template_knows_its_tokens() -> None:
    tokenizer = tokenizer_of(byte_level())
    metadata = {"tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}", "tokenizer.chat_template.tool_use": "T"}
    made = template_from(sources_in_gguf(metadata, NOWHERE), tokenizer, NOWHERE)
    assert made is not None
    assert made.render([USER]) == "<|im_start|>|<|im_end|>"
    assert made.render([USER], tools=[WEATHER]) == "T"
    made.close()


def test_named_templates_of_a_gguf_file_count_too() -> None:
    for name in ("default", "tool_use"):
        assert sources_in_gguf({f"tokenizer.chat_template.{name}": name}, NOWHERE) == (name, None)
    assert sources_in_gguf({}, NOWHERE) is None
    with pytest.raises(BadFile, match="'default' is int, not text"):
        sources_in_gguf({"tokenizer.chat_template": 5}, NOWHERE)


def test_a_folder_may_keep_its_template_in_many_places(tmp_path: Path) -> None:
    def sources() -> tuple[str, str | None] | None:
        return sources_in_folder(tmp_path)

    assert sources() is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "in config"}))
    assert sources() == ("in config", None)
    named = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
        {"name": "rag", "template": "r"},
    ]
    config.write_text(json.dumps({"chat_template": named}))
    assert sources() == ("d", "t")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "in json"}))
    assert sources() == ("in json", "t")
    (tmp_path / "chat_template.jinja").write_text("in jinja")
    assert sources() == ("in jinja", "t")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more tools")
    assert sources() == ("in jinja", "more tools")
    config.write_text("{")
    with pytest.raises(BadFile, match="tokenizer_config"):
        sources()


@pytest.mark.model
def test_the_default_models_own_template(default_model: Path) -> None:
    metadata = open_checkpoint(default_model).metadata
    made = template_from(
        sources_in_gguf(metadata, default_model), tokenizer_from_gguf(metadata, default_model), default_model
    )
    assert made is not None
    assert made.render([USER]).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert "trained by Hugging Face" in made.render([USER])
    assert "trained by Hugging Face" not in made.render(TALK)
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("source", [CHATML, HEADERS, TURNS, TOOLS, PARTS, GENERATION])
def test_prompts_are_those_of_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages in (TALK[1:], [USER]):
        for generation in (True, False):
            for tools in (None, [WEATHER]):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": generation, "date_string": "today"}
                theirs, _ = render_jinja_template(
                    [messages], chat_template=source, bos_token="<s>", eos_token="</s>", **options
                )
                assert render(source, messages, **options) == theirs[0]


def test_a_process_that_was_started_early_is_the_one_that_renders() -> None:
    with early_renderer():
        (early, _), *_ = renderer_process._spare
        template = ChatTemplate("{{ messages[0]['content'] }}", bos_token="", eos_token="")
        template.start()
        assert template._child is not None
        assert template._child._process is early
    assert template.render([{"role": "user", "content": "hi"}]) == "hi"
    template.close()


def test_a_process_that_was_started_early_and_not_needed_is_ended() -> None:
    with early_renderer():
        (early, _), *_ = renderer_process._spare
    assert early.poll() is not None


# Continuing the last message


@pytest.mark.slow
@pytest.mark.parametrize("source", [CHATML, HEADERS, TURNS, TOOLS, PARTS, ONLY_PARTS, GENERATION])
@pytest.mark.parametrize("parts", [False, True])
def test_a_prompt_that_is_continued_ends_with_the_text_of_its_last_message(source: str, parts: bool) -> None:
    said = "The sea is"
    content: Any = [{"type": "text", "text": said}] if parts else said
    talk = [USER, {"role": "assistant", "content": content}]
    with template(source) as made:
        whole = made.render(talk, add_generation_prompt=False)
        assert made.render(talk, continue_final_message=True) == whole[: whole.rindex(said) + len(said)]
        # A template that trims its messages does not trim what is still being written.
        blank = made.render([USER, {"role": "assistant", "content": "The sea is \n"}], continue_final_message=True)
        assert blank.endswith("The sea is \n")


def test_only_a_text_of_the_assistant_that_the_template_shows_is_continued() -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "x", "arguments": {}}}]}
    for talk, why in (([USER], "the role 'user'"), ([USER, calling], "tool_calls")):
        with pytest.raises(BadInput, match=f"messages.* has {why}; only a text of the assistant"):
            render(CHATML, talk, continue_final_message=True)
    hides = "{% for m in messages %}{{ 'yes' if m.role == 'assistant' and loop.index > 1 else m.content }}{% endfor %}"
    with pytest.raises(BadInput, match=r"messages\[1\] cannot be continued"):
        render(hides, [USER, {"role": "assistant", "content": "x"}], continue_final_message=True)


# Reasoning, and texts of the user after a result

IN_TURN = """\
{%- set seen = namespace(turns=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (seen.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
        {%- set seen.turns = seen.turns + 1 %}
    {%- endif %}
    {{- '<' + m.role + '>' }}
    {%- if m.content is string %}{{ m.content }}
    {%- else %}
        {%- for part in m.content %}
            {{- '(' + part.thinking + ')' if part.type == 'thinking' else part.text + ';' }}
        {%- endfor %}
    {%- endif %}
    {%- for call in m.tool_calls or [] %}{{ '!' + call.function.name }}{% endfor %}
{%- endfor %}
"""
CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
}
RESULT: dict[str, Any] = {"role": "tool", "content": "4"}
REPLY: dict[str, Any] = {"role": "assistant", "content": "R"}
THOUGHT = {"reasoning_content": "so"}


@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_reasoning_becomes_a_part_where_a_template_shows_it_only_there(tools: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    expected = [
        ({**CALLING, **THOUGHT}, "(so)!f"),
        ({**CALLING, **THOUGHT, "content": None}, "(so)!f"),
        ({**CALLING, **THOUGHT, "content": "R"}, "(so)R;!f"),
        ({**CALLING, **THOUGHT, "content": parts}, "(so)a;b;!f"),
        ({**CALLING, "content": "R", "reasoning_content": ""}, "R!f"),
    ]
    with template(IN_TURN) as made:
        for message, text in expected:
            assert made.render([USER, message, RESULT], tools=tools) == f"<user>hi<assistant>{text}<tool>4"
        talk = [USER, {**REPLY, **THOUGHT}, {**USER, **THOUGHT}]
        assert made.render(talk, tools=tools) == "<user>hi<assistant>(so)R;<user>hi"


def test_an_answer_that_is_continued_stands_behind_its_reasoning() -> None:
    for said, text in (("The sea is", "(so)The sea is"), ("", "(so)")):
        talk = [USER, {"role": "assistant", "content": said, **THOUGHT}]
        assert render(IN_TURN, talk, continue_final_message=True) == f"<user>hi<assistant>{text}"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("+ '>' }}", "+ '>' + (m.reasoning_content or '') }}"), "soR!f"),
        (("part.type == 'thinking'", "false"), "R!f"),
        (("m.content is string", "m.content is string or m.tool_calls"), "R!f"),
    ],
    ids=["shows reasoning in both places", "knows parts of text alone", "prints parts beside calls as they are"],
)
def test_reasoning_stays_where_it_is_in_other_templates(change: tuple[str, str], text: str) -> None:
    source = IN_TURN.replace(*change)
    assert source != IN_TURN
    made = render(source, [USER, {**CALLING, **THOUGHT, "content": "R"}, RESULT])
    assert made == f"<user>hi<assistant>{text}<tool>4"


def test_a_users_text_joins_the_result_before_it_where_a_template_refuses_it_there() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    expected: list[tuple[list[Any], str]] = [
        ([RESULT, USER], "<tool>4\n\nhi"),
        ([RESULT, RESULT, USER, USER], "<tool>4<tool>4\n\nhi\n\nhi"),
        (
            [RESULT, USER, CALLING, RESULT, USER, REPLY, USER],
            "<tool>4\n\nhi<assistant>!f<tool>4\n\nhi<assistant>R<user>hi",
        ),
        ([{**RESULT, "content": parts}, {**USER, "content": parts}], "<tool>a\nb\n\na\nb"),
        ([{**RESULT, "content": ""}, USER], "<tool>hi"),
    ]
    with template(IN_TURN) as made:
        for messages, text in expected:
            assert made.render([USER, CALLING, *messages]) == f"<user>hi<assistant>!f{text}"
        for refused in ([USER, USER], [USER, CALLING, RESULT, REPLY, REPLY]):
            with pytest.raises(BadTemplate, match="roles must alternate"):
                made.render(refused)


def test_a_users_text_stays_behind_the_result_where_a_template_takes_it_there() -> None:
    takes = IN_TURN.replace("{{ raise_exception('roles must alternate') }}", "")
    assert render(takes, [USER, CALLING, RESULT, USER]) == "<user>hi<assistant>!f<tool>4<user>hi"
    with_tools = f"{{% if tools %}}{IN_TURN}{{% else %}}{takes}{{% endif %}}"
    with template(with_tools) as made:
        assert made.render([USER, CALLING, RESULT, USER], tools=[WEATHER]).endswith("<tool>4\n\nhi")
        assert made.render([USER, CALLING, RESULT, USER]).endswith("<tool>4<user>hi")


def test_a_tool_that_a_template_cannot_write_decides_nothing_for_later_conversations() -> None:
    source = "{% for tool in tools %}{{ '[' + tool.function.name + ']' }}{% endfor %}" + IN_TURN
    with template(source) as made:
        with pytest.raises(BadTemplate, match="has no attribute 'name'"):
            made.render([USER, {**CALLING, **THOUGHT}, RESULT, USER], tools=[{"function": {}}])
        text = made.render([USER, {**CALLING, **THOUGHT}, RESULT, USER], tools=[WEATHER])
        assert text == "[weather]<user>hi<assistant>(so)!f<tool>4\n\nhi"
