"""Writes what docs/gossip.md shows: the graphs as a picture, and the table of neighbours, bytes and gaps between its markers.

    PYTHONPATH=src python docs/draw_gossip.py

Both are made from the graphs themselves; a test fails when they are out of date.
"""

from __future__ import annotations

from math import cos, hypot, pi, sin
from pathlib import Path

from plan_pictures import _FAINT, _INK, _text

from stretto.aggregate.gossip import Complete, Exponential, OnePeerExponential, RandomMatching, Ring, Star, Torus
from stretto.aggregate.gossip.graph import MixingGraph

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "pictures" / "gossip"
BEGIN, END = "<!-- table: written by draw_gossip.py -->", "<!-- end of table -->"
GRAPHS: tuple[MixingGraph, ...] = (
    Ring(), Torus(), Star(), Complete(), Exponential(), OnePeerExponential(), RandomMatching(),
)  # fmt: skip
SIZES = (4, 8, 16, 64)
DRAWN_SIZE = 8
_PANEL, _RADIUS, _TOP, _COLUMNS = 200, 66, 70, 4
_STEPS = ("#d9730d", "#2f80c9", "#4c9a52")  # of the first, second and third step


def pictures() -> dict[str, str]:
    return {"graphs.svg": _picture()}


def _picture() -> str:
    rows = -(-len(GRAPHS) // _COLUMNS)
    width, height = _COLUMNS * _PANEL, rows * (_PANEL + 20)
    body = [
        part
        for number, graph in enumerate(GRAPHS)
        for part in _panel(graph, (number % _COLUMNS) * _PANEL, (number // _COLUMNS) * (_PANEL + 20))
    ]
    heads = "".join(
        f"<marker id='step{number}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='6' markerHeight='6' orient='auto'>"
        f"<path d='M0,0.8 L8,4 L0,7.2 z' fill='{colour}'/></marker>"
        for number, colour in enumerate(_STEPS)
    )
    title = f"graphs of gossip, {DRAWN_SIZE} workers"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
            f"role='img' aria-label='{title}'>",
            f"<title>{title}</title>",
            f"<defs>{heads}</defs>",
            *body,
            "</svg>\n",
        ]
    )


def _panel(graph: MixingGraph, left: float, top: float) -> list[str]:
    name = repr(graph).split("(")[0]
    middle = left + _PANEL / 2
    period = graph.period(DRAWN_SIZE) or 2
    parts = [
        _text(middle, top + 22, name, size=13, bold=True),
        _text(middle, top + 39, f"gap {graph.spectral_gap(DRAWN_SIZE):.2g}", size=11),
    ]
    drawn: set[tuple[int, int]] = set()
    for step in range(period):
        for sender, receiver in graph.arcs(DRAWN_SIZE, step):
            if graph.directed or (receiver, sender) not in drawn or period > 1:
                drawn.add((sender, receiver))
                if graph.directed or sender < receiver:
                    parts.append(_line(middle, top, sender, receiver, step if period > 1 else -1, graph.directed))
    for rank in range(DRAWN_SIZE):
        x, y = _place(middle, top, rank)
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.5' fill='{_INK}'/>")
    return parts


def _place(middle: float, top: float, rank: int) -> tuple[float, float]:
    angle = 2 * pi * rank / DRAWN_SIZE - pi / 2
    return middle + _RADIUS * cos(angle), top + _TOP + 54 + _RADIUS * sin(angle)


def _line(middle: float, top: float, sender: int, receiver: int, step: int, directed: bool) -> str:
    (x1, y1), (x2, y2) = _place(middle, top, sender), _place(middle, top, receiver)
    length = hypot(x2 - x1, y2 - y1)
    back = 7 / length if directed else 0.0
    x2, y2 = x2 - back * (x2 - x1), y2 - back * (y2 - y1)
    colour = _FAINT if step < 0 and not directed else _STEPS[max(step, 0)]
    head = f" marker-end='url(#step{max(step, 0)})'" if directed else ""
    return f"<path d='M{x1:.1f},{y1:.1f} L{x2:.1f},{y2:.1f}' stroke='{colour}' stroke-width='1.4' fill='none'{head}/>"


def table() -> str:
    """What a worker sends in a step, in models, and the gap, for each graph."""
    heads = " | ".join(f"P={size}: models sent | gap" for size in SIZES)
    lines = [f"| graph | {heads} |", "|---" * (1 + 2 * len(SIZES)) + "|"]
    for graph in GRAPHS:
        cells = [f"`{repr(graph).split('(')[0]}()`"]
        for size in SIZES:
            steps = range(graph.period(size) or 1)
            degrees = {len(graph.targets(rank, size, step)) for rank in range(size) for step in steps}
            sent = str(max(degrees)) if len(degrees) == 1 else f"{min(degrees)} to {max(degrees)}"
            cells += [sent, f"{graph.spectral_gap(size):.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
    page = HERE / "gossip.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
