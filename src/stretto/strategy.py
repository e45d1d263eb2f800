"""Strategy: five questions about data-parallel training, answered by five small values.

    aggregate   whose values are combined, and by whom?      AllReduce(algorithm), Hierarchy(inner, outer, group_size, elastic),
                                                             ParameterServer(shards, replicas, answers), SharedMemory(),
                                                             Gossip(graph, push_sum, pull), GroupAverage(size, rule, patience_s)
    sync        when?                                        Synchronous(), or late, StaleSynchronous(bound); with servers also
                                                             Asynchronous(staleness_aware, delay_compensation), SoftSync(n),
                                                             BackupWorkers(spare); in shared memory Asynchronous(); each
                                                             worker by itself, and together now and then, LocalSGD(every)
    compress    how is it written on the wire?               NoCompression(), Float16(), Int8(), ErrorFeedback(Sign()), ...
    schedule    in which order, and over what?               AfterBackward(), WaitFree(), Buckets(bytes), Merged(), Tic(), Tac(),
                                                             Priority(partition, credit), Caramel()
    shard       where does model state live?                 Replicated(), Zero(stage)

A strategy is frozen, hashable and printable; it is the configuration. `repr` reads back with `parse`, which knows the
names above and nothing else: a command line, a log line and a plan all speak the same language.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from torch import nn

from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.all_reduce.pipelined import PipelinedAllReduce
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.aggregate.gossip import Gossip
from stretto.aggregate.gossip.asynchronous import AsynchronousGossip
from stretto.aggregate.gossip.outer_steps import OuterGossip
from stretto.aggregate.gossip.training import NeighbourGossip, PushSumGossip
from stretto.aggregate.group_average.grid_training import GridAverage
from stretto.aggregate.group_average.training import WaitAvoidingAverage
from stretto.aggregate.group_average.value import GroupAverage
from stretto.aggregate.hierarchy import Hierarchy
from stretto.aggregate.hierarchy.elastic_groups import ElasticGroups
from stretto.aggregate.hierarchy.outer_steps import OuterSteps
from stretto.aggregate.hierarchy.stepping_servers import GroupsWithSteppingServers
from stretto.aggregate.hierarchy.summing_servers import GroupsWithSummingServers
from stretto.aggregate.hierarchy.training import SynchronousHierarchy
from stretto.aggregate.local_sgd.streaming import StreamingAveraging
from stretto.aggregate.local_sgd.training import LocalAveraging
from stretto.aggregate.parameter_server import ParameterServer
from stretto.aggregate.parameter_server.consistency import SyncAnswer
from stretto.aggregate.parameter_server.stepping import SteppingServers
from stretto.aggregate.parameter_server.training import SynchronousServers
from stretto.aggregate.shared_memory import SharedMemory
from stretto.aggregate.shared_memory.training import Hogwild
from stretto.aggregate.zero.cut.training import CutParameters
from stretto.aggregate.zero.training import ShardedAllReduce
from stretto.compress import catalogue
from stretto.compress.codec import Compression
from stretto.compress.none import NoCompression
from stretto.engine.training import Setting, Training
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.schedule.caramel import Caramel
from stretto.schedule.merged import Merged
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac, Tic
from stretto.shard.replicated import Replicated
from stretto.shard.zero import Zero
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.local_sgd import STREAMING, LocalSGD
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous

SERVER_SYNCS: tuple[type, ...] = (StaleSynchronous, Asynchronous, SoftSync, BackupWorkers)  # with which servers step
Schedule = AfterBackward | WaitFree | Buckets | Merged | Tic | Tac | Priority | Caramel
ANSWERS: dict[str, tuple[type, ...]] = {
    "aggregate": (AllReduce, Hierarchy, ParameterServer, SharedMemory, Gossip, GroupAverage),
    "sync": (Synchronous, *SERVER_SYNCS, LocalSGD),
    "compress": catalogue.classes(),
    "schedule": (AfterBackward, WaitFree, Buckets, Merged, Tic, Tac, Priority, Caramel),
    "shard": (Replicated, Zero),
}

# A GPU adds in no time, but every bucket takes two meetings: with 24 and 100 MiB the step of GPT-2 on four workers that share an
# H200 took 61.3 and 56.7 ms (benchmarks/gpu_step.py). Between hosts, where the network has to begin early, both are as fast.
ON_ONE_HOST = Buckets(bytes=100 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How to train data-parallel. The default is synchronous all-reduce in buckets: exactly large-batch training."""

    aggregate: AllReduce | Hierarchy | ParameterServer | SharedMemory | Gossip | GroupAverage = field(default_factory=AllReduce)
    sync: SyncAnswer | LocalSGD = field(default_factory=Synchronous)
    compress: Compression = field(default_factory=NoCompression)
    schedule: Schedule = field(default_factory=Buckets)
    shard: Replicated | Zero = field(default_factory=Replicated)

    def __post_init__(self) -> None:
        for axis in fields(self):
            value = getattr(self, axis.name)
            kinds = (Compression,) if axis.name == "compress" else ANSWERS[axis.name]  # a user's own codec is one too
            if not isinstance(value, kinds):
                raise ConfigurationError(_wrong_answer(axis.name, value))
        self.training.check_strategy(self)

    @property
    def training(self) -> type[Training[Any]]:
        """The way of training that these answers name. `compress` and `schedule` are its options."""
        for way in WAYS:
            if (
                isinstance(self.aggregate, way.aggregate)
                and way.variant in ("", getattr(self.aggregate, "variant", ""))
                and isinstance(self.sync, way.sync)
                and way.sync_variant == getattr(self.sync, "variant", "")
                and isinstance(self.shard, way.shard)
                and way.shard_variant == getattr(self.shard, "variant", "")
            ):
                return way.training
        raise ConfigurationError(_no_way(self))

    def bind(self, job: Job, setting: Setting) -> Training[Any]:
        """Begin to train one model so, in one job. On all workers."""
        strategy = self._for_gpus(job) if self._is_left_to_us and _are_on_gpus(setting.model, job) else self
        return strategy.training(strategy, job, setting)

    @property
    def _is_left_to_us(self) -> bool:
        """Whether the user has no wish how gradients are combined. Compressed ones are small, and stay each worker's own."""
        are_default = self.aggregate == AllReduce() and self.sync == Synchronous() and self.shard == Replicated()
        return are_default and self.compress.lossless

    def _for_gpus(self, job: Job) -> Strategy:
        """Workers of one host that compute on GPUs combine gradients there, and not in host memory."""
        on_one_host = len({peer.host for peer in job.peers}) == 1
        schedule = ON_ONE_HOST if on_one_host and self.schedule == Buckets() else self.schedule
        return replace(self, aggregate=Hierarchy(), schedule=schedule)


def _are_on_gpus(model: nn.Module, job: Job) -> bool:
    """Whether all workers have some parameter on a GPU, and some of them share a host. All get the same answer."""
    if len({peer.host for peer in job.peers}) == job.world_size:
        return False
    return all(job.gather_object(any(parameter.is_cuda for parameter in model.parameters())))


class Way(NamedTuple):
    """A combination of answers for which there is a Training."""

    aggregate: type
    sync: type
    shard: type
    training: type[Training[Any]]
    variant: str = ""  # of the aggregate, where it has several
    sync_variant: str = ""  # of sync
    shard_variant: str = ""  # of shard

    @property
    def text(self) -> str:
        inside = f"({self.variant})" if self.variant else ""
        how = f"({self.sync_variant})" if self.sync_variant else ""
        cut = f"({self.shard_variant})" if self.shard_variant else ""
        return f"aggregate={self.aggregate.__name__}{inside}, sync={self.sync.__name__}{how}, shard={self.shard.__name__}{cut}"


WAYS: tuple[Way, ...] = (
    Way(AllReduce, Synchronous, Replicated, SynchronousAllReduce),
    Way(AllReduce, Synchronous, Zero, ShardedAllReduce),
    Way(AllReduce, Synchronous, Zero, CutParameters, shard_variant="stage=3"),
    Way(AllReduce, StaleSynchronous, Replicated, PipelinedAllReduce),
    Way(Hierarchy, Synchronous, Replicated, SynchronousHierarchy, "outer=AllReduce"),
    Way(Hierarchy, Synchronous, Replicated, GroupsWithSummingServers, "outer=ParameterServer"),
    Way(ParameterServer, Synchronous, Replicated, SynchronousServers),
    *(
        Way(Hierarchy, sync, Replicated, ElasticGroups, "outer=ParameterServer, elastic=Elastic")
        for sync in (Synchronous, StaleSynchronous, Asynchronous)
    ),
    *(Way(Hierarchy, sync, Replicated, GroupsWithSteppingServers, "outer=ParameterServer") for sync in SERVER_SYNCS),
    *(Way(ParameterServer, sync, Replicated, SteppingServers) for sync in SERVER_SYNCS),
    *(
        Way(aggregate, LocalSGD, Replicated, OuterSteps, variant, sync_variant)
        for aggregate, variant in ((ParameterServer, ""), (Hierarchy, "outer=ParameterServer"))
        for sync_variant in ("", STREAMING)
    ),
    Way(GroupAverage, StaleSynchronous, Replicated, WaitAvoidingAverage),
    *(Way(GroupAverage, sync, Replicated, GridAverage) for sync in (Synchronous, LocalSGD)),
    Way(SharedMemory, Asynchronous, Replicated, Hogwild),
    *(Way(Gossip, sync, Replicated, PushSumGossip, "push_sum=True") for sync in (Synchronous, StaleSynchronous)),
    Way(Gossip, Asynchronous, Replicated, AsynchronousGossip, "push_sum=False"),
    Way(Gossip, LocalSGD, Replicated, OuterGossip, "push_sum=False"),
    *(Way(Gossip, sync, Replicated, NeighbourGossip, "push_sum=False") for sync in (Synchronous, StaleSynchronous)),
    Way(AllReduce, LocalSGD, Replicated, LocalAveraging),
    Way(AllReduce, LocalSGD, Replicated, LocalAveraging, sync_variant="grow_to"),
    Way(AllReduce, LocalSGD, Replicated, StreamingAveraging, sync_variant=STREAMING),
)


def _no_way(strategy: Strategy) -> str:
    asked = f"aggregate={strategy.aggregate!r}, sync={strategy.sync!r}, shard={strategy.shard!r}"
    near = [way for way in WAYS if isinstance(strategy.aggregate, way.aggregate) or isinstance(strategy.sync, way.sync)]
    ways = "; ".join(way.text for way in near)
    return (
        f"Strategy({asked}): each of them is an answer, but there is no way of training that combines the three.\n"
        f"Write one of the combinations that exist: {ways}.{_without_growing(strategy)}"
    )


def _without_growing(strategy: Strategy) -> str:
    if getattr(strategy.sync, "variant", "") != "grow_to":
        return ""
    return (
        "\nOr leave grow_to= out: a period grows while workers agree, which is seen where all of them come together, with "
        "aggregate=AllReduce()."
    )


def _wrong_answer(axis: str, value: object) -> str:
    choices = ", ".join(f"{kind.__name__}({'...' if _needs_arguments(kind) else ''})" for kind in ANSWERS[axis])
    hint = ""
    if isinstance(value, type) and value in ANSWERS[axis]:
        hint = f" Did you mean {value.__name__}(), with parentheses?"
    for other, kinds in ANSWERS.items():
        if isinstance(value, kinds):
            hint = f" It answers another question: write {other}={value!r}."
    return f"Strategy({axis}={value!r}): not an answer to that question.{hint}\nWrite {axis}= one of {choices}."


def _needs_arguments(kind: type) -> bool:
    parameters = list(inspect.signature(kind).parameters.values())
    return any(one.default is one.empty for one in parameters)
