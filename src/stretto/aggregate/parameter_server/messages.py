"""What workers and servers say to each other. Bulk (gradients, values, copies of ranges) is the payload of its message.

A worker to the first server of a range, and the answer:

    PushGradient     a gradient of clock t, computed on version v          PushTaken      it is in, and every server has it
    PullValues       what is there at clock t                              ValuesPulled   the values
    FillValues       the values to begin with                              RangeFilled
    ExportRange      all that is kept of it, for a checkpoint              RangeExported  values and optimizer state
    EnterRange       count me among the workers                            RangeEntered   with this clock
    LeaveRange       count me no more                                      RangeLeft

    one that has asked for a receipt                                       PushReceived   its bytes are here
    to any of these also                                                   RequestRefused  it is wrong, and has changed nothing
                                                                           NotHead         ask another one
    RangeQuery       who has this range, now that these have died?         RangeReport     the latest chain I know of

Between servers:

    LogEntry         the next change of a range, down its chain            EntryStored     the last of the chain has it
    InstallRange     a new chain, with a copy for whoever needs one        RangeInstalled  all that are concerned have it
    ServerJoins      I am here, and have nothing yet

A first server to everybody:

    RangesPlaced     these ranges have these chains now

Every message of a worker carries the digest of the layout and the worker's life, so that what is meant for another model, or
comes from a worker that was replaced, is refused. An *attempt* is one time that a worker sends all its requests for a range to
a server. A server that has turned away one of them takes none of the others, though it may serve the range when they come.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from stretto.aggregate.parameter_server.shard_optimizer import OptionValue
from stretto.collectives.urgency import Urgency

Options = dict[str, OptionValue]


class RangeChain(NamedTuple):
    """The servers of a range, the first of which serves it. A chain of a higher epoch is a later one."""

    range: int
    epoch: int
    members: list[int]


class Part(NamedTuple):
    """A gradient in an update, by the life of a worker that pushed it."""

    worker: int
    life: int
    clock: int
    version_read: int


class CodecRound(NamedTuple):
    """What a codec needs to know of a round. `draw`: the round from which its random numbers are drawn
    (`compress/random_numbers.py`). `unheard`: slices of the range, as first and last + 1 element, for which workers did not use
    the reply of the round before."""

    draw: int
    unheard: list[tuple[int, int]]


class CopyName(NamedTuple):
    """A worker's copy of a range, as a server has sent it (`answers.py`). No two have the same name."""

    server: int
    life: int
    number: int


NO_COPY: Final = CopyName(-1, 0, 0)  # of a worker that has none yet


class DifferenceTo(NamedTuple):
    """Values may be sent as the difference to this copy. `draw`: the round from which a codec's random numbers are drawn."""

    copy: CopyName
    draw: int


# -- changes of a range -----------------------------------------------------------------------------------------------


class Applied(msgspec.Struct, frozen=True, tag=True):
    """An update of the values by one combined gradient, the payload."""

    parts: list[Part]
    options: Options
    lr_scale: float
    weight: float  # of all parts
    drawn: CodecRound | None = None  # if the sum is handed out encoded


class Discarded(msgspec.Struct, frozen=True, tag=True):
    """Gradients that came too late to be applied."""

    parts: list[Part]


class Filled(msgspec.Struct, frozen=True, tag=True):
    """The values to begin with, the payload. `exported`: as `RangeExported` had them, with the optimizer's state."""

    exported: bool = False


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A worker counts from now on, or goes on at a later clock."""

    worker: int
    life: int
    clock: int


class Retired(msgspec.Struct, frozen=True, tag=True):
    """A worker counts no more. Pushes that it has made before may still come."""

    worker: int


class Shown(msgspec.Struct, frozen=True, tag=True):
    """A worker has pulled the values as they are now."""

    worker: int


Change = Applied | Discarded | Filled | Admitted | Retired | Shown


# -- a worker to a server ---------------------------------------------------------------------------------------------


class PushGradient(msgspec.Struct, frozen=True, tag=True):
    layout: int
    life: int
    attempt: int
    range: int
    clock: int
    version_read: int
    weight: float
    options: Options
    drawn: CodecRound | None = None  # if the gradient is encoded
    receipt: int | None = None  # say `PushReceived` with it, whatever becomes of it


class PullValues(msgspec.Struct, frozen=True, tag=True):
    layout: int
    life: int
    attempt: int
    range: int
    clock: int
    newer_than: int  # with backup workers: how many steps were taken before the last one
    urgency: Urgency | None = None  # of the answer, among those to this worker
    difference: DifferenceTo | None = None  # that the answer may be; None: it is the values


class FillValues(msgspec.Struct, frozen=True, tag=True):
    """`exported`: the payload is what a `RangeExported` had, or as such."""

    layout: int
    life: int
    attempt: int
    range: int
    exported: bool = False


class ExportRange(msgspec.Struct, frozen=True, tag=True):
    """Changes nothing, and waits for nobody's push."""

    layout: int
    life: int
    attempt: int
    range: int


class EnterRange(msgspec.Struct, frozen=True, tag=True):
    layout: int
    life: int
    attempt: int
    range: int
    clock: int | None  # None: at the clock of the slowest worker


class LeaveRange(msgspec.Struct, frozen=True, tag=True):
    layout: int
    life: int
    attempt: int
    range: int


class RangeQuery(msgspec.Struct, frozen=True, tag=True):
    """Answered when the receiver knows, too, that these lives of servers have ended: then nothing comes from them any more."""

    range: int
    ended: list[tuple[int, int]]  # rank and life


ServedRequest = PushGradient | PullValues | FillValues | ExportRange | EnterRange | LeaveRange


# -- a server to a worker ---------------------------------------------------------------------------------------------


class PushReceived(msgspec.Struct, frozen=True, tag=True):
    """The bytes of a push have come. It may have to wait for others before it is taken."""

    receipt: int


class PushTaken(msgspec.Struct, frozen=True, tag=True):
    range: int
    clock: int
    version: int
    applied: bool | None  # False: it came too late, and was discarded; None: it was counted before, as one or the other
    kept_us: int = 0  # for so long it was at the server


class ValuesPulled(msgspec.Struct, frozen=True, tag=True):
    range: int
    clock: int
    version: int
    min_clock: int  # of the workers that count: all of their earlier gradients are in the values
    weight: float  # of the gradients in the last update
    kept_us: int = 0  # for so long the request was at the server
    waited_for: int = -1  # the slowest worker, if the rule held the request back
    since: CopyName | None = None  # the copy to which the payload is the difference; None: these are the values
    copy: CopyName | None = None  # what the worker has when it has read that, if it has asked for differences


class RangeFilled(msgspec.Struct, frozen=True, tag=True):
    range: int


class RangeExported(msgspec.Struct, frozen=True, tag=True):
    """The payload is in `range_format.py`. All gradients of earlier clocks than `slowest` are in it, and none from `fastest` on:
    the clocks of the workers that count."""

    range: int
    version: int = 0
    slowest: int = 0
    fastest: int = 0


class RangeEntered(msgspec.Struct, frozen=True, tag=True):
    range: int
    clock: int


class RangeLeft(msgspec.Struct, frozen=True, tag=True):
    range: int


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """The request of that kind is wrong, and has changed nothing. `clock`: of a push."""

    range: int
    request: str
    clock: int
    reason: str


ServedAnswer = PushTaken | ValuesPulled | RangeFilled | RangeExported | RangeEntered | RangeLeft | RequestRefused


class NotHead(msgspec.Struct, frozen=True, tag=True):
    """The sender does not serve this range, or no longer, and takes no request of this attempt. The last chain that it has heard
    of; whether it has a copy."""

    chain: RangeChain
    holds: bool
    attempt: int


class RangeReport(msgspec.Struct, frozen=True, tag=True):
    """The last chain that the sender has heard of; whether it has a copy, and so may come to serve the range."""

    chain: RangeChain
    holds: bool


class RangesPlaced(msgspec.Struct, frozen=True, tag=True):
    """Active chains, and the servers that the sender knows to live."""

    chains: list[RangeChain]
    servers: list[int]


# -- between servers --------------------------------------------------------------------------------------------------


class LogEntry(msgspec.Struct, frozen=True, tag=True):
    range: int
    epoch: int
    sequence: int
    change: Change


class EntryStored(msgspec.Struct, frozen=True, tag=True):
    range: int
    epoch: int
    sequence: int


class WorkerClock(NamedTuple):
    """A worker: the clock that it began with, that of the push that comes next, and whether others have to wait for it."""

    life: int
    first: int
    clock: int
    counts: bool = True


class ReplicaHeader(msgspec.Struct, frozen=True):
    """All of a replica but its values."""

    sequence: int
    version: int
    floor: int
    weight: float
    filled: bool
    workers: dict[int, WorkerClock]


class InstallRange(msgspec.Struct, frozen=True, tag=True):
    """A new chain. It passes through the servers of `path`, in that order; those that are no members drop the range.

    The payload is a copy of the values, or empty for a server that is known to have them as they are at this sequence.
    `lives`: which lives of these servers are meant.
    """

    range: int
    epoch: int
    members: list[int]
    path: list[int]
    lives: dict[int, int]
    replica: ReplicaHeader


class RangeInstalled(msgspec.Struct, frozen=True, tag=True):
    range: int
    epoch: int
    sequence: int


class ServerJoins(msgspec.Struct, frozen=True, tag=True):
    layout: int


ToServer = ServedRequest | RangeQuery | RangesPlaced | LogEntry | EntryStored | InstallRange | RangeInstalled | ServerJoins
ToClient = ServedAnswer | PushReceived | NotHead | RangeReport | RangesPlaced | RangeQuery
