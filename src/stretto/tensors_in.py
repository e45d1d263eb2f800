"""The tensors in what a model returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in what a model returns: alone, or in dicts, lists, tuples and dataclasses, which may refer to themselves."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            waiting.extend(reversed(_parts(each)))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if hasattr(value, "__dataclass_fields__"):
        return [getattr(value, name) for name in value.__dataclass_fields__ if hasattr(value, name)]
    return []
