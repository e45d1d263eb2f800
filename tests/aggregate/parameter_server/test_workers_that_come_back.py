"""Workers that were killed are started again by `stretto run`, and go on with what the servers have: real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from preloaded import Preloaded
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.launching.detect import Launch
from stretto.launching.peers import Peer
from stretto.parsing import parse
from stretto.returning import check_return
from stretto.timeouts import Timeouts

COMES_BACK = """
import os, signal, time
import torch, stretto
from stretto import ParameterServer, StaleSynchronous, Strategy

job = stretto.init(timeouts=stretto.Timeouts(arrive_s=60.0))
model = torch.nn.Linear(4, 1)
with torch.no_grad():
    for parameter in model.parameters(): parameter.fill_(-1000.0 * bool(job.life))  # what it begins with does not count
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
stretto.distribute(model, optimizer, Strategy(aggregate=ParameterServer(shards=2, replicas=1), sync=StaleSynchronous(2)))
print("life", job.life, "begins at", job.first_step, "of", float(model.bias.detach()), flush=True)

def step():
    optimizer.zero_grad()
    (-sum(parameter.sum() for parameter in model.parameters())).backward()
    optimizer.step()

if job.life:
    for collective in (stretto.barrier, lambda: stretto.gather_object(1), lambda: stretto.all_reduce(torch.ones(2))):
        try:
            collective()
        except stretto.ConfigurationError as problem:
            print("refused:", "has come back to a job that went on without it" in str(problem), flush=True)
    try:
        stretto.save("x.pt", model, optimizer)
    except stretto.CheckpointError as problem:
        print("save refused:", "save and load take all workers" in str(problem), flush=True)
    open("back", "w").close()
for number in range(20):
    step()
if job.rank == 0 and not job.life:
    os.kill(os.getpid(), signal.SIGKILL)
end = time.monotonic() + 60
while not os.path.exists("back"):  # nobody waits for rank 0 before it is back
    assert time.monotonic() < end
    step()
    time.sleep(0.05)
stretto.shutdown()
print("left", flush=True)
"""


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize("servers", ["", pytest.param("--servers 2", marks=pytest.mark.slow)], ids=["beside", "apart"])
def test_rank_0_is_killed_and_comes_back_with_what_the_servers_have(servers: str, tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "comes.py").write_text(COMES_BACK)
    run = f"stretto run -n 2 {servers} --min-workers 1 --max-restarts 2 comes.py"
    done = preloaded.shell(run, folder=tmp_path, timeout_s=170)

    assert done.returncode == 0, done.stderr
    (back,) = re.findall(r"\[0\] life ([1-9]\d*) begins at (\d+) of (-?\d+)\.0", done.stdout)
    life, first_step, value = map(int, back)
    assert life == 1 and first_step >= 20 and 40 <= value <= first_step + 20 + 2
    assert done.stdout.count("refused: True") == 4 and "refused: False" not in done.stdout
    assert done.stdout.count("left") == 2
    assert "rank 1 goes on, and it is started again (restart 1 of 2)" in done.stderr
    assert "the job has ended with 1 that came back: rank 0 was killed by SIGKILL" in done.stderr.splitlines()[-1]


ALL_COME_BACK = """
import glob, os, signal, time
import torch, stretto
from stretto import ParameterServer, StaleSynchronous, Strategy

job = stretto.init(timeouts=stretto.Timeouts(arrive_s=60.0))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
servers = ParameterServer(shards=2, replicas=1, snapshots="snapshots", every_s=0.2)
stretto.distribute(model, optimizer, Strategy(aggregate=servers, sync=StaleSynchronous(2)))
if job.life:
    open(f"back{job.rank}", "w").close()
end = time.monotonic() + 60

def step_until(condition):
    while not condition():
        assert time.monotonic() < end
        optimizer.zero_grad()
        (-sum(parameter.sum() for parameter in model.parameters())).backward()
        optimizer.step()
        time.sleep(0.05)

if job.rank == 0 and not job.life:
    step_until(lambda: glob.glob("snapshots/*.snapshot"))
    os.kill(os.getpid(), signal.SIGKILL)
step_until(lambda: os.path.exists("back0"))
if job.rank == 1 and not job.life:
    os.kill(os.getpid(), signal.SIGKILL)
step_until(lambda: os.path.exists("back1"))
old = set(glob.glob("snapshots/*.snapshot"))
step_until(lambda: len(set(glob.glob("snapshots/*.snapshot")) - old) == 2)  # whatever was under way is the first of them
print("life", job.life, "goes on with snapshots", flush=True)
stretto.shutdown()
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_when_every_worker_has_died_and_come_back_there_are_snapshots_all_the_same(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "comes.py").write_text(ALL_COME_BACK)
    done = preloaded.shell("stretto run -n 2 --min-workers 1 --max-restarts 2 comes.py", folder=tmp_path, timeout_s=170)

    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"life [1-9]\d* goes on with snapshots", done.stdout)) == 2, done.stdout


def check_return_of_rank_1(strategy: str, num_optimizers: int) -> None:
    launch = Launch(1, 2, 1, 2, "127.0.0.1:1", bytes(32), False, "stretto")
    peers = [Peer(rank, rank, "here", "127.0.0.1:1", 1, generation=rank) for rank in range(2)]
    check_return(Job(launch, peers, None, Timeouts()), parse(strategy), num_optimizers)


@pytest.mark.parametrize(
    ("strategy", "num_optimizers", "reason"),
    [
        ("Strategy()", 1, "needs collectives"),
        ("Strategy(aggregate=ParameterServer())", 1, "needs collectives"),
        ("Strategy(aggregate=ParameterServer(), schedule=Tac())", 1, "needs collectives"),
        ("Strategy(aggregate=ParameterServer(), sync=StaleSynchronous(1))", 2, "one optimizer with several groups"),
        ("hogwild()", 1, "with aggregate=SharedMemory.*nobody is let into it later"),
        ("mxnet_mpi()", 1, "ranks 0, 1 are a group"),
        ("mxnet_mpi(group_size=2)", 1, "ranks 0, 1 are a group"),
        ("mxnet_mpi(elastic=Elastic(every=4))", 1, "ranks 0, 1 are a group"),
    ],
)
def test_what_a_worker_that_has_come_back_cannot_do_is_refused(strategy: str, num_optimizers: int, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"rank 1 has come back to a job(.|\n)*{reason}"):
        check_return_of_rank_1(strategy, num_optimizers)


@pytest.mark.parametrize(
    "strategy",
    [
        "Strategy(aggregate=ParameterServer(), sync=StaleSynchronous(1))",
        "Strategy(aggregate=ParameterServer(), sync=StaleSynchronous(1), schedule=Tac())",
        "mxnet_mpi(group_size=1)",
        "mxnet_mpi(group_size=1, elastic=Elastic(every=4))",
        "adpsgd()",
    ],
)
def test_a_worker_that_needs_nobody_else_may_come_back(strategy: str) -> None:
    check_return_of_rank_1(strategy, 1)
