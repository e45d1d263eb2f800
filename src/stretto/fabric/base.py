"""The contract of a fabric: a sum over the workers of one host, cut into shares, with something done to each share in between.

    sum      afterwards `flat[start:stop]` of member i's share holds `scale` times the sum over all members (scaled before it is
             added up: a sum of many half-precision numbers may be too large for one); what the rest of `flat` holds is undefined
    share    afterwards `flat` holds every member's share, on all members the same bits, for each is made by one of them

Between the two a member does with its share what it likes: in a hierarchy it combines it with other hosts. Both are generators
that yield collectives under way and are resumed when these have ended. They compute, so the communication thread does not drive
them. `number` counts the uses of a fabric, the same on all members.

An *area* is one flat vector, used once in every round. Its shares are equal parts, or all of it belongs to one `owner`: a codec
that keeps state by parameter cannot cut one in two. Members begin areas in any order and resume each when its collective has
ended: a fabric may hold back the sharing of one until the sum of every other has begun.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.collectives.plan import chunk_start
from stretto.collectives.request import Pending
from stretto.errors import StrettoError

Steps = Generator[Pending, None, None]


@dataclass(frozen=True, slots=True)
class Area:
    """One vector that the members sum: how long it is, and whose it is (None: everybody has an equal part)."""

    num_elements: int
    dtype: torch.dtype
    owner: int | None = None
    device: torch.device = torch.device("cpu")

    def share(self, member: int, size: int) -> tuple[int, int]:
        """First element and last + 1 of what this member of `size` combines."""
        if self.owner is None:
            return chunk_start(member, self.num_elements, size), chunk_start(member + 1, self.num_elements, size)
        return (0, self.num_elements) if member == self.owner else (0, 0)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


class FabricUnavailable(StrettoError):
    """The workers of a host cannot use a fabric; the text says why. Raised on all of them."""


class Fabric(ABC):
    """See the module's text."""

    name: str  # for the log: what carries the bytes
    channels: frozenset[int]  # of its collectives

    @abstractmethod
    def prepare(self, areas: Sequence[Area]) -> None:
        """These are the vectors from now on. All members call it together, while none of them is under way."""

    @abstractmethod
    def sum(self, area: int, flat: Tensor, scale: float, number: int, label: str) -> Steps:
        """Begin a use of the area: sum up `scale * flat` over all members, each member its share."""

    @abstractmethod
    def share(self, area: int, flat: Tensor, number: int, label: str) -> Steps:
        """End it: give everybody what each member has made of its share."""

    def stop(self) -> None:  # noqa: B027  # most have nothing to stop
        """It is used no longer."""
