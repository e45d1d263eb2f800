"""Writes the pictures of docs/pipelines.md: who computes what when, as plans have it.

    PYTHONPATH=src python docs/draw_pipelines.py

Four stages and eight micro-batches, in the pictures' units: a forward takes one, a backward two, each half of one that is split
takes one; letters take no time. A test fails when a picture is out of date.
"""

from __future__ import annotations

from pathlib import Path

from draw_compression import FAINT, box, svg, text

from stretto.partition.actions import StageAction, Work
from stretto.partition.schedules import GPipe, Interleaved, OneForwardOneBackward, PipelineSchedule, ZeroBubble
from stretto.partition.walk import Walked, walk

FOLDER = Path(__file__).resolve().parent / "pictures" / "pipelines"
STAGES, MICROBATCHES = 4, 8
UNITS = {Work.FORWARD: 1.0, Work.BACKWARD: 2.0, Work.INPUTS: 1.0, Work.WEIGHTS: 1.0}
COLOURS = {Work.FORWARD: "#2f80c9", Work.BACKWARD: "#d9730d", Work.INPUTS: "#d9730d", Work.WEIGHTS: "#3d9a50"}
SECOND = {Work.FORWARD: "#86b6e0", Work.BACKWARD: "#e9ac6e"}  # of the second part of a stage
WHITE = "#ffffff"
SCHEDULES: tuple[PipelineSchedule, ...] = (
    GPipe(),
    OneForwardOneBackward(),
    OneForwardOneBackward(eager=1),
    Interleaved(2),
    ZeroBubble(),
)
PX, LEFT, ROW, TOP, GAP = 19.0, 66, 20, 36, 16


def walked(schedule: PipelineSchedule) -> Walked:
    plan = schedule.plan(STAGES, MICROBATCHES)
    return walk(plan, lambda stage, action: UNITS[action.work] / schedule.chunks)


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    body: list[str] = []
    height = 4
    for schedule in SCHEDULES:
        body += [f"<g transform='translate(0,{height})'>", *draw(schedule, walked(schedule)), "</g>"]
        height += TOP + STAGES * ROW + GAP
    legend = {"forward": COLOURS[Work.FORWARD], "backward": COLOURS[Work.BACKWARD], "weights' half": COLOURS[Work.WEIGHTS]}
    for number, (words, colour) in enumerate(legend.items()):
        x = LEFT + 120 * number
        body += [box(x, height, 10, 10, colour), text(x + 15, height + 9, words, size=11)]
    longest = max(walked(schedule).seconds for schedule in SCHEDULES)
    return {
        "schedules.svg": svg("Four stages of a pipeline under five schedules", round(LEFT + longest * PX) + 14, height + 20, body)
    }


def draw(schedule: PipelineSchedule, found: Walked) -> list[str]:
    bubble, held = f"{found.bubble:.0%} of the time is waiting", "/".join(map(str, found.peaks))
    parts = [text(14, 22, f"{schedule!r}: {bubble}, {held} micro-batches held", size=13, bold=True)]
    parts += [
        text(LEFT - 8, TOP + stage * ROW + 13, f"stage {stage}", size=11, anchor="end", colour=FAINT) for stage in range(STAGES)
    ]
    for span in found.spans:
        x, width = LEFT + span.begin_s * PX, (span.end_s - span.begin_s) * PX
        y = TOP + span.stage * ROW
        parts.append(box(x, y, width - 0.8, ROW - 4, colour_of(span.action)))
        if width > 12:
            parts.append(text(x + width / 2, y + 12, str(span.action.microbatch), size=9, anchor="middle", colour=WHITE))
    return parts


def colour_of(action: StageAction) -> str:
    return (SECOND if action.chunk else COLOURS)[action.work]


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, drawn in pictures().items():
        (FOLDER / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
