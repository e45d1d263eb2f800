"""What workers say to each other about a meeting (`meeting.py` has the order). Every message names the meeting, and those of an
attempt the attempt."""

from __future__ import annotations

import msgspec


class Present(msgspec.Struct, frozen=True, tag=True):
    meeting: int
    what: str


class Entered(msgspec.Struct, frozen=True, tag=True):
    """I have come back, and take part from this meeting on."""

    meeting: int


class Propose(msgspec.Struct, frozen=True, tag=True):
    meeting: int
    attempt: int
    members: list[int]


class Promised(msgspec.Struct, frozen=True, tag=True):
    meeting: int
    attempt: int
    prepared: int  # the attempt of which it has the result; 0: of none
    members: list[int]  # of that one


class Go(msgspec.Struct, frozen=True, tag=True):
    meeting: int
    attempt: int


class PartOf(msgspec.Struct, frozen=True, tag=True):
    """The sender's values from `start` on, for the worker that adds them up."""

    meeting: int
    attempt: int
    start: int


class PartOfResult(msgspec.Struct, frozen=True, tag=True):
    meeting: int
    attempt: int
    start: int


class Prepared(msgspec.Struct, frozen=True, tag=True):
    meeting: int
    attempt: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    meeting: int
    attempt: int


class Over(msgspec.Struct, frozen=True, tag=True):
    """That meeting has been held: in this attempt, as far as the sender knows (0: it was not a member)."""

    meeting: int
    attempt: int


class MeetingRefused(msgspec.Struct, frozen=True, tag=True):
    """I have given that meeting up. `late`: because somebody did not come in time. `final`: nobody can finish it."""

    meeting: int
    reason: str
    late: bool = False
    final: bool = False


FromMember = (
    Present | Entered | Propose | Promised | Go | PartOf | PartOfResult | Prepared | Commit | Over | MeetingRefused
)  # fmt: skip
