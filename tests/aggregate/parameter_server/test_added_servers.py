"""Servers that were started apart, and who joins them while a job trains: servers that are added take a part over, and workers
that have died come back. No update is lost or applied twice.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from aggregate.parameter_server.test_dedicated import SECRET, with_secret
from preloaded import Preloaded
from stretto.aggregate.parameter_server import ParameterServer
from stretto.aggregate.parameter_server.process import serve
from stretto.distributing import distribute
from stretto.errors import SecretError
from stretto.job import Job, meet
from stretto.launching import launch_plan
from stretto.launching.detect import DedicatedServers, Launch
from stretto.launching.peers import Peer
from stretto.launching.server_meeting import JoiningServer
from stretto.observe.merge import read, read_servers
from stretto.schedule.orders import Buckets
from stretto.schedule.tictac import Tac
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs
from stretto.timeouts import Timeouts

PATIENCE_S = 30.0
TIMEOUTS = Timeouts(connect_s=PATIENCE_S, arrive_s=PATIENCE_S, meet_s=PATIENCE_S)


class Servers:
    """Servers that were started apart, in threads of this process."""

    def __init__(self, workers: int, begin: int) -> None:
        self.at = f"127.0.0.1:{launch_plan.free_port()}"
        self.workers, self.begin = workers, begin
        self.ended: list[Future[bool]] = []
        for number in range(begin):
            self.start(number)

    def server(self, number: int, secret: str = SECRET) -> JoiningServer:
        return JoiningServer(
            number=number, num_servers=self.begin, num_workers=self.workers, rendezvous=self.at, secret=bytes.fromhex(secret),
            encrypt=False, added=number >= self.begin,
        )  # fmt: skip

    def start(self, number: int, when: threading.Event | None = None) -> None:
        """Now, or when a worker says so: the thread belongs to the test and not to the worker."""
        ended: Future[bool] = Future()
        self.ended.append(ended)
        server = self.server(number)

        def run() -> None:
            try:
                assert when is None or when.wait(PATIENCE_S)
                wire = meet(server.launch, TIMEOUTS, accept_later=True)
                ended.set_result(serve(wire, range(self.workers), TIMEOUTS, launch=server.launch))
            except BaseException as error:
                ended.set_exception(error)

        threading.Thread(target=run, name=f"server {number}", daemon=True).start()

    def join(self, job: Job) -> None:
        """What `stretto.init` does where STRETTO_SERVERS is set."""
        job.launch = self.known_to(job.launch)
        job.meet_servers()

    def known_to(self, launch: Launch) -> Launch:
        servers = DedicatedServers(self.begin, self.at, encrypt=False)
        return dataclasses.replace(launch, secret=bytes.fromhex(SECRET), servers=servers)


class Summed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.w.sum()


class Counted:
    """A model of which each step adds exactly 1 to every value."""

    def __init__(self, job: Job, sync: Any, replicas: int = 0, schedule: Any = None) -> None:
        self.job = job
        self.steps = 0
        self.model = torch.nn.Sequential(*(Summed() for _ in range(6)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        strategy = Strategy(aggregate=ParameterServer(replicas=replicas), sync=sync, schedule=schedule or Buckets())
        distribute(self.model, self.optimizer, strategy, job=job)

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(torch.zeros(())))
        self.optimizer.step()
        self.steps += 1

    def step_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline
            self.step()

    def check(self) -> None:
        """One worker after the other reads all steps before its own last one."""
        total = sum(self.job.gather_object(self.steps))
        for rank in range(self.job.world_size):
            if rank == self.job.rank:
                self.step()
            self.job.barrier()
        assert set(self.values()) == {total + 1 + self.job.rank}

    def values(self) -> list[float]:
        stretto.synchronize(self.model)
        return [float(value) for parameter in self.model.parameters() for value in parameter.detach()]


def test_servers_that_are_added_while_workers_train_serve_a_part_and_no_update_is_lost_or_applied_twice() -> None:
    servers, now = Servers(workers=2, begin=1), threading.Event()
    for number in (1, 3):  # one number is left out
        servers.start(number, now)

    def program(job: Job) -> None:
        servers.join(job)
        counted = Counted(job, Asynchronous())
        for _ in range(3):
            counted.step()
        job.barrier()
        now.set()
        counted.step_until(lambda: job.ledger.sent["push", 3] > 0 and job.ledger.sent["push", 5] > 0)
        for _ in range(5):
            counted.step()
        counted.check()
        ledgers = stretto.server_ledgers(counted.model)
        assert sorted(ledgers) == [2, 3, 5] and all(ledger.updates for ledger in ledgers.values())
        job.barrier()
        again = Counted(job, Asynchronous(), replicas=0)  # begins on all three
        again.step()
        again.check()
        sent = [job.ledger.sent["push", server] for server in (2, 3, 5)]
        assert min(sent) > 0, sent

    run_jobs(2, program, timeout_s=2 * PATIENCE_S)
    assert [each.result(PATIENCE_S) for each in servers.ended] == [True] * 3


@pytest.mark.parametrize("schedule", [Buckets(), Tac()], ids=["buckets", "ordered"])
def test_a_worker_comes_back_to_servers_that_were_started_apart(schedule: Any) -> None:
    servers, is_back = Servers(workers=2, begin=1), threading.Event()

    def first_worker(job: Job, counted: Counted) -> None:
        network = job.server_networks[0]
        counted.step_until(lambda: 1 in network._wire.lost)  # no step of the other's counts from now on
        counted.step_until(is_back.is_set)
        for _ in range(10):  # nobody is more than 2 steps ahead
            counted.step()

    def program(job: Job) -> tuple[int, int, int]:
        servers.join(job)
        counted = Counted(job, StaleSynchronous(2), schedule=schedule)
        for _ in range(4):
            counted.step()
        if job.rank == 0:
            first_worker(job, counted)
            return 0, counted.steps, 0
        job.close(goodbye=False)  # as one that dies
        peers = [Peer(rank, rank, "here", "127.0.0.1:1", 1, generation=rank) for rank in range(2)]
        again = Job(servers.known_to(job.launch), peers, None, TIMEOUTS)
        back = Counted(again, StaleSynchronous(2), schedule=schedule)
        begins = back.values()
        is_back.set()
        for _ in range(10):
            back.step()
        values = back.values()
        again.close(goodbye=True)
        assert min(begins) >= 8, "the steps of both workers, and not the zeros that it began with"
        assert again.first_step >= 4 and min(values) >= min(begins) + 10
        return again.first_step, back.steps, again.life

    (_, _, _), (first_step, steps, life) = run_jobs(2, program, timeout_s=2 * PATIENCE_S)
    assert (steps, life) == (10, 1) and first_step >= 4
    assert [each.result(PATIENCE_S) for each in servers.ended] == [True]


def test_a_server_without_the_secret_is_not_added_and_nobody_hears_of_it() -> None:
    servers = Servers(workers=2, begin=1)

    def program(job: Job) -> list[int]:
        servers.join(job)
        counted = Counted(job, Asynchronous())
        if job.rank == 0:
            stranger = servers.server(1, secret="5b" * 32)
            with pytest.raises(SecretError, match="turned away at the rendezvous"):
                meet(stranger.launch, TIMEOUTS, accept_later=True)
        for _ in range(3):
            counted.step()
        counted.check()
        found: list[int] = job.server_networks[0].all_servers
        return found

    assert run_jobs(2, program, timeout_s=2 * PATIENCE_S) == [[2], [2]]


GROWS = """
import os, signal, sys, time
from pathlib import Path
import torch, stretto
from stretto import Asynchronous, ParameterServer, Strategy

job = stretto.init()
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
with torch.no_grad():
    for parameter in model.parameters(): parameter.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
stretto.distribute(model, optimizer, Strategy(aggregate=ParameterServer(replicas=1), sync=Asynchronous()))
network, steps = job.server_networks[0], 0

def step():
    global steps
    optimizer.zero_grad()
    (-sum(parameter.sum() for parameter in model.parameters())).backward()
    optimizer.step()
    steps += 1

def step_until(reached):
    end = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < end
        step()
        time.sleep(0.01)  # a computation

def process(number):
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = cmdline.read_bytes().decode().split("\\0")
        except OSError:
            continue
        if "--life" in words and job.launch.servers.rendezvous in words and not any("keeper" in word for word in words):
            if words[words.index("--number") + 1] == str(number):
                return int(cmdline.parent.name)

for _ in range(3): step()
stretto.barrier()
Path("now").touch()  # the shell adds server 2
step_until(lambda: job.ledger.sent["push", 4] > 0 and network.every_part_has_copies(1))
stretto.barrier()
life = network.lives[2]
if job.rank == 0:
    os.kill(process(2), signal.SIGKILL)
step_until(lambda: network.lives[2] > life and network.every_part_has_copies(1))
print("lives", *network.lives, flush=True)
stretto.barrier()
before = job.ledger.sent["push", 4]
step_until(lambda: job.ledger.sent["push", 4] > before)
total = sum(stretto.gather_object(steps))
for rank in (0, 1):  # one after the other: each reads all steps before it, and its own
    if job.rank == rank:
        step()
    stretto.barrier()
found = {float(value) for parameter in model.parameters() for value in parameter.detach().flatten()}
print("exact", found == {total + 1 + job.rank}, flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_server_process_is_added_is_killed_and_comes_back_and_every_update_counts_once(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    (tmp_path / "grows.py").write_text(GROWS)
    meeting = with_secret(tmp_path)
    serve = f"stretto serve --secret-file job.secret --rendezvous {meeting} --workers 2 --servers 2 --trace traces"
    later = f"(while [ ! -e now ]; do sleep 0.1; done; {serve} --add --number 2 --restarts 2)"
    starts = f"{serve} --number 0 & {serve} --number 1 & {later} &"
    run = f"STRETTO_SERVERS=2@{meeting} stretto run -n 2 --secret-file job.secret --no-prefix --trace traces grows.py"
    done = preloaded.shell(f"mkdir traces; {starts} {run} || exit 1; wait", folder=tmp_path, timeout_s=290)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exact True") == 2 and done.stdout.count("lives 0 0 2") == 2, done.stdout
    assert done.stderr.count("server 2 has been added, and takes its part") == 2
    assert done.stderr.count("server 2 has been started again, and has joined") == 2
    assert "server 2 added to 2 has ended: all workers have left" in done.stderr
    servers = read_servers(tmp_path / "traces", read(tmp_path / "traces"))
    assert [each.otherData.server for each in servers] == [0, 1, 2]
    assert all(any(event.cat == "reduce" for event in each.traceEvents) for each in servers)
