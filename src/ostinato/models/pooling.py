"""How a file says that the rows of a text become one vector: by `pooling_type` in GGUF, by the files that
sentence-transformers keeps beside the model in a folder. What it would do and Ostinato does not is refused here, before
weights are read. The pooling itself is in `decoder/pooling.py`.
"""

import re
from collections.abc import Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final

from ostinato.errors import BadFile, Unsupported
from ostinato.files.json_file import read_json_if_there, read_json_object
from ostinato.files.modules import MODULES_FILE, TextModule, config_of, modules_of
from ostinato.models.fields import Description, Fields

GGUF_POOLING = ("none", "mean", "cls", "last", "rank")
FOLDER_POOLING = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
_MAX_TOKENIZER_BYTES: Final = 1 << 28  # as in `text/folder.py`
_ELSEWHERE: Final = "sentence-transformers runs this model"
_KNOWN: Final = ("Transformer", "Pooling", "Dense", "Normalize")
_ORDER: Final = re.compile(r"(Transformer( Pooling( Dense)*( Normalize)?)?)?")
# What a Dense or a Normalize module may state, and must not state otherwise: it takes a text's vector and gives it.
_OF_VECTORS: Final[Mapping[str, tuple[Any, ...]]] = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": (None, "sentence_embedding"),
    "use_residual": (False,),
}


def pooling_of_gguf(f: Fields, *, ranks: bool) -> str:
    """What `pooling_type` says; without it, rank where there is a head for it, else mean."""
    kind = f.integer("pooling_type", GGUF_POOLING.index("rank" if ranks else "mean"), least=0)
    if kind >= len(GGUF_POOLING):
        raise BadFile(f"{f.path}: {f.prefix}pooling_type is {kind}; known: 0 to {len(GGUF_POOLING) - 1}")
    if GGUF_POOLING[kind] == "rank" and not ranks:
        raise BadFile(f"{f.path}: {f.prefix}pooling_type is rank, and there is no cls.output.weight to rank with")
    return GGUF_POOLING[kind]


def pooling_of_decoder(c: Description) -> tuple[str | None, bool]:
    """How a decoder that was trained for embeddings makes one vector of a text, and whether its files say that this has
    length 1; None for one that was not."""
    if c.checkpoint.format == "gguf":
        stated = c.has("pooling_type")
        return (pooling_of_gguf(c, ranks="cls.output.weight" in c.tensors), True) if stated else (None, False)
    return pooling_of_folder(c.path) if (c.path / "modules.json").exists() else (None, False)


def pooling_of_folder(folder: Path) -> tuple[str, bool]:
    """How a sentence-transformers folder makes one vector of a text, and whether that has length 1."""
    modules = modules_of(folder)
    _check_modules(folder, modules)
    _check_case(folder)
    kinds, path = [one.kind for one in modules], config_of(folder, "Pooling")
    normalise = "Normalize" in kinds or not kinds
    if not path.exists():
        if "Pooling" in kinds:
            raise BadFile(f"{path} is missing, and {MODULES_FILE} names its module; the model's folder is incomplete")
        return "mean", normalise
    stated = read_json_object(path)
    if isinstance(stated.get("pooling_mode"), str):
        chosen = [stated["pooling_mode"].replace("lasttoken", "last")]
    else:
        chosen = [key.removeprefix("pooling_mode_") for key, on in stated.items() if key[:13] == "pooling_mode_" and on]
        chosen = [FOLDER_POOLING.get(name, name) for name in chosen]
    if len(chosen) != 1 or chosen[0] not in FOLDER_POOLING.values():
        raise Unsupported(f"{folder}: pooling by {chosen or 'nothing'} is not supported; known: cls, last, mean")
    return chosen[0], normalise


def rank_tokens_of(c: Description, n_tokens: int) -> tuple[int, ...]:
    """The tokens whose logits a folder scores a pair by, `yes` and `no` or `yes` alone; none where it does not."""
    kinds = [] if c.checkpoint.format == "gguf" else [one.kind for one in modules_of(c.path)]
    if "LogitScore" not in kinds:
        return ()
    if kinds != ["Transformer", "LogitScore"]:
        raise Unsupported(f"{c.path}: modules.json has {', '.join(kinds)}; LogitScore behind the model alone is known")
    _check_case(c.path)
    path = config_of(c.path, "LogitScore")
    stated = read_json_if_there(path)
    found: list[Any] = [stated.get("true_token_id"), stated.get("false_token_id")]
    tokens = found if found[1] is not None else found[:1]
    if not all(type(token) is int and 0 <= token < n_tokens for token in tokens):
        raise BadFile(f"{path}: true_token_id, false_token_id are {found}; they must be ids from 0 to {n_tokens - 1}")
    return tuple(tokens)


def projections_of(c: Description) -> tuple[int, ...]:
    """The widths of the products behind the pooling, which neither format states but by its tensors."""
    name = "dense_{}.weight" if c.checkpoint.format == "gguf" else "dense.{}.linear.weight"
    found = takewhile(c.tensors.__contains__, map(name.format, count(2)))
    return tuple(c.tensors[name].shape[0] for name in found)


def _check_modules(folder: Path, modules: tuple[TextModule, ...]) -> None:
    """The model, then a pooling, then products, then a norm: other modules and other orders are refused."""
    path, kinds = folder / MODULES_FILE, [one.kind for one in modules]
    if unknown := sorted(set(kinds) - set(_KNOWN)):
        raise Unsupported(f"{path}: modules of the kind {', '.join(unknown)} are not supported; {_ELSEWHERE}")
    if not _ORDER.fullmatch(" ".join(kinds)):
        raise Unsupported(
            f"{path}: the modules run as {', '.join(kinds)}; supported are Transformer, Pooling, any number of Dense, "
            f"Normalize, in this order; {_ELSEWHERE}"
        )
    if modules and modules[0].path:
        raise Unsupported(
            f"{path}: the Transformer lies in {modules[0].path}; only a model beside {MODULES_FILE} is read: move its "
            f'files there and state "path": ""'
        )
    for module in modules:
        if module.kind == "Dense":
            _check_dense(folder / module.path)
        if module.kind in ("Dense", "Normalize"):
            _check_vectors(folder / module.path / "config.json", module.kind)


def _check_dense(folder: Path) -> None:
    """A product alone is known: what transforms its result is refused."""
    path = folder / "config.json"
    for needed in (folder / "model.safetensors", path):
        if not needed.exists():
            raise BadFile(f"{folder} has no {needed.name}; the model's folder is incomplete")
    function = read_json_object(path).get("activation_function")
    if function is None:
        raise Unsupported(
            f"{path}: states no activation_function, which means Tanh to sentence-transformers; the Tanh of a Dense "
            f"module is not supported. If this one was trained without, state torch.nn.modules.linear.Identity"
        )
    if str(function).rpartition(".")[2] != "Identity":
        raise Unsupported(
            f"{path}: the activation function {function} of a Dense module is not supported; {_ELSEWHERE}"
        )


def _check_vectors(path: Path, kind: str) -> None:
    """Refuse a module that takes or gives anything but the vector, or adds to it."""
    stated = read_json_if_there(path)
    for name, known in _OF_VECTORS.items():
        if name in stated and stated[name] not in known:
            raise Unsupported(
                f"{path}: {name} of a {kind} module is {stated[name]!r}; supported is {known[-1]!r}; {_ELSEWHERE}"
            )


def _check_case(folder: Path) -> None:
    """Refuse texts that sentence-transformers makes lower-case and the tokenizer does not."""
    path, tokenizer = folder / "sentence_bert_config.json", folder / "tokenizer.json"
    if not read_json_if_there(path).get("do_lower_case") or not tokenizer.exists():
        return  # without tokenizer.json no text is read
    if not _lowers(read_json_object(tokenizer, most=_MAX_TOKENIZER_BYTES).get("normalizer")):
        raise Unsupported(
            f"{path}: do_lower_case is true, and the normalizer of {tokenizer.name} does not lower the case; texts are "
            f"tokenized as they are: state false and give texts in lower case"
        )


def _lowers(normalizer: Any) -> bool:
    """Whether a normalizer of the `tokenizers` library makes texts lower-case."""
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        parts = normalizer.get("normalizers")
        return isinstance(parts, list) and any(map(_lowers, parts))
    kind, lowercase = normalizer.get("type"), normalizer.get("lowercase")
    return kind == "Lowercase" or (kind == "BertNormalizer" and lowercase is True)
