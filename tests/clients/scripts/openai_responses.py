"""The `openai` client: `responses.*`."""

import asyncio

import openai
from checks import FEW, MODEL, check
from pydantic import BaseModel

LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
    "strict": True,
}


class Answer(BaseModel):
    yes: bool


client = openai.OpenAI()
first = client.responses.create(model=MODEL, input="hello", max_output_tokens=FEW)
check("create", first.output_text)
events = list(client.responses.create(model=MODEL, input="hello", max_output_tokens=FEW, stream=True))
check("create, streamed", events[-1].type in ("response.completed", "response.incomplete"))
with client.responses.stream(model=MODEL, input="hello", text_format=Answer) as stream:
    kinds = [event.type for event in stream]
    check(
        "stream",
        isinstance(stream.get_final_response().output_parsed, Answer) and "response.output_text.delta" in kinds,
    )
check("parse", isinstance(client.responses.parse(model=MODEL, input="hello", text_format=Answer).output_parsed, Answer))
called = client.responses.create(model=MODEL, input="hello", tools=[LOOK], tool_choice="required")
call = next(item for item in called.output if item.type != "reasoning")
check("a function call", call.type == "function_call" and call.name == "look")
output = {"type": "function_call_output", "call_id": call.call_id, "output": "the sea"}
after = client.responses.create(
    model=MODEL, input=[output], previous_response_id=called.id, tools=[LOOK], tool_choice="none", max_output_tokens=FEW
)
check("its output, by previous_response_id", after.output_text)
check("retrieve", client.responses.retrieve(first.id).output_text == first.output_text)
listed = list(client.responses.input_items.list(first.id))
check("input_items", listed[0].content[0].text == "hello")
check("input_tokens", client.responses.input_tokens.count(model=MODEL, input="hello").input_tokens)
client.responses.delete(first.id)
try:
    client.responses.retrieve(first.id)
    is_gone = False
except openai.NotFoundError:
    is_gone = True
check("delete", is_gone)


async def at_once() -> int:
    async with openai.AsyncOpenAI() as several:
        made = await asyncio.gather(
            *(several.responses.create(model=MODEL, input=f"hello {n}", max_output_tokens=FEW) for n in range(8))
        )
    return len([one for one in made if one.output_text])


check("eight at once", asyncio.run(at_once()) == 8)
