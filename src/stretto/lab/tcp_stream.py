"""A bare TCP stream between two hosts: the fastest any library could move these bytes over one connection.

    python -I -S tcp_stream.py ADDRESS NUM_BYTES TIMEOUT_S          receives: prints its port, then the seconds that it took
    python -I -S tcp_stream.py ADDRESS NUM_BYTES TIMEOUT_S PORT     sends to it

The sender writes its clock, then the bytes; the receiver's clock at the last byte less the sender's is the time: both
run on one machine, so the clocks are one. Setting up the connection is not part of it.
"""

from __future__ import annotations

import socket
import struct
import sys
import time

_BLOCK_BYTES = 1 << 20
_CLOCK = struct.Struct("!d")


def send(where: tuple[str, int], num_bytes: int, timeout_s: float) -> None:
    block = memoryview(bytes(min(_BLOCK_BYTES, max(1, num_bytes))))
    with socket.create_connection(where, timeout_s) as connection:
        connection.sendall(_CLOCK.pack(time.monotonic()))
        left = num_bytes
        while left > 0:
            left -= connection.send(block[: min(left, len(block))])


def receive(address: str, num_bytes: int, timeout_s: float) -> float:
    with socket.create_server((address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        listener.settimeout(timeout_s)
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(timeout_s)
        started = _CLOCK.unpack(connection.recv(_CLOCK.size, socket.MSG_WAITALL))[0]
        block, left = memoryview(bytearray(_BLOCK_BYTES)), num_bytes
        while left > 0:
            got = connection.recv_into(block, min(left, len(block)))
            if got == 0:
                raise ConnectionError(f"the stream ended {left} bytes early")
            left -= got
        return time.monotonic() - float(started)


if __name__ == "__main__":
    address, num_bytes, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if len(sys.argv) > 4:
        send((address, int(sys.argv[4])), num_bytes, timeout_s)
    else:
        print(receive(address, num_bytes, timeout_s))
