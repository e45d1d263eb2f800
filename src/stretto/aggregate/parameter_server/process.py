"""A server as a process: python -m stretto.aggregate.parameter_server.process LIFE, with its place as JSON on standard input.
LIFE is how often it has died before (`keeper.py`); then it joins those that go on, and is handed its part of what they serve.

It joins workers and other servers, serves what it is told to (`service.py`), and ends when the last worker has left, in order
or not; or when something fails in it, so that copies elsewhere are served. One thread of torch's and NumPy's does the work: there
are as many servers as it takes.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Final

import msgspec
import torch

from stretto.aggregate.parameter_server.keeper import NOT_JOINED
from stretto.aggregate.parameter_server.range_state import RangeState
from stretto.aggregate.parameter_server.server_clock import CLOCK_CHANNEL, ClockAsker
from stretto.aggregate.parameter_server.server_record import RecordedServer
from stretto.aggregate.parameter_server.server_trace import ServerTrace
from stretto.aggregate.parameter_server.service import CONTROL_CHANNEL, ServedModel, ServiceHost
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.execute import Communicator
from stretto.collectives.newcomers import admit_newcomers, lives_of
from stretto.errors import StrettoError
from stretto.lasting_network import join_network
from stretto.launching.detect import Launch
from stretto.launching.ledger_file import of_server, write_ledger
from stretto.observe.trace import Tracer
from stretto.protocol.loop import Running
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire

MOST_BYTES: Final = 1 << 16  # of standard input
LOOK_EVERY_S: Final = 0.25

log = logging.getLogger("stretto.parameter_server")


class ServerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has to know to join. Never shown: it has a secret."""

    rank: int
    local_rank: int
    world_size: int
    workers: int
    on_one_host: bool
    rendezvous: str
    secret: str
    encrypt: bool
    interface: str | None
    timeouts: Timeouts
    trace: ServerTrace | None = None
    ledger: str | None = None  # of the worker that starts it, as in `Launch.ledger`

    def __repr__(self) -> str:
        return f"ServerPlace(rank={self.rank}, world_size={self.world_size})"


def serve(
    wire: Wire, workers: Iterable[int], timeouts: Timeouts, traced: ServerTrace | None = None, launch: Launch | None = None
) -> bool:
    """Serve on a wire until the last worker has left it. False: something in this server has failed. With `launch`, those that
    have died and come back are let in."""
    tracer = None if traced is None else Tracer()
    alone, ended = threading.Event(), threading.Event()
    communication = CommunicationThread(Communicator(wire, timeouts))
    roster = None if launch is None else admit_newcomers(launch, communication)
    services: dict[int, Running] = {}

    def start(machine: RecordedServer, channel: int, model: ServedModel) -> None:
        services[channel] = communication.loop.start(machine, channel, unsent_bytes=model.unsent_bytes)

    def stop(channel: int) -> None:
        if channel in services:
            services.pop(channel).stop()
            ended.set()

    asker = ClockAsker(workers)
    if traced is not None and traced.run is None:
        communication.loop.start(asker, CLOCK_CHANNEL)
    life = wire.joined_in(wire.rank)
    others = [rank for rank in wire.peers if rank not in set(workers) and rank not in wire.lost] if life else []
    machine = ServiceHost(
        wire.rank, workers, start, stop, alone.set, tracer, life=life, lives=lambda: lives_of(wire), others=others
    )
    host = communication.loop.start(machine, CONTROL_CHANNEL)
    try:
        while not alone.wait(LOOK_EVERY_S) and host.error is None and all(each.error is None for each in list(services.values())):
            if ended.is_set():
                ended.clear()
                gc.collect()  # the parts of a machine know each other, and Python looks for such garbage where much is made
    finally:  # also when it was interrupted
        if roster is not None:
            roster.stop()
        communication.stop(timeouts.leave_s)
        if traced is not None and tracer is not None:
            _write_trace(traced, asker, tracer)
        if alone.is_set():
            wire.close()
        else:
            wire.abandon()  # whoever waits for it shall know that it has died, and go to a copy
    # Where all workers are lost and none has left in order, they may have died together; or they took this server for dead, for
    # it was stopped for longer than `silence_s`, and go on with copies of what it had. Then another life of it has to join them.
    return alone.is_set() and (launch is None or machine.somebody_has_left)


def _write_trace(traced: ServerTrace, asker: ClockAsker, tracer: Tracer) -> None:
    compared = traced if traced.run is not None else asker.compared(traced)
    if compared is None:
        log.warning("server %d: no worker is traced, or none has used this server, so it writes no trace", traced.server)
    else:
        compared.write(tracer)


def begin_again() -> None:
    """The others wait for what a server in a later life will serve: with a first optimizer torch imports for seconds."""
    RangeState(torch.zeros(1), OptimizerSpec("SGD", {"lr": 0.0}))


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # these are for the workers, whom servers follow
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    place = msgspec.json.decode(sys.stdin.buffer.read(MOST_BYTES), type=ServerPlace)
    timeouts = place.timeouts
    launch = Launch(
        rank=place.rank, world_size=place.world_size, local_rank=place.local_rank,
        local_world_size=place.world_size if place.on_one_host else 1, rendezvous=place.rendezvous,
        secret=bytes.fromhex(place.secret), encrypt=place.encrypt, launcher="stretto", interface=place.interface,
        restart=int(sys.argv[1]),
    )  # fmt: skip
    if launch.restart:
        begin_again()
    try:
        wire = join_network(launch, timeouts)
    except StrettoError as problem:
        log.warning("server %d has not joined: %s", place.rank - place.workers, problem)
        return NOT_JOINED
    try:
        return 0 if serve(wire, range(place.workers), timeouts, place.trace, launch) else 1
    finally:
        if place.ledger is not None:
            write_ledger(of_server(place.ledger, place.rank, launch.restart), wire.bytes_sent)


if __name__ == "__main__":
    sys.exit(main())
