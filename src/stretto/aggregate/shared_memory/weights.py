"""The memory that all workers of a host have mapped: the parameters, and how many steps each worker has taken.

    | parameter 0 | parameter 1 | ... | steps of worker 0 | steps of worker 1 | ...

One worker makes it (`wire/mapping.py`: anonymous, so nothing is left of it when the last process that has mapped it is gone,
however that went), fills it, and tells the others where it is. Each part begins at a multiple of 64 bytes. So no number lies
across two words: reading one while another worker writes it gives the old or the new one, and never half of each. (Of a
complex128 that holds for the real and the imaginary part, each by itself.) Several numbers that belong together have no such
promise.

A worker counts only its own steps, and reads those of the others: no update of a count is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engine.training import Named
from stretto.errors import JobError
from stretto.job import Job
from stretto.wire.mapping import MappingOffer, OwnMapping, map_offered

ALIGNMENT: Final = 64
COUNT_BYTES: Final = 8


class SharedWeights:
    """One worker's view of it. All workers make it together, with the same parameters in the same order, and equal values."""

    def __init__(self, job: Job, named: Sequence[Named], num_counts: int) -> None:
        self._rank = job.rank
        sizes = [parameter.nbytes for _, parameter in named] + [COUNT_BYTES * num_counts] * job.world_size
        begins = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        memory = _map_together(job, begins[-1], named, begins)
        self.views = {p: _view(memory, begin, p) for (_, p), begin in zip(named, begins, strict=False)}
        counts = begins[len(named) : -1]
        self._counts = [memory[begin : begin + COUNT_BYTES * num_counts].view(np.int64) for begin in counts]

    def count_step(self, number: int) -> None:
        self._counts[self._rank][number] += 1

    def steps_of_others(self, number: int) -> int:
        return sum(int(counts[number]) for rank, counts in enumerate(self._counts) if rank != self._rank)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements, in whatever order, fill a piece of memory without gaps, each in a place of its own."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _view(memory: NDArray[np.uint8], begin: int, like: Tensor) -> Tensor:
    """A tensor with a storage of its own, just as long: what is saved of one parameter is not the memory of all."""
    if not like.numel():
        return like.detach()
    flat = torch.from_numpy(memory[begin : begin + like.nbytes]).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def _map_together(job: Job, num_bytes: int, named: Sequence[Named], begins: Sequence[int]) -> NDArray[np.uint8]:
    """Rank 0's memory, with its parameters in it. All workers get it, or all raise `JobError` with what went wrong."""
    mine, memory, problem, offer = None, None, "", None
    if job.rank == 0:
        try:
            mine = OwnMapping(num_bytes)
            memory, offer = mine.bytes, msgspec.to_builtins(mine.offer)
            for (_, parameter), begin in zip(named, begins, strict=False):
                _view(memory, begin, parameter).copy_(parameter.detach())
        except OSError as error:
            problem = f"rank 0 cannot make it: {error}"
    offer = job.gather_object(offer)[0]
    if job.rank != 0 and offer is not None:
        try:
            checked = msgspec.convert(offer, MappingOffer)
            if checked.num_bytes != num_bytes:
                raise ValueError(f"it has {checked.num_bytes} bytes where {num_bytes} are due")
            memory = map_offered(checked, writable=True)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            problem = f"rank {job.rank} cannot map what rank 0 offers: {error}"
    problems = job.gather_object(problem)  # also: everybody has mapped it, so the file is needed no longer
    if mine is not None:
        mine.close_file()
    for said in filter(None, problems):
        raise JobError(
            f"the workers cannot share {num_bytes} bytes of memory for the parameters: {said}.\n"
            f"Free memory on this host, or write aggregate=ParameterServer()."
        )
    assert memory is not None
    return memory
