"""What every test may lean on: the default model, where it can be had, and a folder of vocabularies."""

import json
import math
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings

from ostinato.errors import FetchFailed, HardwareCannot
from tests.counts import soaking

if TYPE_CHECKING:
    from ostinato import LLM

# Tests run side by side, and their models are too small to be shared by threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Kernels for GPUs run in Triton's interpreter here; it must know before anything imports triton.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Some CPUs announce AMX and refuse it; the matrix library must know before any test has used it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# A shell that starts us in the background has interrupts ignored, and children inherit that; tests send some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

VOCABULARIES = Path(os.environ.get("OSTINATO_VOCABULARIES") or Path(__file__).parents[2] / "shared" / "data" / "vocab")
SCHEMAS = Path(os.environ.get("OSTINATO_SCHEMAS") or VOCABULARIES.parent / "schemas" / "schemas.json")


# The same examples in every run; `make soak` looks for others. Hypothesis also tries constants that it finds in our
# modules, which would make examples depend on the modules that other tests have loaded.
settings.register_profile("tests", derandomize=not soaking(), deadline=None)  # a busy machine is no fault
settings.load_profile("tests")
if not soaking():
    local_constants = "hypothesis.internal.conjecture.providers.is_local_module_file"
    pytest.MonkeyPatch().setattr(local_constants, lambda path: False, raising=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test that draws random numbers without a seed draws the same ones in every run, alone or among other tests."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


# By one process, so that Ray's cluster is started once; other modules go to any free process.
TOGETHER = ("scale/test_data.py", "scale/test_replicas.py")
# What takes longest: first, so that no process is left alone with it at the end.
LONG = (
    *(
        *TOGETHER,
        "test_wheel.py",
        "test_small_install.py",
        "serve",
        "scale",
        "backends/cuda/triton",
        "backends/tape",
        "models",
    ),
    *("backends/native", "decoder", "engine", "text", "test_gpu_tape.py", "test_gpu_check.py", "cli", "files"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}

    def place(item: pytest.Item) -> int:
        return min(order.get(path, len(order)) for path in (item.path, item.path.parent))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class InOrder(LoadScopeScheduling):  # type: ignore[misc]  # untyped
        def _split_scope(self, nodeid: str) -> str:
            scope = str(super()._split_scope(nodeid))
            return "on a cluster" if scope.removeprefix("tests/") in TOGETHER else scope

    config.option.loadscopereorder = False  # not by the number of tests, but as they are sorted above
    return InOrder(config, log)


@pytest.fixture(scope="session", autouse=True)
def native_library() -> None:
    """Opened before any test puts its own folder in place of the user's: compiled once, and kept."""
    from ostinato.backends.native.library import cpu_library

    with suppress(HardwareCannot):
        cpu_library()


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Triton's interpreter without what it does again and again to no end. It puts its own functions in the language's
    place at each call of a function within a kernel, searching all of the language for them: where they are there
    already, it need not. It computes whether integers overflow, and reports nothing. It makes types and shapes anew."""
    with suppress(ImportError):
        import triton.language as tl
        from triton.runtime import interpreter

        patch = interpreter._patch_lang

        @cache
        def languages(function: Any) -> list[Any]:
            return [value for value in function.__globals__.values() if value is tl or value is tl.core]

        def patch_once(function: Any) -> Any:
            members = [tl.tensor.to, *(language.load for language in languages(function))]
            return patch(function) if any(map(tl.core.is_builtin, members)) else interpreter._LangPatchScope()

        interpreter._patch_lang = patch_once

        builder = interpreter.interpreter_builder
        assert not builder.options.debug
        builder.options = replace(builder.options, sanitize_overflow=False)

        tl.block_type.__hash__ = tl.pointer_type.__hash__ = tl.dtype.__hash__
        interpreter._get_np_dtype = cache(interpreter._get_np_dtype)
        tl.block_type.with_element_ty = cache(tl.block_type.with_element_ty)
        tl.block_type.to_ir = cache(tl.block_type.to_ir)

        @cache
        def extent(shape: tuple[int, ...]) -> tuple[Any, Any]:
            return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(length) for length in shape])

        def init(tensor: Any, handle: Any, type: Any) -> None:
            tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
            tensor.numel, tensor.shape = extent(tuple(type.shape) if type.is_block() else ())

        tl.tensor.__init__ = init


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file; a test that needs it is skipped, and says so, where it cannot be fetched."""
    from ostinato.files import store

    try:
        return store.resolve("smollm2", talk=lambda _: None)
    except FetchFailed as error:
        pytest.skip(f"the default model cannot be fetched: {error}")


@pytest.fixture(scope="session")
def vocab_data() -> Path:
    """The folder of vocabularies with ids made by another implementation; skipped where it is not there."""
    if not VOCABULARIES.is_dir():
        where = f"{VOCABULARIES} (OSTINATO_VOCABULARIES names another folder)"
        pytest.skip(f"no vocabularies at {where}: ids of other implementations were not compared")
    return VOCABULARIES


@pytest.fixture(scope="session")
def schema_data() -> list[dict[str, Any]]:
    """Schemas that people wrote, with valid and invalid instances; skipped where they are not there."""
    if not SCHEMAS.is_file():
        pytest.skip(f"no schemas at {SCHEMAS} (OSTINATO_SCHEMAS names another file): none that people wrote was tried")
    found: list[dict[str, Any]] = json.loads(SCHEMAS.read_text("utf-8"))
    return found


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """The folder `models` of llama.cpp's source, with vocabularies and templates; skipped where it cannot be had."""
    from tests.text.llama_cpp_source import models_folder

    return models_folder()


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are written, each once a session."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def tiny_gguf(tiny_files: Path) -> Path:
    """A tiny llama with a chat template, as a GGUF file."""
    from tests.models import tiny

    return tiny.gguf("llama", tiny_files)


@pytest.fixture(scope="session")
def tiny_llm(tiny_gguf: Path) -> "Iterator[LLM]":
    """The tiny llama, opened once."""
    from ostinato import LLM

    with LLM(tiny_gguf, device="cpu", context=128) as llm:
        yield llm
