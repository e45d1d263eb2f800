"""What came out of `stretto bench compress`: one row per size and codec, with everything that is computed from the times.

For n values (m = 4n bytes) and P workers, t the median over rounds:

    GB/s            m / t / 10^9, of encoding, decoding, ... and of a copy, which took turns with them
    of a copy       t_copy / t          1 = as fast as copying the values into memory that is there. So do codecs write, from
                    the second round on. New memory a system may have to clear first: then `encode_new` and `decode_new` are
                    slow, as is a copy into new memory (`clone`).
    bits per value  8 * payload / n     payload: what a worker gives to collectives in a round, were it alone
    relative error  |x - C(x)| / |x|    C(x): what a worker gets back in its first round, were it alone
    contraction     1 - |x - C(x)|^2 / |x|^2
    exchange        what one of P workers computes in a round, without the network (`compress_together.py`)

Below which link speed a codec pays for itself: with links of B bytes per second each way, a round takes

    uncompressed   U / B            U = 2 (P-1)/P m       what a ring all-reduce sends per worker, the least there is
    compressed     S / B + t        S = bytes that a worker sends, t = what it computes in the exchange

so the codec pays where B < (U - S) / t, and never if S >= U. Assumed: no overlap, neither of communication with the backward pass
nor of encoding with sending; latency is ignored, so vectors are large; the additions of an all-reduce are free, for both; a
worker computes as fast as it did here: on one core of its own (or a GPU of its own), while nothing else ran. What a codec does to
convergence is not in here: compare at the same loss, see docs/compression.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

from stretto.bench.compress_settings import CompressSettings
from stretto.bench.machine import MachineInfo
from stretto.bench.turns import quartiles

BYTES_PER_MBIT = 1e6 / 8


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one call, one per round, and what follows from them."""

    seconds: list[float]
    median: float
    quartiles: tuple[float, float]
    gb_per_s: float
    of_copy: float


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    relative_error: float
    contraction: float


class CompressRow(msgspec.Struct, frozen=True, kw_only=True):
    """`clone`: a copy into new memory. `calls`: encode, decode, encode_residual and add_decoded, of a codec that has them, to
    memory that is there; on the CPU also encode_new and decode_new, to memory that is new in each call.
    `quality`: by kind of values; empty where a direction is handed out and not the gradient. `break_even_mbit`: None if it never
    pays."""

    size: int
    codec: str
    payload_bytes: int
    bits_per_value: float
    bytes_sent: int
    bytes_uncompressed: int
    copy: Timing
    clone: Timing
    calls: dict[str, Timing]
    exchange: Timing
    quality: dict[str, Quality]
    break_even_mbit: float | None

    def of_copy(self, *calls: str) -> float | None:
        """These calls, one after the other, against a copy; None if there is no such call."""
        if not self.calls.keys() >= set(calls):
            return None
        return self.copy.median / sum(self.calls[call].median for call in calls)

    def round_seconds(self, mbit: float) -> float:
        """A round with this codec at that link speed."""
        return self.bytes_sent / (mbit * BYTES_PER_MBIT) + self.exchange.median

    def speed_up(self, mbit: float) -> float:
        """How many times faster than uncompressed."""
        return self.bytes_uncompressed / (mbit * BYTES_PER_MBIT) / self.round_seconds(mbit)

    def pays(self, mbit: float) -> bool:
        return self.break_even_mbit is not None and mbit < self.break_even_mbit


class CompressReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: CompressSettings
    machine: MachineInfo
    date: str
    rows: list[CompressRow]


def timing(size: int, seconds: list[float], copy_s: float) -> Timing:
    median = statistics.median(seconds)
    return Timing(
        seconds=seconds,
        median=median,
        quartiles=quartiles(seconds),
        gb_per_s=size / median / 1e9,
        of_copy=copy_s / median,
    )


def break_even_mbit(bytes_uncompressed: int, bytes_sent: int, seconds: float) -> float | None:
    """The link speed below which it pays, in Mbit/s; None if it sends no less."""
    saved = bytes_uncompressed - bytes_sent
    return saved / seconds / BYTES_PER_MBIT if saved > 0 else None


def paying(rows: Iterable[CompressRow], mbit: float) -> list[CompressRow]:
    """Those that pay, the fastest first."""
    return sorted((row for row in rows if row.pays(mbit)), key=lambda row: row.round_seconds(mbit))
