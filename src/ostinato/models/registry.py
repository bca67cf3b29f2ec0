"""The table of families, and the way from a checkpoint to its blocks. A new family is one file and one line here."""

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from ostinato.errors import BadFile, UnknownName, Unsupported, first_few
from ostinato.files.checkpoint import Checkpoint
from ostinato.models.arcee import ARCEE
from ostinato.models.bert import BERT, NOMIC_BERT, XLM_ROBERTA
from ostinato.models.blocks import ModelBlocks, leaves_of
from ostinato.models.cohere import COHERE2, COMMAND_R
from ostinato.models.deepseek2 import DEEPSEEK2
from ostinato.models.ernie4_5 import ERNIE4_5
from ostinato.models.ernie4_5_moe import ERNIE4_5_MOE
from ostinato.models.exaone4 import EXAONE4
from ostinato.models.falcon_h1 import FALCON_H1
from ostinato.models.family import FURTHER_ALONE, FURTHER_TOKENS, LEFT_OUT, PROJECTIONS, Family
from ostinato.models.fields import Description, n_further_layers, text_config
from ostinato.models.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA_EMBEDDING
from ostinato.models.gemma4 import GEMMA4
from ostinato.models.glm4 import GLM4
from ostinato.models.glm4_moe import GLM4_MOE
from ostinato.models.gpt2 import GPT2
from ostinato.models.gpt_oss import GPT_OSS
from ostinato.models.gptneox import GPTNEOX
from ostinato.models.granite import GRANITE, GRANITE_MOE
from ostinato.models.granite_hybrid import GRANITE_HYBRID
from ostinato.models.hunyuan import HUNYUAN_DENSE
from ostinato.models.laguna import LAGUNA
from ostinato.models.lfm2 import LFM2, LFM2_MOE
from ostinato.models.llama import LLAMA
from ostinato.models.mamba import MAMBA, MAMBA2
from ostinato.models.mistral3 import MISTRAL3
from ostinato.models.mixtral import MIXTRAL
from ostinato.models.modern_bert import MODERN_BERT
from ostinato.models.muse_glimmer import MUSE_GLIMMER
from ostinato.models.nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from ostinato.models.olmo2 import OLMO2, OLMO3
from ostinato.models.olmoe import OLMOE
from ostinato.models.phi2 import PHI2
from ostinato.models.phi3 import PHI3
from ostinato.models.pooling import pooling_of_decoder, projections_of, rank_tokens_of
from ostinato.models.qwen2 import QWEN2
from ostinato.models.qwen2_moe import QWEN2_MOE
from ostinato.models.qwen3 import QWEN3, QWEN3_MOE, QWEN3_VL, QWEN3_VL_MOE
from ostinato.models.qwen35 import QWEN3_NEXT, QWEN35, QWEN35_MOE
from ostinato.models.seed_oss import SEED_OSS
from ostinato.models.shape import Shape, checked
from ostinato.models.smollm3 import SMOLLM3
from ostinato.models.stablelm import STABLELM
from ostinato.models.starcoder2 import STARCODER2
from ostinato.models.tensors import TensorTable, spelled, starred, stem_of, translate

FAMILIES: Final = (
    LLAMA, QWEN2, QWEN3, QWEN3_MOE, GEMMA, GEMMA2, GEMMA3, PHI3, GPT2, MIXTRAL, MAMBA, MAMBA2, FALCON_H1, BERT,
    MODERN_BERT, GEMMA_EMBEDDING,
    NOMIC_BERT, XLM_ROBERTA, SMOLLM3, GRANITE, QWEN3_VL, QWEN2_MOE, OLMO2, OLMO3, EXAONE4, SEED_OSS, GLM4, ERNIE4_5,
    HUNYUAN_DENSE, ARCEE, STARCODER2, STABLELM, PHI2, GPTNEOX, COMMAND_R, COHERE2, QWEN3_VL_MOE, GLM4_MOE,
    ERNIE4_5_MOE, GRANITE_MOE, OLMOE, MISTRAL3, GPT_OSS, LFM2, QWEN35, NEMOTRON_H, GRANITE_HYBRID, LFM2_MOE,
    QWEN35_MOE, QWEN3_NEXT, NEMOTRON_H_MOE, DEEPSEEK2, MUSE_GLIMMER,
    LAGUNA, GEMMA4,
)  # fmt: skip

BY_GGUF: Final[Mapping[str, Family]] = MappingProxyType({f.name: f for f in FAMILIES if f.in_gguf})
BY_CONFIG: Final[Mapping[str, Family]] = MappingProxyType({name: f for f in FAMILIES for name in f.hf})
BY_TEXT_CONFIG: Final[Mapping[str, Family]] = MappingProxyType({name: f for f in FAMILIES for name in f.text_types})
# How folders of several parts call the tensors of their text part, and how a folder of that part alone calls them.
_TEXT_PART: Final = re.compile(r"(?:model\.language_model|language_model\.model)\.|language_model\.(?=lm_head\.)")

# A model that predicts several tokens for another one, and has no keys and values of its own.
_DRAFTER: Final = re.compile(r"AssistantForCausalLM$|[-_]assistant$")

# How a folder of the inner model alone, without a head, calls its tensors: what comes behind `model.` elsewhere.
_INNER: Final = ("embed_tokens.", "layers.", "norm.")


def family_of(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint's architecture, or of its text part; an unknown one is refused by its header."""
    if _DRAFTER.search(checkpoint.architecture):
        raise Unsupported(
            f"{checkpoint.path}: {checkpoint.architecture!r} drafts tokens for another model, whose keys and values it "
            "reads: it does not run alone; give the model that it was made for"
        )
    text = text_config(checkpoint)
    if text is not None and (found := BY_TEXT_CONFIG.get(str(text.get("model_type")))) is not None:
        return found
    known = BY_GGUF if checkpoint.format == "gguf" else BY_CONFIG
    name = checkpoint.architecture
    if name in known and "vision_config" not in checkpoint.metadata:
        return known[name]
    parts = [] if checkpoint.format == "gguf" else ["known text parts:", _lines(BY_TEXT_CONFIG)]
    first = (
        f"{checkpoint.path}: {_what_is_unknown(checkpoint, text)}; {len(FAMILIES)} families are known "
        "(docs/families.md), and docs/add-a-family.md says how to add one"
    )
    raise UnknownName("\n".join([first, "known architectures:", _lines(known), *parts]))


def _lines(names: Iterable[str]) -> str:
    """Names for a terminal."""
    return textwrap.fill(", ".join(sorted(names)), 100, initial_indent="  ", subsequent_indent="  ")


def _what_is_unknown(checkpoint: Checkpoint, text: Mapping[str, Any] | None) -> str:
    """The architecture, and of its tensors those that no family has a name for."""
    stated = checkpoint.architecture
    what = f"the architecture {stated!r} is not known" if stated else "config.json names no class under architectures"
    if text is not None:
        what += f", nor is its text part {text.get('model_type')!r}"
    in_gguf = checkpoint.format == "gguf"
    named = {stem for f in FAMILIES for stem in (f.names.values() if in_gguf else f.names)}
    alone = map(_alone, checkpoint.tensors)
    strange = sorted({stem_of(name) for name in alone if not {starred(name), stem_of(name)} & named})
    if strange:
        return f"{what}, and no family has tensors called {first_few(strange)}"
    return f"{what}, though known families have all of its tensors"


def family_named(name: str) -> Family:
    """The family that a shape names."""
    return next(family for family in FAMILIES if family.name == name)


def read_shape(checkpoint: Checkpoint) -> Shape:
    """What the model is, from its metadata alone."""
    family = family_of(checkpoint)
    stated = Description.of(checkpoint, family.name, _defaults_of(family, checkpoint))
    read = family.shape_from_gguf if checkpoint.format == "gguf" else family.shape_from_config
    shape = read(stated)
    key = "attention.causal" if checkpoint.format == "gguf" else "is_causal"
    if shape.causal and not stated.flag(key, True):
        raise Unsupported(
            f"{checkpoint.path}: {stated.prefix}{key} is false; a {family.name} whose rows see what follows is not "
            "supported"
        )
    if shape.causal and (tokens := rank_tokens_of(stated, shape.vocab)):
        shape = replace(shape, pooling="rank", rank_by="last", n_classes=1, rank_tokens=tokens)
    if shape.causal and shape.pooling is None:
        pooling, normalise = pooling_of_decoder(stated)
        shape = replace(shape, pooling=pooling, normalise=normalise)
        if pooling is not None and "output.weight" not in tensors_by_our_names(
            family, checkpoint.format, stated.tensors
        ):
            shape = replace(shape, tied_head=True)  # a folder for embeddings need not have a head for words
    if shape.causal and shape.tied_head and _has_own_head(family, checkpoint):
        shape = replace(shape, tied_head=False)
    return checked(replace(shape, projections=projections_of(stated)), stated)


def _defaults_of(family: Family, checkpoint: Checkpoint) -> Mapping[str, Any]:
    text = text_config(checkpoint)
    kind = checkpoint.architecture if text is None else str(text.get("model_type"))
    return {**family.config_defaults, **family.kind_defaults.get(kind, {})}


def _has_own_head(family: Family, checkpoint: Checkpoint) -> bool:
    """Whether a folder that is said to have the embedding as its head has another one beside it, as some that were
    trained further do. Few rows tell: training changes all of them, and reading all would take as long as loading."""
    names = tensors_by_our_names(family, checkpoint.format, checkpoint.tensors)
    if not {"token_embd.weight", "output.weight"} <= names.keys():
        return False
    embedding, head = (checkpoint.tensors[names[name]] for name in ("token_embd.weight", "output.weight"))
    if (embedding.shape, embedding.type) != (head.shape, head.type) or len(head.shape) != 2:
        return True
    rows = {*range(0, head.shape[0], max(1, head.shape[0] // 64)), head.shape[0] - 1}
    return any(
        bytes(checkpoint.raw_rows(embedding.name, row, row + 1)) != bytes(checkpoint.raw_rows(head.name, row, row + 1))
        for row in rows
    )


def table_of(checkpoint: Checkpoint) -> TensorTable:
    """Where each tensor of a checkpoint is, by our names; what its family passes over is left out."""
    family = family_of(checkpoint)
    aside = {name for names in _left_out(checkpoint).values() for name in names}
    names = tensors_by_our_names(family, checkpoint.format, [name for name in checkpoint.tensors if name not in aside])
    if checkpoint.format == "gguf":
        transforms = {**family.gguf_transforms, **family.gguf_shape_transforms(read_shape(checkpoint))}
        return TensorTable(checkpoint, names, transforms)
    transforms = {**family.config_transforms, **family.shape_transforms(read_shape(checkpoint))}
    return TensorTable(checkpoint, names, transforms, partial(spelled, _names_for_messages(family, checkpoint)))


def _names_for_messages(family: Family, checkpoint: Checkpoint) -> dict[str, str]:
    """The family's table with the names of this folder, the nearest first: some families have several for a tensor."""
    alone = {_alone(name): name for name in checkpoint.tensors}
    used = {starred(name) for name in alone} | {stem_of(name) for name in alone}
    parts = {name.partition(".")[0] for name in alone}
    table = sorted(
        {**family.names, **PROJECTIONS}.items(),
        key=lambda one: (one[0] not in used, one[0].partition(".")[0] not in parts),
    )
    # How a folder of several parts, or of the inner model alone, begins the names of its text part.
    inside = [
        (name.removeprefix("model."), own) for name, own in alone.items() if name.startswith("model.") and name != own
    ]
    before = next((own.removesuffix(name) for name, own in inside), "model.")
    return {before + name.removeprefix("model.") if name.startswith("model.") else name: ours for name, ours in table}


def tensors_by_our_names(family: Family, format: str, tensors: Iterable[str]) -> dict[str, str]:
    """The file's names of its tensors by ours."""
    if format == "gguf":
        return translate(tensors, family.gguf_names)
    alone = {_alone(name): name for name in tensors}
    table = {**family.names, **PROJECTIONS}
    return {ours: alone[name] for ours, name in translate(alone, table, family.ignored).items()}


def why_left_out(checkpoint: Checkpoint) -> str | None:
    """A sentence about the parts of a checkpoint that are recognised and do not run; None where all of it runs."""
    parts = _left_out(checkpoint)
    if not parts:
        return None
    n_bytes = sum(checkpoint.tensors[name].n_bytes for names in parts.values() for name in names)
    n_tensors = sum(map(len, parts.values()))
    what_runs = "only the text part runs; " if parts.keys() & LEFT_OUT.keys() else ""
    return (
        f"{checkpoint.path}: {what_runs}{n_tensors} tensors for {' and '.join(parts)} "
        f"({n_bytes / 1e9:.2f} GB) are not loaded"
    )


def _left_out(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """The tensors that no backend loads, by what they are for."""
    patterns = {} if text_config(checkpoint) is None else LEFT_OUT
    found = {what: [name for name in checkpoint.tensors if p.fullmatch(name)] for what, p in patterns.items()}
    found["multi-token prediction"] = _of_further_tokens(checkpoint)
    return {what: names for what, names in found.items() if names}


def _of_further_tokens(checkpoint: Checkpoint) -> list[str]:
    """The tensors of layers that predict tokens after the next one: by their name, or by their layer's number."""
    found = [name for name in checkpoint.tensors if FURTHER_TOKENS.fullmatch(name)]
    n_further = n_further_layers(Description.of(checkpoint, ""))
    if not n_further:
        return found
    n_own, by_layer = read_shape(checkpoint).n_layers, _by_layer(checkpoint)
    for layer, names in sorted(by_layer.items()):
        if not n_own <= layer < n_own + n_further:
            continue  # `TensorTable.check` refuses what no block takes
        if not any(map(FURTHER_ALONE.search, names)):
            raise BadFile(
                f"{checkpoint.path}: it counts {n_own} layers, and {n_further} after them for multi-token prediction, "
                f"but layer {layer} has none of the tensors that only such a layer has; one of the counts is wrong"
            )
        found += names
    return found


def _by_layer(checkpoint: Checkpoint) -> dict[int, list[str]]:
    """The tensors of each numbered layer."""
    at = re.compile(r"blk\.(\d+)\." if checkpoint.format == "gguf" else r"model\.layers\.(\d+)\.")
    found: dict[int, list[str]] = {}
    for name in checkpoint.tensors:
        if (numbered := at.match(_alone(name))) is not None:
            found.setdefault(int(numbered[1]), []).append(name)
    return found


def _alone(name: str) -> str:
    """A tensor of the text part as a folder of that part alone would call it."""
    if name.startswith(_INNER):
        return f"model.{name}"
    found = _TEXT_PART.match(name)
    if found is None:
        return name
    return name[found.end() :] if found.group() == "language_model." else f"model.{name[found.end() :]}"


def describe(checkpoint: Checkpoint, shape: Shape) -> tuple[ModelBlocks, TensorTable]:
    """The blocks of a model over references, and the table that says where each tensor is. A file that lacks one, or
    holds one too many, is refused; nothing is read."""
    table = table_of(checkpoint)
    blocks = family_of(checkpoint).blocks(shape, table)
    table.check(leaves_of(blocks), blocks.spare)
    return blocks, table
