"""What ranks tell each other about a collective, beside its data.

Readiness, by `execute.py`, on topics of their own:

    Begun            I have begun this, and believe it is ...         to those one will receive from
    ProgressQuery    (as a knock) tell me when you begin this         to those that are too far behind

Failure, by the machine of `failures.py`:

    Failed           this has failed, and so and so is to blame:      to all members
                     proposed, or settled
    Believes         ranks disagree; I believe that this is ...       to all members
    ProgressQuery    where are you with this?                         to those one waits for
    ProgressReport   not begun, but in that instead; or begun,        the answer
                     and waiting for these; and at this place

Small msgpack messages over `Wire.post`. What cannot be decoded is logged and ignored: a bad message must not end a job.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from stretto.errors import FrameError, PeerLost, RankMismatch, StrettoError, WireError, WireTimeout
from stretto.wire.agreement import rank_mismatch

TOPIC_BEGUN: Final = 16
TOPIC_FAILURES: Final = 17
TOPIC_KNOCK: Final = 21

log = logging.getLogger("stretto.collectives")
Name = tuple[int, int]  # channel, sequence
T = TypeVar("T")


class Subject(NamedTuple):
    """What has failed: a collective, or a round of the whole job. The two are numbered independently of each other."""

    channel: int
    sequence: int
    is_round: bool = False

    @property
    def name(self) -> Name:
        return self.channel, self.sequence


def is_later(sequence: int, other: int) -> bool:
    """Whether one collective of a channel comes after another. Numbers wrap around after 2**32."""
    return 0 < (sequence - other) & 0xFFFFFFFF < 1 << 31


class Begun(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int
    belief: str


class Believes(msgspec.Struct, frozen=True, array_like=True, tag=1):
    channel: int
    sequence: int
    belief: str
    place: str | None  # where in the program; None: not said by that rank itself, but known from another message of its
    is_answer: bool = False  # by a rank where it has ended

    @property
    def name(self) -> Name:
        return self.channel, self.sequence


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    subject: Subject
    members: list[int] | None  # the ranks that come to this verdict together; None: all of the job
    kind: str  # "lost", "timeout", "frame", "broken", "apart" (ranks are in different streams) or "mismatch" (see `beliefs`)
    rank: int  # who is to blame; -1: nobody alone
    text: str
    waited_s: float = 0.0
    doing: str = ""  # what that rank does instead, if it was asked
    beliefs: dict[int, tuple[str, str]] = {}  # what ranks that disagree believe it to be, and where they are
    settled: bool = False  # else proposed


class ProgressQuery(msgspec.Struct, frozen=True, array_like=True, tag=3):
    channel: int
    sequence: int


class Elsewhere(msgspec.Struct, frozen=True, array_like=True):
    """What a thread that would have to begin one collective is blocked in instead."""

    channel: int
    sequence: int
    belief: str
    place: str
    needs: list[int] | None  # ranks that must begin it before that thread goes on; None: all of the job
    members: list[int] | None  # ranks that take part in it; None: all of the job


class ProgressReport(msgspec.Struct, frozen=True, array_like=True, tag=4):
    channel: int
    sequence: int
    begun: bool
    waiting_for: list[int]
    belief: str  # empty: not begun, or so long ago that it is forgotten
    place: str
    instead: list[Elsewhere]  # of every thread that could begin it; empty: some thread is free to


def decode(source: int, body: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        log.warning("ignored a malformed %s from rank %d: %s", kind.__name__, source, problem)
        return None


def as_failed(subject: Subject, members: Sequence[int] | None, error: StrettoError) -> Failed:
    kind, rank, text, waited_s, doing = "broken", -1, str(error), 0.0, ""
    if isinstance(error, PeerLost):
        kind, rank, text = "lost", error.rank, error.reason
    elif isinstance(error, WireTimeout):
        kind, rank, text, waited_s, doing = "timeout", error.rank, error.tag, error.waited_s, error.doing
    elif isinstance(error, FrameError):
        kind, rank, text = "frame", error.rank, error.problem
    elif isinstance(error, RankMismatch):
        kind = "apart"
    return Failed(subject, None if members is None else list(members), kind, rank, text, waited_s, doing)


def as_error(failed: Failed) -> StrettoError:
    if failed.kind == "timeout":
        return WireTimeout(failed.rank, failed.text, failed.waited_s, failed.doing)
    if failed.kind == "frame":
        return FrameError(failed.rank, failed.text)
    if failed.kind == "mismatch":
        beliefs, places = ({rank: said[which] for rank, said in failed.beliefs.items()} for which in (0, 1))
        return rank_mismatch(beliefs, places)
    if failed.kind == "apart":
        return RankMismatch(failed.text)
    if failed.kind == "broken":
        return WireError(failed.text)
    return PeerLost(failed.rank, failed.text)
