"""One worker of `server_speed.py`: python benchmarks/server_speed_worker.py SETTINGS FILE, started once per lab host.

Rank 0 starts one server beside itself, and a bare ZeroMQ process that does nothing but copy. Then rank 0, on the same host, and
rank 1, on another one, take turns in talking to both: a model goes up and comes down, range by range, all of them under way at
once. Or both workers push and pull at the same time, while the memory of a new server is watched.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq
from step_worker import take_part

from stretto.aggregate.parameter_server.client import Fill, Pull, Push
from stretto.aggregate.parameter_server.layout import VALUE_BYTES, ServedParameter
from stretto.aggregate.parameter_server.network import ServerNetwork, network_of
from stretto.aggregate.parameter_server.service import ServedModel
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.aggregate.parameter_server.sync_spec import SyncSpec
from stretto.aggregate.parameter_server.value import ParameterServer
from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now, take_turns
from stretto.errors import JobError
from stretto.job import Job
from stretto.launching.introduce import local_address
from stretto.protocol.loop import Running
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.synchronous import Synchronous

ZMQ, SUM, SGD, ADAMW = "bare ZeroMQ, copying", "server that sums", "server with SGD, momentum 0.9", "server with AdamW"
OPTIMIZERS = {SGD: OptimizerSpec("SGD", {"lr": 1e-3, "momentum": 0.9}), ADAMW: OptimizerSpec("AdamW", {"lr": 1e-3})}
STATES = {SGD: 1, ADAMW: 2}  # vectors of an optimizer's state
WINDOW = 16  # messages under way to the bare process
PATIENCE_S = 60.0


class SpeedSettings(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int = 64 << 20  # of the model
    range_bytes: int = 1 << 20
    rounds: int = 11
    weighed: str | None = None  # the contender whose memory is measured, and nothing else
    memory_bytes: int = 256 << 20  # of the model whose server is weighed: buffers of the wire, some 50 MiB, should not count
    memory_steps: int = 6


class SpeedRow(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: for the model up and down, one per round."""

    contender: str
    between_hosts: bool
    seconds: list[float]


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The most that the server's memory grew by, with two workers, and what is allowed, in bytes of the model."""

    contender: str
    models: float
    allowed: int


class SpeedReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: SpeedSettings
    machine: MachineInfo
    date: str
    rows: list[SpeedRow]
    memory: list[MemoryRow]


# -- the yardstick ----------------------------------------------------------------------------------------------------


def copy_messages(address: str, num_messages: int, num_bytes: int) -> None:
    """The bare process: each message is copied to where it belongs, and what is there goes back."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
        memory = np.zeros((num_messages, num_bytes), np.uint8)
        while True:
            client, header, body = socket.recv_multipart(copy=False)
            if not header.buffer.nbytes:
                return
            place = memory[int.from_bytes(header.buffer, "little") % num_messages]
            np.copyto(place, np.frombuffer(body.buffer, np.uint8))
            socket.send_multipart([client, header, place.data], copy=False)


class BareClient:
    """Talks to the bare process."""

    def __init__(self, address: str, settings: SpeedSettings) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._settings = settings
        self._model = np.ones((settings.num_bytes // settings.range_bytes, settings.range_bytes), np.uint8)
        self._values = self._model.copy()

    def exchange(self) -> None:
        count, sent, received = len(self._model), 0, 0
        while received < count:
            while sent < count and sent - received < WINDOW:
                self._socket.send_multipart([sent.to_bytes(4, "little"), self._model[sent].data], copy=False)
                sent += 1
            if not self._socket.poll(PATIENCE_S * 1e3):
                raise JobError(f"the bare ZeroMQ process has not answered within {PATIENCE_S:g} s.")
            header, body = self._socket.recv_multipart(copy=False)
            np.copyto(self._values[int.from_bytes(header.buffer, "little")], np.frombuffer(body.buffer, np.uint8))
            received += 1

    def close(self, *, ends: bool) -> None:
        if ends:
            self._socket.send_multipart([b"", b""])
        self._socket.close()
        self._context.term()


@contextmanager
def bare_process(job: Job, settings: SpeedSettings) -> Iterator[BareClient]:
    """Beside rank 0; each worker gets a client."""
    process, address = None, ""
    if job.rank == 0:
        ip, _ = local_address(job.launch)
        words = [sys.executable, __file__, "copy", f"tcp://{ip}:*"]
        words += [str(settings.num_bytes // settings.range_bytes), str(settings.range_bytes)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
    client = BareClient(str(job.gather_object(address)[0]), settings)
    yield client
    job.barrier()
    client.close(ends=job.rank == 0)
    if process is not None:
        process.wait(PATIENCE_S)


# -- a server ---------------------------------------------------------------------------------------------------------


class ServerClient:
    """A model on the one server, as a worker has it."""

    def __init__(self, job: Job, network: ServerNetwork, settings: SpeedSettings, kind: str, workers: list[int]) -> None:
        sync = Synchronous() if kind == SUM else Asynchronous()
        self._model = ServedModel(
            parameters=[ServedParameter("weight", settings.num_bytes // VALUE_BYTES, "0")],
            servers=network.servers,
            workers=workers,
            range_bytes=settings.range_bytes,
            sync=SyncSpec.of(sync),
            optimizers={} if kind == SUM else {"0": OPTIMIZERS[kind]},
        )
        self._network = network
        self._running: Running = network.begin(self._model, self)
        self._ranges = self._model.layout().ranges
        self._gradient = np.full(settings.num_bytes // VALUE_BYTES, 1e-3, np.float32)
        self._values = np.zeros_like(self._gradient)
        self._steps = 0 if kind == SUM else 1
        self._clock = 0
        if kind != SUM and job.rank == 0:
            self._wait([self._running.request(Fill(each.index, self._part(self._values, each.index))) for each in self._ranges])
        job.barrier()

    def _part(self, whole: np.ndarray, index: int) -> memoryview:
        size = self._ranges[0].numel
        return memoryview(whole[index * size : index * size + self._ranges[index].numel].data)

    def exchange(self) -> None:
        """Push all ranges and pull what came of it."""
        answers = []
        for each in self._ranges:
            push = Push(each.index, self._clock, self._part(self._gradient, each.index), {}, 0)
            answers.append(self._running.request(push))
            answers.append(self._running.request(Pull(each.index, self._clock + 1, self._part(self._values, each.index))))
        self._clock += 1
        self._wait(answers)

    def _wait(self, answers: list) -> None:  # type: ignore[type-arg]
        for answer in answers:
            answer.result(PATIENCE_S)

    def end(self) -> None:
        self._network.end(self._running)


# -- measuring --------------------------------------------------------------------------------------------------------


def measure_speed(job: Job, network: ServerNetwork, settings: SpeedSettings) -> list[SpeedRow]:
    rows = []
    kinds = (SUM, SGD, ADAMW)
    with bare_process(job, settings) as bare:
        for rank in (0, 1):
            servers = [ServerClient(job, network, settings, kind, [rank]) for kind in kinds]
            actions: list[Callable[[], None]] = [bare.exchange, *(each.exchange for each in servers)]
            seconds: list[list[float]] = []
            if job.rank == rank:
                for action in actions:
                    action()
                    action()
                seconds = take_turns([partial(_timed, action) for action in actions], settings.rounds)
            times = job.gather_object(seconds)[rank]
            rows += [
                SpeedRow(contender=name, between_hosts=rank == 1, seconds=each)
                for name, each in zip((ZMQ, *kinds), times, strict=True)
            ]
            for server in servers:
                server.end()
    return rows


def _timed(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure_memory(job: Job, network: ServerNetwork, settings: SpeedSettings, kind: str) -> MemoryRow:
    """Of a server that has served nothing before."""
    settings = msgspec.structs.replace(settings, num_bytes=settings.memory_bytes)
    before = _resident(network, "VmRSS")
    server = ServerClient(job, network, settings, kind, [0, 1])
    for _ in range(settings.memory_steps):
        server.exchange()
    most = _resident(network, "VmHWM")
    job.barrier()
    server.end()
    grown = (most - before) / settings.num_bytes
    return MemoryRow(contender=kind, models=grown, allowed=1 + STATES[kind] + 2)


def _resident(network: ServerNetwork, line: str) -> int:
    """Of the server, where it is a process of this worker's. Its highest value begins anew with each question for VmRSS."""
    if not network.processes:
        return 0
    keeper = network.processes[0].pid  # which starts a server that has died again
    server = int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text())
    folder = Path(f"/proc/{server}")
    if line == "VmRSS":
        (folder / "clear_refs").write_text("5")
    found = next(each for each in (folder / "status").read_text().splitlines() if each.startswith(line))
    return int(found.split()[1]) << 10


def measure(job: Job, settings: SpeedSettings) -> SpeedReport:
    torch.set_num_threads(1)
    network = network_of(job, ParameterServer(shards=1), 2)
    memory = [] if settings.weighed is None else [measure_memory(job, network, settings, settings.weighed)]
    rows = measure_speed(job, network, settings) if settings.weighed is None else []
    return SpeedReport(settings=settings, machine=describe(), date=now(), rows=rows, memory=memory)


if __name__ == "__main__":
    if sys.argv[1] == "copy":
        copy_messages(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        take_part(sys.argv[1:], SpeedSettings, measure)
