"""What cannot be averaged in groups: refused when the strategy is made, or before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.aggregate.group_average.cube import allowed_sizes
from stretto.aggregate.group_average.value import GroupAverage
from stretto.compress.none import NoCompression
from stretto.errors import ConfigurationError
from stretto.schedule.orders import Buckets
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.stale_synchronous import StaleSynchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy


def check_answers(strategy: Strategy) -> None:
    asked = f"aggregate={strategy.aggregate!r}"
    if strategy.compress != NoCompression():
        raise ConfigurationError(
            f"{asked} with compress={strategy.compress!r}: what is sent are models and sums of models, and what compressing "
            f"loses of them would be lost from the weights.\nLeave compress= out."
        )
    if strategy.schedule != Buckets():
        raise ConfigurationError(
            f"{asked} with schedule={strategy.schedule!r}: gradients are not sent at all, and there are no transfers to put into "
            f"an order.\nLeave schedule= out."
        )


def check_group_average(strategy: Strategy) -> None:
    """For `StaleSynchronous`."""
    check_answers(strategy)
    aggregate, sync = strategy.aggregate, strategy.sync
    assert isinstance(aggregate, GroupAverage) and isinstance(sync, StaleSynchronous)
    below, above = 1 << (aggregate.size.bit_length() - 1), 1 << aggregate.size.bit_length()
    if aggregate.size != below:
        near = f"GroupAverage({below}) or GroupAverage({above})"
        raise ConfigurationError(
            f"aggregate={aggregate!r} with sync={sync!r}: groups are formed by bits of ranks, so their size is a power of two.\n"
            f"Write {near}; or sync=Synchronous(), where groups may have any size."
        )
    if sync.bound < 1:
        raise ConfigurationError(
            f"aggregate={aggregate!r} with sync={sync!r}: the bound is the number of rounds from one average of all workers to "
            f"the next, at least 1.\nWrite StaleSynchronous(1) to average all in every round, or StaleSynchronous(10) as in the "
            f"paper; sync=Synchronous() has no such average, and waits for the members of a group."
        )


def check_grid(strategy: Strategy) -> None:
    """For `Synchronous` and `LocalSGD`."""
    check_answers(strategy)
    aggregate, sync = strategy.aggregate, strategy.sync
    assert isinstance(aggregate, GroupAverage)
    if aggregate.rule != "paper":
        raise ConfigurationError(
            f"aggregate={aggregate!r} with sync={sync!r}: the rule is for workers that come late, and here nobody does.\n"
            f"Leave rule= out, or write sync=StaleSynchronous(10)."
        )
    if aggregate.patience_s == 0:
        raise ConfigurationError(
            f"aggregate={aggregate!r} with sync={sync!r}: a group that waits for nobody has no average, since its members "
            f"never come at the very same moment.\n"
            f"Write patience_s=2.0 to do without an average after two seconds; leave it out to wait for all that live; or "
            f"write sync=StaleSynchronous(10), where late members are represented by their last models."
        )
    if isinstance(sync, LocalSGD) and sync != LocalSGD(sync.every):
        raise ConfigurationError(
            f"aggregate={aggregate!r} with sync={sync!r}: groups average after so many steps, and there is no exchange among all "
            f"that an outer optimizer, fragments or another beginning could belong to.\n"
            f"Write sync=LocalSGD({sync.every}), or aggregate=AllReduce()."
        )


def check_grid_world(strategy: Strategy, world_size: int) -> None:
    aggregate = strategy.aggregate
    assert isinstance(aggregate, GroupAverage)
    if 1 < world_size < aggregate.size:
        raise ConfigurationError(
            f"aggregate={aggregate!r} in a job of {world_size} workers: there are no groups of {aggregate.size}.\n"
            f"Write GroupAverage({world_size}), one group of all, or a smaller number."
        )


def check_world(strategy: Strategy, world_size: int) -> None:
    aggregate = strategy.aggregate
    assert isinstance(aggregate, GroupAverage)
    sizes = allowed_sizes(world_size)
    if world_size > 1 and aggregate.size > sizes[-1]:
        raise ConfigurationError(
            f"aggregate={aggregate!r} in a job of {world_size} workers: there are no groups of {aggregate.size}.\n"
            f"Write GroupAverage({sizes[-1]}), one group of all, or a smaller power of two: {', '.join(map(str, sizes))}."
        )
