"""A running job as one worker sees it: its place, its peers, its wire, and the collectives on it."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch

from stretto.collectives import calls, catalogue
from stretto.collectives.admission import check_tensor
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.endpoint import PUBLIC_CHANNEL as PUBLIC_CHANNEL
from stretto.collectives.endpoint import Endpoint
from stretto.collectives.execute import Communicator
from stretto.collectives.group import Group
from stretto.collectives.newcomers import admit_newcomers
from stretto.collectives.plan import Kind
from stretto.collectives.reduction import check_op, dtype_code, dtype_name
from stretto.collectives.started import Started
from stretto.errors import ConfigurationError, JobError, StrettoError, WireError
from stretto.launching.detect import Launch
from stretto.launching.introduce import farewell, find_rendezvous, introduce, local_address
from stretto.launching.introduction_messages import Table
from stretto.launching.ledger_file import write_ledger
from stretto.launching.peers import Peer
from stretto.launching.return_watch import ReturnWatch
from stretto.launching.server_meeting import did_not_meet, launch_of_worker, open_rendezvous
from stretto.observe import trace
from stretto.observe.clocks import clock_offset
from stretto.observe.ledger import Ledger
from stretto.observe.progress import Progress
from stretto.plan.auto import chosen_for
from stretto.plan.choose import Choices
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire
from stretto.wire.tcp import TcpWire
from stretto.wire.zeromq import ZeroMQWire

if TYPE_CHECKING:
    from stretto.wire.torch_native import NativeGroup

WireName = Literal["auto", "tcp", "zeromq", "gloo", "nccl"]
WIRES: tuple[str, ...] = ("auto", "tcp", "zeromq", "gloo", "nccl")
log = logging.getLogger("stretto")


class Job:
    """One worker's view of the job. Made by `stretto.init()`; engines hold on to it. Its collectives are those of `world`, the
    group of all workers."""

    def __init__(
        self, launch: Launch, peers: list[Peer], wire: Wire | None, timeouts: Timeouts, native: NativeGroup | None = None
    ) -> None:
        self.launch = launch
        self.native = native  # a process group of torch's, for algorithm="native"
        self.peers = self.all_peers = peers  # by rank; of all workers also where a group of them is a job of its own
        self.wire = wire
        self.timeouts = timeouts
        self.pid = os.getpid()  # a forked child inherits the object, but neither its thread nor its place in the job
        self.wire_names = frozenset({"auto"})  # what `init(wire=...)` may have said to get this job
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.local_rank = launch.local_rank
        self.closed = False
        self.leaves_in_order = True  # with a goodbye, and not because of an exception
        self.engines: WeakSet[Any] = WeakSet()  # of the models that train in this job
        self.threads: WeakSet[Any] = WeakSet()  # and fabrics: what has a stop() to be called before the job is left
        self.to_servers: CommunicationThread | None = None  # that were started apart, until a `ServerNetwork` takes it over
        self.server_watch: ReturnWatch | None = None  # who joins these servers later
        # Number of servers beside the workers, 0 for those that were started apart -> `ServerNetwork`, once they are used
        self.server_networks: dict[int, Any] = {}
        self.peer_network: Any = None  # `PeerNetwork`, once workers are to reach each other one to one
        self.pair_matching: Any = None  # what pairs sends with receives by tag, once torch.distributed runs here
        self.declared: dict[str, Any] = {}  # keys of `stretto.push` and `pull` -> `StoredTensor`
        self.more_wires: Callable[[str, int], list[Wire]] | None = None  # in tests: of workers and servers that are threads
        self.weight = 1.0  # of this worker's gradients in a mean; see `stretto.weight`
        self.at_exit: Finalize | None = None
        self.ledger = Ledger()
        self.progress: Progress | None = None  # while lines on how training goes are wanted
        self.tracer = None if launch.trace is None else trace.Tracer()
        self.clock = (0, 0)  # offset from rank 0's and its uncertainty, once measured
        self._collectives_of_ours = 0  # that nobody asked for: to compare clocks
        communicator = None if wire is None else Communicator(wire, timeouts, self.ledger, self.tracer)
        self._communication = None if communicator is None else CommunicationThread(communicator)
        self.life = peers[self.rank].generation if peers else 0  # more than 0: this worker has come back, see `returning.py`
        self.notes: dict[str, str] = {}  # that others have left for whoever comes back
        self.first_step = 0  # at which this worker takes part: when it has come back, that of the slowest
        self.endpoint = Endpoint(self.rank, [peer.host for peer in peers], self._communication, self._check_collective)
        self.whereabouts = self.endpoint.whereabouts
        self.world = Group(self.endpoint, tuple(range(self.world_size)))
        self.start, self.run, self.new_channel = self.world.start, self.world.run, self.world.new_channel

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: str = "mean", algorithm: str = "auto", *, label: str = "") -> torch.Tensor:
        return self.start_all_reduce(tensor, op, algorithm, self.world, label=label).wait()

    def start_all_reduce(
        self, tensor: torch.Tensor, op: str, algorithm: str, group: Group, *, label: str = ""
    ) -> Started[torch.Tensor]:
        check_tensor("all_reduce", tensor)
        check_op(op, tensor.dtype)
        dtype_code(tensor.dtype)
        if algorithm not in ("auto", "native"):
            catalogue.find(Kind.ALL_REDUCE, algorithm)
        self.check_usable()
        calls.tell_autograd(tensor)
        if algorithm == "native":
            self._native_all_reduce(tensor, op, group, label)
            return Started(None, lambda: tensor)
        if algorithm == "auto" and group.size > 1:
            what = f"all_reduce({dtype_name(tensor.dtype)}[{tensor.numel()}], op={op}, algorithm=auto)"
            algorithm = chosen_for(group, what).algorithm(tensor.numel() * tensor.element_size())
        return group.begin(Kind.ALL_REDUCE, tensor, algorithm, lambda: tensor, op=op, label=label)

    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, *, name: tuple[int, int] | None = None, label: str = ""
    ) -> torch.Tensor:
        return calls.start_broadcast(self.world, tensor, root, name, label).wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return calls.start_all_gather(self.world, tensor).wait()

    def gather_object(self, value: Any) -> list[Any]:
        return calls.gather_object(self.world, value)

    def barrier(self, label: str = "") -> None:
        calls.start_barrier(self.world, label).wait()

    def choose(self, num_bytes: int, what: str = "") -> str:
        """The all-reduce for this size. The first call measures the links: all ranks must make it together, for one `what`."""
        return chosen_for(self.world, what).algorithm(num_bytes)

    @property
    def choices(self) -> Choices | None:
        """What `algorithm="auto"` has chosen among all workers, if it was asked before."""
        assert isinstance(self.world.choices, Choices | None)
        return self.world.choices

    @choices.setter
    def choices(self, table: Choices | None) -> None:
        self.world.choices = table

    @property
    def workers_per_host(self) -> int:
        """How many consecutive ranks share a host, if that is the same number everywhere; else 1."""
        return self.world.workers_per_host

    def _native_all_reduce(self, tensor: torch.Tensor, op: str, group: Group, label: str) -> None:
        if group.size == 1 and not self.wire_names.isdisjoint(("gloo", "nccl")):
            return
        if self.native is None:
            raise ConfigurationError(
                'all_reduce(algorithm="native") is the torch backend\'s own collective, and this job runs on another wire.\n'
                'Start it with stretto.init(wire="gloo") or stretto.init(wire="nccl"), or use algorithm="auto".'
            )
        if not group.is_world:
            raise ConfigurationError(
                f'all_reduce(algorithm="native", group={group!r}): the torch backend was joined by all workers of the job, and '
                f'its collectives take all of them.\nUse algorithm="auto" in a group.'
            )
        dtype, size = dtype_name(tensor.dtype), self.world_size
        what = f"all_reduce({dtype}[{tensor.numel()}], op={op}, algorithm=native, world_size={size}){label}"
        objection = self.native.objection(tensor, op)
        if objection is not None:
            self._excuse_from(what, objection)
            raise objection
        self.native.all_reduce(tensor, op, what, lambda: self.barrier(f" before {what}"))

    def _excuse_from(self, what: str, why: StrettoError) -> None:
        """The others wait, or will, for this worker to come to that: have them told at once that it does not, and why."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        # Never ready: nothing of it is sent before it fails, so that the others hear the reason and not of a different call.
        meeting = self.world.start(Kind.BARRIER, nothing, "dissemination", label=f" before {what}", ready=lambda: False)
        self.world.fail(meeting, WireError(f"rank {self.rank} does not take part in {what}: {why}"))

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    # -- checks and the end -------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Refuse collectives of a job that was left, and in a process that has only inherited it."""
        if self.closed:
            raise ConfigurationError("this job was shut down. Call stretto.init() once, before its collectives.")
        if not self.is_here:
            raise ConfigurationError(
                f"a collective in process {os.getpid()}, which was forked from rank {self.rank} (process {self.pid}) and is no "
                f"worker of the job: the thread and the connections that it needs are the parent's.\n"
                f"Call it in the process that called stretto.init(), not in a DataLoader worker (dataset, collate_fn) or another "
                f"child. There you have rank(), world_size() and device()."
            )

    def _check_collective(self) -> None:
        self.check_usable()
        if self.life:
            raise ConfigurationError(
                f"a collective on rank {self.rank}, which has come back to a job that went on without it: collectives (barrier, "
                f"all_reduce, gather_object, save, load, ...) take all workers from the beginning on, and the others have lost "
                f"this one.\nTrain with servers that step, which need none, and call collectives only where job.life is 0 "
                f"(job = stretto.init())."
            )

    @property
    def missing(self) -> list[int]:
        """Ranks that have died or left, as far as this worker has heard: no collective takes all workers any more."""
        if self.life:
            return [rank for rank in range(self.world_size) if rank != self.rank]
        return [] if self.wire is None else sorted(self.wire.lost)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that joined it, and not one that was forked from it later."""
        return os.getpid() == self.pid

    def close(self, *, goodbye: bool) -> None:
        """Leave the job. Without `goodbye` the others see a lost peer: for an exit with an exception in flight."""
        if self.closed:
            return
        self.closed, self.leaves_in_order = True, goodbye
        if not self.is_here:
            return  # the connections are the parent's, which goes on using them
        if goodbye:
            self._say_if_unused()
        for thread in list(self.threads):
            thread.stop()
        if self.to_servers is not None:
            if self.server_watch is not None:
                self.server_watch.stop()
            if goodbye and self.rank == 0:
                log.warning("the servers of this job were not used: no model was distributed with aggregate=ParameterServer()")
            _end(self.to_servers, self.timeouts, goodbye=goodbye)
        if self._communication is not None and self.wire is not None:
            self._communication.stop(self.timeouts.leave_s)
            self.write_trace()
            if goodbye:
                self.wire.close()
            else:
                self.wire.abandon()
            if self.native is not None:
                self.native.stop()
            if self.launch.ledger is not None:
                networks = [*self.server_networks.values(), *filter(None, [self.peer_network])]
                write_ledger(self.launch.ledger, self.wire.bytes_sent + sum(network.bytes_sent for network in networks))
        else:
            self.write_trace()
        if goodbye:
            farewell(self.launch)

    def meet_servers(self) -> None:
        """Where servers were started apart: wait for them, and connect. On all ranks; one that has come back finds them."""
        if self.launch.servers is None:
            return
        ours = launch_of_worker(self.launch)
        if self.life:
            ours = dataclasses.replace(ours, restart=self.life)
        else:
            self._open_rendezvous(ours)
        try:
            wire = meet(ours, self.timeouts, accept_later=True)
        except JobError as error:
            raise did_not_meet(self.launch, error) from error
        self.to_servers = CommunicationThread(Communicator(wire, self.timeouts))
        self.server_watch = admit_newcomers(ours, self.to_servers)

    def _open_rendezvous(self, ours: Launch) -> None:
        """Where workers and servers meet. On all ranks."""
        problem = ""
        try:
            open_rendezvous(ours, self.timeouts)
        except (JobError, OSError) as error:
            problem = str(error)
        problem = self.gather_object(problem)[0]
        self._collectives_of_ours = self.ledger.collectives.total()
        if problem:
            raise JobError(f"rank 0 could not start the coordinator at which workers and servers meet: {problem}")

    def _say_if_unused(self) -> None:
        """Collectives take all workers, so what rank 0 has not called nobody has. Workers may well have nothing to do with each
        other (`stretto.launch` of a function that computes something); it is training that they should not do alone."""
        unused = self.ledger.collectives.total() == self._collectives_of_ours
        if self.rank == 0 and self.world_size > 1 and not self.life and unused and was_made(torch.optim.Optimizer):
            log.warning(
                "this job of %d workers is over, and none of them has called stretto.distribute() or a collective: each has "
                "worked alone, on a model of its own. To train one model together, call model, optimizer = "
                "stretto.distribute(model, optimizer) after stretto.init().",
                self.world_size,
            )

    def begin_trace(self) -> None:
        """If tracing was asked for: make sure that it can be written, and learn how the workers' clocks differ. On all ranks."""
        if self.tracer is not None and self.launch.trace is not None:
            trace.prepare(self.launch.trace)
            if self.world_size > 1 and not self.life:
                self.clock = clock_offset(self.rank, self.barrier, self.gather_object, self.tracer.now)
                self._collectives_of_ours = self.ledger.collectives.total()

    def write_trace(self) -> None:
        """Write what was traced so far to this rank's file, if tracing was asked for."""
        if self.tracer is None or self.launch.trace is None:
            return
        about = trace.About(
            rank=self.rank,
            world_size=self.world_size,
            run=self.launch.run,
            host=platform.node(),
            num_spans=len(self.tracer.spans),
            num_dropped=self.tracer.num_dropped,
            clock_offset_ns=self.clock[0],
            clock_uncertainty_ns=self.clock[1],
            staleness=dict(self.ledger.staleness),
            held_s={rank: held_ns / 1e9 for rank, held_ns in self.ledger.held_ns.items()},
        )
        try:
            trace.write(self.launch.trace, self.tracer, about)
        except OSError as problem:  # at the end of a job: what it computed counts for more
            log.error("rank %d: its trace could not be written: %s", self.rank, problem)


def was_made(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether this process has ever made such an optimizer: the first of a class makes torch wrap that class's `step`."""
    classes = [kind]
    for each in classes:  # grows while we go
        classes += each.__subclasses__()
    return any(getattr(each.step, "hooked", False) for each in classes)


def check_wire(wire: str) -> None:
    if wire not in WIRES:
        raise ConfigurationError(f"wire={wire!r} is not known. Write one of {', '.join(map(repr, WIRES))}.")


def join(launch: Launch, timeouts: Timeouts, wire: WireName = "auto") -> Job:
    """Find the others and connect to all of them."""
    check_wire(wire)
    backend = wire if wire in ("gloo", "nccl") else None
    if launch.world_size == 1:
        job = Job(launch, introduce(launch, "", timeouts).peers, None, timeouts)
        job.wire_names |= {wire} if backend else {"tcp", "zeromq"}  # nothing travels
        return job
    if launch.encrypt and wire not in ("auto", "zeromq"):
        raise ConfigurationError(
            f'wire="{wire}" does not encrypt, and this job spans several hosts, where encryption is on.\n'
            f'Use wire="zeromq" (or "auto"), or, on a network that you trust, set STRETTO_ENCRYPT=off on every node.'
        )
    launch = find_rendezvous(launch, timeouts)
    ours = make_wire(launch, timeouts, wire)
    try:
        table = introduce(launch, ours.address, timeouts)
        if table.peers[launch.rank].generation:
            ours.abandon()
            return _return(launch, table, timeouts)
        ours.connect(table.peers, table.nonce)
    except BaseException:
        ours.abandon()
        raise
    job = Job(launch, table.peers, ours, timeouts, None if backend is None else _native_group(backend, ours, timeouts))
    job.wire_names |= {backend or ("tcp" if isinstance(ours, TcpWire) else "zeromq")}
    try:
        job.meet_servers()
    except BaseException:
        job.close(goodbye=False)
        raise
    return job


def _return(launch: Launch, table: Table, timeouts: Timeouts) -> Job:
    job = Job(launch, table.peers, None, timeouts)
    job.notes = table.notes
    log.warning("rank %d has come back to its job, without a connection to other workers", job.rank)
    return job


def meet(launch: Launch, timeouts: Timeouts, *, accept_later: bool = False) -> TcpWire | ZeroMQWire:
    """Introduced and connected to all others of a job, whose coordinator has done its work then, unless some may come later."""
    wire = make_wire(launch, timeouts, "auto", accept_later=accept_later)
    try:
        table = introduce(launch, wire.address, timeouts)
        wire.connect(table.peers, table.nonce)
        wire.leave_room(range(launch.world_size, launch.world_size + launch.room))
    except BaseException:
        wire.abandon()
        raise
    if not accept_later:
        farewell(launch)
    return wire


def _end(communication: CommunicationThread, timeouts: Timeouts, *, goodbye: bool) -> None:
    wire = communication.communicator.wire
    communication.stop(timeouts.leave_s)
    if goodbye:
        wire.close()
    else:
        wire.abandon()


def make_wire(launch: Launch, timeouts: Timeouts, wire: WireName, *, accept_later: bool = False) -> TcpWire | ZeroMQWire:
    """Encrypted: ZeroMQ. Plain: TCP, unless ZeroMQ is asked for."""
    assert launch.secret is not None
    host, _ = local_address(launch)
    common: dict[str, Any] = {"secret": launch.secret, "bind": host, "timeouts": timeouts, "accept_later": accept_later}
    if launch.encrypt or wire == "zeromq":
        return ZeroMQWire(launch.rank, launch.world_size, **common)
    return TcpWire(launch.rank, launch.world_size, write_in_thread=_processors_to_spare(launch), **common)


def _native_group(backend: str, ours: Wire, timeouts: Timeouts) -> NativeGroup:
    from stretto.wire.torch_group import torch_group  # brings in torch.distributed, which others do without
    from stretto.wire.torch_native import NativeGroup

    try:
        group = torch_group(backend, ours.rank, ours.world_size, timeout_s=timeouts.connect_s)
        return NativeGroup(group, ours, timeouts.arrive_s)
    except BaseException:
        ours.abandon()
        raise


def _processors_to_spare(launch: Launch) -> bool:
    """Whether each worker of this host has a processor for training, one for communication, and one more."""
    return len(os.sched_getaffinity(0)) >= 3 * launch.local_world_size
