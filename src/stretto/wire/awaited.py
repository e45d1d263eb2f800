"""Peers that were there when the workers met, and with which there is no connection yet.

The coordinator has seen that every address answers, and a worker's port stays open until it is connected to everybody. So a
refused connection means that the worker has ended, or has given up, since then; whoever waits for it is told at once instead
of at the end of `connect_s`. No answer at all proves nothing, and the deadline decides.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

from stretto.errors import PeerLost, UnreachableError
from stretto.launching.hosts import split_address
from stretto.launching.peers import Peer

TRY_EVERY_S: Final = 0.5
TRY_S: Final = 0.25


class Awaited:
    """Tries their ports, one at a time; finds the words for those that do not come."""

    def __init__(self, rank: int, connect_s: float) -> None:
        self._rank = rank
        self._connect_s = connect_s
        self._next_try = 0.0
        self._tries = 0

    def try_one(self, peers: Sequence[Peer], now: float) -> None:
        """Call it often. Raises `PeerLost` when one of these peers is found to be gone."""
        if not peers or now < self._next_try:
            return
        self._next_try = now + TRY_EVERY_S
        self._tries += 1
        peer = peers[self._tries % len(peers)]
        try:
            socket.create_connection(split_address(peer.address), timeout=TRY_S).close()
        except ConnectionRefusedError:
            raise self.gone(peer) from None
        except OSError:
            pass

    def gone(self, peer: Peer) -> PeerLost:
        return PeerLost(
            peer.rank,
            f"nobody listens at {peer.address} any more (it has ended or given up since the workers met, or a firewall "
            f"rejects connections from here)",
        )

    def unreachable(self, peers: Sequence[Peer], why: str) -> UnreachableError:
        listing = ", ".join(f"rank {peer.rank} at {peer.address}" for peer in peers)
        return UnreachableError(
            f"rank {self._rank} could not reach {listing} within {self._connect_s:g} s ({why}).\n"
            f"A firewall may block the port, or the worker publishes an interface that is not routed here: "
            f"set STRETTO_INTERFACE on that host to the interface (or address) the others can reach."
        )
