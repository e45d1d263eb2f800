"""One worker of `schedule.py`: python benchmarks/schedule_worker.py SETTINGS FILE, started once per rank.

The accelerator is emulated: modules sleep in forward and before their backward, in proportion to their parameters, and compute
real gradients of a small batch beside it. So computation takes a set time and leaves the processors to communication, as a GPU
does. With `device="cuda"` nothing is emulated: the workers share a GPU, and models have more than 100 M parameters. All
contenders, DDP among them, train the very same model and take turns (`step_worker.py` has how).
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import msgspec
import torch
from step_models import Gpt, Workload, gpt, mean_square, next_byte
from step_worker import LIMIT, TrainedModel, alternate, device_of, take_part
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stretto
from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now
from stretto.distributing import find_engine
from stretto.errors import JobError
from stretto.job import Job
from stretto.plan.profile import StepProfile
from stretto.plan.simulate import simulate
from stretto.sync.stale_synchronous import StaleSynchronous

DDP, DDP_STATIC, DDP_SMALL = "DDP, views", "DDP, views, static graph", "DDP, views, 4 MiB buckets"
WARM_UP = 6  # more than a schedule watches before it makes its plan
TOLERANCE = 1e-4


class ScheduleSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    strategies: dict[str, str]
    peers: tuple[str, ...] = (LIMIT, DDP, DDP_STATIC, DDP_SMALL)
    compute_s: float = 0.6
    rho: float = 1.0
    rate: str | None = None
    workers: int = 4
    rounds: int = 11
    steps: int = 3
    device: str = "cpu"  # where the accelerator is emulated


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: per step, of the slowest rank, one per round; `predicted_s`: what the simulator says, with rank 0's profile."""

    contender: str
    seconds: list[float]
    predicted_s: float | None = None
    num_transfers: int | None = None


class ScheduleReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: ScheduleSettings
    machine: MachineInfo
    date: str
    num_bytes: int
    rows: list[ScheduleRow]


def workloads(device: str) -> dict[str, Workload]:
    if device == "cuda":
        return {
            "mlp": Workload(
                "25 x Linear(2048), 105 M parameters, batch 16384",
                lambda: nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(25))),
                lambda: torch.randn(16384, 2048), mean_square,
            ),
            "gpt": gpt("byte-level GPT, 114 M parameters, batch 48 x 256", 768, 12, 16, 48, 256),
            "gpt8": gpt("byte-level GPT, 114 M parameters, batch 8 x 256", 768, 12, 16, 8, 256),
        }  # fmt: skip
    return {
        "mlp": Workload(
            "16 x Linear(512), 16.8 MB", lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))),
            lambda: torch.randn(2, 512), mean_square,
        ),
        "gpt": Workload(
            "byte-level GPT, 2.8 M parameters", lambda: Gpt(192, 6, 6, 64), lambda: torch.randint(256, (1, 64)), next_byte
        ),
        "small": Workload(
            "100 small parameters: 50 x Linear(32)", lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(50))),
            lambda: torch.randn(2, 32), mean_square,
        ),
    }  # fmt: skip


def emulate(model: nn.Module, compute_s: float) -> nn.Module:
    """Forward takes a third of `compute_s` and backward two thirds, each module its share by parameters."""
    users = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    sizes = [sum(p.numel() for p in module.parameters(recurse=False)) for module in users]
    for module, size in zip(users, sizes, strict=True):
        share = compute_s * size / sum(sizes)
        module.register_forward_hook(partial(_sleep, share / 3))
        module.register_full_backward_pre_hook(partial(_sleep, share * 2 / 3))
    return model


def _sleep(duration_s: float, *_: Any) -> None:
    time.sleep(duration_s)


class Contender(TrainedModel):
    def __init__(self, name: str, workload: Workload, job: Job, settings: ScheduleSettings, strategy: str | None) -> None:
        torch.manual_seed(0)
        self.name = name
        self.workload = workload
        self.core = self.model = workload.model().to(device_of(job, settings.device))
        if settings.device == "cpu":
            emulate(self.core, settings.compute_s)
        self.optimizer = torch.optim.SGD(self.core.parameters(), lr=1e-3, momentum=0.9)
        if strategy is not None:
            stretto.distribute(self.core, self.optimizer, strategy, job=job)
        elif name != LIMIT:
            self.model = DistributedDataParallel(
                self.core,
                gradient_as_bucket_view=True,
                static_graph=name == DDP_STATIC,
                bucket_cap_mb=4 if name == DDP_SMALL else None,
            )


def measure(job: Job, settings: ScheduleSettings) -> ScheduleReport:
    torch.set_num_threads(1)
    workload = workloads(settings.device)[settings.model]
    torch.manual_seed(1 + job.rank)
    batch = workload.batch().to(device_of(job, settings.device))
    names: dict[str, str | None] = {**dict.fromkeys(settings.peers), **settings.strategies}
    contenders = [Contender(name, workload, job, settings, strategy) for name, strategy in names.items()]
    for contender in contenders:
        for _ in range(WARM_UP):
            contender.step(batch)
        contender.settle()
    others = [
        name for name, text in names.items() if name == LIMIT or any(word in (text or "") for word in ("compress=", "Stale"))
    ]
    check_equal(job, [each for each in contenders if each.name not in others])

    engines = [engine for each in contenders if (engine := find_engine(each.core)) is not None]
    profiles = {  # by whom gradients are combined: servers cost what they cost
        engine.strategy.aggregate: engine.training.profile for engine in engines if engine.training.profile is not None
    }
    times = alternate(job, contenders, batch, settings.rounds, settings.steps)
    return ScheduleReport(
        settings=settings,
        machine=describe(),
        date=now(),
        num_bytes=sum(parameter.nbytes for parameter in contenders[0].core.parameters()),
        rows=[row(each, mine, profiles) for each, mine in zip(contenders, times, strict=True)],
    )


def row(contender: Contender, seconds: list[float], profiles: dict[Any, StepProfile]) -> ScheduleRow:
    engine = find_engine(contender.core)
    plan = None if engine is None else engine.training.plan
    profile = None if engine is None else profiles.get(engine.strategy.aggregate)
    predicted = None
    is_late = engine is not None and isinstance(engine.strategy.sync, StaleSynchronous)  # which the simulator does not know
    if engine is not None and plan is not None and profile is not None and not is_late:
        predicted = simulate(profile, plan, cross_barrier=engine.strategy.schedule.cross_barrier).iteration_s
    number = None if plan is None else len(plan.transfers)
    return ScheduleRow(contender=contender.name, seconds=seconds, predicted_s=predicted, num_transfers=number)


def check_equal(job: Job, contenders: list[Contender]) -> None:
    states = [list(each.core.state_dict().values()) for each in contenders]
    for each, state in zip(contenders[1:], states[1:], strict=True):
        close = all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in zip(states[0], state, strict=True))
        if not all(job.gather_object(close)):
            raise JobError(f"after the same steps {contenders[0].name} and {each.name} hold different parameters: a bug.")


if __name__ == "__main__":
    take_part(sys.argv[1:], ScheduleSettings, measure)
