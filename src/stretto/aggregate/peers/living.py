"""What a program asks all workers that live: the mean of a vector, or the values of the first of them.

All workers call these at the same places of the program, as collectives of the job; whoever has died or finished is left out
(`meeting.py`). They need nothing of the job's own wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stretto.aggregate.peers.attempt_sum import Vector
from stretto.aggregate.peers.meeting import CountMeetings, Meet, MeetingMachine, Met, TakePart
from stretto.aggregate.peers.network import PeerNetwork
from stretto.job import Job

UNSENT_BYTES = 1 << 40  # what waits for a peer is part of the vector that was given, and takes no further memory


class LivingWorkers:
    """All workers of a job that live, for one model. Ends with its `owner`."""

    def __init__(self, network: PeerNetwork, job: Job, owner: object, name: str) -> None:
        self._network, self._job, self._name = network, job, name
        machine = MeetingMachine(job.rank, job.world_size, network.life)
        self._running = network.begin(machine, owner, about=f"meetings of {name}", unsent_bytes=UNSENT_BYTES)

    def mean(self, values: Tensor) -> tuple[Tensor, list[int]]:
        """Of float32 or float64: the same bits on all that live; and whose mean it is."""
        vector = values.detach().to("cpu").reshape(-1).contiguous().clone().numpy()
        met = self._meet(vector, None)
        mean = torch.from_numpy(met.vector).view(values.shape)
        return mean.to(values.device), met.members

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite these by those of the lowest rank that lives."""
        met = self._meet(as_bytes(tensors), -1)
        if met.members[0] != self._job.rank:
            put_bytes(met.vector, tensors)

    def members(self) -> list[int]:
        """Who lives and has come here, the same list on all of them."""
        return self._meet(np.empty(0, np.float32), None).members

    def count(self) -> tuple[int, bool]:
        """How many meetings this worker has come to, and whether it waits in the last one."""
        counted: tuple[int, bool] = self._running.request(CountMeetings()).result(self._job.timeouts.connect_s)
        return counted

    def enter(self, meeting: int) -> None:
        """For a worker that has come back: from this meeting on it takes part."""
        self._network.wait_for(self._running.request(TakePart(meeting)), "to let it in", self._job.timeouts.connect_s)

    def end(self) -> None:
        """This worker comes to no more."""
        self._network.end(self._running)

    def _meet(self, vector: Vector, copy_of: int | None) -> Met:
        patience_s = self._job.timeouts.arrive_s
        answer = self._running.request(Meet(vector, patience_s, copy_of, f" of {self._name}"))
        # It refuses by itself when others do not come; this is for the time in which one that is silent is found lost.
        met: Met = self._network.wait_for(answer, f"for a mean of {self._name}", patience_s + 2 * self._job.timeouts.silence_s)
        return met


def as_bytes(tensors: Sequence[Tensor]) -> Vector:
    """A copy of their elements, one tensor after the other."""
    parts = [each.detach().to("cpu").reshape(-1).contiguous().view(torch.uint8) for each in tensors if each.numel()]
    joined: Vector = np.concatenate([np.empty(0, np.uint8), *(part.numpy() for part in parts)])
    return joined


def put_bytes(values: Vector, tensors: Sequence[Tensor]) -> None:
    """The reverse."""
    stop = 0
    with torch.no_grad():
        for each in tensors:
            start, stop = stop, stop + each.numel() * each.element_size()
            if each.numel():
                part = torch.from_numpy(values[start:stop].copy()).view(each.dtype)
                each.copy_(part.view(each.shape))
