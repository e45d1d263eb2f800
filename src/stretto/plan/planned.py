"""`plan.json` in a folder of traces: what a schedule has planned for the job, from which profile, and how long it expected a step
to take. Rank 0 writes it; `stretto report` lays it beside what was measured.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from stretto.errors import ConfigurationError
from stretto.plan.profile import StepProfile
from stretto.plan.transfers import TransferPlan

FILE_NAME = "plan.json"
MAX_FILE_BYTES = 64 << 20  # a model of 10,000 parameters takes 2 MB


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A plan; the profile it was made from, and the seconds of a step by it, where there are such."""

    plan: TransferPlan
    profile: StepProfile | None = None
    predicted_s: float | None = None


def write_planned(folder: Path, planned: PlannedStep) -> Path:
    """Whole or not at all."""
    path = folder / FILE_NAME
    partial = path.with_suffix(".part")
    partial.write_bytes(msgspec.json.encode(planned))
    partial.replace(path)
    return path


def read_planned(folder: Path) -> PlannedStep | None:
    """None if nothing was planned: the strategy's schedule needs no plan, or the job has no model."""
    path = folder / FILE_NAME
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _unreadable(path, f"it has more than {MAX_FILE_BYTES >> 20} MiB")
        planned = msgspec.json.decode(path.read_bytes(), type=PlannedStep)
    except (msgspec.MsgspecError, RecursionError, OSError) as problem:
        raise _unreadable(path, str(problem)) from problem
    wrong = _nonsense(planned)
    if wrong is not None:
        raise _unreadable(path, wrong)
    return planned


def _nonsense(planned: PlannedStep) -> str | None:
    """What can be written as JSON, and still be no plan."""
    for number, transfer in enumerate(planned.plan.transfers):
        if not transfer.parameters or transfer.num_bytes < 0 or (transfer.part_bytes is not None and transfer.part_bytes <= 0):
            return f"transfer {number} has no parameters, or a size that cannot be"
    times = [] if planned.predicted_s is None else [planned.predicted_s]
    if planned.profile is not None:
        times += [planned.profile.cost.start_s, planned.profile.cost.per_byte_s]
    if not all(math.isfinite(value) and 0.0 <= value < 1e9 for value in times):
        return "it has a time that cannot be"
    return None


def _unreadable(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is not a plan that stretto wrote ({why}).\n"
        f"Remove it (the report does without), or run the job again with --trace."
    )
