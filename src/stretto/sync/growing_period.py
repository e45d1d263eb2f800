"""How long workers may go by themselves, from how much they agree when they meet: the rule of `LocalSGD(every, grow_to=...)`.

At an exchange worker i has gone by Delta_i since the one before. Take Delta_i = d + n_i, what all have in common and what is each
one's own (its batches), the n_i independent and of mean square n^2. Then

    S = mean_i |Delta_i|^2          is  |d|^2 + n^2          in expectation
    M = |mean_i Delta_i|^2          is  |d|^2 + n^2 / P
    r = (S - M) / ((P - 1) M)       is  about  (n^2 / P) / (|d|^2 + n^2 / P)

so r is the share of the mean progress, squared, that is chance: 0 where all went the same way, about 1 where they have nothing in
common. While chance is at most a quarter of it replicas agree, and the period doubles, up to `grow_to`; from a half on it is
halved again, down to `every`; between the two it stays. (Longer periods add up more of d than of n, until workers have gone
apart.)

All workers compute r from the same bits: M from the mean that they all hold, S from one number more in the same exchange. So they
decide alike, without another message. (Were they ever to disagree, the next exchange says so: it carries the step.)
Reference: the test of norms of Byrd et al., "Sample size selection in optimization methods for machine learning", Math. Program.
           134, 2012, for batches; here for the period. Departs from it: it may shrink again.
"""

from __future__ import annotations

import math
from typing import Final

AGREE: Final = 0.25
DISAGREE: Final = 0.5


def chance_in(mean_of_squares: float, square_of_mean: float, size: int) -> float:
    """r, the share of the mean progress that is chance; 0 for one worker, and where nobody has moved. Not a number where either
    is not finite."""
    if not math.isfinite(mean_of_squares + square_of_mean):
        return math.nan
    if size == 1 or square_of_mean == 0 == mean_of_squares:
        return 0.0
    if square_of_mean == 0:
        return 1.0
    return max(0.0, mean_of_squares - square_of_mean) / ((size - 1) * square_of_mean)


def next_period(now: int, chance: float, least: int, most: int) -> int:
    """The period after an exchange at which chance was such a share. It stays if that is not a number."""
    if chance <= AGREE:
        return min(2 * now, most)
    if chance >= DISAGREE:
        return max(now // 2, least)
    return now
