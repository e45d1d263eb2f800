"""What was moved, how long was waited, and how old gradients were: totals that are always kept.

Bytes are payload, counted when a collective has ended well, from its schedule: a few additions per collective, none per message.
(The wire's own `bytes_sent` adds headers and control messages, and leaves out what went through shared memory.)

Staleness: for each round of training, how many updates other workers' contributions lag behind. `Synchronous()`: 0, every round.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class Ledger:
    """One worker's totals so far. `sent` and `received` are bytes by (kind of collective, peer). With servers the kinds are
    "push", "pull" and "state" (to begin with, and checkpoints), and a server's number as a peer comes after those of all workers.

    `held_ns`: for how long servers held back what this worker wanted to read, by the worker that was slowest then.
    `under_way`: requests that servers have not answered."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, int]] = Counter()
        self.received: Counter[tuple[str, int]] = Counter()
        self.collectives: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()  # staleness -> rounds
        self.held_ns: Counter[int] = Counter()
        self.under_way = self.most_under_way = 0
        self.waited_ns = 0
        self.own_steps = 0  # of models of which each worker has its own, with or without an exchange
        self.consensus_distance: float | None = None  # as `stretto.consensus` or `stretto.save` has measured it last
        self._lock = threading.Lock()

    def count(self, kind: str, sent: Iterable[tuple[int, int]], received: Iterable[tuple[int, int]], itemsize: int) -> None:
        """One collective has ended: how many elements went to, and came from, which peer."""
        self.collectives[kind] += 1
        for peer, elements in sent:
            self.sent[kind, peer] += elements * itemsize
        for peer, elements in received:
            self.received[kind, peer] += elements * itemsize

    def count_message(self, kind: str, peer: int, sent: int = 0, received: int = 0) -> None:
        """To a server, or from one."""
        if sent:
            self.sent[kind, peer] += sent
        if received:
            self.received[kind, peer] += received

    def count_under_way(self, requests: int) -> None:
        self.under_way = requests
        self.most_under_way = max(self.most_under_way, requests)

    def count_held(self, by_rank: int, held_ns: int) -> None:
        self.held_ns[by_rank] += held_ns

    def count_wait(self, waited_ns: int) -> None:
        with self._lock:  # several threads may wait at the same time
            self.waited_ns += waited_ns

    def count_round(self, staleness: int = 0) -> None:
        self.staleness[staleness] += 1

    @property
    def bytes_sent(self) -> int:
        return sum(list(self.sent.values()))

    @property
    def bytes_received(self) -> int:
        return sum(list(self.received.values()))

    @property
    def held_s(self) -> float:
        """Seconds for which servers held back what this worker wanted to read, as `sync=` says."""
        return sum(list(self.held_ns.values())) / 1e9

    @property
    def waited_s(self) -> float:
        """Seconds that callers have spent waiting for collectives: communication that was not overlapped."""
        return self.waited_ns / 1e9

    def sent_by(self, kind: str) -> int:
        """Bytes sent in collectives of that kind."""
        return sum(num_bytes for (of, _), num_bytes in list(self.sent.items()) if of == kind)

    def sent_to(self, peer: int) -> int:
        return sum(num_bytes for (_, to), num_bytes in list(self.sent.items()) if to == peer)

    def received_from(self, peer: int) -> int:
        return sum(num_bytes for (_, source), num_bytes in list(self.received.items()) if source == peer)

    def __repr__(self) -> str:
        return (
            f"Ledger(bytes_sent={self.bytes_sent}, bytes_received={self.bytes_received}, "
            f"collectives={self.collectives.total()}, rounds={self.staleness.total()}, waited_s={self.waited_s:.3f})"
        )
