"""Numbers with units, for people: three digits, and the unit in which they are neither tiny nor huge."""

from __future__ import annotations


def seconds(value: float) -> str:
    """`0 ms`, `12.3 µs`, `4.56 ms`, `1.23 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 0.9995:
            return f"{_three(value * factor)} {unit}"
    return f"{_three(value * 1e6)} µs" if value >= 5e-10 else "0 ms"


def size(num_bytes: float) -> str:
    """`0 B`, `1.20 KB`, `112 MB`: units of a thousand."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if num_bytes < 999.5 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{_three(num_bytes)} {unit}"


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _three(value: float) -> str:
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"
