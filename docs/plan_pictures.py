"""Space-time pictures of plans, drawn from the plans themselves, so that they cannot disagree with what runs.

Ranks are vertical lines, time goes down, a message is an arrow from its sender at the beginning of a step to its receiver at the
end, coloured by what becomes of it (added or copied) and labelled with its chunks. Colours are middle tones and the ground is
transparent: readable on light and on dark pages.
"""

from __future__ import annotations

from collections import defaultdict
from math import hypot
from xml.sax.saxutils import escape

from stretto.collectives.plan import Local, Plan, PlanMaker, Recv, Send
from stretto.testing.diagrams import chunks_of, word_of

_COLUMN, _STEP, _TOP, _LEFT, _FOOT = 120, 66, 64, 74, 44
_ADD, _COPY, _EMPTY, _INK, _FAINT = "#d9730d", "#2f80c9", "#8a8f98", "#80868f", "#9aa0a8"
_FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"


def as_svg(maker: PlanMaker, size: int) -> str:
    """The plan as a picture: a self-contained SVG document."""
    plans = [maker(rank, size) for rank in range(size)]
    steps = max(plan.num_steps for plan in plans)
    width, height = 2 * _LEFT + (size - 1) * _COLUMN, _TOP + max(1, steps) * _STEP + _FOOT
    body = [*_frame(plans[0], steps), *_arrows(plans), *_locals(plans), *_legend(plans, height)]
    title = escape(f"{plans[0].kind.value}: {plans[0].algorithm}, {size} ranks")
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
            f"role='img' aria-label='{title}'>",
            f"<title>{title}</title>",
            f"<defs>{''.join(_head(name, colour) for name, colour in _COLOURS.items())}</defs>",
            *body,
            "</svg>\n",
        ]
    )


_COLOURS = {"add": _ADD, "copy": _COPY, "empty": _EMPTY}


def _head(name: str, colour: str) -> str:
    return (
        f"<marker id='{name}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0,0.8 L8,4 L0,7.2 z' fill='{colour}'/></marker>"
    )


def _x(rank: int) -> int:
    return _LEFT + rank * _COLUMN


def _text(
    x: float, y: float, words: str, *, colour: str = _INK, size: int = 12, anchor: str = "middle", bold: bool = False
) -> str:
    weight = " font-weight='600'" if bold else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {_FONT} font-size='{size}' fill='{colour}' text-anchor='{anchor}'{weight}>"
        f"{escape(words)}</text>"
    )


def _frame(plan: Plan, steps: int) -> list[str]:
    """Title, rank lines, and a faint rule at the beginning of every step."""
    bottom, right = _TOP + max(1, steps) * _STEP, _x(plan.size - 1)
    chunks = f", {plan.num_chunks} chunks" if plan.num_chunks > 1 else ""
    parts = [_text(12, 20, f"{plan.algorithm}, {plan.size} ranks{chunks}", size=13, anchor="start", bold=True)]
    for step in range(steps):
        y = _TOP + step * _STEP
        parts.append(f"<path d='M{_LEFT - 26},{y} H{right + 26}' stroke='{_FAINT}' stroke-width='0.6' stroke-dasharray='2 4'/>")
        parts.append(_text(12, y + _STEP / 2 + 4, f"step {step}", size=11, anchor="start"))
    for rank in range(plan.size):
        parts.append(_text(_x(rank), _TOP - 14, f"rank {rank}", bold=True))
        parts.append(f"<path d='M{_x(rank)},{_TOP - 6} V{bottom + 6}' stroke='{_INK}' stroke-width='1.6'/>")
    return parts


def _arrows(plans: list[Plan]) -> list[str]:
    """One arrow per message. Several between the same two ranks in one step stand apart."""
    becomes = _fates(plans)
    lines: list[str] = []
    labels: list[str] = []
    for plan in plans:
        count: defaultdict[int, int] = defaultdict(int)
        beside: defaultdict[tuple[int, int], int] = defaultdict(int)
        same_side: defaultdict[tuple[int, bool], int] = defaultdict(int)
        for send in plan.operations:
            if not isinstance(send, Send):
                continue
            fate = becomes[plan.rank, send.peer, count[send.peer]]
            count[send.peer] += 1
            shift = 14 * beside[send.step, send.peer]
            beside[send.step, send.peer] += 1
            lines.append(_arrow(plan.rank, send, fate, shift))
            words = chunks_of(send, plan.num_chunks).strip("[]")
            if words:
                side = send.step, send.peer > plan.rank
                labels.append(_label(plan.rank, send, words, _COLOURS[fate], shift, 30 + 22 * same_side[side]))
                same_side[side] += 1
    return lines + labels


def _fates(plans: list[Plan]) -> dict[tuple[int, int, int], str]:
    """What the k-th message from a to b is used for."""
    fates: dict[tuple[int, int, int], str] = {}
    for plan in plans:
        count: defaultdict[int, int] = defaultdict(int)
        for recv in plan.operations:
            if isinstance(recv, Recv):
                fate = "empty" if recv.lo == recv.hi else "add" if recv.add else "copy"
                fates[recv.peer, plan.rank, count[recv.peer]] = fate
                count[recv.peer] += 1
    return fates


def _ends(rank: int, send: Send, shift: int) -> tuple[float, float, float, float]:
    top = _TOP + send.step * _STEP
    direction = 1 if send.peer > rank else -1
    return _x(rank) + 3 * direction, top + 7 + shift, _x(send.peer) - 4 * direction, top + _STEP - 22 + shift


def _arrow(rank: int, send: Send, fate: str, shift: int) -> str:
    x1, y1, x2, y2 = _ends(rank, send, shift)
    return (
        f"<path d='M{x1:.1f},{y1:.1f} L{x2:.1f},{y2:.1f}' stroke='{_COLOURS[fate]}' stroke-width='1.8' fill='none' "
        f"marker-end='url(#{fate})'/>"
    )


def _label(rank: int, send: Send, words: str, colour: str, shift: int, distance: int) -> str:
    """The chunks, that far along the arrow and just above it."""
    x1, y1, x2, y2 = _ends(rank, send, shift)
    along = distance / hypot(x2 - x1, y2 - y1)
    x, y = x1 + along * (x2 - x1), y1 + along * (y2 - y1)
    return _text(x, y - 5, words, colour=colour, size=11)


def _locals(plans: list[Plan]) -> list[str]:
    """Local work as a word on the rank's line, at the end of its step."""
    parts: list[str] = []
    for plan in plans:
        words: defaultdict[int, list[str]] = defaultdict(list)
        for operation in plan.operations:
            if isinstance(operation, Local):
                words[operation.step].append(word_of(operation, plan.num_chunks))
        for step, said in words.items():
            y = _TOP + (step + 1) * _STEP - 7
            parts.append(_text(_x(plan.rank) + 5, y, ", ".join(said), size=9, anchor="start"))
    return parts


def _legend(plans: list[Plan], height: int) -> list[str]:
    meaning = {"add": "added on arrival", "copy": "copied", "empty": "empty message"}
    used = sorted(set(_fates(plans).values()))
    parts: list[str] = []
    x, y = 12, height - 14
    for fate in used:
        parts.append(f"<path d='M{x},{y - 4} h26' stroke='{_COLOURS[fate]}' stroke-width='1.8' marker-end='url(#{fate})'/>")
        parts.append(_text(x + 33, y, meaning[fate], size=11, anchor="start"))
        x += 150
    if any(plan.needs_work_buffer for plan in plans):
        parts.append(_text(x, y, "D: data, W: work", size=11, anchor="start"))
    return parts
