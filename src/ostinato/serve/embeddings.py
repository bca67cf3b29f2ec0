"""`POST /v1/embeddings`: a vector for each text, computed beside the answers."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Generator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ostinato.llm import LLM
from ostinato.serve.errors import Refusal
from ostinato.serve.log import Record
from ostinato.serve.service import Service
from ostinato.serve.shapes import EmbeddingBody, several
from ostinato.serve.stream import client_gone, encode, json_response, while_connected


async def embed(service: Service, body: EmbeddingBody, request: Request) -> Response:
    """Vectors for texts."""
    record: Record = request.state.record
    llm, limits = service.llm(body.model), service.limits
    inputs = several(body.input)
    if len(inputs) > limits.inputs:
        raise Refusal(400, f"{len(inputs)} texts were given; at most {limits.inputs} can be at once", param="input")
    if body.dimensions is not None and body.dimensions > llm.shape.hidden:
        message = f"dimensions is {body.dimensions}; this model's vectors have {llm.shape.hidden}"
        raise Refusal(400, message, param="dimensions")
    vectors = await while_connected(request.receive, _vectors(service, llm, body, inputs, record))
    if vectors is None:
        return client_gone(record)
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    usage = {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens}
    return json_response({"object": "list", "data": data, "model": service.model_id, "usage": usage})


async def _vectors(
    service: Service, llm: LLM, body: EmbeddingBody, inputs: Sequence[str | list[int]], record: Record
) -> list[msgspec.Raw]:
    """The vectors as JSON: each is encoded in the thread that computes it, because all at once would take long."""
    ids = await service.each_in_thread(_ids(llm, inputs))
    record.prompt_tokens = n_tokens = sum(map(len, ids))

    def encoded() -> Generator[msgspec.Raw, None, None]:
        for vector in llm.each_embedding(ids):
            yield msgspec.Raw(encode(shaped(vector.tolist(), body.dimensions, body.encoding_format)))

    made = await service.beside(encoded())
    service.metrics.prompt_tokens.inc(n_tokens)
    return made


def _ids(llm: LLM, inputs: Sequence[str | list[int]]) -> Generator[list[int], None, None]:
    """The token ids of each text, checked."""
    for index, text in enumerate(inputs):
        ids = llm.tokenize(text) if isinstance(text, str) else text
        if not ids:
            raise Refusal(400, f"input[{index}] is empty; give it some text", param="input")
        if max(ids) >= llm.shape.vocab:
            message = f"input[{index}] has the token id {max(ids)}; this model has ids from 0 to {llm.shape.vocab - 1}"
            raise Refusal(400, message, param="input")
        if len(ids) > llm.context:
            raise Refusal(
                400,
                f"input[{index}] has {len(ids)} tokens and the context holds {llm.context}; shorten it",
                param="input",
                code="context_length_exceeded",
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
