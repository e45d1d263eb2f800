"""In which order gradients travel, and how many at a time.

    AfterBackward()    all of them, in one go, when backward has ended: no overlap. The naive one, to compare with.
    WaitFree()         each parameter as soon as its gradient is there (wait-free backpropagation, WFBP). Best overlap,
                       one message start-up per parameter.
    Buckets(bytes)     parameters gathered into buckets of about `bytes` in the reverse order of registration, each sent
                       when its last gradient is there; the first one small, so that sending begins early (as DDP does).

A schedule decides which parameters share a collective and when it may begin. It never changes the result beyond the order of
additions. References: Zhang et al., "Poseidon", ATC 2017 (WFBP); Li et al., "PyTorch Distributed", VLDB 2020 (buckets).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.errors import ConfigurationError
from stretto.plan.profile import StepProfile
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.readiness import MIB, fill_buckets, make_transfer


@dataclass(frozen=True, slots=True)
class AfterBackward:
    """One collective of everything (per dtype and device), begun when backward has ended."""

    @property
    def bucket_bytes(self) -> int | None:
        return None

    @property
    def first_bucket_bytes(self) -> int | None:
        return None

    @property
    def waits_for_backward(self) -> bool:
        return True

    @property
    def cross_barrier(self) -> bool:
        return False

    @property
    def needs_profile(self) -> bool:
        return False

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        """A profile changes nothing."""
        return _plan(self, gradients)


@dataclass(frozen=True, slots=True)
class WaitFree:
    """One collective per parameter, begun as soon as its gradient is there."""

    @property
    def bucket_bytes(self) -> int | None:
        return 0

    @property
    def first_bucket_bytes(self) -> int | None:
        return 0

    @property
    def waits_for_backward(self) -> bool:
        return False

    @property
    def cross_barrier(self) -> bool:
        return False

    @property
    def needs_profile(self) -> bool:
        return False

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        """A profile changes nothing."""
        return _plan(self, gradients)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Collectives of about `bytes` each, the first of at most `first_bytes`."""

    bytes: int = 25 * MIB
    first_bytes: int = 1 * MIB

    def __post_init__(self) -> None:
        for name in ("bytes", "first_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"Buckets({name}={value!r}): a bucket holds a positive whole number of bytes. "
                    f"Write for instance Buckets({name}={25 * MIB if name == 'bytes' else MIB}); for one collective per "
                    f"parameter WaitFree(), for a single one AfterBackward()."
                )

    @property
    def bucket_bytes(self) -> int | None:
        return self.bytes

    @property
    def first_bucket_bytes(self) -> int | None:
        return min(self.first_bytes, self.bytes)

    @property
    def waits_for_backward(self) -> bool:
        return False

    @property
    def cross_barrier(self) -> bool:
        return False

    @property
    def needs_profile(self) -> bool:
        return False

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        """A profile changes nothing."""
        return _plan(self, gradients)


Schedule = AfterBackward | WaitFree | Buckets


def _plan(schedule: Schedule, gradients: Sequence[Gradient]) -> TransferPlan:
    buckets = fill_buckets(gradients, schedule.first_bucket_bytes, schedule.bucket_bytes)
    return TransferPlan(
        schedule=repr(schedule),
        transfers=tuple(make_transfer(bucket) for bucket in buckets),
        early=not schedule.waits_for_backward,
    )
