"""distribute(): the one changed line. Binds a strategy to a model and an optimizer in a job.

The same module and the same optimizer come back, changed in place by hooks: `state_dict` keys, `isinstance`, LR schedulers and
references held elsewhere stay valid. In a job of one nothing is hooked at all: it is the plain loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.api import current_job
from stretto.engine.admission import check, check_compression, check_model, check_optimizer, check_world
from stretto.engine.agreement import admit, agree
from stretto.engine.engine import Engine
from stretto.engine.keeping import keep_with
from stretto.engine.state import copy_model, copy_optimizer, share_optimizer
from stretto.errors import ConfigurationError
from stretto.observe.compute import trace_compute
from stretto.parsing import parse
from stretto.session import Job
from stretto.strategy import Strategy

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741
Buffers = Literal["broadcast", "local"]
ATTRIBUTE = "_stretto_engine"


def distribute(
    model: M,
    optimizer: O,
    strategy: Strategy | str | None = None,
    *,
    check_finite: bool = False,
    buffers: Buffers = "broadcast",
    scaler: torch.amp.GradScaler | None = None,
    job: Job | None = None,
) -> tuple[M, O]:
    """Train `model` data-parallel from here on. Returns the same two objects.

    All workers start from rank 0's parameters, buffers and optimizer state. `strategy` may be its text (`stretto.parse`).
    `buffers`: "broadcast" gives every worker rank 0's buffers (BatchNorm statistics) before each forward in training, "local"
    leaves them alone. `check_finite=True` raises `NonFiniteGradient`, naming rank and parameter, on all workers. `scaler`: the
    `GradScaler` of the loop, if there is one and `compress=` is lossy: what is left over from a step must not carry its scale.

    It lasts as long as somebody holds the model or the optimizer given here. When both are dropped, its memory and threads are
    free at the next garbage collection, on each worker by itself: nothing is sent.
    """
    job = job or current_job()
    job.check_usable()
    chosen, problem = Strategy(), None
    try:
        chosen = parse(strategy) if isinstance(strategy, str) else strategy or chosen
        check(model, optimizer, chosen, buffers, check_finite, scaler)
        check_model(model, optimizer, job)
        check_compression(model, optimizer, chosen)
        if job.world_size > 1:
            check_world(model, chosen, job)
    except ConfigurationError as refused:
        problem = refused
    admit(job, problem)
    if job.world_size > 1:
        options = {"check_finite": check_finite, "buffers": buffers, "scaler": scaler is not None}
        agree(job, model, optimizer, chosen, options)
        copy_model(job, model)
        share_optimizer(job, optimizer)
        if chosen.aggregate.algorithm == "auto":
            job.choose(0, "distribute()")
    if job.tracer is not None:
        trace_compute(job.tracer, model, optimizer)
    _leave_former_job(model)
    shares_buffers = buffers == "broadcast"
    engine = Engine(model, chosen, job, check_finite=check_finite, broadcast_buffers=shares_buffers, scaler=scaler)
    engine.optimizer = optimizer
    if not chosen.compress.lossless:
        keep_with(optimizer, engine)
    job.engines.add(engine)
    object.__setattr__(model, ATTRIBUTE, engine)
    optimizer.register_step_pre_hook(partial(_before_step, engine, [_num_parameters(optimizer)]))
    return model, optimizer


def _before_step(engine: Engine, checked: list[int], optimizer: Optimizer, *_: object) -> None:
    engine.flush()
    engine.stepped()
    if checked[0] != _num_parameters(optimizer):
        check_optimizer(engine.model, optimizer)
        checked[0] = _num_parameters(optimizer)


def _num_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _leave_former_job(model: nn.Module) -> None:
    """A model that was trained in a job that is over may be trained in another one."""
    engine = model.__dict__.get(ATTRIBUTE)
    if isinstance(engine, Engine) and not engine.inert:
        engine.close()


def engine_of(model: nn.Module) -> Engine:
    engine = model.__dict__.get(ATTRIBUTE)
    if not isinstance(engine, Engine) or engine.inert:
        raise ConfigurationError(
            f"this {type(model).__name__} has not been distributed, so there is nothing to synchronise.\n"
            f"Call model, optimizer = stretto.distribute(model, optimizer) first."
        )
    return engine


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside only accumulate; the first one outside combines all of them.

    with stretto.no_sync(model):
        loss(model(x1)).backward()
    loss(model(x2)).backward()       # combines both
    """
    with engine_of(model).not_synchronising():
        yield


@contextmanager
def join(*models: nn.Module) -> Iterator[None]:
    """Let workers run out of batches at different times. Put it around the loop over the data.

    A worker that is done takes part in the others' rounds with weight 0, so the mean is over those that still have data. At the
    end all hold the model and optimizer state of the worker that went on longest. Buffers are not broadcast meanwhile.
    Several models: in the order in which each batch runs their backwards, every model once.
    """
    engines = [engine_of(model) for model in models]
    _check_join(engines)
    for engine in engines:
        engine.joining = True
    try:
        yield
        for engine in engines:
            engine.flush()
    finally:
        for engine in engines:
            engine.joining = False
    if engines[0].job.world_size > 1:
        _catch_up(engines)


def _check_join(engines: list[Engine]) -> None:
    if not engines or len(set(engines)) < len(engines):
        raise ConfigurationError(
            f"join of {len(engines)} models, {len(set(engines))} of them different: nothing to wait for, or the same one twice.\n"
            f"Write join(model), or join(model_a, model_b) for two."
        )
    for engine in engines:
        if (reason := engine.strategy.compress.no_abstention) is not None:
            raise ConfigurationError(
                f"join with compress={engine.strategy.compress!r}: {reason}.\n"
                f"Give all workers as many batches (Sampler(..., drop_last=True)) and leave join out; or use "
                f"ErrorFeedback(Sign())."
            )
    if any(other.joining for engine in engines for other in engine.job.engines):
        raise ConfigurationError(
            "join inside another join: a worker that has run out would stay at the end of the inner one while the others need it "
            "in rounds of the outer model.\nWrite one join for all of them, join(model_a, model_b), around the loop."
        )


def _catch_up(engines: list[Engine]) -> None:
    """Take part until nobody has data, then become equal to whoever went on longest."""
    rounds = [engine.rounds for engine in engines]
    while any([engine.shadow_round() for engine in engines]):
        pass
    for engine, mine in zip(engines, rounds, strict=True):
        everybody = engine.job.gather_object([mine, engine.learning_rates()])
        longest = [int(count) for count, _ in everybody]
        for rank, (_, rates) in enumerate(everybody):
            if rates != everybody[0][1]:
                raise ConfigurationError(
                    f"at the end of join the learning rates differ: {everybody[0][1]} on rank 0, {rates} on rank {rank}.\n"
                    f"A scheduler was stepped inside, more often where there were more batches: workers would drift apart.\n"
                    f"Step it after the join (once per epoch), or give all as many batches: Sampler(..., drop_last=True)."
                )
        root = longest.index(max(longest))
        copy_model(engine.job, engine.model, root)
        copy_optimizer(engine.job, engine.optimizer, root)


def weight(value: float, *, job: Job | None = None) -> None:
    """From now on this worker's gradients count `value` times in the mean: the number of samples in its batch, for instance.

    With losses that are means over the local batch, `weight(len(batch))` makes the result the mean over all samples. It is read
    when a backward synchronises: what was accumulated under `no_sync` counts with the weight of the backward that combines it.
    Gradients travel multiplied by it, so in float16 keep it near 1 (a share of the largest batch, say).
    """
    if not value >= 0 or value == float("inf"):
        raise ConfigurationError(f"weight({value!r}): a weight is a finite number, 0 or more. Write for instance weight(len(x)).")
    (job or current_job()).weight = float(value)
