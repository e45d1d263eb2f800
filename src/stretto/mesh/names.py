"""Patterns of the names of modules: as of paths, with dots. `*` and `?` stand for what is within one part of a name, `**` for any
number of parts, none too.

    layers.*        layers.0, but not layers.0.mlp
    **.mlp          mlp, layers.0.mlp, encoder.layers.0.mlp
"""

from __future__ import annotations

from fnmatch import fnmatchcase


def matches(pattern: str, name: str) -> bool:
    return _match(pattern.split("."), name.split(".") if name else [])


def _match(pattern: list[str], parts: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_match(pattern[1:], parts[skipped:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _match(pattern[1:], parts[1:])
