"""Options of other engines by name, and what Ostinato has instead of each.

A user who comes from vLLM, llama.cpp, Ollama or transformers types their words first: Python, the command line and HTTP
answer them from this one table, each with the names that it has itself. Nothing here is an option of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Final

_CALLED: Final = {
    "context": "max_model_len max_seq_len max_length n_ctx num_ctx ctx_size context_length max_position_embeddings",
    "slots": "max_num_seqs n_parallel parallel num_parallel n_seq_max max_batch_size max_running_requests",
    "threads": "n_threads num_threads num_thread threads_batch n_threads_batch",
    "kv_type": "kv_cache_dtype cache_type_k cache_type_v type_k type_v",
    "dtype": "torch_dtype",
    "device": "device_map main_gpu",
    "max_tokens": "num_predict n_predict max_new_tokens max_gen_len predict",
    "min_tokens": "min_new_tokens",
    "repetition_penalty": "repeat_penalty",
    "stop": "stop_strings stop_sequences reverse_prompt",
    "stop_token_ids": "eos_token_id",
    "logprobs": "n_probs output_logits",
    "temperature": "temp",
    "schema": "json_schema guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar grammar_file",
    "model": "model_path model_id hf_repo hf_file repo_id filename",
}

LORA = (
    "LoRA adapters are not applied here; merge the adapter into its model (in PEFT: merge_and_unload, then "
    "save_pretrained) and open the merged folder"
)
_QUANTISED = (
    "weights run in the type that the file stores them in, and nothing quantises them while they load; take a GGUF "
    "file of the size that you want (Q4_K_M, Q8_0, ...)"
)
_DRAFT = "there is no speculative decoding; every token comes from a step of the model itself"
_OFFLOAD = "a model runs whole on one device and its layers are not split between CPU and GPU; choose with {device}"
_ONE_GPU = "a model runs on one GPU; several GPUs or machines each run a whole copy with `ostinato serve --replicas N`"
_MEMORY = "`ostinato inspect` shows the memory plan, which follows from {context}, {slots} and {kv_type}"
_SAMPLED = "{temperature} decides: 0 takes the most likely token, above 0 tokens are sampled"
_BEAMS = "there is no beam search; over HTTP n asks for several samples, in Python a list with the same prompt does"
_VISION = "vision models are not supported; prompts are text or token ids"
_FILTER = "this filter of tokens is not there; {top_k}, {top_p} and {min_p} are"
_REMOTE = "no code of a model folder is ever run; families are built in, and docs/add-a-family.md says how to add one"
_ALWAYS = "prefixes that prompts share are always computed once; there is nothing to switch on"
_EAGER = "how the decode loop is paced (eager, graph, loop or persistent) is set with {mode}"
_MAPPED = "files are always memory-mapped while weights load, and their pages are not locked"
_ATTENTION = "there is no option for it; the kernel of attention follows from {device} and {mode}"
_NUMA = "there is no option for NUMA; start the program under `numactl` to keep it on one node"
_KEPT = "a model leaves a server's memory only when another needs the room, the one used longest ago first"
_BATCHED = "new requests always join those that are being decoded; there is nothing to switch on"

_INSTEAD: Final = {
    LORA: "lora lora_path lora_modules lora_request lora_adapter lora_adapters lora_scaled enable_lora adapter "
    "adapters adapter_path adapter_name peft peft_config max_lora_rank max_loras",
    _QUANTISED: "quantization quantize quantization_config load_in_4bit load_in_8bit load_format "
    "bnb_4bit_compute_dtype",
    _DRAFT: "speculative speculative_config speculative_model draft_model model_draft draft num_speculative_tokens "
    "assistant_model prompt_lookup_num_tokens",
    _OFFLOAD: "gpu_layers n_gpu_layers num_gpu ngl cpu_offload_gb cpu_offload offload_folder n_cpu_moe",
    _ONE_GPU: "tensor_parallel_size pipeline_parallel_size data_parallel_size tp tp_size tensor_split split_mode",
    _MEMORY: "gpu_memory_utilization mem_fraction_static max_memory swap_space block_size max_num_batched_tokens "
    "chunked_prefill_size enable_chunked_prefill "
    "n_batch batch_size n_ubatch ubatch_size low_vram low_cpu_mem_usage",
    _SAMPLED: "do_sample",
    _BEAMS: "num_beams use_beam_search best_of num_return_sequences length_penalty beam_width",
    _VISION: "mmproj images image limit_mm_per_prompt multi_modal_data",
    _FILTER: "top_n top_n_sigma typical_p typ_p tfs_z tfs mirostat mirostat_tau mirostat_eta xtc_probability "
    "dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff penalty_alpha no_repeat_ngram_size repeat_last_n",
    _REMOTE: "trust_remote_code",
    _ALWAYS: "enable_prefix_caching cache_prompt prompt_cache use_cache",
    _EAGER: "enforce_eager cuda_graph use_cuda_graph",
    _MAPPED: "use_mmap no_mmap mmap use_mlock mlock",
    _ATTENTION: "flash_attn flash_attention attn_implementation attention_backend",
    _NUMA: "numa",
    _KEPT: "keep_alive keepalive",
    _BATCHED: "cont_batching continuous_batching",
}


_CALLED_HERE: Final = {word: name for name, words in _CALLED.items() for word in words.split()}

_SENTENCES: Final = {word: sentence for sentence, words in _INSTEAD.items() for word in words.split()}

# The word of another engine, and the sentence that answers it in Python.
OTHER_ENGINES: Final[Mapping[str, str]] = MappingProxyType(
    {word: f"it is called {name} here" for word, name in _CALLED_HERE.items()}
    | {word: re.sub(r"[{}]", "", sentence) for word, sentence in _SENTENCES.items()}
)

# Options of llama.cpp's programs, which the command line is asked for and Python is not.
_OF_PROGRAMS: Final = {
    "-m": "it is called --model here",
    "-c": "it is called --context here",
    "-n": "it is called --max-tokens here",
    "-t": "it is called --threads here",
    "-np": "it is called --slots here",
    "-s": "it is called --seed here",
    "-p": 'the prompt is given without an option: `ostinato run "a prompt"`',
    "-f": "it is called --file here",
    "-sys": "it is called --system here",
    "-b": _MEMORY,
    "-ub": _MEMORY,
    "-ctk": "it is called --kv-type here",
    "-ctv": "it is called --kv-type here",
    "-fa": _ATTENTION,
    "-cb": _BATCHED,
    "-ngl": _OFFLOAD,
    "-md": _DRAFT,
    "-hf": "a model of the Hugging Face hub is --model hf:owner/repo/file.gguf here",
    "--prompt": 'the prompt is given without an option: `ostinato run "a prompt"`',
    "-i": "`ostinato chat` talks in the terminal",
    "-cnv": "`ostinato chat` talks in the terminal",
}

# Verbs of Ollama and llama.cpp, and others that users try.
OTHER_VERBS: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("list", "ls"), "`ostinato models` lists the models")
    | dict.fromkeys(("ps", "stop"), "a server's /slots shows its requests, and Ctrl-C or SIGTERM stops it")
    | dict.fromkeys(("show", "info"), "`ostinato inspect` describes a model")
    | dict.fromkeys(("generate", "complete", "completion"), "`ostinato run` generates text")
    | dict.fromkeys(("quantize", "create", "convert"), _QUANTISED)
    | dict.fromkeys(("server", "start"), "`ostinato serve` serves a model")
    | dict.fromkeys(("delete", "remove"), "`ostinato rm` removes a model")
    | dict.fromkeys(("download", "fetch"), "`ostinato pull` fetches a model")
    | dict.fromkeys(("rank", "rerank"), "`ostinato embed --pooling rank` prints a ranking model's scores")
    | {"perplexity": "`ostinato score` computes it", "version": "`ostinato --version` prints it"}
)


def answer_flag(flag: str, of_verb: Collection[str]) -> str | None:
    """The answer to an option of a verb, which has these flags; None for a word that is not in the table.

    >>> answer_flag("--n-ctx=4096", ["--context"])
    'it is called --context here'
    """
    answer = _answer_flag(flag)
    called = re.fullmatch(r"it is called (--\S+) here", answer or "")
    if called is None or called[1] in of_verb:
        return answer
    return f"it is called {called[1]} in `ostinato run`, and this command does not have it"


def _answer_flag(flag: str) -> str | None:
    given = flag.partition("=")[0]
    if given in _OF_PROGRAMS or not given.startswith("--"):
        return _named(_OF_PROGRAMS.get(given), _flag_of)
    word = given[2:].replace("-", "_")
    ours = _CALLED_HERE.get(word)
    if ours in _NO_FLAG:
        return f"it is called {ours} in Python and over HTTP; the command line does not have it"
    if ours is not None:
        return f"it is called {_flag_of(ours)} here"
    return _named(_SENTENCES.get(word), _flag_of)


def answer_field(word: str, fields: Collection[str]) -> str | None:
    """The answer to a field of a body over HTTP, which has these fields; None for a word that is not in the table.

    >>> answer_field("num_ctx", ())
    "the server's operator sets it with --context"
    """
    ours = _CALLED_HERE.get(word)
    if ours in _OPERATORS:
        return f"the server's operator sets it with {_flag_of(ours)}"
    if ours is not None:
        name = "response_format" if ours in _FORMATS else ours
        return f"it is called {_FORMATS.get(ours, ours)} here" if name in fields else None
    sentence = _SENTENCES.get(word, "")
    whose = " (the server's operator sets it)" if any(f"{{{name}}}" in sentence for name in _OPERATORS) else ""
    return _named(sentence + whose, lambda name: _flag_of(name) if name in _OPERATORS else name) or None


def _named(sentence: str | None, name: Callable[[str], str]) -> str | None:
    """A sentence with our options as an interface names them."""
    return sentence and re.sub(r"{(\w+)}", lambda found: name(found[1]), sentence)


# What the command line does not have, what a server's operator sets, and what has another form over HTTP.
_NO_FLAG: Final = frozenset({"min_tokens", "logprobs"})
_OPERATORS: Final = frozenset({"model", "device", "dtype", "context", "slots", "threads", "kv_type", "mode"})
_FORMATS: Final = {"grammar": 'response_format {"type": "grammar", "grammar": "..."}'}


def _flag_of(name: str) -> str:
    return "--stop-token-id" if name == "stop_token_ids" else f"--{name.replace('_', '-')}"
