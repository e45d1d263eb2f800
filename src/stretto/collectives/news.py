"""What ranks tell each other about a collective, beside its data.

    Begun     I have begun this, and believe it is ...         to those one will receive from; and to everybody in a dispute
    Failed    this has failed, and so and so is to blame       to everybody
    Ask       where are you with this? (also: a knock)         to those one waits for
    State     not begun; or begun, and waiting for these       the answer

Small msgpack messages over `Wire.post`. What cannot be decoded is logged and ignored: a bad message must not end a job.
"""

from __future__ import annotations

import logging
from typing import Final, TypeVar

import msgspec

from stretto.errors import FrameError, PeerLost, StrettoError, WireTimeout

TOPIC_BEGUN: Final = 16
TOPIC_BELIEF: Final = 17
TOPIC_FAILED: Final = 18
TOPIC_ASK: Final = 19
TOPIC_STATE: Final = 20
TOPIC_KNOCK: Final = 21

log = logging.getLogger("stretto.collectives")
Name = tuple[int, int]  # channel, sequence
T = TypeVar("T")


class Begun(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int
    belief: str


class Failed(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int
    kind: str  # "lost", "timeout" or "frame"
    rank: int
    text: str
    waited_s: float


class Ask(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int


class State(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int
    begun: bool
    waiting_for: list[int]
    belief: str  # empty: not begun


def decode(source: int, body: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        log.warning("ignored a malformed %s from rank %d: %s", kind.__name__, source, problem)
        return None


def as_failed(name: Name, error: StrettoError) -> Failed | None:
    if isinstance(error, PeerLost):
        return Failed(*name, "lost", error.rank, error.reason, 0.0)
    if isinstance(error, WireTimeout):
        return Failed(*name, "timeout", error.rank, error.tag, error.waited_s)
    if isinstance(error, FrameError):
        return Failed(*name, "frame", error.rank, error.problem, 0.0)
    return None


def as_error(failed: Failed) -> StrettoError:
    if failed.kind == "timeout":
        return WireTimeout(failed.rank, failed.text, failed.waited_s)
    if failed.kind == "frame":
        return FrameError(failed.rank, failed.text)
    return PeerLost(failed.rank, failed.text)
