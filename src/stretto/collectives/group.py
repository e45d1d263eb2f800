"""A group: an ordered set of workers, and the collectives among them.

The world, which has all workers of the job, is one; `group.sub(ranks)` makes another of some of them. A member has a *rank in the
group*, its place 0 .. size-1, and every `root`, `to` and `source` of a group's collective is such a rank. Plans are written for
places; `run.compiled` maps them to ranks of the job. Errors, texts and the ledger always name ranks of the job.

Laws:
- What happens to workers outside of a group changes nothing for its collectives. The loss of a member fails them, and only them.
- Collectives of different groups need no common order, nor do those of different pairs of one group (`pair_channel`).
- A group of one sends nothing.
- Members are those that made the group. A worker that comes back under the rank of a lost one is another worker, and no member:
  the group has a generation, and refuses to work with ranks that have joined later.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import torch

from stretto.collectives import catalogue
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.endpoint import CHOOSING_CHANNEL, PUBLIC_CHANNEL, WORLD_PAIRS, Endpoint, members_text
from stretto.collectives.message_codec import MessageCodec
from stretto.collectives.messages import Name
from stretto.collectives.plan import Kind
from stretto.collectives.reduction import dtype_code
from stretto.collectives.request import DEFAULT_SEGMENT_BYTES, Pending, Request
from stretto.collectives.started import Started
from stretto.collectives.urgency import Urgency
from stretto.errors import ConfigurationError, StrettoError
from stretto.launching.peers import ranks_text

OWN_CHANNELS = 2  # of a group, before those of its pairs: one for the public functions, one to choose algorithms in
T = TypeVar("T")


class AlgorithmTable(Protocol):
    """What `algorithm="auto"` has found out (`stretto.plan.choose.Choices`)."""

    def algorithm(self, num_bytes: int) -> str: ...


class Group:
    """Some workers of the job, in order. Made by `stretto.group`, `stretto.split` or `sub`; `stretto.world()` has all of them.

    `rank` is this worker's place in it, 0 .. `size` - 1; `ranks` are the members' ranks in the job, by place.
    """

    __public__ = ("sub",)  # what docs/api.md shows; the rest is for engines

    def __init__(self, endpoint: Endpoint, ranks: tuple[int, ...], first_channel: int | None = None) -> None:
        """`first_channel`: what a meeting of the members has agreed on; None: these are all workers of the job."""
        self.endpoint = endpoint
        self.ranks = ranks
        self.rank = ranks.index(endpoint.rank)
        self.size = len(ranks)
        self.generation = endpoint.generation_of(ranks)
        self.is_world = first_channel is None
        self.channel = PUBLIC_CHANNEL if first_channel is None else first_channel
        self._choosing_channel = CHOOSING_CHANNEL if first_channel is None else first_channel + 1
        self._first_pair = WORLD_PAIRS if first_channel is None else first_channel + OWN_CHANNELS
        self.choices: AlgorithmTable | None = None
        self.arrive_s: float | None = None  # the deadline of its collectives, where that is not the job's
        self.part_of: Name | None = None  # the round of the whole job that its collectives belong to now: they fail with it
        self._among = "" if self.is_world else members_text(ranks)
        self._sequences: dict[int, int] = {}  # channel -> how many collectives without a name of their own it has had

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, ranks={list(self.ranks)})"

    def sub(self, ranks: Iterable[int]) -> Group:
        """Another group, of the members with these ranks in this group, in this order. All of them must call it, others not."""
        members = self._chosen(ranks)
        self.endpoint.check_usable()
        if self.endpoint.rank not in members:
            raise ConfigurationError(
                f"a group of {ranks_text(members)} of the job, made on rank {self.endpoint.rank}, which is not one of them: who "
                f"is not in a group cannot call its collectives.\n"
                f"Call it on its members only (if stretto.rank() in ranks: ...), or let all call stretto.split(color)."
            )
        num_channels = OWN_CHANNELS + 2 * len(members)
        return Group(self.endpoint, members, 0 if len(members) == 1 else self.endpoint.meet(members, num_channels))

    def alone(self) -> Group:
        """The group of this member by itself. It meets nobody, so a worker that has come back may make it too."""
        return Group(self.endpoint, (self.endpoint.rank,), 0)

    def _chosen(self, ranks: Iterable[int]) -> tuple[int, ...]:
        places: list[Any] = [_as_int(place) for place in ranks]
        wrong = [place for place in places if not isinstance(place, int) or not 0 <= place < self.size]
        if wrong or not places:
            raise ConfigurationError(
                f"a group of ranks {places}: {f'{wrong[0]!r} is none' if wrong else 'it would be empty'}. "
                f"The ranks of {self._what()} are 0 to {self.size - 1}. Write one or more of these."
            )
        twice = [place for place, count in Counter(places).items() if count > 1]
        if twice:
            raise ConfigurationError(
                f"a group of ranks {places}: {twice[0]} occurs twice, and a worker has one place in a group. Name each once."
            )
        return tuple(self.ranks[place] for place in places)

    def _what(self) -> str:
        return f"a job of {self.size}" if self.is_world else f"a group of {self.size} ({ranks_text(self.ranks)} of the job)"

    def check_rank(self, rank: int, what: str) -> None:
        """Refuse what is no rank in this group."""
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ConfigurationError(f"{what}={rank} in {self._what()}: ranks are 0 to {self.size - 1}. Write one of these.")

    # -- channels -----------------------------------------------------------------------------------------------------

    def new_channel(self) -> int:
        """A stream of collectives of its own, for a model, say. All members must ask for theirs in the same order; except in the
        world, which counts, it is a collective."""
        if self.is_world:
            return self.endpoint.new_world_channel()
        return 0 if self.size == 1 else self.endpoint.meet(self.ranks, 1)

    def to_choose(self) -> Group:
        """The same members on a channel of their own, whose many collectives do not meet the caller's."""
        twin = Group(self.endpoint, self.ranks, None if self.is_world else self.channel)
        twin.channel = self._choosing_channel
        twin._sequences = self._sequences
        return twin

    def pair_channel(self, source: int, to: int) -> int:
        """The channel of what one member sends another. (s + t) mod n differs between the pairs that a member belongs to, and so
        does, with the direction, the channel."""
        return self._first_pair + 2 * ((source + to) % self.size) + (source > to)

    # -- collectives --------------------------------------------------------------------------------------------------

    def next_name(self, channel: int) -> Name:
        """For a collective that the calling thread is about to start in a channel of this group, and that has no name yet."""
        self.endpoint.whereabouts.claim(channel)
        with self.endpoint.lock:
            sequence = self._sequences.get(channel, 0)
            self._sequences[channel] = (sequence + 1) & 0xFFFFFFFF
        return channel, sequence

    def start(
        self,
        kind: Kind,
        flat: torch.Tensor,
        algorithm: str,
        *,
        op: str = "sum",
        root: int = 0,
        segment_bytes: int | None = None,
        name: Name | None = None,
        ready: Callable[[], bool] | None = None,
        label: str = "",
        message_codec: MessageCodec | None = None,
        part_of: Name | None = None,
        urgency: Urgency | None = None,
        arrive_s: float | None = None,
    ) -> Pending:
        """Begin a collective on flat host memory; it must not be touched until the result is waited for.

        `name` (channel, sequence) must be the same on all members; without it, this group's calls are numbered in their order.
        Whoever has a channel of its own says which thread uses it: `whereabouts.claim`.
        `label` is compared between members, and shown when they disagree.
        `ready` says when the memory holds what is to be sent, if it does not yet (a copy from a GPU is under way).
        `part_of`: the round of the whole job that it belongs to, and fails with (`failures.py`).
        `message_codec` encodes every message of an all-reduce (`stretto.collectives.message_codec`).
        `urgency`: which messages go first where several collectives have some to send (`stretto.collectives.urgency`).
        `arrive_s`: its deadline, where that is not the group's.
        """
        plan = catalogue.plan(kind, algorithm, self.rank, self.size, root=root, group=self.workers_per_host)
        communication = self._communication()
        name = name or self.next_name(self.channel)
        segment = segment_bytes or self.segment_bytes
        members = None if self.is_world else self.ranks
        request = Request(
            plan, flat, op, *name, segment, label, message_codec, members, self._among, self.generation,
            part_of or self.part_of, urgency, arrive_s or self.arrive_s,
        )  # fmt: skip
        return communication.start(request, ready)

    def start_pair(
        self,
        source: int,
        to: int,
        flat: torch.Tensor,
        name: Name | None = None,
        ready: Callable[[], bool] | None = None,
        arrive_s: float | None = None,
        label: str = " of send and recv",
    ) -> Pending:
        """Begin to send what `flat` holds from one member to another. Only these two take part, and both call it."""
        plan = catalogue.plan(Kind.BROADCAST, "binomial", 0 if source == self.rank else 1, 2)
        communication = self._communication()
        name = name or self.next_name(self.pair_channel(source, to))
        pair = (self.ranks[source], self.ranks[to])
        among, label = f"from rank {pair[0]} to rank {pair[1]}", f"{label} in {self._among or 'the job'}"
        request = Request(
            plan, flat, "sum", *name, self.segment_bytes, label, None, pair, among, self.generation,
            arrive_s=arrive_s or self.arrive_s,
        )  # fmt: skip
        return communication.start(request, ready)

    def fail(self, pending: Pending, error: StrettoError) -> None:
        """This worker cannot do its part of a collective that it has started: no member is to wait for it. From any thread, and
        also while the job is being left."""
        assert self.endpoint.communication is not None, "a job of one starts nothing"
        self.endpoint.communication.fail(pending, error)

    def _communication(self) -> CommunicationThread:
        self.endpoint.check_usable()
        assert self.endpoint.communication is not None, "a job of one starts nothing"
        return self.endpoint.communication

    def begin(
        self,
        kind: Kind,
        tensor: torch.Tensor,
        algorithm: str,
        result: Callable[[], T],
        *,
        op: str = "sum",
        root: int = 0,
        name: Name | None = None,
        label: str = "",
        writes: bool = True,
    ) -> Started[T]:
        """Begin one collective of the catalogue on any tensor, in place. `result` is called once when it has ended.

        `writes`: what it leaves belongs into the tensor. Otherwise, where the tensor had to be copied, the copy is dropped.
        """
        dtype_code(tensor.dtype)
        self.endpoint.check_usable()
        if self.size == 1:
            return Started(None, result)
        flat, bring_back = self.endpoint.staging.borrow(tensor)
        pending = self.start(kind, flat, algorithm, op=op, root=root, name=name, label=label)
        return Started(pending, _then(bring_back if writes else None, result))

    def begin_pair(self, source: int, to: int, tensor: torch.Tensor) -> Started[torch.Tensor]:
        """`start_pair` for any tensor."""
        dtype_code(tensor.dtype)
        flat, bring_back = self.endpoint.staging.borrow(tensor)
        arrives = to == self.rank
        return Started(self.start_pair(source, to, flat), _then(bring_back if arrives else None, lambda: tensor))

    def run(
        self,
        kind: Kind,
        tensor: torch.Tensor,
        algorithm: str,
        *,
        op: str = "sum",
        root: int = 0,
        name: Name | None = None,
        label: str = "",
    ) -> None:
        """Run one collective of the catalogue on `tensor`, in place, and wait for it."""
        self.begin(kind, tensor, algorithm, lambda: None, op=op, root=root, name=name, label=label).wait()

    @cached_property
    def workers_per_host(self) -> int:
        """How many consecutive members share a host, if that is the same number everywhere; else 1."""
        hosts = [self.endpoint.hosts[rank] for rank in self.ranks]
        counts = set(Counter(hosts).values())
        number = next(iter(counts)) if len(counts) == 1 else 1
        blocks = all(len(set(hosts[i : i + number])) == 1 for i in range(0, len(hosts), number))
        return number if blocks else 1

    @cached_property
    def segment_bytes(self) -> int:
        communication = self.endpoint.communication
        return DEFAULT_SEGMENT_BYTES if communication is None else communication.communicator.wire.segment_bytes


Among = Group | Literal["world"]  # what `group=` of the public collectives takes


def _then(before: Callable[[], None] | None, result: Callable[[], T]) -> Callable[[], T]:
    def both() -> T:
        if before is not None:
            before()
        return result()

    return both


def _as_int(place: Any) -> int | str:
    """A rank may be any whole number (NumPy has its own), but not True or False; what is none is given back, to be refused."""
    if isinstance(place, bool) or not hasattr(place, "__index__"):
        return str(place)
    return operator.index(place)
