"""How a server is set up: its address, its keys and origins, and the limits on a request.

Frozen records, checked when made. They travel from the supervisor to the front and the workers as JSON.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ostinato.errors import BadOption
from ostinato.options import LoadOptions
from ostinato.serve.script import ScriptedAnswer

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
SHORTEST_KEY: Final = 8
KEPT_RESPONSES: Final = 1000
KEPT_S: Final = 86_400.0
LATEST: Final = ":latest"  # Ollama's clients add it to a name that has no tag

_KEY: Final = re.compile(r"[\x21-\x7e]+")
_ORIGIN: Final = re.compile(r"https?://[^/\s]+|\*|null")


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Limits on what one client may request."""

    body_bytes: int = 8 * 2**20
    head_s: float = 30.0  # from the first byte of a request to the end of its head
    body_s: float = 120.0  # from the end of the head to the last byte of a body
    body_gap_s: float = 30.0  # between two parts of a body
    body_nodes: int = 50_000  # keys, objects and lists in a body; parsing these or the items takes 30 ms at most
    body_items: int = 300_000  # items in a body; OpenAI takes as many tokens in one request for embeddings
    write_s: float = 60.0  # a client that reads nothing for so long is disconnected
    request_s: float = 3600.0  # from the first byte to the last
    keep_alive_s: float = 5.0  # between two comments to a request in the queue
    unread_tokens: int = 8192  # generated for one client and not read yet
    choices: int = 128  # answers to one request: prompts times `n`
    inputs: int = 2048  # texts of one request for embeddings
    work_queue: int = 64  # requests that wait for embeddings, ranking or logprobs of prompts
    kept_bytes: int = 64 * 2**20  # of all responses that are kept for later requests
    fault_s: float = 5.0  # from an engine's death to the process's, to send error events


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The operator's settings, as `ostinato serve` takes them.

    >>> ServeOptions("smollm2", port=0).host
    '127.0.0.1'

    Attributes:
        model: a file, a folder or a name, as for `LLM`. It is loaded at the start, and answers requests that name none.
        more_models: further ones, each loaded when a request first names it.
        load: how they are loaded.
        host: the address to listen at; one that other machines can reach needs a key, or `no_key`.
        port: 0 takes a free one.
        alias: further names of a model, beside those that it has: `NAME` is the first one's, `NAME=MODEL` that of
            another. The first alias of a model is its id.
        any_model: a name that is not served means the first model.
        models_max: how many models may be in memory at once; None is as many as fit.
        keys: API keys of at least 8 visible ASCII characters; any of them opens the server.
        no_key: serve without a key on any address.
        cors: origins whose pages may use the server; `*` is every origin.
        log_prompts: write prompts and answers to the log.
        keep_responses: how many responses of `/v1/responses` are kept; 0 keeps none. None is 1000, and with replicas 0.
        keep_responses_s: for how many seconds they are kept.
        script: texts to answer with in place of the model's, for tests of clients; only this machine may ask then.
        limits: on what one client may request.

    Raises:
        BadOption: a value is out of range, or the server would be open by accident.
    """

    model: str
    load: LoadOptions = field(default_factory=LoadOptions)
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    more_models: tuple[str, ...] = ()
    alias: tuple[str, ...] = ()
    any_model: bool = False
    models_max: int | None = None
    keys: tuple[str, ...] = ()
    no_key: bool = False
    cors: tuple[str, ...] = ()
    log_prompts: bool = False
    keep_responses: int | None = None
    keep_responses_s: float = KEPT_S
    script: tuple[ScriptedAnswer, ...] = ()
    limits: ServeLimits = field(default_factory=ServeLimits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise BadOption(f"--port is {self.port}; it must be a whole number from 0 to 65535 (0 takes a free one)")
        if self.keep_responses is not None and self.keep_responses < 0:
            raise BadOption(f"--keep-responses is {self.keep_responses}; it must be 0 or more (0 keeps none)")
        if not 0 < self.keep_responses_s < float("inf"):
            raise BadOption(f"--keep-responses-s is {self.keep_responses_s}; it must be a number of seconds above 0")
        if self.models_max is not None and self.models_max < 1:
            raise BadOption(f"--models-max is {self.models_max}; it must be a whole number from 1")
        check_names(self.names)
        for key in self.keys:
            if not _KEY.fullmatch(key) or len(key) < SHORTEST_KEY:
                raise BadOption(
                    f"an API key must be {SHORTEST_KEY} or more visible ASCII characters without spaces; the one "
                    f"given has {len(key)}"
                )
        for origin in self.cors:
            if not _ORIGIN.fullmatch(origin):
                raise BadOption(f"--cors is {origin!r}; it must be an origin such as https://example.org, or *")
        if self.script and not is_loopback(self.host):
            raise BadOption(f"--script is for tests on this machine, and --host {self.host} can be reached from others")
        if self.keys and self.no_key:
            raise BadOption("--no-api-key leaves the server open, and a key was given; give one of them")
        if not self.keys and not self.no_key and not is_loopback(self.host):
            raise BadOption(
                f"--host {self.host} can be reached from other machines and no key guards it; give --api-key or "
                "--api-key-file, or --no-api-key if all who can reach it may use it"
            )

    @property
    def models(self) -> tuple[str, ...]:
        """All models, the first one first."""
        return (self.model, *self.more_models)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """What clients may call each of the models; the first name is the model's id.

        A model keeps its own names beside its aliases, unless another model is called so.

        >>> ServeOptions("a.gguf", more_models=("b.gguf",), alias=("x=b", "y=b")).names
        (('a', 'a.gguf'), ('x', 'y', 'b', 'b.gguf'))
        """
        given: list[list[str]] = [[] for _ in self.models]
        for alias in self.alias:
            index, name = _aliased(alias, self.models)
            given[index].append(name)
        own = [[name_of(model), model] for model in self.models]
        sure = [names or own[index] for index, names in enumerate(given)]

        def of_others(index: int) -> set[str]:
            return {name for other in range(len(own)) if other != index for name in (*sure[other], *own[other])}

        return tuple(
            tuple(dict.fromkeys((*sure[index], *(name for name in own[index] if name not in of_others(index)))))
            for index in range(len(own))
        )

    def of_engine(self, index: int) -> ServeOptions:
        """The settings of one model's process: the front has checked keys, hosts and names already."""
        return replace(
            self,
            model=self.models[index],
            more_models=(),
            alias=tuple(f"{name}={self.models[index]}" for name in self.names[index]),
            any_model=True,
            keys=(),
            no_key=True,
            cors=(),
            host=DEFAULT_HOST,
        )

    @property
    def n_kept_responses(self) -> int:
        return KEPT_RESPONSES if self.keep_responses is None else self.keep_responses

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServeOptions:
        words: dict[str, Any] = json.loads(text)
        words["load"] = LoadOptions(**words["load"])
        words["limits"] = ServeLimits(**words["limits"])
        words["script"] = tuple(ScriptedAnswer(**one) for one in words["script"])
        several = ("keys", "cors", "alias", "more_models")
        return cls(**{**words, **{name: tuple(words[name]) for name in several}})


def _aliased(alias: str, models: Sequence[str]) -> tuple[int, str]:
    """The index of the model that an alias is for, and the name that it gives."""
    if "=" not in alias:
        return 0, alias
    for index, given in enumerate(models):
        for model in (given, name_of(given)):
            if alias.endswith(f"={model}"):
                return index, alias.removesuffix(f"={model}")
    given_models = ", ".join(map(repr, models))
    raise BadOption(f"--alias {alias} names no model that is given; give NAME=MODEL with one of {given_models}")


def check_names(names: Sequence[Sequence[str]]) -> None:
    """Refuse an empty name, and one that two models have."""
    counts = Counter(name for some in names for name in some)
    if "" in counts:
        raise BadOption("--alias is empty; it must be what clients call the model")
    if twice := [name for name, n in counts.items() if n > 1]:
        raise BadOption(f"two models are called {twice[0]!r}; give one of them another name, with --alias NAME=MODEL")


def is_among(name: str, names: Sequence[str]) -> bool:
    """Whether a request's name of a model is one of these.

    >>> is_among("smollm2:latest", ["smollm2"]), is_among("smollm2:135m", ["smollm2"])
    (True, False)
    """
    return name in names or name.removesuffix(LATEST) in names


def name_in_answer(asked: str | None, names: Sequence[str]) -> str:
    """What an answer calls a model with these names: what its request did, unless that is none of them."""
    return asked if asked is not None and is_among(asked, names) else names[0]


def aliases_of(names: Sequence[str]) -> list[str]:
    """The names of a model beside its id, as lists show them: without paths, which are the operator's.

    >>> aliases_of(("mine", "Qwen3-0.6B", "/models/Qwen3-0.6B.gguf"))
    ['Qwen3-0.6B']
    """
    return [name for name in names[1:] if name_of(name) == name]


def name_of(model: str) -> str:
    """The name of a model without an alias: its own, or its file's without folder and suffix.

    >>> name_of("smollm2"), name_of("/models/Qwen3-0.6B.gguf"), name_of("hf:owner/repo/file.gguf")
    ('smollm2', 'Qwen3-0.6B', 'hf:owner/repo/file.gguf')
    """
    if ":" in model or not ("/" in model or model.endswith(".gguf")):
        return model
    return Path(model).name.removesuffix(".gguf") or model


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
