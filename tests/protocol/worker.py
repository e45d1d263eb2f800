"""One process of a token ring and a register over TCP, without torch: python worker.py RANK SIZE.

It prints its pid and address, reads those of all, and then prints again and again: turns, number of the stamp, who is lost.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from protocol.machines import Read, Register, TokenRing, Write
from stretto.launching.peers import Peer
from stretto.protocol.loop import Loop
from stretto.timeouts import Timeouts
from stretto.wire.tcp import TcpWire

DEADLINE_S = 60.0


def main(rank: int, size: int) -> None:
    wire = TcpWire(rank, size, secret=bytes(32), timeouts=Timeouts(connect_s=DEADLINE_S))
    print(os.getpid(), wire.address, flush=True)
    words = sys.stdin.readline().split()
    peers = [Peer(number, number, "here", words[2 * number + 1], int(words[2 * number])) for number in range(size)]
    wire.connect(peers, b"nonce")
    loop = Loop(wire)
    tokens = loop.start(TokenRing(rank, size, hold_s=0.001, retry_s=0.2), 100)
    register = loop.start(Register(rank, size, retry_s=0.2), 101)

    def report() -> None:
        while True:
            turns, lost = tokens.request("turns").result(DEADLINE_S)
            register.request(Write(b"%d" % turns)).result(DEADLINE_S)
            (number, _), _ = register.request(Read()).result(DEADLINE_S)
            print(turns, number, *lost, flush=True)
            time.sleep(0.005)

    threading.Thread(target=report, daemon=True).start()
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        wire.progress(min(1.0, loop.turn()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
