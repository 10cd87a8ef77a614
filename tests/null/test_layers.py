"""The rooms form one line: a module imports only its own room and rooms to its left.  Public names say what they do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "sparsegen"
ORDER = [
    "errors",
    "spec",
    "schedule",
    "codegen",
    "launch",
    "tune",
    "artifact",
    "runtime",
    "nn",
    "report",
    "bench",
    "cli",
]
# Named here with the reason: the look-up of the data folders knows no room but errors; every room may ask it.
OUTSIDE = {"paths"}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_data" not in p.parts)
IDS = [str(p.relative_to(PACKAGE)) for p in MODULES]


def room_of(module: str) -> str | None:
    """Room of a dotted module name inside the package; None for the package itself and other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "sparsegen" and len(parts) > 1 else None


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the room's name"
            module = node.module or ""
            if module == "sparsegen":
                names = (a.name for a in node.names if a.name != "__version__")
                yield from ((node.lineno, f"sparsegen.{name}") for name in names)
            yield node.lineno, module


def allowed(importer: str, imported: str) -> bool:
    if imported in OUTSIDE or imported == importer:
        return True
    if importer in OUTSIDE:
        return imported == "errors"
    return (
        importer in ORDER and imported in ORDER and (ORDER.index(imported) < ORDER.index(importer))
    )


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_imports_point_left(path: Path) -> None:
    place = path.relative_to(PACKAGE)
    room = place.parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    wrong = [
        f"{place}:{line}: {room} imports {module}"
        for line, module in imports(ast.parse(path.read_text(encoding="utf-8")))
        if (other := room_of(module)) and not allowed(room, other)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_known_room() -> None:
    rooms = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in MODULES}
    assert rooms - {"__init__", "__main__"} <= set(ORDER) | OUTSIDE


def test_the_layer_rule_itself() -> None:
    assert allowed("schedule", "spec") and not allowed("spec", "schedule")
    assert not allowed("runtime", "cli") and allowed("tune", "paths")
    tree = ast.parse("from sparsegen import cli\nimport sparsegen.tune.study")
    assert {room_of(m) for _, m in imports(tree)} == {"cli", None, "tune"}


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in tree.body:
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if named and not node.name.startswith("_"):
            yield node


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path.name} has no module docstring"
    said = ast.get_docstring(tree) or ""
    bare = [
        f"line {node.lineno}: {node.name}"
        for node in public_definitions(tree)
        # a grammar of one-line nodes may describe them all at the top of its file
        if not ast.get_docstring(node) and not re.search(rf"\b{node.name}\b", said)
    ]
    assert not bare, f"{path.relative_to(PACKAGE)}: no docstring: " + "; ".join(bare)


def test_no_file_is_a_giant() -> None:
    giants = {
        str(p.relative_to(PACKAGE)): n
        for p in MODULES
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > 450
    }
    assert not giants, f"split these (aim: 150-300 lines): {giants}"


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_one_environment_variable(path: Path) -> None:
    """Only SPARSEGEN_CACHE steers us; no room invents another."""
    names = {
        n.value
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(n, ast.Constant)
        and isinstance(n.value, str)
        and re.fullmatch(r"SPARSEGEN_[A-Z_]+", n.value)
    }
    assert names <= {"SPARSEGEN_CACHE"}
