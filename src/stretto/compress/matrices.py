"""The tensors of a bucket as matrices of low rank: their shapes, where they and their factors lie, and where they begin.

A matrix M of a rows and b columns becomes P Q^T, with P of a x r and Q of b x r. All P^T lie one after the other in one vector
(`left`), all Q^T in another (`right`). On a GPU a product for each matrix would be a launch for each; equal matrices at equal
distances, as the blocks of a transformer have them, are one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.compress.layout import Layout
from stretto.compress.orthogonal import Shapes, cut
from stretto.compress.random_numbers import RandomKeys


class Matrix(NamedTuple):
    """A tensor seen as a rows by b columns, approximated with rank r."""

    name: str
    start: int
    r: int
    a: int
    b: int

    def of(self, values: Tensor) -> Tensor:
        return values[self.start : self.start + self.a * self.b].view(self.a, self.b)


class Batch(NamedTuple):
    """Equal matrices at equal distances: one product for all. `starts` and `steps`: in the values, in `left` and in `right`."""

    num: int
    r: int
    a: int
    b: int
    starts: tuple[int, int, int]
    steps: tuple[int, int, int]

    def m(self, values: Tensor) -> Tensor:
        return self._view(values, 0, self.a, self.b)

    def p(self, left: Tensor) -> Tensor:
        return self._view(left, 1, self.r, self.a)

    def q(self, right: Tensor) -> Tensor:
        return self._view(right, 2, self.r, self.b)

    def _view(self, flat: Tensor, which: int, rows: int, columns: int) -> Tensor:
        start = flat.storage_offset() + self.starts[which]
        return flat.as_strided((self.num, rows, columns), (self.steps[which], columns, 1), start)


class Matrices:
    """Those of a bucket, in order, and what is the same in every round. `lefts`, `rights`: the shapes of every P^T and Q^T."""

    def __init__(self, each: Iterable[Matrix]) -> None:
        self.each = tuple(each)
        self.lefts: Shapes = tuple((m.r, m.a) for m in self.each)
        self.rights: Shapes = tuple((m.r, m.b) for m in self.each)
        self.batches = _batches(self.each)
        self._first: Tensor | None = None
        self._lengths: Tensor | None = None

    def first(self, device: torch.device) -> Tensor:
        """Every first Q^T, one after the other; drawn when it is first asked for."""
        if self._first is None:
            self._first = torch.cat(
                [torch.empty(0, dtype=torch.float32, device="cpu"), *(first_q(m).view(-1) for m in self.each)]
            ).to(device)
        return self._first

    def lengths(self, device: torch.device) -> Tensor:
        """b, for every vector of every Q^T."""
        if self._lengths is None:
            self._lengths = torch.tensor([m.b for m in self.each for _ in range(m.r)], dtype=torch.int64, device="cpu").to(device)
        return self._lengths

    def factors(self, left: Tensor, right: Tensor) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """Each matrix with its P^T and its Q^T."""
        return zip(self.each, cut(left, self.lefts), cut(right, self.rights), strict=True)


def _batches(each: Sequence[Matrix]) -> list[Batch]:
    alike: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    p = q = 0
    for m in each:
        alike.setdefault((m.r, m.a, m.b), []).append((m.start, p, q))
        p, q = p + m.r * m.a, q + m.r * m.b
    return [
        Batch(len(run), r, a, b, run[0], _step(run[0], run[1]) if len(run) > 1 else (a * b, r * a, r * b))
        for (r, a, b), starts in alike.items()
        for run in _evenly_spaced(starts)
    ]


def _evenly_spaced(starts: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    runs = [starts[:1]]
    for start in starts[1:]:
        run = runs[-1]
        if len(run) == 1 or _step(run[-1], start) == _step(run[0], run[1]):
            run.append(start)
        else:
            runs.append([start])
    return runs


def _step(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return other[0] - one[0], other[1] - one[1], other[2] - one[2]


def first_q(m: Matrix) -> Tensor:
    """(r, b), normal with variance 1 / b: a function of the parameter's name, by Box and Muller's transformation."""
    half = -(-m.r * m.b // 2)
    uniform = RandomKeys().uniform(Layout.of([(m.name, (2 * half,))]).whole(), key=0).double()
    radius, angle = (-2.0 / m.b * torch.log1p(-uniform[:half])).sqrt(), 2.0 * math.pi * uniform[half:]
    return torch.cat((radius * angle.cos(), radius * angle.sin()))[: m.r * m.b].float().view(m.r, m.b)
