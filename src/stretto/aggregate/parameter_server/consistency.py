"""When a gradient is applied, with how much weight, and when a worker may read: one rule for each answer to `sync=`.

A rule is asked by the first server of a range, and knows of the range only what it is told: the clocks of the workers that
count, the version (how many updates there were), and how many gradients are gathered for the next one. tau is the version that
a gradient is applied to less the one that it was computed on.

                     an update is made of            each with factor     a pull at clock c waits until
    InRounds         all gradients of one clock      1, summed            min clock >= c
    BoundedStaleness one                             1                    min clock >= c - bound, own clock >= c
    OnArrival        one                             1 or 1/max(tau,1)    own clock >= c
    SoftRounds       max(1, P // n), of anybody      1/max(tau,1)         never
    FirstOfAll       the first N of this version     1                    there are as many versions as it has taken steps

Clocks count pushes that have come in. Of gradients g with factors f and weights a (`stretto.weight`) the optimizer is given

    sum(a f g) / sum(a f)   at the rate times   sum(a f) / sum(a)

which for SGD is the mean of the f g, and for optimizers that the size of a gradient does not change still means f. `InRounds`
gives sum(a g), and the workers step.

With a bound of 0 gradients wait until all of their clock have come, and are applied one by one in the order of ranks: then a
worker reads all gradients of earlier clocks and none of its own clock, as in `InRounds`. `FirstOfAll` takes N = `wanted`
gradients as long as so many workers count, and then as many as there are: workers that die are spared first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from stretto.errors import ConfigurationError
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous


class PullState(NamedTuple):
    """What decides whether a pull may be answered."""

    clock: int
    newer_than: int
    own_clock: int
    min_clock: float  # infinity: no worker counts
    version: int


class ConsistencyRule(ABC):
    """See the module's text. The defaults are those of most."""

    sums = False  # the sum is handed out, and the workers step; else a mean is applied here
    one_of_each = False  # no worker has two gradients in an update: the second one is discarded
    remembers_readers = False  # delay compensation: what each worker has read is part of the state

    def takes(self, clock: int, min_clock: float, version_read: int, version: int) -> bool:
        """Whether a gradient that arrives is used at all; else it is discarded."""
        return True

    def is_due(self, clock: int, min_clock: float) -> bool:
        """Whether a gradient of that clock may be gathered now. Those that are not wait, in the order of clocks and ranks."""
        return True

    def factor(self, tau: int) -> float:
        return 1.0

    @abstractmethod
    def is_complete(self, num_gathered: int, clock: int, min_clock: float, num_workers: int) -> bool:
        """Whether what is gathered makes an update. `clock`: of the first that was gathered."""

    @abstractmethod
    def may_read(self, pull: PullState) -> bool: ...


@dataclass(frozen=True)
class InRounds(ConsistencyRule):
    """`Synchronous`. Gradients of a round are added in the order of ranks when all are here: the same bits in every run.

    A worker that has quit may push again to a server that takes over: too late if the round is over."""

    sums = True

    def takes(self, clock: int, min_clock: float, version_read: int, version: int) -> bool:
        return clock >= min_clock or min_clock == math.inf

    def is_due(self, clock: int, min_clock: float) -> bool:
        return min_clock > clock

    def is_complete(self, num_gathered: int, clock: int, min_clock: float, num_workers: int) -> bool:
        return min_clock > clock

    def may_read(self, pull: PullState) -> bool:
        return pull.min_clock >= pull.clock


@dataclass(frozen=True)
class BoundedStaleness(ConsistencyRule):
    """`StaleSynchronous`."""

    bound: int

    def is_due(self, clock: int, min_clock: float) -> bool:
        return self.bound > 0 or min_clock > clock

    def is_complete(self, num_gathered: int, clock: int, min_clock: float, num_workers: int) -> bool:
        return True

    def may_read(self, pull: PullState) -> bool:
        return pull.min_clock >= pull.clock - self.bound and pull.own_clock >= pull.clock


@dataclass(frozen=True)
class OnArrival(ConsistencyRule):
    """`Asynchronous`."""

    staleness_aware: bool = False
    remembers_readers: bool = False

    def factor(self, tau: int) -> float:
        return 1.0 / max(tau, 1) if self.staleness_aware else 1.0

    def is_complete(self, num_gathered: int, clock: int, min_clock: float, num_workers: int) -> bool:
        return True

    def may_read(self, pull: PullState) -> bool:
        return pull.own_clock >= pull.clock


@dataclass(frozen=True)
class SoftRounds(ConsistencyRule):
    """`SoftSync`."""

    n: int

    def factor(self, tau: int) -> float:
        return 1.0 / max(tau, 1)

    def is_complete(self, num_gathered: int, clock: int, min_clock: float, num_workers: int) -> bool:
        return num_gathered >= max(1, num_workers // self.n)

    def may_read(self, pull: PullState) -> bool:
        return True


@dataclass(frozen=True)
class FirstOfAll(ConsistencyRule):
    """`BackupWorkers`. A worker that is behind goes on at once, and may compute on a version twice: it counts once."""

    one_of_each = True
    wanted: int

    def takes(self, clock: int, min_clock: float, version_read: int, version: int) -> bool:
        return version_read == version

    def is_complete(self, num_gathered: int, clock: int, min_clock: float, num_workers: int) -> bool:
        return num_gathered >= min(self.wanted, max(1, num_workers))

    def may_read(self, pull: PullState) -> bool:
        return pull.version > pull.newer_than


SyncAnswer = Synchronous | StaleSynchronous | Asynchronous | SoftSync | BackupWorkers


def rule_for(sync: SyncAnswer, num_workers: int) -> ConsistencyRule:
    """The rule of an answer, in a job of so many workers."""
    match sync:
        case Synchronous():
            return InRounds()
        case StaleSynchronous(bound):
            return BoundedStaleness(bound)
        case Asynchronous(staleness_aware, delay_compensation):
            return OnArrival(staleness_aware, delay_compensation is not None)
        case SoftSync(n):
            return SoftRounds(n)
        case BackupWorkers(spare):
            if spare >= num_workers:
                raise ConfigurationError(
                    f"BackupWorkers(spare={spare}) in a job of {num_workers} workers: no gradient would be left to wait for.\n"
                    f"Spare at most {num_workers - 1}, or start more workers."
                )
            return FirstOfAll(num_workers - spare)
