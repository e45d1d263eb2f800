"""One worker's end of all its groups: the thread that runs their collectives, and the numbers by which these are told apart.

A collective is named by a channel and its number in it. Members of a group must agree on the channel without asking anybody else,
and it must differ from every channel that any of them uses in another group. So it is given out by one member, the first, from
numbers that are its own; the others learn it in a *meeting*, an all-reduce of one number among the members:

    00...            the world's: 0 for `auto`, 1 for the public functions, then one after another, counted alike on all ranks
    001...           the world's pairs (`Group.pair_channel`)
    01, 30 bits      meetings: a digest of the members, the generation in which the last of them joined, and how often these have
                     met before; 32 more bits of it are the number. Also what has no place in any count (`digest_name`)
    1, 13, 18 bits   groups: the rank of the first member, and a count of its own

Channels of two groups thus differ by construction. (Digests alone would be simpler, but 31 bits of them collide by chance where
there are thousands. Counting alike on all ranks, as the world does, is wrong as soon as some ranks are in a group and others are
not. A meeting has 62 bits of a digest for its name, and is over when the group exists.) A group that not all of its members make
ends as any collective that not all of them call: `WireTimeout` names the missing, or `RankMismatch` says what they do instead.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import torch

from stretto.collectives import catalogue
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.messages import Name
from stretto.collectives.plan import Kind
from stretto.collectives.request import Request
from stretto.collectives.staging import Staging
from stretto.collectives.whereabouts import Whereabouts
from stretto.errors import ConfigurationError
from stretto.launching.peers import ranks_text

CHOOSING_CHANNEL: Final = 0
PUBLIC_CHANNEL: Final = 1
WORLD_PAIRS: Final = 1 << 29
MEETINGS: Final = 1 << 30
GROUPS: Final = 1 << 31
COUNT_BITS: Final = 18
MOST_FIRST: Final = 1 << (31 - COUNT_BITS)
MOST_SHOWN: Final = 16


class Endpoint:
    """What the groups of one worker share."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        communication: CommunicationThread | None,
        check_usable: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.hosts = hosts  # of all ranks of the job
        self.communication = communication  # None: in a job of one nothing is sent
        self.check_usable = check_usable
        self.whereabouts = Whereabouts() if communication is None else communication.communicator.whereabouts
        self.staging = Staging()
        self.lock = threading.Lock()  # any thread may start a collective
        self._world_channels = PUBLIC_CHANNEL
        self._group_channels = 0  # given out by this rank as the first member of groups
        self._meetings: Counter[tuple[tuple[int, ...], int]] = Counter()

    def new_world_channel(self) -> int:
        """Another one for all ranks of the job, which must ask for theirs in the same order."""
        self._world_channels += 1
        return self._world_channels

    def generation_of(self, members: Sequence[int]) -> int:
        """The last generation in which one of these workers has joined: the same at all of them, once they know each other."""
        if self.communication is None:
            return 0
        return max(map(self.communication.communicator.wire.joined_in, members))

    def meet(self, members: tuple[int, ...], num_channels: int) -> int:
        """Agree with the other members on so many channels, one after another; returns the first."""
        generation = self.generation_of(members)
        with self.lock:
            meeting = _meeting(members, generation, self._meetings[members, generation])
            self._meetings[members, generation] += 1
            first = self._give_out(num_channels) if members[0] == self.rank else 0
        agreed = torch.tensor([first], dtype=torch.int64, device="cpu")
        plan = catalogue.plan(Kind.ALL_REDUCE, "butterfly", members.index(self.rank), len(members))
        text = members_text(members)
        request = Request(
            plan, agreed, "max", *meeting, label=" to make a group", members=members, among=text, generation=generation
        )
        assert self.communication is not None
        self.whereabouts.claim(request.channel)
        self.communication.start(request).wait()
        if agreed == 0:
            raise ConfigurationError(
                f"a {text}: rank {members[0]}, which comes first and so gives out channels, has no {num_channels} left (a rank "
                f"below {MOST_FIRST} has {1 << COUNT_BITS}, and a group takes two and two more for each member).\n"
                f"Keep groups and use them again, or let another member come first."
            )
        return int(agreed)

    def _give_out(self, num_channels: int) -> int:
        """Channels of this rank's own, for a group that it comes first in; 0 if there are not so many left."""
        first = self._group_channels
        if self.rank >= MOST_FIRST or first + num_channels > 1 << COUNT_BITS:
            return 0
        self._group_channels += num_channels
        return GROUPS | self.rank << COUNT_BITS | first


def _meeting(members: tuple[int, ...], generation: int, before: int) -> Name:
    """The name under which these members meet when they have met so often before."""
    return digest_name([members, generation, before])


def digest_name(what: object) -> Name:
    """A name of 62 bits of a digest, for a collective that is told from others by what it belongs to and not by a count."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=8).digest()
    return MEETINGS | int.from_bytes(digest[:4], "little") >> 2, int.from_bytes(digest[4:], "little")


def members_text(members: tuple[int, ...]) -> str:
    """`ranks 0, 2`, or a list where they are in another order than that of their ranks."""
    if list(members) == sorted(members):
        return f"group of {ranks_text(members)}"
    shown = ", ".join(map(str, members[:MOST_SHOWN]))
    return f"group of ranks [{shown}{f', ... ({len(members)})' if len(members) > MOST_SHOWN else ''}]"
