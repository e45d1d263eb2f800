"""The job secret: keys derived by the book, malformed input refused with advice, strangers kept out by ZAP."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from stretto.errors import SecretError
from stretto.launching import secret as secrets
from stretto.launching.zap import ZapHandler, secure_client, secure_server

OURS = bytes(range(32))
THEIRS = bytes(range(1, 33))


@pytest.mark.parametrize(
    ("key", "salt", "info", "length", "expected"),
    [
        (
            "0b" * 22, "000102030405060708090a0b0c", "f0f1f2f3f4f5f6f7f8f9", 42,
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)).hex(), bytes(range(0x60, 0xB0)).hex(), bytes(range(0xB0, 0x100)).hex(), 82,
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            "0b" * 22, "", "", 42,
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)  # fmt: skip
def test_hkdf_gives_the_vectors_of_rfc_5869(key: str, salt: str, info: str, length: int, expected: str) -> None:
    output = secrets.hkdf(bytes.fromhex(key), salt=bytes.fromhex(salt), info=bytes.fromhex(info), length=length)

    assert output.hex() == expected


def test_keys_for_different_purposes_or_secrets_differ_and_are_reproducible() -> None:
    server, client = secrets.curve_keys(OURS, "server"), secrets.curve_keys(OURS, "client")

    assert server == secrets.curve_keys(OURS, "server")
    assert len({server, client, secrets.curve_keys(THEIRS, "server")}) == 3
    assert zmq.curve_public(server[1]) == server[0]


def test_a_generated_secret_survives_being_written_and_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret, file = secrets.generate(), tmp_path / "job.secret"
    file.write_text(secret.hex() + "\n")
    file.chmod(0o600)

    assert secrets.read_file(file) == secret
    assert not caplog.records


def test_a_file_that_others_can_read_is_used_with_a_warning_that_says_chmod(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "job.secret"
    file.write_text(OURS.hex())
    file.chmod(0o644)

    assert secrets.read_file(file) == OURS
    assert f"chmod 600 {file}" in caplog.text
    assert OURS.hex() not in caplog.text


@pytest.mark.parametrize("text", ["", "abc", "zz" * 32, "00" * 31, "00" * 33, "00 " * 32, "Ünïcode" * 10])
def test_a_malformed_secret_is_refused_with_the_way_to_make_one_and_without_showing_it(text: str) -> None:
    with pytest.raises(SecretError, match="stretto secret > job.secret") as caught:
        secrets.parse(text, "STRETTO_SECRET")

    assert "STRETTO_SECRET" in str(caught.value)
    assert not text or text not in str(caught.value)


def test_a_missing_or_binary_file_is_a_secret_error(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="No such file"):
        secrets.read_file(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(SecretError, match="64 hexadecimal"):
        secrets.read_file(tmp_path / "binary")


def test_a_derived_key_needs_a_whole_secret_and_a_possible_length() -> None:
    with pytest.raises(SecretError, match="32 bytes"):
        secrets.derive(b"short", "server")
    with pytest.raises(ValueError, match="length=0"):
        secrets.derive(OURS, "server", length=0)


def arrives(secret: bytes, client_secret: bytes | None) -> tuple[bool, int, int]:
    """Does a message from a client with `client_secret` get through? Also how many the handler let in and refused."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    handler = ZapHandler(context, secret)
    server, client = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        secure_server(server, secret)
        if client_secret is not None:
            secure_client(client, client_secret)
        client.linger = 0
        port = server.bind_to_random_port("tcp://127.0.0.1")
        failures = server.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"hello")
        poller = zmq.Poller()
        for socket in (handler.socket, server, failures):
            poller.register(socket, zmq.POLLIN)
        while ready := dict(poller.poll(30_000)):
            if handler.socket in ready:
                handler.handle()
                if handler.refused:
                    return False, handler.accepted, handler.refused
            elif server in ready:
                return server.recv() == b"hello", handler.accepted, handler.refused
            else:
                return False, handler.accepted, handler.refused
        raise AssertionError("neither a message nor a refusal within 30 s")
    finally:
        server.disable_monitor()
        handler.close()
        context.destroy(linger=0)


def test_who_knows_the_secret_comes_in() -> None:
    assert arrives(OURS, OURS) == (True, 1, 0)


@pytest.mark.parametrize("client_secret", [THEIRS, None], ids=["another secret", "none"])
def test_a_wrong_key_or_another_mechanism_does_not_get_through(client_secret: bytes | None) -> None:
    assert arrives(OURS, client_secret)[:2] == (False, 0)


def test_jobs_that_share_a_secret_share_no_key_of_their_wires() -> None:
    one, other = (secrets.job_secret(OURS, nonce * 32) for nonce in (b"1", b"2"))

    assert one == secrets.job_secret(OURS, b"1" * 32)
    assert len({OURS, one, other, secrets.job_secret(THEIRS, b"1" * 32), secrets.derive(OURS, "server")}) == 5
    assert arrives(one, other)[0] is False and arrives(one, OURS)[0] is False


@pytest.mark.parametrize(
    "frames",
    [
        [b"1.0", b"7", b"stretto", b"10.0.0.9", b"", b"CURVE", bytes(32)],  # a stranger who knows the server's public key
        [b"1.0", b"7", b"stretto", b"10.0.0.9", b"", b"PLAIN", b"user", b"password"],
        [b"1.0", b"7", b"stretto", b"10.0.0.9", b"", b"NULL"],
        [b"1.0", b"7", b"elsewhere", b"10.0.0.9", b"", b"CURVE", b"key"],
        [b"1.0"],
        [b""],
    ],
)
def test_the_handler_answers_400_to_anything_but_our_key(frames: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    door = ZapHandler(context, OURS)
    try:
        asking = context.socket(zmq.REQ)
        asking.connect("inproc://zeromq.zap.01")
        asking.send_multipart(frames)
        assert door.socket.poll(2000)
        door.handle()
        door.handle()  # nothing to do: does not block
        assert asking.recv_multipart()[2] == b"400"
        assert (door.accepted, door.refused) == (0, 1)
        assert f"refused a stranger from {'10.0.0.9' if len(frames) > 3 else 'an unknown address'}" in caplog.text
    finally:
        door.close()
        context.destroy(linger=0)
