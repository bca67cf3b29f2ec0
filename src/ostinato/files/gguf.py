"""A GGUF model, in one file or in several parts, behind the interface of `checkpoint.py`.

Parts are named `NAME-00001-of-00003.gguf`; whichever is opened, the others are found beside it, and the
first one's metadata is the model's. The header is read by `gguf_header.py`; strings that are not UTF-8 keep
their bytes as lone surrogates, as described there.
"""

from __future__ import annotations

import os
import reprlib
from pathlib import Path
from types import MappingProxyType

from ostinato.errors import BadFile, Unsupported, first_few
from ostinato.files.checkpoint import Checkpoint
from ostinato.files.fetch import split_names
from ostinato.files.fingerprint import fingerprint_of
from ostinato.files.gguf_header import GGUFHeader, read_header
from ostinato.files.mapped import MappedFile
from ostinato.other_engines import LORA

_MAX_PARTS = 4096
_A_WHOLE_ONE = "which is not supported; give the GGUF file of a whole model"
_NO_MODELS = {  # by general.type
    "adapter": f"a LoRA adapter, not a model; {LORA}",
    "mmproj": f"the vision part of a model, {_A_WHOLE_ONE}",
    "imatrix": f"an importance matrix, {_A_WHOLE_ONE}",
}


class GGUFFile(Checkpoint):
    """A GGUF model opened for reading. A file that holds only a vocabulary has no tensors."""

    format = "gguf"

    def _open(self) -> None:
        headers = self._open_parts()
        self.metadata = MappingProxyType(headers[0].metadata)
        self.version = headers[0].version
        self.architecture = self._architecture()
        self._refuse_what_is_no_model()
        self._list_tensors(headers)

    def _open_part(self, path: Path) -> GGUFHeader:
        file = MappedFile(path)
        self._files.append(file)
        return read_header(file.data, file.n_bytes, path)

    def _open_parts(self) -> list[GGUFHeader]:
        """The headers of all parts in order; one for a file that is not split."""
        header = self._open_part(self.path)
        count = _split_number(header, "split.count", self.path) or 1
        if count == 1:
            return [header]
        if count > _MAX_PARTS:
            raise BadFile(f"{self.path}: split.count is {count}; more than {_MAX_PARTS} parts are not accepted")
        names = split_names(self.path.name)
        if len(names) != count or self.path.name not in names:
            raise BadFile(
                f"{self.path}: is one of {count} parts (split.count), but is not named like "
                f"-00001-of-{count:05}.gguf; give it its published name, with the other parts beside it"
            )
        self.close()
        self._files = []
        paths = [self.path.with_name(name) for name in names]
        missing = [part.name for part in paths if not os.path.exists(part)]
        if missing:
            raise BadFile(
                f"{self.path}: is one of {count} parts, and beside it are missing: {first_few(missing)}; fetch them too"
            )
        headers = [self._open_part(part) for part in paths]
        for i, (part, part_header) in enumerate(zip(paths, headers, strict=True)):
            _check_part(part, part_header, i, count)
        return headers

    def _architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise BadFile(
                f"{self.path}: general.architecture is {reprlib.repr(value)}, so the model is not known; "
                f"the file is damaged or incomplete: fetch it again"
            )
        return value

    def _refuse_what_is_no_model(self) -> None:
        kind = "mmproj" if self.architecture == "clip" else self.metadata.get("general.type")
        what = _NO_MODELS.get(kind) if isinstance(kind, str) else None
        if what is not None:
            raise Unsupported(f"{self.path}: is {what}")

    def _list_tensors(self, headers: list[GGUFHeader]) -> None:
        for file, header in zip(self._files, headers, strict=True):
            for name, info in header.tensors.items():
                if name in self._places:
                    raise BadFile(f"{file.path}: tensor {name!r} is in an earlier part too; fetch the parts again")
                self._places[name] = (file, info)
        stated = _split_number(headers[0], "split.tensors.count", self.path)
        if stated is not None and len(headers) > 1 and stated != len(self._places):
            raise BadFile(
                f"{self.path}: split.tensors.count is {stated}, but {len(headers)} parts hold {len(self._places)} "
                f"tensors; fetch the parts again"
            )

    def fingerprint(self) -> str:
        """The file's sha256, or that of the list of its parts' sums."""
        return fingerprint_of([part.path for part in self._files])


def _split_number(header: GGUFHeader, key: str, path: Path) -> int | None:
    value = header.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadFile(
            f"{path}: {key} is {reprlib.repr(value)}; it must be a whole number: the file is damaged, fetch it again"
        )
    return value


def _check_part(path: Path, header: GGUFHeader, index: int, count: int) -> None:
    stated = (_split_number(header, "split.no", path), _split_number(header, "split.count", path))
    if stated != (index, count):
        raise BadFile(
            f"{path}: says it is part {stated[0]} of {stated[1]} (split.no, from 0, and split.count), but is "
            f"named as part {index} of {count}; the parts do not belong together: fetch them again"
        )
