"""llama.cpp as a reference: whole rows of log-probabilities for prompts of token ids.

It runs in a process of its own, because its shutdown may hang and a file it dislikes may end the process. Run
as a program, this module reads one JSON job from stdin and answers with one line.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_ANSWER = "ANSWER "
_A_PLAIN_TOKEN = 35  # chosen by force: only a token that is a whole character comes with its probabilities


def log_probabilities(path: Path, prompts: Sequence[Sequence[int]], *, n_vocab: int, context: int) -> Tensor:
    """float32 [n_prompts, n_vocab]: the log-probabilities of what follows each prompt."""
    job = {"path": str(path), "prompts": [list(p) for p in prompts], "n_vocab": n_vocab, "context": context}
    command = [sys.executable, "-m", "tests.models.llama_cpp"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=60, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    assert answers, f"llama.cpp gave no answer for {path} (exit {done.returncode}):\n{done.stderr[-2000:]}"
    rows = json.loads(answers[0].removeprefix(_ANSWER))
    table = torch.full((len(rows), n_vocab), float("nan"))
    for row, pairs in zip(table, rows, strict=True):
        for token, value in pairs:
            row[token] = value
    return table


def _main() -> None:
    import xllamacpp

    job = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = job["path"]
    params.warmup, params.n_parallel, params.n_ctx, params.verbosity = False, 1, job["context"], 0
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    rows = []
    for prompt in job["prompts"]:
        asked = {
            "prompt": prompt,
            "n_predict": 1,
            "temperature": 0,
            "logprobs": job["n_vocab"],
            "cache_prompt": False,
        }
        answer = server.handle_completions({**asked, "logit_bias": [[_A_PLAIN_TOKEN, 1000.0]]})
        best = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        rows.append([(entry["id"], entry["logprob"]) for entry in best])
    print(_ANSWER + json.dumps(rows), flush=True)
    os._exit(0)  # its own shutdown may wait for ever


if __name__ == "__main__":
    _main()
