"""Which answers go with local steps and all-reduce, and which models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce.admission import check_native, check_payloads
from stretto.aggregate.all_reduce.value import AllReduce
from stretto.aggregate.local_sgd.fragments import layers_of
from stretto.aggregate.local_sgd.optimizer_state import check_reset
from stretto.compress.none import NoCompression
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.schedule.orders import Buckets
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.synchronous import Synchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy


def sync_of(strategy: Strategy) -> LocalSGD:
    assert isinstance(strategy.sync, LocalSGD), "another way of training"
    return strategy.sync


def all_reduce_of(strategy: Strategy) -> AllReduce:
    assert isinstance(strategy.aggregate, AllReduce), "another way of training"
    return strategy.aggregate


def synchronous(strategy: Strategy) -> Strategy:
    """How the first `start_after` steps are taken. Codecs are for what is exchanged after them."""
    return replace(strategy, sync=Synchronous(), compress=NoCompression())


def check_answers(strategy: Strategy) -> None:
    sync, schedule = sync_of(strategy), strategy.schedule
    if sync.outer.among_neighbours:
        raise ConfigurationError(
            f"aggregate={strategy.aggregate!r} with sync={sync!r}: it pulls together slow weights that differ from worker to "
            f"worker, and all workers have the same after an all-reduce.\n"
            f"Write aggregate=Gossip(RandomMatching()), or outer=HeavyBall(lr, momentum)."
        )
    if sync.start_after == 0 and schedule != Buckets():
        raise ConfigurationError(
            f"sync={sync!r} with schedule={schedule!r}: gradients stay where they are, and there are no transfers under backward "
            f"to put into an order.\nLeave schedule= out."
        )
    if schedule.cross_barrier:
        raise ConfigurationError(
            f"sync={sync!r} with schedule={schedule!r}: it takes steps under the next forward, and local steps, which follow, "
            f"begin where all have been taken.\nWrite schedule=Buckets(...), WaitFree() or Merged()."
        )
    if sync.overlap and all_reduce_of(strategy).algorithm == "native":
        raise ConfigurationError(
            f"aggregate={strategy.aggregate!r} with sync={sync!r}: the collectives of torch run one after the other while the "
            f"caller waits, so no fragment can travel while the next steps compute.\n"
            f"Write aggregate=AllReduce(), or leave overlap= out."
        )
    check_payloads(strategy, all_reduce_of(strategy))
    compress = strategy.compress
    if compress.optimizer_hint is not None or compress.hands_out != "mean":
        raise ConfigurationError(
            f"sync={sync!r} with compress={compress!r}: that codec makes steps out of gradients, and what is exchanged here is "
            f"how far workers have gone.\nWrite one that sends values: ErrorFeedback(Int8()), ErrorFeedback(TopK(0.05)), ..."
        )
    if sync.start_after:
        synchronous(strategy)


def check_model(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
    sync = sync_of(strategy)
    if sync.optimizer_state == "reset":
        for optimizer in optimizers:
            check_reset(optimizer)
    layers = len(layers_of([(name, p) for name, p in model.named_parameters() if p.requires_grad]))
    if layers < sync.fragments:
        raise ConfigurationError(
            f"sync={sync!r}: {type(model).__name__} has {layers} layers with parameters that are trained, and each fragment "
            f"needs one.\nWrite fragments={max(f for f in range(1, max(1, layers) + 1) if sync.every % f == 0)}, or fewer."
        )
    if sync.outer.divides_by_rate:
        rated = {p for optimizer in optimizers for group in optimizer.param_groups if "lr" in group for p in group["params"]}
        _check_rates(model, rated, sync)
    if all_reduce_of(strategy).algorithm == "native" and job.world_size > 1:
        check_native(strategy, job)


def _check_rates(model: nn.Module, rated: set[Tensor], sync: LocalSGD) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in rated:
            raise ConfigurationError(
                f"{sync.outer!r} divides by the learning rate, and parameter {name} has none: it is in no optimizer that was "
                f"given to distribute(), or in one without lr.\n"
                f"Give its optimizer to distribute() too, or write outer=HeavyBall(lr, momentum), which needs no rate."
            )
