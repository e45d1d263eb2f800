"""docs/api.md has every public name, and is what docs/write_api.py writes today."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import stretto

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_api", DOCS / "write_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    assert (DOCS / "api.md").read_text() == generator.page(), "run PYTHONPATH=src python docs/write_api.py"


@pytest.mark.parametrize("name", stretto.__all__)
def test_every_public_name_has_an_entry_that_says_what_it_is(name: str) -> None:
    page = (DOCS / "api.md").read_text()
    long = rf"^### {name}\n\n```\n(?:with )?{name}\b.*\n```\n\n(?P<said>.+)$"
    short = rf"^- `{name}\b[^`]*`: (?P<said>.+)$"
    entries = [*re.finditer(long, page, re.MULTILINE), *re.finditer(short, page, re.MULTILINE)]
    assert len(entries) == 1
    assert re.match(r"[^ ].*[.:]( |$)", entries[0]["said"]), f"stretto.{name} has no first sentence"


def test_a_new_name_needs_no_change_of_the_generator(generator: ModuleType) -> None:
    assert generator.group_of("new", "stretto.distributing").title == "Train"
    assert generator.group_of("new", "stretto.compress.new").title == "Codecs"
    assert generator.group_of("new", "stretto.collective_api").title == "Collectives"
    assert generator.group_of("new", "stretto.new").title == "More"
