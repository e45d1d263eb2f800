"""Random kills and pauses of workers and servers, in real processes, while training counts every update.

    python benchmarks/soak.py                          200 faults: 3 workers, 3 servers, 1 copy
    python benchmarks/soak.py --faults 20 --seed 7

All gradients are -1 and the rate is 1, so each push adds exactly 1 to every value of the model. A worker notes each step that it
begins and each that has ended. At the end, for every value v, and over all lives of all workers,

    steps that ended  <=  v  <=  steps that were begun

so a lost update that was acknowledged makes v too small, and one that is applied twice makes it too large, unless a worker was
killed in the middle of that very step: at most one step for each that was killed. It ends with an error unless that holds, all
faults have fired, and the job has ended in time.

Faults: SIGKILL of a server or of a worker, which are started again; SIGSTOP of either for 0.05 to 0.5 s; SIGSTOP of a server
for longer than `silence_s`, which makes it dead to the others. A server is hit only when each part of the model has its copy
again: with fewer copies than deaths nothing can be promised. What is measured: from the kill of a server to the end of the first
step that begins after it, on any worker. Such a step needs every part of the model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

STEP: Final = struct.Struct("<dd")  # when a step began and ended; ended is 0 when it has not
STATUS: Final = struct.Struct("<qqq")  # pid, keeper of the server that it has started (0: none), whether every part has its copy
SILENCE_S: Final = 1.5
PATIENCE_S: Final = 90.0  # for whatever is waited for: then it hangs


# -- a worker ---------------------------------------------------------------------------------------------------------


def work(folder: Path, servers: int) -> None:
    """The program that is run under `stretto run`."""
    import torch

    import stretto
    from stretto import ParameterServer, StaleSynchronous, Strategy

    timeouts = stretto.Timeouts(silence_s=SILENCE_S, arrive_s=PATIENCE_S, connect_s=60.0)
    job = stretto.init(timeouts=timeouts)
    model = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = Strategy(aggregate=ParameterServer(servers, 1, restarts=10_000), sync=StaleSynchronous(4))
    stretto.distribute(model, optimizer, strategy)
    (network,) = job.server_networks.values()
    keeper = network.processes[0].pid if network.processes else 0

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(-sum(parameter.sum() for parameter in model.parameters()))
        optimizer.step()

    with open(folder / f"steps{job.rank}.{os.getpid()}", "w+b", buffering=0) as steps:
        number = 0
        while not (folder / "stop").exists():
            write_whole(folder / f"status{job.rank}", STATUS.pack(os.getpid(), keeper, network.every_part_has_copies(1)))
            began = time.monotonic()
            os.pwrite(steps.fileno(), STEP.pack(began, 0.0), number * STEP.size)
            step()
            os.pwrite(steps.fileno(), STEP.pack(began, time.monotonic()), number * STEP.size)
            number += 1
            time.sleep(0.002)
    reporter = (folder / "stop").read_text()
    if str(job.rank) == reporter:
        others = [rank for rank in range(job.world_size) if rank != job.rank]
        wait_until("the others have left", lambda: all((folder / f"left{rank}").exists() for rank in others))
        step()  # one more, and its values are everybody's
        values = sorted({float(value) for parameter in model.parameters() for value in parameter.detach().flatten()})
        write_whole(folder / "values", struct.pack(f"<{len(values)}d", *values))
    stretto.shutdown()
    write_whole(folder / f"left{job.rank}", b"")


def write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def wait_until(what: str, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {patience_s:g} s")
        time.sleep(0.005)


# -- who does the harm ------------------------------------------------------------------------------------------------


class Soak:
    """`workers` and `servers` of a job that was, or will be, started with `command()`; `fault` by fault."""

    def __init__(self, folder: Path, workers: int, servers: int, seed: int) -> None:
        self.folder, self.workers, self.servers = folder, workers, servers
        self.random = random.Random(seed)
        self.fired: Counter[str] = Counter()
        self.recovery_s: list[float] = []
        self._keepers: dict[int, int] = {}

    def command(self, stretto: list[str]) -> list[str]:
        options = ["run", "-n", str(self.workers), "--min-workers", "1", "--max-restarts", "10000"]
        return [*stretto, *options, str(Path(__file__).resolve()), "--worker", str(self.folder), "--servers", str(self.servers)]

    def _status(self, rank: int) -> tuple[int, int, int]:
        try:
            pid, keeper, whole = STATUS.unpack((self.folder / f"status{rank}").read_bytes())
        except (OSError, struct.error):
            return 0, 0, 0
        return pid, keeper, whole

    def _server(self, number: int) -> int | None:
        """Its process, if there is one now."""
        keeper = self._keepers[number]
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])
        return None

    def _steps(self) -> Iterable[tuple[float, float]]:
        for path in self.folder.glob("steps*"):
            yield from STEP.iter_unpack(path.read_bytes()[: path.stat().st_size // STEP.size * STEP.size])

    def _ended_after(self, moment: float) -> float | None:
        """When the first step ended that has begun after `moment`."""
        return min((end for begin, end in self._steps() if begin > moment and end), default=None)

    def _everything_is_well(self) -> bool:
        return all(self._status(rank)[2] for rank in range(self.workers)) and all(
            self._server(number) for number in self._keepers
        )

    def wait_for_all(self) -> None:
        wait_until("all workers train", lambda: all(self._status(rank)[2] for rank in range(self.workers)), 180.0)
        self._keepers = {number: self._status(number)[1] for number in range(self.servers)}  # one beside each worker

    def do_harm(self) -> str:
        """One fault at random; what it was."""
        whoever = ("kill a server", "pause a server", "pause a server for long", "kill a worker", "pause a worker")
        kind = self.random.choice(whoever)
        self.hit(kind)
        return kind

    def hit(self, kind: str) -> None:
        """One fault, after the last one is mended."""
        moment = time.monotonic()
        wait_until("a step is taken", lambda: self._ended_after(moment) is not None)
        if "server" in kind:
            wait_until("each part has its copy", self._everything_is_well)
            self._hit_server(kind)
        else:
            self._hit_worker(kind)
        self.fired[kind] += 1

    def _hit_server(self, kind: str) -> None:
        pid = self._server(self.random.randrange(self.servers))
        assert pid is not None
        if kind == "kill a server":
            moment = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            wait_until("a step is taken after the kill of a server", lambda: self._ended_after(moment) is not None)
            ended = self._ended_after(moment)
            assert ended is not None
            self.recovery_s.append(ended - moment)
            wait_until("the copies that are left are known to be so", lambda: not self._everything_is_well())
        elif kind == "pause a server":
            pause(pid, self.random.uniform(0.05, 0.5))
        else:
            pause(pid, 2 * SILENCE_S + 1)
            wait_until("it is started again", lambda: not is_running(pid))

    def _hit_worker(self, kind: str) -> None:
        rank = self.random.randrange(self.workers)
        pid, _, _ = self._status(rank)
        if not is_running(pid):
            raise AssertionError(f"rank {rank} (pid {pid}) has ended, and nobody has killed it")
        if kind == "pause a worker":
            pause(pid, self.random.uniform(0.05, 0.5))
            return
        os.kill(pid, signal.SIGKILL)
        wait_until("it is dead", lambda: not is_running(pid))
        wait_until("it has come back", lambda: self._status(rank)[0] not in (pid, 0))

    def stop(self) -> None:
        """Training ends; the values are written."""
        wait_until("each part has its copy", self._everything_is_well)
        write_whole(self.folder / "stop", b"0")
        wait_until("the values are written", (self.folder / "values").exists)

    def check(self) -> str:
        """What has become of all updates. Raises if one was lost or applied twice."""
        steps = list(self._steps())
        begun, ended = len(steps) + 1, sum(end > 0 for _, end in steps) + 1  # and the reporter's last one
        data = (self.folder / "values").read_bytes()
        values = struct.unpack(f"<{len(data) // 8}d", data)
        account = f"{ended} steps have ended, {begun} were begun, values are {min(values):g} to {max(values):g}"
        if not ended <= min(values) <= max(values) <= begun or begun - ended > self.fired["kill a worker"]:
            raise AssertionError(f"updates were lost, or applied twice: {account}")
        return account


def pause(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until("it has stopped", lambda: state_of(pid) in ("T", ""))
        time.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def distribution(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    part = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in (("90 %", 0.9), ("99 %", 0.99))}
    shares = ", ".join(f"{name} {value:.2f} s" for name, value in part.items())
    return f"median {statistics.median(ordered):.2f} s, {shares}, longest {ordered[-1]:.2f} s, of {len(ordered)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", type=Path, metavar="FOLDER", help="for the workers that this script starts")
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.servers)
        return 0
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        return soak(Soak(Path(name), options.workers, options.servers, options.seed), options.faults)


def soak(of: Soak, faults: int) -> int:
    began = time.monotonic()
    command = of.command([sys.executable, "-m", "stretto"])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        said: list[str] = []
        listening = threading.Thread(target=lambda: said.extend(launcher.stderr or ()), daemon=True)
        listening.start()
        try:
            of.wait_for_all()
            for number in range(faults):
                kind = of.do_harm()
                print(f"{time.monotonic() - began:7.1f} s  fault {number + 1} of {faults}: {kind}", flush=True)
            of.stop()
            code = launcher.wait(PATIENCE_S)
        except BaseException:
            launcher.terminate()
            listening.join(10)
            print("".join(said[-80:]), file=sys.stderr)
            raise
    assert code == 0, (code, "".join(said[-80:]))
    print(f"{sum(of.fired.values())} faults in {time.monotonic() - began:.0f} s: {dict(of.fired)}")
    print(f"updates: {of.check()}")
    print(f"kill of a server to the end of the next step: {distribution(of.recovery_s)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
