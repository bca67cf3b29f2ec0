"""Ostinato: an engine for language models in which the device runs the token loop.

The public names are here and load on first use, so that `import ostinato` costs nothing.
"""

TYPE_CHECKING = False  # nothing is imported here, not even typing: `python -m ostinato` is safe only from __main__ on
if TYPE_CHECKING:
    from typing import Any

    from ostinato.async_llm import AsyncLLM as AsyncLLM
    from ostinato.decode_session import DecodeCounts as DecodeCounts
    from ostinato.decode_session import DecodedToken as DecodedToken
    from ostinato.decode_session import DecodeSession as DecodeSession
    from ostinato.decoder.batch.batch import Batch as Batch
    from ostinato.decoder.cells.decoder import Decoder as Decoder
    from ostinato.errors import Aborted as Aborted
    from ostinato.errors import AllocationFailed as AllocationFailed
    from ostinato.errors import BadFile as BadFile
    from ostinato.errors import BadInput as BadInput
    from ostinato.errors import BadOption as BadOption
    from ostinato.errors import BadTemplate as BadTemplate
    from ostinato.errors import ComputeFailed as ComputeFailed
    from ostinato.errors import ContextTooLarge as ContextTooLarge
    from ostinato.errors import DecodeError as DecodeError
    from ostinato.errors import DecodeInvariantError as DecodeInvariantError
    from ostinato.errors import EngineDead as EngineDead
    from ostinato.errors import FetchFailed as FetchFailed
    from ostinato.errors import HardwareCannot as HardwareCannot
    from ostinato.errors import InternalError as InternalError
    from ostinato.errors import InvalidBatch as InvalidBatch
    from ostinato.errors import NoNetwork as NoNetwork
    from ostinato.errors import NoSlot as NoSlot
    from ostinato.errors import OstinatoError as OstinatoError
    from ostinato.errors import PlanStale as PlanStale
    from ostinato.errors import PromptTooLong as PromptTooLong
    from ostinato.errors import QueueFull as QueueFull
    from ostinato.errors import UnknownName as UnknownName
    from ostinato.errors import Unsupported as Unsupported
    from ostinato.llm import LLM as LLM
    from ostinato.llm import Completion as Completion
    from ostinato.llm import Piece as Piece
    from ostinato.llm import Score as Score
    from ostinato.llm import Timings as Timings
    from ostinato.llm import ToolCall as ToolCall
    from ostinato.options import LoadOptions as LoadOptions
    from ostinato.options import Sampling as Sampling

__version__ = "0.1.0.dev0"

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Batch": "decoder.batch.batch",
    "DecodeCounts": "decode_session",
    "DecodeSession": "decode_session",
    "DecodedToken": "decode_session",
    "Decoder": "decoder.cells.decoder",
    "Completion": "llm",
    "Piece": "llm",
    "Score": "llm",
    "Timings": "llm",
    "ToolCall": "llm",
    "LoadOptions": "options",
    "Sampling": "options",
}

_ERRORS = (
    "Aborted", "AllocationFailed", "BadFile", "BadInput", "BadOption", "BadTemplate", "ComputeFailed",
    "ContextTooLarge", "DecodeError", "DecodeInvariantError", "EngineDead", "FetchFailed", "HardwareCannot",
    "InternalError", "InvalidBatch", "NoNetwork", "NoSlot", "OstinatoError", "PlanStale", "PromptTooLong", "QueueFull",
    "UnknownName", "Unsupported",
)  # fmt: skip
_HOMES.update(dict.fromkeys(_ERRORS, "errors"))

# All but Decoder, which needs torch: `from ostinato import *` works without it.
__all__ = [
    "LLM", "AsyncLLM", "Batch", "Completion", "DecodeCounts", "DecodeSession", "DecodedToken", "LoadOptions",
    "Piece", "Sampling", "Score", "Timings", "ToolCall", "__version__", *_ERRORS,
]  # fmt: skip


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name in _HOMES:
        if name in ("LLM", "AsyncLLM", "DecodeSession"):
            import_module("ostinato.backends.torch.amx").limit_early()  # must come before torch is loaded
        if name == "Decoder":
            import_module("ostinato.extras").check_extra("torch", "ostinato.Decoder")
        return getattr(import_module(f"ostinato.{_HOMES[name]}"), name)
    raise AttributeError(f"ostinato has no {name!r}; its names are {', '.join(sorted(_HOMES))}")


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]
