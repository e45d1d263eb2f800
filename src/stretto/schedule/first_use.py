"""Urgency: the order in which the next forward reads parameters, and which of them travel together.

The earlier a module runs in the next forward, the more urgent its parameters. Tic, Tac and Priority send one transfer for

    parameters that one module is the first to read: they are needed at the same moment;
    and neighbours in the order of first use, while together they have at most `small` bytes. A transfer of n bytes takes a + b n,
        and small is a / b unless said otherwise: below that the start-up is more than half of a transfer. On the link the more
        urgent one then takes at most a longer than alone, and everything behind the two is done a earlier;

both if their gradients become ready within the time of a small transfer of each other, so that waiting for the last of them
costs little, also where one module reads all parameters of a model. The papers send each parameter by itself, which costs a
start-up for every bias. Only gradients of one kind are joined.

A parameter that no module was seen to read, or that the profile does not have, may be read by anything: it is as urgent as the
first module. Without a profile the order of registration stands in for that of first use, and the module that holds a parameter
for the one that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.simulate import PART_SHARE, hops_of
from stretto.plan.transfers import Gradient
from stretto.schedule.readiness import ready_seconds, total_bytes

BEFORE_ALL = -1

CREDIT_BYTES = 2 << 20  # so much may be on its way before an urgent transfer, until the network has been measured
LEAST_PARTITION, LARGEST_PARTITION = 64 << 10, 16 << 20


def first_users(gradients: Sequence[Gradient], profile: StepProfile | None) -> dict[str, int]:
    """The number of the module that is the first to read each parameter; smaller numbers run earlier."""
    if profile is None:
        modules: dict[str, int] = {}
        return {g.name: modules.setdefault(g.name.rpartition(".")[0], len(modules)) for g in gradients}
    seen = {parameter.name: parameter.used_by for parameter in profile.parameters}
    users = {gradient.name: seen.get(gradient.name) for gradient in gradients}
    return {name: BEFORE_ALL if user is None else user for name, user in users.items()}


def by_first_use(
    groups: Sequence[Sequence[Gradient]], gradients: Sequence[Gradient], profile: StepProfile | None
) -> list[Sequence[Gradient]]:
    """The groups, that with the most urgent member first; otherwise in the order given."""
    user = first_users(gradients, profile)
    return sorted(groups, key=lambda group: min(user[gradient.name] for gradient in group))


def start_up_bytes(cost: TransferCost) -> float:
    """a / b: the transfer of so many bytes takes as long as its start-up again."""
    return cost.start_s / cost.per_byte_s if cost.per_byte_s > 0 else inf


def best_partition(gradients: Sequence[Gradient], profile: StepProfile) -> int:
    """How many bytes to send at a time where urgent ones may come in between, in whole KiB and within reason.

    A collective takes H hops one after the other, 2 (P - 1) in a ring of P workers and 2 with servers, and at each an urgent
    message waits for at most the credit and what the wire has buffered, about two parts. With S bytes in all, b seconds per byte
    and theta seconds for each part, what parts cost and what the urgent waits for are together

        (S / partition) theta + 2 H b partition,      least at      partition = sqrt(S theta / 2 H b)

    0.1 MB for 17 MB between four workers at 500 Mbit/s with theta = 0.17 ms. (Steps there were shortest with parts of 128 KiB and
    a credit of one, longer with 256 KiB, and longest with a credit of two.)"""
    cost, hops = profile.cost, hops_of(profile)
    best = float(LARGEST_PARTITION)
    if cost.per_byte_s > 0:
        best = sqrt(total_bytes(gradients) * PART_SHARE * cost.start_s / (2 * hops * cost.per_byte_s))
    return round(min(max(best, LEAST_PARTITION), LARGEST_PARTITION)) // 1024 * 1024


def credit_for(gradients: Sequence[Gradient], profile: StepProfile | None) -> int:
    """How many bytes may be on their way before an urgent transfer."""
    return CREDIT_BYTES if profile is None else best_partition(gradients, profile)


def groups_by_first_use(
    gradients: Sequence[Gradient], profile: StepProfile | None, small_bytes: float | None = None
) -> list[list[Gradient]]:
    """Groups that travel together, the most urgent first."""
    user, ready_s = first_users(gradients, profile), ready_seconds(gradients, profile)
    if profile is not None:
        small = start_up_bytes(profile.cost) if small_bytes is None else small_bytes
        patience_s = profile.cost.seconds(small) if small < inf else profile.cost.start_s

    def may_join(group: Sequence[Gradient], gradient: Gradient) -> bool:
        needed_together = user[group[0].name] == user[gradient.name]  # members come in the order of first use
        if profile is None:
            return needed_together
        ready = [ready_s[member.name] for member in (*group, gradient)]
        if max(ready) - min(ready) > patience_s:
            return False
        return needed_together or total_bytes((*group, gradient)) <= small

    growing: dict[str, list[Gradient]] = {}  # the last group of each kind
    groups: list[list[Gradient]] = []
    for gradient in sorted(gradients, key=lambda gradient: user[gradient.name]):
        group = growing.get(gradient.kind)
        if group is not None and may_join(group, gradient):
            group.append(gradient)
        else:
            growing[gradient.kind] = [gradient]
            groups.append(growing[gradient.kind])
    return groups
