"""Ostinato: an engine for language models in which the device runs the token loop.

The public names are here and load on first use, so that `import ostinato` costs nothing.
"""

TYPE_CHECKING = False  # nothing is imported here, not even typing: `python -m ostinato` is safe only from __main__ on
if TYPE_CHECKING:
    from typing import Any

    from ostinato.async_llm import AsyncLLM as AsyncLLM
    from ostinato.decoder.batch.batch import Batch as Batch
    from ostinato.decoder.cells.decoder import Decoder as Decoder
    from ostinato.errors import OstinatoError as OstinatoError
    from ostinato.llm import LLM as LLM
    from ostinato.llm import Completion as Completion
    from ostinato.llm import Piece as Piece
    from ostinato.llm import Score as Score
    from ostinato.llm import Timings as Timings
    from ostinato.options import LoadOptions as LoadOptions
    from ostinato.options import Sampling as Sampling

__version__ = "0.1.0.dev0"

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Batch": "decoder.batch.batch",
    "Decoder": "decoder.cells.decoder",
    "Completion": "llm",
    "Piece": "llm",
    "Score": "llm",
    "Timings": "llm",
    "LoadOptions": "options",
    "OstinatoError": "errors",
    "Sampling": "options",
}

__all__ = [
    "LLM", "AsyncLLM", "Batch", "Completion", "Decoder", "LoadOptions", "OstinatoError", "Piece", "Sampling", "Score",
    "Timings", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name in _HOMES:
        if name in ("LLM", "AsyncLLM"):
            import_module("ostinato.backends.torch.amx").limit_early()  # must come before torch is loaded
        return getattr(import_module(f"ostinato.{_HOMES[name]}"), name)
    raise AttributeError(f"ostinato has no {name!r}; its names are {', '.join(__all__)}")
