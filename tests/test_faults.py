"""Real processes that die, stop, hang or leave: what the others see, and how soon.

Workers are real processes with sockets, signals and an end of their own. To be quick they are forked from one process that
has imported torch (`FORKER`) and run their script as its main program: an exception that nobody catches, `sys.exit` and the
end of the script take the interpreter's own way out, exit handlers included. Each fault leaves a trace that the test looks
for, so that no test passes because nothing happened.

Who is named, and with which error, must be right every time. How soon is a promise that a machine which stalls for a second or
two cannot keep: the promised time counts as kept when one of `TRIES` runs of the same fault keeps it (`in_time`).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from stretto.launching import spawn

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.timeout(240)]

WIRES = ("tcp", "zeromq")
TRIES = 3

FORKER = """
import atexit, ctypes, json, os, signal, sys
code = 0

def end():
    # Registered first, so run last, after everything that must happen at exit: without taking torch apart, which takes seconds.
    sys.stdout.flush()
    os._exit(code or (getattr(sys, "last_value", None) is not None))

atexit.register(end)
import torch, stretto.api
torch.set_num_threads(1)
while True:
    line = sys.stdin.readline()
    if not line: os._exit(0)
    request = json.loads(line)
    if "pid" in request:
        pid, status = os.waitpid(request["pid"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    pid = os.fork()
    if pid == 0: break
    print(pid, flush=True)
# The child. Nothing catches what its script raises: it is the main program now.
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: nobody is left behind
os.environ.update(request["environ"])
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
os.dup2(1, 2)
try:
    exec(compile(open(request["script"]).read(), request["script"], "exec"))
except SystemExit as left:
    code = left.code if isinstance(left.code, int) else bool(left.code)
    raise
"""

# What the scripts share. CLOCK_MONOTONIC is the same for all processes of a machine, so times can be compared.
PRELUDE = """
import ctypes, json, os, signal, sys, time
import torch, stretto
from stretto import Timeouts
rank, folder = int(os.environ["STRETTO_RANK"]), os.environ["TEST_FOLDER"]

def mark(name, value=None):
    with open(f"{folder}/{name}.new", "w") as file: json.dump(value, file)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")

def wait_for(name, seconds=60):
    end = time.monotonic() + seconds
    while not os.path.exists(f"{folder}/{name}"):
        if time.monotonic() > end: sys.exit(f"no {name}")
        time.sleep(0.005)

def all_reduce(numel=1000):
    tensor = torch.full((numel,), float(rank))
    stretto.all_reduce(tensor, "sum", algorithm="ring")
    assert tensor[-1] == sum(range(stretto.world_size())), tensor

def note(error, since):
    blamed = {"kind": type(error).__name__, "rank": getattr(error, "rank", None), "text": str(error)}
    mark(f"caught{rank}", blamed | {"since": since, "at": time.monotonic()})

def survive():
    '''What this rank would do if all were well; what it gets instead is written down.'''
    since = time.monotonic()
    try: all_reduce()
    except stretto.StrettoError as error: note(error, since)

timeouts = Timeouts(connect_s=50, **json.loads(os.environ["TEST_TIMEOUTS"]))
stretto.init(timeouts=timeouts, wire=os.environ["TEST_WIRE"])
for _ in range(3): all_reduce()
mark(f"ready{rank}")
"""


class Forker:
    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def fork(self, script: Path, log: Path, environ: dict[str, str]) -> int:
        return int(self._ask({"script": str(script), "log": str(log), "environ": environ}))

    def exit_code(self, pid: int) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        code = self._ask({"pid": pid})
        return None if code is None else int(code)

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


@dataclass
class RealJob:
    """One job of real processes and its coordinator."""

    forker: Forker
    folder: Path
    wire: str
    coordinator: subprocess.Popen[bytes]
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)

    def there(self, name: str) -> bool:
        return (self.folder / name).exists()

    def read(self, name: str, seconds: float = 60) -> Any:
        self.until(lambda: self.there(name), f"the mark {name!r}", seconds)
        return json.loads((self.folder / name).read_text())

    def mark(self, name: str) -> None:
        (self.folder / name).write_text("null")

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{self.wire}: {what} not within {seconds} s\n{self.output()}"
            time.sleep(0.01)

    def exit_code(self, rank: int) -> int | None:
        if rank not in self.codes:
            code = self.forker.exit_code(self.pids[rank])
            if code is None:
                return None
            self.codes[rank] = code
        return self.codes[rank]

    def wait(self, rank: int, seconds: float = 60) -> int:
        self.until(lambda: self.exit_code(rank) is not None, f"the end of rank {rank}", seconds)
        return self.codes[rank]

    def state(self, rank: int) -> str:
        return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]

    def output(self) -> str:
        return "\n".join(f"--- {log.name}:\n{log.read_text()}" for log in sorted(self.folder.glob("log*")))

    def end(self) -> None:
        self.coordinator.kill()
        self.coordinator.wait(60)
        for rank, pid in enumerate(self.pids):
            if self.exit_code(rank) is None:
                os.kill(pid, signal.SIGKILL)
                self.wait(rank)


Start = Callable[..., RealJob]


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture
def start(forker: Forker, tmp_path: Path) -> Iterator[Start]:
    """start(wire, script, workers=3, **timeouts) -> a job whose workers have met, or are about to."""
    jobs: list[RealJob] = []

    def start_one(wire: str, script: str, *, workers: int = 3, **timeouts: float) -> RealJob:
        folder = tmp_path / f"{wire}-{len(jobs)}"
        folder.mkdir()
        path = folder / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(script))
        secret = secrets.token_hex(32)
        coordinator, rendezvous = start_coordinator(workers, secret)
        job = RealJob(forker, folder, wire, coordinator)
        jobs.append(job)
        for rank in range(workers):
            environ = {
                "STRETTO_RANK": str(rank), "STRETTO_WORLD_SIZE": str(workers),
                "STRETTO_LOCAL_RANK": str(rank), "STRETTO_LOCAL_WORLD_SIZE": str(workers),
                "STRETTO_RENDEZVOUS": rendezvous, "STRETTO_SECRET": secret, "STRETTO_ENCRYPT": "off",
                "TEST_FOLDER": str(folder), "TEST_WIRE": wire, "TEST_TIMEOUTS": json.dumps(timeouts),
            }  # fmt: skip
            job.pids.append(forker.fork(path, folder / f"log{rank}", environ))
        return job

    yield start_one
    for job in jobs:
        job.end()


def start_coordinator(workers: int, secret: str) -> tuple[subprocess.Popen[bytes], str]:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "stretto.launching.coordinator", "--bind", "127.0.0.1:0"]
    command += ["--world-size", str(workers), "--ready-fd", str(writing)]
    coordinator = subprocess.Popen(command, pass_fds=[writing], env={**os.environ, "STRETTO_SECRET": secret})
    os.close(writing)
    with open(reading) as ready:
        return coordinator, ready.readline().strip()


def survivors(job: RealJob, kind: str, culprit: int = 1) -> list[dict[str, Any]]:
    """What every survivor has caught, which is an error of that kind that names the culprit; all of them ended in order."""
    ranks = [rank for rank in range(len(job.pids)) if rank != culprit]
    found = [job.read(f"caught{rank}") for rank in ranks]
    assert [(caught["kind"], caught["rank"]) for caught in found] == [(kind, culprit)] * len(ranks), (job.wire, found)
    assert [job.wait(rank) for rank in ranks] == [0] * len(ranks), job.output()
    return found


def last_after(found: list[dict[str, Any]], fault_at: float) -> float:
    return float(max(caught["at"] for caught in found) - fault_at)


def in_time(limit_s: float, once: Callable[[], float]) -> None:
    """`once` runs a fault and returns in how many seconds the last survivor knew: within the limit, in one of the tries."""
    took: list[float] = []
    while not took or took[-1] >= limit_s:
        assert len(took) < TRIES, f"the last survivor knew after {took} s; promised are {limit_s} s"
        took.append(once())


# One worker goes wrong.

END_ITSELF = {
    "raises": ("raise RuntimeError('on purpose')", 1),
    "exits at once": ("os._exit(3)", 3),
    "exits with an error": ("sys.exit(4)", 4),
    "kills itself": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "aborts": ("os.abort()", -signal.SIGABRT),
    # A forked child lives on, as a DataLoader's workers do: it must not keep the connections open.
    "kills itself with a child": ("os.fork() or time.sleep(120); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


@pytest.mark.parametrize("way", END_ITSELF)
def test_a_worker_that_ends_badly_is_lost_to_all_others_within_two_seconds(start: Start, way: str) -> None:
    action, code = END_ITSELF[way]
    script = f"""
    if rank == 1:
        for other in (0, 2): wait_for(f"ready{{other}}")
        mark("fault", time.monotonic())
        {action}
    survive()
    """

    def once() -> float:
        took = []
        for job in [start(wire, script) for wire in WIRES]:
            took.append(last_after(survivors(job, "PeerLost"), job.read("fault")))
            assert job.wait(1) == code
        return max(took)

    in_time(2.0, once)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]),
    ],
)
def test_a_worker_killed_between_the_halves_of_a_mapped_exchange_is_lost_to_all_others(start: Start, device: str) -> None:
    """The others have mapped its memory, and go on reading it until they know."""
    script = (
        f"    device = {device!r}\n"
        + """
    from stretto.fabric.mapped import MappedFabric
    share, uses = MappedFabric.share, []

    def dying(self, *arguments):
        uses.append(self)
        if rank == 1 and len(uses) == 3:
            mark("fault", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        return share(self, *arguments)

    MappedFabric.share = dying
    model = torch.nn.Linear(500, 500).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stretto.distribute(model, optimizer, stretto.Strategy(aggregate=stretto.Hierarchy(outer=stretto.AllReduce("ring"))))
    since = time.monotonic()
    try:
        for step in range(100):
            model(torch.ones(2, 500, device=device)).sum().backward()
            optimizer.step()
    except stretto.StrettoError as error: note(error, since)
    dead = uses[-1]._given[1][0]
    mark(f"readable{rank}", [dead.device.type, dead.double().sum().item()])
    """
    )
    job = start("tcp", script)
    assert job.read("fault") > 0
    survivors(job, "PeerLost")
    for rank in (0, 2):
        kind, total = job.read(f"readable{rank}")
        assert kind == device and total != 0.0
    assert job.wait(1) == -signal.SIGKILL


def test_a_worker_killed_between_two_exchanges_of_local_sgd_is_lost_to_all_others_at_the_second(start: Start) -> None:
    script = """
    model = torch.nn.Linear(4, 4)
    model, optimizer = stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), stretto.recipes.diloco(4))
    since = time.monotonic()
    try:
        for step in range(8):
            if step == 6 and rank == 1:
                mark("fault", time.monotonic())
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            mark(f"took{rank}", step + 1)
    except stretto.StrettoError as error: note(error, since)
    """
    job = start("tcp", script)
    assert job.read("fault") > 0
    survivors(job, "PeerLost")
    assert job.wait(1) == -signal.SIGKILL
    assert [job.read(f"took{rank}") for rank in (0, 2)] == [7, 7]  # until the exchange nobody is needed


def test_a_worker_killed_in_a_layer_that_is_cut_is_lost_to_all_others(start: Start) -> None:
    """Also to those whose own partners live: they wait for workers that wait for it."""
    script = """
    mesh = stretto.Mesh(data=2, model=2)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = stretto.tensor_parallel(torch.nn.Sequential(layer, torch.nn.Linear(16, 4)), mesh, stretto.recipes.megatron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stretto.distribute(model, optimizer, stretto.Strategy(aggregate=stretto.AllReduce("ring")))
    forwards = []

    def die(module, arguments):
        forwards.append(module)
        if rank == 3 and len(forwards) == 3:
            mark("fault", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    model[0].linear2.register_forward_pre_hook(die)
    since = time.monotonic()
    try:
        for step in range(1000):
            model(torch.ones(2, 5, 16)).sum().backward()
            optimizer.step()
    except stretto.StrettoError as error: note(error, since)
    """

    def once() -> float:
        job = start("tcp", script, workers=4)
        found = survivors(job, "PeerLost", culprit=3)
        assert job.wait(3) == -signal.SIGKILL
        return last_after(found, job.read("fault"))

    in_time(2.0, once)


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["register_forward_pre_hook", "register_full_backward_hook"])
def test_a_worker_killed_while_parameters_are_gathered_is_lost_to_all_others(start: Start, hook: str) -> None:
    script = f"""
    blocks = [torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Tanh()) for _ in range(6)]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shard = stretto.Strategy(aggregate=stretto.AllReduce("ring"), schedule=stretto.WaitFree(), shard=stretto.Zero(3))
    stretto.distribute(model, optimizer, shard)
    passes = []

    def die(*_):
        passes.append(None)
        if rank == 1 and len(passes) == 3:
            mark("fault", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    model[3].{hook}(die)
    since = time.monotonic()
    try:
        for step in range(1000):
            model(torch.ones(2, 200)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except stretto.StrettoError as error: note(error, since)
    """

    def once() -> float:
        job = start("tcp", script)
        found = survivors(job, "PeerLost")
        assert job.wait(1) == -signal.SIGKILL
        return last_after(found, job.read("fault"))

    in_time(2.0, once)


def test_a_worker_killed_in_the_middle_of_large_transfers_is_lost_to_all_others(start: Start) -> None:
    script = """
    since = time.monotonic()
    try:
        for step in range(100_000):
            all_reduce(1_000_000)
            if step == 3: mark(f"running{rank}")
    except stretto.StrettoError as error: note(error, since)
    """

    def once(wire: str) -> float:
        job = start(wire, script)
        for rank in range(3):
            job.read(f"running{rank}")
        fault_at = time.monotonic()
        os.kill(job.pids[1], signal.SIGKILL)
        took = last_after(survivors(job, "PeerLost"), fault_at)
        assert job.wait(1) == -signal.SIGKILL
        return took

    for wire in WIRES:
        in_time(2.0, lambda wire=wire: once(wire))  # type: ignore[misc]


def test_a_stopped_worker_is_lost_to_all_others_within_the_heartbeat_limit(start: Start) -> None:
    silence_s = 2.0
    script = """
    if rank == 1:
        wait_for("never", 120)
    survive()
    """

    def once() -> float:
        jobs = [start(wire, script, silence_s=silence_s) for wire in WIRES]
        stopped_at = []
        for job in jobs:
            for rank in range(3):
                job.read(f"ready{rank}")
            os.kill(job.pids[1], signal.SIGSTOP)
            stopped_at.append(time.monotonic())
        took = [last_after(survivors(job, "PeerLost"), at) for job, at in zip(jobs, stopped_at, strict=True)]
        assert [job.state(1) for job in jobs] == ["T"] * len(jobs)
        return max(took)

    in_time(1.1 * silence_s + 0.5, once)


def test_a_worker_that_hangs_is_named_at_the_deadline(start: Start) -> None:
    arrive_s = 3.0
    script = """
    if rank == 1:
        mark("fault", time.monotonic())
        wait_for("never", 120)
    survive()
    """

    def once() -> float:
        jobs = [start(wire, script, arrive_s=arrive_s, silence_s=2.0) for wire in WIRES]
        took = []
        for job in jobs:
            found = survivors(job, "WireTimeout")
            assert min(caught["at"] - caught["since"] for caught in found) > arrive_s - 0.1  # and not before the deadline
            took.append(max(caught["at"] - max(caught["since"], job.read("fault")) for caught in found))
            assert job.state(1) in ("S", "R", "D") and job.exit_code(1) is None  # alive and not stopped: it hangs
        return float(max(took))

    in_time(arrive_s + 1.0 + 0.8, once)  # at most 1 s to hear from everybody who has arrived


@pytest.mark.slow
def test_a_busy_worker_is_not_lost(start: Start) -> None:
    """In pure Python its communication thread gets its turn; in a C call that keeps the interpreter lock it does not."""
    script = """
    if rank == 1:
        start = time.monotonic()
        while time.monotonic() < start + 3.0: sum(range(1000))
        mark("was busy", time.monotonic() - start)
    all_reduce()
    if rank == 1:
        start = time.monotonic()
        ctypes.PyDLL(None).sleep(4)  # keeps the interpreter lock
        mark("was holding the lock", time.monotonic() - start)
    all_reduce()
    mark(f"done{rank}")
    """
    jobs = [start(wire, script, silence_s=2.5) for wire in WIRES]
    for job in jobs:
        assert [job.wait(rank) for rank in range(3)] == [0, 0, 0], job.output()
        assert all(job.there(f"done{rank}") for rank in range(3))
        assert job.read("was busy") > 2.5 and job.read("was holding the lock") > 2.5
    assert "its process" in jobs[0].output() and "is running: it seems to hold the interpreter lock" in jobs[0].output()


# Leaving in order.


def test_workers_that_are_done_earlier_are_no_error_to_those_who_need_nothing_from_them(start: Start) -> None:
    script = """
    tensor = torch.full((4_000_000,), float(rank))
    stretto.broadcast(tensor, root=1)     # a chain: the root is done long before the last
    assert tensor[0] == 1 and tensor[-1] == 1
    if rank == 1: pass                    # the script just ends
    elif rank == 2: stretto.shutdown()
    elif rank == 3: sys.exit(0)
    else:
        wait_for("all others are gone")
        assert stretto.rank() == 0 and stretto.world_size() == 4
        survive()                         # and who does need them is told what happened
    """
    for job in [start(wire, script, workers=4) for wire in WIRES]:
        assert [job.wait(rank) for rank in (1, 2, 3)] == [0, 0, 0], job.output()
        job.mark("all others are gone")
        assert job.wait(0) == 0, job.output()
        caught = job.read("caught0")
        assert caught["kind"] == "PeerLost" and caught["rank"] in (1, 2, 3) and "left the job" in caught["text"]
        assert "Traceback" not in job.output() and "lost" not in job.output()


def test_a_job_that_ends_right_after_it_began_ends_in_order_everywhere(start: Start) -> None:
    for job in [start(wire, "", workers=4) for wire in WIRES]:
        assert [job.wait(rank) for rank in range(4)] == [0, 0, 0, 0], job.output()
        assert all(log.read_text() == "" for log in job.folder.glob("log*")), job.output()


def test_the_death_of_the_coordinator_does_not_end_the_training(start: Start) -> None:
    script = """
    wait_for("the coordinator is dead")
    for _ in range(20): all_reduce()
    mark(f"trained{rank}", time.monotonic())
    stretto.shutdown()
    mark(f"left{rank}", time.monotonic())
    """
    for job in [start(wire, script) for wire in WIRES]:
        for rank in range(3):
            job.read(f"ready{rank}")
        job.coordinator.kill()
        assert job.coordinator.wait(60) == -signal.SIGKILL
        job.mark("the coordinator is dead")
        assert [job.wait(rank) for rank in range(3)] == [0, 0, 0], job.output()
        took = [job.read(f"left{rank}") - job.read(f"trained{rank}") for rank in range(3)]
        assert max(took) < 20, took  # nor does anybody wait for it at the end, as at the beginning (`connect_s`)


# Ranks that disagree.


def test_ranks_that_call_different_collectives_all_get_an_error_and_can_go_on(start: Start) -> None:
    script = """
    def sum_of(*shape, **options):
        return lambda: stretto.all_reduce(torch.ones(*shape, **options), algorithm="ring")

    calls = [
        (sum_of(10), sum_of(11), sum_of(10)),
        (sum_of(10, dtype=torch.float64), sum_of(10), stretto.barrier),
        (sum_of(1 << 20), sum_of((1 << 20) + 1), stretto.barrier),
    ]
    caught = []
    for call in calls:
        try: call[rank]()
        except stretto.RankMismatch as error: caught.append(str(error))
    mark(f"caught{rank}", caught)
    all_reduce()
    """
    for job in [start(wire, script) for wire in WIRES]:
        assert [job.wait(rank) for rank in range(3)] == [0, 0, 0], job.output()
        for rank in range(3):
            lengths, dtypes, kinds = job.read(f"caught{rank}")
            assert "float32[10]" in lengths and "float32[11]" in lengths and "rank 1" in lengths
            assert "float64[10]" in dtypes and "float32[10]" in dtypes and "barrier" in dtypes
            assert "float32[1048577]" in kinds and "barrier" in kinds


# The same through the launchers that users have.

RAISE_UNDER_STRETTO_RUN = """
import json, sys
import torch, stretto
folder = sys.argv[1]
stretto.init()
try:
    stretto.barrier()
    if stretto.rank() == 1:
        raise RuntimeError("on purpose")
    stretto.barrier()
except stretto.PeerLost as error:
    open(f"{folder}/caught{stretto.rank()}", "w").write(json.dumps([error.rank, error.reason]))
    raise
"""


@pytest.mark.slow
def test_under_stretto_run_the_worker_that_raised_is_blamed_and_the_others_saw_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RAISE_UNDER_STRETTO_RUN)
    # The launcher gives workers a second to end by themselves. A busy machine may need longer to take three of them apart.
    patient = "from stretto import cli; from stretto.launching import launch; launch.LAST_WORDS_S = 150.0; cli.main()"
    command = [sys.executable, "-c", patient, "run", "-n", "3", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    blamed = done.stderr.rpartition("stretto: rank ")[2]  # the last block: who failed first, and its traceback
    assert blamed.startswith("1 of 3 failed first")
    assert "RuntimeError: on purpose" in blamed
    for rank in (0, 2):
        lost, reason = json.loads((tmp_path / f"caught{rank}").read_text())
        assert lost == 1 and "its connection" in reason  # which broke: nobody had to wait until it was silent for long


def raise_on_rank_1() -> None:
    stretto.init()
    stretto.barrier()
    if stretto.rank() == 1:
        raise RuntimeError("on purpose")
    stretto.barrier()


def test_launch_raises_what_the_failing_worker_raised_and_not_what_others_saw_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "ACCUSED_S", 150.0)  # for a machine on which rank 1 takes longer to say so than the others
    with pytest.raises(stretto.WorkerFailed, match="on purpose") as caught:
        stretto.launch(raise_on_rank_1, 3, timeout_s=200, start_method="fork")
    assert caught.value.rank == 1
