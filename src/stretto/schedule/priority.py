"""Priority: what the next forward needs first goes first, in parts, so that it never waits for much else (P3, ByteScheduler).

The gradients of the first modules are the last to be ready and the first to be needed. A transfer's priority is its place in the
order of first use; it is cut into parts of at most `partition` bytes, and between parts whatever is ready and more urgent goes
first. At most `credit` bytes are under way at once, because what has been handed to the network cannot be overtaken:

    credit = partition     one part at a time: strict order; a wire that buffers a little has work while the next one comes
    large credit           first come, first served

Left to us (None), `credit` is one part and `partition` follows the network (`first_use.best_partition`). On the simulator this is
compared with larger parts and with none, and what shares a transfer is tried out: few or many small neighbours, or what `Merged`
merges.

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

from stretto.errors import ConfigurationError
from stretto.plan.profile import StepProfile
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.best_plan import best_plan
from stretto.schedule.first_use import CREDIT_BYTES, best_partition, by_first_use, credit_for, groups_by_first_use, start_up_bytes
from stretto.schedule.merged import Merged
from stretto.schedule.readiness import MIB, check_is_bool, in_order_of_readiness, make_transfers

UNPROFILED_PARTITION = 1 * MIB
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
        by_name = {gradient.name: gradient for gradient in gradients}
        merged = [[by_name[name] for name in one.parameters] for one in Merged().plan(gradients, profile).transfers]
        groupings: list[Sequence[Sequence[Gradient]]] = [
            *(groups_by_first_use(gradients, profile, small) for small in small_bytes),
            by_first_use(merged, gradients, profile),
        ]
        partitions = [self.partition]
        if self.partition is None:
            best = best_partition(gradients, profile)
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
            credit = credit_for(gradients, profile) if partition is None else partition
        elif partition is not None:
            partition = min(partition, credit)
        readiness = in_order_of_readiness(gradients, profile)
        return TransferPlan(
            schedule=repr(self),
            transfers=make_transfers(groups, readiness, ranked=True, part_bytes=lambda num_bytes: partition),
            credit_bytes=credit,
            reason=reason,
        )
