"""`POST /v1/embeddings`: a vector for each text, computed beside the answers."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Generator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ostinato.errors import BadOption
from ostinato.llm import LLM
from ostinato.serve.errors import TOO_LONG, Refusal
from ostinato.serve.log import Record
from ostinato.serve.service import Service
from ostinato.serve.shapes import EmbeddingBody, several
from ostinato.serve.stream import client_gone, encode, json_response, while_connected


async def embed(service: Service, body: EmbeddingBody, request: Request) -> Response:
    """Vectors for texts."""
    record: Record = request.state.record
    given = several(body.input), body.dimensions, body.encoding_format
    vectors = await vectors_of(service, request, body.model, *given, prompt=body.prompt_name)
    if vectors is None:
        return client_gone(record)
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    usage = {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens}
    return json_response({"object": "list", "data": data, "model": service.answers_as(body.model), "usage": usage})


async def vectors_of(
    service: Service,
    request: Request,
    model: str | None,
    inputs: Sequence[str | list[int]],
    dimensions: int | None = None,
    form: str | None = None,
    *,
    truncate: bool = False,
    prompt: str | None = None,
) -> list[msgspec.Raw] | None:
    """A vector for each text or its tokens, as JSON; None if the client disconnects. `truncate`: a text that is longer
    than the context loses its end. `prompt`: the name of what is put before each text."""
    record: Record = request.state.record
    llm, limits = service.llm(model), service.limits
    if len(inputs) > limits.inputs:
        raise Refusal(400, f"{len(inputs)} texts were given; at most {limits.inputs} can be at once", param="input")
    if dimensions is not None and dimensions > llm.shape.vector_width:
        message = f"dimensions is {dimensions}; this model's vectors have {llm.shape.vector_width}"
        raise Refusal(400, message, param="dimensions")

    try:
        before = llm.retrieval.prompt(prompt)
    except BadOption as error:
        raise Refusal(400, str(error), param="prompt_name") from error

    async def computed() -> list[msgspec.Raw]:
        ids = await service.each_in_thread(_ids(llm, inputs, truncate, before))
        record.prompt_tokens = n_tokens = sum(map(len, ids))
        n = llm.retrieval.n_left_out(llm.tokenizer, before)
        left_out = [n if isinstance(text, str) else 0 for text in inputs]
        made = await service.beside(_encoded(llm, ids, left_out, dimensions, form))
        service.metrics.prompt_tokens.inc(n_tokens)
        return made

    vectors: list[msgspec.Raw] | None = await while_connected(request.receive, computed())
    return vectors


def _encoded(
    llm: LLM, ids: list[list[int]], left_out: list[int], dimensions: int | None, form: str | None
) -> Generator[msgspec.Raw, None, None]:
    """The vectors as JSON: each is encoded in the thread that computes it, because all at once would take long."""
    for vector in llm.each_embedding(ids, left_out=left_out):
        yield msgspec.Raw(encode(shaped(vector.tolist(), dimensions, form)))


def _ids(llm: LLM, inputs: Sequence[str | list[int]], truncate: bool, before: str) -> Generator[list[int], None, None]:
    """The token ids of each text, checked."""
    for index, text in enumerate(inputs):
        ids = llm.tokenize(before + text) if isinstance(text, str) else text
        if not ids:
            raise Refusal(400, f"input[{index}] is empty; give it some text", param="input")
        if max(ids) >= llm.shape.vocab:
            message = f"input[{index}] has the token id {max(ids)}; this model has ids from 0 to {llm.shape.vocab - 1}"
            raise Refusal(400, message, param="input")
        if truncate and len(ids) > llm.context:
            end = llm.tokenizer.suffix if isinstance(text, str) else ()  # what ends every text stays
            ids = [*ids[: llm.context - len(end)], *end]
        if len(ids) > llm.context:
            raise Refusal(
                400,
                f"input[{index}] has {len(ids)} tokens and the context holds {llm.context}; shorten it",
                param="input",
                code=TOO_LONG,
            )
        yield ids


def shaped(vector: Sequence[float], dimensions: int | None, form: str | None) -> list[float] | str:
    """A vector truncated to its first dimensions and normalised again, as a list or as base64 of float32.

    >>> shaped([3.0, 4.0, 12.0], 2, None)
    [0.6, 0.8]
    """
    if dimensions is not None and dimensions < len(vector):
        vector = vector[:dimensions]
        length = math.hypot(*vector) or 1.0
        vector = [value / length for value in vector]
    if form == "base64":
        packed = array("f", vector)
        return base64.b64encode(packed.tobytes()).decode()
    return list(vector)
