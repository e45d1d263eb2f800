"""How a model is cut into ranges: the unit of push, pull, clock, replication and ownership.

Parameters keep their order. A large one is cut into equal pieces, small neighbours share a range, and no range has more than
`range_bytes` (values travel as float32). A range has parameters of one `group` only: what must not be mixed, such as two of the
optimizer's parameter groups, which have options of their own.

    [embedding 2.5 MiB] [bias] [norm] [weight 0.6 MiB]   ->   [embedding 1/3] [2/3] [3/3] [bias norm weight]

Cost:      at most `range_bytes` in memory for a range on its way. Neighbours are joined greedily, so of two ranges that follow
           each other in one group, and in which nothing was cut, the second's first parameter did not fit into the first range.
Invariant: each element is in exactly one slice, in the model's order. Workers and servers that computed the same `digest` mean
the
           same elements by (range, position).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import msgspec

from stretto.errors import ConfigurationError

RANGE_BYTES: Final = 1 << 20
LEAST_RANGE_BYTES: Final = 64 << 10  # below that a message costs more than its bytes
RANGES_OF_A_SERVER: Final = 24  # at least, so that none has much more than another
VALUE_BYTES: Final = 4  # float32


class ServedParameter(NamedTuple):
    """A parameter that servers keep. `group`: parameters of different groups share no range. For a codec: `shape` as it lies in
    memory, and `unit`, a multiple of which every cut is at, if a range has room for one."""

    name: str
    numel: int
    group: str = ""
    shape: tuple[int, ...] = ()
    unit: int = 1


def range_bytes_for(parameters: Sequence[ServedParameter], num_servers: int) -> int:
    """The size of ranges with which the servers' shares are about equal: a small model is cut into smaller ones."""
    num_bytes = VALUE_BYTES * sum(each.numel for each in parameters)
    return max(LEAST_RANGE_BYTES, min(RANGE_BYTES, num_bytes // (RANGES_OF_A_SERVER * num_servers)))


class ParameterSlice(NamedTuple):
    """Elements `start` to `stop` of a flattened parameter."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class ParameterRange:
    """Slices that travel together. Its payload is their float32 values, one after the other."""

    index: int
    group: str
    slices: tuple[ParameterSlice, ...]

    @cached_property
    def numel(self) -> int:
        return sum(each.stop - each.start for each in self.slices)

    @property
    def num_bytes(self) -> int:
        return VALUE_BYTES * self.numel

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.slices]


class RangeLayout:
    """The ranges of a model. See the module's text."""

    def __init__(self, parameters: Sequence[ServedParameter], range_bytes: int = RANGE_BYTES) -> None:
        if range_bytes < VALUE_BYTES:
            raise ConfigurationError(
                f"RangeLayout(range_bytes={range_bytes}): a range has at least one value of {VALUE_BYTES} bytes.\n"
                f"Leave it out, for {RANGE_BYTES}."
            )
        self.ranges: list[ParameterRange] = []
        self._open: list[ParameterSlice] = []
        self._group = ""
        limit = range_bytes // VALUE_BYTES
        for name, numel, group, _, unit in parameters:
            pieces = _cut(name, numel, limit, unit if 0 < unit <= limit else 1)
            if self._open and (group != self._group or len(pieces) > 1 or _numel(self._open) + numel > limit):
                self._close()
            self._group = group
            for piece in pieces:
                self._open.append(piece)
                if len(pieces) > 1:
                    self._close()
        if self._open:
            self._close()

    def _close(self) -> None:
        self.ranges.append(ParameterRange(len(self.ranges), self._group, tuple(self._open)))
        self._open = []

    def __len__(self) -> int:
        return len(self.ranges)

    @cached_property
    def digest(self) -> int:
        """63 bits by which two sides know that they mean the same."""
        text = msgspec.msgpack.encode([(each.group, each.slices) for each in self.ranges])
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _cut(name: str, numel: int, limit: int, unit: int) -> list[ParameterSlice]:
    """As few pieces of at most `limit` elements as there can be, their lengths at most a unit apart. None of no elements."""
    num_units = -(-numel // unit)
    count = -(-num_units // (limit // unit))
    ends = [min(numel, unit * (num_units * number // count)) for number in range(count + 1)] if count else []
    return [ParameterSlice(name, start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


def _numel(slices: Sequence[ParameterSlice]) -> int:
    return sum(each.stop - each.start for each in slices)
