"""How replicas are run: how many, with which resources, and how requests are routed.

Frozen, checked when made; from the command line, or from the `args` of a Serve YAML file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ostinato.errors import BadOption, Unsupported, listing
from ostinato.options import LoadOptions
from ostinato.other_engines import OTHER_ENGINES
from ostinato.serve.settings import ServeOptions

Routing = Literal["prefix", "round_robin"]


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """The operator's settings. With `max_replicas` above `replicas` their number follows the waiting requests."""

    replicas: int = 1
    max_replicas: int | None = None
    cool_down_s: float = 60.0  # a replica idle for so long is removed
    gpus: float = 0.0  # of each replica
    cpus: float = 1.0
    ingresses: int = 1  # processes that check and route requests
    routing: Routing = "prefix"
    imbalance: int | None = None  # a replica with so many more requests than the least busy is not preferred
    gather_s: float = 0.02  # tokens of a stream within this time are sent together
    drain_s: float = 60.0  # for running requests, when a replica is removed

    def __post_init__(self) -> None:
        for name in ("replicas", "ingresses", "max_replicas", "imbalance"):
            value = getattr(self, name)
            if value is None and name in ("max_replicas", "imbalance"):
                continue
            if type(value) is not int or value < 1:
                raise BadOption(f"{name} is {value!r}; it must be a whole number from 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise BadOption(f"max_replicas is {self.max_replicas}; it must be {self.replicas} or more, as replicas is")
        if self.routing not in get_args(Routing):
            raise BadOption(f"routing is {self.routing!r}; known: {listing(str(self.routing), get_args(Routing))}")
        for name in ("gpus", "cpus", "cool_down_s", "gather_s", "drain_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not value >= 0:
                raise BadOption(f"{name} is {value!r}; it must be a number from 0")

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas


def from_yaml(settings: dict[str, Any]) -> tuple[ServeOptions, ScaleOptions]:
    """The `args` of a Serve application: the names of all three kinds of options, flat.

    >>> serving, scaling = from_yaml({"model": "smollm2", "slots": 4, "replicas": 2})
    >>> serving.load.slots, scaling.replicas
    (4, 2)
    """
    left = dict(settings)
    if not isinstance(left.get("model"), str):
        raise BadOption("args.model is missing; name a model or its file")
    scaling = ScaleOptions(**_taken(left, ScaleOptions))
    load = LoadOptions(**_taken(left, LoadOptions))
    # Serve listens at its own address; here `host` only decides whether a key is required, as on the command line.
    not_here = ("load", "limits", "port", "more_models", "models_max")
    words = _taken(left, ServeOptions, not_here)
    if left:
        known = {each.name for kind in (ScaleOptions, LoadOptions, ServeOptions) for each in dataclasses.fields(kind)}
        name = next(iter(left))
        if name in OTHER_ENGINES:
            raise Unsupported(f"args.{name}: {OTHER_ENGINES[name]}")
        raise BadOption(f"args.{name} is not known; known: {listing(name, known - set(not_here))}")
    if isinstance(words.get("alias"), str):
        words["alias"] = [words["alias"]]
    for name in ("keys", "cors", "alias"):
        if name in words and not isinstance(words[name], list):
            raise BadOption(f"args.{name} must be a list")
        if name in words:
            words[name] = tuple(words[name])
    return ServeOptions(load=load, **words), scaling


def _taken(words: dict[str, Any], kind: type, leave: tuple[str, ...] = ()) -> dict[str, Any]:
    names = {each.name for each in dataclasses.fields(kind)} - set(leave)
    return {name: words.pop(name) for name in list(words) if name in names}
