"""Workers of servers that step die by SIGKILL, and the others go on: real processes under `stretto run --min-workers`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from preloaded import Preloaded

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

COUNTS = """
import os, signal, sys, time
import torch, stretto
from stretto import BackupWorkers, ParameterServer, StaleSynchronous, Strategy

sync, victims, steps = eval(sys.argv[1]), eval(sys.argv[2]), int(sys.argv[3])
job = stretto.init(timeouts=stretto.Timeouts(arrive_s=30.0))
model = torch.nn.Linear(4, 1)
with torch.no_grad():
    for parameter in model.parameters(): parameter.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
stretto.distribute(model, optimizer, Strategy(aggregate=ParameterServer(shards=2, replicas=1), sync=sync))

def step():
    optimizer.zero_grad()
    (-sum(parameter.sum() for parameter in model.parameters())).backward()
    optimizer.step()

for number in range(3):
    step()
if job.rank in victims:
    print("dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
for number in range(steps - 3):
    step()

def wait_until(what, condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)

wait_until("the deaths are known", lambda: set(victims) <= set(job.missing))
try:
    stretto.save("all.pt", model, optimizer)
except stretto.CheckpointError as problem:
    print("save:", str(problem).splitlines()[0][:90], flush=True)
try:
    stretto.barrier()
except stretto.PeerLost as problem:
    print("barrier: lost", problem.rank, flush=True)
torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, f'alone{job.rank}.pt')
with torch.no_grad():
    model(torch.ones(1, 4))
living = job.world_size - len(victims)
wait_until("everybody's steps are in", lambda: (step(), float(model.bias.detach()))[1] >= 3 * len(victims) + steps * living)
print("values", len({float(v) for p in model.parameters() for v in p.detach().flatten()}), flush=True)
stretto.shutdown()
print("left", flush=True)
"""


@pytest.mark.parametrize(
    ("sync", "victims"), [("StaleSynchronous(1)", [0, 2]), ("BackupWorkers(1)", [0])], ids=["bounded staleness", "backup workers"]
)
def test_the_others_train_on_when_workers_are_killed(tmp_path: Path, preloaded: Preloaded, sync: str, victims: list[int]) -> None:
    (tmp_path / "counts.py").write_text(COUNTS)
    command = f"stretto run -n 3 --min-workers 1 counts.py '{sync}' '{victims}' 40"
    done = preloaded.shell(command, folder=tmp_path)
    living = [rank for rank in range(3) if rank not in victims]

    assert done.returncode == 3, done.stderr
    assert done.stdout.count("dies") == len(victims)
    for rank in living:
        said = [line.removeprefix(f"[{rank}] ") for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert any(line.startswith("save: save and load take all workers") for line in said), done.stdout
        assert any(re.match(r"barrier: lost \d", line) for line in said) and said[-2:] == ["values 1", "left"]
    assert all(f"rank {rank} was killed by SIGKILL" in done.stderr for rank in victims)
    assert f"the job has ended without {len(victims)} of 3 workers" in done.stderr.splitlines()[-1]
