"""`openai-agents` with its default API."""

import asyncio

from agents import Agent, ModelSettings, Runner, function_tool
from checks import FEW, MODEL, check
from pydantic import BaseModel

seen: list[bool] = []


@function_tool
def look(far: bool) -> str:
    """Look somewhere."""
    seen.append(far)
    return "the sea"


class Answer(BaseModel):
    yes: bool


async def main() -> None:
    few = ModelSettings(max_tokens=FEW)
    plain = Agent(name="plain", instructions="Be brief.", model=MODEL, model_settings=few)
    first = await Runner.run(plain, "hello")
    check("an answer", first.final_output)
    # Once a tool was called, the choice is the model's again.
    forced = ModelSettings(tool_choice="required", max_tokens=200)
    calling = Agent(name="calling", tools=[look], model=MODEL, model_settings=forced)
    ran = await Runner.run(calling, "hello", max_turns=4)
    check("a tool, and an answer after it", seen and ran.final_output is not None)
    typed = Agent(name="typed", output_type=Answer, model=MODEL)
    check("a typed answer", isinstance((await Runner.run(typed, "hello")).final_output, Answer))
    second = await Runner.run(plain, "and now?", previous_response_id=first.last_response_id)
    check("previous_response_id", second.final_output)
    streamed = Runner.run_streamed(plain, "hello")
    check("a stream", len([event async for event in streamed.stream_events()]) > 3)


asyncio.run(main())
