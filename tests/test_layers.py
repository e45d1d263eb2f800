"""The layers of docs/design.md: every module is in the list, and imports nothing that stands above it.

Also, over all sources: a class name means one class, and what texts refer to is there.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
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


def classes() -> Iterator[ast.ClassDef]:
    """Those at the top level of a module."""
    for path in PACKAGE.rglob("*.py"):
        yield from (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))


def test_a_class_name_means_one_class() -> None:
    count = Counter(node.name for node in classes())
    assert [name for name, times in count.items() if times > 1] == [] and len(count) > 300


def test_a_member_that_a_text_names_is_one_of_its_class() -> None:
    """`Class.member` in backticks, its own or of a base class that is ours too."""
    members: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, list[str]] = {}
    for node in classes():
        bases[node.name] = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
        for inner in ast.walk(node):
            match inner:
                case ast.FunctionDef(name=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                    members[node.name].add(name)

    def has(name: str, member: str) -> bool:
        return member in members[name] or any(has(base, member) for base in bases.get(name, ()))

    wrong, seen = [], 0
    for path in PACKAGE.rglob("*.py"):
        for name, member in re.findall(r"`([A-Z]\w+)\.(\w+)", path.read_text()):
            if name in bases:
                seen += 1
                if not has(name, member):
                    wrong.append(f"{path.relative_to(ROOT)}: {name}.{member}")
    assert not wrong and seen > 10


def test_the_text_of_launching_names_its_modules() -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / "launching" / "__init__.py").read_text())) or ""
    modules = {path.stem for path in (PACKAGE / "launching").glob("*.py")} - {"__init__"}
    assert modules - set(re.findall(r"\w+", text)) == set()
