"""Papers and systems by name, each one composition.

A recipe returns an ordinary `Strategy`: print it to see what the name stands for.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.aggregate.all_reduce import AllReduce
from stretto.schedule.orders import AfterBackward, Buckets
from stretto.strategy import Strategy


def ddp(*, bucket_bytes: int = 25 * 1024 * 1024) -> Strategy:
    """PyTorch's DistributedDataParallel: buckets in reverse order of registration, all-reduced as they fill.

    Reference: Li et al., "PyTorch Distributed", VLDB 2020. Departs from it: the all-reduce is stretto's and chosen by size,
    buckets are not rebuilt after the first step, and ranks need not send them in the same order.
    """
    return Strategy(schedule=Buckets(bytes=bucket_bytes))


def data_parallel() -> Strategy:
    """The naive one: when backward has ended, a master gathers all gradients, averages them and sends them back.

    Cost: the master's link carries 2(P-1) times the model. To compare with.
    """
    return Strategy(aggregate=AllReduce("master_worker"), schedule=AfterBackward())


def horovod(*, fusion_bytes: int = 128 * 1024 * 1024) -> Strategy:
    """Horovod: gradients fused into buffers of up to `fusion_bytes`, ring all-reduced.

    Reference: Sergeev and Del Balso, "Horovod", arXiv:1802.05799. Departs from it: what is fused is fixed by the order of
    registration, where Horovod fuses whatever became ready within a cycle (1 ms) on all ranks.
    """
    return Strategy(aggregate=AllReduce("ring"), schedule=Buckets(bytes=fusion_bytes, first_bytes=fusion_bytes))


def by_name() -> dict[str, Callable[..., Strategy]]:
    """Every recipe of this module."""
    return {"ddp": ddp, "data_parallel": data_parallel, "horovod": horovod}
