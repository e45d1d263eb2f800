"""What every server of a range has of it, in the same bits: values, version, and the clocks of the workers that count.

A replica is changed by *changes* alone, each with a number, the sequence. The first server of the chain thinks of them, all
others take them in the same order (`take`), so after the same sequence all have the same bits. That is replication after
aggregation: what travels down the chain is the combined gradient of an update, with the names of the gradients in it, not what
each worker sent.

Invariant: the clock of a worker is that of its next gradient: all before it, from the one that it began with, have been applied
or
           discarded, once. `version` counts updates; `floor` is the highest that the slowest worker's clock has been, which is
           where a worker goes on if no other one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.aggregate.parameter_server.encoded_sum import EncodedSum
from stretto.aggregate.parameter_server.messages import (
    Admitted,
    Applied,
    Change,
    Discarded,
    Filled,
    Part,
    ReplicaHeader,
    Retired,
    Shown,
    WorkerClock,
)
from stretto.aggregate.parameter_server.shard_optimizer import OptionValue
from stretto.protocol.machine import Payload


class RangeValues(Protocol):
    """The values of one range, and what is done with gradients: `RangeState`, or `RoundSum`."""

    def apply(
        self,
        gradient: NDArray[np.float32],
        options: Mapping[str, OptionValue],
        *,
        lr_scale: float = 1.0,
        worker: int | None = None,
    ) -> None:
        """Raises `MalformedPayload`, and has changed nothing then."""

    def value(self) -> Payload:
        """What a pull is answered with. Does not change afterwards."""

    def pulled_by(self, worker: int) -> None: ...
    def forget(self, worker: int) -> None: ...
    def export(self) -> bytes: ...
    def install(self, data: memoryview) -> None: ...


class MakeValues(Protocol):
    """Makes the values of a range: of these bytes, or those that a range has before it is filled."""

    def __call__(self, index: int, values: memoryview | None) -> RangeValues: ...


class RangeReplica:
    """See the module's text."""

    def __init__(self, index: int, make_values: MakeValues, workers: Mapping[int, WorkerClock], filled: bool) -> None:
        self._index = index
        self._make_values = make_values
        self.values = make_values(index, None)
        self.workers = dict(workers)
        self.filled = filled
        self.sequence = self.version = self.floor = 0
        self.weight = 0.0

    def take(self, change: Change, payload: Payload) -> None:
        """Make the next change."""
        match change:
            case Applied(parts, options, lr_scale, weight, drawn):
                worker, gradient = parts[0].worker if len(parts) == 1 else None, np.frombuffer(payload, np.float32)
                if drawn is not None and isinstance(self.values, EncodedSum):
                    self.values.hand_out(gradient, weight, drawn)
                else:
                    self.values.apply(gradient, options, lr_scale=lr_scale, worker=worker)
                self._count(parts)
                self.version += 1
                self.weight = weight
            case Discarded(parts):
                self._count(parts)
            case Filled(exported):
                self.values = self._filled_with(memoryview(payload), exported)
                self.filled = True
            case Admitted(worker, life, clock):
                known = self.workers.get(worker)
                first = clock if known is None or known.life != life else known.first
                self.workers[worker] = WorkerClock(life, first, clock)
            case Retired(worker):
                self.workers[worker] = self.workers[worker]._replace(counts=False)
                self.values.forget(worker)
            case Shown(worker):
                self.values.pulled_by(worker)
        self.sequence += 1
        clocks = [each.clock for each in self.workers.values() if each.counts]
        self.floor = max(self.floor, min(clocks, default=0))

    def _filled_with(self, payload: memoryview, exported: bool) -> RangeValues:
        """Raises `MalformedPayload` for what was not exported by such a range."""
        if not exported:
            return self._make_values(self._index, payload)
        if isinstance(self.values, EncodedSum):
            self.values.install(payload)  # some worker may have yet to pull what is there
            return self.values
        values = self._make_values(self._index, None)
        values.install(payload)
        return values

    def _count(self, parts: list[Part]) -> None:
        """Nothing is counted for a life that has ended meanwhile."""
        for worker, life, clock, _ in parts:
            if (known := self.workers.get(worker)) is not None and known.life == life:
                self.workers[worker] = known._replace(clock=max(known.clock, clock + 1))

    def header(self) -> ReplicaHeader:
        return ReplicaHeader(self.sequence, self.version, self.floor, self.weight, self.filled, self.workers.copy())

    def install(self, header: ReplicaHeader, payload: memoryview) -> None:
        """Become what another replica was."""
        self.values.install(payload)
        self.sequence, self.version, self.floor = header.sequence, header.version, header.floor
        self.weight, self.filled, self.workers = header.weight, header.filled, dict(header.workers)
