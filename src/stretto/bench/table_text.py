"""Numbers as people read them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Three significant digits, in the unit that suits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            scaled = value * factor
            digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
            return f"{scaled:.{digits}f} {unit}"
    raise AssertionError("the last unit takes everything")


def spread(quartiles: tuple[float, float]) -> str:
    return f"{seconds(quartiles[0])} - {seconds(quartiles[1])}"


def bandwidth(bytes_per_second: float) -> str:
    """In units of 10^6 bytes per second, as network rates are counted."""
    return f"{bytes_per_second / 1e6:,.0f}" if bytes_per_second >= 1e7 else f"{bytes_per_second / 1e6:.2f}"
