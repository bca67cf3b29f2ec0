"""llama.cpp as a reference: rows of log-probabilities for prompts of token ids, and its own greedy steps after them;
embeddings; scores of pairs.

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
from typing import TYPE_CHECKING, Any, NoReturn

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


def other_choices(path: Path, prompt: Sequence[int], answer: Sequence[int], *, context: int) -> list[tuple[int, int]]:
    """Where greedy decoding goes another way than `answer`: the step, and its own token there. It decodes by itself;
    after a step that differs, or a token that ends a text, it begins anew behind the answer's token."""
    found = _ask(path, context, {"prompt": list(prompt), "answer": list(answer)})
    return [(step, token) for step, token in found]


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
    done = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, errors="replace", timeout=60, check=False
    )
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
    if "answer" in job:
        params.verbosity = 10  # an answer's token ids come at no lower one
    server = xllamacpp.Server(params)
    if "answer" in job:
        _tell(_other_choices(server, job["prompt"], job["answer"]))
    made = [_following(server, prompt, job["n_vocab"]) for prompt in job.get("prompts", [])]
    made += [server.handle_embeddings({"input": text})["data"][0]["embedding"] for text in job.get("texts", [])]
    if "query" in job:
        ranked = server.handle_rerank({"query": job["query"], "documents": job["documents"]})["results"]
        made = [entry["relevance_score"] for entry in sorted(ranked, key=lambda entry: entry["index"])]
    _tell(made)


def _tell(made: Any) -> NoReturn:
    print(_ANSWER + json.dumps(made), flush=True)
    os._exit(0)  # its own shutdown may wait for ever


def _other_choices(server: Any, prompt: list[int], answer: list[int]) -> list[tuple[int, int]]:
    found, n_done = [], 0
    while n_done < len(answer):
        left = answer[n_done:]
        asked = {"prompt": prompt + answer[:n_done], "n_predict": len(left), "temperature": 0, "return_tokens": True}
        chosen = server.handle_completions({**asked, "cache_prompt": False})["__verbose"]["tokens"]
        assert chosen, f"llama.cpp chose nothing at step {n_done}"
        differs = next((n for n, (ours, theirs) in enumerate(zip(left, chosen, strict=False)) if ours != theirs), None)
        if differs is None:
            n_done += len(chosen)  # fewer than were asked for where one of them ends a text
        else:
            found.append((n_done + differs, chosen[differs]))
            n_done += differs + 1
    return found


def _following(server: Any, prompt: list[int], n_vocab: int) -> list[tuple[int, float]]:
    asked = {"prompt": prompt, "n_predict": 1, "temperature": 0, "logprobs": n_vocab, "cache_prompt": False}
    answer = server.handle_completions({**asked, "logit_bias": [[_A_PLAIN_TOKEN, 1000.0]]})
    best = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [(entry["id"], entry["logprob"]) for entry in best]


if __name__ == "__main__":
    _main()
