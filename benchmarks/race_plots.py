"""The losses of a race over time, and over steps, as SVG: the mean over seeds of each contender, drawn from its report alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from xml.sax.saxutils import escape

from race_report import NONE, RaceReport, RaceRun

WIDTH, HEIGHT, LEFT, TOP, GAP, LINE = 430, 300, 46, 34, 66, 17
INK, FAINT = "#80868f", "#9aa0a860"  # middle tones: readable on light and on dark pages
COLOURS = ("#d9730d", "#2f80c9", "#3d9a50", "#a05cc0", "#2aa198", "#b8860b", "#c94f6d", "#6b7cc9", "#7a8f3a")
DASHES = ("", "6 3", "2 2")  # for those beyond the colours
FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"
FROM = 0.02  # of the horizontal axis: what comes before says how long a step takes
OWN = f"{NONE}, own weights"
Points = list[tuple[float, float]]


def picture(report: RaceReport) -> str:
    """Two panels side by side, and the names below. In a race with a kill solid lines are undisturbed ones."""
    lines = _lines(report)
    panels = [
        _panel("validation loss over seconds", "s", {name: _mean(runs, lambda run: run.by_time) for name, runs in lines.items()}),
        _panel(
            "validation loss over steps", "steps", {name: _mean(runs, lambda run: run.by_steps) for name, runs in lines.items()}
        ),
    ]
    width, height = LEFT + 2 * WIDTH + GAP + 16, TOP + HEIGHT + 44
    body = [f"<g transform='translate({number * (WIDTH + GAP)},0)'>{panel}</g>" for number, panel in enumerate(panels)]
    columns = 3
    for number, name in enumerate(lines):
        x, y = LEFT + (number % columns) * 300, height + LINE * (number // columns)
        body.append(f"<path d='M{x},{y - 4} h24' {_stroke(number)}/>")
        body.append(_text(x + 30, y, name))
    height += LINE * math.ceil(len(lines) / columns) + 4
    title = escape(f"Race {report.settings.name}: validation loss over time and over steps")
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img'>"
    return "\n".join([head, f"<title>{title}</title>", *body, "</svg>\n"])


def _lines(report: RaceReport) -> dict[str, list[RaceRun]]:
    found = {OWN if name == NONE else name: report.of(name) for name in report.names}
    if report.settings.killed is not None:
        found |= {f"{name}, one killed": report.of(name, killed=True) for name in report.names}
    return {name: runs for name, runs in found.items() if runs}


def _mean(runs: list[RaceRun], curve: Callable[[RaceRun], Points]) -> Points:
    """Of all seeds, mark by mark."""
    return [
        (statistics.fmean(x for x, _ in marks), statistics.fmean(loss for _, loss in marks))
        for marks in zip(*(curve(run) for run in runs), strict=False)
    ]


def _panel(title: str, unit: str, lines: dict[str, Points]) -> str:
    right = max((points[-1][0] for points in lines.values()), default=1.0) or 1.0
    shown = {name: [point for point in points if point[0] >= FROM * right] for name, points in lines.items()}
    losses = [loss for points in shown.values() for _, loss in points] or [0.0, 1.0]
    low, high = min(losses), min(max(losses), 4.5)

    def place(point: tuple[float, float]) -> str:
        x, loss = point
        share = (high - min(loss, high)) / ((high - low) or 1.0)
        return f"{LEFT + WIDTH * x / right:.1f},{TOP + HEIGHT * share:.1f}"

    parts = [_text(LEFT, TOP - 14, title, bold=True)]
    for value in _ticks(low, high):
        y = TOP + HEIGHT * (high - value) / ((high - low) or 1.0)
        parts += [f"<path d='M{LEFT},{y:.1f} h{WIDTH}' stroke='{FAINT}'/>", _text(LEFT - 6, y + 4, f"{value:g}", anchor="end")]
    for value in _ticks(0.0, right):
        x = LEFT + WIDTH * value / right
        parts.append(_text(x, TOP + HEIGHT + 16, f"{value:g} {unit}" if value else "0", anchor="middle"))
    for number, points in enumerate(shown.values()):
        if points:
            parts.append(f"<path d='M{' L'.join(map(place, points))}' {_stroke(number)}/>")
    return "\n".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers."""
    raw = (high - low) / 5 or 1.0
    unit = 10 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
    return [round(number * step, 10) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _stroke(number: int) -> str:
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    return f"stroke='{COLOURS[number % len(COLOURS)]}' stroke-width='1.8' fill='none'{dashed}"


def _text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = " font-weight='600'" if bold else ""
    place = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'"
    return f"<text {place} {FONT} font-size='12' fill='{INK}'{weight}>{escape(words)}</text>"
