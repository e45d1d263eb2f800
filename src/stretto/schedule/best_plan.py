"""The best of a few plans, by simulation: where a rule has a threshold, the profile decides on it.

How much to gather depends on what holds the step back. If the link does, every start-up saved makes the step shorter; if
computation does, gathering only delays what is urgent. A rule of thumb for one is wrong for the other, and simulating a step
takes milliseconds, or a tenth of a second where a plan has many parts.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stretto.plan.profile import StepProfile
from stretto.plan.simulate import simulate
from stretto.plan.transfers import TransferPlan


def best_plan(
    candidates: Iterable[TransferPlan], profile: StepProfile, *, cross_barrier: bool, margin: float = 0.0
) -> TransferPlan:
    """The candidate with the shortest step; among equals the one with fewer transfers, then the earlier one. With a margin: the
    first candidate whose step is longer by at most that share."""
    steps = [(plan, simulate(profile, plan, cross_barrier=cross_barrier, steps=1).iteration_s) for plan in candidates]
    plan, seconds = min(steps, key=lambda one: (one[1], len(one[0].transfers)))
    if margin > 0:
        plan, seconds = next(one for one in steps if one[1] <= (1 + margin) * seconds)
    return msgspec.structs.replace(plan, reason=f"{plan.reason}; a step of {seconds * 1e3:.1f} ms expected")
