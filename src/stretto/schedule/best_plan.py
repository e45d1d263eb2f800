"""The best of a few plans, by simulation: where a rule has a threshold, the profile decides on it.

How much to gather depends on what holds the step back. If the link does, every start-up saved makes the step shorter; if
computation does, gathering only delays what is urgent. A rule of thumb for one is wrong for the other, and simulating a step
takes milliseconds.
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
    """The candidate with the shortest step. Those that are longer by at most such a share count as equal; among equals the one
    with fewer transfers is taken, then the shorter step, then the earlier one."""
    steps = [(plan, simulate(profile, plan, cross_barrier=cross_barrier, steps=1).iteration_s) for plan in candidates]
    longest = (1 + margin) * min(seconds for _, seconds in steps)
    equals = [one for one in steps if one[1] <= longest]
    plan, seconds = min(equals, key=lambda one: (len(one[0].transfers), one[1]))
    return msgspec.structs.replace(plan, reason=f"{plan.reason}; a step of {seconds * 1e3:.1f} ms expected")
