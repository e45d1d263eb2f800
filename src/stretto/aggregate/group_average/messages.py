"""What workers say to each other in wait-avoiding group averaging (`machine.py`).

    ActivateRound    a round has begun: take part in it, and tell these too
    WantSum          give me the sum that you have after so many stages             PartialSum   a piece of it, the payload
                                                                                    NoSum        you will not get it from me
    in a global synchronisation also
    WaitsForAll      I begin no step before it; 0: I do again
    SumFinished      I have the sum of these workers                                SumCommitted this attempt counts

    a worker that has come back
    AskRound         which round are you in?             RoundIs     take part from this one on: I count you in
    TakesPart        I do, from this one on

Rounds count from 1 on and are the same for all. A global one is attempted again where somebody died in the middle of it; attempts
of all others are 0. Nothing of a former life of a worker arrives at all (`protocol/machine.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class ActivateRound(msgspec.Struct, frozen=True, tag=True):
    """`above`: the dimensions in which the receiver passes it on (`cube.told_by`)."""

    round: int
    above: int


class WantSum(msgspec.Struct, frozen=True, tag=True):
    round: int
    attempt: int
    stage: int


class PartialSum(msgspec.Struct, frozen=True, tag=True):
    """Elements from `start` on of the sum of the models of `contributors` (a bit for each rank, little end first)."""

    round: int
    attempt: int
    stage: int
    start: int
    contributors: bytes


class NoSum(msgspec.Struct, frozen=True, tag=True):
    round: int
    attempt: int
    stage: int


class WaitsForAll(msgspec.Struct, frozen=True, tag=True):
    round: int


class SumFinished(msgspec.Struct, frozen=True, tag=True):
    round: int
    attempt: int
    contributors: bytes


class SumCommitted(msgspec.Struct, frozen=True, tag=True):
    round: int
    attempt: int


class AskRound(msgspec.Struct, frozen=True, tag=True):
    pass


class RoundIs(msgspec.Struct, frozen=True, tag=True):
    """0: I do not know either, for I have just come back."""

    round: int


class TakesPart(msgspec.Struct, frozen=True, tag=True):
    round: int


ToGroupMember = (
    ActivateRound | WantSum | PartialSum | NoSum | WaitsForAll | SumFinished | SumCommitted | AskRound | RoundIs | TakesPart
)


def bits_of(ranks: Iterable[int]) -> bytes:
    number = sum(1 << rank for rank in ranks)
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


def ranks_of(bits: bytes) -> frozenset[int]:
    number = int.from_bytes(bits, "little")
    return frozenset(rank for rank in range(8 * len(bits)) if number >> rank & 1)
