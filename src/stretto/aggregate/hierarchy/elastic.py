"""Elastic averaging: how often a group is drawn to the center, and how far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from stretto.errors import ConfigurationError

MOVING_RATE: Final = 0.9  # of the paper: the center goes this part of the way to the mean of all groups


@dataclass(frozen=True, slots=True)
class Elastic:
    """Every `every` steps, group i and the center x~ move towards each other:

        x_i <- x_i - rate (x_i - x~)          x~ <- x~ + rate sum_i (x_i - x~)

    `rate`: None: 0.9 over the number of groups, as in the paper. Between that, groups train by themselves, each with its own
    optimizer, whatever that is. The larger `every` and the smaller `rate`, the further groups explore.

    Reference: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", NIPS 2015, arXiv:1412.6651.
    """

    every: int
    rate: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigurationError(
                f"Elastic(every={self.every!r}): groups meet the center every so many steps, a positive whole number. Write for "
                f"instance Elastic(every=4)."
            )
        rate = self.rate
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1):
            raise ConfigurationError(
                f"Elastic(rate={rate!r}): the part of the way to the center that a group goes, more than 0 and at most 1. "
                f"Leave it out for 0.9 over the number of groups."
            )

    def rate_for(self, num_groups: int) -> float:
        """In a job of so many groups."""
        if self.rate is None:
            return MOVING_RATE / num_groups
        if self.rate * num_groups > 1 and not math.isclose(self.rate * num_groups, 1):
            raise ConfigurationError(
                f"Elastic(rate={self.rate}) with {num_groups} groups: together they would draw the center "
                f"{self.rate * num_groups:g} times the way to their mean, and it would swing.\n"
                f"Write at most rate={1 / num_groups:.3g}, or leave it out for 0.9 over the number of groups."
            )
        return self.rate
