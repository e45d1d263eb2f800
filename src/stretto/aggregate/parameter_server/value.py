"""Aggregate by servers: workers push gradients to processes that add them up, and pull what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ParameterServer:
    """Servers, each with a shard of the model, in processes of their own beside the workers: nothing has to be set up.

    `shards`: how many; None: one for each worker. `replicas`: on how many further servers each part of the model is kept, so that
    as many servers may die at once. `snapshots`: a folder into which what the servers have is written `every_s` seconds, while
    training goes on, where servers step; `stretto.load` takes it. None: nowhere.

    Cost for m bytes, P workers and S servers that share the workers' network cards: a worker sends m and receives m, a server
    receives P m / S and sends as much. With S = P, of which each worker's own server costs no network, every card carries
    2 m (P - 1) / P each way, as in a ring. With servers on hosts of their own a worker's card carries m each way.

    With `sync=Synchronous()` servers only add up, in the order of ranks: all workers end with the same bits, and so does every
    run. With the other answers they step, and what is applied when depends on who comes first (`StaleSynchronous(0)` excepted).

    Reference: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014; Jiang et al., "A unified
    architecture for accelerating distributed DNN training in heterogeneous GPU/CPU clusters" (BytePS), OSDI 2020.
    """

    shards: int | None = None
    replicas: int = 0
    snapshots: str | None = None
    every_s: float = 60.0

    def __post_init__(self) -> None:
        if self.shards is not None and (isinstance(self.shards, bool) or not isinstance(self.shards, int) or self.shards < 1):
            raise ConfigurationError(
                f"ParameterServer(shards={self.shards!r}): a model has at least one server.\n"
                f"Write for instance shards=2, or leave it out for one server beside each worker."
            )
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int) or self.replicas < 0:
            raise ConfigurationError(
                f"ParameterServer(replicas={self.replicas!r}): each part of the model is kept on so many servers more, 0 or a "
                f"positive whole number. Write replicas=1 to survive the death of a server."
            )
        if self.shards is not None and self.replicas >= self.shards:
            raise ConfigurationError(
                f"ParameterServer(shards={self.shards}, replicas={self.replicas}): a copy lies on another server than what it is "
                f"a copy of, so there are fewer copies than servers.\nWrite shards={self.replicas + 1}, or replicas=0."
            )

        if self.snapshots is not None and (not isinstance(self.snapshots, str) or not self.snapshots):
            raise ConfigurationError(
                f"ParameterServer(snapshots={self.snapshots!r}): the path of a folder is a text, as a strategy can be written "
                f'down.\nWrite for instance snapshots="run/snapshots".'
            )
        if isinstance(self.every_s, bool) or not isinstance(self.every_s, (int, float)) or not 0 < self.every_s < 1e9:
            raise ConfigurationError(
                f"ParameterServer(every_s={self.every_s!r}): seconds from the end of one snapshot to the beginning of the next, "
                f"a positive number. Write for instance every_s=60."
            )

    def num_servers(self, num_workers: int) -> int:
        """In a job of so many workers."""
        count = num_workers if self.shards is None else self.shards
        if self.replicas >= count:
            raise ConfigurationError(
                f"ParameterServer(replicas={self.replicas}) in a job of {num_workers} workers has {count} servers, and a copy "
                f"lies on another server than what it is a copy of.\n"
                f"Write shards={self.replicas + 1}, or start more workers."
            )
        return count
