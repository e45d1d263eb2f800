"""The handshake of the plain wire: both sides prove that they know the secret, and no proof serves twice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import SecretError
from stretto.wire.handshake import (
    HELLO,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Acceptor,
    Life,
    Probe,
    Stranger,
    handshake_key,
    introduce_ourselves,
    receive_exactly,
)

KEY = handshake_key(bytes(32))
OTHER_KEY = handshake_key(bytes([1]) * 32)


class Side(threading.Thread):
    """One side of a handshake, in a thread: afterwards `result` or `error`."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._action = action
        self.result: object = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._action()
        except Exception as error:
            self.error = error

    def wait(self) -> Side:
        self.join(30)
        assert not self.is_alive()
        return self


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for each in (ours, theirs):
            each.settimeout(30)
        yield ours, theirs


ACCEPTOR, CONNECTOR = Life(0, 3), Life(1, 4)  # two workers of different generations


def welcome(connection: socket.socket, key: bytes = KEY) -> Life:
    """The acceptor's side on a connection that blocks: what the door does for many at once."""
    acceptor = Acceptor(ACCEPTOR)
    while acceptor.peer is None:
        acceptor.hear(connection.recv(acceptor.wanted))
        if answer := acceptor.answer(key):
            connection.sendall(answer)
    return acceptor.peer


def accept(connection: socket.socket, key: bytes = KEY) -> Side:
    def action() -> Life:
        try:
            return welcome(connection, key)
        except Exception:
            connection.close()
            raise

    return Side(action)


def connect(connection: socket.socket, key: bytes = KEY, to: Life = ACCEPTOR) -> Side:
    def action() -> None:
        try:
            introduce_ourselves(connection, key, CONNECTOR, to)
        except Exception:
            connection.close()
            raise

    return Side(action)


def test_two_workers_with_the_same_secret_meet() -> None:
    with pair() as (ours, theirs):
        acceptor, connector = accept(ours), connect(theirs)
        assert connector.wait().error is None
        assert acceptor.wait().error is None and acceptor.result == CONNECTOR


def test_a_wrong_secret_is_found_by_both_sides() -> None:
    with pair() as (ours, theirs):
        acceptor, connector = accept(ours), connect(theirs, key=OTHER_KEY)
        assert isinstance(connector.wait().error, SecretError)
        assert "rank 0 does not know this job's secret" in str(connector.error)
        error = acceptor.wait().error
        assert isinstance(error, Stranger) and not isinstance(error, Probe)


@pytest.mark.parametrize("wanted", [Life(0, 2), Life(2, 3)], ids=["a former life", "another rank"])
def test_a_worker_that_looks_for_another_rank_or_another_life_of_this_one_is_a_stranger(wanted: Life) -> None:
    with pair() as (ours, theirs):
        acceptor, connector = accept(ours), connect(theirs, to=wanted)
        assert isinstance(acceptor.wait().error, Stranger)
        assert isinstance(connector.wait().error, OSError)  # as with anybody who hangs up: worth another try


def recorded_handshake() -> tuple[bytes, bytes, bytes]:
    """What passes on the line when two workers meet: greeting, answer, proof."""
    with pair() as (ours, acceptors_end), pair() as (tap, connectors_end):
        acceptor, connector = accept(acceptors_end), connect(connectors_end)
        hello = receive_exactly(tap, HELLO.size)
        ours.sendall(hello)
        answer = receive_exactly(ours, NONCE_BYTES + PROOF_BYTES)
        tap.sendall(answer)
        proof = receive_exactly(tap, PROOF_BYTES)
        ours.sendall(proof)
        assert acceptor.wait().error is None and connector.wait().error is None
        return hello, answer, proof


def test_a_recorded_handshake_cannot_be_played_again_to_an_acceptor() -> None:
    hello, _, proof = recorded_handshake()
    with pair() as (ours, theirs):
        acceptor = accept(theirs)
        ours.sendall(hello + proof)
        error = acceptor.wait().error
        assert isinstance(error, Stranger) and "secret" in str(error)


def test_a_recorded_handshake_cannot_be_played_again_to_a_connector() -> None:
    _, answer, _ = recorded_handshake()
    with pair() as (ours, theirs):
        connector = connect(theirs)
        ours.sendall(answer)
        assert isinstance(connector.wait().error, SecretError)
        assert receive_exactly(ours, HELLO.size).startswith(MAGIC)
        with pytest.raises(ConnectionError):
            receive_exactly(ours, 1)  # it got no proof to pass on


def test_the_answer_of_an_acceptor_is_not_a_proof_of_a_connector() -> None:
    """Reflection: whoever knows nothing sends back what he was sent."""
    with pair() as (ours, theirs):
        acceptor = accept(theirs)
        ours.sendall(HELLO.pack(MAGIC, *CONNECTOR, *ACCEPTOR, bytes(NONCE_BYTES)))
        answer = receive_exactly(ours, NONCE_BYTES + PROOF_BYTES)
        ours.sendall(answer[NONCE_BYTES:])
        assert isinstance(acceptor.wait().error, Stranger)


def test_a_greeting_sent_back_is_no_answer_to_it() -> None:
    with pair() as (ours, theirs):
        connector = connect(theirs)
        hello = receive_exactly(ours, HELLO.size)
        ours.sendall((hello + hello)[: NONCE_BYTES + PROOF_BYTES])
        assert isinstance(connector.wait().error, SecretError)


def test_a_proof_for_one_rank_does_not_serve_another() -> None:
    """Somebody in the middle changes who is speaking to whom: the proofs cover both ranks."""
    with pair() as (ours, acceptors_end), pair() as (tap, connectors_end):
        acceptor, connector = accept(acceptors_end), connect(connectors_end)
        magic, _, *others = HELLO.unpack(receive_exactly(tap, HELLO.size))
        ours.sendall(HELLO.pack(magic, 2, *others))
        tap.sendall(receive_exactly(ours, NONCE_BYTES + PROOF_BYTES))
        assert isinstance(connector.wait().error, SecretError)
        ours.close()
        assert isinstance(acceptor.wait().error, Stranger)


@given(st.binary(max_size=120))
def test_whatever_a_stranger_says_he_stays_one(words: bytes) -> None:
    with pair() as (ours, theirs):
        theirs.sendall(words)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Stranger):
            welcome(ours)


def test_who_goes_away_without_a_word_is_a_probe_and_who_breaks_off_is_not() -> None:
    with pair() as (ours, theirs):
        theirs.close()
        with pytest.raises(Probe):
            welcome(ours)
    with pair() as (ours, theirs):
        theirs.sendall(b"stretto2")
        theirs.close()
        with pytest.raises(Stranger, match="closed the connection"):
            welcome(ours)


def test_a_peer_that_drips_does_not_hold_anybody_beyond_one_timeout() -> None:
    with pair() as (ours, theirs):
        dripped: list[bytes] = []
        over = threading.Event()

        def drip() -> None:
            while len(dripped) < NONCE_BYTES + PROOF_BYTES - 1 and not over.wait(0.05):
                ours.sendall(b"x")
                dripped.append(b"x")

        dripper = Side(drip)
        theirs.settimeout(0.3)
        with pytest.raises(TimeoutError):
            introduce_ourselves(theirs, KEY, CONNECTOR, ACCEPTOR)
        over.set()
        assert dripper.wait().error is None
        assert 0 < len(dripped) < NONCE_BYTES + PROOF_BYTES - 1 and theirs.gettimeout() == 0.3


def test_who_says_nothing_and_stays_does_not_hold_anybody_for_ever() -> None:
    with pair() as (ours, theirs):
        ours.settimeout(0.1)
        with pytest.raises(TimeoutError):
            welcome(ours)
        theirs.settimeout(0.1)
        with pytest.raises(TimeoutError):
            introduce_ourselves(theirs, KEY, CONNECTOR, ACCEPTOR)
