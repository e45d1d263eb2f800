"""The coordinator: the process at the rendezvous that introduces workers to each other.

    python -m stretto.launching.coordinator --bind HOST:PORT --world-size N --ready-fd FD [--encrypted] [--die-with-parent PID]
        [--lasting | --lasting-without-parent [--room N]]

It writes where it listens to the descriptor --ready-fd. --encrypted says what this job's workers do with their own traffic: a
worker that would do otherwise is refused. --lasting lets members that have died come back (`lasting_membership.py`); without
parent it outlives the process that has started it once the job has formed, and ends when no member watches any more. With --room
N so many more may join then. What is said here, between workers and coordinator, is always encrypted.

It drives `Membership` over one ZeroMQ ROUTER and checks, by a plain TCP connection, that every published address
answers before the table goes out. It is not on the data path: once the table is out, training survives its death. It
ends by itself when all workers have said goodbye or when its parent is gone. The secret comes from STRETTO_SECRET,
never from the command line, where other users of the machine could read it.

A message is two frames: `stretto/<protocol>` and a msgpack body. Strangers cannot finish a handshake; how many of them may try
at once, for how long and with how many bytes is bounded (`doorstep.py`), so that they cannot keep workers out. What an
authenticated peer sends is bounded in size, decoded into a fixed set of types, and dropped with a log line if it is anything
else. How many were refused, and from where, is told to the workers that wait for somebody: it may be the one they wait for,
with another secret.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import errno
import logging
import math
import os
import queue
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from stretto.errors import JobError, SecretError
from stretto.launching import secret as secrets
from stretto.launching.doorstep import Doorstep
from stretto.launching.hosts import host_identity, join_address, resolve, split_address
from stretto.launching.introduction_messages import (
    CHECKER,
    DOOR,
    PROTOCOL,
    Check,
    Checked,
    FromCoordinator,
    FromWorker,
    Refusal,
    Refused,
    Why,
)
from stretto.launching.lasting_membership import LONELY_S, LastingMembership
from stretto.launching.membership import Membership
from stretto.launching.refusals import RefusalMonitor
from stretto.launching.supervisor import PR_SET_PDEATHSIG, prctl
from stretto.launching.zap import ZapHandler, secure_server
from stretto.protocol.machine import Actions, HeaderReader, Node, SendMessage, SetTimer
from stretto.protocol.timers import Timers

CHECK_DEADLINE_S = 5.0
TRY_AGAIN_S = 0.05
HANDSHAKE_S = 5.0  # for a connection to prove that it knows the secret
MAX_MESSAGE_BYTES = 16 * 1024  # a Join has some 400
MAX_STRANGERS = 1024  # connections, beyond one for each worker, that have proved nothing yet
NONCE_BYTES = 32
TICK_S = 0.25
PREFIX = b"stretto/"

log = logging.getLogger("stretto.launching")


class Coordinator:
    """Membership with a socket. `serve` blocks until the job is over; everything happens in the calling thread, except
    the TCP checks, which wait in threads of their own."""

    def __init__(self, bind: str, world_size: int, secret: bytes, encrypted: bool, membership: Membership | None = None) -> None:
        self.membership = membership or make_membership(world_size, encrypted, Lasting.NO)
        self._reader = HeaderReader(self.membership)
        self._timers: Timers[str] = Timers()
        self._warned_of: set[Why] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door = ZapHandler(self._context, secret)
        self._router = self._context.socket(zmq.ROUTER)
        self._doorstep = Doorstep(_affordable(MAX_STRANGERS + world_size))
        self._refusals = RefusalMonitor(self._router, self._doorstep)
        self._checked: queue.SimpleQueue[Checked] = queue.SimpleQueue()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._checkers = ThreadPoolExecutor(max_workers=16, thread_name_prefix="stretto-check")
        try:
            self.address = self._open(bind, secret)
        except BaseException:
            self.close()
            raise

    def _open(self, bind: str, secret: bytes) -> str:
        secure_server(self._router, secret)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        self._router.setsockopt(zmq.BACKLOG, 1024)
        self._router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        self._router.setsockopt(zmq.LINGER, 1000)  # the last refusal or table must get out
        host, port = split_address(bind)
        family, ip = resolve(host, port)
        self._router.setsockopt(zmq.IPV6, int(family == socket.AF_INET6))
        self._router.bind(f"tcp://{join_address(ip, port)}")
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        return join_address(host, split_address(endpoint.removeprefix("tcp://"))[1])

    def serve(self, orphaned: Callable[[], bool]) -> None:
        """Introduce workers until all have left, a failed job has been explained, or `orphaned()`."""
        poller = zmq.Poller()
        for source in (self._router, self._door.socket, self._refusals.socket, self._wake_in.fileno()):
            poller.register(source, zmq.POLLIN)
        while not self.membership.finished and not (self.membership.needs_parent and orphaned()):
            patience_s = min(TICK_S, max(0.0, self._timers.next_at() - time.monotonic()))
            ready = dict(poller.poll(math.ceil(patience_s * 1000)))
            if self._door.socket in ready:
                self._answer_door()
            if self._refusals.socket in ready:
                self._note_refusals(self._refusals.take())
            if self._wake_in.fileno() in ready:
                self._take_checks()
            if self._router in ready:
                self._take_message()
            self._timers.fire(time.monotonic(), self._ring)
        if self.membership.failure is not None:
            log.warning("the job could not be formed: %s", self.membership.failure)

    def close(self) -> None:
        """Idempotent; waits at most a second for the last messages to leave."""
        self._checkers.shutdown(wait=False, cancel_futures=True)
        self._door.close()
        self._refusals.close()
        self._router.close()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    def _answer_door(self) -> None:
        before = self._door.refused
        self._door.handle()
        if self._door.refused > before:
            self._tell(DOOR, Refusal(Why.SECRET, self._door.last_refused))

    def _note_refusals(self, refusals: Sequence[Refusal]) -> None:
        for refusal in refusals:
            self._tell(DOOR, refusal)
            if refusal.why not in self._warned_of:  # once: it tries again and again
                self._warned_of.add(refusal.why)
                log.warning("refused a connection from %s: it %s", refusal.address, refusal.why.value)

    def _take_message(self) -> None:
        sender, *parts = self._router.recv_multipart(copy=False)
        if parts:
            self._doorstep.admitted(int(parts[0].get(zmq.SRCFD)))
        self._hear(sender.bytes, [part.bytes for part in parts])

    def _hear(self, sender: bytes, frames: list[bytes]) -> None:
        if len(frames) != 2 or not frames[0].startswith(PREFIX):
            log.warning("ignored %d frames that are not a message of stretto", len(frames))
            return
        if frames[0] != PREFIX + str(PROTOCOL).encode():
            self._send(sender, other_protocol(frames[0]))
            return
        message = self._reader.read(sender, frames[1])
        if message is not None:
            self._tell(sender, message)

    def _tell(self, source: Node, message: FromWorker | Checked | Refusal) -> None:
        self._perform(self.membership.on_message(time.monotonic(), source, message, memoryview(b"")))

    def _ring(self, timer: str) -> None:
        self._perform(self.membership.on_timer(time.monotonic(), timer))

    def _perform(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case SendMessage(bytes(to), message):
                    self._send(to, message)
                case SendMessage(_, Check() as check):
                    self._checkers.submit(self._check, check)
                case SetTimer(name, after_s):
                    self._timers.set(name, None if after_s is None else time.monotonic() + after_s)

    def _send(self, to: bytes, message: FromCoordinator) -> None:
        # ROUTER drops what is for a worker that is gone: it will ask again if it comes back.
        self._router.send_multipart([to, PREFIX + str(PROTOCOL).encode(), msgspec.msgpack.encode(message)])

    def _check(self, check: Check) -> None:
        """In a checker thread: does this address answer?"""
        self._checked.put(Checked(check, why_unreachable(check.address, CHECK_DEADLINE_S)))
        with contextlib.suppress(OSError):  # full: a wake-up is pending already; closed: nobody needs to know
            self._wake_out.send(b".")

    def _take_checks(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
        while True:
            try:
                checked = self._checked.get_nowait()
            except queue.Empty:
                return
            self._tell(CHECKER, checked)


class Lasting(enum.Enum):
    """Whether a membership goes on when the job has formed."""

    NO = enum.auto()
    YES = enum.auto()
    WITHOUT_PARENT = enum.auto()


def make_membership(world_size: int, encrypted: bool, lasting: Lasting, room: int = 0) -> Membership:
    host, nonce = host_identity(), os.urandom(NONCE_BYTES)
    if lasting is Lasting.NO:
        return Membership(world_size, host, encrypted=encrypted, nonce=nonce)
    lonely_s = LONELY_S if lasting is Lasting.WITHOUT_PARENT else None
    return LastingMembership(world_size, host, encrypted=encrypted, nonce=nonce, lonely_s=lonely_s, room=room)


def _affordable(connections: int) -> int:
    """As many of these connections as leave half of this process's descriptors for everything else."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if descriptors == resource.RLIM_INFINITY else max(1, min(connections, descriptors // 2))


def other_protocol(frame: bytes) -> Refused:
    theirs = frame.removeprefix(PREFIX)[:20].decode("ascii", "replace")
    return Refused(
        "job",
        f"The worker speaks protocol {theirs} of stretto, the coordinator protocol {PROTOCOL}: they run different "
        "versions.\n"
        "Install the same version of stretto on every machine (`pip show stretto`).",
    )


def why_unreachable(address: str, deadline_s: float) -> str | None:
    """None if somebody accepts a TCP connection at the address within the deadline, else the reason."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection(split_address(address), timeout=deadline_s).close()
        except TimeoutError:
            return f"no answer within {deadline_s:g} s (a firewall, or an address of another network)"
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) and time.monotonic() < deadline:
                time.sleep(TRY_AGAIN_S)  # strangers have all our descriptors, for the moment
                continue
            return str(getattr(error, "strerror", None) or error).lower()
        return None


def main() -> int:
    options = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="stretto coordinator: %(message)s", stream=sys.stderr)
    orphaned = tie_to_parent(options.die_with_parent)
    _raise_descriptor_limit()
    try:
        secret = secrets.parse(os.environ.get("STRETTO_SECRET", ""), "STRETTO_SECRET")
        if options.lasting_without_parent:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers, whom it follows
        lasting = Lasting.WITHOUT_PARENT if options.lasting_without_parent else Lasting.YES if options.lasting else Lasting.NO
        membership = make_membership(options.world_size, options.encrypted, lasting, options.room)
        coordinator = open_coordinator(options.bind, options.world_size, secret, options.encrypted, membership)
    except JobError as error:
        print(f"stretto coordinator: {error}", file=sys.stderr)
        return 1
    try:
        with contextlib.suppress(BrokenPipeError), os.fdopen(options.ready_fd, "w") as ready:
            ready.write(coordinator.address + "\n")
        coordinator.serve(orphaned)
    except KeyboardInterrupt:
        return 130
    finally:
        coordinator.close()
    return 0 if coordinator.membership.failure is None else 1


def _raise_descriptor_limit() -> None:
    """The usual limit of 1024 descriptors is less than a large job has workers; the kernel allows more to whoever asks."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_coordinator(
    bind: str, world_size: int, secret: bytes, encrypted: bool, membership: Membership | None = None
) -> Coordinator:
    """A listening coordinator, or a `JobError` that says what to do about the address."""
    try:
        return Coordinator(bind, world_size, secret, encrypted, membership)
    except SecretError:
        raise
    except (OSError, zmq.ZMQError) as error:
        raise JobError(f"{bind} cannot be the rendezvous: {_bind_problem(bind, error)}") from error


def _bind_problem(bind: str, error: OSError | zmq.ZMQError) -> str:
    host, port = split_address(bind)
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use by another program. Choose another port, or see who has it: ss -ltnp 'sport = :{port}'"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"{host} is not an address of this machine ({socket.gethostname()}). Name one of its own addresses."
    if error.errno == errno.EACCES:
        return f"port {port} is reserved for the administrator. Choose a port above 1023."
    return f"{error}. Check the host name and the port."


def tie_to_parent(pid: int | None) -> Callable[[], bool]:
    """A test for "my parent is gone". Given its pid, the kernel also ends us the moment it dies."""
    parent = os.getppid()
    if pid is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group: the parent decides, workers say goodbye
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if parent != pid:  # it died before we could ask for the signal
            return lambda: True
    return lambda: os.getppid() != parent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Started by `coordinator_process.py`; not for use by hand.")
    parser.add_argument("--bind", required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--die-with-parent", type=int)
    parser.add_argument("--lasting", action="store_true")
    parser.add_argument("--lasting-without-parent", action="store_true")
    parser.add_argument("--room", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
