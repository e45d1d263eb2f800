"""Caramel: small gradients batched, large ones cut, each transfer within its window.

The *window* of a parameter begins when its gradient is ready and ends when the next forward first reads it. Postponing the update
to that moment is what opens it beyond the end of backward: [r, B + f], with B the time of backward and f that of the modules
before the first user; without `cross_barrier` it ends with backward, at B. Transfers go in the order in which their windows end.
A transfer of x bytes takes a + b x.

Batching: a parameter is small below B*, where the start-up is a share e of its transfer: a / (a + b B*) = e. Neighbours in the
order of readiness share a transfer until it has reached B*, while their common window [last r, first end] is not empty (in one
step of one model it never is empty: all contain the end of backward) and, in the `fitting` variant,

    it is long enough for the batch, a + b x <= first end - last r, or the batch has at most a / b bytes: then a member that would
    be late by itself is made later by at most a, and what follows gets that back, because a start-up is saved.

Plans with either variant and e = 1/2, 1/4, 1/10, 1/20 are simulated, and the one with the shortest step is taken.

Depth: a transfer of `size` bytes goes in D parts, so that adding up, copying and sending of different parts overlap; with s = 3
such stages and a start-up of a' for each part,

    T(D) = (s + D - 1) (a' + b size / D),     1 <= D <= clamp(size // chunk, 1, 64)

and D is the one with the least T, where `chunk` is the size whose start-up a' is a share of 0.02 (at least 64 KiB): a wire moves
one part while it adds another anyway, so more of them gain less than T says. Small ones have D = 1.

Cost:      O(L log L) for L parameters, and eight simulated steps.
Invariant: the windows of all members of a transfer overlap. No parameter of at least B* bytes shares its transfer.
Reference: Hashemi, Jyothi, Godfrey and Campbell, "Caramel: Accelerating decentralized distributed deep learning with computation
           scheduling", arXiv:2004.14020, 2020.
Departure: the paper also reorders computation, so that gradients are ready early and evenly. Autograd in eager mode picks what to
           run by sequence number, the reverse of the order in which forward made the graph: only independent branches could move,
           and only by capturing the graph or rewriting forward. So computation is left in its order here. The thresholds are
           reconstructed from the abstract and the cost model; the `fitting` variant and the choice by simulation are ours. The
           time of the update itself is not taken off the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf

from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.simulate import PART_SHARE
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.best_plan import best_plan
from stretto.schedule.first_use import CREDIT_BYTES, by_first_use, credit_for, first_users
from stretto.schedule.readiness import (
    check_is_bool,
    in_order_of_readiness,
    make_transfers,
    plan_until_profiled,
    ready_seconds,
    total_bytes,
)

START_UP_SHARES = (1 / 2, 1 / 4, 1 / 10, 1 / 20)
PART_START_UP_SHARE = 0.02
NUM_STAGES = 3
MAX_DEPTH = 64
LEAST_CHUNK_BYTES = 64 << 10
ALIGNMENT = 64  # parts begin at whole elements, of whatever dtype


@dataclass(frozen=True, slots=True)
class TransferWindow:
    """From when a parameter's gradient may travel until it is needed, in seconds from the beginning of backward."""

    begin_s: float
    end_s: float

    def meet(self, other: TransferWindow) -> TransferWindow:
        return TransferWindow(max(self.begin_s, other.begin_s), min(self.end_s, other.end_s))

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Caramel:
    """Batches and parts by the windows and the network of a profile."""

    cross_barrier: bool = True

    def __post_init__(self) -> None:
        check_is_bool("Caramel", "cross_barrier", self.cross_barrier)

    @property
    def needs_profile(self) -> bool:
        return True

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        if profile is None:
            return plan_until_profiled(self, gradients, ranked=True, credit_bytes=CREDIT_BYTES)
        cost, readiness = profile.cost, in_order_of_readiness(gradients, profile)
        windows = windows_of(gradients, profile, cross_barrier=self.cross_barrier)

        def candidate(share: float, fitting: bool) -> TransferPlan:
            small_bytes = bytes_at_share(cost.start_s, share, cost)
            batches = batch_small(readiness, windows, cost, small_bytes, fitting=fitting)
            urgency = by_first_use(batches, gradients, profile)
            return TransferPlan(
                schedule=repr(self),
                transfers=make_transfers(urgency, readiness, ranked=True, part_bytes=lambda size: part_bytes_of(size, cost)),
                credit_bytes=credit_for(gradients, profile),
                reason=f"parameters below {small_bytes:,.0f} bytes batched{' where their window allows' if fitting else ''}",
            )

        candidates = [candidate(share, fitting) for share in START_UP_SHARES for fitting in (True, False)]
        return best_plan(candidates, profile, cross_barrier=self.cross_barrier)


def windows_of(gradients: Sequence[Gradient], profile: StepProfile, *, cross_barrier: bool) -> dict[str, TransferWindow]:
    """The window of each parameter. What no module was seen to read is needed when forward begins."""
    ready_s, users = ready_seconds(gradients, profile), first_users(gradients, profile)
    starts = [0.0, *accumulate(module.forward_s for module in profile.modules)]
    return {
        name: TransferWindow(ready_s[name], profile.backward_s + (starts[max(user, 0)] if cross_barrier else 0.0))
        for name, user in users.items()
    }


def batch_small(
    readiness: Sequence[Gradient],
    windows: dict[str, TransferWindow],
    cost: TransferCost,
    small_bytes: float,
    *,
    fitting: bool,
) -> list[list[Gradient]]:
    """Groups that travel together, in the order in which their first members are ready; `small_bytes` is B*."""
    growing: dict[str, tuple[list[Gradient], TransferWindow]] = {}  # the last batch of small ones of each kind
    batches: list[list[Gradient]] = []
    for gradient in readiness:
        window, kind = windows[gradient.name], gradient.kind
        if gradient.num_bytes >= small_bytes:
            batches.append([gradient])
            continue
        if kind in growing:
            batch, common = growing[kind]
            common = common.meet(window)
            size = total_bytes(batch)
            has_room = not fitting or _fits(common, size + gradient.num_bytes, cost)
            if size < small_bytes and common.length_s >= 0 and has_room:
                batch.append(gradient)
                growing[kind] = batch, common
                continue
        batches.append([gradient])
        growing[kind] = batches[-1], window
    return batches


def _fits(common: TransferWindow, num_bytes: int, cost: TransferCost) -> bool:
    is_mostly_start_up = num_bytes * cost.per_byte_s <= cost.start_s
    return is_mostly_start_up or cost.seconds(num_bytes) <= common.length_s


def bytes_at_share(start_s: float, share: float, cost: TransferCost) -> float:
    """The bytes from which on a start-up of `start_s` is at most such a share of a transfer."""
    if cost.per_byte_s == 0:
        return inf if start_s > 0 else 0.0
    return start_s * (1 - share) / (share * cost.per_byte_s)


def depth_of(num_bytes: int, cost: TransferCost) -> int:
    """D: into how many parts a transfer is cut."""
    chunk = max(LEAST_CHUNK_BYTES, bytes_at_share(PART_SHARE * cost.start_s, PART_START_UP_SHARE, cost))
    most = min(max(int(num_bytes // chunk), 1), MAX_DEPTH)
    return min(range(1, most + 1), key=lambda depth: pipelined_seconds(num_bytes, depth, cost))


def pipelined_seconds(num_bytes: int, depth: int, cost: TransferCost) -> float:
    """T(D): a transfer in `depth` parts that follow each other through the stages."""
    return (NUM_STAGES + depth - 1) * (PART_SHARE * cost.start_s + cost.per_byte_s * num_bytes / depth)


def part_bytes_of(num_bytes: int, cost: TransferCost) -> int | None:
    depth = depth_of(num_bytes, cost)
    return None if depth == 1 else ceil(num_bytes / depth / ALIGNMENT) * ALIGNMENT
