"""All-reduce by recursive halving and doubling.

Rank r holds x_r; P = 2^h, the vector is cut into P chunks. Partners split what they still have to do, then share what
is done:

    halving,  round k = 0..h-1:  rank r and r xor 2^k halve their common range: the lower rank keeps the lower half,
                                 each sends the half it gives up and adds what arrives to the half it keeps
    doubling, round k = h-1..0:  the same partners exchange their finished ranges, which double

Other P are folded first (`fold.py`), and the vector is cut into p chunks, p the largest power of two not above P.

Cost:      2h alpha + 2 m(P-1)/P beta + m(P-1)/P gamma; with a fold (2h+2) alpha + (2(p-1)/p + 2) m beta + (1 + (p-1)/p)
           m gamma, h = log2 p.
Invariant: after halving every chunk is finished at one rank, the one whose bit-reversed number it has; then it is
           copied.
Reference: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; the order of distances and the
           fold are those of MPICH.
"""

from __future__ import annotations

from stretto.collectives.fold import Fold
from stretto.collectives.plan import Kind, Operation, Plan, Recv, Send


def halving_doubling(rank: int, size: int) -> Plan:
    """All-reduce in 2 log2 P exchanges whose ranges halve and then double."""
    fold = Fold(rank, size)
    chunks = fold.core_size
    rounds = chunks.bit_length() - 1
    operations = fold.before(chunks)
    if fold.core_rank is not None:
        operations += _core(fold, fold.core_rank, rounds)
    operations += fold.after(chunks, fold.first_core_step + 2 * rounds)
    return Plan(Kind.ALL_REDUCE, "halving_doubling", rank, size, chunks, tuple(operations))


def _core(fold: Fold, core_rank: int, rounds: int) -> list[Operation]:
    """Halve on the way in; the way out is the way in read backwards, with kept and given ranges exchanged."""
    lo, hi = 0, fold.core_size
    halving: list[Operation] = []
    doubling: list[Operation] = []
    for level in range(rounds):
        partner, middle = fold.world_rank(core_rank ^ (1 << level)), (lo + hi) // 2
        lower, upper = (lo, middle), (middle, hi)
        keep, give = (upper, lower) if core_rank >> level & 1 else (lower, upper)
        step, mirror = fold.first_core_step + level, fold.first_core_step + 2 * rounds - 1 - level
        halving += [Send(step, partner, *give), Recv(step, partner, *keep, add=True)]
        doubling = [Send(mirror, partner, *keep), Recv(mirror, partner, *give), *doubling]
        lo, hi = keep
    return halving + doubling
