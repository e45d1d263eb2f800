"""The order in which gradients become ready, and transfers made of groups of them: what all schedules share.

Gradients are given in the order in which the model registers its parameters. Backward visits modules about the other way round,
so the reverse order stands in for the order of readiness until a profile has measured it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.errors import ConfigurationError
from stretto.plan.profile import StepProfile
from stretto.plan.transfers import Gradient, Transfer, TransferPlan

MIB = 1 << 20
UNPROFILED_BYTES, UNPROFILED_FIRST_BYTES = 25 * MIB, 1 * MIB


def ready_seconds(gradients: Sequence[Gradient], profile: StepProfile | None) -> dict[str, float]:
    """Seconds from the beginning of backward until each gradient is there, at the latest its end; that is also assumed of
    parameters that the profile does not have. Without a profile nothing is known: 0 for all."""
    if profile is None:
        return {gradient.name: 0.0 for gradient in gradients}
    seen = {parameter.name: parameter.ready_s for parameter in profile.parameters}
    return {g.name: min(seen.get(g.name, profile.backward_s), profile.backward_s) for g in gradients}


def in_order_of_readiness(gradients: Sequence[Gradient], profile: StepProfile | None) -> list[Gradient]:
    """The first to be ready first. Parameters that the profile does not have come last; ties in reverse registration order."""
    seconds = ready_seconds(gradients, profile)
    seen = {parameter.name for parameter in profile.parameters} if profile is not None else set()
    return sorted(reversed(gradients), key=lambda gradient: (gradient.name not in seen, seconds[gradient.name]))


def fill_buckets(gradients: Sequence[Gradient], first_bytes: int | None, bytes_each: int | None) -> list[list[Gradient]]:
    """Gradients in reverse registration order, gathered until a bucket has `bytes_each` (None: no limit), the first one
    `first_bytes`. There is one open bucket for each kind, and those that are still open at the end come last."""
    filling: dict[str, list[Gradient]] = {}
    sizes: dict[str, int] = {}
    buckets: list[list[Gradient]] = []
    limit = first_bytes
    for gradient in reversed(gradients):
        filling.setdefault(gradient.kind, []).append(gradient)
        sizes[gradient.kind] = sizes.get(gradient.kind, 0) + gradient.num_bytes
        if limit is not None and sizes[gradient.kind] >= limit:
            buckets.append(filling.pop(gradient.kind))
            sizes[gradient.kind] = 0
            limit = bytes_each
    return buckets + list(filling.values())


def total_bytes(gradients: Sequence[Gradient]) -> int:
    return sum(gradient.num_bytes for gradient in gradients)


def make_transfers(
    groups: Sequence[Sequence[Gradient]],
    readiness: Sequence[Gradient],
    *,
    ranked: bool,
    part_bytes: Callable[[int], int | None] = lambda num_bytes: None,
) -> tuple[Transfer, ...]:
    """One transfer for each group, in the order in which the last gradient of each is ready. `ranked`: the groups are given with
    the most urgent first, and get the priorities 0, 1, 2, ...; otherwise all have 0. `part_bytes` tells from a transfer's bytes
    in what parts it travels."""
    position = {gradient.name: number for number, gradient in enumerate(readiness)}
    transfers = []
    for urgency, group in enumerate(groups):
        members = sorted(group, key=lambda gradient: position[gradient.name])
        transfers.append(make_transfer(members, urgency if ranked else 0, part_bytes(total_bytes(members))))
    return tuple(sorted(transfers, key=lambda transfer: position[transfer.parameters[-1]]))


def make_transfer(group: Sequence[Gradient], priority: int = 0, part_bytes: int | None = None) -> Transfer:
    names = tuple(gradient.name for gradient in group)
    return Transfer(parameters=names, num_bytes=total_bytes(group), priority=priority, part_bytes=part_bytes)


def plan_until_profiled(
    schedule: object, gradients: Sequence[Gradient], *, ranked: bool, credit_bytes: int | None = None
) -> TransferPlan:
    """The plan of a schedule that cannot decide anything without a profile: buckets, as DDP makes them. `ranked`: those with the
    parameters registered first are the most urgent."""
    buckets = fill_buckets(gradients, UNPROFILED_FIRST_BYTES, UNPROFILED_BYTES)
    number = {gradient.name: position for position, gradient in enumerate(gradients)}
    urgency = sorted(buckets, key=lambda bucket: min(number[gradient.name] for gradient in bucket))
    return TransferPlan(
        schedule=repr(schedule),
        transfers=make_transfers(urgency, in_order_of_readiness(gradients, None), ranked=ranked),
        credit_bytes=credit_bytes,
        reason="no profile yet: buckets of 25 MiB in reverse registration order",
    )


def check_is_bool(schedule: str, field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(
            f"{schedule}({field}={value!r}): whether the next forward may begin before all transfers have ended is a yes or no. "
            f"Write {schedule}({field}=True) or {schedule}({field}=False)."
        )
