"""`stretto run`: one event loop over workers' output, the supervisor's reports and signals, until the last worker ended.

    running ──all ended well──────────────────────────────────▶ done            exit code 0
       │ ──a worker failed──▶ stopping: SIGTERM, 3 s, SIGKILL ─▶ report, done    its code, or 128 + signal
       │                                                         (with --max-restarts: all over again, after a pause)
       │                                                         (with --min-workers: only if too few are left; see `survivors`)
       │ ──Ctrl-C───────────▶ stopping: SIGINT,  5 s, SIGKILL ─▶ done            130   (a second Ctrl-C: SIGKILL now)
       └ ──SIGTERM, SIGHUP──▶ stopping: SIGTERM, 3 s, SIGKILL ─▶ done            128 + signal

Bound: a failure ends all workers within `LAST_WORDS_S` + 3 s < 5 s. (`LAST_WORDS_S`: a worker that fails with `PeerLost`
gives the peer it accuses a second to end by itself, so that the right one is blamed: see `launch_report`. A peer that does
not is looked at before anybody is signalled.)
A worker that ends without having called `stretto.init()`, while others wait for it there, ends the job as well: see `ended`.
Processes are started, signalled and never left behind by the supervisor (`supervisor.py`); the coordinator is one of them.
Should the supervisor itself be killed, what it leaves falls to the launcher, which ends it.

A restart is a new attempt with nothing of the old one but the plan: another supervisor, coordinator and, on one node, ports.
Several nodes need no agreement for it: a lost worker makes the workers of all nodes fail, so every launcher restarts its own, and
they meet at the same rendezvous. Those that come while the last attempt has not ended there are told to wait (`membership`). A
node may fail more often than another while the job forms, so each counts its own restarts, and the job ends once one has used up
its own: an attempt that is forming then is told so (`ended`), and a later one waits in vain, `--meet-timeout` each time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.errors import ConfigurationError, JobError, RendezvousError
from stretto.launching import coordinator_process, hosts, launch_plan
from stretto.launching.detect import Launch
from stretto.launching.ended import EndedWorkers
from stretto.launching.introduction_messages import Ended
from stretto.launching.launch_plan import RunPlan
from stretto.launching.launch_report import (
    TAIL_BYTES,
    Failure,
    Lost,
    culprit,
    failure_block,
    how_it_ended,
    lost_block,
    what_it_does,
)  # fmt: skip
from stretto.launching.node_servers import NodeServers
from stretto.launching.orphans import Orphans
from stretto.launching.output import STDERR, STDOUT, Lines, Screen, prefix_of, wants_colour
from stretto.launching.processes import Pipes, Processes, ProcessReport, open_standard_descriptors
from stretto.launching.stop_signals import Noticed, noticed_signals
from stretto.launching.survivors import WENT_ON, Survivors

COORDINATOR = "coordinator"
READY_S = 30.0  # for a Python process to start and listen, on a machine busy with other things
LAST_WORDS_S = 1.0  # workers that have lost a peer end by themselves within it, and their words are worth reading
TERMINATE_S = 3.0
INTERRUPT_S = 5.0
CLOSE_S = 6.0  # the supervisor's own deadlines add up to 5 s
FLUSH_S = 2.0  # for a paused reader of our output, once we were told to stop
RESTART_S = 1.0  # the pause before the first restart; it doubles with each
LONGEST_RESTART_S = 30.0


def run(plan: RunPlan, environ: Mapping[str, str]) -> int:
    """Run one node's part of a job to its end; the exit code. For the main thread only: it handles signals."""
    open_standard_descriptors()
    with noticed_signals() as noticed:
        for restart in range(1 if plan.goes_on else plan.max_restarts + 1):
            bind = launch_plan.bind_address(plan) if plan.node == 0 else None
            job = _NodeJob(plan, environ, noticed, restart)
            try:
                exit_code = job.run(bind)
            finally:
                job.close()
            if not job.restarts or not noticed.quiet_for(restart_pause(restart)):
                break
        return 128 + noticed.numbers[0] if noticed.numbers else exit_code


def restart_pause(restart: int) -> float:
    """Seconds between attempt number `restart` (from 0) and the next one."""
    return min(LONGEST_RESTART_S, RESTART_S * 2.0 ** min(restart, 30))


@dataclass(slots=True)
class _OutputPipe:
    """One pipe from one process."""

    name: str
    descriptor: int
    target: int
    lines: Lines


@dataclass(slots=True)
class _Stop:
    """Why the job is being ended, and when patience runs out."""

    exit_code: int | None  # None: a worker failed, the report decides
    kill_at: float
    killed: bool = False


@dataclass(frozen=True, slots=True)
class _Silent:
    """The lost worker, and what there was to see of it when it was blamed."""

    lost: Lost
    doing: str
    stderr_tail: bytes


class _NodeJob:
    def __init__(self, plan: RunPlan, environ: Mapping[str, str], noticed: Noticed, restart: int) -> None:
        self.plan = plan
        self.restart = restart  # how many attempts were made before this one
        self.restarts = False  # whether another one is to be made, once this one is over
        self.environ = environ
        self.noticed = noticed
        self.started_at = time.monotonic()
        self.ready_read, self.ready_write = os.pipe()
        self.names = [str(plan.rank(local)) for local in range(plan.workers)]
        self.servers = NodeServers(plan, environ)
        self.pipes = self._open_pipes()
        self.tails = dict.fromkeys(self.pipes, b"")  # the last words of each on stderr
        self.streams = self._make_streams()
        self.screen = Screen(self._status if sys.stdout.isatty() and sys.stderr.isatty() else None)
        self.orphans = Orphans()
        self.processes = Processes([*(fd for pipes in self.pipes.values() for fd in pipes.child), self.ready_write])
        self.control = selectors.DefaultSelector()
        self.everything = selectors.DefaultSelector()
        self._register()
        self.alive: set[str] = set()
        self.pids: dict[str, int] = {}
        self.num_stopped = 0
        self.failures: list[Failure] = []
        self.ended: dict[str, int] = {}  # name -> code
        self.survivors = Survivors(plan.workers, plan.min_workers, plan.max_restarts)
        self.blamed: Failure | _Silent | None = None
        self.last_words_until: float | None = None
        self.ended_workers = EndedWorkers()
        self.rendezvous: tuple[str, int] | None = None  # once it is known
        self.stop: _Stop | None = None
        self.supervisor_gone = False
        self.closed = False
        self.screen.start()

    # Making it.

    def _open_pipes(self) -> dict[str, Pipes]:
        names = [*self.names, *self.servers.names, *([COORDINATOR] if self.plan.node == 0 else [])]
        try:  # as with mpirun, the node's first worker has our stdin, the others an empty one
            return {name: Pipes.open(stdin=0 if name in self.names[:1] else None) for name in names}
        except OSError as problem:
            if problem.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise ConfigurationError(
                f"-n {self.plan.workers}: the launcher needs 5 open files per worker and the limit was reached.\n"
                f"Raise it with `ulimit -n {16 * self.plan.workers}` before stretto run, or start fewer workers."
            ) from problem

    def _make_streams(self) -> dict[int, _OutputPipe]:
        width = len(str(self.plan.world_size - 1))
        streams = {}
        for name, pipes in self.pipes.items():
            for target, descriptor in ((STDOUT, pipes.stdout), (STDERR, pipes.stderr)):
                streams[descriptor] = _OutputPipe(name, descriptor, target, Lines(self._prefix(name, width, target)))
        return streams

    def _prefix(self, name: str, width: int, target: int) -> bytes:
        if not self.plan.prefix:
            return b""
        coloured = wants_colour(sys.stdout if target == STDOUT else sys.stderr, self.environ)
        return prefix_of(name, width, int(name) if coloured and name in self.names else None)

    def _register(self) -> None:
        for selector in (self.control, self.everything):
            selector.register(self.processes.reports, selectors.EVENT_READ)
            selector.register(self.noticed.wake, selectors.EVENT_READ)
        for descriptor in self.streams:
            self.everything.register(descriptor, selectors.EVENT_READ)

    # Running it.

    def run(self, bind: tuple[str, int] | None) -> int:
        rendezvous = self._start_coordinator(bind) if bind is not None else self.plan.rendezvous
        if rendezvous is not None and self.stop is None:
            self._start_workers(rendezvous)
            while (self.alive or (self.servers.alive and self.stop is None)) and not self.supervisor_gone:
                self._turn()
        return self._finish()

    def _start_coordinator(self, bind: tuple[str, int]) -> tuple[str, int] | None:
        """Where it listens, as workers shall know it; None if we were told to stop meanwhile."""
        plan = self.plan
        if not self.restart and (said := launch_plan.where_node_0_is(plan, bind, self.environ)) is not None:
            self._say(said)
        encrypted = launch_plan.encrypted(plan, self.environ)
        address = hosts.join_address(*bind)
        lasting = ["--lasting"] if plan.goes_on else []
        argv = coordinator_process.argv(address, plan.world_size, self.ready_write, encrypted=encrypted, options=lasting)
        env = coordinator_process.environment(plan.secret, self.environ)
        self.processes.start(COORDINATOR, argv, env, self.pipes[COORDINATOR], keep=[self.ready_write])
        deadline = time.monotonic() + READY_S
        while not select.select([self.ready_read], [], [], 0)[0] and time.monotonic() < deadline:
            self._turn(also=self.ready_read, until=deadline)
            if self.stop is not None:
                return None
        listens_at = coordinator_process.read_address(self.ready_read, deadline)
        if listens_at is None:
            raise RendezvousError(self._coordinator_problem(bind))
        host, port = hosts.split_address(listens_at)
        return (plan.rendezvous[0], port) if plan.rendezvous is not None else (host, port)

    def _coordinator_problem(self, bind: tuple[str, int]) -> str:
        self._drain(COORDINATOR)
        said = self.tails[COORDINATOR].decode("utf-8", "replace").strip() or "nothing"
        return (
            f"The coordinator does not listen on {hosts.join_address(*bind)} after {READY_S:g} s. It said: {said}\n"
            f"Run `stretto doctor` to check this machine; with --rendezvous, try another port."
        )

    def _start_workers(self, rendezvous: tuple[str, int]) -> None:
        self.master_port = launch_plan.torch_port(self.plan)
        if self.plan.trace is not None:
            launch_plan.trace_folder(self.plan.trace)  # without what the attempt before has left
        self.rendezvous = rendezvous
        for name, server_argv, server_env in self.servers.commands():
            self.processes.start(name, server_argv, server_env, self.pipes[name])
        for name in self.names:
            self._start_worker(rendezvous, name, self.restart)

    def _start_worker(self, rendezvous: tuple[str, int], name: str, restart: int) -> None:
        plan = self.plan
        env = launch_plan.worker_environment(
            plan, self.names.index(name), rendezvous, self.master_port, self.environ, restart, self.servers.meet_at
        )
        self.alive.add(name)
        self.ended.pop(name, None)
        self.tails[name] = b""
        self.processes.start(name, launch_plan.worker_argv(plan), env, self.pipes[name], again=plan.goes_on)

    def _turn(self, also: int | None = None, until: float | None = None) -> None:
        """Wait for the next event or deadline, and handle what there is."""
        selector = self.control if self.screen.congested else self.everything
        if also is not None:
            selector.register(also, selectors.EVENT_READ)
        try:
            ready = [key.fd for key, _ in selector.select(self._patience(until))]
        finally:
            if also is not None:
                selector.unregister(also)
        for descriptor in ready:
            if descriptor in self.streams:
                self._read(self.streams[descriptor])
        if self.noticed.wake in ready:
            self._hear_signals()
        if self.processes.reports in ready:
            self._hear_reports()
        if self.screen.broken:
            self._begin_stop(signal.SIGTERM, TERMINATE_S, 128 + signal.SIGPIPE)
        self._act_on_deadlines()

    def _patience(self, until: float | None) -> float:
        """Seconds to the next deadline; 0.25 at most, for held output (and, congested, for room)."""
        deadlines = [
            until,
            self.last_words_until,
            self.ended_workers.due_at,
            self.survivors.next_at if self.alive and self.stop is None else None,
            self.stop.kill_at if self.stop and not self.stop.killed else None,
        ]
        now = time.monotonic()
        return max(0.0, min([0.05 if self.screen.congested else 0.25, *(d - now for d in deadlines if d is not None)]))

    def _read(self, stream: _OutputPipe) -> bool:
        """Pass on what has come. False: nothing to read now."""
        try:
            data = os.read(stream.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._retire(stream)
            return False
        if stream.target == STDERR:
            self.tails[stream.name] = (self.tails[stream.name] + data)[-TAIL_BYTES:]
        self.screen.write(stream.target, stream.lines.feed(data, time.monotonic()))
        return True

    def _drain(self, name: str) -> None:
        """Read what an ended process left in its pipes. Bounded: a child of it may hold them and write for ever."""
        for stream in [stream for stream in self.streams.values() if stream.name == name]:
            for _ in range(64):
                if not self._read(stream):
                    break

    def _retire(self, stream: _OutputPipe) -> None:
        self.screen.write(stream.target, stream.lines.close())
        self.everything.unregister(stream.descriptor)
        del self.streams[stream.descriptor]
        os.close(stream.descriptor)

    def _hear_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.noticed.wake, 4096)
        while self.noticed.numbers:
            number = self.noticed.numbers.pop(0)
            if self.stop is not None:
                self.stop.exit_code = 128 + number
                self.stop.kill_at = 0.0  # the second time we are asked, nobody is asked politely
            elif number == signal.SIGINT:
                self._begin_stop(signal.SIGINT, INTERRUPT_S, 128 + number)
            else:
                self._begin_stop(signal.SIGTERM, TERMINATE_S, 128 + number)

    def _hear_reports(self) -> None:
        reports = self.processes.read()
        if reports is None:
            self.supervisor_gone = True
            return
        for report in reports:
            self.pids[report.name] = report.pid
            if report.code is not None:
                self._hear_end(report, report.code)

    def _hear_end(self, report: ProcessReport, code: int) -> None:
        self._drain(report.name)
        if report.name == COORDINATOR:
            if code != 0 and self.stop is None and self.alive:
                self._say(f"stretto: the coordinator {how_it_ended(code)}; workers that know each other go on without it")
            return
        if report.name in self.servers.names:
            said = self.servers.note_end(report, code, early=self.stop is None and (bool(self.alive) or not self.names))
            if said is not None:
                self._say(said)
            return
        self.alive.discard(report.name)
        if not self.alive:
            self.processes.signal(signal.SIGTERM, self.servers.names)
        self.ended[report.name] = code
        goes_on = self.survivors.suffice(self.alive, self.ended)
        self.ended_workers.note(self._ended_message(report, code), soon=code == 0 or goes_on)
        if self.stop is not None:
            self.num_stopped += 1
        elif code != 0:
            elapsed = time.monotonic() - self.started_at
            self.failures.append(Failure(int(report.name), report.pid, code, elapsed, self.tails[report.name]))
            if goes_on:
                self._say(self.survivors.note(self.failures[-1], self.alive, time.monotonic() + RESTART_S))
            else:
                self._judge()

    def _ended_message(self, report: ProcessReport, code: int) -> Ended:
        rank = int(report.name)
        local_rank = rank - self.plan.rank(0)
        return Ended(rank, local_rank, hosts.host_identity(), report.pid, self.restart, how_it_ended(code))

    def _tell_coordinator_who_ended(self) -> None:
        plan = self.plan
        if self.rendezvous is None or plan.world_size == 1:
            self.ended_workers.forget()
            return
        place = (plan.rank(0), plan.world_size, 0, plan.workers)
        encrypt = launch_plan.encrypted(plan, self.environ)
        self.ended_workers.tell(Launch(*place, hosts.join_address(*self.rendezvous), plan.secret, encrypt, "stretto"))

    def _judge(self) -> None:
        """Give the others a moment: to say whom they have lost, and, if this one only lost a peer, to be that peer."""
        if self.last_words_until is None:
            self.last_words_until = time.monotonic() + LAST_WORDS_S

    def _blame(self) -> None:
        """Now, before anybody is signalled: a stopped process would go on, one that hangs would be gone."""
        blamed = culprit(self.failures, self.plan.world_size)
        if isinstance(blamed, Failure):
            self.blamed = blamed
            return
        name = str(blamed.rank)
        if name in self.names:
            self._drain(name)
        self.blamed = _Silent(blamed, self._what_it_did(blamed.rank), self.tails.get(name, b""))

    def _what_it_did(self, rank: int) -> str:
        name = str(rank)
        if name not in self.names:
            return f"It is a worker of node {self.plan.node_of(rank)}: read what the launcher there says about it."
        if name in self.ended:
            return f"Its process (pid {self.pids[name]}) had ended by then: it {how_it_ended(self.ended[name])}."
        return f"Its process (pid {self.pids[name]}) was {what_it_does(self.pids[name])}."

    def _begin_stop(self, number: int, patience_s: float, exit_code: int | None) -> None:
        if self.stop is None:
            self.last_words_until = None
            self.stop = _Stop(exit_code, time.monotonic() + patience_s)
            # Not the coordinator: workers still say goodbye to it. Nor servers, who follow the workers, if there are any.
            self.processes.signal(number, self.names or self.servers.names)

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        for stream in self.streams.values():
            self.screen.write(stream.target, stream.lines.overdue(now))
        if self.last_words_until is not None and now >= self.last_words_until:
            self._blame()
            self._begin_stop(signal.SIGTERM, TERMINATE_S, None)
        if self.ended_workers.due_at is not None and now >= self.ended_workers.due_at:
            if self.alive and self.stop is None:
                self._tell_coordinator_who_ended()
            else:
                self.ended_workers.due_at = None  # perhaps at the end: see `close`
        if self.rendezvous is not None and self.alive and self.stop is None:
            for revived in self.survivors.due(now):
                self._start_worker(self.rendezvous, *revived)
        if self.stop is not None and not self.stop.killed and now >= self.stop.kill_at:
            self.stop.killed = True
            self.processes.kill()

    # Ending it.

    def _finish(self) -> int:
        """Let the supervisor clear what is left, show what was still in the pipes, report."""
        self.processes.signal(signal.SIGTERM, [COORDINATOR])  # if it has not gone by itself
        self.processes.finish()
        deadline = time.monotonic() + CLOSE_S
        while not self.supervisor_gone and time.monotonic() < deadline:
            self._turn(until=deadline)
        for name in self.pipes:
            self._drain(name)
        for stream in self.streams.values():
            self.screen.write(stream.target, stream.lines.close())
        if self.alive:
            raise JobError(self._supervisor_problem())
        if self.stop is not None and self.stop.exit_code is not None:
            return self.stop.exit_code
        if not self.failures:
            return 0 if self.names else self.servers.exit_code
        if self.survivors.suffice(self.alive, self.ended):
            self._say(self.survivors.summary(self.plan.world_size, self.ended))
            return WENT_ON if any(self.ended.values()) else 0
        if self.blamed is None:  # all ended by themselves, before the time for last words was over
            self._blame()
        exit_code = self._report()
        if self.restart < self.plan.max_restarts and not self.plan.goes_on:
            self.restarts = True
            number, pause = f"{self.restart + 1} of {self.plan.max_restarts}", restart_pause(self.restart)
            self._say(f"stretto: all workers of this node are started again in {pause:g} s (restart {number})")
        return exit_code

    def _report(self) -> int:
        world_size, num_stopped = self.plan.world_size, self.num_stopped
        if isinstance(self.blamed, _Silent):
            silent = self.blamed
            self._say(lost_block(silent.lost, world_size, num_stopped, silent.doing, silent.stderr_tail))
            return silent.lost.exit_code
        assert self.blamed is not None
        self._say(failure_block(self.blamed, world_size, num_stopped))
        return self.blamed.exit_code

    def _supervisor_problem(self) -> str:
        return (
            f"The process that keeps the workers (pid {self.processes.supervisor_pid}) ended while ranks "
            f"{', '.join(sorted(self.alive, key=int))} were running; the kernel has killed them with it.\n"
            f"If nobody killed it, the system ran out of memory: see dmesg, and start fewer workers."
        )

    def _say(self, text: str) -> None:
        self.screen.write(STDERR, text.encode("utf-8", "replace") + b"\n")

    def _status(self) -> str:
        elapsed = int(time.monotonic() - self.started_at)
        clock = f"{elapsed // 3600}:{elapsed // 60 % 60:02}:{elapsed % 60:02}"
        node = f" · node {self.plan.node} of {self.plan.nodes}" if self.plan.nodes > 1 else ""
        attempt = f" · restart {self.restart} of {self.plan.max_restarts}" if self.restart else ""
        doing = "" if self.stop is None else " · stopping"
        alive = f"{len(self.alive)} of {self.plan.workers} workers{self.servers.status} alive"
        return f"stretto: {alive} · {clock}{node}{attempt}{doing}"

    def close(self) -> None:
        """Release everything; whatever still runs is killed. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.processes.close(CLOSE_S)
        if self.plan.node > 0 and not self.restarts:
            self._tell_coordinator_who_ended()
        self.ended_workers.wait()
        self.servers.close()
        self.orphans.end(CLOSE_S)  # there are none, unless the supervisor was killed
        for descriptor in (*self.streams, self.ready_read):
            os.close(descriptor)
        self.control.close()
        self.everything.close()
        told_to_stop = self.stop is not None and self.stop.exit_code is not None
        give_up_at = time.monotonic() + FLUSH_S if told_to_stop else float("inf")
        self.screen.close(give_up=lambda: bool(self.noticed.numbers) or time.monotonic() > give_up_at)
