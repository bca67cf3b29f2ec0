"""The `ollama` client: `chat`, `generate`, `embed`, `list`, `show`, `ps`, also asynchronous."""

import asyncio

import ollama
from checks import FEW, MODEL, check
from pydantic import BaseModel

HELLO = {"role": "user", "content": "hello"}
SHORT = {"num_predict": FEW, "seed": 1}


class Answer(BaseModel):
    yes: bool


def look(far: bool) -> str:
    """Look somewhere.

    Args:
        far: whether to look into the distance.
    """
    return f"the sea, {far=}"


made = ollama.chat(model=MODEL, messages=[HELLO], options=SHORT)
check("chat", made.message.content and made["message"]["content"] == made.message.content)
check("counts and durations", made.eval_count == FEW and made.total_duration >= made.eval_duration > 0)
parts = list(ollama.chat(model=MODEL, messages=[HELLO], options=SHORT, stream=True))
check("chat, streamed", "".join(part.message.content for part in parts) == made.message.content)
check("its end", parts[-1].done and parts[-1].done_reason == "length" and not parts[0].done)
generated = ollama.generate(model=MODEL, prompt="hello", system="Be brief.", options=SHORT)
check("generate", generated.response)
parts = list(ollama.generate(model=MODEL, prompt="hello", system="Be brief.", options=SHORT, stream=True))
check("generate, streamed", "".join(part.response for part in parts) == generated.response)
check("generate, raw", ollama.generate(model=MODEL, prompt="hello", raw=True, options=SHORT).response)

parsed = ollama.chat(model=MODEL, messages=[HELLO], format=Answer.model_json_schema())
check("a schema", Answer.model_validate_json(parsed.message.content))
check("json", ollama.chat(model=MODEL, messages=[HELLO], format="json", options=SHORT).message.content[0] == "{")
# A random model calls a function only if it must.
forced = {"num_predict": 200, "tool_choice": "required", "parallel_tool_calls": False}
called = ollama.chat(model=MODEL, messages=[HELLO], tools=[look], options=forced)
call = called.message.tool_calls[0].function
check("a tool call", call.name == "look" and isinstance(call.arguments["far"], bool))
parts = list(ollama.chat(model=MODEL, messages=[HELLO], tools=[look], options=forced, stream=True))
check("a tool call, streamed", [part.message.tool_calls for part in parts if part.message.tool_calls])
result = {"role": "tool", "tool_name": call.name, "content": look(**call.arguments)}
after = ollama.chat(model=MODEL, messages=[HELLO, called.message, result], tools=[look], options=SHORT)
check("its result", after.message.content or after.message.tool_calls)
check("think", ollama.chat(model=MODEL, messages=[HELLO], think=True, options=SHORT, keep_alive="5m").done)

embedded = ollama.embed(model=MODEL, input=["one", "two"])
check("embed", len(embedded.embeddings) == 2 and embedded.prompt_eval_count)
check("embeddings", list(ollama.embeddings(model=MODEL, prompt="one").embedding) == list(embedded.embeddings[0]))
name = ollama.list().models[0].model
check("list", name == f"{MODEL}:latest" and ollama.chat(model=name, messages=[HELLO], options=SHORT).done)
shown = ollama.show(name)
check("show", shown.modelinfo["general.architecture"] and "tools" in shown.capabilities)
check("ps", ollama.ps().models[0].model == name)
try:
    ollama.pull("other")
    told = ""
except ollama.ResponseError as error:
    told = error.error
check("an error that names our command", "ostinato pull" in told)


async def at_once() -> int:
    client = ollama.AsyncClient()

    async def one() -> str:
        stream = await client.chat(model=MODEL, messages=[HELLO], options=SHORT, stream=True)
        return "".join([part.message.content async for part in stream])

    async with client:
        made = await asyncio.gather(*(one() for _ in range(8)))
    return len([one for one in made if one])


check("eight at once", asyncio.run(at_once()) == 8)
