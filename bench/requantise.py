"""A model file with its matrices requantised to another type, by the `gguf` package: what llama.cpp is quickest with.

llama.cpp repacks Q4_0 for its best kernels and leaves Q4_1 as it is, so a fair comparison shows both. The embedding,
norms and metadata stay as they are; values go through float32, so such a file answers a little worse than the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def requantised(path: Path, folder: Path, type_name: str = "Q4_0") -> Path:
    """The file in `folder` with the model of `path`, its Q4_1 matrices as `type_name`; made if it is not there."""
    import gguf

    out = folder / f"{path.stem}.{type_name}.gguf"
    if out.exists():
        return out
    reader: Any = gguf.GGUFReader(path)
    wanted = gguf.GGMLQuantizationType[type_name]
    half_made = out.with_suffix(".part")
    writer: Any = gguf.GGUFWriter(half_made, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        data, kept = tensor.data, tensor.tensor_type
        if kept == gguf.GGMLQuantizationType.Q4_1:
            data, kept = gguf.quants.quantize(gguf.quants.dequantize(data, kept), wanted), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    half_made.rename(out)
    return out
