"""Writes what docs/collectives.md shows: one picture per algorithm, and the table of costs between its two markers.

    PYTHONPATH=src python docs/draw_collectives.py

Both are made from the plans; a test fails when they are out of date.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from closed_forms import FORMULAS, HIERARCHICAL_TEXT
from plan_pictures import as_svg

from stretto.collectives.catalogue import CATALOGUE, Entry
from stretto.collectives.plan import Kind
from stretto.plan.costs import plan_cost

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- table: written by draw_collectives.py -->", "<!-- end of table -->"
SIZES = (6, 8)
GROUP = 4  # ranks per host for `hierarchical`: 8 ranks are two even hosts, 6 ranks are not
DRAWN_SIZE = {"torus": 6, "hierarchical": 6, "halving_doubling": 4, "butterfly": 5, "double_binary_tree": 6}
DRAWN_GROUP = 3


def pictures() -> dict[str, str]:
    """File name -> SVG, for every algorithm of the catalogue."""
    return {
        f"{entry.kind.value}-{entry.name}.svg": as_svg(entry.bind(group=DRAWN_GROUP), _drawn_size(entry))
        for entry in CATALOGUE.values()
    }


def _drawn_size(entry: Entry) -> int:
    return DRAWN_SIZE.get(entry.name, 4) if entry.kind is Kind.ALL_REDUCE else 4


def table() -> str:
    """The costs of all algorithms, as Markdown."""
    heads = [f"P={size}: rounds | sent | added" for size in SIZES]
    lines = [f"| kind | algorithm | {' | '.join(heads)} | time |", "|---" * (3 + 3 * len(SIZES)) + "|"]
    for entry in CATALOGUE.values():
        cells = [entry.kind.value, f"`{entry.name}`"]
        for size in SIZES:
            counted = plan_cost(entry.kind, entry.name, size, group=GROUP if entry.with_group else 1)
            cells += [str(counted.num_rounds), _parts(counted.sent), _parts(counted.added)]
        cells.append(HIERARCHICAL_TEXT if entry.with_group else FORMULAS[entry.kind, entry.name].text)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _parts(fraction: Fraction) -> str:
    """A number of vectors: 7/4 is "7/4 m"."""
    return "0" if fraction == 0 else "m" if fraction == 1 else f"{fraction} m"


def main() -> None:
    (HERE / "pictures").mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (HERE / "pictures" / name).write_text(svg, encoding="utf-8")
    page = HERE / "collectives.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
