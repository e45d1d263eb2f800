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
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from stretto.collectives.mismatch import rank_mismatch
from stretto.errors import FrameError, PeerLost, RankMismatch, StrettoError, WireError, WireTimeout

TOPIC_BEGUN: Final = 16
TOPIC_FAILURES: Final = 17
TOPIC_KNOCK: Final = 21

log = logging.getLogger("stretto.collectives")
Name = tuple[int, int]  # channel, sequence
ROUNDS: Final = 1 << 32  # added to their channels: rounds and collectives are numbered independently of each other
MAX_TEXT: Final = 64_000
ERRORS: Final = (PeerLost, WireTimeout, FrameError, RankMismatch, WireError)
KINDS: Final[dict[str, Callable[..., WireError]]] = {error.__name__: error for error in ERRORS}
T = TypeVar("T")


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
    channel: int  # from `ROUNDS` on: not of a collective, but of a round of the whole job
    sequence: int
    members: list[int] | None  # the ranks that come to this verdict together; None: all of the job
    kind: str  # of error
    arguments: tuple[int | float | str, ...]  # of the error
    beliefs: dict[int, tuple[str, str]] = {}  # what ranks that disagree believe it to be, and where they are
    settled: bool = False  # else proposed

    def __post_init__(self) -> None:
        """Refuse what no error can be made from: to whoever decodes it, it is a malformed message."""
        if self.kind not in KINDS:
            raise ValueError(f"no kind of error: {self.kind!r}")
        KINDS[self.kind](*self.arguments)

    @property
    def name(self) -> Name:
        return self.channel, self.sequence


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


FailureMessage = Failed | Believes | ProgressQuery | ProgressReport


def decode(source: int, body: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        log.warning("ignored a malformed %s from rank %d: %s", kind.__name__, source, problem)
        return None


def _short(text: str) -> str:
    """What can be sent: an exception of anybody's may hold any text, of any length."""
    return text.encode(errors="replace").decode()[:MAX_TEXT]


def as_failed(name: Name, members: list[int] | None, error: StrettoError) -> Failed:
    if type(error) is WireError or type(error).__name__ not in KINDS:
        error = WireError(_short(str(error)))
    arguments: Any = error.__reduce__()[1]  # what the error is made again from
    return Failed(*name, members, type(error).__name__, arguments)


def as_error(failed: Failed) -> StrettoError:
    if failed.beliefs:
        return rank_mismatch(*({rank: said[which] for rank, said in failed.beliefs.items()} for which in (0, 1)))
    return KINDS[failed.kind](*failed.arguments)
