"""The Python interface: `LLM` opens a model and answers; `Completion` is an answer, `Piece` a part of one.

It joins the packages (files, text, engine) and has hardly any arithmetic of its own. `engine/answer.py` turns tokens
into an answer; docs/walk.md follows one request through the files.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Never, Self, TypeAlias, Unpack, overload

import numpy as np

from ostinato.backends.base import Settled
from ostinato.cache import state_bytes
from ostinato.calls import (
    check_call,
    check_path,
    check_template_words,
    each_sampling,
    is_one_prompt,
    is_one_text,
    is_several,
    listed,
    sampling_words,
    whole_ids,
)
from ostinato.engine.answer import Answer, Origin, TokenLogprob
from ostinato.engine.answer import Completion as Completion
from ostinato.engine.answer import Piece as Piece
from ostinato.engine.answer import Timings as Timings
from ostinato.engine.answer import ToolCall as ToolCall
from ostinato.engine.choose import backend_of, choose
from ostinato.engine.constraint import Constrain, Constraint, compiled_grammar
from ostinato.engine.defaults import default_sampling
from ostinato.engine.engine import Engine
from ostinato.engine.load import load_model
from ostinato.engine.request import (
    CLOSED,
    HeldSequence,
    MessageQueue,
    Request,
    RequestMessage,
    RequestSpec,
    Token,
    check_generates,
    check_prompt,
)
from ostinato.engine.saved import largest_state_bytes, load_sequence, save_sequence
from ostinato.engine.stats import SlotView, Stats
from ostinato.engine.texts import TextLogprobs, each_logprobs, each_vector, logits_of, logprobs_of, scores_of
from ostinato.errors import BadFile, BadInput, BadOption, HardwareCannot, QueueFull, Unsupported, listing
from ostinato.extras import check_extra
from ostinato.files import store
from ostinato.files.checkpoint import Checkpoint, open_checkpoint
from ostinato.files.unpack import Floats
from ostinato.models.registry import read_shape
from ostinato.models.shape import Shape
from ostinato.options import (
    MAX_LOGPROBS,
    LoadOptions,
    LoadWords,
    Sampling,
    load_options,
    loads,
)
from ostinato.processes import OpenedHere
from ostinato.text.answer import GenerationInput
from ostinato.text.chat import ChatFormat, ChatRequest
from ostinato.text.of_checkpoint import template_of, tokenizer_of
from ostinato.text.retrieval import forms_of
from ostinato.text.template import ChatTemplate, check_messages
from ostinato.text.tools import read_allowed, read_tools

if TYPE_CHECKING:
    from ostinato.decoder.cells.decoder import Decoder
    from ostinato.decoder.cells.text_encoder import TextEncoder
    from ostinato.text.matchers import Matchers
    from ostinato.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int]
# A conversation: its messages, one message alone, or a text that is one message of the user.
Messages: TypeAlias = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
Samplings: TypeAlias = Sampling | Sequence[Sampling] | None  # for all prompts of a call, or one for each
CheckedInput: TypeAlias = tuple[RequestSpec, GenerationInput]  # what the engine runs, and what its text is made by


class Score(NamedTuple):
    """How well a model predicts a text.

    Attributes:
        n_tokens: tokens that were predicted: all but the first.
        nll: the sum of their negative log-likelihoods, in nats.
        perplexity: e to the power of `nll / n_tokens`.
    """

    n_tokens: int
    nll: float
    perplexity: float


class LLM:
    """A model, ready to answer.

    >>> with LLM("smollm2", context=4096) as llm:                                      # doctest: +SKIP
    ...     print(llm.generate("Once upon a time", Sampling(max_tokens=64)).text)

    Any number of threads may call, and any number of streams may be open: `slots` requests are decoded at once, the
    others wait in the queue. Close it, or use it in a `with` block, to release memory and threads.

    Args:
        model: a GGUF file, a safetensors folder, or a name: `smollm2`, `hf:owner/repo/file.gguf`, `hf:owner/repo`.
            A named model that is not in the store is fetched first.
        load: all options of loading in one record.
        progress: called with the bytes read and the bytes in all while weights load.
        talk: called with a sentence for each default that had to be changed, such as a smaller context.
        options: the fields of `LoadOptions` one by one, in place of `load`.

    Attributes:
        name: the model as it was given.
        path: its file or folder.
        load_s: the seconds that loading took.
        tokenizer: turns text into token ids and back.
        template: its chat template; None if it has none.
        chat_format: how it writes reasoning and tool calls.
        defaults: the sampling options that its files state.
        shape: its family, layers and sizes.

    Raises:
        BadOption: an option is unknown or has a value out of range.
        BadFile: the file is damaged, or is no model.
        UnknownName: there is no such model, or its architecture is not known.
        FetchFailed: a named model could not be fetched; NoNetwork: the place it comes from cannot be reached.
        ContextTooLarge: the `context` asked for does not fit the memory or the model.
        HardwareCannot: the device, the mode or the memory is not there.
    """

    @loads
    def __init__(
        self,
        model: str | Path = store.DEFAULT,
        *,
        load: LoadOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
        talk: Callable[[str], None] | None = None,
        **options: Unpack[LoadWords],
    ) -> None:
        say = talk or (lambda _: None)
        self._opened, self._closed = OpenedHere(), False
        wanted = load_options(load, options)
        self.name = store.given(model)
        self.path = store.resolve(self.name, talk=say)
        started = time.perf_counter()
        self._checkpoint = open_checkpoint(self.path)
        self._options = wanted
        try:
            self._settled = self._load(say, progress)
        except BaseException:
            self._checkpoint.close()
            raise
        self.load_s = time.perf_counter() - started
        facts: dict[str, Any] = {"dtype": self.dtype, "kv_type": self.kv_type, "context": self.context}
        if self.activations is not None:
            facts["activations"] = self.activations  # whose arithmetic is not eager's
        if self._settled.other_sums is not None:
            facts["sums"] = self._settled.other_sums
        fingerprint, n_sets = self._checkpoint.fingerprint, self.shape.n_rope_sets
        self._origin = Origin(self.tokenizer, self.load_s, facts, fingerprint, n_sets)

    def _load(self, talk: Callable[[str], None], progress: Callable[[int, int], None] | None) -> Settled:
        checkpoint = self._checkpoint
        shape = read_shape(checkpoint)
        with ThreadPoolExecutor(1) as beside:
            texts = beside.submit(self._load_tokenizer, shape)
            settled = self._choose(checkpoint, shape, talk)
            if settled.kind == "cuda":  # whose kernels are compiled for as many tokens, before weights are read (E-9)
                texts.result()
                settled = dataclasses.replace(settled, n_tokens=self.tokenizer.vocab_size)

            def refuse_early(done: int, total: int) -> None:
                """Raise a tokenizer's error at once, not after all weights are read."""
                if texts.done():
                    texts.result()
                if progress is not None:
                    progress(done, total)

            model = load_model(checkpoint, shape, settled, refuse_early)
            texts.result()
        self.defaults = default_sampling(checkpoint)
        ends, n_tokens = self.tokenizer.eog_ids, self.tokenizer.vocab_size
        self._constrain = _constrain(self.tokenizer, shape.vocab)
        self._loop_engine = (
            Engine(
                model, settled, eog_ids=ends, n_tokens=n_tokens, queue=self._options.queue, constrain=self._constrain
            )
            if shape.causal or backend_of(settled).opens_encoders
            else None
        )
        if self._loop_engine is not None:
            # What runs: a mode below the chosen one after a fallback; matrices may be on the tape alone.
            model, settled = self._loop_engine.runner.plain_model, self._loop_engine.runner.settled
        self.shape, self._model = shape, model
        self._encoder: TextEncoder | None = None
        if self._loop_engine is None:
            from ostinato.backends.torch.backend import model_of
            from ostinato.decoder.cells.text_encoder import TextEncoder

            self._encoder = TextEncoder(model_of(model, settled))
        for sentence in () if self._loop_engine is None else self._loop_engine.runner.fallen_back:
            talk(sentence)
        self._recent: HeldSequence | None = None  # the last answer and its prompt, or a loaded state
        return settled

    def _choose(self, checkpoint: Checkpoint, shape: Shape, talk: Callable[[str], None]) -> Settled:
        """Backend, mode and memory, before any weights are read."""
        return choose(checkpoint, shape, self._options, talk)

    def _load_tokenizer(self, shape: Shape) -> None:
        self.tokenizer = tokenizer_of(self._checkpoint)
        self.template = template_of(self._checkpoint, self.tokenizer)
        self.retrieval = forms_of(self._checkpoint, self.template, by_words=bool(shape.rank_tokens))
        self.chat_format = ChatFormat(self.template, self.tokenizer, self.loop_follows)

    def __repr__(self) -> str:
        if self._closed:
            return f"<LLM {self.name}, closed>"
        slots = "an encoder" if not self.shape.causal else f"{self._settled.n_slots} slots"
        return f"<LLM {self.name} on {self.device}, {self.mode}, context {self.context}, {slots}>"

    @property
    def device(self) -> str:
        """Where it runs: cpu, or cuda:N."""
        return self._settled.device

    @property
    def mode(self) -> str:
        """How the decode loop is paced."""
        return "eager" if self._loop_engine is None else self._loop_engine.mode

    @property
    def why_not(self) -> tuple[str, ...]:
        """Why no higher mode runs, a sentence for each."""
        return () if self._loop_engine is None else self._loop_engine.why_not

    def loop_follows(self, sampling: Sampling | None = None) -> bool:
        """Whether the loop follows the constraint of an answer by itself, without masks of the host.

        >>> llm.loop_follows(Sampling(regex="[0-9]+"))                                 # doctest: +SKIP

        Args:
            sampling: the options of the answer; None: whether it does so with any.

        Returns:
            False also where the constraint cannot be followed at all.
        """
        if self._loop_engine is None or self._loop_engine.runner.grammars is None:
            return False
        if sampling is None:
            return True
        try:
            found = None if sampling.rule is None else self._constrain(sampling)
        except (BadInput, Unsupported, HardwareCannot):
            return False
        return found is not None and compiled_grammar(found) is not None

    def stats(self) -> Stats:
        """The engine's counts: steps, tokens, gaps between them, pages, and requests in slots and in the queue.

        >>> llm.stats().tokens                                                         # doctest: +SKIP
        """
        return self._engine.stats()

    @property
    def fault(self) -> str | None:
        """The error that ended the engine; None while it runs."""
        return None if self._loop_engine is None else self._loop_engine.fault

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return self._settled.dtype

    @property
    def activations(self) -> str | None:
        """The activations of the native loop, `wide` or `int8`, or `int8` of the persistent kernel; else None."""
        settled = self._settled
        if settled.backend == "tape":
            return settled.activations if settled.activations != "wide" else None
        return settled.activations if settled.weights == "tiles" else None

    @property
    def threads(self) -> int | None:
        """How many threads compute on the CPU; None on a GPU."""
        return self._settled.threads

    @property
    def kv_type(self) -> str:
        """The type of keys and values in the cache."""
        return self._settled.kv_type

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self._settled.context

    # Answers

    @overload
    def generate(self, prompt: str, sampling: Sampling | None = None) -> Completion: ...
    @overload
    def generate(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Completion: ...
    @overload
    def generate(self, prompt: list[str] | list[list[int]], sampling: Samplings = None) -> list[Completion]: ...
    def generate(self, prompt: Any, sampling: Samplings = None, **words: Any) -> Any:
        """Continue a prompt; no chat template is applied.

        >>> llm.generate(["one", "two"], Sampling(max_tokens=8))                       # doctest: +SKIP

        Args:
            prompt: a text, its token ids, or a list of either. Prompts of a list run together, as many at a time as
                there are slots.
            sampling: how tokens are sampled; the default is the model's own. A list has one for each prompt.

        Returns:
            A `Completion`, or a list of them in the order of the prompts.

        Raises:
            PromptTooLong: a prompt does not fit the context. All prompts are checked before the first runs.
            BadInput: a prompt is empty or holds what is no token id.
        """
        one = is_one_prompt(prompt)
        prompts = [prompt] if one else prompt
        samplings = each_sampling("generate(prompt", len(prompts), sampling, words)
        answers = self._complete([self._continuing(*each) for each in zip(prompts, samplings, strict=True)])
        return answers[0] if one else answers

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, reuse: bool = False, **words: Never
    ) -> Iterator[Piece]:
        """Continue a prompt, piece by piece.

        >>> for piece in llm.stream("The sea", Sampling(max_tokens=8)): print(piece.text, end="")  # doctest: +SKIP

        Args:
            prompt: a text or its token ids. It is checked by this call, not at the first piece.
            sampling: how tokens are sampled; the default is the model's own.
            reuse: do not compute again a prefix of the prompt that `load_state` has loaded.

        Returns:
            Pieces whose texts join to the whole text; the last one holds the `Completion`. Closing the iterator
            cancels the request.

        Raises:
            PromptTooLong: the prompt does not fit the context.
            QueueFull: `slots` and `queue` are full with other requests.
        """
        check_call("stream(prompt", sampling, words)
        return self._stream(self._continuing(prompt, sampling), reuse=reuse)

    @overload
    def chat(self, messages: Messages, sampling: Sampling | None = None, **words: Any) -> Completion: ...
    @overload
    def chat(
        self,
        messages: list[str] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: Samplings = None,
        **words: Any,
    ) -> list[Completion]: ...
    def chat(self, messages: Any, sampling: Samplings = None, **words: Any) -> Any:
        """Answer a conversation, rendered by the model's chat template.

        >>> llm.chat([{"role": "user", "content": "hi"}], Sampling(max_tokens=8)).text  # doctest: +SKIP

        Args:
            messages: a conversation, or a list of conversations, which run together. A conversation is a list of
                messages (mappings with `role` and `content`), one message, or a text, which is one message of the user.
            sampling: how tokens are sampled; the default is the model's own. A list has one for each conversation. A
                schema or a grammar is for the answer; reasoning before it is free.
            tools: functions that the model may call, in OpenAI's form: a list of
                `{"type": "function", "function": {"name": ..., "description": ..., "parameters": schema}}`.
            tool_choice: `auto`, the default, leaves the call to the model; `none`, `required`, or
                `{"type": "function", "function": {"name": ...}}`.
            parallel_tool_calls: whether an answer may have several calls; the default is true.
            words: these three, and variables of the template, such as `enable_thinking`.

        Returns:
            A `Completion`, or a list of them in the order of the conversations. Its text is the answer alone: reasoning
            is in `reasoning`, calls are in `tool_calls`.

        Raises:
            Unsupported: the model has no chat template.
            BadInput: a message lacks its role or content, or has a role that the template does not render.
            BadOption: a word belongs into a `Sampling`, or the template does not read it.
            BadTemplate: the template refuses the conversation, or takes too long.
            PromptTooLong: the rendered conversation does not fit the context.
        """
        several = is_several(messages)
        talks = messages if several else [messages]
        samplings = each_sampling("chat(messages", len(talks), sampling, sampling_words(words))
        answers = self._complete([self._answering(*each, words) for each in zip(talks, samplings, strict=True)])
        return answers if several else answers[0]

    def stream_chat(
        self, messages: Messages, sampling: Sampling | None = None, *, reuse: bool = False, **words: Any
    ) -> Iterator[Piece]:
        """Answer a conversation, piece by piece.

        >>> pieces = llm.stream_chat([{"role": "user", "content": "hi"}], Sampling(max_tokens=8))  # doctest: +SKIP
        >>> print("".join(piece.text for piece in pieces))                             # doctest: +SKIP

        Args:
            messages: the conversation, as for `chat`.
            sampling: how tokens are sampled; the default is the model's own.
            reuse: do not compute again a prefix that `load_state` has loaded.
            words: as for `chat`.

        Returns:
            Pieces, as from `stream`, each with a part of the answer or of the reasoning; tool calls are in the
            `Completion` of the last. It raises what `chat` and `stream` raise.
        """
        check_call("stream_chat(messages", sampling, sampling_words(words))
        return self._stream(self._answering(messages, sampling, words), reuse=reuse)

    def chat_text(self, messages: Messages, **words: Any) -> str:
        """A conversation as text, rendered by the model's chat template.

        >>> llm.chat_text([{"role": "user", "content": "hi"}])                         # doctest: +SKIP

        Args:
            messages: the conversation, as for `chat`.
            words: as for `chat`.

        Raises:
            Unsupported: the model has no chat template.
            BadTemplate: the template refuses the conversation, or takes too long.
        """
        return self.chat_format.render(self._chat_request(messages, None, words))

    def chat_ids(self, messages: Messages, **words: Any) -> list[int]:
        """The token ids that `chat` gives to the model.

        >>> llm.chat_ids([{"role": "user", "content": "hi"}])                          # doctest: +SKIP

        Args:
            messages: the conversation, as for `chat`.
            words: as for `chat`.

        Returns:
            Token ids, with BOS once if the model has it.
        """
        return self.tokenizer.encode_rendered(self.chat_text(messages, **words))

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        fresh: bool = False,
        show: Collection[str] = (),
        sink: Callable[[Request, RequestMessage], None],
    ) -> Answer:
        """Submit a request without waiting for its answer, for servers.

        Args:
            prompt: token ids.
            sampling: how tokens are sampled; the default is the model's own.
            fresh: the answer is a text of its own, as in a conversation; it does not continue the prompt.
            show: control tokens that its text shows, such as those that mark a tool call.
            sink: called by the engine's thread with the request and each of its messages.

        Returns:
            An answer, into which the caller pushes the request's tokens, on any one thread.

        Raises:
            QueueFull: too many requests wait already.
        """
        asked = GenerationInput(list(prompt), self._with_defaults(sampling), fresh, tuple(show))
        return Answer(self._origin, asked, self._engine.submit(asked.ids, asked.sampling, sink=sink))

    def slots(self) -> list[SlotView]:
        """The request in each slot now, and its progress."""
        return self._engine.slots()

    def fingerprint(self) -> str:
        """The sha256 of the model's files; computed once, which takes seconds for a large model."""
        return self._checkpoint.fingerprint()

    # Text and tokens

    def tokenize(self, text: str, *, bos: bool = True, special: bool = False) -> list[int]:
        """The token ids of a text.

        >>> llm.tokenize("Once upon a time")                                           # doctest: +SKIP

        Args:
            text: the text.
            bos: add BOS and EOS as the model's files say.
            special: parse the names of special tokens in the text as these tokens.
        """
        if not isinstance(text, str):
            raise BadInput(f"a text is needed to tokenize, not {type(text).__name__}")
        return self.tokenizer.encode(text, bos=bos, special=special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens hidden.

        >>> llm.detokenize(llm.tokenize("Once upon a time"))                           # doctest: +SKIP

        Args:
            ids: token ids.
        """
        return self.tokenizer.decode(whole_ids(ids))

    # What the model computes

    def logits(self, ids: Sequence[int]) -> Floats:
        """Teacher-forced logits of a text.

        >>> llm.logits(llm.tokenize("Once upon a time")).shape                         # doctest: +SKIP

        Args:
            ids: token ids, at most as many as the context holds.

        Returns:
            float32 [n, vocab]: row i is the model's prediction after ids[: i + 1].
        """
        return logits_of(self._engine, whole_ids(ids))

    @overload
    def score(self, text: str) -> Score: ...
    @overload
    def score(self, text: list[str]) -> list[Score]: ...
    def score(self, text: str | list[str]) -> Score | list[Score]:
        """How well the model predicts a text, every token but the first from those before it.

        >>> llm.score("The sea is blue.").perplexity                                   # doctest: +SKIP

        Args:
            text: a text, or a list of texts. One that is longer than the context is scored in parts of the context's
                length that share one token.

        Returns:
            A `Score`, or a list of them.

        Raises:
            BadInput: a text has fewer than two tokens.
        """
        texts = [self.tokenize(one) for one in ([text] if isinstance(text, str) else listed(text))]
        if any(len(ids) < 2 for ids in texts):
            raise BadInput("a text of at least two tokens is needed to score one by the other")
        step = max(1, self.context - 1)
        windows = [
            (number, ids[start : start + step + 1])
            for number, ids in enumerate(texts)
            for start in range(0, len(ids) - 1, step)
        ]
        nll = [0.0] * len(texts)
        found = logprobs_of(self._engine, [ids for _, ids in windows]) if windows else []
        for (number, _), one in zip(windows, found, strict=True):
            nll[number] -= float(one.logprobs.sum(dtype=np.float64))
        counts = [len(ids) - 1 for ids in texts]
        scores = [Score(n, total, math.exp(min(total / n, 700.0))) for n, total in zip(counts, nll, strict=True)]
        return scores[0] if isinstance(text, str) else scores

    @overload
    def token_logprobs(self, ids: Sequence[int], top: int = 0) -> tuple[TokenLogprob, ...]: ...
    @overload
    def token_logprobs(self, ids: list[list[int]], top: int = 0) -> list[tuple[TokenLogprob, ...]]: ...
    def token_logprobs(self, ids: Any, top: int = 0) -> Any:
        """The log-probability of each token but the first, given those before it.

        >>> sum(one.logprob for one in llm.token_logprobs(llm.tokenize("some text")))  # doctest: +SKIP

        Args:
            ids: the token ids of a text, or a list of such lists.
            top: how many of the most likely tokens to return beside each, at most 20.

        Returns:
            A tuple with an entry for each token but the first, or a list of tuples.
        """
        is_list = isinstance(ids, list | tuple) and bool(ids) and not hasattr(ids[0], "__index__")
        told = list(self.each_token_logprobs(ids if is_list else [ids], top))
        return told if is_list else told[0]

    def each_token_logprobs(self, texts: Sequence[Sequence[int]], top: int = 0) -> Iterator[tuple[TokenLogprob, ...]]:
        """What `token_logprobs` gives of each text, as soon as it is computed. A reader that stops before the end
        cancels the rest.

        >>> scored = [len(one) for one in llm.each_token_logprobs([[1, 2, 3], [4, 5]])]      # doctest: +SKIP

        Args:
            texts: the token ids of each text.
            top: that many of the most likely alternatives for each token.

        Yields:
            The entries of one text, in the order of `texts`.

        Raises:
            PromptTooLong: a text does not fit the context.
        """
        if not isinstance(top, int) or isinstance(top, bool) or not 0 <= top <= MAX_LOGPROBS:
            raise BadOption(f"top is {top!r}; it must be a whole number from 0 to {MAX_LOGPROBS}")
        given = [whole_ids(one) for one in texts]
        for text in given:
            self._engine.check_text(text)
        scored = [text for text in given if len(text) > 1]
        n_tokens = self.tokenizer.vocab_size  # beyond it is padding of the embedding
        found = each_logprobs(self._engine, scored, top, n_tokens) if scored else iter(())
        for text in given:
            yield _told(text, next(found)) if len(text) > 1 else ()

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        pooling: str | None = None,
        *,
        normalize: bool | None = None,
        prompt: str | None = None,
    ) -> Floats:
        """One vector per text, from the last hidden rows.

        >>> llm.embed(["one text", "another"]).shape                                   # doctest: +SKIP

        Args:
            texts: a text or its token ids, or a list of either.
            pooling: `mean`, `cls`, `last` or `rank`; the default is the model's own, else `mean`. With `rank`, a
                ranking model gives its scores [texts, classes].
            normalize: scale to unit length; the default is an encoder's own setting, and true for a decoder.
            prompt: the name of a prompt of the model's files (`query`, say), which is put before each text; the default
                is the one that the files name, else none.

        Returns:
            float32 [texts, hidden], also for one text.

        Raises:
            PromptTooLong: a text does not fit the context.
        """
        several: Sequence[Any] = [texts] if is_one_text(texts) else listed(texts)
        vectors = list(self.each_embedding(several, pooling, normalize=normalize, prompt=prompt))
        return np.stack(vectors) if vectors else np.empty((0, self.shape.vector_width), np.float32)

    def each_embedding(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]],
        pooling: str | None = None,
        *,
        normalize: bool | None = None,
        prompt: str | None = None,
        left_out: Sequence[int] | None = None,
    ) -> Iterator[Floats]:
        """The vector of each text, as `embed` gives it, as soon as it is computed. A reader that stops before the end
        cancels the rest.

        >>> first = next(llm.each_embedding(["one text", "another"]))                        # doctest: +SKIP

        Args:
            texts: texts, or the token ids of each.
            pooling: as for `embed`.
            normalize: as for `embed`.
            prompt: as for `embed`; token ids are taken as they are.
            left_out: of each text, how many tokens at its beginning are no part of its vector; the default is none,
                or those of the prompt where the model's files say so.

        Yields:
            float32 [hidden], in the order of `texts`.

        Raises:
            PromptTooLong: a text does not fit the context.
        """
        if pooling == "none":
            raise BadOption(
                "pooling 'none' gives a row for every token, not a vector; use LLM.decoder(embeddings=True)"
            )
        wanted = pooling or (self.shape.pooling if self.shape.pooling != "none" else None) or "mean"
        if not texts:
            return
        before = self.retrieval.prompt(prompt)
        ids = [self.tokenize(before + text) if isinstance(text, str) else whole_ids(text) for text in texts]
        if left_out is None:
            n = 0 if wanted == "rank" else self.retrieval.n_left_out(self.tokenizer, before)
            left_out = [n if isinstance(text, str) else 0 for text in texts]
        firsts = [min(n, len(text) - 1) for n, text in zip(left_out, ids, strict=True)]  # one row is always there
        if self._encoder is None:
            vectors = each_vector(self._text_engine, ids, wanted, firsts=firsts)
        else:
            for text in ids:
                check_prompt(text, shape=self.shape, context=self.context)
            vectors = self._encoder.each_vector(ids, wanted, firsts=firsts)
        if normalize is None:
            own = self.shape.pooling is not None  # a model for embeddings says so itself
            normalize = wanted != "rank" and (self.shape.normalise if own else True)
        for vector in vectors:
            if normalize:
                vector = vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), np.float32(1e-12))
            yield vector

    def rank(self, query: str, texts: Sequence[str], *, prompt: str | None = None) -> Floats:
        """How well each text answers the query, by a ranking model.

        >>> llm.rank("what is a lighthouse?", ["a tower with a lamp", "a kind of fish"])  # doctest: +SKIP

        Args:
            query: the question.
            texts: the texts to compare.
            prompt: the name of a prompt of the model's files, such as an instruction; the default is the one that the
                files name, else none.

        Returns:
            float32 [texts, classes], usually one class. A language model that ranks by a word (Qwen3-Reranker) gives
            the logit of yes less that of no.
        """
        if not listed(texts):
            return np.empty((0, self.shape.n_classes or 1), np.float32)
        return self.rank_pairs([self.retrieval.pair(self.tokenizer, query, text, prompt) for text in texts])

    def rank_pairs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Floats:
        """The same of pairs of token ids, each a query and a text as `retrieval.pair` makes them.

        >>> llm.rank_pairs([llm.retrieval.pair(llm.tokenizer, "tall?", "a tower")])       # doctest: +SKIP

        Args:
            pairs: at least one.

        Returns:
            float32 [pairs, classes].
        """
        for pair in pairs:
            check_prompt([*pair[0], *pair[1]], shape=self.shape, context=self.context)
        if self._encoder is None:
            return scores_of(self._text_engine, pairs)
        return self._encoder.pairs(pairs)

    # Memory

    def decoder(self, **settings: Any) -> Decoder:
        """A new decoder over this model, for callers that manage batches and memory themselves.

        >>> decoder = llm.decoder(n_seq_max=4, n_outputs_max=64)                       # doctest: +SKIP

        Args:
            settings: the parameters of `Decoder`; `n_ctx` and `kv_type` are this model's unless given.
        """
        check_extra("torch", "LLM.decoder")
        from ostinato.backends.torch.backend import model_of
        from ostinato.decoder.cells.decoder import Decoder

        self._check_usable()
        known = inspect.signature(Decoder).parameters.keys() - {"model"}
        for word in settings:
            if word not in known:
                raise BadOption(f"unknown setting {word!r} of a decoder; known: {listing(word, known)}")
        wanted = {"n_ctx": self.context, "kv_type": self._settled.kv_type, **settings}
        return Decoder(model_of(self._model, self._settled), **wanted)

    def save_state(self, path: str | Path, note: Mapping[str, Any] | None = None) -> None:
        """Write the last answer, its prompt and its memory to a file, so that another process can continue.

        >>> llm.save_state("story.state", {"title": "a story"})                        # doctest: +SKIP

        Args:
            path: the file; an older one stays until the new one is complete.
            note: what the caller wants to find again in `load_state`, as JSON.

        Raises:
            BadInput: there is no answer yet, or the file cannot be written.
        """
        check_path(path)
        if self._recent is None:
            raise BadInput("there is no answer yet whose state could be saved")
        content = {
            "model": self._checkpoint.fingerprint(),
            "activations": self.activations,
            "note": dict(note or {}),
        }
        state_bytes.write(path, save_sequence(self._engine, self._recent, content))

    def load_state(self, path: str | Path) -> Mapping[str, Any]:
        """Load a saved sequence into memory; the next `stream` or `stream_chat` with `reuse=True` continues from it.

        >>> llm.load_state("story.state")                                              # doctest: +SKIP

        Args:
            path: a file that `save_state` wrote.

        Returns:
            The note that was saved.

        Raises:
            BadFile: the file is no state, is damaged, or was saved by another model or with other activations.
        """
        check_path(path)
        data = state_bytes.read(path, limit=largest_state_bytes(self._engine))
        try:
            content = state_bytes.describe(data).note or {}
            if content.get("model") != self._checkpoint.fingerprint() or not isinstance(content.get("note"), dict):
                raise BadFile(f"this state was not saved by {self.name}; use the model that did, or another file")
            if (saved := content.get("activations")) != self.activations:
                raise BadFile(
                    f"this state was saved with {_spelled(saved)}, and the model has {_spelled(self.activations)}; an "
                    "answer that mixed the two would be neither's: load the model as it was then"
                )
            self._recent = load_sequence(self._engine, data)
        except BadFile as error:
            raise BadFile(f"{path}: {error}") from error
        note: Mapping[str, Any] = content["note"]
        return note

    # Life

    def close(self) -> None:
        """Cancel running requests and end threads, the open file and the template's process; not usable afterwards.

        The memory of weights and caches is free when nothing refers to this object any more (`del llm`).
        """
        self._closed = True
        with ExitStack() as parts:  # each is closed, even if another cannot be
            for part in (self._checkpoint, self._loop_engine, self._encoder, self.template):
                if part is not None:
                    parts.callback(part.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Never:
        raise Unsupported(
            "an LLM is neither pickled nor copied: its memory and threads are this process's; open the model where it "
            "is used"
        )

    # Answers, inside

    @property
    def _engine(self) -> Engine:
        self._opened.check()
        check_generates(self.shape)
        return self._text_engine

    @property
    def _text_engine(self) -> Engine:
        """The engine, also of an encoder, whose texts it takes."""
        self._opened.check()
        assert self._loop_engine is not None
        return self._loop_engine

    def _check_usable(self) -> None:
        self._opened.check()
        if self._closed:
            raise BadInput(CLOSED)

    def _chat_template(self) -> ChatTemplate:
        self._check_usable()
        if self.template is None:
            raise Unsupported(
                f"{self.name} has no chat template, so it has no notion of a conversation; "
                "give it plain text instead (generate, or `ostinato run --raw`)"
            )
        return self.template

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return whole_ids(prompt, "a prompt is text, or a list of token ids")
        if not prompt:
            raise BadInput("the prompt is empty; give it some text")
        return self.tokenizer.encode(prompt)

    def _with_defaults(self, sampling: Sampling | None) -> Sampling:
        """The caller's options, else the model's defaults; without a seed, a random one."""
        complete = (sampling or Sampling()).over(self.defaults)
        return complete if complete.seed is not None else dataclasses.replace(complete, seed=secrets.randbits(53))

    def _continuing(self, prompt: Prompt, sampling: Sampling | None) -> GenerationInput:
        """The answer that continues a prompt."""
        return GenerationInput(self._prompt_ids(prompt), sampling or Sampling(), fresh=False)

    def _answering(self, messages: Messages, sampling: Sampling | None, words: Mapping[str, Any]) -> GenerationInput:
        """The answer to a conversation."""
        asked = self._chat_request(messages, sampling, words)
        return self.chat_format.prepare(asked, self.chat_format.render(asked))

    def _chat_request(self, messages: Messages, sampling: Sampling | None, words: Mapping[str, Any]) -> ChatRequest:
        """A conversation and the words of a call about it, checked."""
        template, options = self._chat_template(), dict(words)
        tools, choice = read_allowed(options.pop("tool_choice", None), read_tools(options.pop("tools", None)))
        parallel, continues = options.pop("parallel_tool_calls", True), options.pop("continue_final_message", False)
        for name, value in (("parallel_tool_calls", parallel), ("continue_final_message", continues)):
            if not isinstance(value, bool):
                raise BadOption(f"{name} is {value!r}; it must be True or False")
        check_template_words(template, options, tools=bool(tools))
        if isinstance(messages, str):
            messages = {"role": "user", "content": messages}
        listed = [messages] if isinstance(messages, Mapping) else messages
        asked = ChatRequest(
            messages=check_messages(listed),
            sampling=sampling or Sampling(),
            tools=tools if choice != "none" else (),
            choice=choice,
            parallel=parallel,
            continues=continues,
            template_options=options,
        )
        if not asked.messages:
            raise BadInput("the conversation is empty; give it at least one message")
        if asked.tools_and_other_format:
            raise BadOption("tools go with a schema or with free text, not with a regex, a choice or a grammar")
        return asked

    def _stream(self, asked: GenerationInput, *, reuse: bool) -> Iterator[Piece]:
        # Checked here, not at the first piece: a bad prompt is refused by the call.
        checked = self._checked([asked], reuse=reuse)
        return (piece for _, piece in self._pieces(checked, wait=False))

    def _complete(self, asked: list[GenerationInput]) -> list[Completion]:
        """Answers that are generated together, in order; all prompts are checked first."""
        pieces = self._pieces(self._checked(asked), wait=True)
        done = {number: piece.completion for number, piece in pieces if piece.completion is not None}
        return [done[number] for number in range(len(asked))]

    def _checked(self, asked: list[GenerationInput], *, reuse: bool = False) -> list[CheckedInput]:
        """Checked requests; the sampling of each is complete, with a seed of its own."""
        self._check_usable()
        complete = [dataclasses.replace(one, sampling=self._with_defaults(one.sampling)) for one in asked]
        return [(self._engine.check(one.ids, one.sampling, resume=reuse, keep=True), one) for one in complete]

    def _answer(self, asked: GenerationInput, request: Request) -> Answer:
        """What makes text of a request's tokens."""
        return Answer(self._origin, asked, request)

    def _pieces(self, checked: list[CheckedInput], *, wait: bool) -> Iterator[tuple[int, Piece]]:
        """Pieces of answers that run together, each with the number of its request. Requests are submitted as the queue
        allows; if it is full while none of these runs: `wait` for room, or QueueFull."""
        heard: MessageQueue[tuple[Request, RequestMessage]] = MessageQueue(self._engine.helper)
        running: dict[int, tuple[int, Answer]] = {}  # by the request's id
        n_put = 0
        try:
            while running or n_put < len(checked):
                while n_put < len(checked):
                    spec, asked = checked[n_put]
                    try:
                        request = self._engine.put(spec, wait=wait and not running, sink=lambda *told: heard.put(told))
                    except QueueFull:
                        if not running:
                            raise
                        break
                    running[request.id] = n_put, self._answer(asked, request)
                    n_put += 1
                request, message = heard.get()
                if request.id not in running:
                    continue  # it has met its stop string
                if isinstance(message, Exception):
                    raise message
                if not isinstance(message, Token):
                    raise BadInput(CLOSED)
                number, answer = running[request.id]
                piece = answer.push(message)
                if piece.completion is not None:
                    request.cancel()  # a stop string ends it before the engine would
                    del running[request.id]
                    self._recent = answer.held
                yield number, piece
        finally:
            for _, answer in running.values():
                answer.source.cancel()


def _constrain(tokenizer: Tokenizer, n_ids: int) -> Constrain:
    """Makes constraints of answers; what compiles them is imported when the first one is asked for."""

    lock, made = Lock(), list["Matchers"]()

    def constrain(sampling: Sampling) -> Constraint | None:
        from ostinato.text.matchers import Matchers

        with lock:
            if not made:
                made.append(Matchers(tokenizer, n_ids))
        return made[0].matcher(sampling)

    return constrain


def _told(ids: Sequence[int], found: TextLogprobs) -> tuple[TokenLogprob, ...]:
    rows = zip(found.logprobs.tolist(), found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(tokens, values, strict=True)))
        for token, (logprob, tokens, values) in zip(ids[1:], rows, strict=True)
    )


def _spelled(activations: object) -> str:
    return "dense weights" if activations is None else f"--activations {activations}"
