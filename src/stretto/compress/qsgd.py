"""QSGD: every value is rounded up or down to a few levels, by a throw of the dice that keeps its expectation.

    C(x)_i = N sign(x_i) l_i / s,   l_i = floor(r) or floor(r) + 1 with probability r - floor(r),   r = s |x_i| / N

over each bucket of d values, with s = 2^(bits-1) - 1 levels above 0 and N = max |x_i| (`norm="max"`) or |x|_2 (`norm="l2"`).

Bits:       bits * n + 32 per bucket, laid out as in `levels.py`.
Unbiased:   E[C(x)] = x, up to the rounding of float32. E|C(x) - x|^2 <= omega |x|^2 with omega = min(d / (4 s^2), sqrt(d) / s)
            for either norm; a value is off by less than N / s. Of Gaussian values in buckets of 512, omega is 0.04 with "max"
            and 1.6 with "l2" (4 bits): the largest value is smaller than the norm, so levels lie closer.
With error feedback: it adds nothing on average, and residuals may grow without bound unless it is a contraction. So it is
            refused unless omega is below 1; with "max", where the largest value is exact, omega is at the worst
            (sqrt(1 + (d - 1) / s^2) - 1) / 2. For buckets of 512 that is 10.8, 3.3 and 1.2 with 2, 3 and 4 bits, which are
            refused, and 0.40, 0.12, 0.03 and 0.01 with 5 to 8. ("l2": 22.6, 7.5, 2.6 and 0.57, 0.13, 0.03, 0.01.)
Reference: Alistarh et al., "QSGD", NeurIPS 2017 (with "l2"; in practice it takes "max", as does the default here). Departs from
           it: fields of one width, where it codes levels by Elias: those are shorter for few levels and "l2", when most are 0,
           but their length depends on the values and they can only be read one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stretto.compress.checks import check, is_count
from stretto.compress.layout import Blocks, Layout
from stretto.compress.levels import Levels, RandomLevels

Norm = Literal["max", "l2"]


@dataclass(frozen=True, slots=True)
class QSGD(RandomLevels):
    """`bits` per value, sign included; `bucket`: how many values share a norm; `norm`: which."""

    bits: int = 4
    bucket: int = 512
    norm: Norm = "max"

    def __post_init__(self) -> None:
        why = "a value has a sign and at least one bit of level, and no more than 8 bits"
        check(is_count(self.bits, 2) and self.bits <= 8, self, "bits", why, "QSGD(bits=4) or any whole number from 2 to 8")
        check(is_count(self.bucket), self, "bucket", "a bucket has a whole number of values, at least 1", "QSGD(bucket=512)")
        known = self.norm in ("max", "l2")
        check(known, self, "norm", "there is no such norm here", 'norm="max" (less error) or norm="l2" (as published)')

    @property
    def no_contraction(self) -> str | None:  # type: ignore[override]
        levels = self.levels.number
        if self.norm == "max":  # the largest value is exact: one of 1 and d - 1 alike, where they err most for their size
            omega = ((1 + (self.bucket - 1) / levels**2) ** 0.5 - 1) / 2
        else:
            omega = min(self.bucket / (4 * levels**2), self.bucket**0.5 / levels)
        if omega < 1:
            return None
        return (
            f"the square of its error is bounded by {omega:.3g} times that of what it is given, and by less than 1 is needed, so "
            f"what is left over may grow without bound"
        )

    @property
    def levels(self) -> Levels:
        return Levels(self.bits, l2=self.norm == "l2")

    def blocks(self, layout: Layout) -> Blocks:
        return layout.cut(lambda place: self.bucket)
