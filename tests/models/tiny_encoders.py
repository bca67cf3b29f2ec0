"""Tiny random encoders, as transformers builds them, and as files of both formats; the companion of `tiny.py`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import tiny_gguf, tiny_weights, tiny_wordpiece

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

Form = Literal["gguf", "current", "original"]
_BASE: Final[Mapping[str, Any]] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_MINILM: Final[Mapping[str, Any]] = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
_ROBERTA: Final[Mapping[str, Any]] = {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 130}
_MODERN: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 4,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "tie_word_embeddings": False,
    **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "cls", "sep", "eos"))},
}
_GEMMA: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "use_bidirectional_attention": True,
}
TEXTS: Final = (
    "The people said that it was time.",
    "who was there when we were all up?",
    "Naïve words, unlike others; 12 of them!",
    "a",
)
PAIR: Final = ("what is it about?", "it is about the time when people were many")


@dataclass(frozen=True, slots=True)
class TinyEncoder:
    """What one tiny encoder is made of; `pooling` is what the folder of a sentence-transformers model says."""

    kind: str
    architecture: str | None
    config: Mapping[str, Any]
    pooling: str | None = None


def _made(kind: str, architecture: str | None, pooling: str | None = None, **config: Any) -> TinyEncoder:
    return TinyEncoder(kind, architecture, {**_BASE, **config}, pooling)


ENCODERS: Final[Mapping[str, TinyEncoder]] = MappingProxyType(
    {
        "bert": _made("BertModel", "bert"),
        "bert-cls": _made("BertModel", "bert", "cls"),
        "bert-last": _made("BertModel", "bert", "last", hidden_act="gelu_new"),
        "bert-masked": _made("BertForMaskedLM", "bert"),
        "bert-rank": _made("BertForSequenceClassification", "bert", num_labels=1),
        "bert-classes": _made("BertForSequenceClassification", "bert", num_labels=3),
        "minilm": _made("BertModel", None, **_MINILM),
        "xlm-roberta": _made("XLMRobertaModel", "bert", "cls", **_ROBERTA),
        "xlm-roberta-rank": _made("XLMRobertaForSequenceClassification", "bert", num_labels=1, **_ROBERTA),
        "modern-bert": _made("ModernBertModel", "modern-bert", "cls", **_MODERN),
        "modern-bert-silu": _made("ModernBertForMaskedLM", "modern-bert", **_MODERN, hidden_activation="silu"),
        "modern-bert-rank": _made(
            "ModernBertForSequenceClassification", "modern-bert", **_MODERN, num_labels=1, classifier_pooling="mean"
        ),
        "gemma-embedding": _made("Gemma3TextModel", "gemma-embedding", "mean", **_GEMMA),
        "nomic-bert": _made("NomicBertModel", "nomic-bert", "mean"),
        "nomic-bert-rank": _made("NomicBertForSequenceClassification", None, num_labels=2),
    }
)
RANKERS: Final = ("bert-rank", "bert-classes", "xlm-roberta-rank", "modern-bert-rank", "nomic-bert-rank")
DENSE: Final = (96, 64)  # what embeddinggemma's pooled rows go through
# The tanh form of GELU cannot be said in a GGUF file, where bert's is the exact one.
CASES: Final = [
    (name, form)
    for name, encoder in ENCODERS.items()
    for form in ("gguf", "current", "original")
    if name != "minilm"
    and (form != "original" or not name.startswith(("xlm", "gemma")))
    and (form != "gguf" or (encoder.architecture is not None and name != "bert-last"))
]


@cache
def build(name: str) -> Any:
    """The reference, in float32. Not to be changed."""
    kind = getattr(transformers, ENCODERS[name].kind)
    model = kind(kind.config_class(**dict(ENCODERS[name].config), attn_implementation="eager")).eval()
    tiny_weights.fill(model, name, "F32")
    return model


def written(name: str, form: str, tmp: Path) -> Path:
    """The encoder on disk, written once."""
    if form == "gguf":
        return gguf(name, tmp)
    return folder(name, tmp, original=form == "original")


def folder(name: str, tmp: Path, *, original: bool = False) -> Path:
    """A safetensors folder: as transformers writes it, or under the names of the first files."""
    path = tmp / f"{name}-{'original' if original else 'current'}"
    if path.exists():
        return path
    build(name).save_pretrained(path)
    tiny_wordpiece.write_files(path)
    if (pooling := ENCODERS[name].pooling) is not None:
        write_pooling(path, pooling)
    if name == "gemma-embedding":
        _write_dense(path)
    if original:
        _make_original(path)
    return path


def write_pooling(path: Path, pooling: str) -> None:
    """As sentence-transformers keeps it beside the model."""
    (path / "1_Pooling").mkdir(exist_ok=True)
    words = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
    modes = {f"pooling_mode_{word}": kind == pooling for kind, word in words.items()}
    stated = {"word_embedding_dimension": 64, **modes, "include_prompt": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{k}" if i else "", "type": f"sentence_transformers.models.{k}"}
        for i, k in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))


@cache
def dense() -> tuple[Tensor, ...]:
    """The products behind the pooling of embeddinggemma, each [out, in]."""
    widths, random = (64, *DENSE), torch.Generator().manual_seed(5)
    return tuple(torch.randn(out, width, generator=random) / width**0.5 for width, out in pairwise(widths))


def _write_dense(path: Path) -> None:
    modules = json.loads((path / "modules.json").read_text())
    added = [
        {"idx": n, "name": str(n), "path": f"{n}_Dense", "type": "sentence_transformers.models.Dense"} for n in (2, 3)
    ]
    (path / "modules.json").write_text(
        json.dumps([*modules[:2], *added, {**modules[2], "idx": 4, "path": "4_Normalize"}])
    )
    for number, weight in enumerate(dense(), 2):
        (path / f"{number}_Dense").mkdir()
        stated: dict[str, Any] = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
        stated["activation_function"] = "torch.nn.modules.linear.Identity"
        (path / f"{number}_Dense" / "config.json").write_text(json.dumps(stated))
        save_file({"linear.weight": weight}, path / f"{number}_Dense" / "model.safetensors")


def _make_original(path: Path) -> None:
    """bert with gamma and beta and its positions counted out; nomic-bert with the keys of its authors."""
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    if config["model_type"] == "modernbert":
        bases = {kind: config["rope_parameters"][f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")}
        config |= {"global_rope_theta": bases["full"], "local_rope_theta": bases["sliding"]}
        config |= {"global_attn_every_n_layers": 3}
        config = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    elif config["model_type"] == "bert":
        tensors = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in tensors.items()}
        tensors = {name.replace("LayerNorm.bias", "LayerNorm.beta"): value for name, value in tensors.items()}
        prefix = "" if "embeddings.word_embeddings.weight" in tensors else "bert."
        tensors[f"{prefix}embeddings.position_ids"] = torch.arange(128)[None]
    else:
        config = _nomic_config(config)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _nomic_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": config["architectures"],
        "model_type": "nomic_bert",
        "activation_function": "swiglu",
        "causal": False,
        "layer_norm_epsilon": config["layer_norm_eps"],
        "max_trained_positions": 128,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "n_positions": 512,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "type_vocab_size": 2,
        "use_rms_norm": False,
        "vocab_size": config["vocab_size"],
    }


def gguf(name: str, tmp: Path, **options: Any) -> Path:
    """A GGUF file."""
    encoder = ENCODERS[name]
    assert encoder.architecture is not None
    path = tmp / f"{name}.gguf"
    if not path.exists():
        source = folder(name, tmp)
        config = json.loads((source / "config.json").read_text())
        config["pooling"] = "rank" if name in RANKERS else encoder.pooling
        tensors = load_file(source / "model.safetensors")
        if name == "gemma-embedding":
            tensors |= {f"dense_{number}.weight": weight for number, weight in enumerate(dense(), 2)}
        add = partial(tiny_wordpiece.add_to, n_types=config.get("type_vocab_size", 2))
        tiny_gguf.write(path, encoder.architecture, config, tensors, vocabulary=add, **options)
    return path


def ids_of(text: str) -> list[int]:
    """The text as an encoder takes it, with its first and last token."""
    ids: list[int] = tiny_wordpiece.tokenizer().encode(text).ids
    return ids


def pair(name: str = "bert") -> tuple[list[int], list[int]]:
    """Two texts as one: the ids, and which of the two each is of, for a model that tells them apart."""
    found = tiny_wordpiece.tokenizer().encode(*PAIR)
    n_types = ENCODERS[name].config.get("type_vocab_size", 1 if name.startswith("modern") else 2)
    return found.ids, [min(kind, n_types - 1) for kind in found.type_ids]


def rows(name: str, ids: list[int], types: list[int] | None = None) -> Tensor:
    """transformers' last hidden rows [len(ids), hidden], float32."""
    model = build(name)
    body = getattr(model, model.base_model_prefix, model)
    with torch.inference_mode():
        found: Tensor = body(torch.tensor([ids]), **_kinds(name, types), **_places(name, ids)).last_hidden_state[0]
    return found


def scores(name: str, ids: list[int], types: list[int]) -> Tensor:
    """transformers' scores [n_classes] of a ranking model."""
    with torch.inference_mode():
        found = build(name)(torch.tensor([ids]), **_kinds(name, types), **_places(name, ids))
    logits: Tensor = found.logits[0]
    return logits


def _kinds(name: str, types: list[int] | None) -> dict[str, Tensor]:
    one_kind = types is None or name.startswith(("modern", "gemma"))
    return {} if one_kind else {"token_type_ids": torch.tensor([types])}


def _places(name: str, ids: list[int]) -> dict[str, Tensor]:
    """Positions, where transformers would count an unknown word as padding, whose id it has in these tests."""
    return {"position_ids": torch.arange(len(ids))[None] + 2} if name.startswith("xlm") else {}


def vector(name: str, ids: list[int]) -> Tensor:
    """The embedding [hidden] of one text: pooled as the model says (mean where it does not), of length 1."""
    found = rows(name, ids)
    pooled = {"cls": found[0], "last": found[-1]}.get(ENCODERS[name].pooling or "mean", found.mean(0))
    for weight in dense() if name == "gemma-embedding" else ():
        pooled = weight @ pooled
    return torch.nn.functional.normalize(pooled, dim=0)
