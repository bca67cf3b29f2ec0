"""The import order of the packages, as docs/walk.md draws it: a package imports those above it and none below."""

import ast
from collections.abc import Iterator
from pathlib import Path

import ostinato

PACKAGE = Path(ostinato.__file__).parent
PACKAGES = (
    "errors",
    "options",
    "files",
    "build",
    "text",
    "models",
    "cache",
    "loop",
    "backends",
    "decoder",
    "engine",
    "llm",
    "serve",
    "scale",
    "lab",
    "cli",
)
# Inside backends/, a backend imports itself, the modules beside the folders, and those named here.
BACKENDS: dict[str, set[str]] = {"torch": set(), "native": set(), "cuda": {"torch"}, "tape": {"cuda", "torch"}}
# May import torch. "lab" only for its measurements of a GPU.
WITH_TORCH = ("backends", "decoder", "lab")

# What is still out of order; each line that goes is progress, and a line that is not needed fails.
NOT_YET = {
    "backends/cuda/packed.py imports ostinato.backends.native.tiles",
    "backends/cuda/packed.py imports ostinato.backends.tape.tape_weight",
    "backends/cuda/prefill.py imports ostinato.backends.tape.partition",
    "backends/cuda/prefill.py imports ostinato.backends.tape.plan",
    "backends/cuda/prefill.py imports ostinato.backends.tape.tape_weight",
    "backends/cuda/step.py imports ostinato.backends.tape.pack",
    "backends/cuda/step.py imports ostinato.backends.tape.unpack",
    "backends/native/backend.py imports ostinato.backends.torch.paged",
    "backends/native/plan.py imports ostinato.backends.cuda.packed",
    "backends/native/plan.py imports ostinato.backends.torch.paged",
    "backends/native/plan.py imports ostinato.backends.torch.plan",
    "backends/native/start.py imports ostinato.backends.torch.start",
    "backends/tape/pack.py imports ostinato.backends.native.tiles",
    "backends/torch/kv_store.py imports ostinato.decoder.memory.recurrent_state",
    "backends/torch/ops/embed.py imports ostinato.backends.cuda.packed",
    "backends/torch/ops/experts.py imports ostinato.backends.cuda.packed",
    "backends/torch/ops/gemm.py imports ostinato.backends.cuda.packed",
    "backends/torch/ops/linear.py imports ostinato.backends.cuda.packed",
    "backends/torch/ops/linear.py imports ostinato.backends.native.tiles",
    "backends/torch/ops/matmul.py imports ostinato.backends.cuda.packed",
    "backends/torch/prefill.py imports ostinato.backends.cuda.prefill",
    "backends/torch/prefill.py imports ostinato.backends.cuda.step",
    "backends/torch/table.py imports ostinato.backends.cuda.packed",
    "backends/torch/weight.py imports ostinato.backends.cuda.packed",
    "backends/torch/weight.py imports ostinato.backends.native.tiles",
    "backends/torch/weight.py imports ostinato.backends.tape.pack",
    "backends/torch/weight.py imports ostinato.backends.tape.tape_weight",
    "backends/torch/weight.py imports ostinato.backends.tape.unpack",
    "cli/bench.py imports torch",
    "cli/doctor.py imports torch",
    "cli/lab.py imports torch",
    "engine/driver.py imports torch",
    "engine/sampler.py imports torch",
    "engine/sequential.py imports torch",
    "engine/scheduler.py imports torch",
    "engine/verify.py imports torch",
    "files/checkpoint.py imports torch",
    "files/gguf.py imports torch",
    "files/safetensors.py imports torch",
    "llm.py imports torch",
    "loop/layout.py imports torch",
    "loop/mode.py imports torch",
    "loop/plan.py imports torch",
    "models/bert.py imports torch",
    "models/blocks.py imports ostinato.backends.cuda.packed",
    "models/blocks.py imports ostinato.backends.native.tiles",
    "models/blocks.py imports ostinato.backends.tape.tape_weight",
    "models/blocks.py imports ostinato.backends.torch.ops.activation",
    "models/blocks.py imports ostinato.backends.torch.table",
    "models/blocks.py imports ostinato.backends.torch.weight",
    "models/blocks.py imports torch",
    "models/builder.py imports ostinato.backends.cuda.packed",
    "models/builder.py imports ostinato.backends.tape.tape_weight",
    "models/builder.py imports ostinato.backends.torch.table",
    "models/builder.py imports torch",
    "models/random.py imports ostinato.backends.allocate",
    "models/random.py imports ostinato.backends.cuda.packed",
    "models/random.py imports ostinato.backends.native.tiles",
    "models/random.py imports ostinato.backends.torch.table",
    "models/random.py imports torch",
    "models/rebuilt.py imports ostinato.backends.cuda.packed",
    "models/rebuilt.py imports ostinato.backends.native.tiles",
    "models/rebuilt.py imports torch",
    "models/recurrent.py imports ostinato.backends.torch.table",
    "models/recurrent.py imports torch",
    "models/registry.py imports ostinato.backends.allocate",
    "models/registry.py imports ostinato.backends.torch.table",
    "models/registry.py imports torch",
    "models/rope.py imports ostinato.backends.torch.ops.rope",
    "models/rope.py imports torch",
    "models/shape.py imports ostinato.backends.torch.ops.activation",
    "models/shape.py imports ostinato.backends.torch.ops.rope",
    "models/weights.py imports ostinato.backends.allocate",
    "models/weights.py imports ostinato.backends.cuda.packed",
    "models/weights.py imports ostinato.backends.cuda.upload",
    "models/weights.py imports ostinato.backends.native.tile_weights",
    "models/weights.py imports ostinato.backends.native.tiles",
    "models/weights.py imports torch",
}


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the package they come from"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "ostinato")


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__main__.py"]


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def backend_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["ostinato", "backends"] and len(parts) > 2 and parts[2] in BACKENDS else None


def is_out_of_order(path: Path, module: str) -> bool:
    here, there = package_of(path), module.split(".")[1] if module.startswith("ostinato.") else ""
    if here == "__init__" or there not in PACKAGES:
        return False
    if PACKAGES.index(there) > PACKAGES.index(here):
        return True
    parts, backend = path.relative_to(PACKAGE).parts, backend_of(module)
    return here == "backends" and backend is not None and backend not in (parts[1], *BACKENDS.get(parts[1], ()))


def out_of_order() -> set[str]:
    found = set()
    for path in sources():
        name = path.relative_to(PACKAGE).as_posix()
        for module in imports(path):
            if is_out_of_order(path, module):
                found.add(f"{name} imports {module}")
            if module.split(".")[0] == "torch" and package_of(path) not in WITH_TORCH:
                found.add(f"{name} imports torch")
    return found


def test_every_file_is_in_a_package_of_the_map() -> None:
    assert {package_of(path) for path in sources()} - {"__init__"} == set(PACKAGES)


def test_a_package_imports_only_those_above_it_and_torch_only_where_the_map_says_so() -> None:
    found = out_of_order()
    assert found - NOT_YET == set(), "out of order"
    assert NOT_YET - found == set(), "in order by now: take these lines out of NOT_YET"


def test_nothing_imports_the_command_line() -> None:
    outside = [path for path in sources() if package_of(path) != "cli"]
    assert not [path for path in outside if any(module.startswith("ostinato.cli") for module in imports(path))]
