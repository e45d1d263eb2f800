"""All-reduce on a two-dimensional torus.

P = X * Y ranks stand in Y rows of X; rank r is in row r div X and column r mod X. The vector is cut into X parts of Y
chunks:

    1. ring reduce-scatter along each row:     the rank in column x owns part x, summed over its row
    2. ring all-reduce of part x along column x: now summed over all rows
    3. ring all-gather along each row

Cost:      2(X+Y-2) alpha + 2 m(P-1)/P beta + m(P-1)/P gamma: the volume of a ring with a latency of about 4 sqrt(P).
Invariant: after 1 part x holds its row's sum at column x, after 2 the sum of all. Additions happen along one path per
           chunk, and all else is copying: same bits everywhere.
Reference: Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", arXiv:1811.05233.
Departure: X and Y are the most nearly square factors of P, X >= Y. A prime P has X = P, Y = 1: a plain ring.
"""

from __future__ import annotations

from math import isqrt

from stretto.collectives.plan import Kind, Operation, Plan
from stretto.collectives.ring_walks import gather_around, reduce_around


def torus(rank: int, size: int) -> Plan:
    """All-reduce along the rows, the columns and again the rows of a nearly square grid of ranks."""
    columns, rows = nearly_square(size)
    return Plan(Kind.ALL_REDUCE, "torus", rank, size, size, tuple(reduce_on_grid(rank, columns, rows)))


def nearly_square(size: int) -> tuple[int, int]:
    """(X, Y) with X * Y = size, X >= Y, and Y as large as can be.

    >>> nearly_square(12), nearly_square(7)
    ((4, 3), (7, 1))
    """
    rows = next(divisor for divisor in range(isqrt(size), 0, -1) if size % divisor == 0)
    return size // rows, rows


def reduce_on_grid(rank: int, columns: int, rows: int) -> list[Operation]:
    """All-reduce of columns * rows chunks among as many ranks, counted row by row."""
    row, column = divmod(rank, columns)
    in_row = [row * columns + x for x in range(columns)]
    in_column = [y * columns + column for y in range(rows)]
    parts = [(x * rows, (x + 1) * rows) for x in range(columns)]
    own_part = [(column * rows + y, column * rows + y + 1) for y in range(rows)]
    vertical, back = columns - 1, columns - 1 + 2 * (rows - 1)  # first rounds of phases 2 and 3
    return [
        *reduce_around(in_row, column, parts, column, first_step=0),
        *reduce_around(in_column, row, own_part, row, first_step=vertical),
        *gather_around(in_column, row, own_part, row, first_step=vertical + rows - 1),
        *gather_around(in_row, column, parts, column, first_step=back),
    ]
