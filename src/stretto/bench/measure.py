"""How it is measured: every contender in turn, so that whatever else the machine does hits all of them alike.

    a turn: fill the tensor; barrier; run; note this rank's time

The time of a measurement is that of the slowest rank. Two rounds first that do not count (connections, buffers, plans); in the
first of them every result is compared with the known sum. Values are small whole numbers, so the sum is exact in any order.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import torch

from stretto.bench.busy import run_under
from stretto.bench.contenders import Contender, Ours
from stretto.bench.results import AllReduceRow, Times, make_rows
from stretto.bench.settings import ELEMENT_BYTES, Load, Settings
from stretto.bench.turns import of_slowest_rank, take_turns, timed, wait_for
from stretto.errors import JobError
from stretto.job import Job

PATTERN = 97


class Operands:
    """The tensors of one size: what every rank starts from, and what the sum must be."""

    def __init__(self, job: Job, num_bytes: int, device: torch.device) -> None:
        pattern = torch.arange(num_bytes // ELEMENT_BYTES, device=device).remainder_(PATTERN).to(torch.float32)
        size = job.world_size
        self.mine = pattern + job.rank
        self.sum = pattern * size + size * (size - 1) // 2
        self.tensor = torch.empty_like(self.mine)

    def fill(self) -> None:
        self.tensor.copy_(self.mine)


def measure_size(job: Job, settings: Settings, size: int, contenders: Sequence[Contender]) -> list[AllReduceRow]:
    """All rows of one size. Every rank calls it and gets the same."""
    device = job.device if settings.device == "cuda" else torch.device("cpu")
    operands = Operands(job, size, device)
    rows: list[AllReduceRow] = []
    stream_s: float | None = None
    for load in settings.loads:
        taking_part = [each for each in contenders if load == "idle" or each.wire != "tcp"]
        measured = alternate(job, settings, operands, taking_part, load)
        if load == "idle":
            stream_s = next((statistics.median(each.seconds) for each in measured if each.wire == "tcp"), None)
        rows += make_rows(size, load, job.world_size, measured, stream_s)
    return rows


def alternate(job: Job, settings: Settings, operands: Operands, contenders: Sequence[Contender], load: Load) -> list[Times]:
    """Each contender once per round, in rotating order; the slowest rank's time of each."""
    for number in range(settings.warm_up):
        for contender in contenders:
            _time_once(job, operands, contender, load)
            if number == 0 and contender.wire != "tcp":
                _check_sum(job, operands, contender)
    turns = [partial(_time_once, job, operands, contender, load) for contender in contenders]
    slowest = of_slowest_rank(job, take_turns(turns, settings.repeat))
    return [
        Times(contender=each.name, wire=each.wire, chosen=_chosen(each, operands), seconds=seconds)
        for each, seconds in zip(contenders, slowest, strict=True)
    ]


def _time_once(job: Job, operands: Operands, contender: Contender, load: Load) -> float:
    operands.fill()
    wait_for(operands.tensor.device)
    job.barrier()
    return timed(lambda: run_under(load, contender, operands.tensor), operands.tensor.device)


def _check_sum(job: Job, operands: Operands, contender: Contender) -> None:
    right = job.gather_object(torch.equal(operands.tensor, operands.sum))
    wrong = [rank for rank, is_right in enumerate(right) if not is_right]
    if wrong:
        raise JobError(
            f"{contender.name} over {contender.wire} gave a wrong sum of {operands.tensor.numel()} numbers on ranks {wrong}, "
            f"so its speed means nothing.\nThis is a bug: please report it with the output of `stretto doctor`."
        )


def _chosen(contender: Contender, operands: Operands) -> str:
    return contender.chosen(operands.tensor) if isinstance(contender, Ours) else contender.name
