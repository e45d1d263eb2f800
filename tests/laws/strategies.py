"""Every strategy that the laws are asked of. A new value is one more line here, and all laws apply to it."""

from __future__ import annotations

from stretto import (
    DGC,
    E3M0,
    EF21,
    QSGD,
    AllReduce,
    BFloat16,
    ByParameter,
    DeMo,
    Dynamic8,
    ErrorFeedback,
    Float16,
    Int8,
    NoCompression,
    OneBit,
    OneBitAdam,
    PowerSGD,
    RandomK,
    Sign,
    TernGrad,
    Threshold,
    TopK,
    WarmUp,
    recipes,
)
from stretto.aggregate.hierarchy import Hierarchy
from stretto.aggregate.parameter_server import ParameterServer
from stretto.collectives import catalogue
from stretto.collectives.plan import Kind
from stretto.compress.codec import Compression
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac
from stretto.shard.zero import Zero
from stretto.strategy import Strategy

RING = AllReduce("ring")
PLAIN = Strategy(aggregate=RING, schedule=AfterBackward())  # what the others are compared with
SMALL_BUCKETS = Strategy(aggregate=RING, schedule=Buckets(bytes=256, first_bytes=64))
WAIT_FREE = Strategy(aggregate=RING, schedule=WaitFree())
IN_SLICES = Strategy(aggregate=RING, schedule=Buckets(bytes=256, first_bytes=64), shard=Zero(2))
PARAMETERS_TOO = Strategy(aggregate=RING, schedule=Buckets(bytes=256, first_bytes=64), shard=Zero(3))
HIERARCHIES = (Hierarchy(outer=RING), Hierarchy(inner=RING, outer=AllReduce("butterfly")))

STRATEGIES = [
    PLAIN,
    SMALL_BUCKETS,
    Strategy(aggregate=RING, schedule=Buckets()),
    WAIT_FREE,
    Strategy(aggregate=AllReduce("halving_doubling"), schedule=Buckets(bytes=1000)),
    Strategy(aggregate=AllReduce("direct"), schedule=WaitFree()),
    Strategy(),
    recipes.ddp(bucket_bytes=512),
    recipes.data_parallel(),
    recipes.horovod(fusion_bytes=4096),
    Strategy(aggregate=RING, schedule=Priority(partition=256, credit=256)),
    Strategy(aggregate=HIERARCHIES[0], schedule=Buckets(bytes=256, first_bytes=64)),
    Strategy(aggregate=HIERARCHIES[1], schedule=WaitFree()),
    Strategy(aggregate=ParameterServer(shards=2), schedule=Buckets(bytes=256, first_bytes=64)),
    Strategy(aggregate=ParameterServer(shards=3, replicas=1), schedule=WaitFree()),
    Strategy(aggregate=Hierarchy(outer=ParameterServer(shards=2)), schedule=Buckets(bytes=256, first_bytes=64)),
    Strategy(aggregate=ParameterServer(shards=2), schedule=Tac()),
    Strategy(aggregate=RING, schedule=Buckets(bytes=256, first_bytes=64), shard=Zero(1)),
    IN_SLICES,
    PARAMETERS_TOO,
    Strategy(aggregate=AllReduce("direct"), schedule=WaitFree(), shard=Zero(1)),
    Strategy(aggregate=RING, schedule=Priority(partition=256, credit=256), shard=Zero(1)),
    Strategy(aggregate=RING, schedule=Priority(partition=256, credit=256), shard=Zero(2)),
]
# Lossy: laws 2 and 4 become others (`test_lossy.py`), the rest is asked of them too.
COMPRESSIONS: list[Compression] = [
    Float16(),
    BFloat16(),
    BFloat16(stochastic=True),
    Int8(block=32),
    Int8(block=32, stochastic=True),
    Dynamic8(block=64),
    E3M0(block=32),
    QSGD(bits=4, bucket=64),
    TernGrad(),
    OneBit(),
    Sign(block=64),
    Sign(vote=True),
    TopK(0.1),
    RandomK(0.1, scaled=True),
    Threshold(0.01),
    DGC(0.05, warm_up=(0.5,), warm_up_rounds=2),
    PowerSGD(2),
    DeMo(k=4, chunk=8),
    OneBitAdam(2, codec=Sign(block=64)),
    ErrorFeedback(Int8(block=32)),
    ErrorFeedback(E3M0(block=32)),
    ErrorFeedback(QSGD(bits=8, bucket=64)),
    ErrorFeedback(OneBit()),
    ErrorFeedback(Sign(block=64)),
    ErrorFeedback(TopK(0.05)),
    ErrorFeedback(RandomK(0.1)),
    ErrorFeedback(PowerSGD(2)),
    EF21(TopK(0.1)),
    EF21(TopK(0.1), momentum=0.5, participation=0.8),
    ByParameter(("*.bias", NoCompression()), ("0.*", Float16()), ("*", ErrorFeedback(Sign(block=64)))),
    WarmUp(2, ErrorFeedback(TopK(0.05))),
]
EVERY_ALGORITHM = [
    Strategy(aggregate=AllReduce(name), schedule=Buckets(bytes=512, first_bytes=64)) for name in catalogue.names(Kind.ALL_REDUCE)
]


DENSE_OF_FIRST_ORDER = ("sparse embeddings", "only sparse embeddings", "gradient penalty")


def refused(strategy: Strategy) -> tuple[str, ...]:
    """The cases that it says no to: `aggregate/zero/test_cut.py`."""
    return DENSE_OF_FIRST_ORDER if strategy == PARAMETERS_TOO else ()


def hosts_for(strategy: Strategy, size: int) -> list[str] | None:
    """Where the workers of a test are: two to a host where that matters, the last one alone if their number is odd."""
    return [f"host {rank // 2}" for rank in range(size)] if isinstance(strategy.aggregate, Hierarchy) else None


def short(strategy: Strategy) -> str:
    """For the name of a test."""
    text = repr(strategy)
    for noise in (
        "Strategy(",
        "AllReduce(algorithm=",
        "sync=Synchronous(), ",
        "compress=NoCompression(), ",
        ", shard=Replicated()",
    ):
        text = text.replace(noise, "")
    return text.replace("aggregate=", "").replace("schedule=", "").replace("'", "").rstrip(")")
