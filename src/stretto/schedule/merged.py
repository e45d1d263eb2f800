"""Merged: gradients gathered into the transfers that end first, by a measured profile (MG-WFBP with an exact plan).

`merge.py` has the problem, the dynamic programme, the reference and the departure from the paper. What is minimised is the end of
the last transfer, which is what the next forward waits for where it waits for all. So there is no `cross_barrier=True` here: a
plan that may run into the next forward needs another objective, see `caramel.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.plan.profile import StepProfile
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.merge import exact_merge, last_end
from stretto.schedule.readiness import in_order_of_readiness, make_transfers, plan_until_profiled, ready_seconds


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
        groups, end_s = merged_groups(gradients, profile)
        return TransferPlan(
            schedule=repr(self),
            transfers=make_transfers(groups, in_order_of_readiness(gradients, profile), ranked=False),
            reason=f"all expected {end_s * 1e3:.1f} ms after backward begins, which takes {profile.backward_s * 1e3:.1f} ms",
        )


def merged_groups(gradients: Sequence[Gradient], profile: StepProfile) -> tuple[list[list[Gradient]], float]:
    """What travels together, in the order of readiness, and when the last of it has arrived, from the beginning of backward."""
    readiness = in_order_of_readiness(gradients, profile)
    seconds = ready_seconds(gradients, profile)
    ready_s = [seconds[gradient.name] for gradient in readiness]
    sizes = [gradient.num_bytes for gradient in readiness]
    kinds = [gradient.kind for gradient in readiness]
    waves = exact_merge(ready_s, sizes, profile.cost, kinds)
    groups = [group for wave in waves for group in _by_kind([readiness[i] for i in wave])]
    return groups, last_end(waves, ready_s, sizes, profile.cost, kinds)


def _by_kind(gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    groups: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.kind, []).append(gradient)
    return list(groups.values())
