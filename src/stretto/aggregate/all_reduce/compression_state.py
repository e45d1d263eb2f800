"""What compressions remember, by parameter name: across other buckets, in the optimizer's `state_dict`, and from job to job.

`own` is this worker's alone (residuals); `shared` is the same on all. A plain `optimizer.state_dict()` holds this worker's;
`stretto.save` collects all workers' (`checkpoint.py`). With another number of workers, every worker takes the mean of what all
had of their own, so the mean over workers, which is what has yet to be said, is conserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.aggregate.all_reduce.bucket import ReducedBucket
from stretto.compress.codec import Compression
from stretto.compress.state import SERVER
from stretto.engine.training import TensorsByName, TrainingState


def export(buckets: Sequence[ReducedBucket]) -> tuple[TensorsByName, TensorsByName]:
    """Everything that the buckets' compressions remember: own and shared."""
    own: TensorsByName = {}
    shared: TensorsByName = {}
    for bucket in buckets:
        if bucket.state is not None:
            own |= bucket.state.own.export()
            shared |= bucket.state.shared.export()
    return own, shared


def restore(buckets: Sequence[ReducedBucket], saved: TrainingState, rank: int, world_size: int) -> None:
    """Give the buckets, which must be fresh, what was exported."""
    for bucket in buckets:
        if bucket.state is not None:
            bucket.state.rounds = saved.rounds
            bucket.compression.restore(bucket.state, saved.own, saved.shared, rank, world_size)


def check(saved: Mapping[str, Mapping[str, Any]], known: Iterable[tuple[str, int, Compression]]) -> str | None:
    """The first tensor that cannot belong to the parameter it is saved under, or None. `known`: the parameters' names, their
    numbers of elements and what they are compressed with."""
    for name, num_elements, compression in known:
        for kind, value in saved.get(name, {}).items():
            if not isinstance(value, Tensor):
                return f"{kind} of {name} is a {type(value).__name__}, not a tensor"
            if kind in compression.flat_kinds and value.numel() != num_elements:
                return f"{kind} of {name} has {value.numel()} elements, the parameter {num_elements}"
            if not bool(value.isfinite().all()):
                return f"{kind} of {name} holds values that are not finite"
    return None


def compressed_in(buckets: Iterable[ReducedBucket]) -> Iterator[tuple[str, int, Compression]]:
    """What `check` is to know of the parameters in these buckets."""
    for bucket in buckets:
        for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
            yield name, parameter.numel(), bucket.compression


def mean_of(everybody: Sequence[TensorsByName], world_size: int) -> TensorsByName:
    """For another number of workers: what each then has of its own. The server's residual lay in parts; every worker gets an
    equal share of all of them, and takes what is not of its blocks as its own."""
    out: TensorsByName = {}
    for name in dict.fromkeys(name for own in everybody for name in own):
        for kind in dict.fromkeys(kind for own in everybody for kind in own.get(name, {})):
            values = [own[name][kind] for own in everybody if kind in own.get(name, {})]
            total = torch.stack([value.float() for value in values]).sum(0)
            out.setdefault(name, {})[kind] = total / (world_size if kind == SERVER else len(everybody))
    return out
