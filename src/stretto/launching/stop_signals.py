"""Stop signals, noted instead of acted upon, for a program whose event loop decides what they mean."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Noticed:
    """Signals that came, and a descriptor that becomes readable when one does."""

    wake: int
    numbers: list[int] = field(default_factory=list)

    def quiet_for(self, seconds: float) -> bool:
        """Wait so long. False, and at once, if a signal has come."""
        deadline = time.monotonic() + seconds
        while not self.numbers and (left := deadline - time.monotonic()) > 0:
            if select.select([self.wake], [], [], left)[0]:
                os.read(self.wake, 4096)  # also written to by signals that nobody asked about, such as SIGCHLD
        return not self.numbers


@contextlib.contextmanager
def noticed_signals() -> Iterator[Noticed]:
    """Within: stop signals are noted instead of acted upon. One that is ignored already (nohup) stays ignored."""
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    noticed = Noticed(wake_read)
    previous = {
        number: signal.signal(number, lambda number, frame: noticed.numbers.append(number))
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    previous_wakeup = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    try:
        yield noticed
    finally:
        signal.set_wakeup_fd(previous_wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(wake_read)
        os.close(wake_write)
