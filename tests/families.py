"""The table of families, docs/families.md: what the tests show of each, and which loops run it.

python -m tests.families --write    write docs/families.md

Rows come from the registry, formats from the tiny models that are compared with transformers and llama.cpp, and loops
from what the backends say of a header: no weights are made.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ostinato.backends.machine import Machine
from ostinato.engine.choose import LoadCase, why_not
from ostinato.engine.known_cards import NOT_RUN, PERSISTENT_KINDS, kind_of_kernel
from ostinato.files.checkpoint import TensorInfo
from ostinato.lab.random_weights import AnyName
from ostinato.models.blocks import leaves_of
from ostinato.models.family import Family
from ostinato.models.registry import FAMILIES, family_named
from ostinato.models.shape import Shape
from ostinato.options import LoadOptions
from tests.models import tiny, tiny_encoders
from tests.models.llama_cpp import LEFT_ALONE
from tests.models.stated import read_tiny

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
CPU, GPU = Machine("cpu", 1 << 40, 1 << 40), Machine("cuda:0", 1 << 40, 1 << 40, driver_cuda=13_000)
COLUMNS: Final = {"CPU loop": (CPU, "loop"), "CUDA loop": (GPU, "loop"), "tape": (GPU, "persistent")}
# Of a family's published models, what is compared: ids of their vocabulary, the splits of a pre-tokenizer, or another
# vocabulary of their kind; its name; and a template's.
TEXTS: Final[Mapping[str, tuple[str, str, str]]] = MappingProxyType(
    {
        "llama": ("ids", "llama-bpe", "meta-llama-Llama-3.1-8B-Instruct"),
        "mixtral": ("kind", "llama-spm", ""),
        "qwen2": ("ids", "qwen2", "Qwen-Qwen2.5-7B-Instruct"),
        "qwen2moe": ("ids", "qwen2", "Qwen-Qwen2.5-7B-Instruct"),
        "qwen3": ("ids", "qwen2", "Qwen-Qwen3-0.6B"),
        "qwen3moe": ("ids", "qwen2", "Qwen-Qwen3-0.6B"),
        "qwen3vl": ("ids", "qwen2", "Qwen-Qwen3-0.6B"),
        "qwen3vlmoe": ("ids", "qwen2", "Qwen-Qwen3-0.6B"),
        "qwen3next": ("ids", "qwen2", "Qwen-Qwen3-0.6B"),
        "qwen35": ("ids", "qwen35", "Qwen3.5-4B"),
        "qwen35moe": ("ids", "qwen35", "Qwen3.5-4B"),
        "gemma": ("kind", "llama-spm", ""),
        "gemma-embedding": ("kind", "llama-spm", ""),
        "gemma2": ("kind", "llama-spm", "google-gemma-2-2b-it"),
        "gemma3": ("kind", "llama-spm", "google-gemma-2-2b-it"),
        "ernie4_5": ("kind", "llama-spm", ""),
        "ernie4_5-moe": ("kind", "llama-spm", ""),
        "gptneox": ("ids", "gpt-neox", ""),
        "mamba": ("ids", "gpt-neox", ""),
        "mamba2": ("ids", "gpt-neox", ""),
        "nomic-bert": ("ids", "bert-bge", ""),  # BERT's, uncased
        "xlm-roberta": ("ids", "nomic-bert-moe", ""),
        "gemma4": ("ids", "gemma-4", "google-gemma-4-31B-it"),
        "phi2": ("splits", "phi-2", ""),
        "phi3": ("ids", "phi-3", "microsoft-Phi-3.5-mini-instruct"),
        "gpt2": ("ids", "gpt-2", ""),
        "bert": ("ids", "bert-bge", ""),
        "falcon-h1": ("splits", "falcon-h1", ""),
        "smollm3": ("splits", "smaug-bpe", "HuggingFaceTB-SmolLM3-3B"),
        "granite": ("splits", "refact", "ibm-granite-granite-3.3-2B-Instruct"),
        "granitemoe": ("splits", "refact", "ibm-granite-granite-3.3-2B-Instruct"),
        "granitehybrid": ("splits", "dbrx", "ibm-granite-granite-4.0"),
        "olmo2": ("splits", "dbrx", ""),
        "olmo3": ("splits", "dbrx", ""),
        "olmoe": ("splits", "olmo", ""),
        "exaone4": ("splits", "exaone4", ""),
        "seed_oss": ("splits", "seed-coder", "ByteDance-Seed-OSS"),
        "glm4": ("splits", "glm4", ""),
        "glm4moe": ("splits", "glm4", "GLM-4.6"),
        "deepseek2": ("splits", "deepseek-v3", "deepseek-ai-DeepSeek-V3.1"),
        "hunyuan-dense": ("splits", "hunyuan-dense", ""),
        "arcee": ("splits", "llama-bpe", ""),
        "starcoder2": ("ids", "starcoder", ""),
        "stablelm": ("splits", "stablelm2", ""),
        "command-r": ("ids", "command-r", "CohereForAI-c4ai-command-r-plus-tool_use"),
        "cohere2": ("ids", "command-r", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
        "mistral3": ("splits", "tekken", "mistralai-Ministral-3-14B-Reasoning-2512"),
        "gpt-oss": ("splits", "gpt-4o", "openai-gpt-oss-120b"),
        "lfm2": ("splits", "lfm2", "LFM2.5-Instruct"),
        "lfm2moe": ("splits", "lfm2", "LFM2-8B-A1B"),
        "nemotron_h": ("splits", "tekken", "NVIDIA-Nemotron-Nano-v2"),
        "nemotron_h_moe": ("splits", "tekken", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        "laguna": ("splits", "laguna", "poolside-Laguna-XS-2.1"),
        "muse-glimmer": ("splits", "llama4", "muse-glimmer"),
        "modern-bert": ("splits", "modern-bert", ""),
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
  loop and the [tape](tape.md) are shown on a GPU by `make test-gpu`. On an H200 66 small models of all
  families with a *yes* ran in two types on 2026-11-20, with equal bits in `eager`, `graph` and `loop`, latent
  attention and recurrent layers among them; and 41 models ran on the tape, granite, smollm3, mistral3, glm4
  (GLM-4 9B's sizes too), gemma, gemma2 and gemma3 among them ([note](lab/gpu-whole.md)).
- **tokenizer**: *ids* of the published vocabulary are compared; *splits*: the pre-tokenizer of that name is
  compared over a synthetic vocabulary; *kind*: SentencePiece-style, compared over Llama 2's vocabulary, with
  the blanks and tags of Gemma too ([tokenizers.md](tokenizers.md)). **template**: a published chat template
  renders as transformers renders it.
"""
COMPILED: Final = """\
- *compiled*: the kernels are those of other families, compiled for every chip ([cards.md](cards.md)), and
  this family has not run in `loop` on a card yet. `serve` compares it with the reference before its port
  opens.
"""
EMULATED: Final = """\
- *emulated*: the tape's own source gives the logits of torch in the tests' emulator, and has run on no card
  with such models yet. `auto` takes it once `ostinato verify --mode persistent MODEL` has passed.
"""
# Settings of published models that are refused by name, each a layer norm of single query and key heads.
REFUSED: Final = MappingProxyType({"stablelm": "qk_layernorm", "phi2": "qk_layernorm", "command-r": "use_qk_norm"})
# Published sizes whose heads are not those of tiny models of usual widths.
_GLM4_9B: Final = {
    **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
    **{"hidden_size": 4096, "intermediate_size": 13_696},
}
PUBLISHED: Final = {"glm-4-9b": tiny.TinyModel("Glm4ForCausalLM", None, {**tiny.TINY["glm4"].config, **_GLM4_9B})}


@dataclass(frozen=True, slots=True)
class Sample:
    """A tiny model of a family, as far as its header goes."""

    name: str
    kind: str
    architecture: str | None
    shape: Shape


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
        family, shape = read_tiny(model)
        found.setdefault(family.name, []).append(Sample(name, model.kind, model.architecture, shape))
    return found


# The page


def page() -> str:
    """docs/families.md."""
    known, notes = samples(), dict[str, int]()
    rows = ["| family | GGUF | safetensors | " + " | ".join(COLUMNS) + " | tokenizer | template |"]
    rows.append("|" + "---|" * (len(COLUMNS) + 5))
    for family in sorted(FAMILIES, key=lambda family: family.name):
        rows.append("| " + " | ".join(_row(family, known.get(family.name, []), notes)) + " |")
    said = [f"{number}. {reason[0].upper()}{reason[1:]}." for reason, number in notes.items()]
    table = "".join((*rows, *notes))
    head = [HEAD, COMPILED if "compiled" in table else "", EMULATED if "emulated" in table else ""]
    return "\n".join(["".join(head), *rows, "", *said, ""])


def _row(family: Family, own: Sequence[Sample], notes: dict[str, int]) -> Iterator[str]:
    yield f"`{family.name}`" if family.name not in REFUSED else f"`{family.name}` {_refused(family.name, notes)}"
    in_gguf = [one.name for one in own if one.architecture is not None]
    compared = any(name not in LEFT_ALONE for name in in_gguf)
    yield ("yes, llama.cpp" if compared else "yes") if in_gguf else ""
    yield "yes" if own else ""
    for machine, mode in COLUMNS.values():
        runs = _runs(own, machine, mode, notes)
        if runs == "yes" and machine is GPU:
            runs = _emulated(own, notes) if mode == "persistent" else "compiled" if family.name in NOT_RUN else runs
        yield runs
    how, _, template = TEXTS[family.name]
    yield how
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


def _emulated(own: Sequence[Sample], notes: dict[str, int]) -> str:
    """What the table says of models that the tape runs: which kinds of kernel have run on no card."""
    kinds = dict.fromkeys(kind_of_kernel(one.shape, "bf16") for one in own)
    lacking = [kind for kind in kinds if kind not in PERSISTENT_KINDS]
    if len(lacking) in (0, len(kinds)):
        return "emulated" if lacking else "yes"
    return f"yes ({notes.setdefault('emulated only: ' + ', '.join(lacking), len(notes) + 1)})"


def why_no_loop(one: Sample) -> str | None:
    """Why the CUDA loop does not run it."""
    return _why_not(one, GPU, "loop")


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
