"""How a file says that the rows of a text become one vector: by `pooling_type` in GGUF, by the files that
sentence-transformers keeps beside the model in a folder. The pooling itself is in `decoder/pooling.py`.
"""

import json
from pathlib import Path
from typing import Any

from ostinato.errors import BadFile, Unsupported
from ostinato.files.json_file import read_text
from ostinato.models.fields import Description, Fields

GGUF_POOLING = ("none", "mean", "cls", "last", "rank")
FOLDER_POOLING = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}


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
    kinds = _modules(folder)
    if unknown := sorted(set(kinds) - {"Transformer", "Pooling", "Normalize", "Dense"}):
        raise Unsupported(f"{folder}: after the model come {', '.join(unknown)} modules, which are not supported")
    for number, kind in enumerate(kinds):
        if kind == "Dense":
            _check_dense(folder / f"{number}_Dense")
    normalise = "Normalize" in kinds or not kinds
    stated = json_beside(folder / "1_Pooling" / "config.json")
    if not isinstance(stated, dict):
        return "mean", normalise
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
    if c.checkpoint.format == "gguf" or "LogitScore" not in (kinds := _modules(c.path)):
        return ()
    if kinds != ["Transformer", "LogitScore"]:
        raise Unsupported(f"{c.path}: modules.json has {', '.join(kinds)}; LogitScore behind the model alone is known")
    path = c.path / "1_LogitScore" / "config.json"
    stated = json_beside(path)
    stated = stated if isinstance(stated, dict) else {}
    found: list[Any] = [stated.get("true_token_id"), stated.get("false_token_id")]
    tokens = found if found[1] is not None else found[:1]
    if not all(type(token) is int and 0 <= token < n_tokens for token in tokens):
        raise BadFile(f"{path}: true_token_id, false_token_id are {found}; they must be ids from 0 to {n_tokens - 1}")
    return tuple(tokens)


def _modules(folder: Path) -> list[str]:
    """The kinds of the modules that sentence-transformers runs one after the other."""
    modules = json_beside(folder / "modules.json")
    if not isinstance(modules, list):
        return []
    return [str(one.get("type", "")).rpartition(".")[2] for one in modules if isinstance(one, dict)]


def _check_dense(folder: Path) -> None:
    """A product alone is known: what transforms its result is refused."""
    if not (folder / "model.safetensors").exists():
        raise BadFile(f"{folder} has no model.safetensors; the model's folder is incomplete")
    stated, path = json_beside(folder / "config.json"), folder / "config.json"
    function = stated.get("activation_function", "Identity") if isinstance(stated, dict) else "Identity"
    if str(function).rpartition(".")[2] != "Identity":
        raise Unsupported(f"{path}: the activation function {function} of a Dense module is not supported")


def projections_of(c: Description) -> tuple[int, ...]:
    """The widths of the products behind the pooling, which neither format states but by its tensors."""
    names = ("dense_{}.weight", "{}_Dense.linear.weight")
    found = [next((c.tensors[n.format(i)] for n in names if n.format(i) in c.tensors), None) for i in (2, 3)]
    return tuple(info.shape[0] for info in found if info is not None)


def json_beside(path: Path) -> Any:
    """A JSON file that a folder may have; None where it has not."""
    if not path.exists():
        return None
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} cannot be read as JSON: {error}") from error
