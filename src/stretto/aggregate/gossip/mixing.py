"""Mixing matrices: what one step of gossip does to the values of all workers.

    x_i <- sum_j W_ij x_j          row i: what worker i takes;   column j: what becomes of the values of worker j

column-stochastic    columns add up to 1: the sum over all workers stays. Push-sum needs no more
doubly stochastic    rows do too: workers that agree go on agreeing, so the mean is where they meet
symmetric            W_ij = W_ji, so i and j give each other as much: CHOCO needs it

How fast differences disappear: over a period of T steps they are multiplied by the product M of its matrices, of which the
eigenvalue 1 belongs to the mean. With rho the largest magnitude of the other eigenvalues of M,

    spectral gap = 1 - rho^(1/T)          1: all are equal after a period,   0: differences stay

Metropolis weights make a symmetric, doubly stochastic W of any undirected graph, and a worker has to know only how many
neighbours its neighbours have: W_ij = 1 / (1 + max(d_i, d_j)), W_ii = what is left.

Reference: Xiao and Boyd, "Fast linear iterations for distributed averaging", Systems and Control Letters 53, 2004.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]
Arc = tuple[int, int]  # sender, receiver
TOLERANCE: Final = 1e-9  # of what a row or a column adds up to


def metropolis(arcs: Iterable[Arc], size: int) -> Weights:
    """Of an undirected graph, whose edges are arcs in both directions."""
    arcs = set(arcs)
    degree = np.zeros(size, dtype=np.int64)
    for sender, _ in arcs:
        degree[sender] += 1
    weights = np.zeros((size, size))
    for sender, receiver in arcs:
        weights[receiver, sender] = 1.0 / (1.0 + max(degree[sender], degree[receiver]))
    return with_rest_kept(weights)


def uniform(arcs: Iterable[Arc], size: int) -> Weights:
    """Of a directed graph: everybody gives the same share to each of its targets, and keeps as much."""
    arcs = set(arcs)
    degree = np.zeros(size, dtype=np.int64)
    for sender, _ in arcs:
        degree[sender] += 1
    weights = np.zeros((size, size))
    for sender, receiver in arcs:
        weights[receiver, sender] = 1.0 / (1.0 + degree[sender])
    return with_rest_kept(weights)


def with_rest_kept(weights: Weights) -> Weights:
    """What a worker gives to nobody it keeps: the diagonal makes every column add up to 1."""
    np.fill_diagonal(weights, 0.0)
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=0))
    return weights


def keeps_the_sum(weights: Weights) -> bool:
    """Whether it is column-stochastic."""
    return bool((weights >= -TOLERANCE).all() and np.abs(weights.sum(axis=0) - 1.0).max() <= TOLERANCE)


def keeps_the_mean(weights: Weights) -> bool:
    """Whether it is doubly stochastic."""
    return keeps_the_sum(weights) and bool(np.abs(weights.sum(axis=1) - 1.0).max() <= TOLERANCE)


def is_symmetric(weights: Weights) -> bool:
    return bool(np.abs(weights - weights.T).max() <= TOLERANCE)


def spectral_gap(period: Sequence[Weights]) -> float:
    """Of the matrices of one period, in their order."""
    product = np.eye(len(period[0]))
    for weights in period:
        product = weights @ product
    if len(product) == 1:
        return 1.0
    others = np.sort(np.abs(np.linalg.eigvals(product)))[:-1]
    # Eigenvalues that are 0 and come several times are found to the root of a float's precision only.
    rho = 0.0 if others[-1] < 1e-6 else float(others[-1])
    return max(0.0, 1.0 - float(rho ** (1.0 / len(period))))


def components(arcs: Iterable[Arc], size: int) -> list[list[int]]:
    """The groups of workers in which everybody hears of everybody, each in order, the one with worker 0 first."""
    arcs = set(arcs)
    onwards, backwards = ([set[int]() for _ in range(size)] for _ in range(2))
    for sender, receiver in arcs:
        onwards[sender].add(receiver)
        backwards[receiver].add(sender)
    found: list[list[int]] = []
    seen: set[int] = set()
    for first in range(size):
        if first not in seen:
            group = _reached(first, onwards) & _reached(first, backwards)
            seen |= group
            found.append(sorted(group))
    return found


def leads(arcs: Iterable[Arc], first: int, last: int, size: int) -> bool:
    """Whether a path leads from one worker to another."""
    onwards = [set[int]() for _ in range(size)]
    for sender, receiver in arcs:
        onwards[sender].add(receiver)
    return last in _reached(first, onwards)


def _reached(first: int, onwards: Sequence[set[int]]) -> set[int]:
    reached, waiting = {first}, [first]
    while waiting:
        news = onwards[waiting.pop()] - reached
        reached |= news
        waiting += news
    return reached
