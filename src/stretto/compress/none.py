"""No compression: gradients travel as they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NoCompression:
    """Every element in its own type: 8 * itemsize bits each. Lossless, and payloads add up, so any all-reduce may carry them."""
