"""The coordinator as a process: it listens, shrugs off garbage and strangers, and goes when it is time."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from stretto.errors import JobError
from stretto.launching.coordinator import PREFIX, Coordinator, open_coordinator, why_unreachable
from stretto.launching.hosts import host_identity, split_address
from stretto.launching.introduction_messages import PROTOCOL, FromCoordinator, Join, Leave, Refused, Table, Waiting
from stretto.launching.zap import secure_client

SECRET = bytes(range(32))


def start(*options: str, secret: str = SECRET.hex()) -> tuple[subprocess.Popen[bytes], str]:
    """A coordinator process and where it says it listens ("" if it ended instead)."""
    ready, told = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto.launching.coordinator", "--ready-fd", str(told), *options],
        env=os.environ | {"STRETTO_SECRET": secret},
        pass_fds=[told],
        stderr=subprocess.PIPE,
    )
    os.close(told)
    with os.fdopen(ready) as lines:
        assert select.select([lines], [], [], 60)[0], "the coordinator neither listened nor ended"
        return process, lines.readline().strip()


@contextlib.contextmanager
def coordinator(world_size: int, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process, address = start("--bind", "127.0.0.1:0", "--world-size", str(world_size), *options)
    assert address
    try:
        yield process, address
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A peer that knows the secret, and may say anything."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
        connection.linger = 0
        connection.rcvtimeo = connection.sndtimeo = 30_000
        secure_client(connection, SECRET)
        connection.connect(f"tcp://{address}")
        yield connection


@contextlib.contextmanager
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def say(connection: zmq.Socket[bytes], message: Join | Leave) -> None:
    connection.send_multipart([PREFIX + str(PROTOCOL).encode(), msgspec.msgpack.encode(message)])


def answer(connection: zmq.Socket[bytes]) -> FromCoordinator:
    _, body = connection.recv_multipart()
    message: FromCoordinator = msgspec.msgpack.decode(body, type=FromCoordinator)
    return message


def join_of(rank: int, size: int, address: str) -> Join:
    return Join(rank, size, rank, host_identity(), "lo", address, os.getpid(), "", False, f"t{rank}", 20.0, 21.0)


def test_a_worker_joins_leaves_and_the_coordinator_ends_by_itself() -> None:
    with coordinator(1) as (process, address), dealer(address) as worker, listener() as mine:
        say(worker, join_of(0, 1, mine))
        assert answer(worker) == Waiting([])
        table = answer(worker)
        assert isinstance(table, Table) and [peer.address for peer in table.peers] == [mine]
        say(worker, Leave(0, host_identity(), os.getpid()))

        assert process.wait(60) == 0


def test_garbage_of_every_kind_is_ignored_and_the_next_worker_is_served() -> None:
    ours = PREFIX + str(PROTOCOL).encode()
    good = msgspec.msgpack.encode(join_of(0, 1, "127.0.0.1:1"))
    with coordinator(1) as (process, address), dealer(address) as worker, listener() as mine:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f\x03", b""):
            with socket.create_connection(split_address(address), timeout=30) as raw:
                raw.sendall(noise)
        for frames in (
            [b""], [b"hello"], [ours], [ours, b""], [ours, os.urandom(100)], [ours, good[:-3]], [ours, good, good],
            [ours, msgspec.msgpack.encode({"type": "join", "rank": "zero"})], [ours, msgspec.msgpack.encode([1] * 100)],
            [ours, b"\x91" * 5000],
        ):  # fmt: skip
            worker.send_multipart(frames)
        say(worker, join_of(0, 1, mine))

        assert answer(worker) == Waiting([])
        assert isinstance(answer(worker), Table)
        assert process.poll() is None


def test_an_oversized_message_ends_that_connection_only() -> None:
    with coordinator(1) as (process, address), listener() as mine:
        with dealer(address) as flood:
            events = flood.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            flood.send_multipart([b"stretto/1", bytes(1_000_000)])
            assert events.poll(60_000), "the flood was not cut off"
            flood.disable_monitor()
            events.close()
        with dealer(address) as worker:
            say(worker, join_of(0, 1, mine))
            assert answer(worker) == Waiting([])
        assert process.poll() is None


def test_a_worker_of_another_version_is_told_so() -> None:
    with coordinator(1) as (_, address), dealer(address) as worker:
        worker.send_multipart([b"stretto/999", b"from the future"])

        refused = answer(worker)

    assert isinstance(refused, Refused) and "protocol 999" in refused.reason


def test_a_port_in_use_is_one_line_and_exit_code_1() -> None:
    with listener() as taken:
        process, address = start("--bind", taken, "--world-size", "2")
        _, complaint = process.communicate(timeout=60)

    assert (address, process.returncode) == ("", 1)
    assert complaint.decode().count("\n") == 1
    assert f"{taken} cannot be the rendezvous: port" in complaint.decode() and "in use" in complaint.decode()


def test_a_missing_secret_ends_it_with_advice() -> None:
    process, address = start("--bind", "127.0.0.1:0", "--world-size", "2", secret="")
    _, complaint = process.communicate(timeout=60)

    assert (address, process.returncode) == ("", 1)
    assert "stretto secret > job.secret" in complaint.decode() and "Traceback" not in complaint.decode()


@pytest.mark.parametrize("bind", ["192.0.2.77:0", "no-such-host.invalid:0"])
def test_an_address_of_another_machine_is_a_job_error_that_names_it(bind: str) -> None:
    with pytest.raises(JobError, match=bind):
        open_coordinator(bind, 2, SECRET, False)


def test_it_ends_when_its_parent_is_killed() -> None:
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'stretto.launching.coordinator', '--bind', '127.0.0.1:0',"
        " '--world-size', '2', '--ready-fd', '1', *(word or str(os.getpid()) for word in sys.argv[1:])],"
        " stdout=subprocess.PIPE, text=True)\n"
        "print(child.pid, child.stdout.readline(), flush=True)\n"
        "time.sleep(600)\n"
    )
    for options in (["--die-with-parent", ""], []):
        parent = subprocess.Popen(
            [sys.executable, "-c", program, *options],
            env=os.environ | {"STRETTO_SECRET": SECRET.hex()},
            stdout=subprocess.PIPE,
        )
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[0])
        watch = os.pidfd_open(pid)
        try:
            parent.send_signal(signal.SIGKILL)
            parent.communicate()
            assert select.select([watch], [], [], 60)[0], f"the coordinator ({options}) outlived its parent"
        finally:
            os.close(watch)


def test_the_package_of_the_coordinator_does_not_import_torch() -> None:
    program = "import sys, stretto.launching.coordinator, stretto.launching.introduce; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_an_address_that_answers_is_reachable_and_a_closed_port_is_not() -> None:
    with listener() as open_port:
        assert why_unreachable(open_port, 30.0) is None
    assert "refused" in str(why_unreachable(open_port, 30.0))


def test_an_address_is_tried_again_while_strangers_have_all_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, crowded = socket.create_connection, [errno.EMFILE, errno.ENFILE]

    def sometimes(address: tuple[str, int], timeout: float) -> socket.socket:
        if crowded:
            raise OSError(crowded.pop(), "by request of the test")
        return connect(address, timeout=timeout)

    with listener() as open_port:
        monkeypatch.setattr(socket, "create_connection", sometimes)
        assert why_unreachable(open_port, 30.0) is None and not crowded
        crowded += [errno.EMFILE]
        assert why_unreachable(open_port, 0.0) == "by request of the test" and not crowded


def test_a_coordinator_that_is_told_to_stop_closes_its_port() -> None:
    inside = Coordinator("127.0.0.1:0", 2, SECRET, encrypted=True)
    try:
        inside.serve(orphaned=lambda: True)
    finally:
        inside.close()

    assert why_unreachable(inside.address, 1.0) is not None
