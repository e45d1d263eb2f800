"""Sends and receives of one process group: from one member to another, with tags, and from anybody.

They end when any member of the group dies, as its collectives do, and not only when the other side does: in a pipeline each stage
waits for the next, and none but its neighbours would learn why. A member that has left in order ends only what was asked of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final
from weakref import WeakSet

from torch import Tensor

from stretto.collectives.group import Group
from stretto.collectives.request import InProgress, Pending
from stretto.errors import ConfigurationError, PeerLost, StrettoError
from stretto.job import Job
from stretto.protocol.loop import Running
from stretto.torch_backend.matching import Announce, PairMatching, Receive, SendAnnouncement
from stretto.torch_backend.memory import Memory, as_on_wire
from stretto.torch_backend.operation import Operation
from stretto.wire.base import Wire

MATCHING_CHANNEL: Final = 0x7463  # on which the machines of `matching.py` talk; one for all groups of a job


class Received(InProgress):
    """A receive under way: first matched with a send, then carried out, by `pending`. `source`: the place that it came from."""

    def __init__(self) -> None:
        super().__init__()
        self.source: int | None = None
        self.pending: Pending | None = None


class Pairs:
    """See the module's text. `matching`: the job's; None in a job of one."""

    def __init__(self, group: Group, memory: Memory, matching: Matching | None) -> None:
        self._group = group
        self._memory = memory
        self._matching = matching
        self._under_way: set[Pending | Received] = set()  # what ends with any member
        self._lock = threading.RLock()
        self._wire = None if matching is None else matching.wire
        if matching is not None:
            matching.add(self)

    def send(
        self, tensor: Tensor, to: int, tag: int, arrive_s: float | None = None, *, outlives: bool = False
    ) -> Operation:  # fmt: skip
        """`arrive_s`: its deadline, where that is not the group's. `outlives`: it goes on when other members die."""
        group, mine = self._group, as_on_wire(tensor)
        matching = self._check(to, f"send(dst={to})")
        lent = self._memory.lend(mine.numel(), mine, [(0, mine)], (), mine)
        name = group.next_name(group.pair_channel(group.rank, to))
        matching.request(Announce(group.ranks[to], SendAnnouncement(*name, tag)))
        pending = group.start_pair(group.rank, to, lent.flat, name, lent.ready, arrive_s)
        if not outlives:
            self._end_with_members(pending)
        return Operation([pending], [tensor], lent.finish)

    def receive(
        self, tensor: Tensor, sources: Sequence[int], tag: int, arrive_s: float, *, outlives: bool = False
    ) -> tuple[Operation, Received]:
        """From one of these members, whichever sends first."""
        group, into = self._group, as_on_wire(tensor)
        for source in sources:
            matching = self._check(source, f"recv(src={source})")
        lent = self._memory.lend(into.numel(), into, (), [(0, into)], into)
        under_way = Received()
        place = {group.ranks[source]: source for source in sources}
        channels = {rank: group.pair_channel(source, group.rank) for rank, source in place.items()}

        def carry_out(source: int, number: int) -> None:
            under_way.source = place[source]
            name = (channels[source], number)
            pending = under_way.pending = group.start_pair(place[source], group.rank, lent.flat, name, lent.ready, arrive_s)
            pending.when_done(lambda: under_way.finish(pending.error))
            if not outlives:
                self._end_with_members(pending)

        def matched(answer: Future[Any]) -> None:
            with self._lock:
                if under_way.done:
                    return
                try:
                    carry_out(*answer.result())
                except StrettoError as error:
                    under_way.finish(error)
                except Exception as problem:
                    failure = StrettoError(f"a receive could not be begun: {problem!r}")
                    failure.__cause__ = problem
                    under_way.finish(failure)

        if not outlives:
            self._end_with_members(under_way)
        matching.request(Receive(channels, tag, arrive_s)).add_done_callback(matched)
        return Operation([under_way], [tensor], lent.finish), under_way

    # -- the loss of any member ---------------------------------------------------------------------------------------

    def _end_with_members(self, one: Pending | Received) -> None:
        with self._lock:
            self._under_way.add(one)
        one.when_done(lambda: self._forget(one))
        assert self._wire is not None, "there is another member"
        for lost in list(self._wire.lost.values()):
            self.on_lost(lost)

    def _forget(self, one: Pending | Received) -> None:
        with self._lock:
            self._under_way.discard(one)

    def on_lost(self, lost: PeerLost) -> None:
        """In the thread of the wire, or in one that has just begun something."""
        if lost.rank not in self._group.ranks or self._wire is None or self._wire.said_goodbye(lost.rank):
            return
        with self._lock:
            for one in list(self._under_way):
                if not isinstance(one, Received):
                    self._group.fail(one, lost)
                elif one.pending is None:
                    one.finish(lost)

    def _check(self, other: int, call: str) -> Matching:
        group = self._group
        group.check_rank(other, "src or dst")
        if other == group.rank:
            raise ConfigurationError(
                f"{call} on rank {other}: that is this worker itself. Name another member, or copy the tensor."
            )
        group.endpoint.check_usable()
        assert self._matching is not None, "there is another member, so there is a wire"
        return self._matching


class Matching:
    """What the process groups of a job share: the machine that matches sends with receives, and word of who is lost. The wire
    keeps its listeners, so it has one for all groups, which are told for as long as they are there."""

    def __init__(self, machine: Running, wire: Wire) -> None:
        self.request = machine.request
        self.wire = wire
        self._pairs: WeakSet[Pairs] = WeakSet()
        self._lock = threading.Lock()
        wire.on_lost(self._on_lost)

    def add(self, pairs: Pairs) -> None:
        with self._lock:
            self._pairs.add(pairs)

    def _on_lost(self, lost: PeerLost) -> None:
        with self._lock:
            told = list(self._pairs)
        for pairs in told:
            pairs.on_lost(lost)


def matching_of(job: Job) -> Matching | None:
    """Made when the job's first process group is."""
    matching: Matching | None = job.pair_matching
    if matching is None and job.wire is not None and job.endpoint.communication is not None:
        wire = job.wire

        def why_lost(rank: int) -> PeerLost:
            return wire.lost.get(rank) or PeerLost(rank, "it has left the job")

        machine = PairMatching(why_lost, wire.said_goodbye)
        running = job.endpoint.communication.loop.start(machine, MATCHING_CHANNEL)
        job.pair_matching = matching = Matching(running, wire)
    return matching
