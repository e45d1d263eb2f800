"""The door of a ZeroMQ socket: who knows the job secret comes in, a stranger is refused before a byte reaches us.

ZeroMQ asks whoever is bound to `inproc://zeromq.zap.01` about every connection (ZAP, ZeroMQ RFC 27). There is one such
address per `zmq.Context`, so one `ZapHandler` serves all server sockets of its context. It is polled by the thread that
polls those sockets; ZeroMQ lets a connection wait until `handle` has answered.

    CURVE (encrypted)   accepted: exactly the public key derived for "wire-client"
    PLAIN (otherwise)   accepted: user "stretto" with the derived password

Order matters: make the handler before a secured socket is bound, or connections come in that nobody has checked.
"""

from __future__ import annotations

import hmac
import logging
import time
from typing import Any

import zmq
from zmq.utils import z85

from stretto.job import secret as secrets

DOMAIN = "stretto"
USERNAME = "stretto"
ZAP_ADDRESS = "inproc://zeromq.zap.01"
LOG_EVERY_S = 5.0

log = logging.getLogger("stretto.job")


def secure_server(socket: zmq.Socket[Any], secret: bytes, encrypted: bool) -> None:
    """Let only those who know the secret connect to `socket`. Call before `bind`, with a `ZapHandler` in the
    context."""
    socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
    if encrypted:
        _, secret_key = secrets.curve_keys(secret, "wire-server")
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    else:
        socket.setsockopt(zmq.PLAIN_SERVER, 1)


def secure_client(socket: zmq.Socket[Any], secret: bytes, encrypted: bool) -> None:
    """Show that we know the secret when `socket` connects; encrypted, the server must show it too. Call before
    `connect`."""
    if encrypted:
        server_public, _ = secrets.curve_keys(secret, "wire-server")
        public, secret_key = secrets.curve_keys(secret, "wire-client")
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    else:
        socket.setsockopt_string(zmq.PLAIN_USERNAME, USERNAME)
        socket.setsockopt_string(zmq.PLAIN_PASSWORD, secrets.plain_password(secret))


class ZapHandler:
    """Answers ZeroMQ's question "may this one connect?" for every secured server socket of one context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, secret: bytes, encrypted: bool, domain: str = DOMAIN) -> None:
        self.refused = 0
        self.last_refused = ""  # the address it came from
        self.accepted = 0
        self._domain = domain.encode()
        self._mechanism = b"CURVE" if encrypted else b"PLAIN"
        self._credentials = _expected_credentials(secret, encrypted)
        self._next_log = float("-inf")
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def handle(self) -> None:
        """Answer one request if there is one. Never blocks, never raises on what a stranger sent."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        request_id = frames[1] if len(frames) > 1 else b""
        if self._welcome(frames):
            self.accepted += 1
            answer = [b"1.0", request_id, b"200", b"OK", USERNAME.encode(), b""]
        else:
            self._note_refusal(frames)
            answer = [b"1.0", request_id, b"400", b"this job has another secret", b"", b""]
        self.socket.send_multipart(answer)

    def close(self) -> None:
        self.socket.close(0)

    def _welcome(self, frames: list[bytes]) -> bool:
        if len(frames) != 6 + len(self._credentials):
            return False
        version, _, domain, _, _, mechanism, *credentials = frames
        if (version, domain, mechanism) != (b"1.0", self._domain, self._mechanism):
            return False
        # All are compared, each in constant time: how long it takes tells nothing about where the difference is.
        same = [hmac.compare_digest(*pair) for pair in zip(credentials, self._credentials, strict=True)]
        return all(same)

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


def _expected_credentials(secret: bytes, encrypted: bool) -> list[bytes]:
    if encrypted:
        public, _ = secrets.curve_keys(secret, "wire-client")
        return [z85.decode(public)]
    return [USERNAME.encode(), secrets.plain_password(secret).encode()]
