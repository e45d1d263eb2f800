"""Replicated: every worker holds the whole model and the whole optimizer state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicated:
    """Memory per worker: parameters, gradients and optimizer state in full."""
