"""Merged: gradients gathered into the transfers that end first, by a measured profile (MG-WFBP with an exact plan).

`merge.py` has the problem, the dynamic programme, the reference and the departure from the paper. What is minimised is the end of
the last transfer, which is what the next forward waits for where it waits for all. So there is no `cross_barrier=True` here: a
plan that may run into the next forward needs another objective, see `caramel.py`.

The programme takes start-ups for time of the link. Much of one is latency, in which the link is free for another transfer, so
then it merges too much. The simulator knows hops: it compares the plans of the programme for a third, a tenth and all of the
start-up, every gradient by itself and all in one. A third is taken unless another is shorter by more than `MARGIN`: few large
transfers are slower than predicted, because each waits for the slowest worker's last gradient, and very many cost processor time,
of which a profile knows little. (A GPT at rho 1: 7 transfers 1,644 ms, predicted 1,513; 77 transfers 1,516, predicted 1,518; the
same at rho 0.3: 29 transfers 1,137 ms, 77 transfers 1,162.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stretto.plan.profile import StepProfile
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.best_plan import best_plan
from stretto.schedule.merge import exact_merge
from stretto.schedule.readiness import in_order_of_readiness, make_transfers, plan_until_profiled, ready_seconds

START_UP_SHARES = (1 / 3, 1 / 10, 1.0)
MARGIN = 0.01


@dataclass(frozen=True, slots=True)
class Merged:
    """The merge plan whose last transfer ends first, by the profile's ready times and network."""

    @property
    def cross_barrier(self) -> bool:
        return False

    @property
    def needs_profile(self) -> bool:
        return True

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        if profile is None:
            return plan_until_profiled(self, gradients, ranked=False)
        readiness = in_order_of_readiness(gradients, profile)
        groupings = {
            f"the merge plan for {share:.0%} of a start-up": merged_groups(gradients, profile, share) for share in START_UP_SHARES
        }
        groupings["no merging: start-ups overlap"] = [[gradient] for gradient in readiness]
        groupings["all in one: start-ups take too long"] = _by_kind(readiness)
        candidates = [
            TransferPlan(schedule=repr(self), transfers=make_transfers(groups, readiness, ranked=False), reason=reason)
            for reason, groups in groupings.items()
        ]
        return best_plan(candidates, profile, cross_barrier=False, margin=MARGIN)


def merged_groups(gradients: Sequence[Gradient], profile: StepProfile, start_up_share: float) -> list[list[Gradient]]:
    """What travels together, in the order of readiness, if this share of a start-up holds the link and the rest is latency."""
    cost = msgspec.structs.replace(profile.cost, start_s=start_up_share * profile.cost.start_s)
    readiness = in_order_of_readiness(gradients, profile)
    seconds = ready_seconds(gradients, profile)
    ready_s = [seconds[gradient.name] for gradient in readiness]
    sizes = [gradient.num_bytes for gradient in readiness]
    kinds = [gradient.kind for gradient in readiness]
    waves = exact_merge(ready_s, sizes, cost, kinds)
    return [group for wave in waves for group in _by_kind([readiness[i] for i in wave])]


def _by_kind(gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    groups: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.kind, []).append(gradient)
    return list(groups.values())
