"""Synchronous: every step ends with everybody's gradients combined. Large-batch training, exactly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Synchronous:
    """No worker begins step t+1 before step t's gradients are combined. Staleness 0."""
