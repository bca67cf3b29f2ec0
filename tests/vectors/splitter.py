"""Vectors of the batch splitter (SP): sanitize without memory, then split until nothing is left to give."""

from typing import Any

from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.errors import InvalidBatch
from tests.vectors.sanitizer import refused, sanitized
from tests.vectors.ubatches import seq_lists


def step(splitter: Splitter, given: dict[str, Any]) -> Ubatch | None:
    """The next ubatch of the kind of split that a vector asks for."""
    mode, n_ubatch = given["mode"], given["n_ubatch"]
    if mode == "simple":
        return splitter.simple(n_ubatch)
    if mode == "seq":
        return splitter.seq(n_ubatch)
    if mode == "equal":
        return splitter.equal(n_ubatch, sequential=given["sequential"], n_keep_tail=given.get("n_keep_tail", 0))
    raise ValueError(f"{mode!r} is no kind of split")


def told(ubatch: Ubatch) -> dict[str, Any]:
    """The fields of U-1."""
    names = ("index", "n_tokens", "n_seqs", "n_seq_tokens", "equal_seqs", "seq_id_unq", "n_seqs_unq")
    fields = {name: getattr(ubatch, name) for name in (*names, "token", "pos", "n_seq_id")}
    fields["seq_idx"] = {s: place for place, s in enumerate(ubatch.seq_id_unq.tolist())}
    return {**fields, "seq_id": seq_lists(ubatch), "output": ubatch.output.astype(int)}


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    if op != "split_all":
        raise ValueError(f"{op!r} is no operation of the splitter")
    try:
        splitter = Splitter(sanitized(given))
        ubatches = []
        while (ubatch := step(splitter, given)) is not None:
            ubatches.append(told(ubatch))
    except InvalidBatch as error:
        return refused(error)
    return {
        "ok": True,
        "ubatches": ubatches,
        "out_ids": splitter.out_ids,
        "n_used": splitter.n_used,
        "complete": splitter.complete,
    }
