"""Workers (threads here) that meet through a real coordinator process, and everything that can keep them from it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from preloaded import Preloaded
from stretto.errors import ConfigurationError, JobError, RendezvousError, SecretError, StrettoError, UnreachableError
from stretto.launching import greeting, rendezvous
from stretto.launching import introduce as introduce_module
from stretto.launching.detect import Launch, detect
from stretto.launching.hosts import host_identity, split_address
from stretto.launching.introduce import farewell, find_rendezvous, introduce, local_address
from stretto.launching.introduction_messages import FromCoordinator, FromWorker, Table, Waiting
from stretto.launching.peers import Peer
from stretto.timeouts import Timeouts

SECRET = bytes(range(32))
PATIENT = Timeouts(meet_s=60)
SHORT = Timeouts(meet_s=1.5)
ENOUGH_TO_JOIN = Timeouts(meet_s=5)  # also on a machine that stands still for a second or two
ADDRESS = r"127\.0\.0\.1|an unknown address"  # on one machine a connection may be over before it can be asked who it was


# What somebody who does not know the secret can say in ZeroMQ's protocol: a greeting, and that a long command is to come.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
LONG_COMMAND = b"\x06" + (10_000).to_bytes(8, "big")


@contextlib.contextmanager
def coordinator(world_size: int, *options: str, descriptors: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A coordinator process, and the address at which it listens; with `descriptors` it may not have more than that."""
    ready, told = os.pipe()
    limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))) if descriptors else None
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto.launching.coordinator", "--bind", "127.0.0.1:0", "--world-size", str(world_size),
         "--ready-fd", str(told), *options],
        env=os.environ | {"STRETTO_SECRET": SECRET.hex()}, pass_fds=[told], stderr=subprocess.PIPE,
        preexec_fn=limit,
    )  # fmt: skip
    os.close(told)
    try:
        with os.fdopen(ready) as lines:
            assert select.select([lines], [], [], 100)[0], "the coordinator neither listened nor ended"
            yield process, lines.readline().strip()
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def launch_of(rank: int, size: int, rendezvous: str, *, secret: bytes = SECRET, encrypt: bool = False) -> Launch:
    return Launch(rank, size, rank, size, rendezvous, secret, encrypt, "stretto")


def together(*tasks: Callable[[], Table]) -> list[Table | StrettoError]:
    """Run the workers at once; give what each returned or raised."""

    def outcome(future: Future[Table]) -> Table | StrettoError:
        try:
            return future.result(timeout=150)
        except StrettoError as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [outcome(future) for future in [pool.submit(task) for task in tasks]]


def worker(launch: Launch, timeouts: Timeouts = PATIENT, address: str | None = None) -> Callable[[], Table]:
    def run() -> Table:
        with listener() as mine:
            return introduce(launch, address or mine, timeouts)

    return run


@contextlib.contextmanager
def a_dead_port() -> Iterator[str]:
    """An address where nobody listens: bound, so that nobody else gets it, but not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_three_workers_meet_say_goodbye_and_the_coordinator_ends_and_every_job_has_a_nonce_of_its_own() -> None:
    nonces: list[bytes] = []
    for encrypt in (False, True):
        with coordinator(3, *(["--encrypted"] if encrypt else [])) as (process, address):
            nonces.append(check_meeting(process, [launch_of(rank, 3, address, encrypt=encrypt) for rank in range(3)]))
    assert len(set(nonces)) == 2 and min(map(len, nonces)) == 32


def check_meeting(process: subprocess.Popen[bytes], launches: list[Launch]) -> bytes:
    tables = together(*(worker(launch) for launch in launches))

    assert tables[0] == tables[1] == tables[2]
    assert isinstance(tables[0], Table) and [peer.rank for peer in tables[0].peers] == [0, 1, 2]
    assert all(peer.sees(tables[0].peers[0]) for peer in tables[0].peers)
    for launch in launches:
        farewell(launch)
    assert process.wait(30) == 0
    return tables[0].nonce


def test_strangers_that_crowd_the_coordinator_do_not_keep_the_job_from_forming() -> None:
    """They are far more than it has descriptors, they stay, and it says little about them."""
    with coordinator(3, descriptors=150) as (process, address), contextlib.ExitStack() as stack:
        for number in range(400):
            stranger = stack.enter_context(socket.create_connection(split_address(address), timeout=30))
            with contextlib.suppress(OSError):  # sent away already
                stranger.sendall((b"", b"GET / HTTP/1.1\r\n\r\n" * 9, GREETING + LONG_COMMAND + bytes(9000))[number % 3])
        check_meeting(process, [launch_of(rank, 3, address) for rank in range(3)])
        assert process.stderr is not None
        assert process.stderr.read().count(b"\n") < 10


def test_a_job_of_one_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq.Context", lambda: pytest.fail("a job of one opened a ZeroMQ context"))
    launch = find_rendezvous(detect({}), SHORT)

    assert introduce(launch, "127.0.0.1:1", SHORT).peers == [
        Peer(0, 0, host_identity(), "127.0.0.1:1", os.getpid(), introduce_module.pid_namespace())
    ]
    farewell(launch)
    assert local_address(launch)[0] == "127.0.0.1"


def test_a_wrong_secret_is_a_secret_error_at_once_and_the_others_still_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introduce_module, "REFUSED_S", 0.3)
    with coordinator(2) as (_, address):
        started = time.monotonic()
        stranger = launch_of(1, 2, address, secret=bytes(32))
        with pytest.raises(SecretError, match="not the coordinator's") as caught:
            worker(stranger)()
        assert time.monotonic() - started < PATIENT.meet_s / 2
        assert SECRET.hex() not in str(caught.value)

        tables = together(*(worker(launch_of(rank, 2, address)) for rank in range(2)))
        assert tables[0] == tables[1] and isinstance(tables[0], Table)


def test_who_waits_is_told_at_once_that_somebody_with_another_secret_was_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(introduce_module, "REFUSED_S", 0.3)
    monkeypatch.setattr(introduce_module, "ASK_EVERY_S", 0.1)
    monkeypatch.setattr(introduce_module, "FIRST_WORD_S", 60.0)  # it would not have said a word yet
    with coordinator(2) as (_, address), caplog.at_level(logging.WARNING, "stretto.launching"):
        honest, stranger = together(
            worker(launch_of(0, 2, address), ENOUGH_TO_JOIN),
            worker(launch_of(1, 2, address, secret=bytes(32)), ENOUGH_TO_JOIN),
        )

    assert isinstance(stranger, SecretError)
    refused = (
        rf"\d+ connection attempts? (was|were) refused because (it|they) did not know the job secret \(last from ({ADDRESS})\)"
    )
    assert re.search(r"rank 0: waiting for rank 1; " + refused, caplog.text), caplog.text
    assert type(honest) is JobError and re.search(refused, str(honest)), honest


@pytest.mark.parametrize("encrypt", [False, True])
def test_disagreement_on_encryption_is_named(encrypt: bool) -> None:
    with (
        coordinator(2, *([] if encrypt else ["--encrypted"])) as (_, address),
        pytest.raises(ConfigurationError, match="STRETTO_ENCRYPT"),
    ):
        worker(launch_of(0, 2, address, encrypt=encrypt))()


def test_a_missing_rank_is_named_to_every_worker_that_waited(caplog: pytest.LogCaptureFixture) -> None:
    with coordinator(3) as (_, address):
        outcomes = together(*(worker(launch_of(rank, 3, address), ENOUGH_TO_JOIN) for rank in (0, 2)))

    for outcome in outcomes:
        assert type(outcome) is JobError
        assert str(outcome).startswith("Rank 1 of 3 did not join within 5 s; ranks 0, 2 waited"), outcome  # as was asked for
        assert "--meet-timeout" in str(outcome) and "STRETTO_MEET_TIMEOUT" in str(outcome)


def test_a_coordinator_that_was_there_and_has_ended_is_not_waited_for_as_one_that_has_yet_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = threading.Event()
    hear = introduce_module._Introduction._hear

    def hear_and_tell(self: introduce_module._Introduction, waiting: Waiting) -> None:
        hear(self, waiting)
        joined.set()

    monkeypatch.setattr(introduce_module._Introduction, "_hear", hear_and_tell)
    with coordinator(2) as (process, address), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker(launch_of(0, 2, address), Timeouts(meet_s=90, connect_s=0.5)))
        assert joined.wait(60)
        process.kill()
        with pytest.raises(RendezvousError, match=r"which rank 0 had joined, has ended and did not come back within 0.5 s"):
            waiting.result(100)


def test_who_waits_long_is_told_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(introduce_module, "FIRST_WORD_S", 0.2)
    monkeypatch.setattr(introduce_module, "ASK_EVERY_S", 0.1)
    with coordinator(4) as (_, address), caplog.at_level(logging.WARNING, "stretto.launching"):
        together(*(worker(launch_of(rank, 4, address), ENOUGH_TO_JOIN) for rank in (0, 1)))

    assert re.search(r"rank \d: waiting for ranks (1, )?2(, 3|-3)", caplog.text)


def test_a_second_worker_with_the_same_rank_is_refused_with_the_pid_of_the_first() -> None:
    with coordinator(2) as (_, address):
        outcomes = together(*(worker(launch_of(0, 2, address), ENOUGH_TO_JOIN) for _ in range(2)))

    refused = [str(outcome) for outcome in outcomes if "is taken" in str(outcome)]
    waited = [str(outcome) for outcome in outcomes if "did not join" in str(outcome)]
    assert len(refused) == len(waited) == 1
    assert f"rank 0 is taken: pid {os.getpid()} on host {socket.gethostname()}" in refused[0]


def test_an_address_nobody_listens_at_is_an_unreachable_error_on_every_worker() -> None:
    with coordinator(2) as (_, address), a_dead_port() as dead:
        outcomes = together(worker(launch_of(0, 2, address)), worker(launch_of(1, 2, address), address=dead))

    for outcome in outcomes:
        assert isinstance(outcome, UnreachableError)
        assert f"rank 1 on host {socket.gethostname()} published {dead} (interface lo)" in str(outcome)
        assert "refused" in str(outcome) and "STRETTO_INTERFACE" in str(outcome)


def test_a_worker_hears_why_the_job_failed_from_a_coordinator_that_has_ended_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said last must be there although the connection it came over is gone: slow workers read it late."""
    visit, joined = introduce_module.Visit, threading.local()
    read, tell = visit.next, visit.send
    with coordinator(2) as (process, address), a_dead_port() as dead:

        def tell_and_remember(self: introduce_module.Visit, message: FromWorker) -> None:
            tell(self, message)
            joined.here = True

        def read_late(self: introduce_module.Visit, timeout_s: float) -> FromCoordinator | int | None:
            if getattr(joined, "here", False):
                assert process.wait(50) == 1
            return read(self, timeout_s)

        monkeypatch.setattr(visit, "send", tell_and_remember)
        monkeypatch.setattr(visit, "next", read_late)
        outcomes = together(worker(launch_of(0, 2, address)), worker(launch_of(1, 2, address), address=dead))

    assert [type(outcome) for outcome in outcomes] == [UnreachableError, UnreachableError], outcomes


def test_a_wrong_world_size_is_a_configuration_error() -> None:
    with coordinator(2) as (_, address), pytest.raises(ConfigurationError, match="3 workers.*opened for 2"):
        worker(launch_of(0, 3, address))()


def test_an_unreachable_rendezvous_is_an_error_with_host_port_and_what_to_check() -> None:
    with a_dead_port() as dead:
        started = time.monotonic()
        with pytest.raises(RendezvousError, match=rf"(?s){dead} within 1.5 s: connection refused.*firewall"):
            worker(launch_of(0, 2, dead), SHORT)()
    assert 1.4 < time.monotonic() - started < 5


def test_a_host_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(RendezvousError, match=r"no-such-host.invalid:4242 cannot be found"):
        worker(launch_of(0, 2, "no-such-host.invalid:4242"), Timeouts(meet_s=0.2))()


@contextlib.contextmanager
def another_program(talk: Callable[[socket.socket, int], None]) -> Iterator[tuple[str, list[socket.socket]]]:
    """Its address, and the connections that it has had. `talk` is called with each and its number; it is closed at the end."""
    connections: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                with contextlib.suppress(OSError):
                    talk(connections[-1], len(connections))

    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as server:
        served = pool.submit(serve)
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}", connections
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                connection.close()
        served.result(5)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introduce_module, "HANDSHAKE_S", 0.1)
    monkeypatch.setattr(introduce_module, "REFUSED_S", 0.0)
    monkeypatch.setattr(greeting, "PATIENCE_S", 0.1)


def answer_and_reset(connection: socket.socket, number: int) -> None:
    connection.recv(5)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    connection.close()  # with unread bytes: the other side is reset


def answer_at_the_end(connection: socket.socket, number: int) -> None:
    while connection.recv(100):  # as Python's http.server: it waits for the end of the line
        pass
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    connection.close()


def greet_first(connection: socket.socket, number: int) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nI am no web server, but I speak first\r\n")


@pytest.mark.parametrize("talk", [answer_and_reset, answer_at_the_end, greet_first])
def test_another_program_at_the_rendezvous_is_named_at_once_with_what_it_said(
    talk: Callable[[socket.socket, int], None], hasty: None
) -> None:
    with another_program(talk) as (address, connections):
        with pytest.raises(RendezvousError, match=r"but another program: it said 'HTTP/1.1 400 Bad Request'\.\n"):
            worker(launch_of(0, 2, address), PATIENT)()
        assert len(connections) > 1


def test_something_that_accepts_and_does_not_greet_is_waited_for_and_spoken_of(
    hasty: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The first connection gets what makes ZeroMQ give up: it has to be told to try again."""

    def be_silent(connection: socket.socket, number: int) -> None:
        if number == 1:
            connection.sendall(b"garbage")

    with another_program(be_silent) as (address, connections):
        with pytest.raises(RendezvousError, match=r"(?s)does not greet\..*or choose another port") as caught:
            worker(launch_of(0, 2, address), Timeouts(meet_s=2))()
        assert len(connections) > 3  # ZeroMQ's, the look at it, and both again

    assert "firewall" not in str(caught.value)
    said = [message for message in caplog.messages if "waiting for the coordinator" in message]
    assert said and said[0].endswith("something accepts connections there but does not greet")


def test_somebody_who_drips_at_the_rendezvous_is_listened_to_for_a_bounded_time() -> None:
    over = threading.Event()
    dripped: list[bytes] = []

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            while len(dripped) < 31 and not over.wait(0.05):
                connection.sendall(b"\xff")  # as a coordinator begins
                dripped.append(b"\xff")

    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as server:
        dripping = pool.submit(drip, server)
        assert greeting.knock(f"127.0.0.1:{server.getsockname()[1]}", 0.3).who is greeting.Who.SILENT
        over.set()
        with contextlib.suppress(OSError):
            dripping.result(30)
        assert 0 < len(dripped) < 31


def test_a_value_in_torchruns_store_that_is_too_long_is_not_decoded() -> None:
    class Store:
        def __init__(self, value: bytes) -> None:
            self.values = [value + b" " * rendezvous.MAX_BYTES, value]
            self.read = 0

        def check(self, keys: list[str]) -> bool:
            return True

        def get(self, key: str) -> bytes:
            self.read += 1
            return self.values[min(self.read, len(self.values)) - 1]

        def set(self, key: str, value: str) -> None:
            assert key == "key/read/1"

    with listener() as address:
        store = Store(msgspec.json.encode(rendezvous._Meeting(address, True, "")))
        learned = rendezvous.learn(launch_of(1, 2, ""), store, "key", time.monotonic() + 30)  # type: ignore[arg-type]
    assert learned.rendezvous == address and store.read == 2


def test_workers_that_come_before_the_coordinator_wait_for_it() -> None:
    with a_dead_port() as dead:
        port = dead.rpartition(":")[2]
    launches = [launch_of(rank, 2, f"127.0.0.1:{port}") for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(worker(launch)) for launch in launches]
        rendezvous.start_coordinator(f"127.0.0.1:{port}", 2, SECRET, False, time.monotonic() + 10)
        tables = [future.result(20) for future in waiting]

    assert tables[0] == tables[1]
    for launch in launches:
        farewell(launch)


def test_farewell_is_short_and_silent_when_the_coordinator_is_dead_or_stopped() -> None:
    with coordinator(2) as (process, address):
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        farewell(launch_of(0, 2, address))
        assert time.monotonic() - started < 1.5
    started = time.monotonic()
    farewell(launch_of(0, 2, address))
    assert time.monotonic() - started < 1.5


def test_introducing_before_settling_says_what_to_call() -> None:
    launch = dataclasses.replace(launch_of(0, 2, "x:1"), rendezvous=None, secret=None, launcher="torchrun")
    with pytest.raises(JobError, match="find_rendezvous"):
        introduce(launch, "127.0.0.1:1", SHORT)


def test_the_interface_variable_decides_the_published_address(monkeypatch: pytest.MonkeyPatch) -> None:
    several = dataclasses.replace(launch_of(0, 4, "127.0.0.1:9"), local_world_size=2)
    cards = [("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("eth1", "10.1.0.5")]
    monkeypatch.setattr("stretto.launching.hosts.interfaces", lambda: cards)

    assert local_address(dataclasses.replace(several, interface="eth1")) == ("10.1.0.5", "eth1")
    assert local_address(dataclasses.replace(several, interface="10.0.0.5")) == ("10.0.0.5", "eth0")
    with pytest.raises(RendezvousError, match=r"eth0 \(10.0.0.5\), eth1 \(10.1.0.5\)"):
        local_address(several)
    monkeypatch.setattr("stretto.launching.hosts.interfaces", lambda: cards[:2])
    assert local_address(several) == ("10.0.0.5", "eth0")


def mpi_launch(rank: int, port: int) -> Launch:
    return detect(
        {
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }
    )  # fmt: skip


def test_under_mpi_on_one_host_rank_0_shares_a_secret_through_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with a_dead_port() as dead:
        port = int(dead.rpartition(":")[2])
    settled: list[Launch] = []

    def whole(rank: int) -> Callable[[], Table]:
        def run() -> Table:
            launch = find_rendezvous(mpi_launch(rank, port - 1), PATIENT)
            settled.append(launch)
            return worker(launch)()

        return run

    tables = together(whole(0), whole(1))

    assert isinstance(tables[0], Table) and tables[0] == tables[1]
    assert settled[0].secret == settled[1].secret is not None
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []  # gone once they have met
    for launch in settled:
        farewell(launch)


def test_a_secret_left_by_a_dead_job_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    monkeypatch.setattr("os.getpid", lambda: dead.pid)
    rendezvous._write_secret(mpi_launch(0, 4000), SECRET)

    with pytest.raises(SecretError, match="rank 1 waited for rank 0"):
        find_rendezvous(mpi_launch(1, 4000), Timeouts(meet_s=0.2))


def test_a_port_in_use_under_mpi_is_an_error_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with listener() as taken, pytest.raises(RendezvousError, match="is in use by another program"):
        find_rendezvous(mpi_launch(0, int(taken.rpartition(":")[2]) - 1), PATIENT)


class Store(dict[str, bytes]):
    """torchrun's store: everybody who reaches it may read and write."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def torchrun_launch(rank: int, local_world_size: int, **more: str) -> Launch:
    return detect(
        {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank % local_world_size), "STRETTO_INTERFACE": "lo",
            "LOCAL_WORLD_SIZE": str(local_world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000",
            "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_USE_AGENT_STORE": "True", **more,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("launches", "travels"),
    [
        ([torchrun_launch(rank, 2) for rank in range(2)], False),
        ([torchrun_launch(rank, 2, STRETTO_ENCRYPT="on") for rank in range(2)], False),
        ([torchrun_launch(rank, 1, STRETTO_SECRET=SECRET.hex()) for rank in range(2)], False),
        ([torchrun_launch(rank, 1, STRETTO_ENCRYPT="off") for rank in range(2)], True),
    ],
    ids=["one host", "one host, encrypted", "two hosts", "two hosts that trust their network"],
)
def test_the_secret_goes_through_the_store_of_torchrun_only_where_the_network_is_trusted(
    launches: list[Launch], travels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    (key,) = {f"stretto/{launch.run}/2" for launch in launches}
    store[key] = b"{"  # a stranger was here first
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(rendezvous, "_open_store", lambda launch, timeouts: store)
    with ThreadPoolExecutor(2) as pool:
        settled = [future.result(60) for future in [pool.submit(find_rendezvous, launch, PATIENT) for launch in launches]]

    assert settled[0].secret is not None and settled[0].secret == settled[1].secret
    assert settled[0].rendezvous == settled[1].rendezvous is not None
    assert (settled[0].secret.hex().encode() in b"".join(store.values())) == travels
    tables = together(*(worker(launch) for launch in settled))
    assert isinstance(tables[0], Table) and tables[0] == tables[1]
    assert not [file for folder in tmp_path.iterdir() for file in folder.iterdir()]  # gone once they have met
    for launch in settled:
        farewell(launch)


def test_a_secret_that_somebody_put_into_the_store_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    launch = torchrun_launch(1, 2)
    with listener() as strangers:
        planted = rendezvous._Meeting(strangers, False, bytes(32).hex())
        monkeypatch.setattr(
            rendezvous, "_open_store", lambda *_: Store({f"stretto/{launch.run}/2": msgspec.json.encode(planted)})
        )
        with pytest.raises(SecretError, match="rank 1 waited for rank 0 to leave the job's secret"):
            find_rendezvous(launch, Timeouts(meet_s=0.3))


TORCHRUN_SCRIPT = """
import os, socket
from stretto.launching.detect import detect
from stretto.launching.introduce import farewell, introduce, local_address, find_rendezvous
from stretto.timeouts import Timeouts

timeouts = Timeouts(meet_s=100)
launch = find_rendezvous(detect(os.environ), timeouts)
ip, interface = local_address(launch)
with socket.create_server((ip, 0)) as server:
    table = introduce(launch, f"{ip}:{server.getsockname()[1]}", timeouts)
met = [peer.rank for peer in table.peers]
print(f"rank {launch.rank} met {met} at {launch.launcher} via {interface}\\n", end="", flush=True)
farewell(launch)
"""


def run_warm(command: str, folder: Path, preloaded: Preloaded) -> str:
    (folder / "meet.py").write_text(TORCHRUN_SCRIPT)
    done = preloaded.shell(command, folder=folder, environ=os.environ | {"OMP_NUM_THREADS": "1"}, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.processes
def test_workers_of_torchrun_meet_through_its_store(tmp_path: Path, preloaded: Preloaded) -> None:
    printed = run_warm("torchrun --standalone --nproc-per-node 2 meet.py", tmp_path, preloaded)
    for rank in range(2):
        assert f"rank {rank} met [0, 1] at torchrun via lo" in printed


@pytest.mark.processes
def test_workers_with_torchs_variables_but_no_agent_meet_through_a_store_of_rank_0(tmp_path: Path, preloaded: Preloaded) -> None:
    with a_dead_port() as dead:
        port = dead.rpartition(":")[2]
    shared = f"export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    one, other = (f"RANK={rank} LOCAL_RANK={rank} python meet.py" for rank in range(2))
    printed = run_warm(f"{shared}; {one} & {other} && wait $!", tmp_path, preloaded)
    for rank in range(2):
        assert f"rank {rank} met [0, 1]" in printed
