"""Which answers go with groups of workers that servers have as clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.aggregate.hierarchy.value import Hierarchy
from stretto.errors import ConfigurationError
from stretto.schedule.orders import FixedOrder

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
