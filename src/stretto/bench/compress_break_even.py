"""Below which link speed a codec pays for itself.

With P workers, n values and links of B bytes per second each way, a round takes

    uncompressed   U / B            U = 2 (P-1)/P 4n      what a ring all-reduce sends per worker, the least there is
    compressed     S / B + t        S = bytes that a worker sends, t = what it computes in the exchange

so the codec pays where B < (U - S) / t, and never if S >= U.

Assumed: no overlap, neither of communication with the backward pass nor of encoding with sending; latency is ignored, so vectors
are large; the additions of an all-reduce are free, for both; a worker computes as fast as it did here: on one core of its own
(or a GPU of its own), while nothing else ran. Where that is not so, ask for a margin: 2 where two workers share a core, or where
half of the communication hides behind the backward pass anyway.

What a codec does to convergence is not in here: compare at the same loss, see docs/compression.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from stretto.bench.compress_results import CompressReport, CompressRow
from stretto.bench.settings import show_size
from stretto.errors import ConfigurationError

BYTES_PER_MBIT = 1e6 / 8


def break_even_mbit(bytes_uncompressed: int, bytes_sent: int, seconds: float) -> float | None:
    """The link speed below which it pays, in Mbit/s; None if it sends no less."""
    saved = bytes_uncompressed - bytes_sent
    return saved / seconds / BYTES_PER_MBIT if saved > 0 else None


def round_seconds(row: CompressRow, mbit: float) -> float:
    """A round with this codec at that link speed."""
    return row.bytes_sent / (mbit * BYTES_PER_MBIT) + row.exchange.median


def speed_up(row: CompressRow, mbit: float) -> float:
    """How many times faster than uncompressed."""
    return row.bytes_uncompressed / (mbit * BYTES_PER_MBIT) / round_seconds(row, mbit)


def pays(row: CompressRow, mbit: float, margin: float = 1.0) -> bool:
    return row.break_even_mbit is not None and mbit * margin < row.break_even_mbit


def paying(rows: Iterable[CompressRow], mbit: float, margin: float = 1.0) -> list[CompressRow]:
    """Those that pay, the fastest first."""
    return sorted((row for row in rows if pays(row, mbit, margin)), key=lambda row: round_seconds(row, mbit))


def recommended(report: CompressReport, mbit: float, size: int | None = None, margin: float = 1.0) -> list[str]:
    """The codecs that pay on links of `mbit` Mbit/s per worker, the fastest first, in the words that they were asked for.

    `size`: bytes of gradients, of those that were measured; the largest unless given. `margin`: how many times faster than that
    the links would have to be before a codec stops paying.

    >>> recommended(report, 100.0)  # doctest: +SKIP
    ['ErrorFeedback(PowerSGD(4))', 'ErrorFeedback(Sign())', 'Int8()', 'BFloat16()']
    """
    for name, value in (("mbit", mbit), ("margin", margin)):
        if not 0 < value < math.inf:
            raise ConfigurationError(
                f"recommended({name}={value!r}): a finite number above 0 is needed, for instance {name}=1.0."
            )
    size = max(report.settings.sizes) if size is None else size
    if size not in report.settings.sizes:
        measured = ", ".join(f"{each} ({show_size(each)})" for each in report.settings.sizes)
        raise ConfigurationError(f"recommended(size={size}): that size was not measured. Write one of these: {measured}.")
    return [row.codec for row in paying((row for row in report.rows if row.size == size), mbit, margin)]
