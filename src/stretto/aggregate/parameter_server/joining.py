"""How workers and servers join the network of servers, and hear of those that come later.

They meet as workers do (`launching/introduce.py`), and the coordinator stays: a member that has died comes back as another life,
and everybody admits it to the wire as soon as it is heard of (`launching/lasting_membership.py`). The machines on the wire then
find in `on_view` that it has joined.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from stretto.collectives.communication import CommunicationThread
from stretto.job import meet
from stretto.launching.detect import Launch
from stretto.launching.peers import Peer
from stretto.launching.return_watch import ReturnWatch
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire

log = logging.getLogger("stretto.parameter_server")


def join_network(launch: Launch, timeouts: Timeouts) -> Wire:
    """Meet the others, or, in a later life (`launch.restart`), those that are there."""
    return meet(launch, timeouts, accept_later=True)


def admit_newcomers(launch: Launch, communication: CommunicationThread) -> ReturnWatch:
    """From now on. Begin before anything is done on the wire; stop it before the wire is closed."""
    wire = communication.communicator.wire

    def admit(peers: Sequence[Peer]) -> None:
        for peer in peers:
            if peer.rank != wire.rank and peer.generation > wire.joined_in(peer.rank):
                log.debug("rank %d admits rank %d of generation %d", wire.rank, peer.rank, peer.generation)
                wire.admit(peer)

    return ReturnWatch(launch, wire.generation, lambda peers: communication.loop.call(lambda: admit(peers)))


def lives_of(wire: Wire) -> Mapping[int, int]:
    """The lives of ranks that joined after the job began, this one included: a machine that begins now has to be told them."""
    lives = {rank: wire.joined_in(rank) for rank in (wire.rank, *wire.peers)}
    return {rank: life for rank, life in lives.items() if life > 0}
