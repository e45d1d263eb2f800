"""Aggregate by servers: workers push gradients to processes that add them up, and pull what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from stretto.aggregate.parameter_server.encoding import refusal_of_answers
from stretto.compress.codec import Codec
from stretto.errors import ConfigurationError

Placement = Literal["auto", "beside", "dedicated"]
EVERY_S: Final = 60.0
RESTARTS: Final = 3


@dataclass(frozen=True, slots=True)
class ParameterServer:
    """Servers, each with a shard of the model, in processes of their own: beside the workers, where nothing has to be set up, or
    on hosts of their own, where the job was started with some (`stretto run --servers 2`, `stretto serve`).

    `shards`: how many; None: those that were started, else one for each worker. `replicas`: on how many further servers each part
    of the model is kept, so that as many servers may die at once. `placement`: "dedicated" for those that were started, "beside"
    for processes beside the workers, "auto" for the former if there are any. `snapshots`: a folder into which what the servers
    have is written `every_s` seconds, while training goes on, where servers step; `stretto.load` takes it. None: nowhere.
    `restarts`: how often each server beside the workers is started again when it dies; it then takes its part over. `answers`:
    where servers step, a codec by which they send values as differences to what each worker has, which costs a server its part of
    the model once for each worker; None: as `compress=` says, which is float32 or 16 bits.

    Cost for m bytes, P workers and S servers that share the workers' network cards: a worker sends m and receives m, a server
    receives P m / S and sends as much. With S = P, of which each worker's own server costs no network, every card carries
    2 m (P - 1) / P each way, as in a ring. With servers on hosts of their own a worker's card carries m each way. With a codec in
    `compress=` these are m bytes of payloads: both ways with `Synchronous`, else as docs/parameter-server.md says.

    With `sync=Synchronous()` servers only add up, in the order of ranks: all workers end with the same bits, and so does every
    run. With the other answers they step, and what is applied when depends on who comes first (`StaleSynchronous(0)` excepted).

    Reference: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014; Jiang et al., "A unified
    architecture for accelerating distributed DNN training in heterogeneous GPU/CPU clusters" (BytePS), OSDI 2020.
    """

    shards: int | None = None
    replicas: int = 0
    snapshots: str | None = None
    every_s: float = EVERY_S
    placement: Placement = "auto"
    restarts: int = RESTARTS
    answers: Codec | None = None

    def __post_init__(self) -> None:
        if self.placement not in get_args(Placement):
            raise ConfigurationError(
                f'ParameterServer(placement={self.placement!r}): servers run "beside" the workers, or are "dedicated" to it on '
                f'hosts of their own; "auto" takes the latter if there are any. Write one of these, or leave it out.'
            )
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

        self._check_snapshots()
        if self.answers is not None and (reason := refusal_of_answers(self.answers)) is not None:
            raise ConfigurationError(
                f"ParameterServer(answers={self.answers!r}): {reason}.\n"
                f"Write a contraction, such as answers=Int8() or answers=TopK(0.1), or leave it out for float32."
            )
        if isinstance(self.restarts, bool) or not isinstance(self.restarts, int) or self.restarts < 0:
            raise ConfigurationError(
                f"ParameterServer(restarts={self.restarts!r}): a server that dies is started again so often, 0 times or more.\n"
                f"Write for instance restarts=3."
            )
        if self.placement == "dedicated" and self.restarts != RESTARTS:
            raise ConfigurationError(
                f'ParameterServer(placement="dedicated", restarts={self.restarts}): whoever has started them starts them again.\n'
                f"Leave restarts= out, and write stretto serve --restarts {self.restarts}."
            )

    def _check_snapshots(self) -> None:
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
        if self.snapshots is None and self.every_s != EVERY_S:
            raise ConfigurationError(
                f"ParameterServer(every_s={self.every_s!r}) without snapshots=: there is nothing to do so often.\n"
                f'Name the folder, snapshots="run/snapshots", or leave every_s= out.'
            )

    def is_dedicated(self, dedicated: int) -> bool:
        """Whether servers are those that were started apart, of which there are so many (0: none)."""
        return self.placement == "dedicated" or (self.placement == "auto" and dedicated > 0)

    def num_servers(self, num_workers: int, dedicated: int = 0) -> int:
        """In a job of so many workers, with so many servers on hosts of their own. Refuses what cannot be."""
        if self.is_dedicated(dedicated):
            count = self._of_dedicated(dedicated)
            of = f"{dedicated} servers of their own"
            more = f"start the job with --servers {self.replicas + 1}"
        else:
            count = num_workers if self.shards is None else self.shards
            of, more = f"{num_workers} workers", f"write shards={self.replicas + 1}, or start more workers"
        if self.replicas >= count:
            raise ConfigurationError(
                f"ParameterServer(replicas={self.replicas}) in a job of {of} has {count} server{'s' if count > 1 else ''}, and a "
                f"copy lies on another server than what it is a copy of.\n{more[0].upper()}{more[1:]}, or write fewer replicas."
            )
        return count

    def _of_dedicated(self, dedicated: int) -> int:
        if not dedicated:
            raise ConfigurationError(
                'ParameterServer(placement="dedicated"): this job has no servers on hosts of their own.\n'
                "Start it with stretto run --servers 2, or servers with stretto serve and the workers with STRETTO_SERVERS; or "
                "leave placement= out, for servers beside the workers."
            )
        if self.shards not in (None, dedicated):
            raise ConfigurationError(
                f"ParameterServer(shards={self.shards}): this job was started with {dedicated} servers, and each has a shard.\n"
                f'Leave shards= out, start {self.shards} servers, or write placement="beside" for {self.shards} processes beside '
                f"the workers."
            )
        return dedicated
