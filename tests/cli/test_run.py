"""`ostinato run` on a tiny model: where the prompt comes from, what comes out, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from ostinato.cli.flags import parse_logit_bias
from ostinato.cli.input import holds_unread_text
from ostinato.cli.loading import LoadProgress
from ostinato.errors import BadOption
from tests.cli import tiny_model
from tests.cli.conftest import RunCli, start

GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")


def answer(ostinato: RunCli, *arguments: str | Path, stdin: bytes = b"") -> dict[str, object]:
    ran = ostinato("run", "--json", *GREEDY, *arguments, stdin=stdin)
    assert ran.code == 0, ran.err
    record: dict[str, object] = json.loads(ran.out)
    return record


def test_json_has_everything_a_script_needs(ostinato: RunCli, tiny: Path) -> None:
    record = answer(ostinato, "--model", tiny, "--seed", "7", "hello")
    assert list(record) == [
        "text",
        "reasoning",
        "token_ids",
        "prompt_ids",
        "finish_reason",
        "cached_tokens",
        "timings",
        "model",
        "device",
        "mode",
        "seed",
        "digest",
    ]
    timings = record["timings"]
    assert isinstance(timings, dict)
    assert list(timings) == [
        "load_s",
        "wait_s",
        "prefill_s",
        "first_token_s",
        "decode_s",
        "decode_tok_s",
        "mask_s",
        "grammar",
    ]
    assert isinstance(record["token_ids"], list)
    assert len(record["token_ids"]) == 8
    assert (record["finish_reason"], record["device"], record["mode"]) == ("length", "cpu", "loop")
    assert (record["model"], record["seed"]) == (str(tiny), 7)


def test_the_plain_output_is_the_text_and_a_newline_and_timings_go_to_stderr(ostinato: RunCli, tiny: Path) -> None:
    expected = answer(ostinato, "--model", tiny, "hello")["text"]
    ran = ostinato("run", *GREEDY, "--model", tiny, "hello")
    assert (ran.code, ran.out) == (0, f"{expected}\n")
    assert "tok/s" in ran.err
    assert "first token after" in ran.err
    assert "loaded in" in ran.err


def test_the_last_line_names_the_seed_that_repeats_a_sampled_run(ostinato: RunCli, tiny: Path) -> None:
    words = ("run", "--model", tiny, "--max-tokens", "8", "hello", "--temperature")
    first = ostinato(*words, "1")
    seed = re.search(r"; seed (\d+), loaded in", first.err)
    assert seed is not None
    assert ostinato(*words, "1", "--seed", seed[1]).out == first.out
    assert "seed" not in ostinato(*words, "0").err
    assert "; seed 7, loaded in" in ostinato(*words, "0", "--seed", "7").err


def test_a_safetensors_folder_runs_like_the_file(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    folder = tiny_model.write_folder(tmp_path / "model")
    from_folder, from_file = (answer(ostinato, "--model", path, "hello") for path in (folder, tiny))
    assert from_folder["prompt_ids"] == from_file["prompt_ids"]
    assert from_folder["token_ids"] == from_file["token_ids"]
    ids = ostinato("tokenize", "--json", "--model", folder, "hello there")
    assert ids.out == ostinato("tokenize", "--json", "--model", tiny, "hello there").out


def test_the_same_seed_gives_the_same_text_and_digest(ostinato: RunCli, tiny: Path) -> None:
    words = ("run", "--json", "--model", tiny, "--temperature", "1.5", "--max-tokens", "12", "--seed")
    once, again, other = (json.loads(ostinato(*words, seed, "hi").out) for seed in ("3", "3", "4"))
    assert (once["text"], once["digest"]) == (again["text"], again["digest"])
    assert once["token_ids"] != other["token_ids"]
    assert once["digest"] != other["digest"]


def test_the_prompt_may_be_an_argument_a_file_or_standard_input(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("größer\n".encode())
    from_argument = answer(ostinato, "--model", tiny, "größer")
    from_file = answer(ostinato, "--model", tiny, "--file", file)
    from_stdin = answer(ostinato, "--model", tiny, stdin="größer\r\n".encode())
    from_dash = answer(ostinato, "--model", tiny, "--file", "-", stdin="größer".encode())
    assert {str(record["prompt_ids"]) for record in (from_argument, from_file, from_stdin, from_dash)} == {
        str(from_argument["prompt_ids"])
    }


def test_a_file_follows_a_prompt_after_a_blank_line(ostinato: RunCli, tiny: Path) -> None:
    joined = answer(ostinato, "--model", tiny, "Sum up:\n\nof this")
    piped = answer(ostinato, "--model", tiny, "Sum up:", "--file", "-", stdin=b"of this\n")
    assert piped["prompt_ids"] == joined["prompt_ids"]


def test_a_pipe_beside_a_prompt_is_told_how_to_be_read() -> None:
    with start(("run", "--model", "/no/model.gguf", "hi")) as program:
        _, said = program.communicate(b"a long text\n", timeout=60)
    assert said.startswith(b"note: the text on standard input is not read; --file - puts it after the prompt\n")


@pytest.mark.parametrize(
    ("given", "is_told"),
    [("pipe", True), ("open pipe", False), ("closed pipe", False), ("file", True), ("loop", False)],
)
def test_text_on_standard_input_beside_a_prompt_is_left_there_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, is_told: bool
) -> None:
    if given.endswith("pipe"):
        reading, writing = os.pipe()
        with open(writing, "wb") as pipe:
            pipe.write(b"text" if given == "pipe" else b"")
            pipe.flush()
            with open(reading) as stdin:
                monkeypatch.setattr(sys, "stdin", stdin)
                if given == "closed pipe":
                    pipe.close()
                assert holds_unread_text() == is_told
        return
    (tmp_path / "lines").write_text("one\ntwo\n")
    with (tmp_path / "lines").open() as stdin:
        os.lseek(stdin.fileno(), 4 if given == "loop" else 0, os.SEEK_SET)  # a shell's loop has read a line of it
        monkeypatch.setattr(sys, "stdin", stdin)
        assert holds_unread_text() == is_told


def test_a_prompt_that_is_a_model_is_told(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato("run", *GREEDY, "--model", tiny, tiny)
    assert (ran.code, ran.err.splitlines()[0]) == (
        0,
        f"note: {tiny} is a model, and taken as the prompt here; --model {tiny} runs it",
    )
    assert "note" not in ostinato("run", *GREEDY, "--model", tiny, "hello").err


def test_a_schema_that_is_no_json_is_named(ostinato: RunCli, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"type": ')
    ran = ostinato("run", "--schema", tmp_path / "broken.json", "hi")
    assert (ran.code, f"--schema {tmp_path / 'broken.json'} is no JSON: " in ran.err) == (2, True)


def test_an_instruct_model_gets_its_template_unless_raw(ostinato: RunCli, tiny: Path) -> None:
    templated = answer(ostinato, "--model", tiny, "hi")
    raw = answer(ostinato, "--model", tiny, "--raw", "hi")
    with_system = answer(ostinato, "--model", tiny, "--system", "be kind", "hi")
    ids = ostinato("tokenize", "--json", "--special", "--model", tiny, tiny_model.prompt_of("hi"))
    assert templated["prompt_ids"] == json.loads(ids.out)["ids"]
    assert isinstance(raw["prompt_ids"], list)
    assert len(raw["prompt_ids"]) == 2
    assert len(str(with_system["prompt_ids"])) > len(str(templated["prompt_ids"]))


def test_text_that_looks_like_markup_comes_out_as_it_is(ostinato: RunCli, tiny: Path) -> None:
    bracket = json.loads(ostinato("tokenize", "--json", "--model", tiny, "[").out)["ids"][0]
    ran = ostinato("run", *GREEDY, "--model", tiny, "--logit-bias", f"{bracket}=100", "hi")
    assert ran.out == "[" * 8 + "\n"


def test_a_stop_string_ends_the_text_and_is_not_shown(ostinato: RunCli, tiny: Path) -> None:
    letters = [json.loads(ostinato("tokenize", "--json", "--model", tiny, letter).out)["ids"][0] for letter in "["]
    words = ("--model", tiny, "--logit-bias", f"{letters[0]}=100", "--stop", "nothing", "--stop", "[[[", "hi")
    record = answer(ostinato, *words)
    assert record["text"] == ""
    assert record["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "the prompt is empty"),
        (("hi", "--file", "/no/such/file"), "cannot read /no/such/file: No such file"),
        (("hi", "--schema", '{"type": "object"}'), "--schema takes a file, not JSON text"),
        (("--file", "/no/such/file"), "cannot read /no/such/file: No such file"),
        (("--file", "/"), "cannot read /: Is a directory"),
        (("hi", "--raw", "--system", "x"), "--raw leaves it out"),
        (("hi", "--temperature", "-1"), "--temperature is -1.0; it must be a number from 0 to 100"),
        (("hi", "--max-tokens", "0"), "error: --max-tokens is 0"),
        (("hi", "--top-p", "nan"), "error: --top-p is nan"),
        (("hi", "--seed", "-5"), "seed is -5"),
        (("hi", "--device", "gpu"), "device is 'gpu'; it must be auto, cpu, cuda or cuda:N"),
        (("hi", "--threads", "0"), "threads is 0"),
        (("hi", "--slots", "65"), "slots is 65; it must be a whole number from 1 to 64"),
        (("hi", "--mode", "fast"), "mode is 'fast'; it must be auto, eager, graph, loop or persistent"),
        (("hi", "--logit-bias", "5"), "it must be ID=VALUE"),
        (("hi", "--stop", "a", "--stop", ""), "error: --stop is ''; it must be a text that is not empty"),
        (("hi", "--choice", "a", "--choice", ""), "error: --choice is ''; it must be a text that is not empty"),
        (("hi", *17 * ("--stop", "a")), "error: --stop has 17 texts; at most 16 are allowed"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_looked_for(
    ostinato: RunCli, arguments: tuple[str, ...], message: str
) -> None:
    ran = ostinato("run", "--model", "/there/is/no/model.gguf", *arguments)
    assert ran.code == 2
    assert message in ran.err
    assert ran.out == ""
    assert ran.err.count("\n") == 1


def test_an_empty_pipe_is_an_empty_prompt(ostinato: RunCli, tiny: Path) -> None:
    assert "the prompt is empty" in ostinato("run", "--model", tiny, stdin=b"\n").err
    assert ostinato("run", "--model", tiny, stdin=b"").code == 2


def test_a_blank_prompt_is_refused_unless_raw(ostinato: RunCli, tiny: Path) -> None:
    for words, stdin in (((), b" \n\t\n"), (("  ",), b"")):
        ran = ostinato("run", "--model", tiny, *words, stdin=stdin)
        assert (ran.code, ran.out) == (2, "")
        assert "the prompt is blank" in ran.err
    assert ostinato("run", "--model", tiny, "--raw", "--max-tokens", "1", "  ").code == 0


def test_a_missing_prompt_is_refused(ostinato: RunCli) -> None:
    ran = ostinato("run", terminal=True)
    assert ran.code == 2
    assert "the prompt is missing: give it as an argument, with --file FILE, or on standard input" in ran.err


def test_bytes_that_are_not_utf8_are_refused_with_their_offset(ostinato: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(b"good\xc3(")
    ran = ostinato("run", "--file", file)
    assert ran.code == 2
    assert f"{file} is not UTF-8: byte 0xc3 at offset 4" in ran.err


def test_a_system_message_needs_a_template(ostinato: RunCli, base: Path) -> None:
    ran = ostinato("run", "--model", base, "--system", "be kind", "hi")
    assert ran.code == 2
    assert "has none" in ran.err


def test_a_model_without_a_template_takes_the_prompt_as_it_is(ostinato: RunCli, base: Path, tiny: Path) -> None:
    assert answer(ostinato, "--model", base, "hi")["text"] == answer(ostinato, "--model", tiny, "--raw", "hi")["text"]


def test_a_prompt_longer_than_the_context_says_how_long(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato("run", "--model", tiny, "--context", "16", "--raw", "hello there " * 10)
    assert ran.code == 2
    assert "the context holds 16" in ran.err
    assert "shorten it, or give a larger --context (" in ran.err


def test_a_device_that_is_not_here_is_the_hardwares_limit(ostinato: RunCli, tiny: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ran = ostinato("run", "--model", tiny, "--device", "cuda", "hi")
    assert ran.code == 4
    assert "use the device cpu" in ran.err


def test_a_mode_may_be_chosen_and_one_that_cannot_run_says_why(ostinato: RunCli, tiny: Path) -> None:
    eager = answer(ostinato, "--model", tiny, "--mode", "eager", "--slots", "1", "hi")
    assert eager["mode"] == "eager"
    assert eager["token_ids"] == answer(ostinato, "--model", tiny, "hi")["token_ids"]
    ran = ostinato("run", "--model", tiny, "--mode", "graph", "--device", "cpu", "hi")
    assert ran.code == 4
    assert "graphs are CUDA's" in ran.err


def test_prompts_from_a_tape_that_is_not_there_are_refused(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato("run", "--model", tiny, "--device", "cpu", "--prompts", "tape", "hi")
    assert ran.code == 2
    assert "--prompts tape is for --mode persistent on a GPU" in ran.err


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_streamed_and_exits_with_130(tiny: Path) -> None:
    with start(("run", "--model", tiny, "--max-tokens", "40000", "--ignore-eos", "hi")) as program:
        assert program.stdout is not None
        first = program.stdout.read(1)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=30)
        assert program.returncode == 130
    assert first
    assert out.endswith(b"\n")
    assert b"interrupted after" in err
    assert b"Traceback" not in err


def test_logit_bias_is_parsed() -> None:
    assert parse_logit_bias(["3=1", " 4=-0.5", "3=2"]) == {3: 2.0, 4: -0.5}
    for text in ("", "3", "3=", "=3", "a=1", "1=b"):
        with pytest.raises(BadOption, match="--logit-bias"):
            parse_logit_bias([text])


def test_quick_loading_is_silent_and_slow_loading_says_so_in_a_few_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("ostinato.cli.loading.time.monotonic", lambda: now)
    progress = LoadProgress()
    progress(1, 100_000_000)
    assert capsys.readouterr().err == ""
    for step in range(1, 101):
        now = 100.0 + step / 10
        progress(step * 1_000_000, 100_000_000)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 8
    assert lines[-1] == "loading: 100 MB of 100 MB"


def test_on_a_terminal_slow_loading_shows_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr("ostinato.cli.loading.QUIET_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    progress = LoadProgress()
    progress(50, 100)
    progress.close()
    assert "loading" in capsys.readouterr().err


# What an answer must follow


def test_an_answer_follows_the_schema_in_a_file(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}')
    ran = ostinato("run", "--json", "--model", tiny, "--seed", "1", "--schema", schema, "hello")
    assert ran.code == 0, ran.err
    record = json.loads(ran.out)
    assert record["finish_reason"] == "stop"
    assert {type(value) for value in json.loads(record["text"])} == {bool}
    assert record["timings"]["grammar"] == "device+stack"


def test_an_answer_follows_a_regex_a_choice_or_a_grammar(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    grammar = tmp_path / "grammar.gbnf"
    grammar.write_text('root ::= "a" ("b" | "c") "d"')
    for words, texts in (
        (("--regex", "[xy]z"), {"xz", "yz"}),
        (("--choice", "yes", "--choice", "no"), {"yes", "no"}),
        (("--grammar", grammar), {"abd", "acd"}),
    ):
        ran = ostinato("run", "--model", tiny, *words, "hello")
        assert ran.code == 0, ran.err
        assert ran.out.rstrip("\n") in texts
    ran = ostinato("run", "--model", tiny, "--json-mode", "--max-tokens", "20", "hello")
    assert ran.out.startswith("{")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--schema", "nowhere.json"), "cannot read nowhere.json"),
        (("--regex", "(a"), "this regex cannot be followed"),
        (("--regex", "a", "--json-mode"), "--json-mode and --regex are both given"),
    ],
)
def test_what_cannot_be_followed_is_refused(ostinato: RunCli, tiny: Path, words: tuple[str, ...], why: str) -> None:
    ran = ostinato("run", "--model", tiny, *words, "hello")
    assert (ran.code, ran.out) == (2, "")
    assert why in ran.err


def test_a_conversation_that_goes_on_from_a_state_follows_too(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    for _ in range(2):
        ran = ostinato(
            "run", "--model", tiny, "--state", tmp_path / "talk", "--choice", "yes", "--choice", "no", "hello"
        )
        assert ran.code == 0, ran.err
        assert ran.out.rstrip("\n") in ("yes", "no")
