"""The table of families, docs/families.md: what the tests show of each, and which loops run it.

python -m tests.families --write    write docs/families.md

Rows come from the registry, formats from the tiny models that are compared with transformers and llama.cpp, and loops
from what the backends say of a header: no weights are made.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import transformers

from ostinato.backends.machine import Machine
from ostinato.engine.choose import LoadCase, why_not
from ostinato.engine.known_cards import PERSISTENT_FAMILIES
from ostinato.files.checkpoint import Checkpoint, TensorInfo
from ostinato.lab.random_weights import AnyName
from ostinato.models.blocks import leaves_of
from ostinato.models.family import Family
from ostinato.models.registry import FAMILIES, family_named, family_of, read_shape
from ostinato.models.shape import Shape
from ostinato.options import LoadOptions
from ostinato.text.pretokenizers import PRE_TOKENIZERS
from tests.models import tiny, tiny_encoders
from tests.models.llama_cpp import LEFT_ALONE
from tests.text.test_vocabularies import NAMES, SOURCE_NAMES, WITHOUT_TEXTS

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
CPU, GPU = Machine("cpu", 1 << 40, 1 << 40), Machine("cuda:0", 1 << 40, 1 << 40, driver_cuda=13_000)
COLUMNS: Final = {"CPU loop": (CPU, "loop"), "CUDA loop": (GPU, "loop"), "tape": (GPU, "persistent")}
# Widths that every kernel knows, in the place of those of a tiny model.
USUAL: Final = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "n_embd": 256}
KIND: Final = "kind"
# The vocabulary of a family's published models (a real one, the name of its pre-tokenizer, or KIND where only others of
# its kind can be had), and a template.
TEXTS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "llama": ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct"),
        "mixtral": ("llama-spm", ""),
        "qwen2": ("qwen2", "Qwen-Qwen2.5-7B-Instruct"),
        "qwen2moe": ("qwen2", "Qwen-Qwen2.5-7B-Instruct"),
        "qwen3": ("qwen2", "Qwen-Qwen3-0.6B"),
        "qwen3moe": ("qwen2", "Qwen-Qwen3-0.6B"),
        "qwen3vl": ("qwen2", "Qwen-Qwen3-0.6B"),
        "qwen3vlmoe": ("qwen2", "Qwen-Qwen3-0.6B"),
        "qwen3next": ("qwen2", "Qwen-Qwen3-0.6B"),
        "qwen35": ("qwen35", "Qwen3.5-4B"),
        "qwen35moe": ("qwen35", "Qwen3.5-4B"),
        "gemma": (KIND, ""),
        "gemma-embedding": (KIND, ""),
        "gemma2": (KIND, "google-gemma-2-2b-it"),
        "gemma3": (KIND, "google-gemma-2-2b-it"),
        "ernie4_5": (KIND, ""),
        "ernie4_5-moe": (KIND, ""),
        "gptneox": ("gpt-neox", ""),
        "mamba": ("gpt-neox", ""),
        "mamba2": ("gpt-neox", ""),
        "nomic-bert": ("bert-bge", ""),  # BERT's, uncased
        "xlm-roberta": ("nomic-bert-moe", ""),
        "gemma4": ("gemma-4", "google-gemma-4-31B-it"),
        "phi2": ("phi-2", ""),
        "phi3": ("phi-3", "microsoft-Phi-3.5-mini-instruct"),
        "gpt2": ("gpt-2", ""),
        "bert": ("bert-bge", ""),
        "falcon-h1": ("falcon-h1", ""),
        "smollm3": ("smaug-bpe", "HuggingFaceTB-SmolLM3-3B"),
        "granite": ("refact", "ibm-granite-granite-3.3-2B-Instruct"),
        "granitemoe": ("refact", "ibm-granite-granite-3.3-2B-Instruct"),
        "granitehybrid": ("dbrx", "ibm-granite-granite-4.0"),
        "olmo2": ("dbrx", ""),
        "olmo3": ("dbrx", ""),
        "olmoe": ("olmo", ""),
        "exaone4": ("exaone4", ""),
        "seed_oss": ("seed-coder", "ByteDance-Seed-OSS"),
        "glm4": ("glm4", ""),
        "glm4moe": ("glm4", "GLM-4.6"),
        "deepseek2": ("deepseek-v3", "deepseek-ai-DeepSeek-V3.1"),
        "hunyuan-dense": ("hunyuan-dense", ""),
        "arcee": ("llama-bpe", ""),
        "starcoder2": ("starcoder", ""),
        "stablelm": ("stablelm2", ""),
        "command-r": ("command-r", "CohereForAI-c4ai-command-r-plus-tool_use"),
        "cohere2": ("command-r", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
        "mistral3": ("tekken", "mistralai-Ministral-3-14B-Reasoning-2512"),
        "gpt-oss": ("gpt-4o", "openai-gpt-oss-120b"),
        "lfm2": ("lfm2", "LFM2.5-Instruct"),
        "lfm2moe": ("lfm2", "LFM2-8B-A1B"),
        "nemotron_h": ("tekken", "NVIDIA-Nemotron-Nano-v2"),
        "nemotron_h_moe": ("tekken", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        "laguna": ("laguna", "poolside-Laguna-XS-2.1"),
        "muse-glimmer": ("llama4", "muse-glimmer"),
        "modern-bert": ("modern-bert", ""),
    }
)
HEAD = """\
# Model families

For users: which models run, where, and how that is shown. `python -m tests.families --write` writes this page
from the registry, the tests and the backends' own answers; `tests/test_families.py` fails if it is not
current. Every family also runs in torch (`eager`). [Adding a family](add-a-family.md) is one file.

- **GGUF**, **safetensors**: tiny random models in this format give the logits (within 1e-4) and the 64 greedy
  tokens of transformers; *llama.cpp* says that it reads the same GGUF file as the same model and decodes the
  same 64 greedy tokens (but for ties within its rounding; `make soak` runs all of them).
- **CPU loop**, **CUDA loop**, **tape**: *yes*, or the note that says which block prevents it there. The CUDA
  loop and the [tape](tape.md) are shown on a GPU by `make test-gpu`. On an H200 every family of this page ran
  on 2026-11-18 with equal bits in `eager`, `graph` and `loop`, where it has them: 74 tiny models, latent
  attention among them. The tape ran there with 38 models, granite, smollm3, mistral3, glm4, gemma, gemma2 and
  gemma3 among them.
- **tokenizer**: *ids* of the published vocabulary are compared; *splits*: the pre-tokenizer of that name is
  compared over a synthetic vocabulary; *kind*: SentencePiece-style, compared over Llama 2's vocabulary, with
  the blanks and tags of Gemma too ([tokenizers.md](tokenizers.md)). **template**: a published chat template
  renders as transformers renders it.
"""
EMULATED: Final = """\
- *emulated*: the tape's own source gives the logits of torch in the tests' emulator, and has run on no card
  with this family yet.
"""
# Settings of published models that are refused by name, each a layer norm of single query and key heads.
REFUSED: Final = MappingProxyType({"stablelm": "qk_layernorm", "phi2": "qk_layernorm", "command-r": "use_qk_norm"})
_GLM4_9B: Final = {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 4096}
# Published sizes that some kernel does not know, beside tiny models of usual widths.
PUBLISHED: Final = {"glm-4-9b": tiny.TinyModel("Glm4ForCausalLM", None, {**tiny.TINY["glm4"].config, **_GLM4_9B})}


@dataclass(frozen=True, slots=True)
class Sample:
    """A tiny model of a family, as far as its header goes."""

    name: str
    kind: str
    architecture: str | None
    shape: Shape


class _Stated(Checkpoint):
    """A folder of which there is nothing but config.json."""

    format = "safetensors"

    def __init__(self, kind: str, config: Mapping[str, Any]) -> None:
        self.architecture, self.metadata = kind, config
        super().__init__(Path(kind))

    def _open(self) -> None:
        """There are no files."""

    def fingerprint(self) -> str:
        return self.architecture


def samples() -> dict[str, list[Sample]]:
    """The tiny models of every family that has some, by its name."""
    found: dict[str, list[Sample]] = {}
    both: list[tuple[str, tiny.TinyModel | tiny_encoders.TinyEncoder]] = [
        *tiny.TINY.items(),
        *PUBLISHED.items(),
        # How many classes a ranking head has is seen by its tensors alone.
        *((name, model) for name, model in tiny_encoders.ENCODERS.items() if "num_labels" not in model.config),
    ]
    for name, model in both:
        family, shape = read(model.kind, model.config)
        if not shape.recurrent:
            family, shape = read(model.kind, _usual(model.config))
        # A family that shares a class with another goes by its own name in GGUF alone.
        family = next((one for one in FAMILIES if one.name == model.architecture and not one.hf), family)
        found.setdefault(family.name, []).append(Sample(name, model.kind, model.architecture, shape))
    return found


def read(kind: str, config: Mapping[str, Any]) -> tuple[Family, Shape]:
    """The family of a class of transformers and the shape of its configuration, defaults where nothing is given."""
    made = getattr(transformers, kind).config_class(**json.loads(json.dumps(dict(config))))
    stated = _Stated(kind, {**json.loads(made.to_json_string(use_diff=False)), "architectures": [kind]})
    return family_of(stated), read_shape(stated)


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("hidden_size", 64) != 64:
        return dict(config)  # the sizes of a published model
    grown = {key: USUAL.get(key, value) for key, value in config.items()}
    if "text_config" in grown:
        grown["text_config"] = _usual(grown["text_config"])
    rope = grown.get("rope_parameters") or {}
    if "short_factor" in rope:  # one for each pair of a head
        n = 4 * len(rope["short_factor"])
        grown["rope_parameters"] = {**rope, "short_factor": [1.0] * n, "long_factor": [2.0] * n}
    return grown


# The page


def page() -> str:
    """docs/families.md."""
    known, notes = samples(), dict[str, int]()
    rows = ["| family | GGUF | safetensors | " + " | ".join(COLUMNS) + " | tokenizer | template |"]
    rows.append("|" + "---|" * (len(COLUMNS) + 5))
    for family in sorted(FAMILIES, key=lambda family: family.name):
        rows.append("| " + " | ".join(_row(family, known.get(family.name, []), notes)) + " |")
    said = [f"{number}. {reason[0].upper()}{reason[1:]}." for reason, number in notes.items()]
    head = HEAD + EMULATED if any(" emulated " in row for row in rows) else HEAD
    return "\n".join([head, *rows, "", *said, ""])


def _row(family: Family, own: Sequence[Sample], notes: dict[str, int]) -> Iterator[str]:
    yield f"`{family.name}`" if family.name not in REFUSED else f"`{family.name}` {_refused(family.name, notes)}"
    in_gguf = [one.name for one in own if one.architecture is not None]
    compared = any(name not in LEFT_ALONE for name in in_gguf)
    yield ("yes, llama.cpp" if compared else "yes") if in_gguf else ""
    yield "yes" if own else ""
    for machine, mode in COLUMNS.values():
        runs = _runs(own, machine, mode, notes)
        yield "emulated" if (mode, runs) == ("persistent", "yes") and family.name not in PERSISTENT_FAMILIES else runs
    vocabulary, template = TEXTS.get(family.name, ("", ""))
    published = (*NAMES, *SOURCE_NAMES, *WITHOUT_TEXTS)
    yield "ids" if vocabulary in published else "splits" if vocabulary in PRE_TOKENIZERS else vocabulary
    yield "yes" if template else ""


def _refused(family: str, notes: dict[str, int]) -> str:
    """The note that a setting is refused."""
    reason = f"layer norms of single query and key heads (`{REFUSED[family]}`) are not supported: refused by name"
    return f"({notes.setdefault(reason, len(notes) + 1)})"


def _runs(own: Sequence[Sample], machine: Machine, mode: str, notes: dict[str, int]) -> str:
    reasons = [_why_not(one, machine, mode) for one in own]
    lacking = list(dict.fromkeys(reason for reason in reasons if reason is not None))
    if not lacking:
        return "yes" if own else ""
    numbers = ", ".join(f"({notes.setdefault(reason, len(notes) + 1)})" for reason in lacking)
    return f"in part {numbers}" if None in reasons else numbers


def _why_not(one: Sample, machine: Machine, mode: str) -> str | None:
    return why_not(LoadCase(one.shape, _header(one.shape), LoadOptions(), machine))[mode]


def _header(shape: Shape) -> dict[str, TensorInfo]:
    """The tensors that a file of this shape would have, in bfloat16."""
    leaves = leaves_of(family_named(shape.family).blocks(shape, _AnyName()))
    wanted = {name: sizes for leaf in leaves for name, sizes in leaf.wanted}
    return {name: TensorInfo(name, sizes, "BF16", 2 * prod(sizes)) for name, sizes in wanted.items()}


class _AnyName(AnyName):
    def rows(self, name: str) -> int:
        return 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families", description="The table of families.")
    parser.add_argument("--write", action="store_true", help="write docs/families.md")
    if parser.parse_args(arguments).write:
        PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
