"""Finding out which program listens at an address, by the first bytes that it sends.

A failed handshake under CURVE tells the client nothing: the server cannot even read the hello. So `knock` opens a connection
of its own, says the beginning of ZeroMQ's greeting, and judges by what comes back, however the connection ends afterwards:

    a greeting with our mechanism          a coordinator (of this job or of another)
    anything else                          another program, and what it said
    nothing, or less than a greeting       it is stopped, or busy, or a program that waits for more, or a proxy without a server
    no connection                          why not

Programs that wait for the end of a line or of the request (web servers) answer when the sending direction is closed.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import time
from dataclasses import dataclass

from stretto.launching.hosts import split_address
from stretto.launching.zap import MECHANISM

PATIENCE_S = 1.0  # before and, once more, after our sending direction is closed
GREETING_BYTES = 32  # up to the mechanism. (ZeroMQ RFC 37: signature 10 bytes, version 2, mechanism 20, as-server 1, filler 31.)
SHOWN_BYTES = 60

# Signature and version only: that makes the other side speak, and it cannot yet hang up over a different mechanism.
_BEGINNING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"


class Who(enum.Enum):
    COORDINATOR = "coordinator"
    ANOTHER_PROGRAM = "another program"
    SILENT = "silent"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class Listener:
    who: Who
    words: str = ""  # another program: the beginning of what it said, as a literal; nobody: why


def knock(address: str, patience_s: float) -> Listener:
    """Takes three times `patience_s` at most."""
    try:
        connection = socket.create_connection(split_address(address), timeout=patience_s)
    except TimeoutError:
        return Listener(Who.NOBODY, "no answer (a firewall, a wrong address, or the host is down)")
    except OSError as error:
        return Listener(Who.NOBODY, (error.strerror or str(error)).lower())
    with connection:
        return _judge(_listen(connection, patience_s))


def _listen(connection: socket.socket, patience_s: float) -> bytes:
    """The first bytes from the other side. It may hang up or be reset at any time: what has come before counts."""
    with contextlib.suppress(OSError):
        connection.sendall(_BEGINNING)
    heard = _read(connection, time.monotonic() + patience_s)
    if not heard:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        heard = _read(connection, time.monotonic() + patience_s)
    return heard


def _read(connection: socket.socket, deadline: float) -> bytes:
    heard = b""
    while not _is_enough(heard) and (remaining := deadline - time.monotonic()) > 0:
        connection.settimeout(remaining)
        try:
            chunk = connection.recv(256)
        except OSError:  # nothing came in time, or the connection was reset
            break
        if not chunk:
            break
        heard += chunk
    return heard


def _is_enough(heard: bytes) -> bool:
    return len(heard) >= GREETING_BYTES or (heard != b"" and heard[0] != 0xFF)


def _judge(heard: bytes) -> Listener:
    if not heard or (heard[0] == 0xFF and len(heard) < GREETING_BYTES):
        return Listener(Who.SILENT)
    if heard[0] == 0xFF and heard[9] == 0x7F and heard[12:GREETING_BYTES].rstrip(b"\0") == MECHANISM:
        return Listener(Who.COORDINATOR)
    line = heard.split(b"\n")[0][:SHOWN_BYTES].strip()
    return Listener(Who.ANOTHER_PROGRAM, repr(line)[1:])
