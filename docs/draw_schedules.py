"""Writes the picture of docs/scheduling.md: a step with the barrier beside one across it, as the simulator has them.

    PYTHONPATH=src python docs/draw_schedules.py

Six equal layers, and transfers that take as long as the computation (rho = 1). A test fails when the picture is out of date.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from draw_compression import FAINT, INK, box, svg, text

from stretto.plan.profile import ModuleProfile, ParameterProfile, StepProfile, TransferCost
from stretto.plan.simulate import COMPUTE, Simulated, SimulatedSpan, simulate
from stretto.plan.transfers import Gradient
from stretto.schedule.orders import WaitFree
from stretto.schedule.priority import Priority

FOLDER = Path(__file__).resolve().parent / "pictures" / "schedules"
LAYERS = 6
FORWARD_S, BACKWARD_S, LAYER_BYTES = 0.010, 0.020, 3_000_000
COLOURS = ("#d9730d", "#b8860b", "#3d9a50", "#2aa198", "#2f80c9", "#a05cc0")  # middle tones: readable on light and on dark pages
SCHEDULES = {"With the barrier, WaitFree()": WaitFree(), "Across it, Priority()": Priority(partition=500_000)}
PX_PER_MS, LEFT, ROW, TOP = 2.4, 92, 22, 44


def profile() -> StepProfile:
    """Each layer's gradients take 30 ms on the network, as long as its forward and backward."""
    names = [f"layer{number}" for number in range(1, LAYERS + 1)]
    return StepProfile(
        model="six equal layers",
        digest="",
        world_size=4,
        steps=1,
        forward_s=LAYERS * FORWARD_S,
        backward_s=LAYERS * BACKWARD_S,
        update_s=0.0,
        modules=tuple(ModuleProfile(name=name, forward_s=FORWARD_S, backward_s=BACKWARD_S) for name in names),
        parameters=tuple(
            ParameterProfile(name=f"{name}.weight", num_bytes=LAYER_BYTES, ready_s=(LAYERS - number) * BACKWARD_S, used_by=number)
            for number, name in enumerate(names)
        ),
        cost=TransferCost(start_s=0.0, per_byte_s=(FORWARD_S + BACKWARD_S) / LAYER_BYTES),
    )


class Panel(NamedTuple):
    title: str
    simulated: Simulated
    layer_of: dict[int, int]  # transfer -> the number of its layer, from 0


def panels() -> list[Panel]:
    measured = profile()
    gradients = [Gradient(each.name, each.num_bytes) for each in measured.parameters]
    made = []
    for title, schedule in SCHEDULES.items():
        plan = schedule.plan(gradients, measured)
        layers = {number: int(each.parameters[0][len("layer")]) - 1 for number, each in enumerate(plan.transfers)}
        # A picture of the idea, so without the hops of a ring.
        simulated = simulate(measured, plan, cross_barrier=schedule.cross_barrier, hops=1, steps=1)
        made.append(Panel(title, simulated, layers))
    return made


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    both = panels()
    body: list[str] = []
    for number, panel in enumerate(both):
        body += [f"<g transform='translate(0,{number * (2 * ROW + 62)})'>", *draw(panel), "</g>"]
    height = len(both) * (2 * ROW + 62) + 8
    for number, colour in enumerate(COLOURS):
        x = LEFT + 84 * number
        body += [box(x, height, 10, 10, colour), text(x + 15, height + 9, f"layer {number + 1}", size=11)]
    longest = max(panel.simulated.iteration_s for panel in both)
    width = round(LEFT + longest * 1e3 * PX_PER_MS) + 20
    return {"barrier.svg": svg("One training step with the barrier and one across it", width, height + 20, body)}


def draw(panel: Panel) -> list[str]:
    """The step from the beginning of backward to the end of the next forward."""
    simulated = panel.simulated
    title = f"{panel.title}: {simulated.iteration_s * 1e3:.0f} ms a step"
    parts = [text(14, 22, title, size=13, bold=True)]
    parts += [
        text(LEFT - 8, TOP + row * ROW + 13, words, size=11, anchor="end") for row, words in enumerate(("compute", "network"))
    ]
    for span in simulated.timeline:
        if span.what == "backward":
            parts += backward(span)
        elif span.end_s > span.begin_s:  # an update takes no time here
            row = 0 if span.resource == COMPUTE else 1
            layer = panel.layer_of[span.transfer] if span.transfer is not None else layer_of(span)
            parts.append(bar(row, span.begin_s, span.end_s, COLOURS[layer]))
    ends = {"backward ends": LAYERS * BACKWARD_S, "next backward": simulated.iteration_s}
    for words, seconds in ends.items():
        x = across(seconds)
        parts.append(f"<path d='M{x:.1f},{TOP - 4} V{TOP + 2 * ROW}' stroke='{INK}' stroke-width='0.8' stroke-dasharray='2 3'/>")
        parts.append(
            text(x, TOP + 2 * ROW + 10, words, size=10, anchor="middle" if words == "backward ends" else "end", colour=FAINT)
        )
    return parts


def backward(span: SimulatedSpan) -> list[str]:
    """The last layer first. The simulator has it as one span; the layers are equal."""
    begins = [span.begin_s + number * BACKWARD_S for number in range(LAYERS)]
    return [bar(0, begin, begin + BACKWARD_S, COLOURS[LAYERS - 1 - number]) for number, begin in enumerate(begins)]


def layer_of(span: SimulatedSpan) -> int:
    """The layer of a forward, from 0."""
    return int(span.what.removeprefix("forward layer")) - 1


def across(seconds: float) -> float:
    return LEFT + seconds * 1e3 * PX_PER_MS


def bar(row: int, begin_s: float, end_s: float, colour: str) -> str:
    gap = 0.6 if end_s - begin_s > 0.002 else 0.2
    return box(across(begin_s), TOP + row * ROW, (end_s - begin_s) * 1e3 * PX_PER_MS - gap, ROW - 5, colour)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, drawn in pictures().items():
        (FOLDER / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
