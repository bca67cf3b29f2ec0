"""`pydantic-ai` with a model string that begins with `openai:`."""

import asyncio

from checks import FEW, MODEL, check
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput

few = ModelSettings(max_tokens=FEW, temperature=0.0)


class Answer(BaseModel):
    yes: bool


plain = Agent(f"openai:{MODEL}", instructions="Be brief.", model_settings=few)
check("its default API is responses", "Responses" in type(plain.model).__name__)
ran = plain.run_sync("hello")
check("an answer", ran.output)
check("a second turn", plain.run_sync("and now?", message_history=ran.all_messages()).output)
check("a typed answer, as a tool", isinstance(Agent(plain.model, output_type=Answer).run_sync("hello").output, Answer))
native = Agent(plain.model, output_type=NativeOutput(Answer))
check("a typed answer, by a schema", isinstance(native.run_sync("hello").output, Answer))


async def streamed() -> str:
    async with plain.run_stream("hello") as result:
        parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
    return "".join(parts)


check("a stream", asyncio.run(streamed()))
