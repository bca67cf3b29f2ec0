"""The default model, played by the CPU's native loop, gives what transformers gives on the same dequantised weights in
float32: greedy tokens and perplexity."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from ostinato import LLM, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.model]

N_TOKENS: Final = 64
PROMPTS: Final = (
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "The three largest cities of Europe by population are",
    "Emoji 👩‍👩‍👧 and 🇯🇵, then 東京は日本の首都です。",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
)
TEXT: Final = """\
The lighthouse at the end of the breakwater had not been lit for eleven years when the council decided to sell \
it. Nobody expected a buyer. The stairs were rusty, the lamp room had lost two of its panes, and in winter the \
waves came over the wall so often that the only path to the door was under water for days. Still, on the first \
morning of the sale a woman in a green coat walked out along the stones, looked at the tower for a long time, \
and then asked the clerk how thick the walls were. He did not know. She measured them herself, wrote the number \
in a small book, and paid in full before noon.

What she wanted with it became clear only slowly. In the spring she had the lamp room cleaned and the glass \
replaced. In May a carpenter carried forty shelves up the stairs, one by one, because they would not fit through \
the door in any other way. By the end of June the shelves were full: not of books, as people had guessed, but of \
clocks. There were wooden clocks and brass clocks, clocks with painted faces, clocks that showed the phase of \
the moon, and one that had no hands at all and told the hour by the height of a column of water. She wound them \
every evening, which took her two hours and ten minutes, and she let the children of the town watch if they were \
quiet.

When a reporter asked why she kept so many, she said that each of them was wrong in its own manner, and that if \
you listened to enough of them together you could hear what time it really was. He printed the sentence as a \
joke. But the harbour master, who had heard the clocks from his boat on a still night, set his watch by them \
ever after, and in all those years he was never late for a tide.
"""


def unpaired(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of each head from neighbouring pairs, as GGUF keeps them, back to two halves."""
    pairs = weight.view(n_heads, weight.shape[0] // n_heads // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def config_of(reader: Any) -> Any:
    def setting(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    return transformers.LlamaConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=setting("embedding_length"),
        intermediate_size=setting("feed_forward_length"),
        num_hidden_layers=setting("block_count"),
        num_attention_heads=setting("attention.head_count"),
        num_key_value_heads=setting("attention.head_count_kv"),
        max_position_embeddings=setting("context_length"),
        rms_norm_eps=setting("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": setting("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )


@pytest.fixture(scope="module")
def reference(default_model: Path) -> Any:
    """transformers' Llama with the file's weights, dequantised by the `gguf` package."""
    reader = gguf.GGUFReader(default_model)
    config = config_of(reader)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    model = transformers.LlamaForCausalLM(config).eval()
    by_gguf_name = {names.get_name(name, (".weight",)): name for name in model.state_dict()}
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith("attn_q.weight"):
            values = unpaired(values, config.num_attention_heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = unpaired(values, config.num_key_value_heads)
        state[by_gguf_name[tensor.name]] = values
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    return model


@pytest.fixture(scope="module")
def llm(default_model: Path) -> Iterator[LLM]:
    with LLM(default_model, device="cpu") as model:
        yield model


def choices(model: Any, ids: list[int], answer: list[int]) -> list[int]:
    """What the model would choose at each place of `answer`, given all before it.

    Where this is `answer` itself, `answer` is the model's own greedy path, one pass instead of one a token.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([ids + answer]), use_cache=False).logits[0]
    found: list[int] = logits[len(ids) - 1 : -1].argmax(-1).tolist()
    return found


@pytest.mark.parametrize("prompt", PROMPTS, ids=["story", "code", "facts", "emoji and CJK", "chat"])
def test_64_greedy_tokens_of_the_default_model_equal_those_of_transformers(
    prompt: str, llm: LLM, reference: Any
) -> None:
    assert (llm.mode, llm.activations) == ("loop", "wide")  # the native loop, where this machine can have it
    ids = llm.tokenize(prompt, special=True)
    answer = list(llm.generate(ids, Sampling(max_tokens=N_TOKENS, temperature=0, ignore_eos=True)).token_ids)
    assert len(answer) == N_TOKENS
    assert answer == choices(reference, ids, answer)


@pytest.fixture(scope="module")
def reference_nll(llm: LLM, reference: Any) -> float:
    """The summed negative log-likelihood of the text, by transformers."""
    ids = torch.tensor(llm.tokenize(TEXT))
    with torch.inference_mode():
        logits = reference(ids[None], use_cache=False).logits[0]
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:], reduction="sum"))


@pytest.mark.parametrize(("words", "near"), [({"mode": "eager"}, 1e-5), ({}, 5e-5)], ids=["dense", "tiles"])
def test_the_perplexity_of_a_text_equals_that_of_transformers_to_four_digits(
    words: dict[str, Any], near: float, default_model: Path, reference_nll: float
) -> None:
    """With dense weights, and with packed ones and wide activations, which have 15 bits of float32's 24."""
    with LLM(default_model, device="cpu", **words) as llm:
        n_predicted = len(llm.tokenize(TEXT)) - 1
        score = llm.score(TEXT)
    assert score.n_tokens == n_predicted
    assert score.nll == pytest.approx(reference_nll, rel=near)
    assert f"{score.perplexity:.4g}" == f"{math.exp(reference_nll / n_predicted):.4g}"
