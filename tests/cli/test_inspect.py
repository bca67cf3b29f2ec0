"""`ostinato inspect`: whole models, vocabularies, strangers, and what is no model."""

from __future__ import annotations

import json
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.backends.machine import Chip, Machine
from ostinato.backends.native.tiles import nearest_type
from ostinato.engine import machine
from ostinato.engine.memory_plan import USABLE_SHARE
from tests.cli import tiny_model
from tests.cli.conftest import RunCli
from tests.models import tiny as tiny_models

inspect = import_module("ostinato.cli.inspect")  # the room has the verb under this name


def facts(ostinato: RunCli, *arguments: str | Path) -> dict[str, Any]:
    ran = ostinato("inspect", "--json", *arguments)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


@pytest.mark.slow
def test_a_model_is_described_in_full(ostinato: RunCli, tiny: Path) -> None:
    found = facts(ostinato, tiny)
    weights = tiny_model.tensors()
    n_parameters = sum(value.numel() for value in weights.values())
    assert (found["format"], found["architecture"], found["parameters"]) == ("gguf", "llama", n_parameters)
    n_matrices = sum(value.dim() == 2 for value in weights.values())
    kinds = {"count": len(weights), "packed": 0, "matrices": n_matrices, "in_tiles": "F32", "bytes": 4 * n_parameters}
    assert found["tensors"] == {"F32": kinds}
    assert found["native_loop"] == {"why_not": None}
    assert found["sizes"] == {
        "family": "llama",
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "kv_heads": 1,
        "head_width": 16,
        "feed_forward": 48,
        "context": tiny_model.CONTEXT,
        "vocabulary": 300,
    }
    assert found["tokenizer"]["kind"] == "gpt2"
    assert found["tokenizer"]["eos"] == {"id": 2, "text": "<|im_end|>"}
    assert found["chat_template"] is True
    assert found["missing"] == []


def test_memory_is_weights_and_keys_and_values(ostinato: RunCli, tiny: Path) -> None:
    found = facts(ostinato, tiny)
    memory = found["memory"]
    assert memory["weights"] == {"float32": 4 * found["parameters"], "bfloat16": 2 * found["parameters"]}
    assert memory["context"] == tiny_model.CONTEXT
    cells = -(-tiny_model.CONTEXT // 16) * 16  # in whole pages
    assert memory["kv"]["f32"] == 2 * cells * 16 * 4
    assert memory["kv"]["bf16"] == memory["kv"]["f16"] == memory["kv"]["f32"] // 2
    assert "q8_0" not in memory["kv"]  # a head of 16 has no whole block of 32


def test_the_memory_plan_is_told_before_anything_is_loaded(ostinato: RunCli, tiny: Path) -> None:
    found = facts(ostinato, tiny)
    plan = found["plan"]
    rows = {row["name"]: row["bytes"] for row in plan["rows"]}
    assert plan["slots"] == 8
    assert plan["context"] == tiny_model.CONTEXT
    assert sum(rows.values()) == plan["device_bytes"] + plan["host_bytes"]
    if plan["device"] == "cpu":
        assert rows["weights"] == pytest.approx(4 * found["parameters"], rel=0.05)  # tiles have whole rows of 16
        pages = -(-tiny_model.CONTEXT // 16)
        assert rows["KV pages"] == 8 * pages * 16 * 2 * 16 * 4
    assert plan["fits"]
    shown = ostinato("inspect", tiny).out
    assert "plan: KV pages" in shown
    assert "weights dequantised" in shown
    assert "needs: weights" not in shown  # beside the plan, which states what is needed
    assert "plan: rows of output (at first use)" in shown


def test_the_plan_is_of_the_options_of_loading(ostinato: RunCli, tiny: Path) -> None:
    plan = facts(ostinato, tiny, "--context", "64", "--slots", "2", "--kv-type", "bf16")["plan"]
    assert (plan["context"], plan["slots"], plan["kv_type"]) == (64, 2, "bf16")
    refused = ostinato("inspect", tiny, "--context", "1000000")
    assert (refused.code, "was trained for" in refused.err) == (2, True)


def test_a_model_that_does_not_fit_is_planned_and_said_not_to(
    ostinato: RunCli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 1000)
    ran = ostinato("inspect", tiny)
    assert ran.code == 0
    assert "may be taken of 1 kB that are free; without pages it is" in ran.out


def test_pages_that_do_not_hold_every_context_are_fewer_and_it_is_told(
    ostinato: RunCli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.engine.choose.GRAMMAR_BYTES", 0)  # a share of what is free
    pages = {row["name"]: row["bytes"] for row in facts(ostinato, tiny)["plan"]["rows"]}["KV pages"]
    beside = facts(ostinato, tiny)["plan"]["device_bytes"] - pages
    monkeypatch.setattr(machine, "free_host_bytes", lambda: int((beside + pages / 4) / USABLE_SHARE) + 1)
    plan = facts(ostinato, tiny)["plan"]
    assert plan["fits"]
    assert (plan["slots"], plan["context"]) == (8, tiny_model.CONTEXT)
    assert plan["pages"] == 2 * plan["pages_of_a_context"]
    assert "pages hold 2.0 whole contexts for 8 slots: long requests wait for pages" in ostinato("inspect", tiny).out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU allocates its pages at once")
def test_what_is_reserved_and_what_is_used_are_two_figures(ostinato: RunCli, tiny: Path) -> None:
    plan = facts(ostinato, tiny)["plan"]
    later = {row["name"]: row["bytes"] for row in plan["rows"] if row["on_demand"]}
    assert set(later) == {"KV pages", "grammars (at most)", "rows of output (at first use)"}
    assert plan["used_bytes"] == plan["device_bytes"] - sum(later.values())
    assert plan["request"] == {"positions": 1024, "bytes": 1024 * 2 * 16 * 4}
    shown = ostinato("inspect", tiny).out
    assert "reserved, used on demand" in shown
    assert "once the model is loaded, 131 kB more by a request of 1,024 tokens" in shown


def test_plain_output_says_the_same_to_people(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato("inspect", tiny)
    assert ran.code == 0
    for words in ("architecture", "llama", "50,000", "F32: 12", "2 <|im_end|>", "chat template", "as bfloat16"):
        assert words in ran.out
    assert ran.err == ""


def test_a_vocabulary_is_inspected_and_what_is_missing_is_said(ostinato: RunCli, vocabulary: Path) -> None:
    found = facts(ostinato, "--model", vocabulary)
    assert found["tokenizer"]["tokens"] == 300
    assert found["memory"] is None
    assert "only a vocabulary" in found["missing"][0]
    assert "only a vocabulary" in ostinato("inspect", vocabulary).out


def test_an_unknown_architecture_is_inspected_as_far_as_it_goes(ostinato: RunCli, tmp_path: Path) -> None:
    def rename(metadata: dict[str, Any]) -> None:
        metadata["general.architecture"].value = "novel"
        metadata["novel.block_count"] = metadata.pop("llama.block_count")

    file = tiny_model.write(tmp_path / "novel.gguf", change=rename)
    assert re.search(r"\ncannot run +.*'novel' is not known", ostinato("inspect", file).out)
    found = facts(ostinato, file)
    assert found["architecture"] == "novel"
    assert found["sizes"] == {"layers": 1}
    assert found["parameters"] > 0
    assert found["tokenizer"]["tokens"] == 300
    assert "'novel' is not known" in found["missing"][0]


def test_an_unknown_tokenizer_does_not_hide_the_rest(ostinato: RunCli, tmp_path: Path) -> None:
    def rename(metadata: dict[str, Any]) -> None:
        metadata["tokenizer.ggml.model"].value = "novel"

    found = facts(ostinato, tiny_model.write(tmp_path / "novel.gguf", change=rename))
    assert found["sizes"]["layers"] == 1
    assert found["tokenizer"] == {"kind": "novel", "pre": "gpt-2"}
    assert "novel" in found["missing"][0]


def test_a_safetensors_folder_is_described_alike(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    found, same = facts(ostinato, tiny_model.write_folder(tmp_path / "model")), facts(ostinato, tiny)
    assert (found["format"], found["architecture"]) == ("safetensors", "LlamaForCausalLM")
    for part in ("parameters", "sizes", "tensors", "memory", "chat_template", "missing"):
        assert found[part] == same[part]
    assert found["tokenizer"] == {**same["tokenizer"], "kind": "BPE", "pre": None}


def test_what_becomes_of_a_type_on_the_cpu_is_said(
    ostinato: RunCli, tiny_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = ostinato("inspect", tiny_models.gguf("llama-quantised", tiny_files)).out
    assert mixed.count("stay packed on the CPU") == 2  # Q8_0 and Q4_0; its F32 are norms
    assert "can run it on a CPU" in mixed
    monkeypatch.setattr("ostinato.backends.native.backend.HEAD_LANES", 32)
    unknown = ostinato("inspect", tiny_models.gguf("llama-quantised", tiny_files)).out
    assert "cannot: the native loop wants heads whose width is a multiple of 32" in unknown


@pytest.mark.parametrize(
    ("type", "words"), [("IQ2_XS", "; kept as Q8_0 on the CPU"), ("Q4_K", "; stay packed on the CPU")]
)
def test_a_type_that_tiles_lack_is_said_to_be_kept_as_another(type: str, words: str) -> None:
    entry = {"matrices": 3, "in_tiles": nearest_type(type)}
    assert inspect._on_the_cpu(type, entry, {"why_not": None}) == words
    assert inspect._on_the_cpu(type, entry, {"why_not": "of its own"}) == "; float32 on the CPU"
    assert inspect._on_the_cpu(type, {**entry, "matrices": 0}, {"why_not": None}) == ""


def test_a_template_under_any_of_its_names_is_seen(ostinato: RunCli, tmp_path: Path) -> None:
    def rename(metadata: dict[str, Any]) -> None:
        metadata["tokenizer.chat_template.tool_use"] = metadata.pop("tokenizer.chat_template")

    assert facts(ostinato, tiny_model.write(tmp_path / "tools.gguf", change=rename))["chat_template"] is True


def test_a_pipe_in_a_folder_is_said_and_does_not_block(ostinato: RunCli, tmp_path: Path) -> None:
    folder = tiny_model.write_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    found = facts(ostinato, folder)
    assert found["tokenizer"]["kind"] is None
    assert "tokenizer.json: is not a regular file" in found["missing"][0]


def test_a_model_given_twice_is_refused(ostinato: RunCli) -> None:
    assert "given twice" in ostinato("inspect", "a", "--model", "b").err


@pytest.mark.parametrize(("content", "words"), [(b"", "empty"), (b"GGUF", ""), (b"<html>", "web page")])
def test_what_is_no_model_is_refused(ostinato: RunCli, tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "thing.gguf"
    file.write_bytes(content)
    ran = ostinato("inspect", file)
    assert ran.code == 2
    assert words in ran.err


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_needs_what_it_says(
    default_model: Path, ostinato: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = facts(ostinato, default_model)
    assert found["parameters"] == 134_515_008
    assert {kind: entry["count"] for kind, entry in found["tensors"].items()} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    assert found["tokenizer"]["pre"] == "smollm"


def test_what_fits_a_small_card_is_told_with_the_mode_and_why_not_a_higher_one(
    ostinato: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stub in place of the GPU: nothing is loaded on it."""
    path = tiny_models.gguf("llama", tmp_path)
    ada = Machine("cuda:0", 1 << 30, 8 << 30, Chip((8, 9), 128, 99 << 10), 13_000, total_bytes=8 << 30)
    monkeypatch.setattr(machine, "choose_device", lambda wanted: "cuda:0")
    monkeypatch.setattr(machine, "machine_at", lambda device, talk=None: ada)
    plan = facts(ostinato, path, "--device", "cuda", "--slots", "4")["plan"]
    assert (plan["device"], plan["mode"]) == ("cuda:0", "loop")
    assert plan["fitting"][0]["slots"] == 4
    assert [why.partition(":")[0] for why in plan["why_not"]] == ["persistent"]
    shown = ostinato("inspect", path, "--device", "cuda", "--slots", "4").out
    assert "whole contexts at once: 4 slots with a context of" in shown
    assert f"loop; {plan['why_not'][0]}" in shown
