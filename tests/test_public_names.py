"""The public names of the package, pinned: a change that alters one also changes this file and the changelog."""

import dataclasses
import inspect
import subprocess
import sys

import pytest

import ostinato
from ostinato.options import LoadWords

NAMES = [
    "LLM", "AsyncLLM", "Batch", "Completion", "DecodeCounts", "DecodeSession", "DecodedToken", "LoadOptions",
    "Piece", "Sampling", "Score", "Timings", "ToolCall", "__version__",
    "Aborted", "AllocationFailed", "BadFile", "BadInput", "BadOption", "BadTemplate", "ComputeFailed",
    "ContextTooLarge", "DecodeError", "DecodeInvariantError", "EngineDead", "FetchFailed", "HardwareCannot",
    "InternalError", "InvalidBatch", "NoNetwork", "NoSlot", "OstinatoError", "PlanStale", "PromptTooLong", "QueueFull",
    "UnknownName", "Unsupported",
]  # fmt: skip
METHODS = {
    "activations", "chat", "chat_ids", "chat_text", "close", "context", "decoder", "detokenize", "device", "dtype",
    "each_embedding", "each_token_logprobs", "embed", "fault", "fingerprint", "generate", "kv_type", "load_state",
    "logits", "loop_follows", "mode", "rank", "rank_pairs", "save_state", "score", "slots", "stats", "stream",
    "stream_chat", "submit", "threads", "token_logprobs", "tokenize", "why_not",
}  # fmt: skip
ASYNC_METHODS = {
    "chat", "close", "embed", "generate", "llm", "open", "rank", "score", "stream", "stream_chat", "token_logprobs",
}  # fmt: skip
SESSION_METHODS = {
    "admit", "cancel", "close", "counts", "enter", "entered", "exit", "mode", "plan", "read", "running", "step",
    "tokens", "trigger",
}  # fmt: skip
COMPLETION = [
    "text",
    "token_ids",
    "prompt_ids",
    "finish_reason",
    "logprobs",
    "timings",
    "seed",
    "cached_tokens",
    "digest",
    "reasoning",
    "tool_calls",
]
SAMPLING = [
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "schema",
    "json_mode", "regex", "choice", "grammar",
]  # fmt: skip


def test_the_package_offers_these_names() -> None:
    assert ostinato.__all__ == NAMES
    assert {*dir(ostinato)} == {*NAMES, "Decoder"}  # not in a star import, since it needs torch
    assert all(getattr(ostinato, name) is not None for name in dir(ostinato))


def test_the_records_have_these_fields() -> None:
    assert [f.name for f in dataclasses.fields(ostinato.Sampling)] == SAMPLING
    assert [f.name for f in dataclasses.fields(ostinato.Completion)] == COMPLETION


def test_the_classes_have_these_methods() -> None:
    kinds = (
        (ostinato.LLM, METHODS),
        (ostinato.AsyncLLM, ASYNC_METHODS),
        (ostinato.DecodeSession, SESSION_METHODS),
    )
    for kind, methods in kinds:
        assert {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")} == methods


def test_the_signature_of_an_llm_spells_the_options_out() -> None:
    options = {name: one.default for name, one in inspect.signature(ostinato.LoadOptions).parameters.items()}
    assert options.keys() == LoadWords.__annotations__.keys()
    for kind in (ostinato.LLM, ostinato.AsyncLLM, ostinato.DecodeSession):
        found = {name: one.default for name, one in inspect.signature(kind).parameters.items()}
        assert {name: found.get(name) for name in options} == options
        assert found.keys() - options.keys() == {"model", "load", "progress", "talk"}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="LLM"):
        _ = ostinato.Engine


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, ostinato, ostinato.options, ostinato.text.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
