"""Members that join a wire later: everybody admits them as soon as it hears of them.

The coordinator of a lasting membership says who has come (`launching/lasting_membership.py`). Machines on the wire find in
`on_view` that a member has joined. A newcomer waits a few seconds for each of the others, and goes on without those that have not
admitted it by then, so the others have to begin this when they have met, and not when they first have something to say.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from stretto.collectives.communication import CommunicationThread
from stretto.launching.detect import Launch
from stretto.launching.peers import Peer
from stretto.launching.return_watch import ReturnWatch
from stretto.wire.base import Wire

log = logging.getLogger("stretto")


def admit_newcomers(launch: Launch, communication: CommunicationThread) -> ReturnWatch:
    """From now on. Begin before anything is done on the wire; stop it before the wire is closed."""
    generation = communication.communicator.wire.generation
    return ReturnWatch(launch, generation, lambda peers: communication.loop.call(lambda: admit(communication, peers)))


def admit(communication: CommunicationThread, peers: Sequence[Peer]) -> None:
    """Let them in, but for those that are. In the communication thread."""
    wire = communication.communicator.wire
    for peer in peers:
        if peer.rank != wire.rank and peer.generation > wire.joined_in(peer.rank):
            log.debug("rank %d admits rank %d of generation %d", wire.rank, peer.rank, peer.generation)
            wire.admit(peer)


def lives_of(wire: Wire) -> Mapping[int, int]:
    """The lives of ranks that joined after the job began, this one included: a machine that begins now has to be told them."""
    lives = {rank: wire.joined_in(rank) for rank in (wire.rank, *wire.peers)}
    return {rank: life for rank, life in lives.items() if life > 0}
