"""The table of systems names only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import stretto
from stretto.collectives import catalogue
from stretto.collectives.plan import Kind

PAGE = (Path(__file__).parents[1] / "docs" / "systems.md").read_text()
ROWS = [line.split("|") for line in PAGE.splitlines() if line.startswith("| ")]
TODAY = [row[2] for row in ROWS if len(row) == 5]
STRATEGIES = [text for cell in TODAY for text in re.findall(r"`(Strategy\(.*?\)|\w+\(\))`", cell)]


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
