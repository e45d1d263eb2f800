"""What the first server of a range does: it takes pushes, makes changes of them, and answers when all servers of the chain have
these.

A push is checked, then *held* until it is due, then *gathered* until there is enough for an update (`consistency.py` says
when). The update is a change, which is made here and goes down the chain. Pulls are *parked* until the rule lets them read.

Whatever is answered waits until the last server of the chain has everything that was changed before: so no answer, to a push or
to a pull, ever says something that is lost with this server. A worker that has read an update can rely on it.

Pushes are idempotent by (worker, life, clock). One that comes again after it was counted is acknowledged again; one that is
held or gathered is acknowledged when it has been counted. The acknowledgement of a repeated one does not say whether it was
discarded.

A second gradient of a worker for the same update (backup workers) is discarded together with that update and not before: its
clock would tell the next server of the chain that the first one, which was only gathered, had been counted too.

What is held, gathered or parked is in this server's memory alone. If it dies, or hands the range over, workers send again what
was not answered. Gradients of a worker that dies count if they are in: those that were applied, held or gathered, and not one
that was still on its way.

Encoded:   a gradient is decoded when it comes, for it may be wrong, and kept as it came while it waits. What goes down the chain
           is float32 in any case: copies have the same bits wherever they are.
Memory:    gradients are added to one buffer as they arrive; an update of one gradient is made straight from the wire's memory.
           Those that are held are copies: none, but with a bound of 0, and in rounds, one for each worker.
Reference: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, for clocks by range and for
           replication after aggregation; van Renesse and Schneider, "Chain replication", OSDI 2004, for answers that wait.
Departs:   reads are answered by the first server of the chain when the last one is as far as it, not by the last one: the rule
           needs to know of gradients that have come in and are not counted yet.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.aggregate.parameter_server.answers import SentCopies
from stretto.aggregate.parameter_server.consistency import ConsistencyRule, PullState
from stretto.aggregate.parameter_server.encoding import RangeEncoding
from stretto.aggregate.parameter_server.gradient_sum import GradientSum
from stretto.aggregate.parameter_server.layout import ParameterRange
from stretto.aggregate.parameter_server.lives import Lives
from stretto.aggregate.parameter_server.messages import (
    Admitted,
    Applied,
    Change,
    CodecRound,
    Discarded,
    EnterRange,
    ExportRange,
    Filled,
    FillValues,
    LeaveRange,
    Options,
    Part,
    PullValues,
    PushGradient,
    PushTaken,
    RangeEntered,
    RangeExported,
    RangeFilled,
    RangeLeft,
    RequestRefused,
    Retired,
    ServedRequest,
    Shown,
    ValuesPulled,
    WorkerClock,
)
from stretto.aggregate.parameter_server.replica import RangeReplica
from stretto.errors import MalformedPayload
from stretto.protocol.machine import Payload

MAX_CLOCK: Final = 1 << 53
MAX_OPTIONS: Final = 64  # so that a header with them can be passed on
MAX_WEIGHT: Final = 1e18  # float32 has all products of weights and factors
MAX_REASON: Final = 2000  # letters


class UpdateRecord(NamedTuple):
    """An update, for the ledger: made to this version, of gradients that were computed on theirs. tau is the difference."""

    range: int
    version_applied: int
    parts: list[Part]


@dataclass(frozen=True)
class Terms:
    """What all ranges of a server have in common."""

    rule: ConsistencyRule
    lives: Lives
    send: Callable[[int, Any, Payload], None]
    fault_in: Callable[[Options], str | None]  # why options are wrong, before anything is done with them
    on_update: Callable[[UpdateRecord], None]
    encoding_of: Callable[[int], RangeEncoding | None]  # how the gradients of a range come; None: as float32
    copies_of: Callable[[int], SentCopies | None]  # where values leave as differences to what workers have; None: they do not


class RangeQueue(NamedTuple):
    """How many gradients are held or gathered, and how many pulls are parked."""

    held: int
    gathered: int
    parked: int


class HeldGradient(NamedTuple):
    """A gradient that waits, ordered by clock and worker."""

    clock: int
    worker: int
    push: PushGradient
    payload: bytes


class HeldAnswer(NamedTuple):
    """An answer that waits until the last server has this sequence."""

    sequence: int
    worker: int
    header: Any
    payload: Payload


class RangeHead:
    """See the module's text. `log(change, payload)` passes on a change that has been made here."""

    def __init__(
        self, parameters: ParameterRange, replica: RangeReplica, terms: Terms, log: Callable[[Change, Payload], None]
    ) -> None:
        self.replica = replica
        self.stored = -1  # the last server has all changes up to this sequence
        self._range = parameters
        self._rule = terms.rule
        self._terms = terms
        self._log = log
        self._received = {worker: each.clock for worker, each in replica.workers.items()}  # clocks, with what is not counted yet
        self._held: list[HeldGradient] = []
        self._sum: GradientSum | None = None
        self._gathered: list[Part] = []
        self._second: list[Part] = []  # of workers that have one gathered: discarded with the update that this one is in
        self._weight = 0.0  # of what is gathered, without the rule's factors
        self._options: Options = {}
        self._drawn: CodecRound | None = None
        self._encoding = terms.encoding_of(parameters.index)
        self._copies = terms.copies_of(parameters.index)
        self._parked: dict[int, PullValues] = {}  # by worker
        self._answers: list[HeldAnswer] = []

    # -- for the ledger -----------------------------------------------------------------------------------------------

    def queue(self) -> RangeQueue:
        return RangeQueue(len(self._held), len(self._gathered), len(self._parked))

    def holds_back(self, worker: int) -> int | None:
        """The slowest worker that counts, if the rule does not let this one read yet."""
        if worker not in self._parked:
            return None
        counting = [(self._received[other], other) for other, each in self.replica.workers.items() if each.counts]
        return min(counting)[1] if counting else worker

    # -- requests -----------------------------------------------------------------------------------------------------

    def take(self, source: int, request: ServedRequest, payload: memoryview) -> None:
        """A request of a worker. One that is wrong is refused, and has changed nothing."""
        fault = self._fault_in(source, request, payload)
        if fault is not None:
            self._refuse(source, type(request).__name__, request.clock if isinstance(request, PushGradient) else -1, fault)
            return
        match request:
            case PushGradient():
                self._push(source, request, payload)
                if self._encoding is not None:
                    self._encoding.forget()
            case PullValues():
                self._parked[source] = request
            case FillValues(exported=exported):
                self._fill(source, exported, payload)
            case ExportRange():
                self._export(source)
            case EnterRange(life=life, clock=clock):
                self._enter(source, life, clock)
            case LeaveRange():
                self.retire(source)
                self._answer(source, RangeLeft(self._range.index))
        self._settle()

    def _fault_in(self, source: int, request: ServedRequest, payload: memoryview) -> str | None:
        known = self.replica.workers.get(source)
        life, wanted = request.life, self._range.num_bytes if isinstance(request, (PushGradient, FillValues)) else 0
        is_encoded = isinstance(request, PushGradient) and self._encoding is not None
        if payload.nbytes != wanted and not (is_encoded or (isinstance(request, FillValues) and request.exported)):
            return f"it has {payload.nbytes} bytes, and needs {wanted}"
        if known is not None and life < known.life:
            return f"it is of life {life} of that worker, and life {known.life} has taken its place"
        if isinstance(request, ExportRange) and not self.replica.filled:
            return "nobody has filled the range, so there is nothing to export"
        if isinstance(request, EnterRange) and not 0 <= (request.clock or 0) < MAX_CLOCK:
            return f"its clock {request.clock} is none that a worker could have reached"
        if isinstance(request, (PushGradient, PullValues)):
            if known is None or life != known.life or not (known.counts or isinstance(request, PushGradient)):
                return f"life {life} of that worker does not count among the workers: it has to enter first"
            if request.clock > self._received[source]:
                return f"its clock {request.clock} is of the future: {self._received[source]} pushes have come in"
        if isinstance(request, PullValues) and request.difference is not None and not 0 <= request.difference.draw < MAX_CLOCK:
            return f"its differences are of round {request.difference.draw}, which there cannot be"
        if isinstance(request, PushGradient) and known is not None:
            if request.clock < known.first:
                return f"its clock {request.clock} is of the past: the worker has begun with {known.first}"
            if not 0 <= request.version_read <= self.replica.version:
                return f"it was computed on version {request.version_read}, and version {self.replica.version} is the last"
            if not 1 / MAX_WEIGHT <= request.weight <= MAX_WEIGHT:
                return f"its weight is {request.weight}, and must be positive, from {1 / MAX_WEIGHT} to {MAX_WEIGHT}"
            if not self.replica.filled:
                return "the range has no values yet, so it cannot have been computed on them"
            if len(request.options) > MAX_OPTIONS or any(len(name) > MAX_OPTIONS for name in request.options):
                return (
                    f"it has {len(request.options)} options, or long names: {MAX_OPTIONS} and {MAX_OPTIONS} letters are the most"
                )
            return self._terms.fault_in(request.options) or self._fault_in_encoding(request, payload)
        return None

    def _fault_in_encoding(self, push: PushGradient, payload: memoryview) -> str | None:
        if self._encoding is None:
            return None if push.drawn is None else "it is encoded, and gradients of this range come as float32"
        for held in self._held:
            if self._rule.sums and held.clock == push.clock and held.push.drawn != push.drawn:
                return f"it is of {push.drawn}, and that of rank {held.worker} at the same clock of {held.push.drawn}"
        return self._encoding.fault_in(payload, push.drawn)

    def _written(self, values: Payload) -> Payload:
        return values if self._encoding is None or self._rule.sums else self._encoding.written_values(values)

    def _gradient(self, push: PushGradient, payload: memoryview) -> NDArray[np.float32]:
        if self._encoding is None or push.drawn is None:
            return np.frombuffer(payload, np.float32)
        return self._encoding.read(payload, push.drawn)

    def _refuse(self, worker: int, request: str, clock: int, fault: str) -> None:
        reason = f"a {request} of rank {worker} for range {self._range.index} was refused: {fault}."
        self._terms.send(worker, RequestRefused(self._range.index, request, clock, reason[:MAX_REASON]), b"")

    def _fill(self, source: int, exported: bool, payload: memoryview) -> None:
        if not self.replica.filled or (exported and self._rule.sums):  # a sum is nobody's to begin with but the one who resumes
            try:
                self._change(Filled(exported), payload)
            except MalformedPayload as fault:
                self._refuse(source, FillValues.__name__, -1, str(fault))
                return
        self._answer(source, RangeFilled(self._range.index))

    def _export(self, source: int) -> None:
        clocks = [each.clock for each in self.replica.workers.values() if each.counts] or [self.replica.floor]
        header = RangeExported(self._range.index, self.replica.version, min(clocks), max(clocks))
        self._answer(source, header, self.replica.values.export())

    def _push(self, source: int, push: PushGradient, payload: memoryview) -> None:
        clock, index = push.clock, self._range.index
        if clock < self.replica.workers[source].clock:
            self._answer(source, PushTaken(index, clock, self.replica.version, None))
        if clock < self._received[source]:
            return
        is_taken = self._rule.takes(clock, self._slowest(), push.version_read, self.replica.version)
        self._received[source] = clock + 1
        if not is_taken:
            self._discard([Part(source, push.life, clock, push.version_read)])
        elif self._rule.one_of_each and any(part.worker == source for part in self._gathered):
            self._second.append(Part(source, push.life, clock, push.version_read))
        elif self._held or not self._rule.is_due(clock, self._slowest()):
            insort(self._held, HeldGradient(clock, source, push, bytes(payload)), key=lambda held: held[:2])
        else:
            self._gather(source, push, payload)

    def _discard(self, parts: list[Part]) -> None:
        self._change(Discarded(parts), b"")
        self._tell(parts, self.replica.version, applied=False)

    def _tell(self, parts: list[Part], version: int, *, applied: bool) -> None:
        for part in parts:
            if self._terms.lives.is_current(part.worker, part.life):
                self._answer(part.worker, PushTaken(self._range.index, part.clock, version, applied))

    def _enter(self, worker: int, life: int, clock: int | None) -> None:
        known = self.replica.workers.get(worker)
        if known is not None and known.life != life:
            self.forget(worker)
            known = None
        begin = max(clock or 0, self._clock_to_enter_with(worker, known))
        if known is None or not known.counts or begin > self._received[worker]:
            self._change(Admitted(worker, life, begin), b"")
            self._received[worker] = begin
        self._answer(worker, RangeEntered(self._range.index, begin))

    def _clock_to_enter_with(self, worker: int, known: WorkerClock | None) -> int:
        """Its own if it counts already, else that of the slowest, but no clock that it has used."""
        if known is not None and known.counts:
            return self._received[worker]
        slowest = self._slowest()
        begin = self.replica.floor if slowest == math.inf else int(slowest)
        return begin if known is None else max(begin, self._received[worker])

    def retire(self, worker: int) -> None:
        """Nobody waits for it any more. What it has pushed is applied all the same."""
        if worker in self.replica.workers and self.replica.workers[worker].counts:
            self._change(Retired(worker), b"")
            self._parked.pop(worker, None)
        if self._copies is not None:
            self._copies.forget(worker)

    def forget(self, worker: int) -> None:
        """It has died: it takes no answers either."""
        self._answers = [answer for answer in self._answers if answer.worker != worker]
        self.retire(worker)
        self._settle()

    # -- updates ------------------------------------------------------------------------------------------------------

    def _clocks(self) -> list[int]:
        """The clocks of the workers that count."""
        return [self._received[worker] for worker, each in self.replica.workers.items() if each.counts]

    def _slowest(self) -> float:
        return min(self._clocks(), default=math.inf)

    def _settle(self) -> None:
        """Do all that can be done now."""
        while self._gather_next() or self._make_update():
            pass
        self._answer_pulls()

    def _gather_next(self) -> bool:
        if not self._held or not self._rule.is_due(self._held[0].clock, self._slowest()):
            return False
        if self._gathered and self._rule.sums and self._held[0].clock != self._gathered[0].clock:
            return False  # several rounds are due at once when the slowest worker has left: one after the other
        held = self._held.pop(0)
        self._gather(held.worker, held.push, memoryview(held.payload))
        return True

    def _gather(self, worker: int, push: PushGradient, payload: memoryview) -> None:
        part, gradient = Part(worker, push.life, push.clock, push.version_read), self._gradient(push, payload)
        factor = self._rule.factor(self.replica.version - push.version_read)
        if not self._gathered and not self._rule.sums and self._is_complete(1, push.clock):
            self._apply([part], gradient.data.cast("B"), push.options, factor, push.weight)
            return
        if self._sum is None:
            self._sum = GradientSum(self._range.numel)
        self._sum.add(gradient, push.weight * factor)
        self._gathered.append(part)
        self._weight += push.weight
        self._options, self._drawn = push.options, push.drawn

    def _is_complete(self, num_gathered: int, clock: int) -> bool:
        return self._rule.is_complete(num_gathered, clock, self._slowest(), len(self._clocks()))

    def _make_update(self) -> bool:
        if not self._gathered or not self._is_complete(len(self._gathered), self._gathered[0].clock):
            return False
        assert self._sum is not None
        parts, self._gathered = self._gathered, []
        weight, self._weight = self._weight, 0.0
        lr_scale = 1.0 if self._rule.sums else min(1.0, self._sum.weight / weight)
        gradient = self._sum.take_total() if self._rule.sums else self._sum.take_mean()
        self._apply(parts, gradient.data.cast("B"), self._options, lr_scale, weight)
        return True

    def _apply(self, parts: list[Part], gradient: memoryview, options: Options, lr_scale: float, weight: float) -> None:
        """The options are those of the gradient that came last."""
        index, version = self._range.index, self.replica.version
        try:
            self._change(Applied(parts, options, lr_scale, weight, self._drawn if self._rule.sums else None), gradient)
        except MalformedPayload as fault:  # options that are wrong only here and now
            self._change(Discarded(parts), b"")
            for part in parts:
                self._refuse(part.worker, PushGradient.__name__, part.clock, f"the update that it was in failed: {fault}")
        else:
            self._terms.on_update(UpdateRecord(index, version, parts))
            self._tell(parts, version + 1, applied=True)
        second, self._second = self._second, []
        if second:
            self._discard(second)

    def _change(self, change: Change, payload: Payload) -> None:
        self.replica.take(change, payload)
        self._log(change, payload)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answer_pulls(self) -> None:
        replica, slowest = self.replica, self._slowest()
        for worker, pull in list(self._parked.items()):
            own_clock = self._received[worker]
            state = PullState(pull.clock, pull.newer_than, own_clock, slowest, replica.version)
            if not (replica.filled and self._rule.may_read(state)):
                continue
            del self._parked[worker]
            if self._rule.remembers_readers:
                self._change(Shown(worker), b"")
            header = ValuesPulled(self._range.index, pull.clock, replica.version, int(slowest), replica.weight)
            if pull.difference is None or self._copies is None:
                self._answer(worker, header, self._written(replica.values.value()))
            else:
                payload, since, copy = self._copies.answer(worker, pull.difference, replica.values.value())
                self._answer(worker, msgspec.structs.replace(header, since=since, copy=copy), payload)

    def _answer(self, worker: int, header: Any, payload: Payload = b"") -> None:
        self._answers.append(HeldAnswer(self.replica.sequence, worker, header, payload))
        self.release()

    def release(self) -> None:
        """Give the answers for which the last server is far enough."""
        while self._answers and self._answers[0].sequence <= self.stored:
            answer = self._answers.pop(0)
            self._terms.send(answer.worker, answer.header, answer.payload)
