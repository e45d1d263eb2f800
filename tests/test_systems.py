"""The table of systems names only what exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import stretto
from stretto import recipes
from stretto.collectives import catalogue
from stretto.collectives.plan import Kind

PAGE = (Path(__file__).parents[1] / "docs" / "systems.md").read_text()
ROWS = [line.split("|") for line in PAGE.splitlines() if line.startswith("| ")]
TODAY = [row[2] for row in ROWS if len(row) == 5]
STRATEGIES = [text for cell in TODAY for text in re.findall(r"`(\w+\([^`]*\))`", cell)]


@pytest.mark.parametrize("text", sorted(set(STRATEGIES)))
def test_a_strategy_of_the_table_exists(text: str) -> None:
    strategy = stretto.parse(text)

    assert stretto.parse(repr(strategy)) == strategy


def test_the_table_was_read() -> None:
    assert {"ddp()", "horovod()", "data_parallel()", "Strategy(schedule=WaitFree())"} < set(STRATEGIES)


def test_algorithms_that_are_only_named_exist() -> None:
    named = {name for cell in TODAY for name in re.findall(r'`"(\w+)"`', cell)}

    assert {"torus", "master_worker"} < named
    assert named - {"nccl"} <= set(catalogue.names(Kind.ALL_REDUCE))


def test_no_recipe_is_left_out() -> None:
    for name in stretto.recipes.by_name():
        assert f"`{name}()`" in PAGE
    own = {name for name, each in inspect.getmembers(recipes, inspect.isfunction) if each.__module__ == recipes.__name__}
    for name in {name for name in own if not name.startswith("_")} - recipes.by_name().keys() - {"by_name"}:
        assert f"recipes.{name}()" in " ".join(TODAY), "layouts and pipelines"


@pytest.mark.parametrize("text", sorted({text for row in ROWS for text in re.findall(r"`(Strategy\([^`]*\))`", row[-2])}))
def test_a_strategy_that_is_named_beside_the_table_exists(text: str) -> None:
    assert stretto.parse(repr(stretto.parse(text))) == stretto.parse(text)


def test_nothing_that_has_a_row_is_called_missing() -> None:
    missing = [(row, name) for row in ROWS if len(row) == 5 for name in named_as_missing(row[3])]
    assert "Adasum" in {name for _, name in missing}, "they are read"
    for row, name in missing:
        elsewhere = [other[1] for other in ROWS if len(other) == 5 and other is not row and re.search(rf"\b{name}\b", other[1])]
        assert not elsewhere, f"{row[1]}: {name}"


def named_as_missing(cell: str) -> list[str]:
    """What is said to be "not yet" or "not here" by a name, where it is not described."""
    after = re.findall(r"Not (?:yet|here): ([^.;]+)", cell)
    before = re.findall(r"(?:^|[.;]) ([^.;:]+): \[?not (?:yet|here)", cell)
    names = [name.strip() for names in (*after, *before) for name in names.split(",")]
    return [name for name in names if len(name.split()) <= 2]
