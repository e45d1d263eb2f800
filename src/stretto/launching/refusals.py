"""Which clients a server turned away before they could say a word, and why.

A worker with another secret must be told apart from one that never came, or its peers wait for it in vain without a hint.
ZeroMQ's monitor reports what happens to each connection, in this order:

    ACCEPTED (descriptor)  ->  HANDSHAKE_FAILED_PROTOCOL (reason)  ->  DISCONNECTED (descriptor)

A client that does not know the secret cannot even say hello: the cryptographic check fails before ZAP is asked. The remote
address is not part of the report; it is asked of the descriptor when the connection is accepted, and unknown if it was closed
by then. A handshake that merely breaks off is no refusal: probes and port scanners do that.
"""

from __future__ import annotations

import zmq

from stretto.launching.doorstep import Doorstep
from stretto.launching.introduction_messages import Refusal, Why
from stretto.launching.monitor import next_report, open_monitor

AT_ONCE = 100  # reports read in one go, so that a flood of them does not keep the server from its work

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
_REASONS = {
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): Why.SECRET,
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): Why.OTHERWISE,
}


class RefusalMonitor:
    """Watches one server socket. Poll `socket`; `take` never blocks. Use from the thread of the server socket only."""

    def __init__(self, server: zmq.Socket[bytes], doorstep: Doorstep) -> None:
        self._server = server
        self._doorstep = doorstep
        self._failed: Why | None = None  # of the connection whose end is reported next
        self.socket = open_monitor(server, _EVENTS)

    def take(self) -> list[Refusal]:
        """The refusals since the last call."""
        found: list[Refusal] = []
        for _ in range(AT_ONCE):
            report = next_report(self.socket)
            if report is None:
                break
            found += self._note(*report)
        return found

    def close(self) -> None:
        self._server.disable_monitor()
        self.socket.close(0)

    def _note(self, event: int, value: int) -> list[Refusal]:
        if event == zmq.EVENT_ACCEPTED:
            self._doorstep.came(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._failed = _REASONS.get(value)
        elif event == zmq.EVENT_DISCONNECTED:
            address = self._doorstep.left(value)
            why, self._failed = self._failed, None
            return [] if why is None else [Refusal(why, address)]
        return []
