"""What the supervisor would leave behind if it were killed: the launcher adopts it, and ends it.

The kernel gives orphans to the nearest ancestor that asked for them (a "child subreaper"). While it lives, that is the
supervisor; once it is killed, it is the launcher, which finds them below itself in /proc, also those with a session of their own.
If launcher and supervisor are killed at the same moment nobody is left to do it: the workers end all the same (the kernel kills
them at their parent's death), but processes that they had started stay.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field

from stretto.launching.supervisor import PR_SET_CHILD_SUBREAPER, descendants, prctl, send_signal


@dataclass(frozen=True, slots=True)
class Orphans:
    """Make one before the supervisor is started. What runs below this process by then is none of the job."""

    not_ours: frozenset[int] = field(default_factory=lambda: frozenset(descendants(os.getpid())))

    def __post_init__(self) -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def end(self, timeout_s: float) -> None:
        """Kill all of them, and those that they fork meanwhile. Only a process stuck in the kernel is left after the timeout."""
        deadline = time.monotonic() + timeout_s
        while (left := set(descendants(os.getpid())) - self.not_ours) and time.monotonic() < deadline:
            for pid in left:
                send_signal(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):  # not our child yet: its parent is dying
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
