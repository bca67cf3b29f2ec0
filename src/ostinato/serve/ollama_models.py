"""What Ollama's API says about the served model: `/api/tags`, `/api/ps`, `/api/show`, `/api/version`.

Sizes and types come from the headers of the model's files, which are read once. Models are neither fetched nor changed
over HTTP: `NOT_HERE` says which command does it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ostinato import __version__
from ostinato.engine.defaults import default_sampling
from ostinato.errors import OstinatoError
from ostinato.files.checkpoint import open_checkpoint
from ostinato.files.store import local_path, resolve
from ostinato.llm import LLM
from ostinato.models.registry import family_of, read_shape
from ostinato.models.shape import Shape
from ostinato.options import Sampling
from ostinato.other_engines import OTHER_VERBS
from ostinato.serve.ollama import timestamp
from ostinato.serve.ollama_body import ShowBody
from ostinato.serve.service import Service
from ostinato.serve.settings import LATEST
from ostinato.serve.stream import json_response
from ostinato.text.of_checkpoint import template_sources

API_VERSION: Final = "0.32.15"  # of Ollama, whose API this is: clients compare it with what they need
_NEVER: Final = "9999-12-31T23:59:59Z"  # when the model leaves the memory
# What Ollama calls a sampling option that a model's files may set, and what it is called here.
_SAMPLING: Final = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p")},
    "repeat_penalty": "repetition_penalty",
}
# The endpoints that change which models there are, and what does it here.
NOT_HERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "pull": "models are not fetched over HTTP here; `ostinato pull NAME` fetches one, and `ostinato serve NAME` "
        "serves it",
        "push": "models are not published from here; `ostinato pull NAME` fetches one, and no command uploads one",
        "create": "models are not made over HTTP here; `ostinato serve FILE` serves a file or folder as it is",
        "copy": "models are not copied over HTTP here; `ostinato serve NAME --alias OTHER` serves one by another name",
        "delete": f"models are not removed over HTTP here; {OTHER_VERBS['delete']}",
    }
)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What the headers of a model's files say."""

    format: str
    family: str
    n_parameters: int
    n_bytes: int
    type: str  # that most bytes of its weights have
    modified: float
    license: str | None


@functools.lru_cache(maxsize=8)
def model_file(path: Path) -> ModelFile:
    """The headers of a model, read once."""
    with open_checkpoint(path) as checkpoint:
        tensors = checkpoint.tensors.values()
        sizes: Counter[str] = Counter()
        for tensor in tensors:
            sizes[tensor.type] += tensor.n_bytes
        license = checkpoint.metadata.get("general.license")
        return ModelFile(
            checkpoint.format,
            family_of(checkpoint).name,
            sum(tensor.n_elements for tensor in tensors),
            sizes.total(),
            sizes.most_common(1)[0][0] if sizes else "",
            path.stat().st_mtime,
            license if isinstance(license, str) else None,
        )


def version() -> dict[str, Any]:
    """`GET /api/version`."""
    return {"version": API_VERSION, "ostinato": __version__}


def listed(service: Service) -> dict[str, Any]:
    """`GET /api/tags`."""
    llm = service.model
    if llm is None:
        return {**_names(service), "modified_at": timestamp(service.started), "size": 0, "digest": "", "details": {}}
    file = model_file(llm.path)
    facts = {"modified_at": timestamp(file.modified), **_sizes(service, llm, file)}
    return {**_names(service), **facts, "capabilities": _capabilities(llm)}


def listed_file(id: str, model: str, started: int) -> dict[str, Any]:
    """A model in `GET /api/tags` that has not been loaded yet: what the headers of its files say."""
    names = _tagged(id)
    try:
        file = model_file(local_path(model))
    except (OstinatoError, OSError):
        return {**names, "modified_at": timestamp(started), "size": 0, "digest": "", "details": {}}
    return {
        **names,
        "modified_at": timestamp(file.modified),
        "size": file.n_bytes,
        "digest": "",
        "details": _details(file.family, file),
    }


def running(service: Service, llm: LLM) -> dict[str, Any]:
    """The model in `GET /api/ps`."""
    facts = _sizes(service, llm, model_file(llm.path))
    on_gpu = llm.device.startswith("cuda")
    place = {"expires_at": _NEVER, "size_vram": facts["size"] if on_gpu else 0, "context_length": llm.context}
    return {**_names(service), **facts, **place}


@dataclass(frozen=True, slots=True)
class ShownModel:
    """What `/api/show` tells of a model beyond the sizes of its files. `template`: its source; empty if it has none."""

    id: str
    shape: Shape
    context: int
    defaults: Sampling
    template: str
    capabilities: list[str]


async def show(service: Service, body: ShowBody, request: Request) -> Response:
    """`POST /api/show`."""
    llm = service.llm(body.model or body.name)
    return json_response(await service.in_thread(shown, service, llm))


def shown(service: Service, llm: LLM) -> dict[str, Any]:
    """What a loaded model is."""
    template = "" if llm.template is None else llm.template.source
    model = ShownModel(service.model_id, llm.shape, llm.context, llm.defaults, template, _capabilities(llm))
    return _shown(model, model_file(llm.path))


def shown_file(id: str, model: str, context: int | None) -> dict[str, Any]:
    """`POST /api/show` of a model that is not in memory, from its files: clients ask this of every model that is
    listed, and it should load none. Whether it thinks is known when it is loaded."""
    path = resolve(model, talk=lambda _: None)
    with open_checkpoint(path) as checkpoint:
        shape, sources = read_shape(checkpoint), template_sources(checkpoint)
        template = "" if sources is None else sources.default
        served = min(context or shape.default_context, shape.context)
        found = ShownModel(id, shape, served, default_sampling(checkpoint), template, _can(shape, bool(template)))
    return _shown(found, model_file(path))


def _shown(model: ShownModel, file: ModelFile) -> dict[str, Any]:
    own = [(name, getattr(model.defaults, ours)) for name, ours in _SAMPLING.items()]
    parameters = [f"{name} {value}" for name, value in (("num_ctx", model.context), *own) if value is not None]
    made = {
        "modelfile": "\n".join([f"FROM {model.id}", *(f"PARAMETER {one}" for one in parameters)]) + "\n",
        "parameters": "\n".join(parameters),
        "template": model.template,
        "details": _details(model.shape.family, file),
        "model_info": _info(model, file),
        "capabilities": model.capabilities,
        "modified_at": timestamp(file.modified),
    }
    return made if file.license is None else {"license": file.license, **made}


def _names(service: Service) -> dict[str, Any]:
    return _tagged(service.model_id)


def _tagged(id: str) -> dict[str, Any]:
    tagged = id if ":" in id else id + LATEST
    return {"name": tagged, "model": tagged}


def _sizes(service: Service, llm: LLM, file: ModelFile) -> dict[str, Any]:
    # Hashing a large model's files takes a while after the start; then there is a digest.
    digest = llm.fingerprint() if service.has_sum.is_set() else ""
    return {"size": file.n_bytes, "digest": digest, "details": _details(llm.shape.family, file)}


def _details(family: str, file: ModelFile) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": file.format,
        "family": family,
        "families": [family],
        "parameter_size": _short(file.n_parameters),
        "quantization_level": file.type,
    }


def _short(n: int) -> str:
    """A number of parameters as Ollama writes it.

    >>> _short(134_515_008), _short(8_030_261_312), _short(12_345)
    ('134.52M', '8.03B', '12.35K')
    """
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= unit:
            return f"{n / unit:.2f}{name}"
    return str(n)


def _info(model: ShownModel, file: ModelFile) -> dict[str, Any]:
    """The sizes by the names of GGUF. The context is that which is served."""
    shape = model.shape
    sizes = {
        "context_length": model.context,
        "block_count": shape.n_layers,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.widest_ff,
        "attention.head_count": shape.widest(lambda a: a.n_heads),
        "attention.head_count_kv": shape.widest(lambda a: a.n_kv_heads),
        "vocab_size": shape.vocab,
    }
    general = {"general.architecture": shape.family, "general.parameter_count": file.n_parameters}
    return general | {f"{shape.family}.{name}": value for name, value in sizes.items()}


def _capabilities(llm: LLM) -> list[str]:
    thinks = llm.chat_format.reasoning is not None
    return [*_can(llm.shape, llm.template is not None), *(["thinking"] if thinks else [])]


def _can(shape: Shape, chats: bool) -> list[str]:
    """What a model of this shape can do, with a chat template or without."""
    if not shape.causal:
        return ["embedding"]
    return ["completion", *(["tools"] if chats else [])]
