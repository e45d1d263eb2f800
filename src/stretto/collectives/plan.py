"""A collective as data: what each rank sends, receives, adds and copies, and in which round.

A vector of n elements is cut into `num_chunks` chunks; chunk i has n // C + (i < n mod C) elements. A plan for one
rank is a tuple of operations in program order:

    Send(step, peer, lo, hi, buffer)               chunks lo..hi-1 of `buffer` go to `peer`
    Recv(step, peer, lo, hi, buffer, add)          chunks lo..hi-1 arrive from `peer`; they are added to `buffer`
                                                   or overwrite it
    Local(step, source, target, lo, hi, add)       chunks of one buffer are added to, or copied into, another

Buffers: DATA is the caller's tensor (in and out), WORK a scratch of the same length for the few plans that need the
original intact while they accumulate. WORK starts undefined: it must be written (copied into) before it is read or
added to.

Laws every plan obeys (`verify.py` proves them symbolically, for any number of ranks, with no process):
- the k-th Send from a to b meets the k-th Recv at b from a, in the same step, with the same chunks (ALL_TO_ALL: with as
  many chunks, since there a chunk changes its place; its vectors must divide into P equal chunks);
- operations that touch the same chunk of the same buffer take effect in program order; others in any order;
- operations with lo == hi touch no chunk (a barrier's); they take effect in program order among themselves: such a Send
  leaves only when every such Recv before it has arrived;
- in one step no rank sends to two peers and none receives from two peers, except where the plan's `ports` says so;
- a finished plan holds what its `kind` promises.

The k-th message between two ranks is matched by number, so a plan needs no tags and no barriers between steps.
`step` is the round, used for drawing and for cost; execution follows data dependencies only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Buffer(enum.IntEnum):
    DATA = 0
    WORK = 1


class Kind(enum.Enum):
    """What a plan leaves behind. P ranks, rank r starts with the vector x_r; chunk i of it is x_r[i]."""

    ALL_REDUCE = "all_reduce"  # every rank: sum_r x_r
    REDUCE = "reduce"  # the root: sum_r x_r; other ranks: unspecified
    BROADCAST = "broadcast"  # every rank: x_root
    REDUCE_SCATTER = "reduce_scatter"  # P chunks; rank r: chunk r = sum_q x_q[r]; other chunks unspecified
    ALL_GATHER = "all_gather"  # P chunks; every rank: chunk i = x_i[i]
    GATHER = "gather"  # P chunks; the root: chunk i = x_i[i]; other ranks: unspecified
    SCATTER = "scatter"  # P chunks; rank r: chunk r = x_root[r]; other chunks unspecified
    ALL_TO_ALL = "all_to_all"  # P chunks; rank r: chunk i = x_i[r]  (in place: a transposition)
    BARRIER = "barrier"  # nothing; nobody returns before everybody has entered (zero-length messages)


@dataclass(frozen=True, slots=True)
class Send:
    step: int
    peer: int
    lo: int
    hi: int
    buffer: Buffer = Buffer.DATA


@dataclass(frozen=True, slots=True)
class Recv:
    step: int
    peer: int
    lo: int
    hi: int
    buffer: Buffer = Buffer.DATA
    add: bool = False


@dataclass(frozen=True, slots=True)
class Local:
    step: int
    source: Buffer
    target: Buffer
    lo: int
    hi: int
    add: bool = False


Operation = Send | Recv | Local


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's part of a collective. `operations` are in program order; the steps of its Sends never decrease.

    A Recv or Local may stand later in the program than its round, so that what arrives is added in an order all ranks
    share: the wire keeps what comes early until then.
    """

    kind: Kind
    algorithm: str
    rank: int
    size: int
    num_chunks: int
    operations: tuple[Operation, ...]
    root: int = 0
    ports: int = 1  # how many peers a rank may send to (and receive from) in one step

    @property
    def num_steps(self) -> int:
        return max((operation.step for operation in self.operations), default=-1) + 1

    @property
    def needs_work_buffer(self) -> bool:
        return any(
            (operation.target if isinstance(operation, Local) else operation.buffer) is Buffer.WORK
            for operation in self.operations
        )


PlanMaker = Callable[[int, int], Plan]  # (rank, size) -> Plan


def chunk_start(index: int, num_elements: int, num_chunks: int) -> int:
    """First element of chunk `index`: chunks differ in length by at most one, longer ones first."""
    quotient, remainder = divmod(num_elements, num_chunks)
    return index * quotient + min(index, remainder)
