"""The server's own state: the model while there is one, whether requests are taken, and who is being answered.

One `Service` lives as long as its process. It knows no HTTP beyond the refusals it raises.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from ostinato.engine.stats import Stats
from ostinato.errors import OstinatoError
from ostinato.llm import LLM
from ostinato.serve.errors import Refusal
from ostinato.serve.log import Write, new_id, write_line
from ostinato.serve.metrics import Metrics
from ostinato.serve.settings import ServeOptions
from ostinato.serve.token_queue import TokenDispatcher, TokenQueue
from ostinato.text.reasoning import Reasoning
from ostinato.text.tools import ToolFormat

State = Literal["loading", "ready", "draining", "dead"]
T = TypeVar("T")

# Requests beyond those that sit or stand in line: their prompts are being made ready.
IN_PREPARATION: Final = 64
_PROMPT_THREADS: Final = 4
_BESIDE_THREADS: Final = 4


class Service:
    """What every endpoint works on."""

    def __init__(
        self,
        options: ServeOptions,
        *,
        restarts: Mapping[str, int] | None = None,
        write: Write = write_line,
        make_id: Callable[[], str] = new_id,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.options, self.limits = options, options.limits
        self.restarts = dict(restarts or {})
        self.write, self.make_id, self.clock = write, make_id, clock
        self.state: State = "loading"
        self.why = "the model is being loaded"
        self.started = int(clock())
        self.metrics = Metrics(self.stats, self.restarts)
        self.n_running = 0  # requests that are being answered
        self.idle = asyncio.Event()
        self.idle.set()
        self.stopping = asyncio.Event()  # nobody is waited for any more
        self.has_sum = threading.Event()  # the model's files are summed: digests can be made
        self.boxes: set[TokenQueue] = set()  # of requests that are being answered
        self._llm: LLM | None = None
        self._threads = ThreadPoolExecutor(_PROMPT_THREADS, "ostinato-prompt")
        # Templates have one process, and so a thread of their own: one that loops holds up nothing else.
        self._template_thread = ThreadPoolExecutor(1, "ostinato-template")
        # For what the model computes beside the decode loop: a few take turns, and their line is bounded.
        self._beside_threads = ThreadPoolExecutor(_BESIDE_THREADS, "ostinato-beside")
        self._n_beside = 0
        self._dispatcher: TokenDispatcher | None = None
        self.model_id = options.alias or name_of(options.model)

    # Life

    def open(self, llm: LLM) -> None:
        """The model is there: requests are taken from now on. On the event loop."""
        self._dispatcher = TokenDispatcher(asyncio.get_running_loop())
        self.tool_format = ToolFormat.for_template(llm.template, llm.tokenizer)
        self.reasoning = Reasoning.for_template(llm.template, llm.tokenizer)
        self._longest_token = max(map(len, llm.tokenizer.shown), default=1)
        self._llm = llm
        if self.state == "loading":
            self.state, self.why = "ready", ""
        # A digest needs the sum over the model's files: made beside everything else, once.
        threading.Thread(target=self._make_sum, args=(llm,), name="ostinato-fingerprint", daemon=True).start()

    def _make_sum(self, llm: LLM) -> None:
        with suppress(OstinatoError):
            llm.fingerprint()
            self.has_sum.set()

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        if self.state in ("loading", "ready"):
            self.state, self.why = "draining", "the server is being stopped"

    def stop(self) -> None:
        """End those that run, too."""
        self.drain()
        self.stopping.set()
        for box in self.boxes:
            box.wake()

    def die(self, why: str) -> None:
        """The engine is dead: everybody has been told by it, and nobody else may come."""
        self.state, self.why = "dead", f"the engine is being restarted: {why}"

    def close(self) -> None:
        """Give everything back."""
        for threads in (self._threads, self._template_thread, self._beside_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._llm is not None:
            self._llm.close()

    # For endpoints

    @property
    def model(self) -> LLM | None:
        """The model, whatever the state."""
        return self._llm

    @property
    def dispatcher(self) -> TokenDispatcher:
        assert self._dispatcher is not None, "the model is not open"
        return self._dispatcher

    def llm(self, model: str | None) -> LLM:
        """The model that a request names, ready; refused where it is another, or not ready."""
        if self.state != "ready" or self._llm is None:
            code = {"loading": "model_loading", "draining": "draining", "dead": "engine_restarting"}.get(self.state)
            raise Refusal(503, f"not now: {self.why}; try again later", code=code)
        if model is not None and model not in self.model_ids:
            raise Refusal(
                404,
                f"the model {model!r} is not served here; {self.model_id!r} is",
                param="model",
                code="model_not_found",
            )
        return self._llm

    def check_length(self, text: str, field: str) -> None:
        """Refuse a text that cannot fit the context, however it is cut, before anybody spends seconds on cutting it."""
        assert self._llm is not None
        context = self._llm.context
        if len(text) > context * self._longest_token:
            raise Refusal(
                400,
                f"the prompt has {len(text)} characters, more than {context} tokens can hold; shorten it",
                param=field,
                code="context_length_exceeded",
            )

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Every name that a request may give the model; the first is its own."""
        given, short = self.options.model, name_of(self.options.model)
        return tuple(dict.fromkeys((self.model_id, *(() if self.options.alias else (given, short)))))

    def begin(self) -> None:
        """A request is going to be answered; `end` it."""
        load = self.options.load
        if self.n_running >= load.slots + load.queue + IN_PREPARATION:
            raise Refusal(429, f"{self.n_running} requests are being answered already; try again later")
        self.n_running += 1
        self.idle.clear()

    def end(self) -> None:
        self.n_running -= 1
        if not self.n_running:
            self.idle.set()

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Work that would hold up the event loop: tokenizers, grammars."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def in_template_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Work that renders a template."""
        return await asyncio.get_running_loop().run_in_executor(self._template_thread, work, *arguments)

    async def beside(self, work: Callable[..., T], *arguments: Any) -> T:
        """Work of the model beside the answers, a few at a time; refused where too much of it waits.

        Whoever gives up waiting leaves the line; what has begun goes on to its end, unheard.
        """
        if self._n_beside > self.limits.beside_line:
            raise Refusal(429, f"{self.limits.beside_line} requests wait for embeddings or logprobs; try again later")
        self._n_beside += 1
        try:
            async with asyncio.timeout(self.limits.request_s):
                return await asyncio.get_running_loop().run_in_executor(self._beside_threads, work, *arguments)
        except TimeoutError:
            raise Refusal(408, f"no request may take longer than {self.limits.request_s:.0f} s") from None
        finally:
            self._n_beside -= 1

    def stats(self) -> Stats | None:
        """The engine's counts; None while there is no engine."""
        llm = self._llm
        return None if llm is None or not llm.shape.causal else llm.stats()

    def health(self) -> dict[str, Any]:
        """What is running, and whether requests are taken."""
        llm, stats = self._llm, self.stats()
        facts: dict[str, Any] = {
            "status": "ok" if self.state == "ready" else self.state,
            "ready": self.state == "ready",
            "why": self.why or None,
            "model": self.model_id,
            "version": version("ostinato"),
            "restarts": self.restarts,
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


def name_of(model: str) -> str:
    """What a model is called where nobody gave it an alias: its name, or its file's without folder and ending.

    >>> name_of("smollm2"), name_of("/models/Qwen3-0.6B.gguf"), name_of("hf:owner/repo/file.gguf")
    ('smollm2', 'Qwen3-0.6B', 'hf:owner/repo/file.gguf')
    """
    if ":" in model or not ("/" in model or model.endswith(".gguf")):
        return model
    return Path(model).name.removesuffix(".gguf") or model
