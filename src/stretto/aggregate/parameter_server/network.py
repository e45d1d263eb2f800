"""Where servers run, and how workers reach them: on a wire that joins all of them.

Servers that were started apart (`dedicated.py`, `launching/server_meeting.py`) have met the workers when these joined the job.
Else they are processes beside the workers, and the first model that is trained with them opens the network, on all workers
together; further ones use it. Rank 0 starts a coordinator, as it does under other launchers (`launching/rendezvous.py`), some
workers start a server each, and workers and servers meet there.

Both ways it is a job of P + S ranks beside the workers' own, with keys of its own and a communication thread of its own. So the
death of a server is no loss of a worker, and nothing of the workers' collectives has to know of servers.

    ranks 0 to P-1          workers, as in their job
    ranks P to P+S-1        servers; of those beside workers one on each host first, then a second one, and so on

A server beside a worker gets everything by its standard input, the secret too, and ends when the last worker has left. In tests,
where workers are threads, servers are threads as well (`Job.more_wires`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import msgspec

from stretto.aggregate.parameter_server.client import ClientMachine, Enter, Quit
from stretto.aggregate.parameter_server.client_record import AskLedgers, RecordedClient
from stretto.aggregate.parameter_server.process import ServerPlace, serve
from stretto.aggregate.parameter_server.server_clock import CLOCK_CHANNEL, ClockTeller
from stretto.aggregate.parameter_server.server_record import ServerLedger
from stretto.aggregate.parameter_server.server_trace import ServerTrace
from stretto.aggregate.parameter_server.service import (
    CONTROL_CHANNEL,
    FIRST_CHANNEL,
    FindServices,
    LeaveServers,
    NewService,
    ServedModel,
    ServiceClient,
    StopService,
)
from stretto.aggregate.parameter_server.value import ParameterServer
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.execute import Communicator
from stretto.collectives.newcomers import admit_newcomers, lives_of
from stretto.errors import ConfigurationError, JobError, PeerLost, StrettoError, WireError
from stretto.job import Job
from stretto.lasting_network import join_network, place_again, place_in
from stretto.launching import coordinator_process
from stretto.launching.detect import Launch, own_environment
from stretto.launching.hosts import host_identity
from stretto.launching.introduce import report_ended
from stretto.launching.introduction_messages import Ended
from stretto.launching.return_watch import ReturnWatch
from stretto.protocol.loop import Running
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire

KEEPER: Final = Path(__file__).with_name("keeper.py")
LEAVE_S: Final = 2.0  # to wait for a server of ours to end, when this worker leaves

log = logging.getLogger("stretto.parameter_server")


class ServerNetwork:
    """A worker's connection to the servers of a job. Made by `network_of`, ended by the job."""

    def __init__(
        self,
        job: Job,
        communication: CommunicationThread,
        num_servers: int,
        processes: Sequence[subprocess.Popen[bytes]] = (),
        watch: ReturnWatch | None = None,
    ) -> None:
        """`watch`: for those that join later, where that is possible."""
        wire = communication.communicator.wire
        self._job = job
        self._wire = wire
        self.servers = list(range(job.world_size, job.world_size + num_servers))  # with which the job began, the same on all
        self.all_servers = sorted({*self.servers, *(rank for rank in wire.peers if rank >= job.world_size)})
        self.processes = list(processes)  # that keep the servers which this worker has started
        self._communication = communication
        self._watch = watch
        self._services = ServiceClient(server for server in self.living_servers if not wire.joined_in(server))
        self._control = self._communication.loop.start(self._services, CONTROL_CHANNEL)
        wire.on_lost(self._on_lost)
        wire.on_view(self._on_view)
        self._channel = FIRST_CHANNEL
        self._served: dict[int, Running] = {}  # by channel: models that this worker has not ended

    def _on_lost(self, lost: PeerLost) -> None:
        if lost.rank in self.all_servers and not self._job.closed:
            log.warning("rank %d has lost server %d: %s", self._job.rank, lost.rank - self.servers[0], lost)

    @property
    def living_servers(self) -> list[int]:
        return [server for server in self.all_servers if server not in self._wire.lost]

    @property
    def lives(self) -> list[int]:
        """For each server the generation in which it came back, or was added, and joined; 0 if it is there from the beginning, or
        is lost."""
        return [0 if server in self._wire.lost else self._wire.joined_in(server) for server in self.all_servers]

    def every_part_has_copies(self, replicas: int) -> bool:
        """Whether all servers are here, and each range that is served is on so many more than one, as this worker has heard."""
        if len(self.living_servers) < len(self.all_servers):
            return False
        machines = [running.machine for running in list(self._served.values())]
        return all(
            len(route.members) > replicas
            for machine in machines
            if isinstance(machine, RecordedClient)
            for route in machine.routes
        )

    def _on_view(self, joined: list[int], left: list[int], generation: int) -> None:
        for rank in joined:
            number = rank - self.servers[0]
            if rank in self.all_servers:
                log.warning("server %d has been started again, and has joined", number)
            elif number >= 0:
                self.all_servers = sorted([*self.all_servers, rank])
                log.warning("server %d has been added, and takes its part of what is served over", number)

    def begin(self, model: ServedModel, owner: object) -> Running:
        """Have a model served. All workers call it together, with the same; each gets a client. It ends with its `owner`."""
        model = self._on_living_servers(model)
        channel = self._channel
        self._channel += 1
        problem = None
        if self._job.rank == 0:
            try:
                self._wait_for(self._control.request(NewService(channel, model)), "to serve a model")
            except StrettoError as error:
                problem = str(error)
        problem = self._job.gather_object(problem)[0]
        if problem is not None:
            raise StrettoError(problem)
        return self._start_client(channel, model, owner, 0)

    def enter(self, model: ServedModel, owner: object) -> tuple[Running, ServedModel, int]:
        """For a worker that has come back: take part in a model that is served. Returns it as the servers have it, and the clock
        to begin with."""
        served = self._wait_for(self._control.request(FindServices(self.living_servers)), "what they serve")
        for channel, found in sorted(served.items()):
            if channel not in self._served and _same_model(found, model):
                break
        else:
            raise ConfigurationError(
                f"rank {self._job.rank} has come back, and the servers serve no model like the one that it distributes: "
                f"parameters ({', '.join(each.name for each in model.parameters[:5])}, ...), sync and compress have to be those "
                f"of the others.\nDistribute the models in the same order as the others do, and nothing but them."
            )
        self._channel = max(self._channel, channel + 1)
        running = self._start_client(channel, found, owner, self._wire.joined_in(self._job.rank))
        return running, found, int(self._wait_for(running.request(Enter()), "to let this worker in"))

    def _start_client(self, channel: int, model: ServedModel, owner: object, life: int) -> Running:
        client = ClientMachine(
            self._job.rank, model.layout(), servers=model.servers, replicas=model.replicas, life=life, lives=lives_of(self._wire)
        )
        machine = RecordedClient(client, self.living_servers, self._job.world_size, self._job.ledger, self._job.tracer)
        running = self._communication.loop.start(machine, channel, unsent_bytes=model.unsent_bytes)
        self._served[channel] = running
        weakref.finalize(owner, self.end, running).atexit = False
        return running

    def _on_living_servers(self, model: ServedModel) -> ServedModel:
        """All workers agree on who lives, as rank 0 has it: of those that came later, the ones whom everybody knows."""
        living = self._job.gather_object([server for server in self.living_servers if server in self._services.ready])[0]
        if not living:
            raise JobError(f"all {len(self.all_servers)} servers of this job have died. Start the job again.")
        return msgspec.structs.replace(model, servers=living, replicas=min(model.replicas, len(living) - 1))

    @property
    def bytes_sent(self) -> int:
        return self._wire.bytes_sent

    def is_first_worker(self) -> bool:
        """Whether it is for this worker to do what one of them has to do: the lowest rank of those that have been here from the
        beginning, or, when none of these is left, the lowest of those that have come back. Workers that hear of a death or a
        return at different times may answer alike for a moment."""
        here = [rank for rank in range(self._job.world_size) if rank not in self._wire.lost]
        return self._job.rank == min(here, key=lambda rank: (self._wire.joined_in(rank) > 0, rank))

    def end(self, running: Running) -> None:
        """This worker needs the model no longer, and nobody is to wait for it. Sends, and waits for nobody."""
        if self._served.pop(running.channel, None) is None:
            return
        running.request(Quit())
        running.stop()
        self._control.request(StopService(running.channel, self.all_servers))

    def ledgers(self, running: Running) -> dict[int, ServerLedger]:
        """What the servers that live have counted of a model, by rank."""
        found: dict[int, ServerLedger] = self._wait_for(running.request(AskLedgers()), "what they have counted")
        return found

    def _wait_for(self, answer: Future[Any], what: str) -> Any:
        patience_s = self._job.timeouts.connect_s
        try:
            return answer.result(patience_s)
        except TimeoutError:
            raise StrettoError(f"the servers were asked {what} and have not answered within {patience_s:g} s.") from None

    def give_up(self, running: Running, error: WireError) -> None:
        """Whatever this worker waits for on that channel fails with `error`."""
        loop = self._communication.loop
        loop.call(lambda: loop.end(running, error))

    def stop(self) -> None:
        """Leave. Servers end when the last worker has left. A goodbye is no death, so they are told to count without it."""
        if self._watch is not None:
            self._watch.stop()
        if not self._job.leaves_in_order:
            self._communication.stop(self._job.timeouts.leave_s)
            self._wire.abandon()
            return
        for running in list(self._served.values()):
            running.request(Quit())
        with contextlib.suppress(StrettoError, TimeoutError):  # without it they notice that the connection is gone
            self._control.request(LeaveServers(self.all_servers)).result(self._job.timeouts.leave_s)
        self._communication.stop(self._job.timeouts.leave_s)
        self._wire.close()
        deadline = time.monotonic() + LEAVE_S
        while any(process.returncode is None for process in self.processes) and time.monotonic() < deadline:
            time.sleep(0.01)


def _same_model(one: ServedModel, other: ServedModel) -> bool:
    """Whether these are of the same model, though servers may have come and gone between them."""
    return all(getattr(one, name) == getattr(other, name) for name in ("parameters", "workers", "sync", "codecs")) and (
        {group: spec.name for group, spec in one.optimizers.items()}
        == {group: spec.name for group, spec in other.optimizers.items()}
    )


def network_of(job: Job, value: ParameterServer, num_clients: int) -> ServerNetwork:
    """The job's, opened by the first model that needs it. All workers call it together; `num_clients` of them will push."""
    dedicated = number_dedicated(job)
    num_servers = value.num_servers(num_clients, dedicated)
    key = 0 if value.is_dedicated(dedicated) else num_servers
    network = job.server_networks.get(key)
    if network is None:
        network = job.server_networks[key] = _beside(job, num_servers, value.restarts) if key else _dedicated(job)
        job.threads.add(network)
    assert isinstance(network, ServerNetwork)
    return network


def number_dedicated(job: Job) -> int:
    """How many servers were started apart from the workers."""
    return 0 if job.launch.servers is None else job.launch.servers.number


def _dedicated(job: Job) -> ServerNetwork:
    if job.life:
        job.meet_servers()
    assert job.to_servers is not None
    communication, job.to_servers = job.to_servers, None
    if job.tracer is not None and not job.life:  # one that has come back has not compared its clock with anybody's
        communication.loop.start(ClockTeller(job.tracer.now, job.clock, job.launch.run), CLOCK_CHANNEL)
    return ServerNetwork(job, communication, number_dedicated(job), watch=job.server_watch)


def _beside(job: Job, num_servers: int, restarts: int) -> ServerNetwork:
    first = job.world_size
    servers = range(first, first + num_servers)
    mine = [rank for rank, host in zip(servers, hosts_of_servers(job, num_servers), strict=True) if host == job.rank]
    if job.more_wires is not None:
        wire: Wire = _threads(job, mine, num_servers)
        processes, launch = list[subprocess.Popen[bytes]](), None
    elif job.life:
        launch, processes = _launch_of_returned(job, num_servers), []
        wire = join_network(launch, job.timeouts)
    else:
        wire, processes, launch = _processes(job, mine, num_servers, restarts)
    communication = CommunicationThread(Communicator(wire, job.timeouts))
    watch = None if launch is None else admit_newcomers(launch, communication)
    network = ServerNetwork(job, communication, num_servers, processes, watch)
    if job.rank == 0:
        log.info("%d servers beside %d workers keep the shards of the model", num_servers, job.world_size)
    return network


def hosts_of_servers(job: Job, num_servers: int) -> list[int]:
    """The worker that starts each server: one of every host before any host has a second one."""
    ranks = sorted(range(job.world_size), key=lambda rank: (job.peers[rank].local_rank, rank))
    return [ranks[number % len(ranks)] for number in range(num_servers)]


def _threads(job: Job, mine: Sequence[int], num_servers: int) -> Wire:
    assert job.more_wires is not None
    wires = job.more_wires(f"servers {num_servers}", job.world_size + num_servers)
    for rank in mine:
        serving = (wires[rank], range(job.world_size), job.timeouts)
        threading.Thread(target=serve, args=serving, name=f"server {rank}", daemon=True).start()
    return wires[job.rank]


def _processes(
    job: Job, mine: Sequence[int], num_servers: int, restarts: int
) -> tuple[Wire, list[subprocess.Popen[bytes]], Launch]:
    launch = place_in(job, f"servers {num_servers}", job.world_size + num_servers, "workers and servers")
    environ = _environment_of_servers()
    timeouts = dataclasses.replace(job.timeouts, meet_s=job.timeouts.connect_s)  # all are started here and now
    processes: list[subprocess.Popen[bytes]] = []
    met = threading.Event()
    try:
        for rank in mine:
            processes.append(_start_process(launch, rank, job, timeouts, environ, restarts))
            threading.Thread(target=_attend, args=(processes[-1], launch, rank, met), name="stretto-server", daemon=True).start()
        wire = join_network(launch, timeouts)
        met.set()
    except BaseException as error:
        met.set()
        for process in processes:
            process.kill()
        if isinstance(error, JobError):
            ranks = f"{job.world_size} to {job.world_size + num_servers - 1}"
            raise JobError(f"the servers, which are ranks {ranks} here, did not start: {error}") from error
        raise
    return wire, processes, launch


def _environment_of_servers() -> dict[str, str]:
    """Without the job's secret: they have no use for it, and their own comes on standard input."""
    # A module in the working directory must not hide one that a server needs.
    environ = coordinator_process.importing_stretto(own_environment()) | {"PYTHONSAFEPATH": "1"}
    environ.pop("STRETTO_SECRET", None)
    return environ


def _attend(process: subprocess.Popen[bytes], launch: Launch, rank: int, met: threading.Event) -> None:
    """Wait for a child, so that it does not become a zombie. If it ends before all have met, nobody is to wait for it."""
    code = process.wait()
    if not met.is_set():
        how = f"exited with code {code}"
        report_ended(launch, [Ended(rank, 0, host_identity(), process.pid, 0, how)])


def _launch_of_returned(job: Job, num_servers: int) -> Launch:
    """For a worker that has come back: where the others have met is in the notes of the job."""
    launch = place_again(job, f"servers {num_servers}", job.world_size + num_servers)
    if launch is None:
        raise ConfigurationError(
            f"rank {job.rank} has come back, and this job has no {num_servers} servers beside its workers: no model was "
            f"distributed with them when the worker died.\nDistribute models with the same strategies as the others do."
        )
    return launch


def _trace_of(job: Job, server: int) -> ServerTrace | None:
    """Where a server writes its trace. Only the first servers of a job do: further ones have the same numbers."""
    if job.launch.trace is None or job.server_networks:
        return None
    offset_ns, uncertainty_ns = job.clock
    return ServerTrace(
        folder=os.path.abspath(job.launch.trace), run=job.launch.run, server=server, num_workers=job.world_size,
        clock_offset_ns=offset_ns, clock_uncertainty_ns=uncertainty_ns,
    )  # fmt: skip


def _start_process(
    launch: Launch, rank: int, job: Job, timeouts: Timeouts, environ: dict[str, str], restarts: int
) -> subprocess.Popen[bytes]:
    assert launch.secret is not None and launch.rendezvous is not None
    place = ServerPlace(
        rank=rank, local_rank=0, world_size=launch.world_size, workers=job.world_size, on_one_host=launch.one_host,
        rendezvous=launch.rendezvous, secret=launch.secret.hex(), encrypt=launch.encrypt, interface=launch.interface,
        timeouts=timeouts, trace=_trace_of(job, rank - job.world_size), ledger=job.launch.ledger,
    )  # fmt: skip
    server = [sys.executable, "-m", "stretto.aggregate.parameter_server.process"]
    keeper = [sys.executable, "-I", "-S", str(KEEPER), str(restarts), *server]
    process = subprocess.Popen(keeper, stdin=subprocess.PIPE, env=environ)
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(msgspec.json.encode(place))
    return process
