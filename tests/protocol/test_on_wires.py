"""The machines of virtual time, unchanged, on wires: between threads and over sockets, with a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.machines import Read, Register, Stamp, TokenRing, Write
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.execute import Communicator
from stretto.protocol.loop import Running
from stretto.protocol.machine import Machine
from stretto.testing.threads import threads_world
from stretto.wire.base import Wire
from wire.socket_world import connect_all, peer_of, tcp, wires_of, zeromq

CHANNEL = 100
DEADLINE_S = 60.0


@contextmanager
def wires_for(kind: str, size: int) -> Iterator[Sequence[Wire]]:
    if kind == "threads":
        yield threads_world(size)
        return
    with wires_of(size, tcp() if kind == "tcp" else zeromq()) as wires:
        connect_all(wires, [peer_of(wire) for wire in wires])
        yield wires


class World:
    """A machine on every rank, each with a communication thread."""

    def __init__(self, wires: Sequence[Wire], make: Callable[[int, int], Machine]) -> None:
        self.wires = wires
        self.communications = [CommunicationThread(Communicator(wire)) for wire in wires]
        self.running: dict[int, Running] = {
            rank: communication.loop.start(make(rank, len(wires)), CHANNEL)
            for rank, communication in enumerate(self.communications)
        }

    def kill(self, rank: int) -> None:
        """As if its process died: nothing more is driven there, and its connections close without a goodbye."""
        del self.running[rank]
        self.communications[rank].stop(DEADLINE_S)
        self.wires[rank].abandon()

    def request(self, rank: int, request: Any) -> Any:
        return self.running[rank].request(request).result(DEADLINE_S)

    def stop(self) -> None:
        for communication in self.communications:
            communication.stop(DEADLINE_S)


@contextmanager
def world(kind: str, size: int, make: Callable[[int, int], Machine]) -> Iterator[World]:
    with wires_for(kind, size) as wires:
        made = World(wires, make)
        try:
            yield made
        finally:
            made.stop()


class Watch:
    """Sees who holds the token, from all threads at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders: dict[int, int] = {}
        self.taken: list[tuple[int, int]] = []  # numbers begin again where a death may have taken some along
        self.dead: set[int] = set()
        self.twice: list[dict[int, int]] = []

    def make(self, rank: int, size: int) -> TokenRing:
        ring = TokenRing(rank, size, hold_s=0.001, retry_s=0.2)
        ring.on_take = lambda number: self.take(rank, number, len(ring.lost))
        ring.on_release = lambda: self.release(rank)
        return ring

    def take(self, rank: int, number: int, num_lost: int) -> None:
        with self.lock:
            self.holders[rank] = number
            self.taken.append((num_lost, number))
            if len(self.holders.keys() - self.dead) > 1:
                self.twice.append(dict(self.holders))

    def release(self, rank: int) -> None:
        with self.lock:
            self.holders.pop(rank, None)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def goes_round(tokens: World, what: str) -> None:
    before = {rank: tokens.request(rank, "turns")[0] for rank in tokens.running}
    wait_until(lambda: all(tokens.request(rank, "turns")[0] > turns + 1 for rank, turns in before.items()), what)


WORLDS = [("threads", 2), ("threads", 3), ("threads", 7), ("tcp", 3), ("zeromq", 3)]


@pytest.mark.parametrize(("kind", "size"), WORLDS)
def test_the_token_goes_on_after_a_kill_and_is_never_held_twice(kind: str, size: int) -> None:
    watch = Watch()
    with world(kind, size, watch.make) as tokens:
        goes_round(tokens, "the token does not move")
        victim = size - 1
        watch.dead.add(victim)
        tokens.kill(victim)
        wait_until(lambda: all(tokens.request(rank, "lost")[1] == [victim] for rank in tokens.running), "the loss is not told")
        goes_round(tokens, "the token does not move after the kill")
    assert not watch.twice and len(set(watch.taken)) == len(watch.taken)


@pytest.mark.parametrize(("kind", "size"), [("threads", 1), ("threads", 3), ("threads", 4), ("tcp", 3), ("zeromq", 3)])
def test_the_register_is_read_and_written_by_all_also_after_a_kill(kind: str, size: int) -> None:
    with world(kind, size, lambda rank, size: Register(rank, size, retry_s=0.2)) as registers:
        large = bytes(range(256)) * 1000
        stamp, _ = registers.request(0, Write(large))
        assert all(registers.request(rank, Read()) == (stamp, large) for rank in range(size))
        under_way: list[Future[Any]] = [registers.running[0].request(Write(b"%d" % number)) for number in range(20)]
        if size > 2:
            registers.kill(size - 1)
        stamps: list[Stamp] = [future.result(DEADLINE_S)[0] for future in under_way]
        assert len(set(stamps)) == len(stamps) and min(stamps) > stamp
        latest, value = registers.request(0, Read())
        assert latest >= max(stamps) and value == b"%d" % stamps.index(latest)
        assert all(registers.request(rank, Read()) == (latest, value) for rank in registers.running)
        registers.request(max(registers.running), Write(b"last"))
        assert registers.request(0, Read())[1] == b"last"


@pytest.mark.processes
def test_processes_go_on_when_one_of_them_is_killed() -> None:
    size, victim = 3, 1
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).parent / "worker.py")]
    workers = [
        subprocess.Popen([*command, str(rank), str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        for rank in range(size)
    ]

    def kill_all() -> None:
        for worker in workers:
            worker.kill()

    watchdog = threading.Timer(DEADLINE_S, kill_all)  # whoever reads finds the end then
    watchdog.start()

    def says(worker: subprocess.Popen[str]) -> list[int]:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        assert line, "it has ended"
        return [int(word) for word in line.split()]

    try:
        addresses = " ".join(worker.stdout.readline().strip() for worker in workers if worker.stdout is not None)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(addresses + "\n")
            worker.stdin.flush()
        for worker in workers:
            while says(worker)[0] < 5:
                pass
        workers[victim].kill()
        assert workers[victim].wait(DEADLINE_S) == -signal.SIGKILL
        for worker in (workers[0], workers[2]):
            while (heard := says(worker))[2:] != [victim]:
                pass
            while (later := says(worker))[0] < heard[0] + 5:
                assert later[1] >= heard[1]  # the register goes on as well, and never back
            assert later[1] > heard[1]
    finally:
        watchdog.cancel()
        kill_all()
        for worker in workers:
            worker.communicate()
