"""LangChain's `ChatOpenAI` with `use_responses_api`."""

from checks import FEW, MODEL, check
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    yes: bool


@tool
def look(far: bool) -> str:
    """Look somewhere."""
    return "the sea"


model = ChatOpenAI(model=MODEL, use_responses_api=True, max_tokens=FEW)
check("an answer", model.invoke("hello").text)
check("a stream", "".join(part.text for part in model.stream("hello")))
longer = ChatOpenAI(model=MODEL, use_responses_api=True)
called = longer.bind_tools([look], tool_choice="required").invoke("hello")
check("a function call", called.tool_calls[0]["name"] == "look")
history = [HumanMessage("hello"), called, ToolMessage("the sea", tool_call_id=called.tool_calls[0]["id"])]
check("its output", model.bind_tools([look], tool_choice="none").invoke(history).text)
check("a typed answer", isinstance(longer.with_structured_output(Answer).invoke("hello"), Answer))
