"""Keeps a server process: starts it, and starts it again when it dies.

    python -I -S keeper.py RESTARTS COMMAND...       what the server is to know comes on standard input

It stands between the worker that starts a server and the server, so that the worker may die and the server is replaced all the
same. The command is run with the number of its life, 0, 1, ..., as its last argument, and with the keeper's standard input. It is
run again, `RESTARTS` times at most, unless it has ended well (all workers have left) or could not join (`NOT_JOINED`: the others
are gone, or do not let it in; `REFUSED`: it never met them, and has said why).
The keeper ends with the server's last code, and the server with the keeper.

Signals to the whole process group are for the workers, whom servers follow: a keeper that hears one starts nothing any more.

Imports the standard library only: about 10 ms and 9 MB.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
REFUSED: Final = 2  # how every command of ours ends with an error of ours
NOT_JOINED: Final = 3
MOST_BYTES: Final = 1 << 16
PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
LIVED_S: Final = 60.0  # a server that has lived for so long has not died because of how it was started


class Keeper:
    def __init__(self, restarts: int, command: list[str], place: bytes) -> None:
        self._restarts, self._command, self._place = restarts, command, place
        self._told_to_stop = False

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        pause_s = PAUSE_S
        for life in range(self._restarts + 1):
            began = time.monotonic()
            code = self._live(life)
            if code in (0, REFUSED, NOT_JOINED) or self._told_to_stop or life == self._restarts:
                break
            pause_s = PAUSE_S if time.monotonic() - began > LIVED_S else min(LONGEST_PAUSE_S, 2 * pause_s)
            time.sleep(pause_s)
            if self._told_to_stop:  # meanwhile
                break
        return code if code >= 0 else 128 - code

    def _stop(self, number: int, frame: object) -> None:
        self._told_to_stop = True

    def _live(self, life: int) -> int:
        parent = os.getpid()
        server = subprocess.Popen([*self._command, str(life)], stdin=subprocess.PIPE, preexec_fn=lambda: end_with_parent(parent))
        assert server.stdin is not None
        try:
            with server.stdin:
                server.stdin.write(self._place)
        except BrokenPipeError:
            pass  # it has died already
        return server.wait()


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> int:
    return Keeper(int(sys.argv[1]), sys.argv[2:], sys.stdin.buffer.read(MOST_BYTES)).run()


if __name__ == "__main__":
    sys.exit(main())
