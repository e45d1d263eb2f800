"""A running job as one worker sees it: its place, its peers, its wire, and the collectives on it."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from multiprocessing.util import Finalize
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import msgspec
import torch

from stretto.collectives import catalogue
from stretto.collectives.admission import check_tensor
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.execute import Communicator
from stretto.collectives.hop import Hop
from stretto.collectives.plan import Kind
from stretto.collectives.reduction import check_op, dtype_code, dtype_name
from stretto.collectives.request import DEFAULT_SEGMENT_BYTES, Outside, Pending, Request
from stretto.collectives.staging import Staging
from stretto.collectives.whereabouts import Whereabouts
from stretto.errors import ConfigurationError
from stretto.launching.detect import Launch
from stretto.launching.introduce import farewell, find_rendezvous, introduce, local_address
from stretto.launching.ledger_file import write_ledger
from stretto.launching.membership import Peer
from stretto.observe import trace
from stretto.observe.clocks import clock_offset
from stretto.observe.ledger import Ledger
from stretto.plan.choose import Choices, Trial, choose, trials
from stretto.plan.network import LinkEstimate, measure, slowest
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire
from stretto.wire.tcp import TcpWire
from stretto.wire.zeromq import ZeroMQWire

WireName = Literal["auto", "tcp", "zeromq", "gloo", "nccl"]
WIRES: tuple[str, ...] = ("auto", "tcp", "zeromq", "gloo", "nccl")
LARGE_BYTES = 1 << 20  # from here on broadcast and all-gather use the plans that send least
MAX_OBJECT_BYTES = 64 << 20  # every rank holds world_size times the longest
CHOOSING_CHANNEL = 0
PUBLIC_CHANNEL = 1
TURNS = 6  # of each algorithm that `auto` tries out; the first one warms up

T = TypeVar("T")

log = logging.getLogger("stretto")


class Job:
    """One worker's view of the job. Made by `stretto.init()`; engines hold on to it."""

    def __init__(
        self, launch: Launch, peers: list[Peer], wire: Wire | None, timeouts: Timeouts, backend: str | None = None
    ) -> None:
        self.launch = launch
        self.backend = backend  # of torch.distributed, if tensors travel through it
        self.peers = peers
        self.wire = wire
        self.timeouts = timeouts
        self.pid = os.getpid()  # a forked child inherits the object, but neither its thread nor its place in the job
        self.wire_names = frozenset({"auto"})  # what `init(wire=...)` may have said to get this job
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.local_rank = launch.local_rank
        self.choices: Choices | None = None
        self.closed = False
        self.engines: WeakSet[Any] = WeakSet()  # of the models that train in this job
        self.threads: WeakSet[Any] = WeakSet()  # what has a stop() to be called before the job is left
        self.weight = 1.0  # of this worker's gradients in a mean; see `stretto.weight`
        self.at_exit: Finalize | None = None
        self.ledger = Ledger()
        self.tracer = None if launch.trace is None else trace.Tracer()
        self._clock = (0, 0)  # offset from rank 0's and its uncertainty, once measured
        self._collectives_of_ours = 0  # that nobody asked for: to compare clocks
        communicator = None if wire is None else Communicator(wire, timeouts, self.ledger, self.tracer)
        self._communication = None if communicator is None else CommunicationThread(communicator)
        self.whereabouts = Whereabouts() if communicator is None else communicator.whereabouts
        self._segment_bytes = DEFAULT_SEGMENT_BYTES if wire is None else wire.segment_bytes
        self._staging = Staging()
        self._sequences: dict[int, int] = {}  # channel -> how many collectives without a name of their own it has had
        self._here = _Here()
        self._channels = PUBLIC_CHANNEL
        self._lock = threading.Lock()

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: str = "mean", algorithm: str = "auto", *, label: str = "") -> torch.Tensor:
        check_tensor("all_reduce", tensor)
        check_op(op, tensor.dtype)
        dtype_code(tensor.dtype)
        if algorithm not in ("auto", "native"):
            catalogue.find(Kind.ALL_REDUCE, algorithm)
        self.check_usable()
        _tell_autograd(tensor)
        if algorithm == "native":
            return self._native_all_reduce(tensor, op, label)
        if self.world_size > 1:
            what = f"all_reduce({dtype_name(tensor.dtype)}[{tensor.numel()}], op={op}, algorithm=auto)"
            chosen = self.choose(tensor.numel() * tensor.element_size(), what) if algorithm == "auto" else algorithm
            self.run(Kind.ALL_REDUCE, tensor, chosen, op=op, label=label)
        return tensor

    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, *, name: tuple[int, int] | None = None, label: str = ""
    ) -> torch.Tensor:
        self.check_rank(root, "root")
        check_tensor("broadcast", tensor)
        self.check_usable()
        _tell_autograd(tensor)
        large = tensor.numel() * tensor.element_size() >= LARGE_BYTES
        self.run(Kind.BROADCAST, tensor, "chain" if large else "binomial", root=root, name=name, label=label)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        check_tensor("all_gather", tensor, writes=False)
        gathered = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        gathered[self.rank].copy_(tensor.detach())
        large = gathered.numel() * gathered.element_size() >= LARGE_BYTES
        self.run(Kind.ALL_GATHER, gathered, "ring" if large else "direct")
        return gathered

    def gather_object(self, value: Any) -> list[Any]:
        try:
            encoded = msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as problem:
            raise ConfigurationError(
                f"gather_object of a {type(value).__name__} that cannot be encoded ({problem}). It carries what is made of None, "
                f"bool, int, float, str, bytes, list and dict. Convert it to these; for tensors there is all_gather."
            ) from problem
        lengths = self.all_gather(torch.tensor([len(encoded)], dtype=torch.int64, device="cpu"))
        longest = int(lengths.max())
        if longest > MAX_OBJECT_BYTES:
            raise ConfigurationError(
                f"gather_object: a value of {longest} encoded bytes; the limit is {MAX_OBJECT_BYTES}. "
                f"Put large data into a tensor and use all_gather."
            )
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        rows = self.all_gather(padded).numpy()
        return [msgspec.msgpack.decode(rows[rank, : int(lengths[rank])].tobytes()) for rank in range(self.world_size)]

    def barrier(self, label: str = "") -> None:
        self.run(Kind.BARRIER, torch.empty(0, dtype=torch.uint8, device="cpu"), "dissemination", label=label)

    def run(
        self,
        kind: Kind,
        tensor: torch.Tensor,
        algorithm: str,
        *,
        op: str = "sum",
        root: int = 0,
        name: tuple[int, int] | None = None,
        label: str = "",
    ) -> None:
        """Run one collective of the catalogue on `tensor`, in place, and wait for it."""
        dtype_code(tensor.dtype)
        self.check_usable()
        if self.world_size == 1:
            return
        flat, bring_back = self._staging.borrow(tensor)
        self.start(kind, flat, algorithm, op=op, root=root, name=name, label=label).wait()
        bring_back()

    def start(
        self,
        kind: Kind,
        flat: torch.Tensor,
        algorithm: str,
        *,
        op: str = "sum",
        root: int = 0,
        segment_bytes: int | None = None,
        name: tuple[int, int] | None = None,
        ready: Callable[[], bool] | None = None,
        label: str = "",
        hop: Hop | None = None,
    ) -> Pending:
        """Begin a collective on flat host memory; it must not be touched until the result is waited for.

        `name` (channel, sequence) must be the same on all ranks; without it, the calls of this job are numbered in their order.
        Whoever has a channel of its own says which thread uses it: `whereabouts.claim`.
        `label` is compared between ranks, and shown when they disagree.
        `ready` says when the memory holds what is to be sent, if it does not yet (a copy from a GPU is under way).
        `hop` encodes every message of an all-reduce (`stretto.collectives.hop`).
        """
        plan = catalogue.plan(kind, algorithm, self.rank, self.world_size, root=root, group=self.workers_per_host)
        self.check_usable()
        assert self._communication is not None
        if name is None:
            self.whereabouts.claim(self._here.channel)
        with self._lock:
            if name is None:
                name = (self._here.channel, self._next_sequence())
            segment = segment_bytes or self._segment_bytes
            return self._communication.start(Request(plan, flat, op, *name, segment, label, hop), ready)

    def _next_sequence(self) -> int:
        channel = self._here.channel
        sequence = self._sequences.get(channel, 0)
        self._sequences[channel] = (sequence + 1) & 0xFFFFFFFF
        return sequence

    def new_channel(self) -> int:
        """A stream of collectives of its own. All ranks must ask for their channels in the same order."""
        self._channels += 1
        return self._channels

    def _native_all_reduce(self, tensor: torch.Tensor, op: str, label: str) -> torch.Tensor:
        from stretto.wire.torch_group import TorchGroupWire  # brings in torch.distributed, which others do without

        wire = self.wire
        if self.world_size == 1 and self.backend is not None:
            return tensor
        if not isinstance(wire, TorchGroupWire):
            raise ConfigurationError(
                'all_reduce(algorithm="native") is the torch backend\'s own collective, and this job runs on another wire.\n'
                'Start it with stretto.init(wire="gloo") or stretto.init(wire="nccl"), or use algorithm="auto".'
            )
        communication = self._communication
        assert communication is not None
        self.whereabouts.claim(self._here.channel)
        with self._lock:
            sequence = self._next_sequence()
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        belief = f"all_reduce({dtype_name(tensor.dtype)}[{tensor.numel()}], op={op}, algorithm=native)"
        other = Outside((self._here.channel, sequence), belief + label)

        def carry_out() -> None:
            with communication.communicator.outside(other):
                patience_s = self.timeouts.arrive_s
                wire.native_all_reduce(tensor, op, sequence, patience_s, stream, label=label, given_up=lambda: other.error)

        with self.whereabouts.waiting(self._here.channel, other):
            communication.call(carry_out)
        return tensor

    # -- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, num_bytes: int, what: str = "") -> str:
        """The all-reduce for this size. The first call measures the links: all ranks must make it together, for one `what`."""
        if self.choices is None:
            self.barrier(f" to choose for {what}")
            with self._on_channel(CHOOSING_CHANNEL):  # its many collectives must not meet calls of the user's
                self.choices = self._make_choices()
        return self.choices.algorithm(num_bytes)

    @contextmanager
    def _on_channel(self, channel: int) -> Iterator[None]:
        before, self._here.channel = self._here.channel, channel
        try:
            yield
        finally:
            self._here.channel = before

    def _make_choices(self) -> Choices:
        group = self.workers_per_host
        mine = measure(
            self.world_size,
            self.barrier,
            lambda probe: self.run(Kind.ALL_REDUCE, probe, "ring"),
            lambda seconds: max(self.gather_object(seconds)),
        )
        everybody = [msgspec.convert(one, LinkEstimate) for one in self.gather_object(msgspec.to_builtins(mine))]
        link = slowest(everybody)
        # Everybody computes the same from the same numbers; rank 0's word counts, should a rounding differ between machines.
        wanted = self._as_rank_0(trials(self.world_size, link, self._segment_bytes, group), list[Trial])
        tried = self._try_out(wanted)
        return self._as_rank_0(choose(self.world_size, link, self._segment_bytes, group, tried), Choices)

    def _as_rank_0(self, value: T, kind: type[T]) -> T:
        return msgspec.convert(self.gather_object(msgspec.to_builtins(value))[0], kind)

    def _try_out(self, wanted: list[Trial]) -> dict[Trial, float]:
        """How long each trial takes: the median over its turns of the slowest rank's time. All take turns, so that whatever else
        the machines do hits all of them alike."""
        if not wanted:
            return {}
        times = torch.tensor([[self._time(trial) for trial in wanted] for _ in range(TURNS)], dtype=torch.float64, device="cpu")
        medians = self.all_gather(times).amax(dim=0)[1:].median(dim=0).values
        return dict(zip(wanted, medians.tolist(), strict=True))

    def _time(self, trial: Trial) -> float:
        probe = torch.zeros(trial.num_bytes // 4, dtype=torch.float32, device="cpu")
        self.barrier()
        begin = time.perf_counter()
        self.run(Kind.ALL_REDUCE, probe, trial.algorithm)
        return time.perf_counter() - begin

    @contextmanager
    def weighing(self, weight: float) -> Iterator[None]:
        """For a while, this worker's gradients count with another weight."""
        before, self.weight = self.weight, weight
        try:
            yield
        finally:
            self.weight = before

    @cached_property
    def workers_per_host(self) -> int:
        """How many consecutive ranks share a host, if that is the same number everywhere; else 1."""
        hosts = [peer.host for peer in self.peers]
        counts = set(Counter(hosts).values())
        group = next(iter(counts)) if len(counts) == 1 else 1
        blocks = all(len(set(hosts[i : i + group])) == 1 for i in range(0, len(hosts), group))
        return group if blocks else 1

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    # -- checks and the end -------------------------------------------------------------------------------------------

    def check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigurationError(
                f"{what}={rank} in a job of {self.world_size}: ranks are 0 to {self.world_size - 1}. Write one of these."
            )

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

    @property
    def is_here(self) -> bool:
        """Whether this is the process that joined it, and not one that was forked from it later."""
        return os.getpid() == self.pid

    def close(self, *, goodbye: bool) -> None:
        """Leave the job. Without `goodbye` the others see a lost peer: for an exit with an exception in flight."""
        if self.closed:
            return
        self.closed = True
        if not self.is_here:
            return  # the connections are the parent's, which goes on using them
        if goodbye:
            self._say_if_unused()
        for thread in list(self.threads):
            thread.stop()
        if self._communication is not None and self.wire is not None:
            self._communication.stop(self.timeouts.leave_s)
            self.write_trace()
            if goodbye:
                self.wire.close()
            else:
                self.wire.abandon()
            if self.launch.ledger is not None:
                write_ledger(self.launch.ledger, self.wire.bytes_sent)
        else:
            self.write_trace()
        if goodbye:
            farewell(self.launch)

    def _say_if_unused(self) -> None:
        """Collectives take all workers, so what rank 0 has not called nobody has. Workers may well have nothing to do with each
        other (`stretto.launch` of a function that computes something); it is training that they should not do alone."""
        unused = self.ledger.collectives.total() == self._collectives_of_ours
        if self.rank == 0 and self.world_size > 1 and unused and was_made(torch.optim.Optimizer):
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
            if self.world_size > 1:
                self._clock = clock_offset(self.rank, self.barrier, self.gather_object, self.tracer.now)
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
            clock_offset_ns=self._clock[0],
            clock_uncertainty_ns=self._clock[1],
        )
        try:
            trace.write(self.launch.trace, self.tracer, about)
        except OSError as problem:  # at the end of a job: what it computed counts for more
            log.error("rank %d: its trace could not be written: %s", self.rank, problem)


class _Here(threading.local):
    """The channel of the calls that a thread makes without a name. Only while it chooses is that another than the public one."""

    channel = PUBLIC_CHANNEL


def _tell_autograd(tensor: torch.Tensor) -> None:
    """Results are written to memory that autograd may have saved for a backward, which must then raise and not use them."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


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
        job = Job(launch, introduce(launch, "", timeouts).peers, None, timeouts, backend)
        job.wire_names |= {wire} if backend else {"tcp", "zeromq"}  # nothing travels
        return job
    if launch.encrypt and wire not in ("auto", "zeromq"):
        raise ConfigurationError(
            f'wire="{wire}" does not encrypt, and this job spans several hosts, where encryption is on.\n'
            f'Use wire="zeromq" (or "auto"), or, on a network that you trust, set STRETTO_ENCRYPT=off on every node.'
        )
    launch = find_rendezvous(launch, timeouts)
    ours = _make_wire(launch, timeouts, wire)
    try:
        table = introduce(launch, ours.address, timeouts)
        ours.connect(table.peers, table.nonce)
    except BaseException:
        ours.abandon()
        raise
    whole = ours if backend is None else _through_torch(backend, ours, timeouts)
    job = Job(launch, table.peers, whole, timeouts, backend)
    job.wire_names |= {backend or ("tcp" if isinstance(ours, TcpWire) else "zeromq")}
    return job


def _make_wire(launch: Launch, timeouts: Timeouts, wire: WireName) -> TcpWire | ZeroMQWire:
    """Encrypted: ZeroMQ. Plain: TCP, unless ZeroMQ is asked for."""
    assert launch.secret is not None
    host, _ = local_address(launch)
    common: dict[str, Any] = {"secret": launch.secret, "bind": host, "timeouts": timeouts}
    if launch.encrypt or wire == "zeromq":
        return ZeroMQWire(launch.rank, launch.world_size, **common)
    return TcpWire(launch.rank, launch.world_size, write_in_thread=_processors_to_spare(launch), **common)


def _through_torch(backend: str, ours: TcpWire | ZeroMQWire, timeouts: Timeouts) -> Wire:
    from stretto.wire.torch_group import TorchGroupWire, torch_group

    try:
        group = torch_group(backend, ours.rank, ours.world_size, timeout_s=timeouts.connect_s)
    except BaseException:
        ours.abandon()
        raise
    return TorchGroupWire(ours, group, timeouts=timeouts)


def _processors_to_spare(launch: Launch) -> bool:
    """Whether each worker of this host has a processor for training, one for communication, and one more."""
    return len(os.sched_getaffinity(0)) >= 3 * launch.local_world_size
