"""The worker's side of the introduction: say who and where I am, learn who and where the others are.

    launch = find_rendezvous(detect(os.environ), timeouts)     # under torchrun, Slurm and MPI: learn rendezvous and secret
    ip, interface = local_address(launch)             # listen there
    table = introduce(launch, address, timeouts)      # blocks until all have met
    ...
    farewell(launch)                                  # never longer than a second

A connection to the coordinator lives only as long as the introduction: during training no socket points there, so its
death goes unnoticed. Join is sent after every successful handshake, so a connection that breaks meanwhile costs
nothing.

What goes wrong is told apart here, within `timeouts.meet_s`: nobody answers, somebody answers who is not ZeroMQ, the
secret is another one, the coordinator refuses, workers are missing. A failed handshake under CURVE tells the client
nothing, so `greeting.knock` asks who is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from stretto.errors import ConfigurationError, JobError, RendezvousError, SecretError, UnreachableError
from stretto.launching import greeting
from stretto.launching.coordinator import PREFIX
from stretto.launching.detect import Launch
from stretto.launching.greeting import Listener, Who
from stretto.launching.hosts import host_identity, interface_of, join_address, resolve, split_address
from stretto.launching.introduction_messages import (
    PROTOCOL,
    Ask,
    Ended,
    FromCoordinator,
    FromWorker,
    Join,
    Leave,
    Note,
    Refused,
    Table,
    Waiting,
)
from stretto.launching.membership import what_to_do
from stretto.launching.peers import Peer, ranks_text
from stretto.launching.rendezvous import find_rendezvous, forget_secret, local_address
from stretto.launching.zap import secure_client
from stretto.timeouts import Timeouts

__all__ = ["farewell", "introduce", "local_address", "report_ended", "find_rendezvous"]

ASK_EVERY_S = 1.0
FIRST_WORD_S = 3.0  # silence is fine that long
NEXT_WORD_S = 15.0
GOODBYE_S = 1.0
HANDSHAKE_S = 5.0
SILENT_TIMES = 2  # after so many handshakes without an answer it is said that there was none
NO_GREETING = "something accepts connections there but does not greet"
REFUSED_S = 2.0  # handshakes that fail for a shorter time may be due to strangers that crowd the coordinator: try again
BYTES_FOR_ALL, BYTES_FOR_EACH = 64 << 10, 1 << 10  # what a table may have: an entry has some 150 bytes

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_ERRORS: dict[str, type[JobError | ConfigurationError]] = {
    "configuration": ConfigurationError,
    "job": JobError,
    "unreachable": UnreachableError,
}

log = logging.getLogger("stretto.launching")


def introduce(launch: Launch, address: str, timeouts: Timeouts) -> Table:
    """Join the job as the worker that listens at `address` ("ip:port") and return all workers in order of rank, and the
    nonce of this job. Blocks until all are known and every address has been seen to answer, at most `timeouts.meet_s`;
    then a `JobError` says who or what is missing, on every worker that waits."""
    if launch.world_size == 1:
        return Table([Peer(launch.rank, launch.local_rank, host_identity(), address, os.getpid(), pid_namespace())], b"")
    deadline = time.monotonic() + timeouts.meet_s
    with visiting(launch, deadline) as visit:
        table = _Introduction(launch, address, timeouts, visit, deadline).run()
    forget_secret(launch)
    return table


def pid_namespace() -> str:
    """Names the set of processes to which this one's pid belongs. Where that cannot be found out: a name of its own."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return secrets.token_hex(8)


def farewell(launch: Launch) -> None:
    """Tell the coordinator that this worker is done. Silent if it is gone already; never blocks for more than a
    second."""
    if launch.world_size == 1 or launch.rendezvous is None or launch.secret is None:
        return
    _say_in_passing(launch, [Leave(launch.rank, host_identity(), os.getpid())])


def report_ended(launch: Launch, ended: Sequence[Ended]) -> bool:
    """For launchers: tell the coordinator which workers have ended, so that nobody waits for them until the deadline. `launch`
    is that of any worker. Whether it was told: False if there is none; never blocks for more than two seconds."""
    return _say_in_passing(launch, ended)


def leave_note(launch: Launch, key: str, value: str) -> None:
    """Have the coordinator tell this to whoever comes back to the job. Silent if it is gone, as `farewell` is."""
    _say_in_passing(launch, [Note(key, value)])


def _say_in_passing(launch: Launch, messages: Sequence[FromWorker]) -> bool:
    deadline = time.monotonic() + GOODBYE_S
    with contextlib.suppress(JobError, zmq.ZMQError), visiting(launch, deadline) as visit:
        while (remaining := deadline - time.monotonic()) > 0:
            event = visit.next(remaining)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                for message in messages:
                    visit.send(message)
                visit.linger_s = max(0.0, deadline - time.monotonic())
                return True
            if isinstance(event, int) and event & (_FAILED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED):
                return False
    return False


class _Introduction:
    """One attempt to get the table: sends Join on every connection, asks who is missing, and keeps the user
    informed."""

    def __init__(self, launch: Launch, address: str, timeouts: Timeouts, visit: Visit, deadline: float) -> None:
        self.launch = launch
        self.rendezvous = launch.rendezvous or ""  # `visiting` insists on it
        self.visit = visit
        self.deadline = deadline
        self.meet_s = timeouts.meet_s
        self.connect_s = timeouts.connect_s
        self.token = secrets.token_hex(8)
        self.address = address
        self.connected = False
        self.back_by: float | None = None  # the coordinator was there and has hung up: when it must have come back
        self.handshake_failed = False  # on the connection that is about to be closed
        self.refused_since: float | None = None  # the first handshake that failed after the last that did not
        self.num_silent = 0  # times in a row that somebody accepted a connection and did not greet
        self.missing: list[int] | None = None
        self.refused = ""  # strangers that the coordinator turned away: perhaps the missing ones
        self.next_word = time.monotonic() + FIRST_WORD_S

    def run(self) -> Table:
        try:
            while (remaining := self._until() - time.monotonic()) > 0:
                event = self.visit.next(min(ASK_EVERY_S, remaining))
                if isinstance(event, Table):
                    return self._checked(event)
                self._take(event)
                self._keep_informed()
        except KeyboardInterrupt:
            if self.connected:  # the others need not wait for the deadline
                self.visit.send(Leave(self.launch.rank, host_identity(), os.getpid()))
                self.visit.linger_s = GOODBYE_S
            raise
        raise self._too_late()

    def _until(self) -> float:
        return self.deadline if self.back_by is None else min(self.deadline, self.back_by)

    def _take(self, event: FromCoordinator | int | None) -> None:
        if isinstance(event, Refused):
            raise _ERRORS.get(event.kind, JobError)(event.reason)
        if isinstance(event, Waiting):
            self._hear(event)
        elif event is None:
            if self.connected:
                self.visit.send(Ask(self.launch.rank, self.token))
        elif isinstance(event, int):
            self._take_network(event)

    def _hear(self, waiting: Waiting) -> None:
        if waiting.refused and not self.refused:
            self.next_word = time.monotonic()  # news: said at once
        self.missing, self.refused = waiting.missing, waiting.refused

    def _take_network(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self.back_by = self.refused_since = None
            self.num_silent = 0
            self.visit.send(self._join())
        elif event == zmq.EVENT_DISCONNECTED and self.connected:
            self.connected = False
            self.back_by = time.monotonic() + self.connect_s
        elif event & _FAILED:
            self.handshake_failed = True
            if self.refused_since is None:
                self.refused_since = time.monotonic()
                self._find_out_who_is_there()
            elif self._refused_for_long():
                self._find_out_who_is_there()
        elif event == zmq.EVENT_DISCONNECTED:
            if not self.handshake_failed:  # the other side does not speak ZeroMQ's protocol, and ZeroMQ does not try again
                self._find_out_who_is_there()
                self.visit.connect_again()
            self.handshake_failed = False

    def _find_out_who_is_there(self) -> None:
        """Raise what a failed handshake means; return if the other side was merely going down or too busy to answer."""
        patience_s = min(greeting.PATIENCE_S, self.deadline - time.monotonic())
        if patience_s <= 0:
            return
        answer = greeting.knock(self.rendezvous, patience_s)
        if answer.who is Who.ANOTHER_PROGRAM:
            raise _another_program(self.rendezvous, answer.words)
        if answer.who is Who.COORDINATOR and self._refused_for_long():
            raise _wrong_secret(self.launch)
        self.num_silent = self.num_silent + 1 if answer.who is Who.SILENT else 0
        if self.num_silent == SILENT_TIMES:
            self.next_word = time.monotonic()  # news: said at once

    def _refused_for_long(self) -> bool:
        return self.refused_since is not None and time.monotonic() - self.refused_since >= REFUSED_S

    def _join(self) -> Join:
        remaining = max(0.01, self.deadline - time.monotonic())
        launch = self.launch
        return Join(
            rank=launch.rank,
            world_size=launch.world_size,
            local_rank=launch.local_rank,
            host=host_identity(),
            interface=interface_of(split_address(self.address)[0]) or "unknown",
            address=self.address,
            pid=os.getpid(),
            pid_namespace=pid_namespace(),
            encrypted=launch.encrypt,
            token=self.token,
            patience_s=remaining - min(1.0, remaining / 5),  # the answer needs time to come back
            meet_s=self.meet_s,
            restart=launch.restart,
        )

    def _checked(self, table: Table) -> Table:
        ranks = [peer.rank for peer in table.peers]
        of_all = range(self.launch.world_size + self.launch.room)
        if ranks[: self.launch.world_size] != list(range(self.launch.world_size)) or not set(ranks) <= set(of_all):
            raise JobError(
                f"The coordinator at {self.launch.rendezvous} sent a table of ranks {ranks}, but this job has "
                f"{self.launch.world_size} workers. Install the same version of stretto on every machine."
            )
        return table

    def _keep_informed(self) -> None:
        if time.monotonic() < self.next_word:
            return
        self.next_word = time.monotonic() + NEXT_WORD_S
        if not self.connected:
            known = f": {NO_GREETING}" if self.num_silent >= SILENT_TIMES else ""
            log.warning("rank %d: waiting for the coordinator at %s%s", self.launch.rank, self.rendezvous, known)
        elif self.missing:
            known = f"; {self.refused}" if self.refused else ""
            log.warning("rank %d: waiting for %s%s", self.launch.rank, ranks_text(self.missing), known)
        else:
            log.warning("rank %d: all are here, waiting until every address has been seen to answer", self.launch.rank)

    def _too_late(self) -> JobError:
        launch = self.launch
        if self.connected and self.missing:
            return JobError(
                f"{ranks_text(self.missing).capitalize()} of {launch.world_size} did not join within "
                f"{self.meet_s:g} s; rank {launch.rank} waited.\n{what_to_do(self.refused)}"
            )
        if self.connected:
            return RendezvousError(
                f"The coordinator at {launch.rendezvous} accepted rank {launch.rank} but stopped answering within "
                f"{self.meet_s:g} s: its process is stopped or overloaded.\n"
                "Restart the job."
            )
        if self.back_by is not None and self.back_by < self.deadline:
            return RendezvousError(
                f"The coordinator at {launch.rendezvous}, which rank {launch.rank} had joined, has ended and did not come back "
                f"within {self.connect_s:g} s: node 0 (or rank 0) has failed or was stopped.\n"
                "Read its output for the reason, then start the job again on every machine."
            )
        return _nobody_there(launch, self.meet_s, known_silent=self.num_silent >= SILENT_TIMES)


@dataclass(slots=True)
class Visit:
    """One connection to the coordinator, and what happens to it."""

    context: zmq.Context[zmq.Socket[bytes]]
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    poller: zmq.Poller
    decoder: msgspec.msgpack.Decoder[FromCoordinator]
    endpoint: str
    linger_s: float = 0.0

    def connect_again(self) -> None:
        self.socket.disconnect(self.endpoint)
        self.socket.connect(self.endpoint)

    def send(self, message: FromWorker) -> None:
        # If the connection has just broken, it waits for the next one, where a Join more or a late Ask does no harm.
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([_protocol_frame(), msgspec.msgpack.encode(message)], zmq.NOBLOCK)

    def next(self, timeout_s: float) -> FromCoordinator | int | None:
        """The next message, or network event (`zmq.EVENT_...`), or None when the time is over. A message first: what was
        said counts, whatever became of the connection since."""
        ready: dict[Any, int] = dict(self.poller.poll(int(timeout_s * 1000) + 1))
        if self.socket in ready:
            return self._message(self.socket.recv_multipart())
        if self.monitor in ready:
            return int(recv_monitor_message(self.monitor)["event"])
        return None

    def _message(self, frames: list[bytes]) -> FromCoordinator | None:
        if frames[0] != _protocol_frame():
            return Refused(
                "job",
                f"The coordinator speaks {frames[0][:20].decode('ascii', 'replace')!r}, this worker "
                f"{_protocol_frame().decode()!r}: they run different versions.\n"
                "Install the same version of stretto on every machine (`pip show stretto`).",
            )
        try:
            return self.decoder.decode(frames[1]) if len(frames) == 2 else None
        except msgspec.MsgspecError as error:
            log.warning("ignored a message of the coordinator that cannot be read: %s", error)
            return None


@contextlib.contextmanager
def visiting(launch: Launch, deadline: float) -> Iterator[Visit]:
    """Connect in the background; everything is closed on the way out, after at most `linger_s` for what is unsent."""
    if launch.rendezvous is None or launch.secret is None:
        raise JobError(
            f"rank {launch.rank} of {launch.world_size} ({launch.launcher}) knows no rendezvous or no secret yet. Call "
            "launch = find_rendezvous(launch, timeouts) first."
        )
    endpoint, ipv6 = _endpoint(launch, deadline)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    secure_client(dealer, launch.secret)
    dealer.setsockopt(zmq.IPV6, int(ipv6))
    dealer.setsockopt(zmq.MAXMSGSIZE, BYTES_FOR_ALL + launch.world_size * BYTES_FOR_EACH)
    dealer.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    # Not zmq.IMMEDIATE: with it, what the coordinator said last is thrown away unread when it ends right after saying it.
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
    monitor = dealer.get_monitor_socket()
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    visit = Visit(context, dealer, monitor, poller, msgspec.msgpack.Decoder(FromCoordinator), endpoint)
    try:
        dealer.connect(endpoint)
        yield visit
    finally:
        dealer.disable_monitor()
        monitor.close(0)
        dealer.close(int(visit.linger_s * 1000))
        context.term()


def _endpoint(launch: Launch, deadline: float) -> tuple[str, bool]:
    """Resolve the rendezvous, again and again: in a cluster a host's name may appear later than this worker."""
    assert launch.rendezvous is not None
    host, port = split_address(launch.rendezvous)
    while True:
        try:
            family, ip = resolve(host, port)
            return f"tcp://{join_address(ip, port)}", family == socket.AF_INET6
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"The rendezvous {launch.rendezvous} cannot be found from {socket.gethostname()}: "
                    f"{error.strerror or error}.\n"
                    "Check the host name, or give its IP address."
                ) from error
            time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


def _wrong_secret(launch: Launch) -> SecretError:
    return SecretError(
        f"rank {launch.rank} was turned away at the rendezvous {launch.rendezvous}: its job secret is not the "
        "coordinator's.\n"
        "Give every worker the same STRETTO_SECRET or STRETTO_SECRET_FILE (--secret-file), and each job a "
        "rendezvous port of its own."
    )


def _another_program(rendezvous: str, words: str) -> RendezvousError:
    return RendezvousError(
        f"What answers at the rendezvous {rendezvous} is not a coordinator of this version of stretto, but another "
        f"program: it said {words}.\n"
        "Check host and port, or choose a port that is free on that host; install the same version of stretto on every machine."
    )


def _nobody_there(launch: Launch, waited_s: float, *, known_silent: bool) -> RendezvousError:
    assert launch.rendezvous is not None
    host, port = split_address(launch.rendezvous)
    answer = Listener(Who.SILENT) if known_silent else greeting.knock(launch.rendezvous, greeting.PATIENCE_S / 2)
    if answer.who is Who.ANOTHER_PROGRAM:
        return _another_program(launch.rendezvous, answer.words)
    reason = answer.words or "somebody accepts connections there, but did not complete a handshake"
    advice = (
        f"Check that node 0 (or rank 0) runs and has not ended, that {host} is its address as seen from here, and that "
        f"port {port} is open in its firewall."
    )
    if answer.who is Who.SILENT:
        reason = NO_GREETING
        advice = (
            f"Another program, or a proxy, has port {port} there, or the coordinator's process is stopped: on {host}, see who it "
            f"is with ss -ltnp 'sport = :{port}', or choose another port."
        )
    return RendezvousError(
        f"rank {launch.rank} on {socket.gethostname()} could not reach the coordinator at {launch.rendezvous} within "
        f"{waited_s:g} s: {reason}.\n{advice}"
    )


def _protocol_frame() -> bytes:
    return PREFIX + str(PROTOCOL).encode()
