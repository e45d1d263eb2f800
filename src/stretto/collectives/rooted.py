"""Ranks counted from a root: position v of rank r is (r - root) mod P, so that the root stands at 0."""

from __future__ import annotations

from stretto.errors import ConfigurationError


def from_root(root: int, rank: int, size: int) -> tuple[list[int], int]:
    """All ranks in circle order beginning with the root, and where `rank` stands among them."""
    if not 0 <= root < size:
        raise ConfigurationError(
            f"root={root} among {size} ranks: ranks are 0 to {size - 1}, nobody would be the root. Write a root in that range."
        )
    return [(root + position) % size for position in range(size)], (rank - root) % size
