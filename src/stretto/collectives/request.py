"""What is asked for, and what one waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from stretto.collectives.message_codec import MessageCodec, check_message_codec
from stretto.collectives.messages import Name
from stretto.collectives.plan import Kind, Plan
from stretto.collectives.reduction import check_op, dtype_code, dtype_name
from stretto.collectives.schedule import check_length
from stretto.collectives.urgency import Urgency
from stretto.errors import ConfigurationError

DEFAULT_SEGMENT_BYTES: Final = 2 << 20
ROOTED: Final = (Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER)


@dataclass(frozen=True, slots=True)
class Request:
    """What to run. `tensor` is contiguous, in host memory, and changed in place."""

    plan: Plan
    tensor: torch.Tensor
    op: str = "sum"
    channel: int = 0
    sequence: int = 0
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    label: str = ""  # what the caller means by it; must be the same on all ranks, like the rest
    message_codec: MessageCodec | None = None  # how messages are encoded; None: as they are
    members: tuple[int, ...] | None = None  # the job ranks that take part, by place in the plan; None: all of the job
    among: str = ""  # the members in words, where they are not all of the job
    generation: int = 0  # the last one in which a member had joined when the group was made
    part_of: Name | None = None  # a round of the whole job, (channel, number), that fails as a whole: see `failures.py`
    urgency: Urgency | None = None  # when its messages go, among those of other collectives; each rank's own affair
    arrive_s: float | None = None  # a deadline of its own, in place of the job's; each rank's own affair

    def __post_init__(self) -> None:
        """Refuse what cannot work in the caller's thread, before anything is sent."""
        plan = self.plan
        if not self.tensor.is_cpu:
            raise ConfigurationError(f"a tensor on {self.tensor.device} where host memory is needed. Write tensor.cpu().")
        dtype_code(self.tensor.dtype)
        if plan.kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
            check_op(self.op, self.tensor.dtype)
        if self.message_codec is not None:
            check_message_codec(self.message_codec, plan, self.op, self.tensor.dtype)
        check_length(plan, self.tensor.numel())

    @property
    def name(self) -> Name:
        return self.channel, self.sequence

    @property
    def needs_everybody(self) -> bool:
        """Whether it ends on no rank before all ranks have begun it. Not so where some ranks only send, or nothing is sent."""
        if self.plan.kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_TO_ALL):
            return self.tensor.numel() > 0
        return self.plan.kind is Kind.BARRIER

    @property
    def num_bytes(self) -> int:
        """The length of the whole vector on the wire."""
        count = self.tensor.numel()
        return count * self.tensor.element_size() if self.message_codec is None else self.message_codec.num_bytes(count)

    @property
    def belief(self) -> str:
        """What this rank thinks everybody is doing; must be the same text on all ranks."""
        plan = self.plan
        what = f"{plan.kind.value}({dtype_name(self.tensor.dtype)}[{self.tensor.numel()}]"
        if plan.kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
            what += f", op={self.op}"
        if plan.kind in ROOTED:
            what += f", root={plan.root}"
        if self.message_codec is not None:
            what += f", message_codec={self.message_codec!r}"
        among = self.among or f"world_size={plan.size}"
        return f"{what}, algorithm={plan.algorithm}, {among}){self.label}"


class OngoingCollective:
    """A collective under way on this rank, as the failure agreement sees it (`failures.py`)."""

    request: Request  # what it is
    name: Name
    belief: str
    touched_at: float = 0.0  # when something of it has moved last
    failing: bool = False  # it must not end by itself any more, for a verdict will end it
    ticket: int = 0  # of its verdict

    def waiting_for(self) -> list[int]:
        """Ranks from which something is due now, or that have not begun what is to be sent to them."""
        return []


class InProgress:
    """Something under way, to wait for from any thread. Whoever has it under way sees to it that it ends: `finish`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._finished = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self._finished.set()
        self._tell()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when it is done: from the thread that ends it, or at once."""
        with self._lock:
            self._callbacks.append(callback)
        if self._finished.is_set():
            self._tell()

    def _tell(self) -> None:
        """The thread that ends it and one that adds a callback may be here at once: each callback runs once."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def wait_until(self, deadline: float) -> bool:
        """Wait for its end so long (`time.monotonic`), and say whether it has come, well or not."""
        return self._finished.wait(max(0.0, deadline - time.monotonic()))

    def wait(self) -> None:
        """Return when it is done; raise what went wrong."""
        while not self._finished.is_set():
            self._finished.wait(1.0)  # in slices, so that Ctrl-C gets through on every platform
        if self.error is not None:
            raise self.error


Watch = Callable[["Pending", Callable[[], None]], None]  # makes a thread wait, and keeps an eye on it


class Pending(InProgress):
    """A collective under way. Its deadline is its own (`Timeouts.arrive_s` without progress)."""

    def __init__(
        self,
        request: Request,
        help_along: Callable[[], None] | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__()
        self.request = request
        self.ready: Callable[[], bool] | None = None
        self.made_at = time.monotonic()
        self._help_along = help_along  # one turn of the loop, where no thread turns it
        self._watch = watch

    def wait(self) -> None:
        """Return when it is done; raise what went wrong. Whoever ends the loop ends every collective in it, so this returns."""
        if not self._finished.is_set():
            if self._watch is None:
                self._wait()
            else:
                self._watch(self, self._wait)
        super().wait()

    def _wait(self) -> None:
        while not self._finished.is_set():
            if self._help_along is not None:
                self._help_along()
            else:
                self._finished.wait(1.0)
