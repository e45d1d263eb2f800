"""Priority: what the next forward needs first goes first, in parts, so that it never waits for much else (P3, ByteScheduler).

The gradients of the first modules are the last to be ready and the first to be needed. A transfer's priority is its place in the
order of first use; it is cut into parts of at most `partition` bytes, and between parts whatever is ready and more urgent goes
first. At most `credit` bytes are under way at once, because what has been handed to the network cannot be overtaken:

    credit = partition     one part at a time: strict order; a wire that buffers a little has work while the next one comes
    large credit           first come, first served

Left to us (None), `credit` is one part and `partition` follows the network. A collective takes several hops one after the other,
2 (P - 1) in a ring of P workers, and at each an urgent message waits for at most `credit` and what the wire has buffered, about
two parts. With S bytes in all, b seconds per byte and theta seconds for each part, what parts cost and what the urgent waits for
are together (S / partition) theta + 4 (P - 1) b partition, which is least at sqrt(S theta / 4 (P - 1) b): 0.1 MB for 17 MB
between four workers at 500 Mbit/s with theta = 0.17 ms. (Steps there were shortest with parts of 128 KiB and a credit of one,
longer with 256 KiB, and longest with a credit of two.) On the simulator this is compared with larger parts and with none, and
what shares a transfer is tried out: few or many small neighbours, or what `Merged` would merge. So then a simulated step is
never longer than with `Merged`.

Cost:      S / partition parts, and their start-ups; five simulated steps to plan, 15 if the partition is left to us.
Invariant: all parts of all transfers are sent once; the most urgent of those that are ready is the next to start.
Reference: Jayarajan et al., "Priority-based parameter propagation for distributed DNN training" (P3), MLSys 2019; Peng et al., "A
           generic communication scheduler for distributed DNN training acceleration" (ByteScheduler), SOSP 2019.
Departure: parameters that are needed at the same moment, and tiny neighbours, travel together: `first_use.py` gives the rule and
           why little is lost by it. ByteScheduler searches for partition and credit while training; here they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from stretto.errors import ConfigurationError
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.simulate import PART_SHARE
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.best_plan import best_plan
from stretto.schedule.first_use import CREDIT_BYTES, by_first_use, groups_by_first_use, start_up_bytes
from stretto.schedule.merged import merged_groups
from stretto.schedule.readiness import MIB, check_is_bool, in_order_of_readiness, make_transfers, total_bytes

UNPROFILED_PARTITION, LEAST_PARTITION, LARGEST_PARTITION = 1 * MIB, 64 << 10, 16 * MIB
SMALL_FACTORS = (1, 3, 9, 27)  # of a / b: a start-up of 1/2, 1/4, 1/10 and 1/28 of a transfer


@dataclass(frozen=True, slots=True)
class Priority:
    """Transfers by first use, in parts of at most `partition` bytes, with at most about `credit` bytes under way. None: as the
    network wants it."""

    partition: int | None = None
    credit: int | None = None
    cross_barrier: bool = True

    def __post_init__(self) -> None:
        for name in ("partition", "credit"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(
                    f"Priority({name}={value!r}): that is a number of bytes, positive and whole. "
                    f"Write for instance Priority({name}={MIB if name == 'partition' else CREDIT_BYTES}), or leave it out."
                )
        if self.credit is not None and self.partition is not None and self.credit < self.partition:
            raise ConfigurationError(
                f"Priority(partition={self.partition}, credit={self.credit}): not even one part may be under way. "
                f"Write credit={self.partition} for one part at a time, or credit={2 * self.partition} for two."
            )
        check_is_bool("Priority", "cross_barrier", self.cross_barrier)

    @property
    def needs_profile(self) -> bool:
        return True

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        if profile is None:
            partition = UNPROFILED_PARTITION if self.partition is None else self.partition
            groups = groups_by_first_use(gradients, None)
            return self._plan(groups, gradients, None, partition, "no profile yet: registration order")
        small_bytes = [factor * start_up_bytes(profile.cost) for factor in SMALL_FACTORS]
        merged, _ = merged_groups(gradients, profile)
        groupings: list[Sequence[Sequence[Gradient]]] = [
            *(groups_by_first_use(gradients, profile, small) for small in small_bytes),
            by_first_use(merged, gradients, profile),
        ]
        partitions = [self.partition]
        if self.partition is None:
            best = best_partition(total_bytes(gradients), profile.cost, profile.world_size)
            partitions = [best, 4 * best, None]
        candidates = [
            self._plan(groups, gradients, profile, partition, "measured order of first use")
            for partition in partitions
            for groups in groupings
        ]
        return best_plan(candidates, profile, cross_barrier=self.cross_barrier)

    def _plan(
        self,
        groups: Sequence[Sequence[Gradient]],
        gradients: Sequence[Gradient],
        profile: StepProfile | None,
        partition: int | None,
        reason: str,
    ) -> TransferPlan:
        credit = self.credit
        if credit is None:
            credit = CREDIT_BYTES if partition is None else partition
        elif partition is not None:
            partition = min(partition, credit)
        readiness = in_order_of_readiness(gradients, profile)
        return TransferPlan(
            schedule=repr(self),
            transfers=make_transfers(groups, readiness, ranked=True, part_bytes=lambda num_bytes: partition),
            credit_bytes=credit,
            reason=reason,
        )


def best_partition(num_bytes: int, cost: TransferCost, world_size: int) -> int:
    """sqrt(S theta / 4 (P - 1) b), in whole KiB, within reason."""
    theta, hops = PART_SHARE * cost.start_s, 2 * max(1, world_size - 1)
    best = sqrt(num_bytes * theta / (2 * hops * cost.per_byte_s)) if cost.per_byte_s > 0 else LARGEST_PARTITION
    return round(min(max(best, LEAST_PARTITION), LARGEST_PARTITION)) // 1024 * 1024
