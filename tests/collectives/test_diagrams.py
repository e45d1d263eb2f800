"""Pictures are made from the plans, show all messages, and those in the docs are up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from plan_pictures import as_svg

from stretto.collectives.catalogue import CATALOGUE, Entry
from stretto.collectives.plan import Send
from stretto.collectives.ring import ring
from stretto.collectives.round_robin import round_robin
from stretto.testing.diagrams import as_text

DOCS = Path(__file__).resolve().parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_collectives", DOCS / "draw_collectives.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_of_a_ring_says_who_does_what_in_which_step() -> None:
    assert as_text(ring, 3) == (
        "step  rank 0       rank 1       rank 2\n"
        "0     >1[0] +2[2]  >2[1] +0[0]  >0[2] +1[1]\n"
        "1     >1[2] +2[1]  >2[0] +0[2]  >0[1] +1[0]\n"
        "2     >1[1] =2[0]  >2[2] =0[1]  >0[0] =1[2]\n"
        "3     >1[0] =2[2]  >2[1] =0[0]  >0[2] =1[1]"
    )


def test_local_work_shows_in_the_text() -> None:
    assert as_text(round_robin, 2).splitlines()[1] == "0     >1 W=D +1 D=W  >0 =0 W+=D D=W"


def test_a_job_of_one_is_drawn_as_a_header_only() -> None:
    assert as_text(ring, 1) == "step  rank 0"
    ElementTree.fromstring(as_svg(ring, 1))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("entry", list(CATALOGUE.values()), ids=lambda entry: f"{entry.kind.value}-{entry.name}")
def test_a_picture_is_well_formed_and_has_one_arrow_per_message(entry: Entry, size: int) -> None:
    maker = entry.bind(group=2)
    root = ElementTree.fromstring(as_svg(maker, size))
    arrows = [path for path in root.iter(f"{SVG}path") if path.get("marker-end") and path.get("fill") == "none"]
    messages = sum(isinstance(operation, Send) for rank in range(size) for operation in maker(rank, size).operations)
    assert len(arrows) == messages > 0


def test_the_pictures_in_the_docs_are_those_of_the_plans() -> None:
    drawn = generator().pictures()
    assert {path.name for path in (DOCS / "pictures").glob("*.svg")} == set(drawn)
    for name, svg in drawn.items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == svg, f"run docs/draw_collectives.py: {name}"


def test_the_table_in_the_docs_is_what_the_code_computes() -> None:
    module, page = generator(), (DOCS / "collectives.md").read_text(encoding="utf-8")
    written = page.split(module.BEGIN)[1].split(module.END)[0].strip()
    assert written == module.table(), "run docs/draw_collectives.py"


def test_the_docs_show_every_algorithm_its_aliases_and_its_picture() -> None:
    page = (DOCS / "collectives.md").read_text(encoding="utf-8")
    for entry in CATALOGUE.values():
        assert f"pictures/{entry.kind.value}-{entry.name}.svg" in page
        assert all(f"`{name}`" in page for name in (entry.name, *entry.aliases))
