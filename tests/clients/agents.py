"""The model that coding agents are run with: tiny and random, its answers scripted, with room for their prompts.

What an agent is to do, it must read in the answers: a call in the format of the chat template, and after the result,
which alone has the flower's name, a sentence with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ostinato.serve.script import ScriptedAnswer
from tests.cli import tiny_model

CONTEXT: Final = 131_072  # a vocabulary of 300 tokens needs three times as many tokens as a usual one
FLOWER: Final = "heliotrope"
SAID: Final = f"The note names the {FLOWER}."
# As strict as the strictest: agents also send system messages in the middle of a conversation.
TEMPLATE: Final = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\n\nFor a call, write its JSON within <tool_call></tool_call>.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- elif not (tools and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n' }}{{- call.function | tojson }}{{- '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def write_model(path: Path) -> Path:
    """The model, with a template in whose format calls are written within tags."""

    def change(metadata: dict[str, Any]) -> None:
        metadata["tokenizer.chat_template"].value = TEMPLATE

    return tiny_model.write(path, context=CONTEXT, change=change)


def call(tool: str, prompt_has: str = "", /, **arguments: Any) -> ScriptedAnswer:
    """An answer that calls a tool."""
    text = json.dumps({"name": tool, "arguments": arguments})
    return ScriptedAnswer(f"I look into it.\n<tool_call>\n{text}\n</tool_call>", prompt_has)


_KNOWS: Final = ScriptedAnswer(SAID, FLOWER)
CODEX: Final = (
    _KNOWS,
    call("mcp__garden.flower", "mcp__garden.flower", bed=1),
    call("exec_command", cmd="cat note.txt"),
)
CLAUDE: Final = (_KNOWS, call("Bash", command="cat note.txt", description="Read the note"))
