"""distribute(): the one changed line. Binds a strategy to a model and an optimizer in a job.

The same module and the same optimizer come back, changed in place by hooks: `state_dict` keys, `isinstance`, LR schedulers and
references held elsewhere stay valid. In a job of one without compression the model has no hooks: it is the plain loop.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce.planning import ROUNDS_TO_WATCH
from stretto.aggregate.hierarchy.center_groups import GroupsWithCenter
from stretto.aggregate.hierarchy.group_job import check_in_group
from stretto.aggregate.parameter_server.server_record import ServerLedger
from stretto.aggregate.parameter_server.stepping import SteppingServers
from stretto.aggregate.parameter_server.training import SynchronousServers
from stretto.api import current_job
from stretto.engine.admission import check, check_model, check_world, unwrapped, wrappings
from stretto.engine.agreement import admit, agree
from stretto.engine.engine import Engine
from stretto.engine.optimizer_state_entry import keep_with
from stretto.engine.state import copy_model, copy_optimizer, copy_scaler, share_optimizer
from stretto.engine.stepping import decides_by_loss
from stretto.engine.use_hooks import with_parameters
from stretto.errors import ConfigurationError, StrettoError
from stretto.job import Job
from stretto.mesh.admission import check_cut
from stretto.observe.compute import trace_compute
from stretto.parsing import parse
from stretto.plain_state import convert_after, look_as_before, look_plain
from stretto.plan import profile_file
from stretto.plan.profile import StepProfile
from stretto.returning import check_return
from stretto.strategy import Strategy

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer | Sequence[Optimizer])  # noqa: E741
Buffers = Literal["broadcast", "local"]
ATTRIBUTE = "_stretto_engine"

log = logging.getLogger("stretto")


def distribute(
    model: M,
    optimizer: O,
    strategy: Strategy | str | None = None,
    *,
    check_finite: bool = False,
    buffers: Buffers = "broadcast",
    scaler: torch.amp.GradScaler | None = None,
    profile: str | Path | None = None,
    job: Job | None = None,
) -> tuple[M, O]:
    """Train `model` data-parallel from here on. Returns the same two objects.

    All workers start from rank 0's parameters, buffers and optimizer state. `optimizer` may be several, `(muon, adamw)`: any
    optimizer may step the model, but only those given here are made equal on all workers, at the beginning and after `join`.
    `strategy` may be its text (`stretto.parse`); without one, that of `stretto run --strategy` (STRETTO_STRATEGY) is taken, or
    else `Strategy()`. `buffers`: "broadcast" gives every worker rank 0's buffers (the statistics of BatchNorm) before each
    forward in training, "local" leaves them alone. `check_finite=True` raises `NonFiniteGradient`, naming rank and parameter, on
    all workers. `scaler`: the `GradScaler` of the loop, if there is one and `compress=` is lossy: what is left over from a step
    must not carry its scale. `profile`: a file that `save_profile` has written, for a `schedule=` that plans by measured times:
    only rank 0 reads it, and no step has to be watched again.

    Called again with the same model, another optimizer or strategy takes the place of the first; what the compression remembers
    is kept if it is the same one. `stretto.release` gives the plain model back. Otherwise it lasts as long as somebody holds the
    model or an optimizer given here: when all are dropped, its memory and threads are free at the next garbage collection, on
    each worker by itself, and nothing is sent.
    """
    job = job or _job_of(model)
    job.check_usable()
    strategy = job.launch.strategy if strategy is None else strategy
    chosen, problem, loaded = Strategy(), None, None
    optimizers = as_tuple(optimizer)
    try:
        chosen = parse(strategy) if isinstance(strategy, str) else strategy or chosen
        if not isinstance(chosen, Strategy):
            raise ConfigurationError(
                f"strategy={chosen!r}: write a Strategy(...), a recipe such as stretto.recipes.ddp(), or the text of one."
            )
        check(model, optimizers, buffers, check_finite, scaler)
        check_model(model, optimizers, job)
        check_in_group(chosen, job)
        check_cut(unwrapped(model), optimizers, job)
        chosen.training.check(unwrapped(model), optimizers, chosen, job)
        if job.world_size > 1:
            check_world(model)
        if check_finite and chosen.schedule.cross_barrier:
            raise ConfigurationError(
                f"check_finite=True with schedule={chosen.schedule!r}: the check is about all gradients of a step, before any "
                f"parameter is updated, and here each is updated when its own has come.\nLeave one of them out."
            )
        if job.life:
            check_return(job, chosen, len(optimizers))
        loaded = _load_profile(profile, unwrapped(model), chosen, job)
    except ConfigurationError as refused:
        problem = refused
    admit(job, problem)
    former = find_engine(model)
    if former is not None and former.job is job:
        former.training.before_release()
    if job.world_size > 1 and not job.life:
        options = {"check_finite": check_finite, "buffers": buffers, "scaler": scaler is not None, "profile": profile is not None}
        agree(job, unwrapped(model), optimizers, chosen, options)
        copy_model(job, model)
        for each in optimizers:
            share_optimizer(job, each)
    if former is not None:
        release(model)
    engine = Engine(
        model,
        optimizers,
        chosen,
        job,
        check_finite=check_finite,
        broadcast_buffers=buffers == "broadcast",
        scaler=scaler,
        profile=None if profile is None else [loaded],
    )
    _attach(engine)
    if former is not None and former.job is job:
        engine.loop.backwards |= former.loop.backwards  # what was accumulated is still in p.grad, and still to be combined
        then, now = former.training, engine.training
        if now.state_text is not None and (then.state_text, then.placement) == (now.state_text, now.placement):
            now.load_state(then.state())
            now.before_release()
            now.begin_anew()
            engine.choices_loaded()
    return model, optimizer


def _job_of(model: object) -> Job:
    """Among whom a model trains: all workers, unless it says so itself, as do the part of a model that a pipeline's
    stage has, and a model that is cut over a mesh."""
    return getattr(model, "__dict__", {}).get("_stretto_job") or current_job()


def _load_profile(path: str | Path | None, model: nn.Module, strategy: Strategy, job: Job) -> StepProfile | None:
    """On rank 0, which tells the others."""
    if path is None:
        return None
    if not strategy.training.plans_with_times:
        raise ConfigurationError(
            f"distribute(profile={str(path)!r}) with sync={strategy.sync!r}: servers that step are pushed to in the order "
            f"that is seen in each step, and nothing is planned by measured times.\nLeave profile= out."
        )
    if not strategy.schedule.needs_profile:
        raise ConfigurationError(
            f"distribute(profile={str(path)!r}) with schedule={strategy.schedule!r}, which plans nothing by measured times.\n"
            f"Leave profile= out, or write for instance schedule=Priority()."
        )
    if job.rank != 0:
        return None
    loaded = profile_file.load(path)
    profile_file.check(loaded, model, job.world_size)
    return loaded


def save_profile(model: nn.Module, path: str | Path) -> None:
    """Write down how the steps of a distributed model were measured, for `distribute(..., profile=path)` in a later run.

    Rank 0 writes; on other workers it does nothing. There is a profile once a schedule that needs one has watched a few steps.
    """
    engine = engine_of(model)
    profile = engine.training.profile
    if profile is None and not engine.training.plans_with_times:
        raise ConfigurationError(
            f"save_profile({str(path)!r}) with sync={engine.strategy.sync!r}: servers that step are pushed to in the order "
            f"that is seen in each step, and no times are measured.\nLeave it out, or measure with sync=Synchronous()."
        )
    if profile is None:
        raise ConfigurationError(
            f"save_profile({str(path)!r}): no step of this {type(engine.model).__name__} has been measured: its schedule is "
            f"{engine.strategy.schedule!r}, on {engine.job.world_size} workers, after {engine.rounds} rounds.\n"
            f"Train {ROUNDS_TO_WATCH} steps with a schedule that plans by a profile, such as schedule=Priority(), on two or more "
            f"workers."
        )
    if engine.job.rank == 0:
        profile_file.save(profile, path)


def _attach(engine: Engine) -> None:
    """What the model and its optimizers carry from now on. `release` takes it off again."""
    job, model, settle = engine.job, engine.called, _settling(engine)
    if job.tracer is not None:
        engine.attached += trace_compute(job.tracer, model, engine.loop.optimizers, engine.model)
    if engine.training.state_text is not None and not engine.training.placement:
        engine.attached += keep_with(engine.loop.optimizers[0], engine)
    job.engines.add(engine)
    for each in wrappings(model):
        object.__setattr__(each, ATTRIBUTE, engine)
        look_plain(each, ATTRIBUTE, before=settle)
    if engine.training.waits_before_use:
        for each in with_parameters(engine.model):
            if ATTRIBUTE not in each.__dict__:
                look_plain(each, before=settle)
            convert_after(each, settle)
    if engine.training.parameters_in_slices and engine.engaged:
        engine.training.hook_model()
        for each in with_parameters(engine.model):
            look_plain(each, *([ATTRIBUTE] if ATTRIBUTE in each.__dict__ else []), before=engine.training.show_parameters)
            convert_after(each, _refuse_conversion)
    for optimizer in engine.loop.optimizers:
        optimizer.synchronize = engine.settle  # type: ignore[attr-defined]


def _refuse_conversion() -> None:
    raise ConfigurationError(
        "to(), half(), cuda() or the like of a model whose parameters are in slices (shard=Zero(3)).\n"
        "Convert the model before distribute(); or stretto.release(model), convert it, and distribute it again."
    )


def _settling(engine: Engine) -> Callable[[], None]:
    """`engine.settle`, for modules that may be kept when the model and the engine are gone."""
    reference = weakref.ref(engine)

    def settle() -> None:
        if (alive := reference()) is not None:
            alive.settle()

    return settle


def release(model: M) -> M:
    """Give a plain model back: no hooks, no buckets, no thread; gradients stay this worker's own from here on.

    Nothing is sent, unless the optimizer's state is in slices, which come back: call it on all workers, between steps. What a
    compression remembers is gone. A model that is not distributed is returned as it is.
    """
    engine = find_engine(model)
    if engine is not None:
        if not engine.job.closed:
            engine.settle_or_forget()
            _finish(engine)
        engine.close()
        engine.job.engines.discard(engine)
        for optimizer in engine.loop.optimizers:
            optimizer.__dict__.pop("synchronize", None)
        for each in wrappings(engine.called):
            each.__dict__.pop(ATTRIBUTE, None)
            look_as_before(each)
        for each in engine.model.modules():
            look_as_before(each)
    return model


def _finish(engine: Engine) -> None:
    """Take the steps that are left, and bring back what is elsewhere, if that can still be done: after a failure the model is
    given back without."""
    try:
        engine.training.finish()
        if engine.training.is_in_slices:
            engine.training.before_release()
    except StrettoError as problem:
        log.warning("%s was released without the steps that were left to be taken: %s", engine.name, problem)


def server_ledgers(model: nn.Module) -> dict[int, ServerLedger]:
    """What the servers of this model have counted since they serve it: bytes, staleness and waiting by worker, how long they were
    at work, how long their queues were. By the server's number in `job.ledger.sent`; of those that live. Any worker may ask.
    """
    engine = engine_of(model)
    if isinstance(engine.training, (SteppingServers, SynchronousServers, GroupsWithCenter)):
        return engine.training.server_ledgers()
    raise ConfigurationError(
        f"server_ledgers({engine.name}): it trains with {engine.strategy!r}, without servers.\n"
        f"What workers have exchanged is in stretto.init().ledger."
    )


def as_tuple(optimizer: object) -> tuple[Optimizer, ...]:
    """One optimizer or several, as they are given to distribute(), save() and load(). What is neither is refused there."""
    return tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)  # type: ignore[return-value]


def find_engine(model: nn.Module) -> Engine | None:
    for each in wrappings(model):
        if isinstance(engine := each.__dict__.get(ATTRIBUTE), Engine):
            return engine
    return None


def engine_of(model: nn.Module) -> Engine:
    engine = find_engine(model)
    if engine is None:
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


def synchronize(model: nn.Module) -> None:
    """Combine now what backward passes under `no_sync` have accumulated. All workers call it, before the step.

    With `cross_barrier=True` it also waits until every parameter is up to date, for programs that are about to read weights
    without calling the model. With servers that step, and in shared memory, it does only that, and one worker may call it alone.

    A worker that has accumulated nothing counts with weight 0 and gets the mean of the others. If nobody has, nothing is
    combined; with `StaleSynchronous(bound)` and all-reduce it then takes the steps for the averages that are late, as at the end
    of training.

    For loops that cannot know which batch is the last of an accumulation:

    with stretto.no_sync(model):
        for x in batches:
            loss(model(x)).backward()
    stretto.synchronize(model)
    optimizer.step()
    """
    engine_of(model).synchronize()


@contextmanager
def gathered(model: nn.Module, module: nn.Module | None = None) -> Iterator[None]:
    """Within it all parameters of the model, or of one module of it, can be read and written by hand. On all workers.

    with stretto.gathered(model):
        norm = model.head.weight.norm()

    With `shard=Zero(3)` each worker has slices, and a weight has its values only while its module computes: here they are
    gathered, which takes memory for all that is asked for. What is changed inside counts, if all workers change it alike. No
    step may be taken inside. With all other strategies it waits until every parameter is up to date, and is nothing else.
    """
    engine = engine_of(model)
    engine.settle()
    if not engine.engaged:
        yield
        return
    with engine.training.whole_parameters((engine.model if module is None else module).parameters()):
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
        engine.loop.joining = True
    try:
        yield
        for engine in engines:
            engine.flush()
    finally:
        for engine in engines:
            engine.loop.joining = False
    if engines[0].job.world_size > 1:
        _catch_up(engines)


def _check_join(engines: list[Engine]) -> None:
    if not engines or len(set(engines)) < len(engines):
        raise ConfigurationError(
            f"join of {len(engines)} models, {len(set(engines))} of them different: nothing to wait for, or the same one twice.\n"
            f"Write join(model), or join(model_a, model_b) for two."
        )
    for engine in engines:
        if any(decides_by_loss(optimizer) for optimizer in engine.loop.optimizers):
            raise ConfigurationError(
                "join with LBFGS: a step of it makes as many rounds as its line search needs, and a worker without data cannot "
                "know how many.\nGive all workers as many batches (Sampler(..., drop_last=True)) and leave join out."
            )
        if (reason := engine.training.no_join) is not None:
            raise ConfigurationError(
                f"join with {reason}.\nGive all workers as many batches (Sampler(..., drop_last=True)) and leave join out."
            )
    if len({engine.training.is_in_slices for engine in engines}) > 1:
        raise ConfigurationError(
            "join of models of which some have shard=Zero(...) and others not: workers that have run out of data go on to step "
            "the slices that they own, between the rounds of the others.\nGive all of them the same shard=, or a join each."
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
        everybody = engine.job.gather_object([mine, engine.loop.learning_rates()])
        longest = [int(count) for count, _ in everybody]
        for rank, (_, rates) in enumerate(everybody):
            if rates != everybody[0][1]:
                raise ConfigurationError(
                    f"at the end of join the learning rates differ: {everybody[0][1]} on rank 0, {rates} on rank {rank}.\n"
                    f"A scheduler was stepped inside, more often where there were more batches: workers would drift apart.\n"
                    f"Step it after the join (once per epoch), or give all as many batches: Sampler(..., drop_last=True)."
                )
        root = longest.index(max(longest))
        with engine.training.catching_up():
            copy_model(engine.job, engine.model, root)
            for optimizer in engine.loop.optimizers:
                copy_optimizer(engine.job, optimizer, root)
        copy_scaler(engine.job, engine.loop.scaler, root)
        engine.loop.begin_anew()


def weight(value: float, *, job: Job | None = None) -> None:
    """From now on this worker's gradients count `value` times in the mean: the number of samples in its batch, for instance.

    With losses that are means over the local batch, `weight(len(batch))` makes the result the mean over all samples. It is read
    when a backward synchronises: what was accumulated under `no_sync` counts with the weight of the backward that combines it.
    Gradients travel multiplied by it, so in float16 keep it near 1 (a share of the largest batch, say).
    """
    if not value >= 0 or value == float("inf"):
        raise ConfigurationError(f"weight({value!r}): a weight is a finite number, 0 or more. Write for instance weight(len(x)).")
    (job or current_job()).weight = float(value)
