"""Worlds of socket wires inside one process, and a peer among them that says whatever a test wants it to say."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from stretto.job.membership import Peer
from stretto.testing import run_threads
from stretto.timeouts import Timeouts
from stretto.wire import frames
from stretto.wire.framed import FramedWire
from stretto.wire.frames import FrameKind, Header
from stretto.wire.tcp import TcpWire
from stretto.wire.zeromq import ZeroMQWire

SECRET = bytes(range(32))
QUICK = Timeouts(connect_s=10, silence_s=5, arrive_s=10, leave_s=2)
Make = Callable[[int, int], FramedWire]


def tcp(*, timeouts: Timeouts = QUICK, shared_memory: bool = True) -> Make:
    return lambda rank, size: TcpWire(rank, size, secret=SECRET, timeouts=timeouts, shared_memory=shared_memory)


def zeromq(*, encrypt: bool = False, timeouts: Timeouts = QUICK, shared_memory: bool = True) -> Make:
    return lambda rank, size: ZeroMQWire(
        rank, size, secret=SECRET, encrypt=encrypt, timeouts=timeouts, shared_memory=shared_memory
    )


def peer_of(wire: FramedWire, host: str = "here") -> Peer:
    return Peer(wire.rank, wire.rank, host, wire.address, os.getpid())


def connect_all(wires: Sequence[FramedWire], peers: Sequence[Peer]) -> None:
    run_threads(len(wires), lambda wire: wire.connect(peers), wires=wires)


@contextmanager
def wires_of(size: int, make: Make) -> Iterator[list[FramedWire]]:
    """Wires that listen and are not connected yet; whatever happens, they are gone afterwards."""
    wires: list[FramedWire] = []
    try:
        for rank in range(size):
            wires.append(make(rank, size))
        yield wires
    finally:
        for wire in wires:
            wire.abandon()


@contextmanager
def socket_world(size: int, make: Make, hosts: Sequence[str] | None = None) -> Iterator[list[FramedWire]]:
    """Connected wires, each for a thread of its own; they say goodbye to each other unless the test fails."""
    with wires_of(size, make) as wires:
        hosts = hosts or ["here"] * size
        connect_all(wires, [peer_of(wire, host) for wire, host in zip(wires, hosts, strict=True)])
        yield wires
        run_threads(size, lambda wire: wire.close(), wires=wires)


def frame(
    kind: int,
    source: int,
    payload: bytes = b"",
    *,
    channel: int = 1,
    sequence: int = 0,
    index: int = 0,
    dtype: int = 0,
    slot: int = 0,
    number: int = 0,
    generation: int = 0,
    declared: int | None = None,
) -> bytes:
    num_bytes = len(payload) if declared is None else declared
    header = Header(kind, generation, source, channel, sequence, index, 0, dtype, slot, number, num_bytes)
    return frames.encode(header) + payload


def post(source: int, topic: int, body: bytes = b"") -> bytes:
    return frame(FrameKind.POST, source, body, channel=topic)


@contextmanager
def background(action: Callable[[], None]) -> Iterator[None]:
    """Run `action` in a thread meanwhile; its exception, if any, is raised at the end."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name="background", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(20)
    assert not thread.is_alive(), "the action in the background did not end"
    if problems:
        raise problems[0]


def peak_memory_grows_by(action: Callable[[], None]) -> int:
    """Bytes of resident memory at the worst moment of `action`, beyond what there was before."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = _memory("VmRSS")
    action()
    return _memory("VmHWM") - before


def _memory(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) << 10


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.005)
