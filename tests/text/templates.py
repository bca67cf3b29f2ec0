"""Chat templates in the styles that models use, written for these tests."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HEADERS = """\
{{- bos_token }}
{%- if date_string is not defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today is " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- "<|python_tag|>" + call.function.name + "(" + call.function.arguments | tojson + ")<|eom_id|>" }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {{- "<|start_header_id|>" + message['role'] + "<|end_header_id|>\\n\\n" }}
    {{- message['content'] | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""

TURNS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

TOOLS = """\
{%- if tools %}
<tools>
{%- for tool in tools %}
{{ tool | tojson(indent=2) }}
{%- endfor %}
</tools>
{% endif %}
{%- for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}
{%- for message in messages %}
<{{ message.role }}>{{ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}
<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}
"""

PARTS = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}
        {%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }};{% endif %}{% endfor %}
    {%- endif %}
{%- endfor %}
"""

ONLY_PARTS = """\
{%- for message in messages %}
    {%- for part in message.content %}{% if part.type == 'text' %}{{ '<' + part.text + '>' }}{% endif %}{% endfor %}
{%- endfor %}
"""

GENERATION = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '</s>' }}{% endgeneration %}
    {%- else %}{{ '[' + message.content + ']' }}{% endif %}
{%- endfor %}
"""
