"""The tiny GGUF files are what people have: llama.cpp reads each as transformers reads the folder, and its own greedy
decoding gives our tokens.

Tolerances are llama.cpp's: it takes GELU from a table of half floats, and rounds activations to the type of the
weights they meet. It may choose a token whose logit is behind the best one by less than twice that.
"""

from pathlib import Path
from typing import Final

import pytest
import torch
from torch.testing import assert_close

from ostinato import LLM, Sampling
from tests.counts import soaking
from tests.models import llama_cpp, tiny, tiny_encoders

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: the GGUF fixtures were not compared with it")

TOLERANCES: Final = {
    "gemma": 5e-3,
    "gemma2": 5e-3,
    "gemma3": 5e-3,
    "gemma3-vision": 5e-3,
    "qwen3-vl": 1e-3,
    "qwen3-vl-moe": 1e-3,
    "gemma3-linear": 5e-3,
    "gemma3-stated": 5e-3,
    "gemma3-whole": 5e-3,
    "gemma4": 5e-3,
    "gemma4-moe": 5e-3,
    "gemma4-shared": 5e-3,
    "gpt2": 1e-2,
    "gptneox": 1e-2,
    "gptneox-serial": 1e-2,
    "phi2": 1e-2,
    "starcoder2": 1e-2,
    "llama-f16": 1e-2,
    "llama-bf16": 1e-1,
    "llama-quantised": 3e-1,
    "gpt-oss-mxfp4": 3e-1,
}
GREEDY: Final = Sampling(max_tokens=tiny.N_GREEDY, temperature=0, ignore_eos=True)
IN_LLAMA_CPP: Final = [
    name for name, model in tiny.TINY.items() if model.architecture is not None and name not in llama_cpp.LEFT_ALONE
]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_LLAMA_CPP)
def test_llama_cpp_reads_a_tiny_gguf_as_transformers_reads_the_model(name: str, tiny_files: Path) -> None:
    model = tiny.TINY[name]
    ids = [*tiny.prompt(name), *tiny.reference_greedy(name)]
    ends = [model.n_prompt, len(ids)]
    found = llama_cpp.log_probabilities(
        tiny.gguf(name, tiny_files),
        [ids[:end] for end in ends],
        n_vocab=tiny.VOCAB_SIZE,
        context=model.context or 256,
    )
    wanted = torch.stack([tiny.forward(name, ids[:end])[-1].log_softmax(-1) for end in ends])
    assert_close(found, wanted, atol=TOLERANCES.get(name, 1e-4), rtol=0)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", IN_LLAMA_CPP if soaking() else ["qwen3", "gemma4", "lfm2", "nemotron-h"])
def test_llama_cpp_decodes_the_same_64_greedy_tokens(name: str, tiny_files: Path) -> None:
    path, context, ids = tiny.gguf(name, tiny_files), tiny.TINY[name].context or 256, tiny.prompt(name)
    with LLM(path, device="cpu", context=context) as llm:
        answer = llm.generate(ids, GREEDY).token_ids
    assert len(answer) == tiny.N_GREEDY
    numbered = tiny.gguf(name, tiny_files, numbered=True)  # llama.cpp gives no answer that is not UTF-8
    for step, theirs in llama_cpp.other_choices(numbered, ids, answer, context=context):
        row = tiny.forward(name, [*ids, *answer[:step]])[-1]
        behind = float(row.max() - row[[theirs, answer[step]]].min())
        said = f"step {step}: {theirs} there and {answer[step]} here, whose logits are {behind:g} apart"
        assert behind < 2 * TOLERANCES.get(name, 1e-4), said


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert", "bert-cls", "bert-masked", "xlm-roberta", "modern-bert", "gemma-embedding", "nomic-bert"]
)
def test_llama_cpp_embeds_with_a_tiny_gguf_as_transformers_with_the_model(name: str, tiny_files: Path) -> None:
    path = tiny_encoders.gguf(name, tiny_files)
    ids = [tiny_encoders.ids_of(text) for text in tiny_encoders.TEXTS]
    pooling = tiny_encoders.ENCODERS[name].pooling or "mean"
    found = llama_cpp.embeddings(path, [*ids, *tiny_encoders.TEXTS], pooling=pooling, context=128)
    wanted = torch.stack([tiny_encoders.vector(name, row) for row in ids])
    assert_close(found, torch.cat((wanted, wanted)), atol=1e-5 if name == "nomic-bert" else 1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-rank", "bert-classes", "xlm-roberta-rank", "modern-bert-rank"])
def test_llama_cpp_ranks_with_a_tiny_gguf_as_transformers_with_the_model(name: str, tiny_files: Path) -> None:
    query, documents = tiny_encoders.PAIR[0], tiny_encoders.TEXTS
    found = llama_cpp.scores(tiny_encoders.gguf(name, tiny_files), query, documents, context=128)
    for score, document in zip(found, documents, strict=True):
        ids = [*tiny_encoders.ids_of(query), *tiny_encoders.ids_of(document)[1:-1]]
        wanted = tiny_encoders.scores(name, ids, [0] * len(ids))
        assert_close(score, wanted[0], atol=3e-3, rtol=0)
