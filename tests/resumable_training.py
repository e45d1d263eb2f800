"""A training script for tests of checkpoints: `resumable_training.py CHECKPOINT STEPS [KILL_AFTER]`.

Resumes if the checkpoint is there. Dropout, numpy and Python's random take part, so that every generator matters; the data comes
through a DataLoader. With KILL_AFTER it saves after that step, and the last worker kills itself at once. Rank 0 prints a digest.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.checkpoint import load, save
from stretto.distribute import distribute
from stretto.sampler import Sampler

path, num_steps, kill_after = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None
job = stretto.init()
torch.manual_seed(job.rank)
random.seed(job.rank)
np.random.seed(job.rank)
data = TensorDataset(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)))
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = distribute(model, optimizer)
sampler = Sampler(data, seed=2, drop_last=True)
loader = DataLoader(data, batch_size=5, sampler=sampler)
step = load(path, model, optimizer, sampler=sampler).extra["step"] if path.exists() else 0
while step < num_steps:
    for (x,) in sampler.follow(loader):
        noise = random.random() + float(np.random.rand())
        model(x).sub(noise).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == kill_after:
            save(path, model, optimizer, sampler=sampler, extra={"step": step})
            if job.rank == job.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if step >= num_steps:
            break
parts = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
everybody = job.gather_object(hashlib.sha256(b"".join(parts)).hexdigest())  # buffers are each worker's own until the next forward
if job.rank == 0:
    print("digests", *everybody)
stretto.shutdown()
