"""From a bucket to the mean over workers: the collectives that an exchange asks for, carried out over a job's wire.

An exchange is a generator that yields collectives as data (`compress/rounds.py`, and `Mean` for what is not compressed) and is
sent their results. `ExchangeDriver` makes of it a generator of collectives under way, which whoever drives it resumes when they
are done: the compression thread, or, where nothing is computed between the collectives, simply the threads that begin the
exchange and wait for it (`DirectExchange`).

Each collective has a name of its own: the first number of its bucket in the model's channel, plus its place in the exchange.
Workers then need no common order among buckets. From a GPU, payloads go through pinned host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stretto.collectives.group import Group
from stretto.collectives.message_codec import MessageCodec
from stretto.collectives.plan import Kind
from stretto.collectives.request import InProgress
from stretto.collectives.staging import Staging
from stretto.collectives.urgency import Urgency
from stretto.compress.rounds import Collective, Gather, Sum, SumInHops, Transpose
from stretto.job import Job
from stretto.plan.auto import chosen_for

MOST: Final = 8  # collectives of one bucket in one round
LARGE_BYTES: Final = 1 << 20  # from here on an all-gather goes round the ring, where everybody sends to one neighbour only
LEAST_SEGMENT_BYTES: Final = 64  # a few elements of whatever dtype
KEPT_BUFFERS: Final = 256  # in pinned memory: one for each bucket of a large model

UnderWay = Generator[InProgress, None, None]
_Result = Generator[InProgress, None, Tensor]


@dataclass(frozen=True, slots=True)
class Mean:
    """-> the elementwise mean over workers, in place. `tail`: host memory that stands in for the last elements of a tensor on a
    GPU."""

    tensor: Tensor
    tail: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MeanOfMine(Mean):
    """-> of P equal parts of the tensor, in place, this worker's as the mean over workers; the others are undefined. `op`: or
    their sum."""

    op: str = "mean"


@dataclass(frozen=True, slots=True)
class EverybodysParts:
    """-> of P equal parts of the tensor, in place, each as its worker has it."""

    tensor: Tensor


class Sending(NamedTuple):
    """How the messages of an exchange are sent: how urgent they are among those of others, and their length (None: as ever)."""

    urgency: Urgency | None = None
    segment_bytes: int | None = None

    @classmethod
    def of(cls, priority: int, part_bytes: int | None, credit_bytes: int | None) -> Sending:
        """Without a credit the order is that of arrival."""
        segment_bytes = None if part_bytes is None else max(part_bytes, LEAST_SEGMENT_BYTES)
        return cls(None if credit_bytes is None else Urgency(priority, credit_bytes), segment_bytes)


Steps = Generator[Collective | Mean | EverybodysParts, Tensor, None]


def side_by_side(exchanges: Iterable[UnderWay]) -> UnderWay:
    """Several exchanges as one: while one waits for its collective, the others go on. Ends when all have ended; if one fails,
    when the collectives that were under way have ended too, for their memory is not free before."""
    waiting: deque[tuple[UnderWay, InProgress]] = deque()
    failure: Exception | None = None
    for exchange in exchanges:
        try:
            first = next(exchange, None)
        except Exception as error:
            failure = error
            break
        if first is not None:
            waiting.append((exchange, first))
    while waiting:
        exchange, pending = waiting.popleft()
        problem: BaseException | None = None
        if pending.done:
            problem = pending.error
        else:
            try:
                yield pending
            except Exception as failed:
                problem = failed
        problem = problem or failure  # also the others must know that they will not go on
        try:
            following = next(exchange, None) if problem is None else exchange.throw(problem)
        except Exception as raised:
            failure = failure or raised
            continue
        if following is not None:
            waiting.append((exchange, following))
    if failure is not None:
        raise failure


class DirectExchange:
    """An exchange of one collective, with nothing to compute: begun here and now, ended by whoever waits for it."""

    def __init__(self, under_way: UnderWay) -> None:
        self._under_way = under_way
        self._pending = next(under_way, None)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when all of it has come, from whichever thread notices."""
        if self._pending is None:
            callback()
        else:
            self._pending.when_done(callback)

    @property
    def arrived(self) -> bool:
        return self._pending is None or (self._pending.done and self._pending.error is None)

    def wait(self) -> None:
        while self._pending is not None:
            self._pending.wait()
            self._pending = next(self._under_way, None)


class _Call(NamedTuple):
    """What a collective of an exchange is started with, beside its data."""

    name: tuple[int, int]
    label: str
    sending: Sending


class ExchangeDriver:
    """Carries out the exchanges of one model, among the members of a group."""

    def __init__(self, job: Job, group: Group, channel: int, algorithm: str) -> None:
        self._job = job
        self._group = group
        self._channel = channel
        self._algorithm = algorithm
        self._staging = Staging(kept_buffers=KEPT_BUFFERS)

    def drive(self, steps: Steps, first_number: int, label: str, sending: Sending) -> UnderWay:
        """Run `steps` to its end, each collective with the next number from `first_number` on."""
        result: Tensor | None = None
        for number in range(first_number, first_number + MOST + 1):
            try:
                asked = next(steps) if result is None else steps.send(result)
            except StopIteration:
                return
            result = yield from self._carry_out(asked, _Call((self._channel, number & 0xFFFFFFFF), label, sending))
        raise AssertionError(f"an exchange of more than {MOST} collectives")

    def _carry_out(self, asked: Collective | Mean | EverybodysParts, call: _Call) -> _Result:
        if isinstance(asked, MeanOfMine):
            return self._run(Kind.REDUCE_SCATTER, asked.tensor, self._in_parts(asked.tensor), call, op=asked.op)
        if isinstance(asked, EverybodysParts):
            return self._run(Kind.ALL_GATHER, asked.tensor, self._in_parts(asked.tensor), call)
        if isinstance(asked, Mean):
            return self._reduce(asked.tensor, "mean", call, asked.tail)
        if isinstance(asked, Sum):
            return self._reduce(asked.tensor, "sum", call)
        if isinstance(asked, Transpose):
            return self._run(Kind.ALL_TO_ALL, asked.rows, "pairwise", call)
        if isinstance(asked, SumInHops):
            return self._run(Kind.ALL_REDUCE, asked.tensor, self._algorithm, call, message_codec=asked.hop)
        assert isinstance(asked, Gather), "only servers serve"
        row, table = asked.row, asked.into
        if table is None:
            table = torch.empty((self._group.size, *row.shape), dtype=row.dtype, device=row.device)
        table[self._group.rank] = row
        return self._run(Kind.ALL_GATHER, table, "ring" if table.nbytes >= LARGE_BYTES else "direct", call)

    def _reduce(self, tensor: Tensor, op: str, call: _Call, tail: Tensor | None = None) -> _Result:
        algorithm = self._algorithm
        if algorithm == "native":
            return self._reduce_natively(tensor, op, call.label)
        if algorithm == "auto" and self._group.size > 1:
            algorithm = chosen_for(self._group, "gradients").algorithm(tensor.nbytes)
        return self._run(Kind.ALL_REDUCE, tensor, algorithm, call, op=op, tail=tail)

    def _in_parts(self, tensor: Tensor) -> str:
        """The algorithm by which parts are combined or gathered: as asked for, if there is one of that name."""
        if self._algorithm in ("ring", "direct"):
            return self._algorithm
        return "ring" if tensor.nbytes >= LARGE_BYTES else "direct"

    def _reduce_natively(self, tensor: Tensor, op: str, label: str) -> _Result:
        yield from ()  # torch's own has ended when it returns
        return self._job.all_reduce(tensor, op, "native", label=label)

    def _run(
        self,
        kind: Kind,
        tensor: Tensor,
        algorithm: str,
        call: _Call,
        *,
        op: str = "sum",
        message_codec: MessageCodec | None = None,
        tail: Tensor | None = None,
    ) -> _Result:
        if self._group.size > 1:
            flat, ready, bring_back = self._staging.lend(tensor if tensor.dim() == 1 else tensor.view(-1), tail)
            yield self._group.start(
                kind, flat, algorithm, op=op, name=call.name, ready=ready, label=call.label, message_codec=message_codec,
                urgency=call.sending.urgency, segment_bytes=call.sending.segment_bytes,
            )  # fmt: skip
            if bring_back is not None:
                bring_back()
        return tensor
