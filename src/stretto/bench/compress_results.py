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

Break-even is in `compress_break_even.py`.
"""

from __future__ import annotations

import statistics

import msgspec

from stretto.bench.compress_settings import CompressSettings
from stretto.bench.machine import MachineInfo
from stretto.bench.turns import quartiles


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
