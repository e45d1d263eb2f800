"""docs/compression.md: its pictures and its table are those of the code, and nothing that can be written is left out."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from compress.together import Workers
from stretto import recipes
from stretto.compress.codec import Compression
from stretto.compress.demo import DeMo
from stretto.compress.dgc import DGC
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.sign import Sign
from stretto.compress.state import Section
from stretto.compress.top_k import TopK

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "compression.md").read_text(encoding="utf-8")
SIZE = 4
SIDE = 256


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_compression", DOCS / "draw_compression.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_in_the_docs_are_well_formed_and_up_to_date() -> None:
    drawn = generator().pictures()
    assert {path.name for path in generator().FOLDER.glob("*.svg")} == set(drawn)
    for name, svg in drawn.items():
        ElementTree.fromstring(svg)
        assert (generator().FOLDER / name).read_text(encoding="utf-8") == svg, f"run docs/draw_compression.py: {name}"
        assert f"pictures/compression/{name}" in PAGE


def test_the_table_of_bytes_is_what_the_code_promises() -> None:
    written = PAGE.split(generator().BEGIN)[1].split(generator().END)[0].strip()
    assert written == generator().table(), "run docs/draw_compression.py"


def test_every_recipe_that_compresses_is_named() -> None:
    of_others = {"ddp", "data_parallel", "horovod", "mg_wfbp", "p3", "bytescheduler", "tictac", "caramel"}
    of_others |= {"downpour", "ssp", "softsync", "backup_workers", "mxnet_mpi", "hogwild", "byteps", "wagma", "moshpit"}
    of_others |= {"dpsgd", "adpsgd", "sgp", "overlap_sgp", "choco_sgd", "noloco"}
    of_others |= {"local_sgd", "post_local_sgd", "slowmo", "diloco", "zero", "zero_r", "hypar_flow"}
    for name in set(recipes.by_name()) - of_others:
        assert f"`recipes.{name}(" in PAGE


@pytest.mark.parametrize(
    ("compression", "documented"),
    [
        (Sign(), 0.0),
        (PowerSGD(4), 4 * 4 / SIDE),
        (ErrorFeedback(TopK(0.01)), 8.0),
        (ErrorFeedback(Sign()), 8 + 8 / SIZE),
        (EF21(TopK(0.01)), 16.0),
        (EF21(Sign(), momentum=0.5), 24 + 8 / SIZE),
        (DGC(0.01, warm_up=()), 16.0),
        (DeMo(), 8.0),
        (OneBitAdam(1), 24 + 8 / SIZE),
    ],
    ids=repr,
)
def test_memory_per_parameter_is_what_the_table_says(compression: Compression, documented: float) -> None:
    """Between rounds, on the worker that keeps most."""
    workers = Workers(compression, [("weight", (SIDE, SIDE))], SIZE)
    for _ in range(3):
        workers.round([torch.randn(SIDE * SIDE) for _ in range(SIZE)])
    most = max(_held(state.own) + _held(state.shared) for state in workers.states)
    assert most / SIDE**2 == documented


def _held(section: Section) -> int:
    kept = (section._flat, section._spare, section._by_name)
    return sum(value.numel() * value.element_size() for values in kept for value in values.values())
