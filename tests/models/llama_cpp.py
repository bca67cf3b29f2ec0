"""llama.cpp as a reference: rows of log-probabilities for prompts of token ids; embeddings; scores of pairs.

It runs in a process of its own, because its shutdown may hang and a file it dislikes may end the process. Run
as a program, this module reads one JSON job from stdin and answers with one line. The program does not import torch:
that took longer than all that llama.cpp does here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_ANSWER = "ANSWER "
# Tiny models that it reads otherwise: it leaves phi3's window unused, and exaone4's except in a model of 64 layers.
LEFT_ALONE = frozenset({"phi3-window", "exaone4-window"})
_A_PLAIN_TOKEN = 35  # chosen by force: only a token that is a whole character comes with its probabilities


def log_probabilities(path: Path, prompts: Sequence[Sequence[int]], *, n_vocab: int, context: int) -> Tensor:
    """float32 [n_prompts, n_vocab]: the log-probabilities of what follows each prompt."""
    import torch

    rows = _ask(path, context, {"prompts": [list(p) for p in prompts], "n_vocab": n_vocab})
    table = torch.full((len(rows), n_vocab), float("nan"))
    for row, pairs in zip(table, rows, strict=True):
        for token, value in pairs:
            row[token] = value
    return table


def embeddings(path: Path, texts: Sequence[str | Sequence[int]], *, pooling: str, context: int) -> Tensor:
    """float32 [n_texts, hidden]: each text, or its ids, as one vector of length 1."""
    import torch

    return torch.tensor(_ask(path, context, {"texts": list(texts), "pooling": pooling}))


def scores(path: Path, query: str, documents: Sequence[str], *, context: int) -> Tensor:
    """float32 [n_documents]: the first score of each document for the query. Their ids: [CLS] query [SEP] document."""
    import torch

    return torch.tensor(_ask(path, context, {"query": query, "documents": list(documents), "pooling": "rank"}))


def _ask(path: Path, context: int, what: dict[str, Any]) -> Any:
    job = {"path": str(path), "context": context, **what}
    command = [sys.executable, "-m", "tests.models.llama_cpp"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=60, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    assert answers, f"llama.cpp gave no answer for {path} (exit {done.returncode}):\n{done.stderr[-2000:]}"
    return json.loads(answers[0].removeprefix(_ANSWER))


def _main() -> None:
    import xllamacpp

    job = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = job["path"]
    params.warmup, params.n_parallel, params.n_ctx, params.verbosity = False, 1, job["context"], 0
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if "pooling" in job:
        params.embedding = True
        kinds = xllamacpp.llama_pooling_type
        params.pooling_type = getattr(kinds, f"LLAMA_POOLING_TYPE_{job['pooling'].upper()}")
    server = xllamacpp.Server(params)
    made = [_following(server, prompt, job["n_vocab"]) for prompt in job.get("prompts", [])]
    made += [server.handle_embeddings({"input": text})["data"][0]["embedding"] for text in job.get("texts", [])]
    if "query" in job:
        ranked = server.handle_rerank({"query": job["query"], "documents": job["documents"]})["results"]
        made = [entry["relevance_score"] for entry in sorted(ranked, key=lambda entry: entry["index"])]
    print(_ANSWER + json.dumps(made), flush=True)
    os._exit(0)  # its own shutdown may wait for ever


def _following(server: Any, prompt: list[int], n_vocab: int) -> list[tuple[int, float]]:
    asked = {"prompt": prompt, "n_predict": 1, "temperature": 0, "logprobs": n_vocab, "cache_prompt": False}
    answer = server.handle_completions({**asked, "logit_bias": [[_A_PLAIN_TOKEN, 1000.0]]})
    best = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [(entry["id"], entry["logprob"]) for entry in best]


if __name__ == "__main__":
    _main()
