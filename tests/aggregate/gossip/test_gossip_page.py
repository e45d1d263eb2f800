"""docs/gossip.md: its picture and its table are what the graphs say, and no graph or recipe is left out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

import stretto
from stretto.aggregate.gossip import GRAPHS, Gossip

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "gossip.md").read_text(encoding="utf-8")


def generator(name: str = "draw_gossip") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_well_formed_and_up_to_date() -> None:
    drawn = generator().pictures()
    assert {path.name for path in generator().FOLDER.glob("*.svg")} == set(drawn)
    for name, svg in drawn.items():
        ElementTree.fromstring(svg)
        assert (generator().FOLDER / name).read_text(encoding="utf-8") == svg, "run docs/draw_gossip.py"
        assert f"pictures/gossip/{name}" in PAGE


def test_the_table_is_what_the_graphs_say() -> None:
    table = PAGE.split(generator().BEGIN)[1].split(generator().END)[0].strip()
    assert table == generator().table(), "run docs/draw_gossip.py"


def test_no_graph_and_no_recipe_is_left_out() -> None:
    for graph in GRAPHS:
        assert f"`{graph.__name__}(" in PAGE
    to_say: dict[str, dict[str, Any]] = {"one_bit_adam": {"warm_up": 10}, "post_local_sgd": {"start_after": 10}}
    made = {name: recipe(**to_say.get(name, {})) for name, recipe in stretto.recipes.by_name().items()}
    gossiping = {name for name, strategy in made.items() if isinstance(strategy.aggregate, Gossip)}
    assert {"dpsgd", "adpsgd", "noloco"} < gossiping
    first_cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("|")]
    for name in gossiping:
        assert any(f"`{name}(" in cell for cell in first_cells), name


def pull_cells() -> list[tuple[str, float, str]]:
    """Of the table of pulls on the page: codec, pull, and what it says."""
    lines = PAGE.split(generator("tabulate_pull").BEGIN)[1].split(generator("tabulate_pull").END)[0].strip().splitlines()
    pulls, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---"))
    return [(row[0].strip("`"), float(pull), said) for row in rows for pull, said in zip(pulls[1:], row[1:], strict=True)]


QUICK = (("TopK(0.05)", 0.2), ("Sign()", 0.5))


@pytest.mark.parametrize(
    ("codec", "pull", "said"),
    [pytest.param(*cell, marks=[] if cell[:2] in QUICK else [pytest.mark.slow]) for cell in pull_cells()],
)
def test_the_table_of_pulls_is_what_its_script_finds(codec: str, pull: float, said: str) -> None:
    script = generator("tabulate_pull")
    found = script.distance(script.CODECS[codec], pull)
    if said == "grows":
        assert found > script.GROWS
    else:  # where workers part, the last bits of an addition decide how far
        assert found == pytest.approx(float(said), rel=0.05 if float(said) < 30 else 0.5)
