"""The table of families, and the way from a checkpoint to a model. A new family is one file and one line here."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

import torch

from ostinato.backends.allocate import Allocate, BumpAllocator, Measure, empty
from ostinato.backends.torch.table import ops_for
from ostinato.errors import UnknownName, Unsupported, listing
from ostinato.files.checkpoint import Checkpoint
from ostinato.models.bert import BERT, NOMIC_BERT
from ostinato.models.blocks import Model
from ostinato.models.builder import Builder
from ostinato.models.falcon_h1 import FALCON_H1
from ostinato.models.family import Family
from ostinato.models.gemma import GEMMA2, GEMMA3
from ostinato.models.gpt2 import GPT2
from ostinato.models.llama import LLAMA
from ostinato.models.mamba import MAMBA, MAMBA2
from ostinato.models.mixtral import MIXTRAL
from ostinato.models.phi3 import PHI3
from ostinato.models.qwen2 import QWEN2
from ostinato.models.qwen3 import QWEN3, QWEN3_MOE
from ostinato.models.rebuilt import without_matrices_on
from ostinato.models.shape import Shape
from ostinato.models.weights import Progress, Weights, spelled, translate
from ostinato.options import Activations

FAMILIES: Final = (
    LLAMA, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, PHI3, GPT2, MIXTRAL, MAMBA, MAMBA2, FALCON_H1, BERT, NOMIC_BERT,
)  # fmt: skip

BY_GGUF: Final[Mapping[str, Family]] = MappingProxyType({f.gguf: f for f in FAMILIES if f.gguf is not None})
BY_CONFIG: Final[Mapping[str, Family]] = MappingProxyType({name: f for f in FAMILIES for name in f.hf})


def family_of(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint's architecture; an unknown one is refused with the list of known ones."""
    known = BY_GGUF if checkpoint.format == "gguf" else BY_CONFIG
    name = checkpoint.architecture
    if name.endswith("ForConditionalGeneration") or "vision_config" in checkpoint.metadata or name == "clip":
        raise Unsupported(f"{checkpoint.path}: {name} takes images; vision models are not supported")
    if checkpoint.metadata.get("general.type") == "adapter":
        raise Unsupported(f"{checkpoint.path}: this is an adapter, not a model; LoRA adapters are not supported")
    if name not in known:
        raise UnknownName(f"{checkpoint.path}: the architecture {name!r} is not known; known: {listing(name, known)}")
    return known[name]


def read_shape(checkpoint: Checkpoint) -> Shape:
    """What the model is, from its metadata alone."""
    family = family_of(checkpoint)
    read = family.shape_from_gguf if checkpoint.format == "gguf" else family.shape_from_config
    assert read is not None  # the tables above hold only families that can
    return read(checkpoint)


def build_model(
    checkpoint: Checkpoint,
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    progress: Progress | None = None,
    packed: bool = False,
    tiles: Activations | None = None,
    on_host: bool = False,
) -> Model:
    """The model with its weights on `device` in `dtype`, for an engine of that context.

    `packed`: matrices stay in the file's own type where kernels multiply it. `tiles`: they are packed into the tiles
    of the CPU's native loop, to be multiplied with such activations. `on_host`: matrices stay in the host's memory,
    for whoever takes one at a time to the device; the embedding and vectors are there.
    """
    family = family_of(checkpoint)
    from_gguf = checkpoint.format == "gguf"
    transforms = family.gguf_transforms if from_gguf else family.config_transforms
    spell: Callable[[str], str] = str if from_gguf else partial(spelled, family.names)
    if from_gguf:
        names = translate(checkpoint.tensors, family.gguf_names)
    else:
        names = translate(checkpoint.tensors, family.names, family.ignored)

    def built(there: torch.device, allocate: Allocate) -> tuple[Weights, Model]:
        weights = Weights(
            checkpoint, names, dtype, there, transforms, spell, packed=packed, tiles=tiles, allocate=allocate
        )
        return weights, family.build(Builder(shape, weights, ops_for(device), context), family.layer)

    if tiles is not None:  # which lie in runs of their own (`backends/native/streamed.py`)
        weights, model = built(device, empty)
    else:
        # Twice: once to see what it takes, without memory, then in one piece of just that size (E-16).
        measure = Measure()
        built(torch.device("meta"), measure)
        place = torch.device("cpu") if on_host else device
        weights, model = built(place, BumpAllocator(measure.n_bytes, place))
    weights.fill(progress)
    return without_matrices_on(model, device) if on_host else model
