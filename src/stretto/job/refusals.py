"""Who was turned away at a server's door before it could say a word, and why.

A worker with another secret must be told apart from one that never came, or its peers wait for it in vain without a hint.
ZeroMQ's monitor reports what happens to each connection, in this order:

    ACCEPTED (descriptor)  ->  HANDSHAKE_FAILED_PROTOCOL (reason)  ->  DISCONNECTED (descriptor)

Under CURVE a client that does not know the secret cannot even say hello: the cryptographic check fails before ZAP is asked.
(Under PLAIN it is ZAP that refuses: see `zap`.) The remote address is not part of the report; it is asked of the descriptor
when the connection is accepted, and unknown if it was closed by then. A handshake that merely breaks off is no refusal:
probes and port scanners do that. (A worker of ours that does not encrypt as the job does may see that first and hang up before
its greeting was read here: `introduce` then says it once more and waits until it is turned away.)
"""

from __future__ import annotations

import os
import socket

import zmq
from zmq.utils.monitor import parse_monitor_message

from stretto.job.membership import Refusal, Why

UNKNOWN = "an unknown address"

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED


class RefusalMonitor:
    """Watches one server socket. Poll `socket`; `take` never blocks. Use from the thread of the server socket only."""

    def __init__(self, server: zmq.Socket[bytes], encrypted: bool) -> None:
        self._server = server
        self._reasons = {
            int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): Why.SECRET,
            int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): Why.PLAIN if encrypted else Why.OTHERWISE,
        }
        self._addresses: dict[int, str] = {}  # descriptor -> remote address
        self._failed: Why | None = None  # of the connection whose end is reported next
        self.socket = server.get_monitor_socket(_EVENTS)

    def take(self) -> list[Refusal]:
        """The refusals since the last call."""
        found: list[Refusal] = []
        while True:
            try:
                message = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return found
            found += self._note(int(message["event"]), int(message["value"]))

    def close(self) -> None:
        self._server.disable_monitor()
        self.socket.close(0)

    def _note(self, event: int, value: int) -> list[Refusal]:
        if event == zmq.EVENT_ACCEPTED:
            self._addresses[value] = remote_address(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._failed = self._reasons.get(value)
        elif event == zmq.EVENT_DISCONNECTED:
            address = self._addresses.pop(value, UNKNOWN)
            why, self._failed = self._failed, None
            return [] if why is None else [Refusal(why, address)]
        return []


def remote_address(descriptor: int) -> str:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return UNKNOWN
