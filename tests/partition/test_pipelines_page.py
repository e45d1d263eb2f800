"""docs/pipelines.md: its picture is what plans say, its recipes exist, and no schedule is left out."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import stretto
from partition_models import chain, made
from stretto import recipes
from stretto.job import Job
from stretto.partition.schedules import KNOWN
from stretto.testing import run_jobs

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "pipelines.md").read_text(encoding="utf-8")


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_pipelines", DOCS / "draw_pipelines.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_well_formed_and_up_to_date() -> None:
    drawn = generator().pictures()
    assert {path.name for path in generator().FOLDER.glob("*.svg")} == set(drawn)
    for name, svg in drawn.items():
        ElementTree.fromstring(svg)
        assert (generator().FOLDER / name).read_text(encoding="utf-8") == svg, f"run docs/draw_pipelines.py: {name}"
        assert f"pictures/pipelines/{name}" in PAGE


def test_no_schedule_is_left_out() -> None:
    assert all(f"`{name}" in PAGE for name in KNOWN)


def test_recipes_are_what_pipeline_takes() -> None:
    def loop(job: Job) -> list[str]:
        return [
            repr(stretto.pipeline(made(chain), 2, 2, **recipe()).schedule) for recipe in (recipes.gpipe, recipes.pipedream_flush)
        ]

    assert run_jobs(2, loop) == [["GPipe()", "OneForwardOneBackward(eager=0)"]] * 2
