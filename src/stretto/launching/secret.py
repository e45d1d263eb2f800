"""The job secret and the keys made from it.

A job has one secret of 32 random bytes, written as 64 hexadecimal characters. It is not used as a
key: every key in use is derived from it with HKDF-SHA256 (extract, then expand), under a purpose that keeps the keys
independent:

    key(purpose) = HKDF(secret, salt="stretto/1", info=purpose)

    "server", "client"    CURVE key pairs. Clients know the server's public key, the server accepts exactly the clients'
                          public key: both sides prove that they know the secret, and traffic is encrypted.
    "wire-tcp"            with which workers prove to each other, on a plain connection, that they belong to the job.
    "job" and a nonce     the secret of one job. The coordinator draws the nonce and sends it, encrypted, with the table of
                          workers; the wires' keys are derived from this secret and not from the file's. Two jobs that share
                          a file therefore share no key, and what was recorded of one is of no use against the other.

The coordinator's own connection always uses CURVE, whose session keys are drawn anew for every connection, so that nothing
which travels there can be used again either.

Invariant: a secret never appears in a log line, a `repr` or an error message.
Reference: Krawczyk and Eronen, "HMAC-based Extract-and-Expand Key Derivation Function (HKDF)", RFC 5869.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat

import zmq
from zmq.utils import z85

from stretto.errors import SecretError

SECRET_BYTES = 32
SALT = b"stretto/1"
HOW_TO_MAKE_ONE = (
    "Make one secret per job with `stretto secret > job.secret` "
    '(or `python -c "import secrets; print(secrets.token_hex(32))" > job.secret`), give every worker the same file '
    "(STRETTO_SECRET_FILE=job.secret or --secret-file job.secret), and keep it to yourself: chmod 600 job.secret."
)

log = logging.getLogger("stretto.launching")


def generate() -> bytes:
    """A fresh secret from the system's random source."""
    return secrets.token_bytes(SECRET_BYTES)


def parse(text: str, source: str) -> bytes:
    """Read 64 hexadecimal characters; `source` says where they were found, for the error message."""
    text = text.strip()
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES or len(text) != 2 * SECRET_BYTES:
        raise SecretError(
            f"{source} holds {len(text)} characters that are not a job secret: a secret is exactly {2 * SECRET_BYTES} "
            f"hexadecimal characters ({SECRET_BYTES} random bytes).\n"
            f"{HOW_TO_MAKE_ONE}"
        )
    return secret


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The secret in a file. One that others can read is used, because mounted secrets often are, but not silently."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(4096)
    except OSError as error:
        raise SecretError(
            f"The job secret cannot be read from {os.fspath(path)}: {error.strerror}.\n{HOW_TO_MAKE_ONE}"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning(
            "the job secret in %s is open to other users of this machine (mode %04o): run chmod 600 %s",
            path, mode, path,
        )  # fmt: skip
    return parse(text, os.fspath(path))


def hkdf(key: bytes, *, salt: bytes, info: bytes, length: int) -> bytes:
    """HKDF-SHA256 of RFC 5869: at most 255 * 32 bytes."""
    if not 0 < length <= 255 * 32:
        raise ValueError(f"hkdf(length={length}): HKDF-SHA256 gives 1 to {255 * 32} bytes; ask for a length in that range")
    pseudorandom_key = hmac.digest(salt or bytes(32), key, hashlib.sha256)
    output = block = b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.digest(pseudorandom_key, block + info + bytes([counter]), hashlib.sha256)
        output += block
    return output[:length]


def derive(secret: bytes, purpose: str, length: int = 32) -> bytes:
    """The key for one purpose: independent of the keys for all others, and no way back to the secret."""
    if len(secret) != SECRET_BYTES:
        raise SecretError(f"A job secret has {SECRET_BYTES} bytes, this one has {len(secret)}.\n{HOW_TO_MAKE_ONE}")
    return hkdf(secret, salt=SALT, info=purpose.encode(), length=length)


def curve_keys(secret: bytes, purpose: str) -> tuple[bytes, bytes]:
    """(public, secret) CURVE keys in Z85, as ZeroMQ takes them. Any 32 bytes are a Curve25519 secret key."""
    secret_key = z85.encode(derive(secret, purpose))
    return zmq.curve_public(secret_key), secret_key


def job_secret(secret: bytes, nonce: bytes) -> bytes:
    """What takes the secret's place on the wires of the one job whose coordinator drew `nonce`."""
    return derive(secret, f"job {nonce.hex()}", SECRET_BYTES)
