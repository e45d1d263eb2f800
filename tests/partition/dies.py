"""A worker of a pipeline of K stages, of which one dies in the middle of a step: python dies.py STAGES VICTIM KIND."""

import json
import os
import signal
import sys
import time

import torch
from torch import nn

import stretto

stages, victim, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
stretto.init(timeouts=stretto.Timeouts(arrive_s=60))
rank, step = stretto.rank(), 0


class Fault(nn.Module):
    """Ends this process, or raises, in the second micro-batch of the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if rank == victim and step == 2 and self.calls == 2 * 4 + 2:
            with open("happened", "w") as file:
                json.dump(time.monotonic(), file)
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("no such thing")
        result: torch.Tensor = self.linear(x)
        return result


torch.manual_seed(0)
model = nn.Sequential(*(Fault() for _ in range(stages)))
pipeline = stretto.pipeline(model, stages, 4)
optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
if pipeline.replicas > 1:
    stretto.distribute(pipeline.module, optimizer)
try:
    for number in range(5):
        step = number
        optimizer.zero_grad()
        pipeline.forward_backward(torch.ones(8, 4), torch.ones(8, 4), nn.functional.mse_loss)
        optimizer.step()
except (stretto.StrettoError, RuntimeError) as error:
    at = time.monotonic()
    caught = {"kind": type(error).__name__, "rank": getattr(error, "rank", None), "text": str(error), "at": at, "step": step}
    caught["notes"] = getattr(error, "__notes__", [])
    with open(f"caught{rank}.new", "w") as file:
        json.dump(caught, file)
    os.rename(f"caught{rank}.new", f"caught{rank}")
    raise
