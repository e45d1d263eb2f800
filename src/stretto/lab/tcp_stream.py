"""A bare TCP stream between two hosts: the fastest any library could move these bytes over one connection.

The sender writes its clock, then the bytes; the receiver's clock at the last byte less the sender's is the time: both
run on one machine, so the clocks are one. Setting up the connection is not part of it.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable

_BLOCK_BYTES = 1 << 20
_CLOCK = struct.Struct("!d")


def time_stream(listener: socket.socket, num_bytes: int, timeout_s: float, become_sender: Callable[[], None]) -> float:
    """Seconds for `num_bytes`. Forks the sender, which moves to its host with `become_sender`."""
    where = listener.getsockname()
    sender = os.fork()
    if sender == 0:
        try:
            become_sender()
            _send(where, num_bytes, timeout_s)
            os._exit(0)
        except BaseException as error:
            os.write(2, f"the sender failed: {error!r}\n".encode(errors="replace"))
            os._exit(1)
    listener.settimeout(timeout_s)
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(timeout_s)
        started = _CLOCK.unpack(connection.recv(_CLOCK.size, socket.MSG_WAITALL))[0]
        _drain(connection, num_bytes)
        return time.monotonic() - float(started)


def _send(where: tuple[str, int], num_bytes: int, timeout_s: float) -> None:
    block = memoryview(bytes(min(_BLOCK_BYTES, max(1, num_bytes))))
    with socket.create_connection(where, timeout_s) as connection:
        connection.sendall(_CLOCK.pack(time.monotonic()))
        left = num_bytes
        while left > 0:
            left -= connection.send(block[: min(left, len(block))])


def _drain(connection: socket.socket, num_bytes: int) -> None:
    block = memoryview(bytearray(_BLOCK_BYTES))
    left = num_bytes
    while left > 0:
        got = connection.recv_into(block, min(left, len(block)))
        if got == 0:
            raise ConnectionError(f"the stream ended {left} bytes early")
        left -= got
