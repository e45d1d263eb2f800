"""A worker whose wait for the others is ended by a signal: for a test that runs it in processes (`preloaded.launch`)."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import torch

import stretto
from engine.worker import data, mlp, start
from stretto.errors import RankMismatch


class Alarm(Exception):
    pass


def interrupted_once(folder: str) -> str:
    """An alarm goes off on rank 1 while its backward waits for rank 0, and is caught there."""
    job = stretto.init()
    model = mlp()
    optimizer = start(job, model)
    fired, caught = Path(folder) / "fired", False

    def alarm(*_: Any) -> None:
        fired.touch()
        raise Alarm

    if job.rank == 1:
        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            torch.autograd.backward(model(data(job.rank)).pow(2).mean())
        except Alarm:
            caught = True
    else:
        until = time.monotonic() + 60
        while not fired.exists() and time.monotonic() < until:
            time.sleep(0.01)
        torch.autograd.backward(model(data(job.rank)).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    try:
        torch.autograd.backward(model(data(job.rank, 1)).pow(2).mean())
    except RankMismatch as mismatch:
        return f"{caught}: {mismatch}"
    return "nobody was told"
