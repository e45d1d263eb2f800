"""Authentication of ZeroMQ sockets: whoever knows the secret comes in, anybody else is refused before a byte reaches us.

ZeroMQ asks whoever is bound to `inproc://zeromq.zap.01` about every connection (ZAP, ZeroMQ RFC 27). There is one such
address per `zmq.Context`, so one `ZapHandler` serves all server sockets of its context. It is polled by the thread that
polls those sockets; ZeroMQ lets a connection wait until `handle` has answered.

The mechanism is always CURVE, which authenticates both sides and encrypts. The server's public key is derived from the secret,
so a stranger does not even get as far as the handler; the one client key that the handler accepts is derived from it as well.

Order matters: make the handler before a secured socket is bound, or connections come in that nobody has checked.
"""

from __future__ import annotations

import hmac
import logging
import time
from typing import Any

import zmq
from zmq.utils import z85

from stretto.launching import secret as secrets

DOMAIN = "stretto"
MECHANISM = b"CURVE"
USER = b"stretto"
ZAP_ADDRESS = "inproc://zeromq.zap.01"
LOG_EVERY_S = 5.0

log = logging.getLogger("stretto.launching")


def secure_server(socket: zmq.Socket[Any], secret: bytes) -> None:
    """Let only those who know the secret connect to `socket`. Call before `bind`, with a `ZapHandler` in the context."""
    _, secret_key = secrets.curve_keys(secret, "server")
    socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)


def secure_client(socket: zmq.Socket[Any], secret: bytes) -> None:
    """Show that we know the secret when `socket` connects; the server must show it too. Call before `connect`."""
    server_public, _ = secrets.curve_keys(secret, "server")
    public, secret_key = secrets.curve_keys(secret, "client")
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)


class ZapHandler:
    """Answers ZeroMQ's question "may this one connect?" for every secured server socket of one context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secret: bytes | None = None) -> None:
        self.refused = 0
        self.last_refused = ""  # the address it came from
        self.accepted = 0
        self._client_key: bytes | None = None  # nobody is let in before it is known
        self._next_log = float("-inf")
        if secret is not None:
            self.accept(secret)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def accept(self, secret: bytes) -> None:
        """From now on, let those in who know this secret."""
        self._client_key = z85.decode(secrets.curve_keys(secret, "client")[0])

    def handle(self) -> None:
        """Answer one request if there is one. Never blocks, never raises on what a stranger sent."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        request_id = frames[1] if len(frames) > 1 else b""
        if self._welcome(frames):
            self.accepted += 1
            answer = [b"1.0", request_id, b"200", b"OK", USER, b""]
        else:
            self._note_refusal(frames)
            answer = [b"1.0", request_id, b"400", b"this job has another secret", b"", b""]
        self.socket.send_multipart(answer)

    def close(self) -> None:
        self.socket.close(0)

    def _welcome(self, frames: list[bytes]) -> bool:
        if self._client_key is None or len(frames) != 7:
            return False
        version, _, domain, _, _, mechanism, key = frames
        if (version, domain, mechanism) != (b"1.0", DOMAIN.encode(), MECHANISM):
            return False
        return hmac.compare_digest(key, self._client_key)

    def _note_refusal(self, frames: list[bytes]) -> None:
        self.refused += 1
        self.last_refused = frames[3].decode("ascii", "replace") if len(frames) > 3 else "an unknown address"
        now = time.monotonic()
        if now < self._next_log:
            return
        self._next_log = now + LOG_EVERY_S
        log.warning(
            "refused a stranger from %s: it does not know the job secret (%d refused so far)", self.last_refused, self.refused
        )
