"""Deep gradient compression: the few largest values, and momentum that waits with those that were not sent.

Each worker w keeps u (its momentum) and v (what it has not sent yet), for every tensor:

    g <- g min(1, clip / (sqrt(P) |g|))          if `clip` is given: each worker cuts its own gradient, tensor by tensor
    u <- mu u + g,      v <- v + u               Nesterov's: u <- mu (u + g), v <- v + u + g
    s = about the k largest |v|                  by a sampled threshold, at most k = density n (`sampled_selection.py`)
    send v[s];          v[s] = 0, u[s] = 0       u[s] = 0 ("factor masking") lest old momentum carry on after it was sent

Everybody gets all payloads and hands out their mean, so the optimizer is plain SGD: momentum belongs in u, before the selection.
Weight decay that SGD adds has no momentum then.

Warm-up:    `warm_up` densities first, each for `warm_up_rounds` rounds (one epoch each in the paper), then `fraction`. A density
            below `fraction` is raised to it. Rounds of the job are counted, so a resumed one goes on where it was.
Dense:      tensors with one dimension or none, and those below 1024 values, go whole, with ordinary momentum (`DenseMomentum`).
            So does everything at fraction = 1, where masking would wipe u in every round: no momentum at all.
Bits:       48 for each value sent and 32 per tensor (`run_length.py`), (P - 1) times; before it 8 bytes to say how many.
Memory:     16 bytes per parameter: u and v, and the next ones until the round has ended well on all workers.
Invariant:  the sum of all that was sent and v is the sum of u over all rounds (Nesterov's: of u + g), masked or not. Its memory
            is v: no `ErrorFeedback`.
Bias:       where workers' gradients differ at the optimum, masking shifts it: a worker whose values are larger sends them more
            often, loses its momentum more often, and so counts less. No learning rate cures it, `masking=False` does; with data
            that is shuffled over all workers it is small.
Values beyond the range of float32 stay at its end.
Reference:  Lin et al., "Deep Gradient Compression", ICLR 2018. Departs from it: `clip` is per tensor, not over all parameters,
            which a bucket does not see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from stretto.compress.backend import accelerated
from stretto.compress.checks import check, is_count, is_number
from stretto.compress.codec import Compression
from stretto.compress.dense_momentum import OPTIMIZER, VELOCITY, DenseMomentum, check_momentum, clip_each
from stretto.compress.exchange import blamed_on, gather_payloads
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import ExchangeContext, Steps
from stretto.compress.run_length import decode_sparse, encode_sparse, max_bytes
from stretto.compress.sampled_selection import select_largest
from stretto.compress.state import Section

ACCUMULATED = "accumulated"
SMALL = 1024
LARGEST = torch.finfo(torch.float32).max


class Accumulators(NamedTuple):
    """What a worker keeps: `u` its momentum, `v` what it has not sent."""

    u: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class DGC(Compression):
    """`fraction`: of the values of each tensor, the share that is sent in a round."""

    fraction: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    clip: float | None = None
    warm_up: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)
    warm_up_rounds: int = 100
    masking: bool = True
    optimizer_hint: ClassVar[str | None] = OPTIMIZER
    no_abstention: ClassVar[str | None] = "what it remembers counts in the mean, also of a worker without data"
    flat_kinds: ClassVar[frozenset[str]] = frozenset((VELOCITY, ACCUMULATED))

    def __post_init__(self) -> None:
        sends = is_number(self.fraction) and 0 < self.fraction <= 1
        why, instead = "the share of values that is sent is above 0 and at most 1", "DGC(fraction=0.001) for one in a thousand"
        check(sends, self, "fraction", why, instead)
        check_momentum(self, self.momentum, self.nesterov, self.clip)
        check(isinstance(self.masking, bool), self, "masking", "it is neither True nor False", "nothing: it is True")
        warms = isinstance(self.warm_up, tuple) and all(is_number(one) and 0 < one < 1 for one in self.warm_up)
        why = "these are the densities to begin with, a tuple of numbers above 0 and below 1"
        check(warms, self, "warm_up", why, "warm_up=(0.25, 0.0625), or warm_up=() for none")
        why = "each density of the warm-up lasts a whole number of rounds, from 1"
        check(
            is_count(self.warm_up_rounds), self, "warm_up_rounds", why, "the number of steps in an epoch, or warm_up=() for none"
        )

    def density(self, rounds: int) -> float:
        """The share of values that is sent after so many rounds."""
        phase = rounds // self.warm_up_rounds
        return max(self.fraction, self.warm_up[phase]) if phase < len(self.warm_up) else self.fraction

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Compression:
        is_small = len(shape) < 2 or math.prod(shape) < SMALL
        return self._dense() if is_small or self.fraction == 1 else self

    def refusal(self, algorithm: str) -> str | None:
        return f"the payloads of {self!r} do not add up, and {algorithm!r} adds what it carries"

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int | None:
        return 0 if world_size == 1 else None

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        if self.fraction == 1:
            yield from self._dense().exchange(values, context)
            return
        blocks, density = context.keep(self, context.layout.whole), self.density(context.state.rounds)
        most = [max(1, math.ceil(density * n)) for n in blocks.lengths.tolist()]
        clip_each(values, context, self.clip)
        kept = accumulate(values, context.state.own, self.momentum, self.nesterov)
        payload = take_largest(kept, blocks, most, context.random, self.masking)
        rows = yield from gather_payloads(payload, max_bytes(blocks, most), "DGC")
        values.zero_()
        for rank, row in enumerate(rows):
            with blamed_on(rank, "DGC"):
                positions, sent = decode_sparse(row, blocks)
            # Weighted first: the sum of P values may be too large for float32.
            values.index_add_(0, positions, sent * (1.0 / context.world_size))

    def _dense(self) -> DenseMomentum:
        return DenseMomentum(self.momentum, self.nesterov, self.clip)


def accumulate(g: Tensor, own: Section, momentum: float, nesterov: bool) -> Accumulators:
    """What follows once this gradient is in it, written where the next round will find it."""
    before = Accumulators(own.flat(VELOCITY), own.flat(ACCUMULATED))
    after = Accumulators(own.next_flat(VELOCITY), own.next_flat(ACCUMULATED))
    write_accumulated(g, before, momentum, nesterov, after)
    return after


@accelerated(cpu="dgc_cpu.accumulate")
def write_accumulated(g: Tensor, before: Accumulators, momentum: float, nesterov: bool, after: Accumulators) -> None:
    if nesterov:
        torch.add(before.u, g, out=after.u).clamp_(-LARGEST, LARGEST).mul_(momentum)
    else:
        torch.mul(before.u, momentum, out=after.u).add_(g).clamp_(-LARGEST, LARGEST)
    torch.add(before.v, after.u, out=after.v)
    if nesterov:
        after.v.add_(g)
    after.v.clamp_(-LARGEST, LARGEST)


def take_largest(kept: Accumulators, blocks: Blocks, most: list[int], random: RandomKeys, masking: bool) -> Tensor:
    """Take the largest of v, at most `most[b]` of block b, out of the kept, and return them as a payload."""
    bounds, keys = blocks.bounds.tolist(), blocks.keys.tolist()
    chosen = [torch.empty(0, dtype=torch.int64, device=kept.v.device)]
    for start, stop, k, key in zip(bounds, bounds[1:], most, keys, strict=False):
        chosen.append(select_largest(kept.v[start:stop], k, random.own ^ key) + start)
    positions = torch.cat(chosen)
    payload = encode_sparse(positions, kept.v[positions], blocks)
    kept.v[positions] = 0.0
    if masking:
        kept.u[positions] = 0.0
    return payload
