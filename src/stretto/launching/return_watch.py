"""A member's side of a lasting membership: it watches who comes back, for as long as it takes part.

    roster = ReturnWatch(launch, generation, on_news)      # in a thread of its own; the coordinator may be gone, and come back
    roster.stop()

`on_news(peers)` is called in that thread, once for each life of a rank that joins later than this one: admit it to the wire there
(`Wire.admit`, in the thread that drives it).

Cost: one connection to the coordinator, and a message of some 20 bytes every second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Sequence

import zmq

from stretto.errors import JobError
from stretto.launching.detect import Launch
from stretto.launching.hosts import host_identity
from stretto.launching.introduce import Visit, visiting
from stretto.launching.introduction_messages import Leave, News, WatchReturns
from stretto.launching.lasting_membership import WATCH_EVERY_S
from stretto.launching.peers import Peer

STOP_S = 0.5

log = logging.getLogger("stretto.launching")


class ReturnWatch:
    """See the module's text. `generation`: in which this member has joined."""

    def __init__(self, launch: Launch, generation: int, on_news: Callable[[Sequence[Peer]], object]) -> None:
        self._launch = dataclasses.replace(launch, trace=None, ledger=None)
        self._generation = generation
        self._on_news = on_news
        self._near, self._far = socket.socketpair()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="stretto-roster", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Idempotent; takes a moment at most."""
        if self._stopping:
            return
        self._stopping = True
        with contextlib.suppress(OSError):
            self._near.send(b"!")
        self._thread.join(STOP_S)
        self._near.close()
        self._far.close()

    def _run(self) -> None:
        try:
            with visiting(self._launch, math.inf) as coordinator:
                coordinator.poller.register(self._far, zmq.POLLIN)
                while not self._stopping:
                    self._watch(coordinator)
                coordinator.send(Leave(self._launch.rank, host_identity(), os.getpid()))
                coordinator.linger_s = STOP_S
        except (JobError, zmq.ZMQError, OSError) as problem:
            log.warning("rank %d does not hear who comes back: %s", self._launch.rank, problem)

    def _watch(self, coordinator: Visit) -> None:
        event = coordinator.next(WATCH_EVERY_S)
        if isinstance(event, News):
            self._tell([peer for peer in event.peers if peer.generation > self._generation])
        elif event is None or event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            coordinator.send(WatchReturns(self._launch.rank, self._generation))

    def _tell(self, peers: Sequence[Peer]) -> None:
        if peers and not self._stopping:
            self._generation = max(peer.generation for peer in peers)
            self._on_news(peers)
