"""The table of families, and the way from a checkpoint to its blocks. A new family is one file and one line here."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from ostinato.errors import UnknownName, Unsupported
from ostinato.files.checkpoint import Checkpoint
from ostinato.models.bert import BERT, NOMIC_BERT
from ostinato.models.blocks import ModelBlocks, leaves_of
from ostinato.models.falcon_h1 import FALCON_H1
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.gemma import GEMMA2, GEMMA3
from ostinato.models.gpt2 import GPT2
from ostinato.models.llama import LLAMA
from ostinato.models.mamba import MAMBA, MAMBA2
from ostinato.models.mixtral import MIXTRAL
from ostinato.models.phi3 import PHI3
from ostinato.models.qwen2 import QWEN2
from ostinato.models.qwen3 import QWEN3, QWEN3_MOE
from ostinato.models.shape import Shape, checked
from ostinato.models.tensors import TensorTable, spelled, translate

FAMILIES: Final = (
    LLAMA, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, PHI3, GPT2, MIXTRAL, MAMBA, MAMBA2, FALCON_H1, BERT, NOMIC_BERT,
)  # fmt: skip

BY_GGUF: Final[Mapping[str, Family]] = MappingProxyType({f.name: f for f in FAMILIES if f.in_gguf})
BY_CONFIG: Final[Mapping[str, Family]] = MappingProxyType({name: f for f in FAMILIES for name in f.hf})


def family_of(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint's architecture; an unknown one is refused with the list of known ones."""
    known = BY_GGUF if checkpoint.format == "gguf" else BY_CONFIG
    name = checkpoint.architecture
    if name.endswith("ForConditionalGeneration") or "vision_config" in checkpoint.metadata or name == "clip":
        raise Unsupported(f"{checkpoint.path}: {name} takes images; vision models are not supported")
    if name not in known:
        raise UnknownName(
            f"{checkpoint.path}: the architecture {name!r} is not known; known are {', '.join(sorted(known))} "
            "(the README lists the families; docs/add-a-family.md says how to add one)"
        )
    return known[name]


def family_named(name: str) -> Family:
    """The family that a shape names."""
    return next(family for family in FAMILIES if family.name == name)


def read_shape(checkpoint: Checkpoint) -> Shape:
    """What the model is, from its metadata alone."""
    family = family_of(checkpoint)
    stated = Description.of(checkpoint, family.name)
    read = family.shape_from_gguf if checkpoint.format == "gguf" else family.shape_from_config
    return checked(read(stated), stated)


def table_of(checkpoint: Checkpoint) -> TensorTable:
    """Where each tensor of a checkpoint is, by our names; what its family passes over is left out."""
    family = family_of(checkpoint)
    if checkpoint.format == "gguf":
        return TensorTable(checkpoint, translate(checkpoint.tensors, family.gguf_names), family.gguf_transforms)
    names = translate(checkpoint.tensors, family.names, family.ignored)
    return TensorTable(checkpoint, names, family.config_transforms, partial(spelled, family.names))


def describe(checkpoint: Checkpoint, shape: Shape) -> tuple[ModelBlocks, TensorTable]:
    """The blocks of a model over references, and the table that says where each tensor is. A file that lacks one, or
    holds one too many, is refused; nothing is read."""
    table = table_of(checkpoint)
    blocks = family_of(checkpoint).blocks(shape, table)
    table.check(leaves_of(blocks), blocks.spare)
    return blocks, table
