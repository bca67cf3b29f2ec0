"""One answer as it is generated: tokens become text until the answer ends, and a completion then describes it.

The engine's requests are token ids; here the tokenizer turns them into text. Stop strings end an answer here, because
only the text shows them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.engine.request import FinishReason, GrammarPath, HeldSequence, Request, Token
from ostinato.options import Sampling
from ostinato.text.answer import CallDelta, GenerationInput
from ostinato.text.stream import TextStream
from ostinato.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Timings:
    """How long an answer took, in seconds. Decoding is timed by the device's own clock.

    Attributes:
        load_s: loading the model, once.
        wait_s: in the queue, until the prompt began.
        prefill_s: computing the prompt.
        first_token_s: from the request to its first token, the wait in the queue included.
        decode_s: all tokens after the first.
        decode_tok_s: their pace in tokens per second; None for an answer of one token.
        mask_s: the part of `decode_s` spent waiting for the host, where it computes after each token which tokens a
            schema or a grammar allows next.
        grammar: where the schema or grammar is followed: `device`, `device+stack` (for values that nest) or `host`;
            None without one.
    """

    load_s: float
    wait_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float
    decode_tok_s: float | None
    mask_s: float = 0.0
    grammar: GrammarPath | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model.

    Attributes:
        token_id: the token.
        logprob: its log-probability.
        top: the most likely tokens there with their log-probabilities, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model asks for.

    Attributes:
        id: names the call; the message with its result has it as `tool_call_id`.
        name: of the function.
        arguments: JSON text, as the model wrote it: an object, unless the answer was cut off.
    """

    id: str
    name: str
    arguments: str


class _Digest:
    """A field that is given as a function and computed when it is first read."""

    def __get__(self, completion: Completion | None, _: type | None = None) -> str:
        if completion is None:
            raise AttributeError("a digest is of one completion")
        held = vars(completion)
        if callable(held["digest"]):
            held["digest"] = held["digest"]()
        found: str = held["digest"]
        return found

    def __set__(self, completion: Completion, value: str | Callable[[], str]) -> None:
        vars(completion)["digest"] = value


@dataclass(frozen=True)
class Completion:
    """An answer, and how it was made.

    Attributes:
        text: the answer, without stop strings and control tokens; in a chat without reasoning and calls.
        token_ids: its tokens, including the one that ended it.
        prompt_ids: the prompt's tokens.
        finish_reason: `stop` (the model's end, or a stop string or id) or `length` (`max_tokens`, or the context).
        logprobs: of each token; None unless `Sampling.logprobs` asked for them.
        timings: how long it took.
        seed: the seed that was used, also if none was given.
        cached_tokens: tokens of the prompt that were in memory already and not computed again.
        digest: a hash of the model, the options that matter and the token ids: same digest, same computation. It is
            computed when it is read, or when the completion is pickled or becomes a dictionary.
        reasoning: in a chat, what a thinking model wrote before its answer; else empty.
        tool_calls: in a chat with tools, the calls that the model asks for.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    timings: Timings
    seed: int
    cached_tokens: int
    digest: _Digest = field(default=_Digest(), compare=False)
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as the assistant's message, to be appended to the conversation."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **thought, **({"tool_calls": calls} if calls else {})}

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        counts = f"prompt_ids=<{len(self.prompt_ids)} ids>, token_ids=<{len(self.token_ids)} ids>"
        return f"Completion(text={shown!r}, finish_reason={self.finish_reason!r}, {counts})"

    def __getstate__(self) -> dict[str, Any]:
        """Plain data, as for pickle: the digest is computed."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer as it comes.

    Attributes:
        text: the text that can be shown now; it may be empty while a character or a stop string is incomplete.
        token_id: the token that it came with.
        finish_reason: why the answer ended; None before the last piece.
        completion: the whole answer; None before the last piece.
        stop: the stop string that ended the answer; None if none did.
        reasoning: the part of `Completion.reasoning` that can be shown now.
    """

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    stop: str | None = None
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """What all answers of one model share. Digests use `facts` about its loading and the `fingerprint` of its files."""

    tokenizer: Tokenizer
    load_s: float
    facts: Mapping[str, Any]
    fingerprint: Callable[[], str]
    n_rope_sets: int = 1

    def digest(
        self, sampling: Sampling, prompt: Sequence[int], ids: Sequence[int], rope_set: int = 0
    ) -> Callable[[], str]:
        """A function that computes the digest on demand: hashing a large model takes seconds the first time."""
        words = dataclasses.asdict(sampling)
        for name in ("schema", "json_mode", "regex", "choice", "grammar"):
            del words[name]
        words |= {} if sampling.rule is None else {"rule": sampling.rule}
        words["stop_ids"] = words.pop("stop_token_ids")  # by its first name, so that digests of all versions compare
        if not sampling.temperature:
            words["seed"] = None  # greedy: the seed was not used
        words["logit_bias"] = sorted(sampling.logit_bias.items())
        rotated = {"rope_set": rope_set} if self.n_rope_sets > 1 else {}
        content = {**self.facts, **rotated, "sampling": words, "prompt_ids": list(prompt), "token_ids": list(ids)}

        def digest() -> str:
            whole = {**content, "model": self.fingerprint()}
            return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

        return digest


class Answer:
    """Its text and tokens so far. `source` may be cancelled."""

    def __init__(self, origin: Origin, asked: GenerationInput, source: Request) -> None:
        self._origin, self._prompt, self._sampling, self.source = origin, asked.ids, asked.sampling, source
        # Text under a grammar is shown byte for byte: a blank at its start belongs to the grammar.
        at_start = asked.fresh and asked.sampling.rule is None
        self._text = TextStream(origin.tokenizer, asked.sampling.stop, at_start=at_start, show=asked.show)
        self._reader = asked.reader()
        self._tokens: list[Token] = []
        self._shown: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def held(self) -> HeldSequence:
        """Prompt and answer without the last token, which no step has read."""
        tokens = [*self._prompt, *(token.token for token in self._tokens[:-1])]
        return HeldSequence(tokens, self.source.spec.rope_set)

    def push(self, token: Token) -> Piece:
        """Take the next token and return its piece of text. The last piece has the completion."""
        self._tokens.append(token)
        text = self._text
        new = "" if token.finish_reason == "stop" else text.push(token.token)
        reason: FinishReason | None = "stop" if text.stopped else token.finish_reason
        if reason is not None and not text.stopped:
            new += text.finish()
        deltas = self._reader.feed(new) + (self._reader.finish() if reason is not None else [])
        new = "".join(delta.content for delta in deltas)
        thought = "".join(delta.reasoning for delta in deltas)
        for delta in deltas:
            if delta.call is not None:
                self._add_call(delta.call)
        self._shown.append(new)
        self._reasoning.append(thought)
        if reason is None:
            return Piece(new, token.token, reasoning=thought)
        return Piece(new, token.token, reason, self._completion(reason), text.met, thought)

    def _add_call(self, call: CallDelta) -> None:
        if call.name is not None:
            self._calls.append(ToolCall(call.id or "", call.name, call.arguments))
        else:
            so_far = self._calls[call.index]
            self._calls[call.index] = dataclasses.replace(so_far, arguments=so_far.arguments + call.arguments)

    def _completion(self, reason: FinishReason) -> Completion:
        tokens, sampling, source = self._tokens, self._sampling, self.source
        n_more, seconds = len(tokens) - 1, (tokens[-1].time_ns - tokens[0].time_ns) / 1e9
        ids = tuple(token.token for token in tokens)
        logprobs = tuple(TokenLogprob(t.token, t.logprob, t.top) for t in tokens)
        assert sampling.seed is not None  # it is complete
        return Completion(
            text="".join(self._shown),
            token_ids=ids,
            prompt_ids=tuple(self._prompt),
            finish_reason=reason,
            logprobs=logprobs if sampling.logprobs is not None else None,
            timings=Timings(
                load_s=self._origin.load_s,
                wait_s=source.wait_s,
                prefill_s=source.prefill_s,
                first_token_s=source.first_token_s,
                decode_s=seconds,
                decode_tok_s=n_more / seconds if n_more and seconds > 0 else None,
                mask_s=source.mask_s,
                grammar=source.grammar,
            ),
            seed=sampling.seed,
            cached_tokens=source.cached_tokens,
            digest=self._origin.digest(sampling, self._prompt, ids, source.spec.rope_set),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
        )
