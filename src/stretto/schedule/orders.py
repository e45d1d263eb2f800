"""In which order gradients travel, and how many at a time.

    AfterBackward()    all of them, in one go, when backward has ended: no overlap. The naive one, to compare with.
    WaitFree()         each parameter as soon as its gradient is there (wait-free backpropagation, WFBP). Best overlap,
                       one message start-up per parameter.
    Buckets(bytes)     parameters gathered into buckets of about `bytes` in the reverse order of registration, each sent
                       when its last gradient is there; the first one small, so that sending begins early (as DDP does). Where
                       `bytes` is left to us it follows the model and the network, if that has been measured
                       (`bucket_size.py`), and is 25 MiB otherwise.

A schedule decides which parameters share a collective and when it may begin. It never changes the result beyond the order of
additions. References: Zhang et al., "Poseidon", ATC 2017 (WFBP); Li et al., "PyTorch Distributed", VLDB 2020 (buckets).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from stretto.errors import ConfigurationError
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.bucket_size import bucket_bytes
from stretto.schedule.readiness import MIB, UNPROFILED_BYTES, UNPROFILED_FIRST_BYTES, fill_buckets, make_transfer


class FixedOrder(ABC):
    """What follows from the parameters alone: nothing is measured, and backward is the end of the step's communication."""

    __slots__ = ()
    cross_barrier: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = False
    early: ClassVar[bool] = True

    @abstractmethod
    def limits(self) -> tuple[int | None, int | None]:
        """From how many bytes on the first bucket is full, and every further one; None: never."""

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        """A profile changes nothing."""
        transfers = tuple(make_transfer(bucket) for bucket in fill_buckets(gradients, *self.limits()))
        return TransferPlan(schedule=repr(self), transfers=transfers, early=self.early)


@dataclass(frozen=True, slots=True)
class AfterBackward(FixedOrder):
    """One collective of everything (per dtype and device), begun when backward has ended."""

    early: ClassVar[bool] = False

    def limits(self) -> tuple[int | None, int | None]:
        return None, None


@dataclass(frozen=True, slots=True)
class WaitFree(FixedOrder):
    """One collective per parameter, begun as soon as its gradient is there."""

    def limits(self) -> tuple[int | None, int | None]:
        return 0, 0


@dataclass(frozen=True, slots=True)
class Buckets(FixedOrder):
    """Collectives of about `bytes` each, the first of at most `first_bytes`. None: as the model and the network want it."""

    bytes: int | None = None
    first_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("bytes", "first_bytes"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"Buckets({name}={value!r}): a bucket holds a positive whole number of bytes. "
                    f"Write for instance Buckets({name}={25 * MIB if name == 'bytes' else MIB}); for one collective per "
                    f"parameter WaitFree(), for a single one AfterBackward()."
                )

    def sized(self, gradients: Sequence[Gradient], cost: TransferCost) -> Buckets:
        """With `bytes` for these gradients on this network, where it is left to us."""
        return self if self.bytes is not None else replace(self, bytes=bucket_bytes(gradients, cost, self.first_bytes))

    def limits(self) -> tuple[int | None, int | None]:
        size = UNPROFILED_BYTES if self.bytes is None else self.bytes
        return min(size, UNPROFILED_FIRST_BYTES if self.first_bytes is None else self.first_bytes), size
