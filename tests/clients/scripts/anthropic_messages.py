"""The `anthropic` client: `messages.*`, `models.*`."""

import asyncio

import anthropic
from checks import FEW, MODEL, check
from pydantic import BaseModel

LOOK = {
    "name": "look",
    "description": "Look somewhere.",
    "input_schema": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
}
HELLO = {"role": "user", "content": "hello"}


class Answer(BaseModel):
    yes: bool


client = anthropic.Anthropic()
made = client.messages.create(model=MODEL, messages=[HELLO], max_tokens=FEW, system="Be brief.")
check("create", made.content[0].text)
events = list(client.messages.create(model=MODEL, messages=[HELLO], max_tokens=FEW, stream=True))
check("create, streamed", (events[0].type, events[-1].type) == ("message_start", "message_stop"))
with client.messages.stream(model=MODEL, messages=[HELLO], max_tokens=FEW) as stream:
    said = "".join(stream.text_stream)
    check("stream", said and stream.get_final_text() == said)
parsed = client.messages.parse(model=MODEL, messages=[HELLO], max_tokens=100, output_format=Answer)
check("parse", isinstance(parsed.parsed_output, Answer))

words = {"model": MODEL, "tools": [LOOK], "max_tokens": 200}
called = client.messages.create(
    messages=[HELLO], tool_choice={"type": "any", "disable_parallel_tool_use": True}, **words
)
call = called.content[0]
check("a tool call", called.stop_reason == "tool_use" and isinstance(call.input["far"], bool))
with client.messages.stream(messages=[HELLO], tool_choice={"type": "tool", "name": "look"}, **words) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_message()
check("a tool call, streamed", "input_json" in kinds and final.content[0].name == "look")
result = {"type": "tool_result", "tool_use_id": call.id, "content": "the sea"}
turns = [HELLO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
after = client.messages.create(messages=turns, tool_choice={"type": "none"}, **words)
check("its result", after.content[0].text)


@anthropic.beta_tool
def look(far: bool) -> str:
    """Look somewhere.

    Args:
        far: whether to look into the distance.
    """
    return f"the sea, {far=}"


runner = client.beta.messages.tool_runner(
    model=MODEL, messages=[HELLO], tools=[look], tool_choice={"type": "any"}, max_tokens=200, max_iterations=2
)
check("the tool runner", [message.stop_reason for message in runner] == ["tool_use"] * 2)

counted = client.messages.count_tokens(model=MODEL, messages=[HELLO], system="Be brief.")
n_read = made.usage.input_tokens + made.usage.cache_read_input_tokens
check("count_tokens", counted.input_tokens == n_read)
check("models", client.models.list().data[0].id == client.models.retrieve(MODEL).id == MODEL)
try:
    client.messages.create(model="other", messages=[HELLO], max_tokens=FEW)
    told = ""
except anthropic.NotFoundError as error:
    told = error.request_id
check("an error with its request id", told)


async def at_once() -> int:
    async with anthropic.AsyncAnthropic() as several:
        made = await asyncio.gather(
            *(several.messages.create(model=MODEL, messages=[HELLO], max_tokens=FEW) for _ in range(8))
        )
    return len([one for one in made if one.content])


check("eight at once", asyncio.run(at_once()) == 8)
