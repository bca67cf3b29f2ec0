"""How one model holds a conversation: messages and tools become its prompt, its text becomes answer, reasoning, calls.

`ChatFormat` combines the chat template, the format of tool calls (`tools.py`) and the marks of reasoning
(`reasoning.py`). `LLM.chat` and every API of the server use it. Nothing here knows about engines or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.errors import BadOption
from ostinato.options import MadeGrammar, Sampling
from ostinato.text.answer import AnswerReader, GenerationInput
from ostinato.text.bare_calls import ANY_FORM, SPELLED
from ostinato.text.reasoning import Reasoning
from ostinato.text.template import ChatTemplate
from ostinato.text.tokenizer import Tokenizer
from ostinato.text.tools import TemplateMessage, Tool, ToolChoice, ToolFormat


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What a caller's API calls the fields that an error may name."""

    messages: str = "messages"
    format: str = "response_format"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a model is to answer, and how.

    Attributes:
        messages: as chat templates expect them.
        sampling: with the constraint on the answer, if there is one.
        tools: the functions that the model may call; none if `choice` is none.
        choice: whether it must call one, or which.
        parallel: whether it may make several calls.
        continues: whether the answer continues the text of the last message, the assistant's.
        template_options: variables of the template.
        names: of the fields, for errors.
    """

    messages: Sequence[TemplateMessage]
    sampling: Sampling
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "none"
    parallel: bool = True
    continues: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)
    names: FieldNames = FieldNames()

    @property
    def tools_and_other_format(self) -> bool:
        """Whether it has tools and a constraint that is no JSON: the two cannot be combined."""
        rule = self.sampling.rule
        return bool(self.tools) and rule is not None and rule.kind != "schema"


class ChatFormat:
    """The conversations of one model.

    Attributes:
        tools: how it writes calls.
        reasoning: how it marks its reasoning; None if it does not.
    """

    def __init__(
        self, template: ChatTemplate | None, tokenizer: Tokenizer, loop_follows: Callable[[Sampling | None], bool]
    ) -> None:
        """`loop_follows` says whether the loop follows the constraint of a sampling by itself; of None, any."""
        self._template, self._tokenizer, self._loop_follows = template, tokenizer, loop_follows
        self.tools = ToolFormat.for_template(template, tokenizer)
        self.reasoning = Reasoning.for_template(template, tokenizer)

    def render(self, asked: ChatRequest) -> str:
        """The prompt: the conversation as the model reads it, with the tools that it may call."""
        assert self._template is not None  # callers refuse a model without one
        words, messages = dict(asked.template_options), asked.messages
        if asked.tools or any(_is_about_calls(message) for message in messages):
            messages = self.tools.prompt_messages(messages, asked.tools)
            words["tools"] = self.tools.prompt_tools(asked.tools)
        if asked.continues:
            words["continue_final_message"] = True
        prompt = self._template.render(messages, **words)
        begins = words.get("add_generation_prompt", True) and not asked.continues
        return self.tools.with_answer_begun(prompt) if begins else prompt

    def prepare(self, asked: ChatRequest, prompt: str) -> GenerationInput:
        """What the engine is to generate after the rendered prompt, and how its text is read."""
        speaks, thinking, tools = self.tools, self.reasoning, asked.tools
        show = (*(speaks.markers if tools else ()), *(thinking.markers if thinking is not None else ()))
        said = _text_of(asked.messages[-1]) if asked.continues else ""
        sampling = self._sampling(asked, prompt)
        # Only what the grammar tells from text is an optional call: another form's arguments would follow no schema.
        is_told = asked.choice == "auto" and sampling.rule != asked.sampling.rule
        form = None if not is_told else ANY_FORM if asked.sampling.rule is None else SPELLED

        def reader() -> AnswerReader:
            return AnswerReader(
                None if thinking is None else thinking.continued(said) if said else thinking.parser(prompt),
                speaks.parser(tools, form) if tools else None,
                most_calls=None if asked.parallel else 1,  # an optional call may have no grammar that limits it to one
            )

        ids = self._tokenizer.encode_rendered(prompt)
        return GenerationInput(ids, sampling, not said, show, reader)

    def _sampling(self, asked: ChatRequest, prompt: str) -> Sampling:
        """The sampling with the constraint on calls and answer; reasoning before them is free."""
        sampling = self._calling(asked) if asked.tools else asked.sampling
        if asked.tools and asked.choice == "auto" and sampling.rule is None:
            return self._triggered(asked, prompt) or sampling
        return self._after_reasoning(sampling, prompt, calls=sampling.rule != asked.sampling.rule)

    def _calling(self, asked: ChatRequest) -> Sampling:
        """The sampling whose answer is the forced call, if there is one, and otherwise follows the requested schema."""
        format = asked.sampling.rule
        schema = None if format is None else format.text
        rule = self.tools.grammar(asked.tools, asked.choice, parallel=asked.parallel, schema=schema)
        if rule is None:
            return asked.sampling
        return replace(asked.sampling, schema=None, json_mode=False, grammar=MadeGrammar(rule))

    def _triggered(self, asked: ChatRequest, prompt: str) -> Sampling | None:
        """The sampling whose optional calls follow their functions' schemas; None where the loop cannot follow that by
        itself: then they are unconstrained, since masks of the host would delay every token."""
        speaks = self.tools
        if not self._loop_follows(None) or (asked.continues and speaks.writes_messages):
            return None
        for loose in (False, True):  # with all schemas it may be too long, or take too many states
            rule = speaks.triggered_grammar(asked.tools, parallel=asked.parallel, loose=loose)
            if rule is None:
                return None
            try:
                made = replace(asked.sampling, grammar=MadeGrammar(rule))
                if not speaks.writes_messages:  # messages hold the reasoning already
                    made = self._after_reasoning(made, prompt, calls=True)
            except BadOption:  # it is too long
                continue
            if self._loop_follows(made):
                return made
        return None

    def _after_reasoning(self, sampling: Sampling, prompt: str, *, calls: bool) -> Sampling:
        return sampling if self.reasoning is None else self.reasoning.before(sampling, prompt, calls=calls)


def without_oldest_turns(messages: Sequence[TemplateMessage]) -> list[list[TemplateMessage]]:
    """What remains of a conversation without its oldest turns, the longest first: the system messages that open it, and
    everything from a later message of the user on.

    >>> talk = [{"role": role, "content": ""} for role in ("system", "user", "assistant", "user")]
    >>> [[message["role"] for message in shorter] for shorter in without_oldest_turns(talk)]
    [['system', 'user']]
    """
    n_system = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = (index for index in range(n_system + 1, len(messages)) if messages[index]["role"] == "user")
    return [[*messages[:n_system], *messages[start:]] for start in starts]


def room_for_answer(sampling: Sampling, context: int) -> int:
    """The tokens that a shortened conversation leaves for its answer: the answer's limit if it has one, otherwise a
    quarter of the context; at most half of the context."""
    return min(sampling.max_tokens or context // 4, context // 2)


def _is_about_calls(message: TemplateMessage) -> bool:
    return bool(message.get("tool_calls")) or message.get("role") == "tool"


def _text_of(message: TemplateMessage) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
