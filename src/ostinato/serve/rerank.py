"""`POST /v1/rerank`: documents by how well they answer a query, computed beside the answers by a model that ranks.

The shape is that of Jina's and Cohere's API. A generative model is refused: it has no head that ranks.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ostinato.errors import BadOption
from ostinato.llm import LLM
from ostinato.serve.errors import TOO_LONG, Refusal
from ostinato.serve.log import Record
from ostinato.serve.service import Service
from ostinato.serve.shapes import RerankBody
from ostinato.serve.stream import client_gone, json_response, while_connected

TokenPair = tuple[list[int], list[int]]

AT_ONCE: Final = 16  # documents; between them, an abandoned request ends


async def rerank(service: Service, body: RerankBody, request: Request) -> Response:
    """The best documents first, each with a relevance between 0 and 1."""
    record: Record = request.state.record
    llm, limits = service.llm(body.model), service.limits
    _check_ranks(llm)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    if len(texts) > limits.inputs:
        message = f"{len(texts)} documents were given; at most {limits.inputs} can be at once"
        raise Refusal(400, message, param="documents")

    try:
        llm.retrieval.prompt(body.prompt_name)
    except BadOption as error:
        raise Refusal(400, str(error), param="prompt_name") from error

    async def computed() -> list[float]:
        pairs = await service.each_in_thread(_pairs(llm, body.query, texts, body.prompt_name))
        record.prompt_tokens = n_tokens = sum(len(first) + len(second) for first, second in pairs)
        parts = await service.beside(_scores(llm, pairs))
        service.metrics.prompt_tokens.inc(n_tokens)
        return [score for part in parts for score in part]

    scores = await while_connected(request.receive, computed())
    if scores is None:
        return client_gone(record)
    best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": texts[index]}} if body.return_documents is not False else {})
        for index in best
    ]
    usage = {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens}
    content = {"id": f"rerank-{record.id}", "object": "list", "model": service.answers_as(body.model)}
    return json_response({**content, "results": results, "usage": usage})


def _check_ranks(llm: LLM) -> None:
    n_classes = llm.shape.n_classes
    if n_classes is None:
        message = (
            "this model does not rank texts; serve a reranker, such as a cross-encoder; a folder of a language model "
            "that ranks by its answer (Qwen3-Reranker) says so in modules.json: docs/serving.md, Reranking"
        )
        raise Refusal(400, message, param="model")
    if n_classes != 1:
        message = f"this model sorts texts into {n_classes} classes; a reranker has one score"
        raise Refusal(400, message, param="model")


def _pairs(llm: LLM, query: str, texts: Sequence[str], prompt: str | None) -> Generator[TokenPair, None, None]:
    """Each pair of query and document as token ids, which must fit the context."""
    for index, text in enumerate(texts):
        pair = llm.retrieval.pair(llm.tokenizer, query, text, prompt)
        n = sum(map(len, pair))
        if n > llm.context:
            message = f"query and documents[{index}] have {n} tokens, and the context holds {llm.context}; shorten one"
            raise Refusal(400, message, param=f"documents[{index}]", code=TOO_LONG)
        yield pair


def _scores(llm: LLM, pairs: Sequence[TokenPair]) -> Generator[list[float], None, None]:
    for start in range(0, len(pairs), AT_ONCE):
        found = llm.rank_pairs(pairs[start : start + AT_ONCE])
        yield [relevance(float(score)) for score in found[:, 0]]


def relevance(score: float) -> float:
    """A model's score, which is any number, as a relevance between 0 and 1.

    >>> relevance(0.0), relevance(-1000.0), relevance(1000.0)
    (0.5, 0.0, 1.0)
    """
    small = math.exp(-abs(score))
    return (1.0 if score >= 0 else small) / (1.0 + small)
