"""The largest of some differences, where one that is not a number counts as the largest. `max` drops it unless it comes first."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def largest(differences: Iterable[float]) -> float:
    return torch.tensor(list(differences), dtype=torch.float64).max().item()
