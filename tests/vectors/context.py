"""Vectors of a whole decoder with a small random model (sections 15 to 19 of the specification)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ostinato.backends.torch.model import Model
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder, never
from ostinato.decoder.cells.sample_router import BackendSampler
from ostinato.errors import DecodeError, OstinatoError
from tests.decoder.cells.samplers import GreedySampler, TopKSampler
from tests.random_model import MemoryKind, random_model
from tests.vectors.memory_steps import SEQUENCE_OPS, seq_pos, sequence_op
from tests.vectors.output import raw_written
from tests.vectors.sanitizer import batch_of

SAMPLERS: dict[str, BackendSampler] = {"greedy": GreedySampler(), "topk": TopKSampler(5), "empty": TopKSampler(0)}
SIZES = ("n_batch", "n_ubatch", "n_seq_max", "unified", "n_outputs_max", "n_outputs_max_per_seq")
TOLERANCE = 1e-4


@cache
def model_of(kind: MemoryKind, n_vocab: int, hidden: int) -> Model:
    return random_model(kind, n_vocab=n_vocab, hidden=hidden)


class Steps:
    """A decoder and the steps that the file knows."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.decoder = Decoder(
            model_of(given["memory_kind"], given["n_vocab"], given["n_embd_out"]),
            n_ctx=given["n_ctx"],
            embeddings=given.get("embeddings", False),
            pooling=given.get("pooling", "none"),
            **{name: given[name] for name in SIZES if name in given},
        )
        self.n_seq_max = given["n_seq_max"]
        self.embeddings = given.get("embeddings", False)
        self.saved = b""
        self.kept: dict[str, Tensor] = {}

    def step(self, name: str, *arguments: Any) -> Any:
        if name in SEQUENCE_OPS:
            return sequence_op(self.decoder.memory, name, *arguments)
        return getattr(self, name)(*arguments)

    # Decoding

    def decode(self, batch: dict[str, Any], options: dict[str, Any] | None = None) -> int:
        given = Batch(n_tokens=batch["n_tokens"]) if batch.get("no_input") else batch_of(batch)
        try:
            self.decoder.decode(given, abort=self._abort(options or {}))
        except DecodeError as error:
            return error.code
        return 0

    encode = decode

    def _abort(self, options: dict[str, Any]) -> Callable[[], bool]:
        if "abort_pos" in options:
            return lambda: (self.decoder.memory.pos_max(options["abort_seq"]) or -1) >= options["abort_pos"]
        return (lambda: True) if options else never

    # Outputs

    def ids(self, n: int) -> list[int]:
        return [-1 if row is None else row for row in self.decoder.outputs.ids[:n]]

    def swaps(self) -> list[list[int]]:
        return [list(swap) for swap in self.decoder.outputs.swaps]

    def n_outputs(self) -> int:
        return self.decoder.outputs.n_outputs

    def row(self, index: int) -> Any:
        row = self.decoder.outputs.row(index).value
        return "absent" if row is None else row

    def reserve(self, n: int) -> dict[str, Any]:
        outputs = self.decoder.outputs
        sampling = bool(self.decoder._router.samplers)
        held = outputs.capacity_bytes
        made = outputs.reserve(n, embeddings=self.embeddings, sampling=sampling)
        n_items = {name: rows.values.numel() for name, rows in made.items()}
        return {
            "rows": len(made["logits"].values),
            "logits": n_items["logits"],
            "embd": n_items["embeddings"],
            "sampled": n_items["sampled_tokens"],
            "sampled_logits": n_items["sampled_logits"],
            "probs": n_items["probs"],
            "candidates": n_items["candidates"],
            "capacity_bytes": outputs.capacity_bytes,
            "grew": outputs.capacity_bytes > held,
            "ids_reset": set(outputs.ids) == {None},
            "n_ids": len(outputs.ids),
        }

    def logits_of(self, index: int) -> Any:
        return "absent" if self.decoder.logits(index) is None else "any"

    def _logits(self, index: int) -> Tensor:
        logits = self.decoder.logits(index)
        assert logits is not None
        return logits

    def same_logits(self, a: int, b: int) -> bool:
        return torch.allclose(self._logits(a), self._logits(b), atol=TOLERANCE, rtol=0)

    def keep_logits(self, index: int, name: str) -> bool:
        self.kept[name] = self._logits(index).clone()
        return True

    def cmp_logits(self, index: int, name: str) -> bool:
        return torch.allclose(self._logits(index), self.kept[name], atol=TOLERANCE, rtol=0)

    def zero_logits(self) -> None:
        """Which rows were written is kept beside them, so their contents need no reset."""

    def raw_rows(self, n: int) -> list[bool]:
        return raw_written(self.decoder.outputs, n)

    def sampled(self, index: int) -> Any:
        return -1 if self.decoder.outputs.sampled_token(index).value is None else "token"

    def counts(self, index: int) -> list[int]:
        return list(self.decoder.outputs.counts(index))

    def embd_seq(self, sequence: int) -> str:
        return "absent" if self.decoder.pooled(sequence) is None else "present"

    def embd_ith(self, index: int) -> str:
        return "absent" if self.decoder.embedding(index) is None else "present"

    # Memory

    def seq_pos(self) -> dict[int, list[int | None]]:
        return seq_pos(self.decoder.memory, self.n_seq_max)

    def clear(self, data: bool) -> None:
        self.decoder.memory.clear(data)

    def has_shift(self) -> bool:
        assert self.decoder.parts.full is not None
        return self.decoder.parts.full[0].has_shift

    def k_same(self, a: int, b: int) -> bool:
        assert self.decoder.parts.full is not None
        keys = self.decoder.parts.full[1].keys[0].values[0]
        return torch.allclose(keys[a], keys[b], atol=TOLERANCE, rtol=0)

    # Saved state

    def save_all(self) -> None:
        self.saved = self.decoder.save_all()

    def save_seq(self, sequence: int) -> None:
        self.saved = self.decoder.save_sequence(sequence)

    def load_all(self) -> bool:
        return self._loaded(lambda: self.decoder.load_all(self.saved))

    def load_seq(self, sequence: int) -> bool:
        return self._loaded(lambda: self.decoder.load_sequence(sequence, self.saved))

    def _loaded(self, load: Callable[[], None]) -> bool:
        try:
            load()
        except OstinatoError:
            return False
        return True

    def damage(self, how: str, n: int = 0) -> None:
        if how == "magic":
            self.saved = bytes([self.saved[0] ^ 0xFF]) + self.saved[1:]
        else:
            self.saved = self.saved[: len(self.saved) - n]


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    steps = Steps(given)
    sampler = SAMPLERS[given.get("sampler_kind", "greedy")]
    registered = [steps.decoder.register(sequence, sampler) for sequence in given.get("samplers", [])]
    return {"results": [*registered, *(steps.step(*step) for step in op)]}
