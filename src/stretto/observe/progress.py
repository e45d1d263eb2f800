"""A line every few seconds on how training goes, out of the ledger: nothing is measured for it, and nobody is asked.

    stretto: 240 steps, 12.3 steps/s, staleness 1.2 (at most 4), waiting 18 %, 24.1 MB/s to servers

All figures but the first are of the seconds since the last line. Steps are this worker's: rounds that have ended, with servers
that step what these have applied, or those of its own model where each worker has one. Staleness is left out where it is 0, as
with synchronous training. Waiting is the share of the time in which the training loop waited for others; bytes are what this
worker has sent.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TextIO

from stretto.observe.ledger import Ledger
from stretto.observe.quantities import percent, size

END_S = 2.0  # for a line that is being written when the job is left


@dataclass(frozen=True, slots=True)
class Reading:
    """A ledger at a moment."""

    at_s: float
    staleness: Counter[int]
    waited_s: float
    sent: int
    sent_to_servers: int
    own_steps: int = 0

    @property
    def steps(self) -> int:
        return self.own_steps or self.staleness.total()


def read(ledger: Ledger, world_size: int, at_s: float) -> Reading:
    to_servers = sum(num_bytes for (_, peer), num_bytes in list(ledger.sent.items()) if peer >= world_size)
    return Reading(at_s, Counter(dict(ledger.staleness)), ledger.waited_s, ledger.bytes_sent, to_servers, ledger.own_steps)


def line(before: Reading, now: Reading) -> str:
    """What has happened between the two."""
    passed = max(now.at_s - before.at_s, 1e-9)
    recent = now.staleness - before.staleness
    parts = [f"{now.steps:,} steps", f"{(now.steps - before.steps) / passed:.3g} steps/s"]
    if any(recent.keys()):
        mean = sum(stale * count for stale, count in recent.items()) / recent.total()
        parts.append(f"staleness {mean:.1f} (at most {max(recent)})")
    parts.append(f"waiting {percent(min(1.0, (now.waited_s - before.waited_s) / passed))}")
    to_servers = now.sent_to_servers - before.sent_to_servers
    sent = to_servers or now.sent - before.sent
    parts.append(f"{size(sent / passed)}/s {'to servers' if to_servers else 'sent'}")
    return f"stretto: {', '.join(parts)}"


class Progress:
    """Writes such lines until it is stopped, in a thread of its own, from the first step on."""

    def __init__(self, ledger: Ledger, world_size: int, every_s: float, stream: TextIO) -> None:
        self._ledger, self._world_size, self._every_s, self._stream = ledger, world_size, every_s, stream
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stretto-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _run(self) -> None:
        before = read(self._ledger, self._world_size, time.monotonic())
        while not self._stopped.wait(self._every_s):
            now = read(self._ledger, self._world_size, time.monotonic())
            if now.steps:
                try:
                    self._stream.write(line(before, now) + "\n")
                    self._stream.flush()
                except (OSError, ValueError):  # nobody reads any more
                    return
            before = now
