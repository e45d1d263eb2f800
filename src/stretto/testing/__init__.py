"""Run a program of several ranks inside one test, in threads, with nothing that can hang.

    run_threads(3, program)                              real time
    run_virtual(64, program, model=NetworkModel(...))    virtual time: reproducible, with links, faults and a clock of its own
    run_jobs(3, train)                                   real time; each rank gets a whole job, to train in

`program(wire, *args)` is what one rank does (`train(job, *args)` for `run_jobs`); the results come back in the order of ranks.
The first rank that raises ends the others (their wires are killed), and its exception is raised here, with the rank's own
traceback. A rank that neither returns nor raises in time gives `RanksHung`, which shows where every rank stands. Threads that a
program leaves behind are an error.

A complete example, a tensor-free ring shift:

>>> from stretto.wire.base import Tag, Wire
>>> def shift(wire: Wire) -> bytes:
...     right, left = (wire.rank + 1) % wire.world_size, (wire.rank - 1) % wire.world_size
...     arrived: list[bytes] = []
...     mine = bytes([wire.rank])
...     sent = wire.send(memoryview(mine), to=right, tag=Tag(1, 0, 0), dtype=0)
...     got = wire.recv(left, Tag(1, 0, 0), 1, 0, lambda view: arrived.append(bytes(view)))
...     wait_for(wire, sent, got)
...     return arrived[0]
>>> run_threads(3, shift)
[b'\\x02', b'\\x00', b'\\x01']

The same program on a network of 1 ms latency, and when it was over:

>>> from stretto.testing.network_model import Link, NetworkModel
>>> model = NetworkModel(Link(latency_s=1e-3))
>>> run_virtual(3, lambda wire: (shift(wire), wire.now()), model=model)
[(b'\\x02', 0.001), (b'\\x00', 0.001), (b'\\x01', 0.001)]

Faults are values; each test asserts that its own had an effect:

>>> from stretto.errors import PeerLost
>>> from stretto.testing.faults import Kill
>>> from stretto.testing.virtual import virtual_world
>>> def survive(wire: Wire) -> str:
...     try:
...         wait_for(wire, wire.recv(1, Tag(1, 0, 0), 1, 0, lambda view: None))
...     except PeerLost as lost:
...         return f"at {wire.now():g} s: {lost}"
...     return "no"
>>> wires = virtual_world(2, faults=[Kill(1, at_s=0.5)])
>>> run_threads(2, survive, wires=wires)
['at 0.51 s: rank 1 is lost: its process died', None]
>>> wires[0].world.assert_all_fired()
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stretto.errors import ConfigurationError, WireTimeout
from stretto.launching.detect import Launch
from stretto.launching.peers import Peer
from stretto.testing.faults import Fault
from stretto.testing.in_process import InProcessWire, WireKilled
from stretto.testing.network_model import NetworkModel
from stretto.testing.threads import threads_world
from stretto.testing.virtual import VirtualWire, virtual_world
from stretto.timeouts import Timeouts
from stretto.wire.base import Handle, Wire

__all__ = ["RanksHung", "ThreadsLeft", "run_jobs", "run_threads", "run_virtual", "wait_for"]

GRACE_S = 10.0  # at most: for threads to unwind once their wires are dead, or to end by themselves after a run


class RanksHung(AssertionError):
    """Some ranks neither returned nor raised in time; the message has every rank's stack."""


class ThreadsLeft(AssertionError):
    """The program has ended but threads it started have not."""


def wait_for(wire: Wire, *handles: Handle, timeout_s: float = 30.0) -> None:
    """Make progress until all handles are done; raise the first error among them. The time is the wire's."""
    deadline = wire.now() + timeout_s
    for handle in handles:
        while not handle.done:
            left = deadline - wire.now()
            if left <= 0:
                raise WireTimeout(handle.peer, str(handle.tag), timeout_s)
            wire.progress(left)
    for handle in handles:
        if handle.error is not None:
            raise handle.error


def run_threads(
    size: int,
    program: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    wires: Sequence[Wire] | None = None,
) -> list[Any]:
    """Run `program(wire, *args)` as ranks 0..size-1 and return their results. See the module's text.

    Without `wires` the ranks get a fresh `threads_world(size, check=True)`, closed rank by rank as they return: a rank
    that waits for one that has returned gets `PeerLost`. Given wires stay open, but a virtual one no longer holds the
    clock once its rank has returned. The place of a rank that was killed (its `WireKilled` escaped) holds None.
    """
    if wires is None:
        return _run_ranks(threads_world(size, check=True), program, args, timeout_s, close=True)
    if len(wires) != size:
        raise ConfigurationError(f"run_threads({size}, wires=...): {len(wires)} wires for {size} ranks. Give one for each.")
    return _run_ranks(wires, program, args, timeout_s, close=False)


def run_virtual(
    size: int,
    program: Callable[..., Any],
    *args: Any,
    model: NetworkModel | None = None,
    seed: int = 0,
    faults: Iterable[Fault] = (),
    timeout_s: float = 60.0,
    check: bool = False,
) -> list[Any]:
    """`run_threads` on a `virtual_world`; all injected faults must have had an effect. `timeout_s` is real time.

    The program's wire is a `VirtualWire`: `wire.now()` is virtual, `wire.compute(seconds)` passes time, `wire.world`
    has the trace.

    >>> run_virtual(2, lambda wire: (wire.compute(3600), wire.now())[1])
    [3600.0, 3600.0]
    """
    wires = virtual_world(size, model, seed, faults, check=check)
    results = _run_ranks(wires, program, args, timeout_s, close=True)
    wires[0].world.assert_all_fired()
    return results


def run_jobs(
    size: int,
    program: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    timeouts: Timeouts | None = None,
    hosts: Sequence[str] | None = None,
) -> list[Any]:
    """Run `program(job, *args)` as ranks 0..size-1, each in a thread with a job of its own, as `stretto.init()` would give it.

    Inside, `stretto.rank()`, `stretto.distribute(...)` and the like mean that rank. Jobs are closed as ranks return: who goes on
    waiting for one gets `PeerLost`. `hosts` says on which host each rank pretends to be. torch's global random state is shared
    by all threads: build models under a lock, or let `distribute` copy rank 0's. On the CPU only: the threads of a process share
    autograd's one thread per GPU, so one rank's backward would wait there for another's.

    >>> import torch
    >>> run_jobs(3, lambda job: job.all_reduce(torch.tensor([float(job.rank)]), algorithm="ring").item())
    [1.0, 1.0, 1.0]
    """
    patience = timeouts or Timeouts(arrive_s=timeout_s / 2)
    more_wires = _MoreWires()

    def on_wire(wire: Wire) -> Any:
        return _in_a_job(wire, patience, hosts, more_wires, program, args)

    return run_threads(size, on_wire, timeout_s=timeout_s, wires=threads_world(size, check=True))


class _MoreWires:
    """Further worlds that the ranks of a run share, by name: whoever asks first makes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worlds: dict[str, list[Wire]] = {}

    def __call__(self, name: str, size: int) -> list[Wire]:
        with self._lock:
            if name not in self._worlds:
                self._worlds[name] = list(threads_world(size, check=True))
            return self._worlds[name]


def _in_a_job(
    wire: Wire,
    timeouts: Timeouts,
    hosts: Sequence[str] | None,
    more_wires: _MoreWires,
    program: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    from stretto import api  # brings in torch, which the wires do without
    from stretto.job import Job

    names = list(hosts or ["here"] * wire.world_size)
    peers = [Peer(rank, names[:rank].count(host), host, "127.0.0.1:1", 1) for rank, host in enumerate(names)]
    launch = Launch(
        rank=wire.rank, world_size=wire.world_size, local_rank=peers[wire.rank].local_rank,
        local_world_size=names.count(names[wire.rank]), rendezvous=None, secret=None, encrypt=False, launcher="stretto",
    )  # fmt: skip
    job = Job(launch, peers, wire, timeouts)
    job.more_wires = more_wires
    token = api._job.set(job)
    try:
        result = program(job, *args)
    except BaseException:
        job.close(goodbye=False)
        raise
    finally:
        api._job.reset(token)
    job.close(goodbye=True)
    return result


def _run_ranks(
    wires: Sequence[Wire], program: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, *, close: bool
) -> list[Any]:
    before = set(threading.enumerate())
    run = _RankThreads(wires, program, args, close)
    run.start()
    try:
        run.wait(timeout_s)
    finally:
        run.end()
    _check_threads(before)
    return run.results


class _RankThreads:
    """The threads of one run, their results and the first failure."""

    def __init__(self, wires: Sequence[Wire], program: Callable[..., Any], args: tuple[Any, ...], close: bool) -> None:
        self.results: list[Any] = [None] * len(wires)
        self._wires = wires
        self._program = program
        self._args = args
        self._close = close
        self._first_failure: tuple[int, BaseException] | None = None
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run_rank, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(len(wires))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._raise_failure()
        if any(thread.is_alive() for thread in self._threads):
            raise RanksHung(self._describe_hang(timeout_s))

    def end(self) -> None:
        """Nobody may be left waiting, whatever happened."""
        if any(thread.is_alive() for thread in self._threads):
            self._release("the run was over")
            until = time.monotonic() + GRACE_S
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))

    def _run_rank(self, rank: int) -> None:
        wire = self._wires[rank]
        try:
            self.results[rank] = self._program(wire, *self._args)
        except WireKilled as killed:
            # Killed on purpose, or because another rank failed first: either way this is not the failure to show.
            if killed.rank not in (rank, -1):
                self._fail(rank, killed)
        except BaseException as error:
            self._fail(rank, error)
        finally:
            self._leave(wire)

    def _leave(self, wire: Wire) -> None:
        failed = self._first_failure is not None
        if isinstance(wire, VirtualWire) and (failed or not self._close):
            with contextlib.suppress(Exception):  # the world has failed, and its reason was raised in the program
                wire.finish()
        elif self._close:
            wire.close()
        elif failed:
            wire.abandon()  # on wires that only their own thread may touch, this is how the others learn of it

    def _fail(self, rank: int, error: BaseException) -> None:
        with self._lock:
            if self._first_failure is not None:
                return
            self._first_failure = (rank, error)
        self._release(f"rank {rank} failed with {type(error).__name__}")

    def _release(self, reason: str) -> None:
        for wire in self._wires:
            if isinstance(wire, VirtualWire):
                wire.world.abort(reason)
            elif isinstance(wire, InProcessWire):
                wire.kill(reason)
            else:
                wire.wake()

    def _raise_failure(self) -> None:
        if self._first_failure is None:
            return
        rank, error = self._first_failure
        error.add_note(f"raised by rank {rank} of {len(self._wires)}")
        raise error

    def _describe_hang(self, timeout_s: float) -> str:
        frames = sys._current_frames()
        lines = [f"not all of {len(self._wires)} ranks ended within {timeout_s:g} s:"]
        for rank, thread in enumerate(self._threads):
            frame = frames.get(thread.ident or -1)
            if not thread.is_alive() or frame is None:
                lines.append(f"rank {rank} has ended")
                continue
            lines.append(f"rank {rank} is here:")
            lines.extend(line.rstrip() for line in traceback.format_stack(frame)[-8:])
        return "\n".join(lines)


def _check_threads(before: set[threading.Thread]) -> None:
    until = time.monotonic() + GRACE_S
    left = [thread for thread in threading.enumerate() if thread not in before and not _is_of_the_process(thread)]
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))
    names = [thread.name for thread in left if thread.is_alive()]
    if names:
        raise ThreadsLeft(
            f"the ranks have returned but {len(names)} threads that they started still run: {', '.join(names)}.\n"
            f"End them (join, shutdown) before the program returns: they would run on into other tests."
        )


def _is_of_the_process(thread: threading.Thread) -> bool:
    """pyzmq starts one thread per process at the first send without a copy, and keeps it for all later ones."""
    return type(thread).__module__.partition(".")[0] == "zmq"
