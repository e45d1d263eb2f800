"""One worker of `compress_step.py`: python benchmarks/compress_worker.py SETTINGS FILE, started once per lab host.

As in `step_worker.py`, all contenders live in the same processes, each with its own copy of the model, and take turns in every
round; a round's time is that of the slowest rank. "no communication" is the same loop without any exchange: the limit.
"""

from __future__ import annotations

import sys

import msgspec
import torch
from step_models import Workload, gpt, gpt2, workloads
from step_worker import DDP, DDP_FP16, LIMIT, TrainedModel, alternate, device_of, take_part

from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now
from stretto.job import Job

WARM_UP = 6  # more than a schedule watches before it makes its plan
STEPS = 2  # of a turn: the second begins while the links' buckets are as the first has left them, as in training


class CompressStepSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`strategies`: name in the table -> text of a strategy."""

    strategies: dict[str, str]
    peers: tuple[str, ...] = (LIMIT, DDP, DDP_FP16)
    hosts: int = 4
    workers: int = 1  # of each host
    model: str = "gpt"  # of the size below, or the name of another workload
    rate: str | None = None
    rounds: int = 9
    rows: int = 4  # of each worker's batch
    length: int = 64
    width: int = 192
    depth: int = 6
    device: str = "cpu"
    rho: float | None = None  # what the rate was chosen for


class CompressStepRow(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: per step, of the slowest rank, one per round. `bytes_sent`: of rank 0 per step, where stretto counts it."""

    contender: str
    seconds: list[float]
    bytes_sent: int | None = None
    bytes_between_hosts: int | None = None  # what all workers of a host sent to other hosts, per step


class CompressStepReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: CompressStepSettings
    machine: MachineInfo
    date: str
    num_parameters: int
    rows: list[CompressStepRow]


def workload_of(settings: CompressStepSettings) -> Workload:
    if settings.model == "gpt2":
        return gpt2(settings.rows, settings.length)
    if settings.model != "gpt":
        return workloads()[settings.model]
    return gpt("", settings.width, 6, settings.depth, settings.rows, settings.length)


def bytes_to_other_hosts(job: Job) -> int:
    here = job.peers[job.rank].host
    return sum(job.ledger.sent_to(peer.rank) for peer in job.peers if peer.host != here)


def sent_by_a_host(job: Job, mine: int, hosts: int) -> int:
    everybody: int = sum(job.gather_object(mine))
    return everybody // hosts


def measure(job: Job, settings: CompressStepSettings) -> CompressStepReport:
    torch.set_num_threads(1)
    workload, device = workload_of(settings), device_of(job, settings.device)
    torch.manual_seed(1 + job.rank)
    batch = workload.batch().to(device)
    names = (*settings.peers, *settings.strategies)
    contenders = [TrainedModel(name, workload, job, device, settings.strategies.get(name)) for name in names]
    sent: list[tuple[int | None, int | None]] = []
    for contender in contenders:
        for _ in range(WARM_UP):
            contender.settle()
            before, between = job.ledger.bytes_sent, bytes_to_other_hosts(job)
            contender.step(batch)
        contender.settle()
        counted = (job.ledger.bytes_sent - before, sent_by_a_host(job, bytes_to_other_hosts(job) - between, settings.hosts))
        sent.append(counted if contender.name in settings.strategies else (None, None))
        job.barrier()
    seconds = alternate(job, contenders, batch, settings.rounds, STEPS)
    rows = [
        CompressStepRow(contender=name, seconds=times, bytes_sent=num_bytes, bytes_between_hosts=between)
        for name, times, (num_bytes, between) in zip(names, seconds, sent, strict=True)
    ]
    count = sum(parameter.numel() for parameter in contenders[0].core.parameters())
    return CompressStepReport(settings=settings, machine=describe(), date=now(), num_parameters=count, rows=rows)


if __name__ == "__main__":
    take_part(sys.argv[1:], CompressStepSettings, measure)
