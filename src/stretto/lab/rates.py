"""Link rates as people write them, and the token bucket each one becomes.

A bucket of `burst` bytes fills at `rate`; a packet leaves when its bytes are in the bucket, and waits in a queue of
`limit` bytes otherwise, beyond which it is dropped:

    burst = 1 ms of the rate, at least 4 full frames      limit = 10 ms of the rate + burst

The kernel hands the bucket packets of up to 64 KB (segmentation offload) and charges each with the headers it will
have on Ethernet. One that is larger than the bucket would be cut into frames of 1514 bytes, which costs CPU and hides
nothing; so senders are told to build packets of at most 9/10 of the burst (`packet_bytes`), where the headers added
by the charge fit.

    goodput of a TCP stream = rate * 1448 / 1514 = 95.6 % of the rate, as on a real 1500-byte network
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stretto.errors import ConfigurationError

FRAME_BYTES = 1514
MAX_PACKET_BYTES = 65536
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g)?bit", re.IGNORECASE)
_MIN_BITS = 64_000
_MAX_BITS = 32_000_000_000  # the kernel's 32-bit field holds 4 GB/s


@dataclass(frozen=True, slots=True)
class Shape:
    """A token bucket: all in bytes and bytes per second."""

    bytes_per_s: int
    burst_bytes: int
    limit_bytes: int
    packet_bytes: int


def parse_rate(text: str | None) -> int | None:
    """Bytes per second of "1gbit", "100mbit", "500kbit"; None stays None: a link that is not shaped.

    >>> parse_rate("1gbit")
    125000000
    """
    if text is None:
        return None
    match = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigurationError(
            f"rate={text!r} cannot be read: a link's rate is a number with its unit, in bits per second.\n"
            f'Write rate="1gbit", "100mbit" or "500kbit", or leave it out for links that are not shaped.'
        )
    bits = float(match[1]) * _UNITS[f"{(match[2] or '').lower()}bit"]
    if not _MIN_BITS <= bits <= _MAX_BITS:
        raise ConfigurationError(
            f"rate={text!r} is outside what the kernel's token bucket can keep (64kbit to 32gbit).\n"
            f'Write for instance rate="10gbit", or leave it out for links that are not shaped.'
        )
    return int(bits / 8)


def shape(bytes_per_s: int) -> Shape:
    """The bucket for a rate; see the module's text for the two constants."""
    burst = max(bytes_per_s // 1000, 4 * FRAME_BYTES)
    return Shape(
        bytes_per_s=bytes_per_s,
        burst_bytes=burst,
        limit_bytes=bytes_per_s // 100 + burst,
        packet_bytes=min(MAX_PACKET_BYTES, burst * 9 // 10),
    )


def describe_rate(bytes_per_s: int | None) -> str:
    """The way back: "1gbit" from 125000000, "unshaped" from None."""
    if bytes_per_s is None:
        return "unshaped"
    bits = bytes_per_s * 8
    for unit in ("gbit", "mbit", "kbit"):
        if bits >= _UNITS[unit]:
            return f"{bits / _UNITS[unit]:g}{unit}"
    return f"{bits}bit"
