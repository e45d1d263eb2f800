"""Norms of gradients that are in slices, and whether any worker's slice has infinities: agreed on by all workers.

    |g_p|_q of every parameter p  =  (sum over workers of |piece of p|_q^q)^(1/q)         q = inf: the largest

Asked for one parameter, the norms of all are found out at once and remembered until gradients change: clipping by the global norm
asks for one after the other. All workers must ask, in the same order, as for any collective.

Cost:      one all-reduce of 8 bytes per parameter for each change of the gradients.
Invariant: all workers get the same bits, so a clip by them is the same on all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stretto.aggregate.zero.bucket import SlicedBucket
    from stretto.aggregate.zero.gradient import GradientInSlices
from stretto.aggregate.zero.joining import Announcements, Coming
from stretto.job import Job


class SliceNorms:
    """The norms of gradients whose slices are on all workers, over all buckets of one model."""

    def __init__(self, job: Job, name: str, announced: Announcements) -> None:
        self._job = job
        self.announced = announced
        self._infinity = 0.0  # found by a worker without data
        self._name = name
        self.buckets: Sequence[SlicedBucket] = ()
        self._known: dict[float, dict[tuple[int, int], Tensor]] = {}  # order -> (bucket, slot) -> norm

    def forget(self) -> None:
        """Gradients have changed, on all workers."""
        self._known.clear()

    def of(self, gradient: GradientInSlices, order: Any = 2) -> Tensor:
        """The norm of one parameter's whole gradient, as torch gives it: without dimensions, where the gradient is."""
        power = 2.0 if order is None else float(order)
        if power not in self._known:
            self.announced.say(Coming.NORMS, power)
            self._known[power] = self.find(power)
        found = self._known[power][gradient.bucket.number, gradient.slot]
        dtype = gradient.dtype.to_real() if gradient.dtype.is_complex else gradient.dtype
        return found.to(device=gradient.device, dtype=dtype)

    def find(self, power: float) -> dict[tuple[int, int], Tensor]:
        """Everybody's, in float64."""
        first, total = {}, 0
        for bucket in self.buckets:
            first[bucket.number] = total
            total += len(bucket.parameters)
        sums = torch.zeros(total, dtype=torch.float64, device="cpu")
        places, norms = [], []
        for bucket in self.buckets:
            for piece in bucket.pieces:
                part = bucket.valid_part(piece)
                if part is not None and part.numel():
                    places.append(first[bucket.number] + piece.slot)
                    norms.append(torch.linalg.vector_norm(part, power, dtype=_wide(part)))
        mine = on_host(norms)
        sums[places] = mine if math.isinf(power) else mine**power
        op = "max" if power == math.inf else "sum"
        self._job.all_reduce(sums, op=op, algorithm="ring", label=f" of norms of the gradients of {self._name}")
        found = sums if math.isinf(power) else sums ** (1.0 / power)
        return {
            (bucket.number, slot): found[first[bucket.number] + slot]
            for bucket in self.buckets
            for slot in range(len(bucket.parameters))
        }

    def unscale(self, gradients: Sequence[GradientInSlices], found_infinity: Tensor, inverse_scale: Tensor) -> None:
        """What a GradScaler does to gradients: multiply, and note infinities. A worker's slices may be finite where another's are
        not: all skip, or none."""
        parts = []
        for each in gradients:
            parts += [
                part for piece in each.bucket.pieces_of_slot(each.slot) if (part := each.bucket.valid_part(piece)) is not None
            ]
        for bucket in dict.fromkeys(each.bucket for each in gradients) if self.announced.is_needed else ():
            self.announced.say(Coming.UNSCALE, bucket.number, float(inverse_scale))
        self.announced.say(Coming.INFINITIES)
        if parts:
            torch._amp_foreach_non_finite_check_and_unscale_(parts, found_infinity, inverse_scale)
        found_infinity.fill_(self.agree_on_infinity(float(found_infinity)))
        self.forget()

    def unscale_bucket(self, bucket: SlicedBucket, inverse_scale: float) -> None:
        """The part of a worker without data, which has no scaler to tell."""
        parts = [part for piece in bucket.pieces if (part := bucket.valid_part(piece)) is not None and part.numel()]
        if parts:
            found = torch.zeros(1, dtype=torch.float32, device=parts[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(parts, found, torch.full_like(found, inverse_scale))
            self._infinity = max(self._infinity, float(found))

    def agree_on_infinity(self, mine: float | None = None) -> float:
        """Whether any worker has found one."""
        flag = torch.tensor([self._infinity if mine is None else mine], dtype=torch.float32, device="cpu")
        self._infinity = 0.0
        self._job.all_reduce(flag, op="max", algorithm="ring", label=f" of infinities in the gradients of {self._name}")
        return float(flag)


def on_host(norms: Sequence[Tensor]) -> Tensor:
    """Numbers from whichever devices, in float64: a GPU is waited for once."""
    if not norms:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.cpu() for norm in norms]
    return torch.stack([norm.double() for norm in norms]).cpu()


def _wide(part: Tensor) -> torch.dtype:
    return (
        torch.promote_types(part.dtype, torch.float64)
        if part.device.type == "cpu"
        else torch.promote_types(part.dtype, torch.float32)
    )
