"""`litellm.responses`."""

import litellm
from checks import FEW, MODEL, check

LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
}
name = f"openai/{MODEL}"
made = litellm.responses(model=name, input="hello", max_output_tokens=FEW)
check("an answer", made.output[0].content[0].text)
events = list(litellm.responses(model=name, input="hello", max_output_tokens=FEW, stream=True))
kinds = [str(getattr(event.type, "value", event.type)) for event in events]
check("a stream", kinds[-1] in ("response.completed", "response.incomplete") and "response.output_text.delta" in kinds)
one_call = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}
called = litellm.responses(model=name, input="hello", **one_call)
check("a function call", [item.name for item in called.output if item.type == "function_call"] == ["look"])
