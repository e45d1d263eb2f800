"""Every strategy that the laws are asked of. A new value is one more line here, and all laws apply to it."""

from __future__ import annotations

from stretto import recipes
from stretto.aggregate.all_reduce import AllReduce
from stretto.collectives import catalogue
from stretto.collectives.plan import Kind
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.strategy import Strategy

RING = AllReduce("ring")
PLAIN = Strategy(aggregate=RING, schedule=AfterBackward())  # what the others are compared with
SMALL_BUCKETS = Strategy(aggregate=RING, schedule=Buckets(bytes=256, first_bytes=64))

STRATEGIES = [
    PLAIN,
    SMALL_BUCKETS,
    Strategy(aggregate=RING, schedule=Buckets()),
    Strategy(aggregate=RING, schedule=WaitFree()),
    Strategy(aggregate=AllReduce("halving_doubling"), schedule=Buckets(bytes=1000)),
    Strategy(aggregate=AllReduce("direct"), schedule=WaitFree()),
    Strategy(),
    recipes.ddp(bucket_bytes=512),
    recipes.data_parallel(),
    recipes.horovod(fusion_bytes=4096),
]
EVERY_ALGORITHM = [
    Strategy(aggregate=AllReduce(name), schedule=Buckets(bytes=512, first_bytes=64)) for name in catalogue.names(Kind.ALL_REDUCE)
]


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
