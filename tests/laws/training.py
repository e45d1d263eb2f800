"""One training run of a case, alone or by several workers, and all that the laws ask about it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from laws.cases import BY_NAME, TOLERANCES, Case
from laws.strategies import hosts_for
from stretto.collectives.messages import TOPIC_BEGUN, TOPIC_FAILURES, TOPIC_KNOCK
from stretto.distributing import distribute, engine_of
from stretto.engine.bucket import Bucket
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.testing import run_jobs
from stretto.wire.base import Wire
from stretto.wire.frames import HEADER_BYTES

_building = threading.Lock()  # torch's random state belongs to the process, and ranks are threads here

State = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """What one worker saw."""

    digests: list[str]  # of all parameters, after every step
    state: State  # at the end
    bytes_sent: list[int]  # per step, without those of `count_questions`
    buckets: list[Bucket]


def build(case: Case, seed: int) -> nn.Module:
    with _building, torch.random.fork_rng():
        torch.manual_seed(seed)
        return case.build()


def share(batch: Tensor, rank: int, size: int) -> Tensor:
    return batch.chunk(size)[rank].clone()


@cache
def alone(name: str, steps: int) -> State:
    """The reference: one process, the whole batch, no stretto."""
    case = BY_NAME[name]
    model = build(case, seed=0)
    optimizer = case.optimizer(model)
    for number in range(steps):
        case.step(model, case.batch(number), number)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


@cache
def together(name: str, strategy: Strategy, size: int, steps: int) -> list[Run]:
    """`size` workers on their shares. They begin with different weights: rank 0's count."""
    runs: list[Run] = run_jobs(size, train, BY_NAME[name], strategy, steps, hosts=hosts_for(strategy, size))
    return runs


def train(job: Job, case: Case, strategy: Strategy, steps: int) -> Run:
    model = build(case, seed=job.rank)
    model, optimizer = distribute(model, case.optimizer(model), strategy, job=job, **case.options)
    digests, sent = [], []
    assert job.wire is not None
    questions = count_questions(job.wire)
    for number in range(steps):
        before = job.wire.bytes_sent - questions[0]
        case.step(model, share(case.batch(number), job.rank, job.world_size), number)
        sent.append(job.wire.bytes_sent - questions[0] - before)
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest(state_of(model)))
    engine = engine_of(model)
    return Run(digests, state_of(model), sent, engine.buckets if job.world_size > 1 else [])


def count_questions(wire: Wire) -> list[int]:
    """Bytes from now on of asking whether a peer that is far behind has begun, and where everybody is, and of the answers. A busy
    machine makes both necessary: small collectives do not announce themselves unasked, and a second's silence is asked about."""
    count, post = [0], wire.post

    def counted(to: int, topic: int, body: bytes) -> None:
        if topic in (TOPIC_KNOCK, TOPIC_BEGUN, TOPIC_FAILURES):
            count[0] += HEADER_BYTES + len(body)
        post(to, topic, body)

    wire.post = counted  # type: ignore[method-assign]
    return count


def state_of(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def digest(state: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(name.encode() + bits(value) for name, value in state.items())).hexdigest()


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if bits(one[name]) != bits(other[name])]
    assert not different, f"different bits in {different}"


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Relative error of each tensor's norm, per dtype. What depends on a less precise parameter is only as precise, and a tensor
    that happens to be almost zero is compared with the size of the model's typical element."""
    assert found.keys() == expected.keys()
    wide = {name: _wide(value) for name, value in expected.items() if value.numel()}
    typical = float(torch.cat([value.abs().flatten() for value in wide.values()]).pow(2).mean().sqrt())
    tolerance = max(TOLERANCES[value.dtype] for value in expected.values())
    for name, value in wide.items():
        error = float((_wide(found[name]) - value).norm()) / max(float(value.norm()), typical * value.numel() ** 0.5)
        assert error <= tolerance, f"{name} is off by {error:.2e}"


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)
