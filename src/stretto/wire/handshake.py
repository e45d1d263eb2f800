"""Two workers meet on a plain TCP connection and prove to each other that they know the job's secret.

    connector -> acceptor    magic, its rank and generation, the rank and generation it wants, nonce c (16 random bytes)
    acceptor  -> connector   nonce a (16 random bytes), HMAC(key, "acceptor" | hello | a)
    connector -> acceptor    HMAC(key, "connector" | hello | a)

key = HKDF(job's secret, "wire-tcp"), and so another one in every job. Each side's proof covers both nonces and both ranks, so it
can neither be replayed nor reflected, and a stranger learns nothing from it. This authenticates the connection when it is
made; it does not encrypt what follows, which is why this wire is for one host or a network that is trusted.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import NamedTuple

from stretto.errors import SecretError
from stretto.launching.secret import derive

HELLO = struct.Struct("<8sIIII16s")
MAGIC = b"stretto2"
NONCE_BYTES = 16
PROOF_BYTES = 32
MIN_WAIT_S = 0.001  # a timeout of 0 would mean not to wait at all, with another error


class Stranger(Exception):
    """Whoever connected is not a worker of this job."""


class Probe(Stranger):
    """Whoever connected went away without a word: the coordinator's look whether the port answers, or a port scan."""


def handshake_key(secret: bytes) -> bytes:
    return derive(secret, "wire-tcp")


class Life(NamedTuple):
    """One life of a worker: a rank that comes back has a later generation."""

    rank: int
    generation: int


def introduce_ourselves(connection: socket.socket, key: bytes, ours: Life, to: Life) -> None:
    """The connector's side, which is over within the socket's timeout. Raises SecretError when the other side's proof is wrong,
    OSError when it hangs up or does not answer in time: it may be crowded by strangers, or not know the key yet. Then it is
    worth trying again."""
    hello = HELLO.pack(MAGIC, *ours, *to, secrets.token_bytes(NONCE_BYTES))
    connection.sendall(hello)
    answer = receive_exactly(connection, NONCE_BYTES + PROOF_BYTES)
    nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"acceptor", hello, nonce)):
        raise SecretError(
            f"what answers for rank {to.rank} does not know this job's secret (or belongs to another job).\n"
            f"Give every node the same --secret-file, and start all of them for the same job."
        )
    connection.sendall(_proof(key, b"connector", hello, nonce))


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes; ConnectionAbortedError if the other side hangs up before, TimeoutError if they are not all here within the
    socket's timeout. (The socket itself allows that time for every byte, and so could be held by a peer that drips.)"""
    timeout_s = connection.gettimeout()
    assert timeout_s, "a handshake needs a socket with a timeout"
    deadline = time.monotonic() + timeout_s
    parts = bytearray()
    try:
        while len(parts) < num_bytes:
            connection.settimeout(max(MIN_WAIT_S, deadline - time.monotonic()))
            part = connection.recv(num_bytes - len(parts))
            if not part:
                raise ConnectionAbortedError(errno.ECONNABORTED, "it hung up in the middle of the handshake")
            parts += part
            if len(parts) < num_bytes and time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"{len(parts)} of {num_bytes} bytes came within {timeout_s:g} s")
    finally:
        connection.settimeout(timeout_s)
    return bytes(parts)


class Acceptor:
    """The acceptor's side, without input and output.

    Read at most `wanted` bytes from the connection, pass them to `hear`, then send what `answer` returns. Once `peer` is known
    the handshake is over. The key may come later than the greeting: until then there is no answer.
    """

    def __init__(self, ours: Life) -> None:
        self.peer: Life | None = None
        self._ours = ours
        self._received = bytearray()
        self._hello = b""
        self._theirs = Life(-1, 0)
        self._nonce = b""

    @property
    def wanted(self) -> int:
        return (PROOF_BYTES if self._nonce else HELLO.size) - len(self._received)

    def hear(self, data: bytes) -> None:
        """Bytes have come, or, if there are none, the end of the stream. Raises Stranger."""
        if not data:
            if self._received or self._nonce:
                raise Stranger("it closed the connection")
            raise Probe("it said nothing, and went away")
        self._received += data
        if not self.wanted and not self._nonce:
            self._greeted(bytes(self._received))

    def _greeted(self, hello: bytes) -> None:
        magic, rank, generation, wanted_rank, wanted_generation, _ = HELLO.unpack(hello)
        self._theirs = Life(rank, generation)
        if magic != MAGIC or (wanted_rank, wanted_generation) != self._ours:
            raise Stranger("not a worker of this job")
        self._hello = hello

    def answer(self, key: bytes) -> bytes:
        """What to send now; empty while more has to come. Raises Stranger."""
        if self.wanted:
            return b""
        received, self._received = bytes(self._received), bytearray()
        if not self._nonce:
            self._nonce = secrets.token_bytes(NONCE_BYTES)
            return self._nonce + _proof(key, b"acceptor", self._hello, self._nonce)
        if not hmac.compare_digest(received, _proof(key, b"connector", self._hello, self._nonce)):
            raise Stranger("it does not know the job's secret")
        self.peer = self._theirs
        return b""


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, role + b"|" + hello + nonce, hashlib.sha256).digest()
