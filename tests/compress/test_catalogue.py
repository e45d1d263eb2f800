"""A codec is one file and one line of `compress/catalogue.py`; if it is missing anywhere else, this says where."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import stretto
from laws.strategies import COMPRESSIONS as LAWS
from stretto.bench.compress_settings import DEFAULT_CODECS
from stretto.compress.catalogue import COMPRESSIONS, classes
from stretto.compress.codec import Compression
from stretto.strategy import ANSWERS

ROOT = Path(__file__).parents[2]
INNER = {"dense_momentum", "codec", "levels", "sixteen_bits"}  # compressions of other compressions, and what they are made of
SENDS_WHAT_OTHERS_WRITE = {"NoCompression", "ErrorFeedback", "EF21", "WarmUp", "ByParameter", "OneBitAdam"}
TESTED_WITH_OTHERS = {"NoCompression", "ErrorFeedback", "WarmUp"}
CHOOSES = {"NoCompression", "ByParameter", "WarmUp"}


def missing_in(name: str, module: str) -> list[str]:
    """The places that a compression must be in besides its file and the catalogue."""
    page, names = (ROOT / "docs" / "compression.md").read_text(), (ROOT / "src" / "stretto" / "__init__.py").read_text()
    formats = " ".join(re.findall(r"^### (.+)$", page.split("## Wire formats")[1].split("## A codec of your own")[0], re.M))
    there = {
        "src/stretto/__init__.py, an import for type checkers": f"from stretto.compress.{module} import {name} as {name}"
        in names,
        "tests/laws/strategies.py, COMPRESSIONS: so that all laws are asked of it": any(f"{name}(" in repr(one) for one in LAWS),
        f"tests/compress/test_{module}.py: a test file of its own": name in TESTED_WITH_OTHERS
        or (ROOT / "tests" / "compress" / f"test_{module}.py").is_file(),
        "docs/compression.md, a row in one of the tables": bool(re.search(rf"^\| `{name}\(", page, re.M)),
        "docs/compression.md, a heading under Wire formats": name in SENDS_WHAT_OTHERS_WRITE or f"`{name}`" in formats,
        "docs/api.md: run docs/write_api.py": f"- `{name}(" in (ROOT / "docs" / "api.md").read_text(),
        "src/stretto/bench/compress_settings.py, DEFAULT_CODECS": name in CHOOSES
        or any(word.startswith(f"{name}(") for word in DEFAULT_CODECS),
    }
    return [place for place, found in there.items() if not found]


@pytest.mark.parametrize(("name", "module"), COMPRESSIONS.items())
def test_a_compression_is_in_every_place(name: str, module: str) -> None:
    assert missing_in(name, module) == [], f"{name} is missing in these places"


def test_a_new_one_is_told_all_places_by_name() -> None:
    assert len(missing_in("Int9", "int9")) == 7


def test_every_compression_that_has_a_file_is_in_the_catalogue() -> None:
    """Frozen dataclasses without an underscore, in files that are not for the others."""
    found = set()
    for path in (ROOT / "src" / "stretto" / "compress").glob("*.py"):
        named = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
        module = import_module(f"stretto.compress.{path.stem}") if path.stem not in INNER else None
        found |= {name for name in named if module and issubclass(getattr(module, name), Compression)}

    assert found == set(COMPRESSIONS), "add it to src/stretto/compress/catalogue.py"


def test_public_names_and_answers_are_those_of_the_catalogue() -> None:
    assert [kind.__name__ for kind in classes()] == list(COMPRESSIONS)
    assert ANSWERS["compress"] == classes()
    assert all(getattr(stretto, kind.__name__) is kind for kind in classes())
