"""A last deed before SIGTERM ends the process: when one worker fails, the launcher ends the others that way, and their traces are
the ones that show what they were waiting for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def before_termination(deed: Callable[[], object]) -> None:
    """Run `deed` when SIGTERM comes, then end as it would have. A handler that the program has set itself is left alone."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    process = os.getpid()

    def terminated(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() == process:  # not in a forked child, which has inherited this
            deed()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, terminated)
