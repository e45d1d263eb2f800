"""Peers that fall silent: lost when `silence_s` are over and not before, and told apart from those that are merely busy."""

from __future__ import annotations

import math
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stretto.errors import PeerLost
from stretto.testing import run_threads, wait_for
from stretto.timeouts import Timeouts
from stretto.wire import pulse as pulse_module
from stretto.wire.base import Tag
from stretto.wire.door import MAX_STRANGERS
from stretto.wire.framed import FramedWire
from stretto.wire.tcp import TcpWire
from wire.cable import Cable
from wire.contract import exchange_once, progress_until, receive
from wire.socket_world import NONCE, Make, background, peer_of, socket_world, tcp, wait_until, wires_of, zeromq

SILENCE_S = 1.0
TIMES = Timeouts(connect_s=40, silence_s=SILENCE_S, arrive_s=40, leave_s=1)
BOTH = pytest.mark.parametrize("make", [tcp(timeouts=TIMES), zeromq(timeouts=TIMES)], ids=["tcp", "zeromq"])


@contextmanager
def wires_with_cables(make: Make) -> Iterator[tuple[list[FramedWire], list[Cable]]]:
    """Two workers of different hosts, whose connections all go through cables."""
    with wires_of(2, make) as wires, ExitStack() as stack:
        peers = [peer_of(wire, host) for wire, host in zip(wires, ["here", "there"], strict=True)]
        cables = [Cable(peer) for peer in peers]
        for cable in cables:
            stack.callback(cable.close)

        def connect(wire: FramedWire) -> None:
            own, other = peers[wire.rank], cables[1 - wire.rank].peer
            wire.connect([own, other] if wire.rank == 0 else [other, own], NONCE)

        run_threads(2, connect, wires=wires)
        yield wires, cables


@BOTH
@pytest.mark.parametrize("doing", ["nothing", "sending"])
def test_a_peer_is_lost_when_its_link_was_dead_for_the_whole_time_and_not_earlier(make: Make, doing: str) -> None:
    with wires_with_cables(make) as (wires, cables):
        all_here = threading.Barrier(2)

        def program(wire: FramedWire) -> float:
            exchange_once(wire)
            if isinstance(wire, TcpWire):
                assert wire._pulse is not None
                wire._pulse.forget(1 - wire.rank)  # it does not go through the cable
            all_here.wait(30)
            handle, _ = receive(wire, 1 - wire.rank, Tag(1, 1, 0), 1 << 20)
            if doing == "sending":
                data = memoryview(bytearray(1 << 20))
                for index in range(20):
                    wire.send(data, 1 - wire.rank, Tag(1, 0, index), 0)
            for cable in cables:
                cable.cut()
            with pytest.raises(PeerLost, match="silent for") as caught:
                wait_for(wire, handle)
            assert caught.value.rank == 1 - wire.rank
            return time.monotonic()

        lost_at = run_threads(2, program, wires=wires)
        for rank in range(2):
            # The plain wire has one connection, the encrypted one has two, and either of them may be the silent one.
            heard = [*last_heard(cables[rank], "to"), *last_heard(cables[1 - rank], "from")]
            assert lost_at[rank] - min(heard) >= SILENCE_S


def last_heard(cable: Cable, way: str) -> list[float]:
    return [cable.last_passed[way]] if way in cable.last_passed else []


def test_a_worker_that_was_stopped_itself_does_not_take_the_others_for_dead() -> None:
    """As after Ctrl-Z and fg: nobody has heard anything for long, and everybody is alive."""
    with socket_world(2, tcp(timeouts=TIMES), hosts=["here", "there"]) as wires:
        for wire in wires:
            assert isinstance(wire, TcpWire) and wire._pulse is not None
            wire._looked_at -= 10 * SILENCE_S  # when it looked last: before it was stopped
            wire._connections[1 - wire.rank].silent_s = SILENCE_S / 2
            wire._pulse.forget(1 - wire.rank)  # which would speak for it as well

        def program(wire: FramedWire) -> None:
            progress_until(wire, lambda: wire.now() > start + SILENCE_S / 2, "half of the time")
            assert not wire.lost
            exchange_once(wire)

        start = time.monotonic()
        run_threads(2, program, wires=wires)


def is_open(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):  # ZeroMQ's greeting
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_strangers_at_the_port_of_a_pulse_are_few_and_gone_when_the_workers_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse_module, "HANDSHAKE_S", 60.0)  # ZeroMQ itself ends none of them
    monkeypatch.setattr(pulse_module, "MEET_S", 60.0)
    first, second = (pulse_module.Pulse(rank, "127.0.0.1", bytes(32), silence_s=1.0) for rank in range(2))
    crowd: list[socket.socket] = []
    deadline = time.monotonic() + 60
    try:
        with background(lambda: first.meet({1: pulse_module.Acquaintance("127.0.0.1:1", second.greeting)}, deadline)):
            for _ in range(100):
                crowd.append(socket.create_connection(("127.0.0.1", int(first.greeting)), timeout=30))
                crowd[-1].setblocking(False)
            most = MAX_STRANGERS + 1
            wait_until(lambda: first._doorstep.sent_away == 100 - most, "strangers that are sent away")
            second.meet({0: pulse_module.Acquaintance("127.0.0.1:1", first.greeting)}, deadline)
        assert first.silent_s(1) < math.inf and second.silent_s(0) < math.inf
        wait_until(lambda: not any(map(is_open, crowd)), "the end of the strangers")
    finally:
        for stranger in crowd:
            stranger.close()
        first.close()
        second.close()


# The pulse: a process of its own, for what matters is who runs and who does not.

BESIDE = """
import ctypes, sys, time
sys.path[:0] = sys.argv[1:2]
from stretto.wire.pulse import Acquaintance, Pulse

pulse = Pulse(1, "127.0.0.1", bytes(32), silence_s=1.0)
port = sys.stdin.readline().strip()
pulse.meet({0: Acquaintance("127.0.0.1:1", port.encode())}, time.monotonic() + 60)
print("met", flush=True)
ctypes.PyDLL(None).poll(None, 0, int(sys.stdin.readline()))  # keeps the interpreter lock for so many milliseconds
print("back", flush=True)
sys.stdin.readline()
"""


def test_a_process_that_holds_the_interpreter_lock_has_a_pulse_and_one_that_is_stopped_has_none() -> None:
    pulse = pulse_module.Pulse(0, "127.0.0.1", bytes(32), silence_s=1.0)
    source = str(Path(pulse_module.__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", BESIDE, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(pulse.greeting.decode() + "\n")
        process.stdin.flush()
        pulse.meet({1: pulse_module.Acquaintance("127.0.0.1:1", b"")}, time.monotonic() + 60)
        assert process.stdout.readline() == "met\n"
        process.stdin.write("1500\n")
        process.stdin.flush()
        longest = 0.0
        while not select.select([process.stdout], [], [], 0.02)[0]:
            longest = max(longest, pulse.silent_s(1))
        assert process.stdout.readline() == "back\n"
        assert 0 < longest < 1.2  # for 1.5 s no Python ran there
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: pulse.silent_s(1) > 1.0, "the end of its pulse")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: pulse.silent_s(1) < 1.0, "the return of its pulse")
        process.kill()
        wait_until(lambda: pulse.silent_s(1) == math.inf, "its death")
    finally:
        process.kill()
        process.communicate()
        pulse.close()
