"""A server as a process: python -m stretto.aggregate.parameter_server.process, with its place as JSON on standard input.

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

from stretto.aggregate.parameter_server.server_record import RecordedServer
from stretto.aggregate.parameter_server.server_trace import ServerTrace
from stretto.aggregate.parameter_server.service import CONTROL_CHANNEL, ServedModel, ServiceHost
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.execute import Communicator
from stretto.job import meet
from stretto.launching.detect import Launch
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

    def __repr__(self) -> str:
        return f"ServerPlace(rank={self.rank}, world_size={self.world_size})"


def serve(wire: Wire, workers: Iterable[int], timeouts: Timeouts, traced: ServerTrace | None = None) -> bool:
    """Serve on a wire until the last worker has left it. False: something in this server has failed."""
    tracer = None if traced is None else Tracer()
    alone, ended = threading.Event(), threading.Event()
    communication = CommunicationThread(Communicator(wire, timeouts))
    services: dict[int, Running] = {}

    def start(machine: RecordedServer, channel: int, model: ServedModel) -> None:
        services[channel] = communication.loop.start(machine, channel, unsent_bytes=model.unsent_bytes)

    def stop(channel: int) -> None:
        if channel in services:
            services.pop(channel).stop()
            ended.set()

    host = communication.loop.start(ServiceHost(wire.rank, workers, start, stop, alone.set, tracer), CONTROL_CHANNEL)
    try:
        while not alone.wait(LOOK_EVERY_S) and host.error is None and all(each.error is None for each in list(services.values())):
            if ended.is_set():
                ended.clear()
                gc.collect()  # the parts of a machine know each other, and Python looks for such garbage where much is made
    finally:  # also when it was interrupted
        communication.stop(timeouts.leave_s)
        if traced is not None and tracer is not None:
            traced.write(tracer)
        if alone.is_set():
            wire.close()
        else:
            wire.abandon()  # whoever waits for it shall know that it has died, and go to a copy
    return alone.is_set()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # these are for the workers, whom servers follow
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    place = msgspec.json.decode(sys.stdin.buffer.read(MOST_BYTES), type=ServerPlace)
    timeouts = place.timeouts
    launch = Launch(
        rank=place.rank, world_size=place.world_size, local_rank=place.local_rank,
        local_world_size=place.world_size if place.on_one_host else 1, rendezvous=place.rendezvous,
        secret=bytes.fromhex(place.secret), encrypt=place.encrypt, launcher="stretto", interface=place.interface,
    )  # fmt: skip
    serve(meet(launch, timeouts), range(place.workers), timeouts, place.trace)


if __name__ == "__main__":
    main()
