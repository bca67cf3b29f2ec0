"""The server's own state: the model once it is loaded, whether requests are accepted, and which are running.

One `Service` lives as long as its process. It knows no HTTP beyond the refusals it raises.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, Final, Literal, TypeVar

from ostinato import __version__
from ostinato.engine.stats import Stats
from ostinato.engine.token_queue import TokenDispatcher, TokenQueue
from ostinato.errors import OstinatoError, quoted
from ostinato.llm import LLM
from ostinato.serve.errors import TOO_LONG, Refusal
from ostinato.serve.log import Write, new_id, write_line
from ostinato.serve.metrics import Metrics
from ostinato.serve.response_keeper import LocalKeeper, ResponseKeeper
from ostinato.serve.response_store import ResponseStore
from ostinato.serve.settings import ServeOptions, is_among, name_in_answer

ServiceState = Literal["loading", "ready", "draining", "dead"]
T = TypeVar("T")

# Requests beyond slots and queue: their prompts are being prepared.
IN_PREPARATION: Final = 64
_PROMPT_THREADS: Final = 4
_BESIDE_THREADS: Final = 4


class Service:
    """The state that all endpoints share."""

    def __init__(
        self,
        options: ServeOptions,
        *,
        keeper: ResponseKeeper | None = None,
        write: Write = write_line,
        make_id: Callable[[], str] = new_id,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.options, self.limits = options, options.limits
        self.write, self.make_id, self.clock = write, make_id, clock
        self.state: ServiceState = "loading"
        self.why = "the model is being loaded"
        self.started = int(clock())
        self.metrics = Metrics(self.stats)
        self.n_running = 0  # requests that are being answered
        self.most_running = options.load.slots + options.load.queue + IN_PREPARATION
        self.idle = asyncio.Event()
        self.idle.set()
        self.stopping = asyncio.Event()  # no request is waited for any more
        self.has_sum = threading.Event()  # the model's files are hashed: digests can be made
        self.boxes: set[TokenQueue] = set()  # of requests that are being answered
        self.model: LLM | None = None  # in any state
        most, age_s = options.n_kept_responses, options.keep_responses_s
        self.responses = ResponseStore(most, options.limits.kept_bytes, age_s) if most else None
        self.keeper = keeper or (None if self.responses is None else LocalKeeper(self.responses))
        # Bodies are parsed one at a time, never behind a long prompt or grammar.
        self._body_thread = ThreadPoolExecutor(1, "ostinato-body")
        self._threads = ThreadPoolExecutor(_PROMPT_THREADS, "ostinato-prompt")
        # Templates have one process, and so a thread of their own: a template that loops delays nothing else.
        self._template_thread = ThreadPoolExecutor(1, "ostinato-template")
        # For what the model computes beside the decode loop: a few threads with a bounded queue.
        self._beside_threads = ThreadPoolExecutor(_BESIDE_THREADS, "ostinato-beside")
        self._n_beside = 0
        self._dispatcher: TokenDispatcher | None = None
        self.model_names = options.names[0]  # every name by which a request may call the model; the first is its id

    # Life

    def open(self, llm: LLM) -> None:
        """The model is loaded: accept requests from now on. Call on the event loop."""
        self._dispatcher = TokenDispatcher(asyncio.get_running_loop())
        self.system_fingerprint = _system_fingerprint(llm)
        self._longest_token = max(map(len, llm.tokenizer.shown), default=1)
        self.model = llm
        if self.state == "loading":
            self.state, self.why = "ready", ""
        # A digest needs the hash of the model's files: computed once, on a thread of its own.
        threading.Thread(target=self._make_sum, args=(llm,), name="ostinato-fingerprint", daemon=True).start()

    def _make_sum(self, llm: LLM) -> None:
        with suppress(OstinatoError):
            llm.fingerprint()
            self.has_sum.set()

    def drain(self) -> None:
        """Accept no more requests; running ones continue."""
        if self.state in ("loading", "ready"):
            self.state, self.why = "draining", "the server is being stopped"

    def stop(self) -> None:
        """End running requests, too."""
        self.drain()
        self.stopping.set()
        for box in self.boxes:
            box.wake()

    def die(self, why: str) -> None:
        """The engine is dead: it has ended all its requests with an error, and no new ones are accepted."""
        self.state, self.why = "dead", f"the engine is being restarted: {why}"

    def close(self) -> None:
        """Release all resources."""
        for threads in (self._body_thread, self._threads, self._template_thread, self._beside_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.model is not None:
            self.model.close()

    # For endpoints

    @property
    def dispatcher(self) -> TokenDispatcher:
        assert self._dispatcher is not None, "the model is not open"
        return self._dispatcher

    def llm(self, model: str | None) -> LLM:
        """The model that a request names; refused if it is another, or not ready."""
        if self.state != "ready" or self.model is None:
            code = {"loading": "model_loading", "draining": "draining", "dead": "engine_restarting"}.get(self.state)
            raise Refusal(503, f"not now: {self.why}; try again later", code=code)
        if model is not None:
            self.check_name(model)
        return self.model

    def check_name(self, model: str) -> None:
        """Refuse a name that is not the model's."""
        if not self.options.any_model and not is_among(model, self.model_names):
            message = f"the model {quoted(model)} is not served here; {self.model_id!r} is"
            raise Refusal(404, message, param="model", code="model_not_found")

    def answers_as(self, model: str | None) -> str:
        """What the answer to a request that named `model` calls it."""
        return name_in_answer(model, self.model_names)

    def check_length(self, text: str, field: str) -> None:
        """Refuse a text that exceeds the context in any tokenization, before seconds are spent on tokenizing."""
        assert self.model is not None
        context = self.model.context
        if len(text) > context * self._longest_token:
            raise Refusal(
                400,
                f"the prompt has {len(text)} characters, more than {context} tokens can hold; shorten it",
                param=field,
                code=TOO_LONG,
            )

    @property
    def model_id(self) -> str:
        return self.model_names[0]

    @property
    def only_model(self) -> str | None:
        """The id of the model that answers all requests; None where there may be several."""
        return self.model_id

    def begin(self) -> None:
        """Begin to answer a request; the caller must `end` it."""
        if self.n_running >= self.most_running:
            raise Refusal(429, f"{self.n_running} requests are being answered already; try again later")
        self.n_running += 1
        self.idle.clear()

    def end(self) -> None:
        self.n_running -= 1
        if not self.n_running:
            self.idle.set()

    async def in_body_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that counts or parses a body."""
        return await asyncio.get_running_loop().run_in_executor(self._body_thread, work, *arguments)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that would block the event loop: tokenizers, grammars."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def in_template_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that renders a template."""
        return await asyncio.get_running_loop().run_in_executor(self._template_thread, work, *arguments)

    async def each_in_thread(self, parts: Generator[T, None, None]) -> list[T]:
        """Run work that would block the event loop, part by part; if the caller is cancelled, it ends between two."""
        return await _each(self._threads, parts)

    async def beside(self, parts: Generator[T, None, None]) -> list[T]:
        """Run work of the model beside the answers, a few at a time; refused if too much is queued.

        If the caller is cancelled, the work leaves the queue, or ends after the part that is being made.
        """
        if self._n_beside > self.limits.work_queue:
            n = self.limits.work_queue
            raise Refusal(429, f"{n} requests wait for embeddings, ranking or logprobs; try again later")
        self._n_beside += 1
        try:
            async with asyncio.timeout(self.limits.request_s):
                return await _each(self._beside_threads, parts)
        except TimeoutError:
            raise Refusal(408, f"no request may take longer than {self.limits.request_s:.0f} s") from None
        finally:
            self._n_beside -= 1

    def stats(self) -> Stats | None:
        """The engine's counts; None while there is no engine."""
        llm = self.model
        return None if llm is None or not llm.shape.causal else llm.stats()

    def health(self) -> dict[str, Any]:
        """What is running, and whether requests are accepted."""
        llm, stats = self.model, self.stats()
        facts: dict[str, Any] = {
            "status": "ok" if self.state == "ready" else self.state,
            "ready": self.state == "ready",
            "why": self.why or None,
            "model": self.model_id,
            "version": __version__,
            **({"scripted": True} if self.options.script else {}),
        }
        if llm is None:
            return facts
        return {
            **facts,
            "mode": llm.mode,
            "device": llm.device,
            "dtype": llm.dtype,
            "kv_type": llm.kv_type,
            "context": llm.context,
            "slots": 0 if stats is None else stats.n_slots,
            "slots_busy": 0 if stats is None else stats.live + stats.prefilling,
            "waiting": 0 if stats is None else stats.waiting,
            "why_not_higher": list(llm.why_not),
        }


def _system_fingerprint(llm: LLM) -> str:
    """OpenAI's mark of a server's configuration: where it is equal, model, seed and options decide the tokens."""
    facts = (__version__, llm.mode, llm.device, llm.dtype, llm.kv_type, llm.activations, llm.context)
    return f"fp_{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


async def _each(threads: ThreadPoolExecutor, parts: Generator[T, None, None]) -> list[T]:
    """All parts, made in a thread. If the caller is cancelled, no more are made, and the work is closed."""
    abandoned = threading.Event()

    def make() -> list[T]:
        made = []
        with closing(parts):
            for part in parts:
                made.append(part)
                if abandoned.is_set():
                    break
        return made

    try:
        return await asyncio.get_running_loop().run_in_executor(threads, make)
    finally:
        abandoned.set()
