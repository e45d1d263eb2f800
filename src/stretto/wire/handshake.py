"""Two workers meet on a plain TCP connection and prove to each other that they know the job's secret.

    connector -> acceptor    magic, generation, its rank, the rank it wants, nonce c (16 random bytes)
    acceptor  -> connector   nonce a (16 random bytes), HMAC(key, "acceptor" | hello | a)
    connector -> acceptor    HMAC(key, "connector" | hello | a)

key = HKDF(secret, "wire-tcp"). Each side's proof covers both nonces and both ranks, so it can neither be replayed nor reflected,
and a stranger learns nothing from it. This authenticates the connection when it is made; it does not encrypt what follows, which
is why this wire is for one host or a network that is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct

from stretto.errors import SecretError
from stretto.job.secret import derive

HELLO = struct.Struct("<8sIII16s")
MAGIC = b"stretto1"
NONCE_BYTES = 16
PROOF_BYTES = 32


class Stranger(Exception):
    """Whoever connected is not a worker of this job."""


class Probe(Stranger):
    """Whoever connected went away without a word: the coordinator's look whether the port answers, or a port scan."""


def handshake_key(secret: bytes) -> bytes:
    return derive(secret, "wire-tcp")


def introduce_ourselves(connection: socket.socket, key: bytes, generation: int, rank: int, to: int) -> None:
    """The connector's side. The socket must have a timeout. Raises SecretError when the other side proves nothing."""
    hello = HELLO.pack(MAGIC, generation, rank, to, secrets.token_bytes(NONCE_BYTES))
    connection.sendall(hello)
    try:
        answer = receive_exactly(connection, NONCE_BYTES + PROOF_BYTES)
    except Stranger:
        answer = b""
    nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"acceptor", hello, nonce)):
        raise SecretError(
            f"what answers for rank {to} does not know this job's secret (or belongs to another job).\n"
            f"Give every node the same --secret-file, and start all of them for the same job."
        )
    connection.sendall(_proof(key, b"connector", hello, nonce))


def welcome(connection: socket.socket, key: bytes, generation: int, rank: int) -> int:
    """The acceptor's side: returns the connector's rank, or raises Stranger. The socket must have a timeout."""
    hello = receive_exactly(connection, HELLO.size, silent=Probe)
    magic, their_generation, their_rank, wanted, _ = HELLO.unpack(hello)
    if magic != MAGIC or their_generation != generation or wanted != rank:
        raise Stranger("not a worker of this job")
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce + _proof(key, b"acceptor", hello, nonce))
    if not hmac.compare_digest(receive_exactly(connection, PROOF_BYTES), _proof(key, b"connector", hello, nonce)):
        raise Stranger("it does not know the job's secret")
    return int(their_rank)


def receive_exactly(connection: socket.socket, num_bytes: int, silent: type[Stranger] = Stranger) -> bytes:
    """So many bytes, or Stranger; `silent` when not even one has come."""
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(num_bytes - len(parts))
        if not part:
            raise Stranger("it closed the connection") if parts else silent("it said nothing, and went away")
        parts += part
    return bytes(parts)


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, role + b"|" + hello + nonce, hashlib.sha256).digest()
