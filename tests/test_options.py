"""Options are checked when they are made, each with its name, its value and what it must be."""

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from ostinato import Sampling, other_engines
from ostinato.cli.chat import chat
from ostinato.cli.run import run
from ostinato.errors import BadOption, OstinatoError, Unsupported, listing
from ostinato.loop.layout import Layout
from ostinato.options import NEUTRAL, PYTHON_WORDS, SAMPLING_NUMBERS, LoadOptions, SamplingNumber
from ostinato.other_engines import OTHER_ENGINES
from ostinato.serve.shapes import GenerationBody


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"max_tokens": 1.5}, {"max_tokens": True}, {"min_tokens": -1}, {"temperature": -0.1},
        {"temperature": float("nan")}, {"temperature": "hot"}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 2},
        {"repetition_penalty": 0}, {"presence_penalty": 1000}, {"seed": -1}, {"seed": 2**63}, {"stop": ("",)},
        {"stop": ("a",) * 17}, {"logprobs": 21}, {"logit_bias": {5: 101.0}}, {"logit_bias": {-5: 1.0}},
        {"stop_token_ids": (-2,)}, {"stop": 3.5}, {"stop": 3}, {"stop_token_ids": 3.5}, {"stop_token_ids": "one"},
        {"logit_bias": [1, 2]}, {"logit_bias": "5=1"}, {"ignore_eos": "no"}, {"temperature": 10**400},
        {"logit_bias": 5},        {"choice": []}, {"choice": ()}, {"choice": ["a", ""]},
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize("number", SAMPLING_NUMBERS, ids=lambda number: number.name)
def test_a_number_of_the_table_has_a_flag_a_field_of_a_body_and_one_of_a_slot(number: SamplingNumber) -> None:
    assert getattr(NEUTRAL, number.name) == number.neutral
    for verb in (run, chat):
        flag = inspect.signature(verb).parameters[number.name].annotation.__metadata__[0]
        assert flag.help == number.help
    bounds, _ = GenerationBody.model_json_schema()["properties"][number.name]["anyOf"]
    assert (bounds["minimum"], bounds["maximum"]) == (number.low, min(number.high, 2**31 - 1))
    assert {field.name: field.kind for field in Layout(1, 1, 1).admission_fields}[number.field] == number.kind
    wrong: Any = {number.name: number.low - 1}
    with pytest.raises(BadOption, match=f"^{number.name} is .*; it must be a .*number from {number.low}"):
        Sampling(**wrong)


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    with pytest.raises(BadOption, match="at most max_tokens"):
        Sampling(max_tokens=3, min_tokens=4)


def test_one_stop_string_or_a_list_are_both_welcome() -> None:
    stops: Any = "###"
    listed: Any = ["###", "!"]
    assert Sampling(stop=stops).stop == ("###",)
    assert Sampling(stop=listed).stop == ("###", "!")


def test_what_the_docs_show_is_well_typed() -> None:
    class Person:  # as a pydantic model
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "object"}

    made = Sampling(stop="a", stop_token_ids=[1], schema=Person)
    assert (made.stop, made.stop_token_ids, made.schema) == (("a",), (1,), '{"type":"object"}')
    assert Sampling(stop=["a", "b"], choice=["a"]).choice == ("a",)


def test_a_record_is_frozen_and_can_be_a_key() -> None:
    made: Any = Sampling(logit_bias={5: 1.0})
    assert {made: 1}[Sampling(logit_bias={5: 1.0})] == 1
    for name in ("temperature", "temprature"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(made, name, 0.5)


def test_none_for_stops_and_bias_means_none() -> None:
    nothing: Any = None
    assert Sampling(stop=nothing, stop_token_ids=nothing, logit_bias=nothing) == Sampling()


@pytest.mark.parametrize(
    "wrong",
    [{"device": 0}, {"device": None}, {"device": "cuda:"}, {"device": "cuda:²"}, {"mode": 1}, {"dtype": "float16"},
     {"dtype": []}, {"kv_type": 8}, {"kv_type": "q4_0"}, {"context": "4096"}, {"threads": 0},
     {"mode": "fast"}, {"slots": 0}, {"slots": 65}, {"slots": None}, {"queue": -1}, {"queue": 1.5},
     {"prompts": "both"}],
)  # fmt: skip
def test_a_wrong_way_to_load_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=next(iter(wrong))):
        LoadOptions(**wrong)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "FP8_E5M2", "float8_e4m3fn"])
def test_an_fp8_cache_is_refused_as_something_known(name: Any) -> None:
    with pytest.raises(Unsupported, match="FP8 caches are not supported"):
        LoadOptions(kv_type=name)


def test_an_old_name_is_still_an_option_and_warns_where_it_is_used() -> None:
    words: dict[str, Any] = {"stop_ids": [7]}
    with pytest.warns(DeprecationWarning, match="now called stop_token_ids") as told:
        old = Sampling(**words)
    assert told[0].filename == __file__
    assert old == Sampling(stop_token_ids=(7,))
    with pytest.warns(DeprecationWarning, match="stop_token_ids"):
        assert old.stop_ids == (7,)
    with pytest.warns(DeprecationWarning, match="stop_ids"), pytest.raises(BadOption, match="both given"):
        Sampling(stop_token_ids=(8,), **words)


def test_what_the_user_says_wins_over_the_defaults() -> None:
    settled = Sampling(temperature=0.5).over(Sampling(temperature=1.0, top_k=40))
    assert (settled.temperature, settled.top_k) == (0.5, 40)


@pytest.mark.parametrize("kind", [LoadOptions, Sampling])
def test_an_unknown_word_lists_the_known_ones(kind: Any) -> None:
    with pytest.raises(BadOption, match="known: "):
        kind(nonsense_zzz=1)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("lora_path", "merge_and_unload"), ("enable_lora", "merge_and_unload"), ("quantization", "GGUF"),
        ("load_in_4bit", "GGUF"), ("speculative", "no speculative decoding"), ("gpu_layers", "choose with device"),
        ("tensor_parallel_size", "--replicas"), ("gpu_memory_utilization", "ostinato inspect"),
        ("max_model_len", "called context here"), ("max_num_seqs", "called slots here"),
        ("kv_cache_dtype", "called kv_type here"), ("max_new_tokens", "called max_tokens here"),
        ("repeat_penalty", "called repetition_penalty here"), ("do_sample", "temperature decides"),
        ("num_beams", "no beam search"), ("trust_remote_code", "add-a-family"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [LoadOptions, Sampling])
def test_a_word_of_another_engine_is_told_what_there_is_instead(kind: Any, word: str, says: str) -> None:
    with pytest.raises(Unsupported, match=says) as told:
        kind(**{word: 1})
    assert word in str(told.value)


def test_an_option_in_the_wrong_place_is_told_the_right_one() -> None:
    for kind, word, says in (
        (LoadOptions, "max_tokens", r"Sampling\(max_tokens="),
        (Sampling, "context", r"LLM\(model"),
    ):
        wrong: Any = {word: 5}
        with pytest.raises(BadOption, match=says):
            kind(**wrong)


@pytest.mark.parametrize("kind", [LoadOptions, Sampling])
@pytest.mark.parametrize("word", PYTHON_WORDS)
def test_what_is_tried_in_python_has_its_answer(kind: Any, word: str) -> None:
    with pytest.raises(BadOption) as told:
        kind(**{word: 1})
    assert str(told.value).endswith(PYTHON_WORDS[word])


def test_what_other_engines_are_answered_with_exists_here() -> None:
    ours = {field.name for kind in (LoadOptions, Sampling) for field in dataclasses.fields(kind)} | {"model"}
    assert set(other_engines._CALLED) <= ours
    assert not ours & OTHER_ENGINES.keys()


def test_the_signature_is_that_of_the_fields() -> None:
    for kind in (LoadOptions, Sampling):
        assert list(inspect.signature(kind).parameters) == [field.name for field in dataclasses.fields(kind)]


def test_the_nearest_name_comes_first() -> None:
    assert listing("temprature", ["top_k", "temperature"]) == "temperature (the nearest), top_k"
    assert listing("zzz", ["b", "a"]) == "a, b"
    assert listing("reuse", ["queue", "context"]) == "context, queue"  # a few letters in common are not near


def test_every_error_has_an_exit_code_and_a_status() -> None:
    kinds = [OstinatoError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    assert len(kinds) > 8
    assert {kind.exit_code for kind in kinds} == {2, 3, 4, 130}
    assert all(400 <= kind.http_status < 600 for kind in kinds)


def test_a_misspelt_option_is_told_its_nearest_name() -> None:
    words: dict[str, Any] = {"temprature": 1.0}
    with pytest.raises(BadOption, match=r"temperature \(the nearest\)"):
        Sampling(**words)
    assert copy.deepcopy(Sampling(max_tokens=3)) == pickle.loads(pickle.dumps(Sampling(max_tokens=3)))


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(BadOption, match="cores of this machine"):
        LoadOptions(threads=100_000)


@pytest.mark.parametrize("mode", ["auto", "eager", "graph", "loop", "persistent"])
def test_every_mode_may_be_asked_for_whatever_this_machine_can_run(mode: str) -> None:
    assert LoadOptions(mode=mode).mode == mode
