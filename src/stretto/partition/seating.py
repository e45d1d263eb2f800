"""Which worker is which stage of which replica.

K stages and R replicas of each are K R workers of a group: place p of it is replica p mod R of stage p div R. So the replicas
of a stage, which exchange all its gradients, are neighbours, on one host where hosts have several workers; stages exchange
activations.

    K = 2, R = 3      stage 0: 0 1 2      stage 1: 3 4 5

Reference: HyPar-Flow (Awan et al., ISC 2020) has one communicator for each partition, as here, and numbers replicas first.
"""

from __future__ import annotations

from typing import NamedTuple

from stretto.collectives.group import Group
from stretto.errors import ConfigurationError


class Seating(NamedTuple):
    """By place in the group."""

    stages: int
    replicas: int
    place: int  # of this worker

    @property
    def stage(self) -> int:
        return self.place // self.replicas

    @property
    def replica(self) -> int:
        return self.place % self.replicas

    def of_replica(self) -> list[int]:
        """The places of this worker's pipeline, by stage."""
        return [stage * self.replicas + self.replica for stage in range(self.stages)]

    def of_stage(self) -> list[int]:
        """The places of this worker's stage, by replica."""
        return [self.stage * self.replicas + replica for replica in range(self.replicas)]


def seat(group: Group, stages: int) -> Seating:
    """Refuse numbers that do not come out even."""
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise ConfigurationError(f"stages={stages!r}: the number of stages of the pipeline, a whole number from 1 on.")
    if group.size % stages:
        fitting = [number for number in range(1, group.size + 1) if group.size % number == 0]
        raise ConfigurationError(
            f"stages={stages} among {group.size} workers: each stage has as many replicas as every other, so the number of "
            "workers "
            f"must be a multiple of the number of stages.\n"
            f"Write stages= one of {', '.join(map(str, fitting))}, or start another number of workers."
        )
    return Seating(stages, group.size // stages, group.rank)
