"""One collective in progress on this rank: which tasks may start, what has been sent, received, added and copied."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from stretto.collectives.failures import HasFailed
from stretto.collectives.plan import Kind, Plan
from stretto.collectives.reduction import dtype_code
from stretto.collectives.request import ROOTED, OngoingCollective, Pending, Request
from stretto.collectives.schedule import Action, Schedule, Task, compile_encoded, compile_plan
from stretto.errors import FrameError, MalformedPayload, WireError
from stretto.wire.base import Consume, Handle, Tag
from stretto.wire.frames import DTYPE_CODES

if TYPE_CHECKING:
    from stretto.collectives.execute import Communicator
    from stretto.collectives.message_codec import MessageCodec

EAGER_BYTES: Final = 64 << 10  # up to this many bytes a collective is sent without an announcement
PLAIN_BYTES: Final = DTYPE_CODES["bytes"]

OnDone = Callable[[Handle], None]
Members = tuple[int, ...] | None


@lru_cache(maxsize=1024)
def compiled(plan: Plan, num_elements: int, segment: int, codec: MessageCodec | None = None, members: Members = None) -> Schedule:
    """The schedule for segments of so many elements (with a codec: bytes). A plan's peers are places among the members; where it
    meets the wire, here, they become ranks of the job, once for all messages."""
    schedule = compile_plan(plan, num_elements, segment) if codec is None else compile_encoded(plan, num_elements, segment, codec)
    return schedule if members is None else schedule.among(members)


def _schedule(request: Request) -> Schedule:
    plan, tensor, codec = request.plan, request.tensor, request.message_codec
    segment = request.segment_bytes if codec is not None else request.segment_bytes // tensor.element_size()
    return compiled(plan, tensor.numel(), segment, codec, request.members)


def _some_only_send(request: Request) -> bool:
    """Whether some member receives nothing, and would never hear that others disagree."""
    plan = request.plan
    return plan.kind in ROOTED or (plan.kind is Kind.REDUCE_SCATTER and request.tensor.numel() < plan.size)


class CollectiveRun(OngoingCollective):
    """One collective in progress on this rank."""

    def __init__(self, communicator: Communicator, pending: Pending, now: float) -> None:
        self.request: Request = pending.request
        request = self.request
        self.communicator = communicator
        self.pending = pending
        self.name = request.name
        self.belief = request.belief
        self.touched_at = now
        self.digest = zlib.crc32(self.belief.encode())
        self.code = dtype_code(request.tensor.dtype) if request.message_codec is None else PLAIN_BYTES
        self.schedule = _schedule(request)
        self.eager = request.num_bytes <= EAGER_BYTES
        self.confirmed = _some_only_send(request)
        self.counts = list(self.schedule.num_dependencies)
        self.remaining = len(self.counts)
        self.ready = deque(number for number, count in enumerate(self.counts) if count == 0)
        self.pumping = False
        self.held: dict[int, list[int]] = {}  # sends that wait for their receiver to begin
        self.opened: set[int] = set()  # receivers that have said that they have begun
        self.unasked: Counter[int] = Counter()  # bytes sent to receivers that have not
        self.credit_taken: Counter[int] = Counter()  # bytes on their way, of those that `SendQueue` counts
        self.unusable: Exception | None = None  # why what arrived could not be taken in
        self.accumulators = communicator.buffers_for(request, self.schedule)

    def pump(self) -> None:
        """Start every task that may start. Tasks that finish at once make others ready, hence the loop, not recursion."""
        if self.pumping:
            return
        self.pumping = True
        try:
            while self.ready and not self.pending.done and not self.failing:
                self._start(self.ready.popleft())
        except WireError:
            raise
        except Exception as error:
            self.communicator.broke(self.pending, error)
        self.pumping = False
        if self.remaining == 0 and not self.pending.done and not self.failing and not self.unconfirmed():
            self.communicator.completed(self)

    def _start(self, number: int) -> None:
        task = self.schedule.tasks[number]
        if task.action is Action.SEND:
            if self.communicator.may_send(self, task.peer, self.accumulators[task.buffer].num_bytes(task.start, task.stop)):
                self.send(number, task)
            else:
                self.held.setdefault(task.peer, []).append(number)
        elif task.action is Action.RECEIVE:
            self._receive(number, task)
        else:
            self._work_locally_traced(task)
            self._finished(number)

    def send(self, number: int, task: Task) -> None:
        accumulator = self.accumulators[task.buffer]
        view = accumulator.bytes_of(task.start, task.stop)
        tag = Tag(*self.name, task.index, self.digest)
        urgency = self.request.urgency
        if urgency is None:
            self._hand_over(view, task.peer, tag, partial(self._on_done, number))
        else:
            hand_over = partial(self._hand_over, view, task.peer, tag)
            self.communicator.queue.submit(self, task.peer, urgency, view.nbytes, hand_over, partial(self._on_done, number))

    def _hand_over(self, view: memoryview, to: int, tag: Tag, on_done: OnDone) -> None:
        tracer = self.communicator.tracer
        if tracer is not None:
            on_done = tracer.watch("send", to, view.nbytes, self.belief, on_done)
        self.communicator.wire.send(view, to, tag, self.code, on_done)

    def _receive(self, number: int, task: Task) -> None:
        accumulator = self.accumulators[task.buffer]
        num_bytes = accumulator.num_bytes(task.start, task.stop)
        into = None if task.add else accumulator.place(task.start, task.stop)
        tag = Tag(*self.name, task.index, self.digest)
        consume: Consume = partial(self._consume, task)
        on_done: OnDone = partial(self._on_done, number)
        tracer = self.communicator.tracer
        if tracer is not None:
            on_done = tracer.watch("receive", task.peer, num_bytes, self.belief, on_done)
            if into is None:
                consume = tracer.timed("reduce", task.peer, num_bytes, self.belief, consume)
        self.communicator.wire.recv(task.peer, tag, num_bytes, self.code, consume, on_done, into)

    def _consume(self, task: Task, incoming: memoryview) -> None:
        if self.failing:  # nobody will look at the result
            return
        accumulator = self.accumulators[task.buffer]
        try:
            if task.add:
                accumulator.combine(task.start, task.stop, incoming, final=task.final, arrived_first=task.arrived_first)
            elif incoming.nbytes:
                accumulator.copy_in(task.start, task.stop, incoming)
        except MalformedPayload as problem:  # to the wire the transfer went well: `_on_done`, which comes next, says otherwise
            self.unusable = FrameError(task.peer, f"message {task.index} of {self.belief}: {problem}")
        except Exception as problem:
            self.unusable = problem

    def _work_locally_traced(self, task: Task) -> None:
        tracer = self.communicator.tracer
        if tracer is None or not task.add:
            self._work_locally(task)
        else:
            num_bytes = (task.stop - task.start) * self.accumulators[task.buffer].itemsize
            tracer.timed("reduce", -1, num_bytes, self.belief, self._work_locally)(task)

    def _work_locally(self, task: Task) -> None:
        target = self.accumulators[task.buffer]
        incoming = self.accumulators[task.source].bytes_of(task.start, task.stop)
        if task.add:
            target.combine(task.start, task.stop, incoming, final=task.final)
        else:
            target.copy_in(task.start, task.stop, incoming)
            if task.final:
                target.finish(task.start, task.stop)

    def _on_done(self, number: int, handle: Handle) -> None:
        if self.pending.done:
            return
        error = handle.error or self.unusable
        if isinstance(error, WireError):
            self.communicator.tell(HasFailed(self.request, error))
            return
        if error is not None:
            self.communicator.broke(self.pending, error)
            return
        self._finished(number)
        self.pump()

    def _finished(self, number: int) -> None:
        self.remaining -= 1
        self.counts[number] = -1  # neither waiting nor ready any more: `waiting_for` must not blame anybody for it
        self.touched_at = self.communicator.wire.now()
        for successor in self.schedule.successors[number]:
            self.counts[successor] -= 1
            if self.counts[successor] == 0:
                self.ready.append(successor)

    def unconfirmed(self) -> frozenset[int]:
        """Receivers that have yet to say that they are in the same collective, where they must."""
        return self.schedule.destinations - self.opened if self.confirmed else frozenset()

    def waiting_for(self) -> list[int]:
        tasks, counts = self.schedule.tasks, self.counts
        missing = {peer for peer, numbers in self.held.items() if numbers} | self.unconfirmed()
        if self.remaining:
            ready = (task for task, count in zip(tasks, counts, strict=True) if count == 0)
            missing |= {task.peer for task in ready if task.action is Action.RECEIVE}
        return sorted(missing - {self.communicator.wire.rank})
