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
def test_rank_0_is_killed_and_comes_back_with_what_the_servers_have(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "comes.py").write_text(COMES_BACK)
    done = preloaded.shell("stretto run -n 2 --min-workers 1 --max-restarts 2 comes.py", folder=tmp_path, timeout_s=170)

    assert done.returncode == 0, done.stderr
    (back,) = re.findall(r"\[0\] life ([1-9]\d*) begins at (\d+) of (-?\d+)\.0", done.stdout)
    life, first_step, value = map(int, back)
    assert life == 1 and first_step >= 20 and 40 <= value <= first_step + 20 + 2
    assert done.stdout.count("refused: True") == 4 and "refused: False" not in done.stdout
    assert done.stdout.count("left") == 2
    assert "rank 1 goes on, and it is started again (restart 1 of 2)" in done.stderr
    assert "the job has ended with 1 that came back: rank 0 was killed by SIGKILL" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("strategy", "num_optimizers", "reason"),
    [
        ("Strategy()", 1, "needs collectives"),
        ("Strategy(aggregate=ParameterServer())", 1, "needs collectives"),
        ("Strategy(aggregate=ParameterServer(), sync=StaleSynchronous(1), schedule=Tac())", 1, "plans nothing by measured times"),
        ("Strategy(aggregate=ParameterServer(), sync=StaleSynchronous(1))", 2, "one optimizer with several groups"),
    ],
    ids=["all-reduce", "servers that sum", "planned", "two optimizers"],
)
def test_what_a_worker_that_has_come_back_cannot_do_is_refused(strategy: str, num_optimizers: int, reason: str) -> None:
    launch = Launch(1, 2, 1, 2, "127.0.0.1:1", bytes(32), False, "stretto")
    peers = [Peer(rank, rank, "here", "127.0.0.1:1", 1, generation=rank) for rank in range(2)]
    with pytest.raises(ConfigurationError, match=f"rank 1 has come back to a job(.|\n)*{reason}"):
        check_return(Job(launch, peers, None, Timeouts()), parse(strategy), num_optimizers)
