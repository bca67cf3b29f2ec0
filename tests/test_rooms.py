"""The map of rooms: who may import whom, as docs/walk.md and the design draw it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import ostinato

PACKAGE = Path(ostinato.__file__).parent
# Each room imports the rooms above it and none below.
ROOMS = (
    "errors",
    "options",
    "files",
    "text",
    "kernels",
    "models",
    "batch",
    "memory",
    "graph",
    "decoder",
    "encoder",
    "loop",
    "engine",
    "llm",
    "serve",
    "scale",
    "lab",
    "cli",
)
# The rooms that a small environment, or a quick command, uses without torch.
WITHOUT_TORCH = ("errors", "options", "text", "batch", "graph")


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room they come from"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "ostinato")


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name not in ("__main__.py",)]


def test_every_file_is_in_a_room_of_the_map() -> None:
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources()} - {"__init__"}
    assert found == set(ROOMS)


def test_a_room_imports_only_the_rooms_above_it() -> None:
    wrong = []
    for path in sources():
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for module in imports(path):
            there = room_of(module) if module.startswith("ostinato.") else here
            if there in ROOMS and ROOMS.index(there) > ROOMS.index(here):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert wrong == []


def test_rooms_without_tensors_do_not_name_torch() -> None:
    wrong = []
    for path in sources():
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if here in WITHOUT_TORCH and any(module.split(".")[0] == "torch" for module in imports(path)):
            wrong.append(str(path.relative_to(PACKAGE)))
    assert wrong == []


def test_nothing_imports_the_command_line() -> None:
    outside = [path for path in sources() if "cli" not in path.relative_to(PACKAGE).parts]
    assert not [path for path in outside if any(room_of(module) == "cli" for module in imports(path))]
