"""docs/scheduling.md: its picture is what the simulator says, and no schedule or recipe of this kind is left out."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args
from xml.etree import ElementTree

import pytest

from stretto import recipes
from stretto.strategy import Schedule

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "scheduling.md").read_text(encoding="utf-8")


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_schedules", DOCS / "draw_schedules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_in_the_docs_is_well_formed_and_up_to_date() -> None:
    drawn = generator().pictures()
    assert {path.name for path in generator().FOLDER.glob("*.svg")} == set(drawn)
    for name, svg in drawn.items():
        ElementTree.fromstring(svg)
        assert (generator().FOLDER / name).read_text(encoding="utf-8") == svg, f"run docs/draw_schedules.py: {name}"
        assert f"pictures/schedules/{name}" in PAGE


def test_the_picture_shows_a_step_at_rho_1_that_is_shorter_across_the_barrier() -> None:
    with_barrier, across = (panel.simulated for panel in generator().panels())
    assert with_barrier.rho == pytest.approx(1.0) and across.rho == pytest.approx(1.0)
    assert across.iteration_s < with_barrier.iteration_s / 1.2


def test_every_schedule_and_every_recipe_that_names_one_is_there() -> None:
    for schedule in get_args(Schedule):
        assert f"`{schedule.__name__}(" in PAGE
    for name in ("ddp", "data_parallel", "horovod", "mg_wfbp", "p3", "bytescheduler", "tictac", "caramel"):
        assert name in recipes.by_name() and f"`{name}()`" in PAGE
