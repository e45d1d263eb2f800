"""Tic and Tac: transfers in the order in which the next forward should have them.

`receives.py` has the two algorithms. What is received in a step of data-parallel training are averaged gradients, and the graph
is the next forward: modules in their measured order, each reading the transfers with the parameters that it is the first to use
(`first_use.py` says which parameters share one).

A profile knows modules as a sequence and not as a graph with branches. On such a chain both orders are those of first use, so the
two differ from `Priority` in that transfers are not cut into parts, as in the paper. The paper's transfers are pulls from a
parameter server, all of which can begin when the step does; here a transfer also waits for its gradients, so the order decides
among those that are ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.first_use import CREDIT_BYTES, credit_for, first_users, groups_by_first_use
from stretto.schedule.readiness import (
    check_is_bool,
    in_order_of_readiness,
    make_transfers,
    plan_until_profiled,
    total_bytes,
)
from stretto.schedule.receives import ComputeOp, ReceiveGraph, tac_order, tic_order


@dataclass(frozen=True, slots=True)
class Tic:
    """Order without times. Until there is a profile, the order of registration stands in for that of first use."""

    cross_barrier: bool = True

    def __post_init__(self) -> None:
        check_is_bool("Tic", "cross_barrier", self.cross_barrier)

    @property
    def needs_profile(self) -> bool:
        return True

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        groups = groups_by_first_use(gradients, profile)
        order = tic_order(next_forward(groups, gradients, profile))
        reason = "TIC on modules in their measured order" if profile is not None else "no profile yet: TIC on registration order"
        return _plan(self, [groups[number] for number in order], gradients, profile, reason)


@dataclass(frozen=True, slots=True)
class Tac:
    """Order by the times of transfers and modules, so only with a profile."""

    cross_barrier: bool = True

    def __post_init__(self) -> None:
        check_is_bool("Tac", "cross_barrier", self.cross_barrier)

    @property
    def needs_profile(self) -> bool:
        return True

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        if profile is None:
            return plan_until_profiled(self, gradients, ranked=True, credit_bytes=CREDIT_BYTES)
        groups = groups_by_first_use(gradients, profile)
        order = tac_order(next_forward(groups, gradients, profile))
        reason = "TAC on measured times of modules and transfers"
        return _plan(self, [groups[number] for number in order], gradients, profile, reason)


def next_forward(
    groups: Sequence[Sequence[Gradient]], gradients: Sequence[Gradient], profile: StepProfile | None
) -> ReceiveGraph:
    """The forward that waits for these transfers: a chain of modules. The first one waits for what no module was seen to read."""
    cost = profile.cost if profile is not None else TransferCost(start_s=0.0, per_byte_s=1.0)
    forward_s = [module.forward_s for module in profile.modules] if profile is not None else []
    users = first_users(gradients, profile)
    reads: dict[int, set[int]] = {user: set() for user in range(len(forward_s))}
    for number, group in enumerate(groups):
        for gradient in group:
            reads.setdefault(max(users[gradient.name], 0), set()).add(number)
    seconds = dict(enumerate(forward_s))
    return ReceiveGraph(
        receive_s=tuple(cost.seconds(total_bytes(group)) for group in groups),
        operations=tuple(
            ComputeOp(seconds=seconds.get(user, 0.0), reads=frozenset(reads[user]), after=(place - 1,) if place else ())
            for place, user in enumerate(sorted(reads))
        ),
    )


def _plan(
    schedule: Tic | Tac,
    groups: Sequence[Sequence[Gradient]],
    gradients: Sequence[Gradient],
    profile: StepProfile | None,
    reason: str,
) -> TransferPlan:
    return TransferPlan(
        schedule=repr(schedule),
        transfers=make_transfers(groups, in_order_of_readiness(gradients, profile), ranked=True),
        credit_bytes=credit_for(gradients, profile),
        reason=reason,
    )
