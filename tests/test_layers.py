"""The import order of the packages, as docs/walk.md draws it: a package imports those above it and none below."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ostinato

PACKAGE = Path(ostinato.__file__).parent
PACKAGES = (
    "errors",
    "extras",
    "processes",
    "other_engines",
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
    "calls",
    "decode_session",
    "llm",
    "async_llm",
    "serve",
    "scale",
    "lab",
    "cli",
)
# Inside backends/, a backend imports itself, the modules beside the folders, and those named here.
BACKENDS: dict[str, set[str]] = {"torch": set(), "native": set(), "cuda": {"torch"}, "tape": {"cuda", "torch"}}
# May import torch: the backends that compute with it, the cell memory kind, and the laboratory's part for a GPU.
WITH_TORCH = (
    "backends/cuda/",
    "backends/tape/",
    "backends/torch/",
    "decoder/cells/",
    "lab/gpu.py",
    "lab/gpu_time.py",
    "lab/profile.py",
)
# Import modules of those at their head; or Ray, which is an extra.
OVER_TORCH = ("engine/verify.py", "lab/tape.py", "scale/deployment.py", "scale/router.py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, at the top or inside a function."""
    for node in ast.walk(tree_of(path)):
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
            if module.split(".")[0] == "torch" and not name.startswith(WITH_TORCH):
                found.add(f"{name} imports torch")
    return found


def test_every_file_is_in_a_package_of_the_map() -> None:
    assert {package_of(path) for path in sources()} - {"__init__"} == set(PACKAGES)


@pytest.mark.slow
def test_a_package_imports_only_those_above_it_and_torch_only_where_the_map_says_so() -> None:
    assert out_of_order() == set()


@pytest.mark.slow
def test_what_needs_no_torch_is_imported_where_there_is_none() -> None:
    """In a process of its own, in which importing torch fails: whatever they import in turn does without it too."""
    paths = (path.relative_to(PACKAGE) for path in sources())
    free = [path for path in paths if not path.as_posix().startswith((*WITH_TORCH, *OVER_TORCH))]
    names = (".".join(("ostinato", *path.with_suffix("").parts)) for path in free)
    modules = {name.removesuffix(".__init__") for name in names}
    script = f"""
import importlib, sys
sys.modules["torch"] = None
for name in {sorted(modules)}:
    try:
        importlib.import_module(name)
    except ImportError:
        print(name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


@pytest.mark.slow
def test_nothing_imports_the_command_line() -> None:
    outside = [path for path in sources() if package_of(path) != "cli"]
    assert not [path for path in outside if any(module.startswith("ostinato.cli") for module in imports(path))]


def type_names(path: Path) -> Iterator[str]:
    """The classes and type aliases that a file defines; flags of commands and type variables are neither."""
    tree = tree_of(path)
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            made = ast.unparse(node.value)
            is_type = isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper()
            if is_type and not made.startswith(("Annotated[", "TypeVar(")):
                yield ast.unparse(target)


@pytest.mark.slow
def test_a_type_has_a_name_of_its_own() -> None:
    found = Counter(name for path in sources() for name in type_names(path))
    assert [name for name, n in found.items() if n > 1] == []
