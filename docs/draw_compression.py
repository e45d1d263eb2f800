"""Writes what docs/compression.md shows: its pictures, and the table of bytes between its two markers.

    PYTHONPATH=src python docs/draw_compression.py

Bytes are those that the compressions themselves promise (`bytes_sent`), which a law holds them to on the wire. A test fails when
the page is out of date.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from stretto.compress.bfloat16 import BFloat16
from stretto.compress.codec import Compression
from stretto.compress.demo import DeMo
from stretto.compress.dgc import DGC
from stretto.compress.dynamic8 import Dynamic8
from stretto.compress.e3m0 import E3M0
from stretto.compress.float16 import Float16
from stretto.compress.int8 import Int8
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.one_bit import OneBit
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.qsgd import QSGD
from stretto.compress.random_k import RandomK
from stretto.compress.run_length import max_bytes
from stretto.compress.sign import Sign
from stretto.compress.tern_grad import TernGrad
from stretto.compress.top_k import TopK

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "pictures" / "compression"  # docs/pictures itself belongs to draw_collectives.py
BEGIN, END = "<!-- table: written by draw_compression.py -->", "<!-- end of table -->"
SIZES = (2, 4, 8, 16)
MATRIX = Layout.of([("weight", (1024, 1024))])

EXAMPLES: dict[str, Compression] = {
    "NoCompression()": NoCompression(),
    "Float16()": Float16(),
    "BFloat16()": BFloat16(),
    "Int8()": Int8(),
    "Dynamic8()": Dynamic8(),
    "E3M0()": E3M0(),
    "QSGD(bits=4)": QSGD(bits=4),
    "TernGrad()": TernGrad(),
    "OneBit()": OneBit(),
    "Sign()": Sign(),
    "TopK(0.01)": TopK(0.01),
    "TopK(0.001)": TopK(0.001),
    "DGC(0.001)": DGC(0.001),
    "DeMo()": DeMo(),
    "RandomK(0.01)": RandomK(0.01),
    "PowerSGD(4)": PowerSGD(4),
}


def bytes_of(compression: Compression, world_size: int) -> int:
    """What the busiest worker sends in a round for the matrix; of DGC at most, after its warm-up."""
    if isinstance(compression, DGC):
        blocks = MATRIX.whole()
        most = [math.ceil(compression.fraction * length) for length in blocks.lengths.tolist()]
        return (world_size - 1) * (8 + max_bytes(blocks, most))
    sent = [compression.bytes_sent(MATRIX, rank, world_size, "auto") for rank in range(world_size)]
    return max(number for number in sent if number is not None)


def table() -> str:
    """Bytes for each example and number of workers, as Markdown."""
    lines = [f"| | {' | '.join(f'P = {size}' for size in SIZES)} | less, at P = 4 |", "|---" * (len(SIZES) + 2) + "|"]
    for name, compression in EXAMPLES.items():
        sent = [bytes_of(compression, size) for size in SIZES]
        factor = bytes_of(NoCompression(), 4) / bytes_of(compression, 4)
        lines.append(f"| `{name}` | {' | '.join(f'{number:,}' for number in sent)} | {factor:.3g} x |")
    return "\n".join(lines)


# ---------------------------------------------------------------- svg

INK, FAINT, RESULT = "#80868f", "#9aa0a8", "#d9730d"  # middle tones: readable on light and on dark pages
WORKERS = ("#2f80c9", "#3d9a50", "#a05cc0", "#2aa198")
FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"


def svg(title: str, width: int, height: int, body: list[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        f"role='img' aria-label='{escape(title)}'>"
    )
    arrow = (
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0,0.8 L8,4 L0,7.2 z' fill='{INK}'/></marker></defs>"
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", arrow, *body, "</svg>\n"])


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", bold: bool = False, colour: str = INK) -> str:
    weight = " font-weight='600'" if bold else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='{size}' fill='{colour}' text-anchor='{anchor}'{weight}>"
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, colour: str, *, filled: bool = True) -> str:
    fill = f"fill='{colour}'" if filled else f"fill='none' stroke='{colour}' stroke-width='1.4'"
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' rx='1.5' {fill}/>"


def arrow(*points: tuple[float, float]) -> str:
    path = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f"<path d='M{path}' stroke='{INK}' stroke-width='1.6' fill='none' marker-end='url(#tip)'/>"


# -- the exchanges ----------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """What a worker holds: a whole payload (block None) or one block of it, of one worker or of all (whose None)."""

    lane: int
    block: int | None
    whose: int | None


class Moment(NamedTuple):
    """What each of four workers holds, and what happens next."""

    held: list[list[Piece]]
    then: str


P = 4
QUARTER, LANE, COLUMN, PANEL = 14, 9, 72, 330

MINE = [[Piece(0, None, rank)] for rank in range(P)]
MEAN = [[Piece(0, None, None)] for _ in range(P)]
EVERYBODYS = [[Piece(whose, None, whose) for whose in range(P)] for _ in range(P)]
MY_BLOCK_OF_ALL = [[Piece(whose, rank, whose) for whose in range(P)] for rank in range(P)]
MY_BLOCK_COMBINED = [[Piece(0, rank, None)] for rank in range(P)]
AFTER_HALF_A_RING = [[Piece(0, (rank + 1) % P, None)] for rank in range(P)]

PANELS: dict[str, list[Moment]] = {
    "summed: payloads add up": [Moment(MINE, "any all-reduce adds them:  2 L (P-1)/P"), Moment(MEAN, "decode")],
    "gathered: everybody gets every payload": [
        Moment(MINE, "all-gather:  L (P-1)"),
        Moment(EVERYBODYS, "each decodes P payloads and adds"),
        Moment(MEAN, ""),
    ],
    "two-phase: blocks are shared out": [
        Moment(MINE, "all-to-all, block j to worker j:  L (P-1)/P"),
        Moment(MY_BLOCK_OF_ALL, "decode, add, encode the mean anew"),
        Moment(MY_BLOCK_COMBINED, "all-gather:  L (P-1)/P"),
        Moment(MEAN, "decode"),
    ],
    "in hops: a ring that encodes at every hop": [
        Moment(MINE, "P-1 hops, each: decode, add, encode:  L (P-1)/P"),
        Moment(AFTER_HALF_A_RING, "P-1 hops, copied as they are:  L (P-1)/P"),
        Moment(MEAN, "decode"),
    ],
}


def exchanges() -> str:
    panels = [panel(title, moments) for title, moments in PANELS.items()]
    first_row = max(height for _, height in panels[:2])
    body, places = [], [(0, 0), (PANEL, 0), (0, first_row), (PANEL, first_row)]
    for (parts, _), (x, y) in zip(panels, places, strict=True):
        body += [f"<g transform='translate({x},{y})'>", *parts, "</g>"]
    height = first_row + max(height for _, height in panels[2:])
    colours = [(f"worker {rank}'s", colour) for rank, colour in enumerate(WORKERS)] + [("of all workers", RESULT)]
    for index, (words, colour) in enumerate(colours):
        body += [box(14 + 110 * index, height + 2, 10, 10, colour), text(29 + 110 * index, height + 11, words, size=11)]
    return svg("How payloads meet: four workers, a payload of L bytes each", 2 * PANEL, height + 22, body)


def panel(title: str, moments: list[Moment]) -> tuple[list[str], int]:
    """The drawing and its height."""
    parts, y = [text(14, 20, title, size=13, bold=True)], 38
    parts += [text(14 + rank * COLUMN, y, f"worker {rank}", size=10) for rank in range(P)]
    y += 8
    for held, then in moments:
        lanes = 1 + max(piece.lane for pieces in held for piece in pieces)
        parts += [draw_piece(piece, 14 + rank * COLUMN, y) for rank, pieces in enumerate(held) for piece in pieces]
        y += lanes * LANE + 8
        if then:
            parts += [arrow((22, y - 3), (22, y + 13)), text(32, y + 9, then, size=11)]
            y += 22
    return parts, y + 10


def draw_piece(piece: Piece, x: float, y: float) -> str:
    colour = RESULT if piece.whose is None else WORKERS[piece.whose]
    first, count = (0, P) if piece.block is None else (piece.block, 1)
    blocks = [
        box(x + QUARTER * block, y + LANE * piece.lane, QUARTER - 1.5, LANE - 2, colour) for block in range(first, first + count)
    ]
    return "".join(blocks)


# -- bytes ------------------------------------------------------------------------------------------------------------

LEFT, RIGHT, ROW = 130, 520, 24
LEAST, MOST = 1e4, 1e7  # the ends of the axis


def across(number: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(number / LEAST) / math.log(MOST / LEAST)


def bars() -> str:
    """For 4 and for 16 workers, on a logarithmic axis."""
    body = [text(14, 20, "Bytes that a worker sends in a step, for a matrix of 1024 x 1024", size=13, bold=True)]
    bottom = 44 + ROW * len(EXAMPLES)
    for power, words in ((4, "10 KB"), (5, "100 KB"), (6, "1 MB"), (7, "10 MB")):
        x = across(10.0**power)
        body.append(f"<path d='M{x:.1f},38 V{bottom}' stroke='{FAINT}' stroke-width='0.6' stroke-dasharray='2 4'/>")
        body.append(text(x, bottom + 16, words, size=11, anchor="middle"))
    for row, (name, compression) in enumerate(EXAMPLES.items()):
        y = 44 + ROW * row
        body.append(text(LEFT - 8, y + 13, name, size=11, anchor="end"))
        for size, offset, colour in ((4, 1, WORKERS[0]), (16, 10, RESULT)):
            body.append(box(LEFT, y + offset, across(bytes_of(compression, size)) - LEFT, 8, colour))
    for x, words, colour in ((LEFT, "4 workers", WORKERS[0]), (LEFT + 110, "16 workers", RESULT)):
        body += [box(x, bottom + 28, 10, 10, colour), text(x + 15, bottom + 37, words, size=11)]
    return svg("Bytes per worker and step", RIGHT + 40, bottom + 48, body)


# -- error feedback ---------------------------------------------------------------------------------------------------


def feedback() -> str:
    body = [text(14, 20, "Error feedback, in one worker", size=13, bold=True)]
    for x, y, width, words in (
        (190, 60, 96, "p = g + e"), (340, 60, 96, "encode: C(p)"), (490, 60, 110, "exchange"), (340, 132, 96, "e = p - C(p)"),
    ):  # fmt: skip
        colour = RESULT if words.startswith("e =") else WORKERS[0]
        body += [box(x, y, width, 32, colour, filled=False), text(x + width / 2, y + 20, words, anchor="middle")]
    body += [
        text(14, 80, "gradient g"),
        arrow((90, 76), (186, 76)),
        arrow((286, 76), (336, 76)),
        arrow((436, 76), (486, 76)),
        text(461, 56, "payload", size=11, anchor="middle"),
        arrow((600, 76), (640, 76)),
        text(646, 80, "mean: p.grad"),
        arrow((388, 92), (388, 128)),
        text(396, 114, "what the payload does not say", size=11),
        arrow((340, 148), (238, 148), (238, 96)),
        text(228, 132, "kept until the next round", size=11, anchor="end"),
    ]
    return svg("Error feedback", 740, 184, body)


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {"exchanges.svg": exchanges(), "bytes.svg": bars(), "feedback.svg": feedback()}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, drawn in pictures().items():
        (FOLDER / name).write_text(drawn, encoding="utf-8")
    page = HERE / "compression.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
