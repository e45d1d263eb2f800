"""Which answers go with groups of workers that servers have as clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from stretto.aggregate.hierarchy.elastic import Elastic
from stretto.aggregate.hierarchy.value import Hierarchy
from stretto.aggregate.parameter_server.training import SERVED_DTYPES, servers_of
from stretto.engine.stepping import decides_by_loss
from stretto.errors import ConfigurationError
from stretto.schedule.orders import FixedOrder
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.noloco import NoLoCo

if TYPE_CHECKING:
    from stretto.strategy import Strategy


def hierarchy_of(strategy: Strategy) -> Hierarchy:
    assert isinstance(strategy.aggregate, Hierarchy), "another way of training"
    return strategy.aggregate


def check_answers(strategy: Strategy) -> None:
    asked = f"aggregate={strategy.aggregate!r}"
    if not strategy.compress.lossless:
        raise ConfigurationError(
            f"{asked} with compress={strategy.compress!r}: inside a group sums are exact, and what a group pushes are float32 "
            f"values.\nLeave compress= out, or write outer=AllReduce(), where it applies between hosts."
        )
    if not isinstance(strategy.schedule, FixedOrder):
        raise ConfigurationError(
            f"{asked} with schedule={strategy.schedule!r}: its plan is for workers of which each sends by itself, and here one "
            f"pushes for a group, when the group is ready.\n"
            f"Leave schedule= out, write Buckets(bytes=...), WaitFree() or AfterBackward(), or aggregate=ParameterServer()."
        )


# -- elastic averaging ------------------------------------------------------------------------------------------------


def elastic_of(strategy: Strategy) -> Elastic:
    elastic = hierarchy_of(strategy).elastic
    assert elastic is not None, "another way of training"
    return elastic


def check_elastic_sync(strategy: Strategy) -> None:
    if isinstance(strategy.sync, Asynchronous) and strategy.sync != Asynchronous():
        raise ConfigurationError(
            f"elastic={elastic_of(strategy)!r} with sync={strategy.sync!r}: what groups push are differences to the center and "
            f"no gradients, and what a group loses the center has to gain.\nWrite sync=Asynchronous()."
        )


def check_own_model(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        refuse_deciding_by_loss(optimizer)
    owned = {parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in owned:
            raise ConfigurationError(
                f"parameter {name} wants a gradient and is in none of the optimizers: what trains it would never come to the "
                f"center.\nGive its optimizer to distribute() too, or freeze it: requires_grad_(False)."
            )
        if parameter.requires_grad and parameter.dtype not in SERVED_DTYPES:
            raise ConfigurationError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}: the center is kept in float32, which cannot "
                f"hold it.\nConvert the model (model.float()), or write sync=Synchronous(), without elastic=."
            )


def refuse_deciding_by_loss(optimizer: Optimizer) -> None:
    if decides_by_loss(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} where groups train by themselves: it decides by the mean loss of all workers, and they "
            f"meet nowhere but at the center.\nUse an optimizer that steps by one gradient, such as torch.optim.SGD."
        )


# -- outer steps ------------------------------------------------------------------------------------------------------


def check_outer_steps(strategy: Strategy) -> None:
    sync, servers = strategy.sync, servers_of(strategy)
    assert isinstance(sync, LocalSGD), "another way of training"
    asked = f"aggregate={strategy.aggregate!r} with sync={sync!r}"
    if isinstance(sync.outer, NoLoCo):
        raise ConfigurationError(
            f"{asked}: it pulls together slow weights that differ from worker to worker, and the center is one.\n"
            f"Write aggregate=Gossip(RandomMatching()), or outer=HeavyBall(lr, momentum)."
        )
    if sync.outer.divides_by_rate:
        raise ConfigurationError(
            f"{asked}: {type(sync.outer).__name__} counts in units of each worker's learning rate, which servers do not know.\n"
            f"Write outer=HeavyBall(lr, momentum), which is the same where the rate does not change."
        )
    if sync.start_after:
        raise ConfigurationError(
            f"{asked}: the first {sync.start_after} steps would be synchronous, and here no group ever waits for another.\n"
            f"Leave start_after= out; or train these steps with aggregate=AllReduce() and call distribute() again."
        )
    if sync.optimizer_state == "average":
        raise ConfigurationError(
            f"{asked}: groups meet nowhere but at the center, which has no optimizer state of theirs.\n"
            f'Write optimizer_state="keep" or "reset".'
        )
    if sync.fragments > 1:
        raise ConfigurationError(
            f"{asked}: fragments are exchanged one after the other so that a network has less to do at once, and here groups "
            f"take their turns whenever they come.\nLeave fragments= out; overlap= works."
        )
    if servers.answers is not None:
        raise ConfigurationError(f"{asked}: a group exchanges float32 values with the center.\nLeave answers= out.")
    if servers.snapshots is not None:
        raise ConfigurationError(
            f"{asked}: snapshots are of models whose optimizer is on the servers, and here each worker has one of its own.\n"
            f"Leave snapshots= out, and call stretto.save."
        )
