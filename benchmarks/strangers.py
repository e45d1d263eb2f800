"""What strangers at its ports and a link that is gone for a while cost a running job.

    python benchmarks/strangers.py                     floods and outages, over both wires (needs root or user namespaces)
    python benchmarks/strangers.py --only flood        strangers only; needs no lab
    python benchmarks/strangers.py --only outage       outages only
    python benchmarks/strangers.py --quick             short phases, one kind of stranger: does the script work?

Flood. Strangers crowd the coordinator (`strangers_flood.py`: 1,100 connections, 500 new ones a second) and, from when all
workers but the last listen, every worker's port, since strangers can cost something there while the job connects. Then the last
worker is started: does the job form, how soon, and how much more memory did it take than without strangers? When it has formed
they go, and the workers' steps and memory are measured (`strangers_worker.py`): first in quiet, then while the same number of
strangers tries a closed port, which costs the processors as much and has nothing to do with us, then while they try the
coordinator and the workers.

Outage. Three lab hosts; the link of one of them is cut for 8 s, while it is idle and in the middle of all-reduces. Does anybody
lose a peer? gloo does the same beside it.

Writes `strangers_MACHINE_DATE.json` and `.md`. The strangers need a processor too: let the machine be idle otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import harness
import msgspec
from harness import verdict
from strangers_worker import END, Joined, put
from strangers_worker import WorkerReport as Worker

from stretto.bench.machine import MachineInfo, describe
from stretto.bench.table_text import seconds
from stretto.bench.turns import now
from stretto.errors import ConfigurationError, JobError
from stretto.lab import Lab
from stretto.launching import coordinator_process, launch_plan
from stretto.launching import secret as secrets
from stretto.launching.hosts import split_address

FOLDER = Path(__file__).parent
WIRES = ("plain", "encrypted")
KINDS = ("idle", "announce", "announce16k", "garbage")
CONNECTIONS, RATE = 1100, 500
MOST_BYTES = 64 << 20
MOST_TIMES = 2.0
USUAL_DESCRIPTORS = 1024
CUT_S = 8.0
PATIENCE_S = 120.0
FORMING, QUIET, ELSEWHERE, FLOODED, BETWEEN = 0, 1, 2, 3, 4  # phases of the workers
PHASES = {"none": QUIET, "elsewhere": ELSEWHERE, "here": FLOODED}
LISTENING = "0A"  # in /proc/net/tcp
T = TypeVar("T")


class Flood(msgspec.Struct, frozen=True, kw_only=True):
    wire: str
    kind: str  # of stranger, or "none"
    formed_s: float | None  # from the start of the last worker; None: it did not form
    coordinator_bytes: int  # its peak, beyond what it had before the first stranger came
    workers: list[Worker]
    goes_on: bool = False  # the job did, to its end

    def steps(self, phase: int) -> list[float]:
        """The slowest rank's time of each step. (The ranks agree on the phase, so they have as many.)"""
        return [max(times) for times in zip(*(worker.seconds[phase] for worker in self.workers), strict=True)]

    @property
    def worker_bytes(self) -> int:
        """The most by which a worker's memory was larger with strangers than before."""
        return max(worker.peak_bytes[FLOODED] - worker.peak_bytes[QUIET] for worker in self.workers)

    @property
    def forming_bytes(self) -> int:
        """The most that a worker had until the job had formed."""
        return max(worker.peak_bytes[FORMING] for worker in self.workers)

    @property
    def memory_is_known(self) -> bool:
        return all(worker.peaks_are_of_phases for worker in self.workers)


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    wire: str
    doing: str
    cut_s: float
    workers: list[Worker]

    @property
    def errors(self) -> list[str]:
        return [f"rank {rank}: {worker.error}" for rank, worker in enumerate(self.workers) if worker.error]


class StrangersReport(msgspec.Struct, frozen=True, kw_only=True):
    machine: MachineInfo
    date: str
    floods: list[Flood]
    outages: list[Outage]


# -- strangers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def strangers(addresses: list[str], kind: str) -> Iterator[None]:
    """Crowd these addresses, from when all connections have been tried once."""
    if kind == "none":
        yield
        return
    words = [sys.executable, str(FOLDER / "strangers_flood.py")]
    crowds = [
        subprocess.Popen(
            [*words, address, kind, str(CONNECTIONS // len(addresses)), str(RATE / len(addresses))], stdout=subprocess.PIPE
        )
        for address in addresses
    ]
    try:
        for crowd in crowds:
            assert crowd.stdout is not None
            crowd.stdout.readline()
        yield
    finally:
        for crowd in crowds:
            crowd.kill()
            crowd.communicate()


def flood(wire: str, kind: str, workers: int, phase_s: float) -> Flood:
    secret = secrets.generate()
    with tempfile.TemporaryDirectory(prefix="stretto-strangers-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        coordinator, rendezvous = coordinator_process.start(
            "127.0.0.1:0", workers, secret, os.environ, encrypted=wire == "encrypted", deadline=time.monotonic() + PATIENCE_S
        )
        stack.callback(_end, coordinator)
        before = memory(coordinator.pid, "VmRSS")
        crowd = stack.enter_context(contextlib.ExitStack())
        crowd.enter_context(strangers([rendezvous], kind))
        job: list[subprocess.Popen[bytes]] = []

        def running() -> bool:
            return all(process.poll() in (None, 0) for process in job)

        def start(rank: int) -> None:
            environment = _environment(rank, workers, rendezvous, secret, wire)
            job.append(subprocess.Popen(worker_words(name, "stretto", "steps"), env=environment))
            stack.callback(_end, job[-1])

        for rank in range(workers - 1):
            start(rank)
        crowd.enter_context(strangers(_ports(job, running), kind))
        start(workers - 1)

        here = _read(folder, "here", workers, Joined, running)
        if here is None:
            return Flood(wire=wire, kind=kind, formed_s=None, coordinator_bytes=0, workers=[])
        put(folder / "phase", BETWEEN)
        crowd.close()
        _pass_phase(folder, QUIET, phase_s)
        put(folder / "phase", BETWEEN)
        with closed_port() as nobody, strangers([nobody] * (workers + 1), kind):
            _pass_phase(folder, ELSEWHERE, phase_s)
            put(folder / "phase", BETWEEN)
        with strangers([rendezvous, *(each.address for each in here)], kind):
            _pass_phase(folder, FLOODED, phase_s)
            put(folder / "phase", END)
        grown = memory(coordinator.pid, "VmHWM") - before
        reports = _read(folder, "report", workers, Worker, running)
        goes_on = reports is not None and not any(report.error for report in reports)
        return Flood(
            wire=wire, kind=kind, formed_s=here[-1].seconds, coordinator_bytes=grown,
            workers=reports or [], goes_on=goes_on,
        )  # fmt: skip


def worker_words(folder: str, backend: str, doing: str) -> list[str]:
    return [sys.executable, str(FOLDER / "strangers_worker.py"), folder, backend, doing]


def _environment(rank: int, workers: int, rendezvous: str, secret: bytes, wire: str) -> dict[str, str]:
    own = launch_plan.job_variables(
        rank=rank, world_size=workers, local_rank=rank, local_world_size=workers, rendezvous=split_address(rendezvous),
        master_port=1, secret=secret, encrypt=wire == "encrypted", timeout_s=PATIENCE_S,
    )  # fmt: skip
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


def _pass_phase(folder: Path, phase: int, phase_s: float) -> None:
    put(folder / "phase", phase)
    time.sleep(phase_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _read(folder: Path, name: str, workers: int, kind: type[T], running: Callable[[], bool]) -> list[T] | None:
    """What every worker has put down under this name; None if one of them ended instead, or none came in time."""
    paths = [folder / f"{name}{rank}" for rank in range(workers)]
    deadline = time.monotonic() + PATIENCE_S
    while not all(path.exists() for path in paths):
        if not running() or time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return [msgspec.json.decode(path.read_bytes(), type=kind) for path in paths]


def memory(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """An address at which nobody listens, and nobody will."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def _ports(job: list[subprocess.Popen[bytes]], running: Callable[[], bool]) -> list[str]:
    """Where these workers listen; they do so before they have met."""
    deadline = time.monotonic() + PATIENCE_S
    while running() and time.monotonic() < deadline:
        found = [_port(process.pid) for process in job]
        if all(found):
            return [f"127.0.0.1:{port}" for port in found]
        time.sleep(0.05)
    raise JobError("strangers.py: a worker ended, or did not listen, before the job could form; read its output above.")


def _port(pid: int) -> int | None:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(descriptor))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTENING and f"socket:[{words[9]}]" in inodes:
            return int(words[1].rpartition(":")[2], 16)
    return None


# -- outages ----------------------------------------------------------------------------------------------------------


def outage(wire: str, doing: str, cut_s: float, phase_s: float) -> Outage:
    hosts, cut = 3, 1
    backend = "gloo" if wire == "gloo" else "stretto"
    with tempfile.TemporaryDirectory(prefix="stretto-outage-") as name:
        folder = Path(name)
        with Lab(hosts, encrypt=wire == "encrypted", environ=os.environ) as lab:
            job = lab.start(worker_words(name, backend, doing), {"GLOO_SOCKET_IFNAME": "eth0"} if backend == "gloo" else None)

            def running() -> bool:
                return not job.over_within(0.0)

            if _read(folder, "here", hosts, Joined, running) is None:
                raise JobError(f"no job to cut, {wire}: {[process.output for process in job.processes]}")
            _pass_phase(folder, 1, phase_s)
            lab.cut(cut)
            time.sleep(cut_s)
            lab.restore(cut)
            _pass_phase(folder, 2, max(phase_s, 1.25 * cut_s))
            put(folder / "phase", END)
            reports = _read(folder, "report", hosts, Worker, lambda: True)
            job.stop()
    if reports is None:
        raise JobError(f"no worker said how it went, {wire}, {doing}: {[process.output for process in job.processes]}")
    return Outage(wire=wire, doing=doing, cut_s=cut_s, workers=reports)


# -- judging and writing ----------------------------------------------------------------------------------------------


def slow_step(times: list[float]) -> float:
    """The slowest of a hundred steps: one alone may have met anything."""
    return statistics.quantiles(times, n=100, method="inclusive")[-1] if len(times) > 1 else times[0]


def flood_claims(case: Flood, quiet: Flood) -> list[str]:
    about = f"| {case.wire} | {case.kind} |"
    if case.formed_s is None:
        return [f"{about} the job forms | yes | no | **missed** |"]
    if not case.goes_on:
        return [f"{about} the job goes on | yes | no | **missed** |"]
    slow = slow_step(case.steps(FLOODED))
    longer, beyond = slow / slow_step(case.steps(QUIET)), slow / slow_step(case.steps(ELSEWHERE))
    quietly = "" if quiet.formed_s is None else f" ({quiet.formed_s:.2f} s without)"
    return [
        f"{about} the job forms | yes | in {case.formed_s:.2f} s{quietly} | met |",
        memory_claim(case, "until the job has formed", case.forming_bytes - quiet.forming_bytes if quiet.workers else None),
        memory_claim(case, "of a running job", case.worker_bytes),
        f"{about} memory of the coordinator, at most | 64 MB | {case.coordinator_bytes / 1e6:+.1f} MB "
        f"| {verdict(case.coordinator_bytes <= MOST_BYTES)} |",
        f"{about} slow steps, x without strangers, at most | {MOST_TIMES:g} | {longer:.2f} | {verdict(longer <= MOST_TIMES)} |",
        f"{about} slow steps, x with strangers elsewhere, at most | {MOST_TIMES:g} | {beyond:.2f} "
        f"| {verdict(beyond <= MOST_TIMES)} |",
    ]


def memory_claim(case: Flood, when: str, grown: int | None) -> str:
    claim = f"| {case.wire} | {case.kind} | memory of a worker {when}, at most | 64 MB |"
    if grown is None or not case.memory_is_known:
        return f"{claim} unknown: /proc/self/clear_refs cannot be written here, or there is no run to compare with | not judged |"
    return f"{claim} {grown / 1e6:+.1f} MB | {verdict(grown <= MOST_BYTES)} |"


def outage_claim(case: Outage) -> str:
    longest = max((max(times) for worker in case.workers for times in worker.seconds.values()), default=0.0)
    found = "; ".join(case.errors) or f"none; the longest step took {longest:.1f} s"
    judged = "(not ours)" if case.wire == "gloo" else verdict(not case.errors)
    return f"| {case.wire} | {case.cut_s:g} s, {case.doing} | peers lost | none | {found} | {judged} |"


def claims_table(report: StrangersReport) -> list[str]:
    quiet = {case.wire: case for case in report.floods if case.kind == "none"}
    lines = harness.table("wire", "strangers, or the cut", "claim", "target", "measured", "verdict")
    for case in report.floods:
        if case.kind != "none":
            lines += flood_claims(case, quiet[case.wire])
    return lines + [outage_claim(case) for case in report.outages]


def steps_table(report: StrangersReport) -> list[str]:
    lines = ["", *harness.table("wire", "strangers", "steps of 16 MB", "median", "slowest of a hundred", "slowest")]
    for case in (case for case in report.floods if case.goes_on):
        for name, phase in PHASES.items():
            times = case.steps(phase)
            shown = " | ".join(seconds(value) for value in (statistics.median(times), slow_step(times), max(times)))
            lines.append(f"| {case.wire} | {case.kind}: {name} | {len(times)} | {shown} |")
    return lines


def as_markdown(report: StrangersReport, command: str) -> list[str]:
    return [
        *harness.heading("Strangers and outages", report.date, command, report.machine),
        f"Processes have {USUAL_DESCRIPTORS} descriptors. Strangers: {CONNECTIONS} connections, {RATE} new ones a second, at "
        "the coordinator and at every worker that listens while the job forms; then nowhere, at a closed port (elsewhere), and "
        "at the coordinator and every worker (here). Memory: the most that a process had with strangers, less the most before "
        "(until the job has formed: less the most that a worker had without strangers). The strangers share the processors with "
        "the job: what they cost beyond that is the row `elsewhere`.",
        "",
        *claims_table(report),
        *steps_table(report),
    ]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser("What strangers and outages cost a running job.", quick="short phases, one of each kind")
    parser.add_argument("-n", "--workers", type=int, default=4, help="workers that strangers crowd (4)")
    parser.add_argument("--only", choices=("flood", "outage"), help="one half of it")
    parser.add_argument("--rounds", type=int, default=1, help="outages of each kind (1)")
    return parser.parse_args(arguments)


def usual_descriptors() -> None:
    """Let the job have as many descriptors as processes have on most machines, whatever this shell allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_DESCRIPTORS, most))


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.workers < 2 or options.rounds < 1:
        raise ConfigurationError(
            f"-n {options.workers} --rounds {options.rounds}: there would be nothing to report. Write -n 2 or more."
        )
    kinds = ("none", *(KINDS[:1] if options.quick else KINDS))
    phase_s, cut_s, rounds = (2.0, 2.0, 1) if options.quick else (3.0, CUT_S, options.rounds)
    usual_descriptors()
    floods, outages = [], []
    if options.only != "outage":
        for wire, kind in ((wire, kind) for wire in WIRES for kind in kinds):
            print(f"--- {wire}, strangers: {kind}", flush=True)
            floods.append(flood(wire, kind, options.workers, phase_s))
    if options.only != "flood":
        for wire, doing in ((wire, doing) for wire in (*WIRES, "gloo") for doing in ("idle", "steps")):
            print(f"--- {wire}, cut for {cut_s:g} s, {doing}", flush=True)
            outages += [outage(wire, doing, cut_s, phase_s / 2) for _ in range(rounds)]
    report = StrangersReport(machine=describe(), date=now(), floods=floods, outages=outages)
    text = as_markdown(report, harness.command_of("strangers", arguments))
    stem = harness.write("strangers", report, text, report.date, report.machine, harness.folder_of(options))
    harness.show(claims_table(report), stem)


if __name__ == "__main__":
    harness.run(main)
