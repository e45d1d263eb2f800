"""Strangers of `strangers.py`: python benchmarks/strangers_flood.py ADDRESS KIND CONNECTIONS RATE

Keeps so many connections to ADDRESS open, none of which knows the job's secret, and opens new ones in place of those that are
closed, at most RATE a second. It prints a line once it has tried as often as it wants connections, and runs until it is killed.

    idle        says nothing
    announce    speaks ZeroMQ's protocol, and announces and sends nearly as much as a worker of a small job lets a stranger send
    announce16k the same with 16 KiB, which the coordinator lets through as well
    garbage     speaks another protocol
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import time

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def command(num_bytes: int) -> bytes:
    return GREETING + b"\x06" + num_bytes.to_bytes(8, "big") + bytes(num_bytes - 1)


WORDS = {
    "idle": b"",
    "announce": command(512 << 10),
    "announce16k": command(16 << 10),
    "garbage": b"GET / HTTP/1.0\r\n\r\n" * 9,
}


def main(address: str, kind: str, connections: int, rate: float) -> None:
    host, _, port = address.rpartition(":")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    held: list[tuple[socket.socket, memoryview]] = []
    tried = 0
    while True:
        began = time.monotonic()
        for _ in range(max(1, int(rate / 10))):
            tried += 1
            with contextlib.suppress(OSError):  # refused: the port is closed, or crowded
                held.append((socket.create_connection((host, int(port)), timeout=1), memoryview(WORDS[kind])))
                held[-1][0].setblocking(False)
        held = [(each, left) for each, unsent in held if (left := speak(each, unsent)) is not None]
        for each, _ in held[:-connections]:
            each.close()
        held = held[-connections:]
        if tried - max(1, int(rate / 10)) < connections <= tried:
            print(f"{os.getpid()} has tried {tried} times", flush=True)
        time.sleep(max(0.0, 0.1 - (time.monotonic() - began)))


def speak(connection: socket.socket, unsent: memoryview) -> memoryview | None:
    """What is left to say; None when the other side has hung up."""
    try:
        if unsent:
            unsent = unsent[connection.send(unsent) :]
        if connection.recv(4096):
            return unsent
    except BlockingIOError:
        return unsent
    except OSError:
        pass
    connection.close()
    return None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
