"""The layers of docs/design.md: every module is in the list, and imports nothing that stands above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "stretto"
UNITS = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
UNITS -= {"__init__", "__pycache__", "py.typed"}


def layers() -> list[list[str]]:
    """The names at the beginning of each line, up to the first wide gap."""
    text = (ROOT / "docs" / "design.md").read_text()
    block = text.split("## Layers")[1].split("```")[1]
    lines = (re.split(r"\s{2,}", line)[0] for line in block.strip().splitlines() if not line.startswith(" "))
    return [[name.strip().removesuffix("/").removesuffix(".py") for name in line.split(",")] for line in lines]


def imports(path: Path) -> Iterator[str]:
    """The modules and packages directly under `stretto` that a file imports, anywhere but for the type checker alone."""
    tree = ast.parse(path.read_text())
    unread = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in unread:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "stretto":
            yield from (alias.name for alias in node.names if alias.name in UNITS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stretto."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("stretto."))


def test_every_module_is_in_the_list_once() -> None:
    names = [name for layer in layers() for name in layer]
    assert sorted(names) == sorted(UNITS)


def test_every_import_points_down() -> None:
    height = {name: -number for number, layer in enumerate(layers()) for name in layer}
    upwards, seen = [], 0
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for there in imports(path):
            seen += 1
            if height[there] > height[here]:
                upwards.append(f"{path.relative_to(ROOT)} imports {there}")
    assert not upwards and seen > 300
