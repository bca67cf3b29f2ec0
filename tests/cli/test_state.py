"""`run` and `chat` with `--state FILE`: a conversation goes on where another process left it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, Sampling
from ostinato.cache import state_bytes
from ostinato.text.reasoning import Reasoning
from tests.cli import tiny_model
from tests.cli.conftest import RunCli

SHORT = ("--max-tokens", "6", "--ignore-eos", "--json")


def said(ostinato: RunCli, *arguments: str | Path) -> dict[str, Any]:
    ran = ostinato("run", *SHORT, *arguments)
    assert ran.code == 0, ran.err
    record: dict[str, Any] = json.loads(ran.out)
    return record


def test_the_second_question_knows_the_first_and_its_answer(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    state = tmp_path / "talk.state"
    first = said(ostinato, "--model", tiny, "--state", state, "--system", "be kind", "one")
    second = said(ostinato, "--model", tiny, "--state", state, "two")
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "two"},
    ]
    with LLM(tiny, device="cpu") as llm:
        assert second["prompt_ids"] == llm.chat_ids(messages)
        alone = llm.chat(messages, Sampling(max_tokens=6, ignore_eos=True))
    assert tuple(second["token_ids"]) == alone.token_ids


def test_a_conversation_goes_on_from_the_answer_and_not_from_its_reasoning(
    ostinato: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model.write(tmp_path / "channels.gguf", change=tiny_model.of_channels)
    monkeypatch.setattr(Reasoning, "before", lambda _, sampling, prompt, calls: sampling)
    with LLM(model, device="cpu", context=64) as llm:
        words = ("--model", model, "--state", tmp_path / "talk.state", "--grammar", tmp_path / "script.lark")
        (tmp_path / "script.lark").write_text(tiny_model.script(llm.tokenizer, tiny_model.CHANNELS))
        record = json.loads(ostinato("run", "--json", *words, "one").out)
        assert (record["text"], record["reasoning"]) == ("Yes.", "hm, so")
        shown = ostinato("run", *words, "two")
        assert shown.out == "Yes.\n"
        assert shown.err.startswith("hm, so\n\n[")
        third = json.loads(ostinato("run", "--json", *words, "three").out)
        messages = [
            *({"role": "user", "content": "one"}, {"role": "assistant", "content": "Yes."}),
            *({"role": "user", "content": "two"}, {"role": "assistant", "content": "Yes."}),
            {"role": "user", "content": "three"},
        ]
        assert third["prompt_ids"] == llm.chat_ids(messages)


def test_plain_text_goes_on_from_all_that_was_shown(ostinato: RunCli, base: Path, tmp_path: Path) -> None:
    state = tmp_path / "text.state"
    first = said(ostinato, "--model", base, "--state", state, "one")
    second = said(ostinato, "--model", base, "--state", state, "two")
    before = [*first["prompt_ids"], *first["token_ids"]]
    assert second["prompt_ids"][: len(before)] == before
    with LLM(base, device="cpu") as llm:
        alone = llm.generate(second["prompt_ids"], Sampling(max_tokens=6, ignore_eos=True))
    assert tuple(second["token_ids"]) == alone.token_ids


def test_a_stop_string_is_no_part_of_what_goes_on(ostinato: RunCli, base: Path, tmp_path: Path) -> None:
    state = tmp_path / "text.state"
    shown = said(ostinato, "--model", base, "one")["text"]
    first = said(ostinato, "--model", base, "--state", state, "--stop", shown[2], "one")
    assert first["text"] == shown[:2]
    second = said(ostinato, "--model", base, "--state", state, "two")
    with LLM(base, device="cpu") as llm:
        assert llm.detokenize(second["prompt_ids"]).startswith("one" + shown[:2])


def test_a_state_of_other_activations_is_refused_and_stays(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    state = tmp_path / "talk.state"
    said(ostinato, "--model", tiny, "--state", state, "one")
    before = state.read_bytes()
    ran = ostinato("run", *SHORT, "--model", tiny, "--state", state, "--activations", "int8", "two")
    assert ran.code == 2
    assert "was saved with --activations wide, and the model has --activations int8" in ran.err
    ran = ostinato("run", *SHORT, "--model", tiny, "--state", state, "--mode", "eager", "two")
    assert "and the model has dense weights" in ran.err
    assert state.read_bytes() == before


def test_a_damaged_state_is_refused_by_name_and_stays(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    state = tmp_path / "talk.state"
    said(ostinato, "--model", tiny, "--state", state, "one")
    damaged = bytearray(state.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    state.write_bytes(damaged)
    ran = ostinato("run", *SHORT, "--model", tiny, "--state", state, "two")
    assert (ran.code, ran.out) == (2, "")
    assert str(state) in ran.err
    assert state.read_bytes() == damaged


def test_a_state_of_another_model_or_manner_is_refused(
    ostinato: RunCli, tiny: Path, base: Path, tmp_path: Path
) -> None:
    state = tmp_path / "talk.state"
    said(ostinato, "--model", tiny, "--state", state, "one")
    other = ostinato("run", *SHORT, "--model", base, "--state", state, "two")
    assert other.code == 2
    assert "was not saved by" in other.err
    raw = ostinato("run", *SHORT, "--model", tiny, "--raw", "--state", state, "two")
    assert raw.code == 2
    assert "through the chat template" in raw.err
    late = ostinato("run", *SHORT, "--model", tiny, "--system", "be brief", "--state", state, "two")
    assert late.code == 2
    assert "begun already" in late.err


def test_a_folder_that_is_not_there_is_told_before_anything_runs(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    ran = ostinato("run", *SHORT, "--model", tiny, "--state", tmp_path / "no" / "talk.state", "one")
    assert (ran.code, ran.out) == (2, "")
    assert "no folder" in ran.err
    ran = ostinato("chat", "--model", tiny, "--state", tmp_path / "no" / "talk.state", stdin=b"hi\n")
    assert "no folder" in ran.err


CHAT = ("chat", "--max-tokens", "6", "--ignore-eos", "--state")


def saved_contents(state: Path) -> list[str]:
    note = state_bytes.describe(state.read_bytes()).note or {}
    return [message["content"] for message in note["note"]["messages"]]


def test_a_chat_and_a_run_continue_each_other(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    state = tmp_path / "talk.state"
    ran = ostinato(*CHAT, state, "--model", tiny, "--system", "be kind", stdin=b"one\ntwo\n")
    assert ran.code == 0, ran.err
    system, one, first, two, second = saved_contents(state)
    assert (system, one, two, f"{first}\n{second}\n") == ("be kind", "one", "two", ran.out)
    third = said(ostinato, "--model", tiny, "--state", state, "three")
    assert third["cached_tokens"] > 0
    assert ostinato(*CHAT, state, "--model", tiny, stdin=b"/system\nfour\n").code == 0
    assert saved_contents(state)[:-1] == ["be kind", "one", first, "two", second, "three", third["text"], "four"]


def test_a_chat_that_was_reset_is_saved_without_its_messages(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    state = tmp_path / "talk.state"
    assert ostinato(*CHAT, state, "--model", tiny, stdin=b"one\n").code == 0
    assert ostinato(*CHAT, state, "--model", tiny, stdin=b"/reset\n").code == 0
    assert saved_contents(state) == []


def test_a_chat_is_saved_although_its_input_ends_badly(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    state = tmp_path / "talk.state"
    ran = ostinato(*CHAT, state, "--model", tiny, stdin=b"one\n\xff\n")
    assert ran.code == 2
    assert saved_contents(state)[0] == "one"


def test_a_chat_without_messages_writes_nothing(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    assert ostinato(*CHAT, tmp_path / "talk.state", "--model", tiny, stdin=b"").code == 0
    assert not (tmp_path / "talk.state").exists()


def test_a_system_message_does_not_open_a_chat_that_has_begun(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    state = tmp_path / "talk.state"
    assert ostinato(*CHAT, state, "--model", tiny, stdin=b"one\n").code == 0
    ran = ostinato(*CHAT, state, "--model", tiny, "--system", "be brief", stdin=b"two\n")
    assert ran.code == 2
    assert "begun already" in ran.err
