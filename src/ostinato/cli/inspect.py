"""`ostinato inspect`: what a model file is and what it would need, from its headers alone.

A file that cannot be run is still described as far as possible, with what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ostinato.cache.kv_bytes import KV_FORMATS, kv_widths
from ostinato.cli import flags
from ostinato.cli.output import talk, write_columns, write_json
from ostinato.errors import BadFile, ContextTooLarge, HardwareCannot, OstinatoError
from ostinato.files.fetch import megabytes
from ostinato.files.store import DEFAULT, resolve
from ostinato.options import LoadOptions

if TYPE_CHECKING:
    from ostinato.engine.memory_plan import MemoryPlan
    from ostinato.files.checkpoint import Checkpoint
    from ostinato.models.shape import Shape
    from ostinato.text.tokenizer import Tokenizer

_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2}
# A size, where layers differ the largest: how a shape tells it, and the keys that state it in GGUF and in config.json.
_SIZES: Final[Mapping[str, tuple[Callable[[Shape], Any], str | None, str | None]]] = {
    "family": (lambda s: s.family, None, None),
    "layers": (lambda s: s.n_layers, "block_count", "num_hidden_layers"),
    "hidden": (lambda s: s.hidden, "embedding_length", "hidden_size"),
    "heads": (lambda s: s.widest(lambda a: a.n_heads), "attention.head_count", "num_attention_heads"),
    "kv_heads": (lambda s: s.widest(lambda a: a.n_kv_heads), "attention.head_count_kv", "num_key_value_heads"),
    "head_width": (lambda s: s.widest(lambda a: a.head_width), None, None),
    "feed_forward": (lambda s: s.widest_ff, "feed_forward_length", "intermediate_size"),
    "context": (lambda s: s.context, "context_length", "max_position_embeddings"),
    "vocabulary": (lambda s: s.vocab, None, None),
}
Found = TypeVar("Found")


@flags.verb
def inspect(
    *,
    model: flags.ModelAnywhere = DEFAULT,
    load: flags.ToPlan,
    as_json: flags.Json = False,
) -> None:
    """Describe a model: architecture, sizes, tensors, tokenizer, template, memory. Reads no weights.

    The options of loading change the memory plan alone.
    """
    from ostinato.files.checkpoint import open_checkpoint

    with open_checkpoint(resolve(model, talk=talk)) as checkpoint:
        facts = describe(checkpoint, load)
    if as_json:
        write_json(facts)
    else:
        write_columns(_rows(facts))


def describe(checkpoint: Checkpoint, load: LoadOptions) -> dict[str, Any]:
    """Everything in the headers, and under `missing` why some of it could not be read."""
    from ostinato.backends.native.backend import why_not_blocks
    from ostinato.models.registry import read_shape, why_left_out
    from ostinato.text.of_checkpoint import template_sources, tokenizer_of

    missing: list[str] = []

    def attempt(read: Callable[[], Found]) -> Found | None:
        try:
            return read()
        except ContextTooLarge:  # as asked for
            raise
        except OstinatoError as error:
            missing.append(str(error).partition("\n")[0])  # lists of names are not for a table
            return None

    n_parameters = sum(tensor.n_elements for tensor in checkpoint.tensors.values())
    facts: dict[str, Any] = {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "architecture": checkpoint.architecture,
        "parameters": n_parameters,
        "bytes": sum(tensor.n_bytes for tensor in checkpoint.tensors.values()),
        "tensors": _tensor_types(checkpoint),
    }
    shape = None
    if checkpoint.tensors:
        shape = attempt(lambda: read_shape(checkpoint))
    else:
        missing.append("no tensors: the file holds only a vocabulary, so it can be tokenized with but not run")
    of_shape = {name: found(shape) for name, (found, *_) in _SIZES.items()} if shape else None
    facts["left_out"] = why_left_out(checkpoint) if shape else None
    facts["sizes"] = of_shape or _stated_sizes(checkpoint)
    tokenizer = attempt(lambda: tokenizer_of(checkpoint))
    facts["tokenizer"] = _tokenizer_facts(checkpoint, tokenizer)
    facts["chat_template"] = attempt(lambda: template_sources(checkpoint)) is not None
    facts["memory"] = _memory(shape, n_parameters) if shape else None
    # Of the model alone; `doctor` says whether this machine has a native loop.
    facts["native_loop"] = {"why_not": why_not_blocks(shape)} if shape else None
    plan = attempt(lambda: planned(checkpoint, shape, load)) if shape else None
    facts["plan"] = None if plan is None else plan_facts(plan)
    facts["missing"] = missing
    return facts


def _tensor_types(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Per type: the number of tensors and their bytes, how many of them a GPU multiplies in the file's type, how many
    are matrices, and the type of those in the tiles of the CPU's native loop."""
    from ostinato.backends.cuda.packed_types import stays_packed
    from ostinato.backends.native.tile_weights import is_matrix
    from ostinato.backends.native.tiles import nearest_type

    types: dict[str, dict[str, Any]] = {}
    for tensor in checkpoint.tensors.values():
        new = {"count": 0, "packed": 0, "matrices": 0, "in_tiles": nearest_type(tensor.type), "bytes": 0}
        entry = types.setdefault(tensor.type, new)
        entry["count"] += 1
        entry["matrices"] += is_matrix(tensor)
        entry["packed"] += stays_packed(tensor.type, tensor.shape)
        entry["bytes"] += tensor.n_bytes
    return dict(sorted(types.items(), key=lambda item: -item[1]["bytes"]))


def _stated_sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sizes as the file states them, for a model that we cannot run."""
    in_gguf = checkpoint.format == "gguf"
    prefix = f"{checkpoint.architecture}." if in_gguf else ""
    keys = {name: gguf if in_gguf else config for name, (_, gguf, config) in _SIZES.items()}
    stated = {name: checkpoint.metadata.get(prefix + key) for name, key in keys.items() if key is not None}
    return {name: value for name, value in stated.items() if isinstance(value, int)}


def _memory(shape: Shape, n_parameters: int) -> dict[str, Any]:
    from ostinato.backends.base import Settled
    from ostinato.engine.choose import context_bytes

    on_cpu = Settled("cpu", "native", "loop", "float32", "f32", shape.default_context)
    types = [kv_type for kv_type, kept in KV_FORMATS.items() if all(map(kept.fits, kv_widths(shape)))]
    return {
        "weights": {dtype: n_parameters * size for dtype, size in _DTYPE_BYTES.items()},
        "context": shape.default_context,
        "kv": {kv_type: context_bytes(shape, replace(on_cpu, kv_type=kv_type)) for kv_type in types},
    }


def planned(checkpoint: Checkpoint, shape: Shape, options: LoadOptions) -> MemoryPlan:
    """The memory that an engine with these options would take on this machine."""
    from ostinato.engine.choose import LoadCase, decide, fit
    from ostinato.engine.machine import choose_device, machine_at
    from ostinato.models.header import tensors_of

    case = LoadCase(shape, tensors_of(checkpoint), options, machine_at(choose_device(options.device)))
    settled = decide(case)
    with suppress(HardwareCannot):  # a plan that does not fit is shown too, and marked so
        settled = fit(settled, case, lambda _: None)
    return case.plan(settled)


def plan_facts(plan: MemoryPlan) -> dict[str, Any]:
    """A memory plan as plain values."""
    settled = plan.settled
    return {
        "device": settled.device,
        "dtype": settled.dtype,
        "kv_type": settled.kv_type,
        "slots": settled.n_slots,
        "context": settled.context,
        "pages": settled.n_pages,
        "pages_of_a_context": settled.max_pages,
        "rows": [
            {"name": row.name, "bytes": row.n_bytes, "on_demand": row.on_demand, "on_host": row.on_host}
            for row in plan.rows
        ],
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "used_bytes": plan.used_bytes,
        "request": {"positions": plan.request_positions, "bytes": plan.request_bytes},
        "free_bytes": plan.free_bytes,
        "mode": settled.mode,
        "why_not": list(settled.why_not),
        "prompts": settled.prompts,
        "fitting": [{"slots": n_slots, "context": context} for n_slots, context in plan.fitting],
        "fits": plan.fits,
        "verdict": plan.verdict,
    }


def plan_rows(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    """A memory plan for people."""
    mode = f"{plan['mode']}, prompts read the tape" if plan["prompts"] == "tape" else plan["mode"]
    rows: list[tuple[str, ...]] = [("plan: mode", "; ".join([mode, *plan["why_not"]]))]
    for row in plan["rows"]:
        where = " of the host's memory" if row["on_host"] else ""
        when = " reserved, used on demand" if row["on_demand"] else ""
        rows.append((f"plan: {row['name']}", f"{megabytes(row['bytes'])}{where}{when}"))
    n_contexts = plan["pages"] / plan["pages_of_a_context"]
    if 0 < n_contexts < plan["slots"]:
        rows.append(
            (
                "plan: waiting",
                f"pages hold {n_contexts:.1f} whole contexts for {plan['slots']} slots: long requests wait for pages",
            )
        )
    verdict = plan["verdict"] + f" (as {plan['dtype']}, KV {plan['kv_type']})"
    request, used = plan["request"], f"{megabytes(plan['used_bytes'])} once the model is loaded"
    if request["bytes"]:
        used += f", {megabytes(request['bytes'])} more by a request of {request['positions']:,} tokens"
    rows += [("plan: in all", verdict), ("plan: used", used)]
    if plan["fitting"]:
        rows.append(("plan: fits", "whole contexts at once: " + fitting_text(plan["fitting"])))
    return rows


def fitting_text(fitting: list[dict[str, int]]) -> str:
    """
    >>> fitting_text([{"slots": 8, "context": 8192}, {"slots": 1, "context": 65_536}])
    '8 slots with a context of 8,192, 1 with 65,536'
    """
    first, *more = fitting
    said = [f"{first['slots']} slot{'s' if first['slots'] > 1 else ''} with a context of {first['context']:,}"]
    return ", ".join([*said, *(f"{one['slots']} with {one['context']:,}" for one in more)])


def _tokenizer_facts(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> dict[str, Any]:
    facts = {"kind": _tokenizer_kind(checkpoint), "pre": checkpoint.metadata.get("tokenizer.ggml.pre")}
    if tokenizer is None:
        return facts

    def token(id: int | None) -> dict[str, Any] | None:
        return None if id is None else {"id": id, "text": tokenizer.token_text(id)}

    return {
        **facts,
        "tokens": tokenizer.vocab_size,
        "bos": token(tokenizer.bos_id),
        "eos": token(tokenizer.eos_id),
        "end_of_generation": [token(id) for id in sorted(tokenizer.eog_ids)],
        "adds_bos": tokenizer.add_bos,
        "adds_eos": tokenizer.add_eos,
    }


def _tokenizer_kind(checkpoint: Checkpoint) -> str | None:
    from ostinato.files.json_file import read_json_object
    from ostinato.text.folder import MAX_TOKENIZER_BYTES

    if checkpoint.format == "gguf":
        kind = checkpoint.metadata.get("tokenizer.ggml.model")
        return kind if isinstance(kind, str) else None
    try:
        model = read_json_object(checkpoint.path / "tokenizer.json", most=MAX_TOKENIZER_BYTES).get("model")
    except BadFile:  # the tokenizer has reported it already
        return None
    return str(model["type"]) if isinstance(model, dict) and "type" in model else None


def _rows(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("file", facts["path"]),
        ("format", facts["format"]),
        ("architecture", facts["architecture"]),
        ("parameters", f"{facts['parameters']:,}"),
    ]
    rows += [
        (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else value)
        for name, value in facts["sizes"].items()
    ]
    rows += [
        (
            "tensors",
            f"{type}: {entry['count']}, {megabytes(entry['bytes'])}{_on_a_gpu(type, entry['packed'])}"
            f"{_on_the_cpu(type, entry, facts['native_loop'])}",
        )
        for type, entry in facts["tensors"].items()
    ]
    if facts["left_out"]:
        rows.append(("left out", facts["left_out"].removeprefix(f"{facts['path']}: ")))
    rows += _tokenizer_rows(facts["tokenizer"])
    rows.append(("chat template", "yes" if facts["chat_template"] else "no"))
    memory = facts["memory"]
    if memory:
        weights = ", ".join(f"{megabytes(n)} as {dtype}" for dtype, n in memory["weights"].items())
        kv = ", ".join(f"{megabytes(n)} as {kv_type}" for kv_type, n in memory["kv"].items())
        rows += [("weights dequantised", weights), ("KV of a context", f"{kv}, at {memory['context']:,} tokens")]
    if facts["native_loop"]:
        reason = facts["native_loop"]["why_not"]
        rows.append(("native loop", "can run it on a CPU" if reason is None else f"cannot: {reason}"))
    if facts["plan"]:
        rows += plan_rows(facts["plan"])
    labels = chain([] if memory else ["cannot run"], repeat("missing"))  # the first reason is then the shape's
    return rows + list(zip(labels, facts["missing"], strict=False))


def _on_a_gpu(type: str, n_packed: int) -> str:
    """The type of quantised weights there; others are F32, F16 or BF16 already."""
    if type in ("F32", "F16", "BF16", "F64"):
        return ""
    return "; stay packed on a GPU" if n_packed else "; dequantised when loaded on a GPU"


def _on_the_cpu(type: str, entry: dict[str, Any], native: dict[str, Any] | None) -> str:
    """The type of a file's matrices there, if the native loop can run the model."""
    if native is None or not entry["matrices"]:
        return ""
    if native["why_not"] is not None:
        return "" if type == "F32" else "; float32 on the CPU"
    return "; stay packed on the CPU" if entry["in_tiles"] == type else f"; kept as {entry['in_tiles']} on the CPU"


def _tokenizer_rows(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    def shown(token: dict[str, Any] | None) -> str:
        return "none" if token is None else f"{token['id']} {token['text']}"

    pre = f", pre-tokenizer {facts['pre']}" if facts["pre"] else ""
    rows: list[tuple[str, ...]] = [("tokenizer", f"{facts['kind'] or 'none'}{pre}")]
    if "tokens" in facts:
        rows.append(("tokens", f"{facts['tokens']:,}"))
        rows.append(("BOS", shown(facts["bos"]) + (", added" if facts["adds_bos"] else ", not added")))
        rows.append(("EOS", shown(facts["eos"]) + (", added" if facts["adds_eos"] else "")))
        rows.append(("ends at", ", ".join(map(shown, facts["end_of_generation"])) or "nothing"))
    return rows
