"""What ranks tell each other about a collective, beside its data.

    Begun            I have begun this, and believe it is ...         to those one will receive from; in a dispute to all members
    Failed           this has failed, and so and so is to blame       to all members
    ProgressQuery    where are you with this? (also: a knock)         to those one waits for
    ProgressReport   not begun, but in that instead; or begun,        the answer
                     and waiting for these; and at this place

Small msgpack messages over `Wire.post`. What cannot be decoded is logged and ignored: a bad message must not end a job.
"""

from __future__ import annotations

import logging
from typing import Final, TypeVar

import msgspec

from stretto.errors import FrameError, PeerLost, RankMismatch, StrettoError, WireError, WireTimeout

TOPIC_BEGUN: Final = 16
TOPIC_BELIEF: Final = 17
TOPIC_FAILED: Final = 18
TOPIC_QUERY: Final = 19
TOPIC_REPORT: Final = 20
TOPIC_KNOCK: Final = 21
TOPIC_ROUND_FAILED: Final = 22

log = logging.getLogger("stretto.collectives")
Name = tuple[int, int]  # channel, sequence
T = TypeVar("T")


def is_later(sequence: int, other: int) -> bool:
    """Whether one collective of a channel comes after another. Numbers wrap around after 2**32."""
    return 0 < (sequence - other) & 0xFFFFFFFF < 1 << 31


class Begun(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int
    belief: str
    place: str = ""  # where in the program, said when ranks disagree


class Failed(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int
    kind: str  # "lost", "timeout", "frame", "broken" or "mismatch"
    rank: int  # who is to blame; -1: nobody alone
    text: str
    waited_s: float
    doing: str  # what that rank does instead, if it was asked
    last: int  # all collectives of the channel up to this one have failed: mostly just `sequence`

    def includes(self, name: Name) -> bool:
        channel, sequence = name
        return channel == self.channel and not is_later(self.sequence, sequence) and not is_later(sequence, self.last)


class ProgressQuery(msgspec.Struct, frozen=True, array_like=True):
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


class ProgressReport(msgspec.Struct, frozen=True, array_like=True):
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


def as_failed(name: Name, error: StrettoError, last: int | None = None) -> Failed:
    """`last`: the last of the channel's collectives that have failed with it, if it was not this one alone."""
    kind, rank, text, waited_s, doing = "broken", -1, str(error), 0.0, ""
    if isinstance(error, PeerLost):
        kind, rank, text = "lost", error.rank, error.reason
    elif isinstance(error, WireTimeout):
        kind, rank, text, waited_s, doing = "timeout", error.rank, error.tag, error.waited_s, error.doing
    elif isinstance(error, FrameError):
        kind, rank, text = "frame", error.rank, error.problem
    elif isinstance(error, RankMismatch):
        kind = "mismatch"
    return Failed(*name, kind, rank, text, waited_s, doing, name[1] if last is None else last)


def as_error(failed: Failed) -> StrettoError:
    if failed.kind == "timeout":
        return WireTimeout(failed.rank, failed.text, failed.waited_s, failed.doing)
    if failed.kind == "frame":
        return FrameError(failed.rank, failed.text)
    if failed.kind == "mismatch":
        return RankMismatch(failed.text)
    if failed.kind == "broken":
        return WireError(failed.text)
    return PeerLost(failed.rank, failed.text)
