"""How it is measured: every contender in turn, so that whatever else the machine does hits all of them alike.

    round k: for each contender, in an order rotated by k:
        fill the tensor; barrier; run; note this rank's time

The time of a measurement is that of the slowest rank. Two rounds first that do not count (connections, buffers, plans); in the
first of them every result is compared with the known sum. Values are small whole numbers, so the sum is exact in any order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from stretto.bench.busy import run_under
from stretto.bench.contenders import Contender, Ours
from stretto.bench.results import Row, Times, make_rows
from stretto.bench.settings import ELEMENT_BYTES, Load, Settings
from stretto.errors import JobError
from stretto.job import Job

PATTERN = 97
Progress = Callable[[str], None]


class Field:
    """The tensors of one size: what every rank starts from, and what the sum must be."""

    def __init__(self, job: Job, num_bytes: int, device: torch.device) -> None:
        pattern = torch.arange(num_bytes // ELEMENT_BYTES, device=device).remainder_(PATTERN).to(torch.float32)
        size = job.world_size
        self.mine = pattern + job.rank
        self.sum = pattern * size + size * (size - 1) // 2
        self.tensor = torch.empty_like(self.mine)

    def fill(self) -> None:
        self.tensor.copy_(self.mine)

    def settle(self) -> None:
        """Wait for the GPU, so that its work is part of the time."""
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)


def measure_size(job: Job, settings: Settings, size: int, contenders: Sequence[Contender]) -> list[Row]:
    """All rows of one size. Every rank calls it and gets the same."""
    device = job.device if settings.device == "cuda" else torch.device("cpu")
    field = Field(job, size, device)
    rows: list[Row] = []
    stream_s: float | None = None
    for load in settings.loads:
        taking_part = [each for each in contenders if load == "idle" or each.wire != "tcp"]
        measured = alternate(job, settings, field, taking_part, load)
        if load == "idle":
            stream_s = next((statistics.median(each.seconds) for each in measured if each.wire == "tcp"), None)
        rows += make_rows(size, load, job.world_size, measured, stream_s)
    return rows


def alternate(job: Job, settings: Settings, field: Field, contenders: Sequence[Contender], load: Load) -> list[Times]:
    """Each contender once per round, in rotating order; the slowest rank's time of each."""
    for number in range(settings.warm_up):
        for contender in contenders:
            _time_once(job, field, contender, load)
            if number == 0 and contender.wire != "tcp":
                _check_sum(job, field, contender)
    seconds = torch.zeros(settings.repeat, len(contenders), dtype=torch.float64)
    for number in range(settings.repeat):
        for offset in range(len(contenders)):
            index = (number + offset) % len(contenders)
            seconds[number, index] = _time_once(job, field, contenders[index], load)
    slowest = job.all_gather(seconds).amax(dim=0)
    return [
        Times(contender=each.name, wire=each.wire, chosen=_chosen(each, field), seconds=slowest[:, index].tolist())
        for index, each in enumerate(contenders)
    ]


def _time_once(job: Job, field: Field, contender: Contender, load: Load) -> float:
    field.fill()
    field.settle()
    job.barrier()
    begin = time.perf_counter()
    run_under(load, contender, field.tensor)
    field.settle()
    return time.perf_counter() - begin


def _check_sum(job: Job, field: Field, contender: Contender) -> None:
    right = job.gather_object(torch.equal(field.tensor, field.sum))
    wrong = [rank for rank, is_right in enumerate(right) if not is_right]
    if wrong:
        raise JobError(
            f"{contender.name} over {contender.wire} gave a wrong sum of {field.tensor.numel()} numbers on ranks {wrong}, "
            f"so its speed means nothing.\nThis is a bug: please report it with the output of `stretto doctor`."
        )


def _chosen(contender: Contender, field: Field) -> str:
    return contender.chosen(field.tensor) if isinstance(contender, Ours) else contender.name
