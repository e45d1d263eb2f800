"""What workers of a pipeline write to each other, and how an error of one is told to all."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgspec

from stretto.errors import (
    ConfigurationError,
    FrameError,
    PeerLost,
    RankMismatch,
    StageFailed,
    StrettoError,
    WireError,
    WireTimeout,
)

MOST_TEXT: Final = 8_000
ERRORS: Final = (PeerLost, WireTimeout, FrameError, RankMismatch, StageFailed, WireError, ConfigurationError, StrettoError)
KINDS: Final[dict[str, Callable[..., StrettoError]]] = {error.__name__: error for error in ERRORS}


class LetterSubject(IntEnum):
    """What a letter is about."""

    BATCH = 0  # what the first stage was given, to all stages
    VALUES = 1  # what a piece has made of a micro-batch, to the next
    GRADIENTS = 2  # the gradients of these, to the one before
    LOSS = 3  # of the whole batch, to all stages
    STATE = 4  # of a stage, for a checkpoint, to the first


class Name(NamedTuple):
    """The name of a letter, which its receiver knows before the letter comes.

    Times count the calls of the pipeline, alike on all workers."""

    time: int
    subject: int
    piece: int = 0  # to which it goes
    microbatch: int = 0

    @property
    def text(self) -> str:
        what = LetterSubject(self.subject)
        if what in (LetterSubject.VALUES, LetterSubject.GRADIENTS):
            return f"the {what.name.lower()} of micro-batch {self.microbatch}"
        return {LetterSubject.BATCH: "the size of the batch", LetterSubject.LOSS: "the loss"}.get(what, "what is saved")


class LetterPart(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A part of one tensor of a letter; the payload is its bytes. A letter without tensors is one empty part."""

    name: tuple[int, int, int, int]
    shape: Any  # of the tree (`trees.py`)
    wants: list[bool]  # for each tensor, whether its gradient is wanted
    number: int  # of the tensor
    dtype: int
    sizes: list[int]
    offset: int  # in bytes


class PipelineFailure(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The pipeline has ended, and why."""

    kind: str
    arguments: list[int | float | str]

    def __post_init__(self) -> None:
        """Refuse what no error can be made from: to whoever decodes it, it is a malformed message."""
        if self.kind not in KINDS:
            raise ValueError(f"no kind of error: {self.kind!r}")
        self.error()

    def error(self) -> StrettoError:
        return KINDS[self.kind](*self.arguments)


Letter = LetterPart | PipelineFailure


def failure_of(error: StrettoError) -> PipelineFailure:
    kind = type(error).__name__
    arguments = error.__reduce__()[1]
    if kind not in KINDS or not isinstance(arguments, tuple):
        kind, arguments = "StrettoError", (str(error),)
    return PipelineFailure(kind, [_short(each) for each in arguments])


def _short(value: Any) -> int | float | str:
    return value if isinstance(value, int | float) else str(value).encode(errors="replace").decode()[:MOST_TEXT]
